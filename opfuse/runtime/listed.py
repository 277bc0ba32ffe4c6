"""Who wants to know which plans run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from opfuse.compiler.plan import Plan


class ListedPlans(NamedTuple):
    """Plans that ran, in order. trial: each was made for its call, and no cache knows of it.

    alone: without fusions, wherever that changes no bit.
    """

    plans: list[Plan]
    trial: bool
    alone: bool = False


_list: ContextVar[ListedPlans | None] = ContextVar("opfuse_listed_plans", default=None)

current_list = _list.get
"""The innermost one that is around, or None."""


@contextmanager
def listed_plans(*, trial: bool = False, alone: bool = False) -> Iterator[list[Plan]]:
    """The plans that run inside the block, in order. trial: make a plan for every call, as if no pipeline had a cache.

    alone: one without fusions, wherever that changes no bit: recipes that round once keep theirs, as do functions of the user's.
    """
    plans: list[Plan] = []
    reset = _list.set(ListedPlans(plans, trial, alone))
    try:
        yield plans
    finally:
        _list.reset(reset)
