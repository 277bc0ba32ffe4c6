"""A list of the plans that run inside a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from opfuse.compiler.plan import Plan


class ListedPlans(NamedTuple):
    """Plans that ran, in order. trial, alone: as in :func:`listed_plans`."""

    plans: list[Plan]
    trial: bool
    alone: bool = False


_list: ContextVar[ListedPlans | None] = ContextVar("opfuse_listed_plans", default=None)

current_list = _list.get
"""The list of the innermost block, or None."""


@contextmanager
def listed_plans(*, trial: bool = False, alone: bool = False) -> Iterator[list[Plan]]:
    """The plans that run inside the block, in order. trial: make a plan for every call, which no cache keeps.

    alone: make plans without fusions if that changes no bit: not under ``rounding="single"``, nor with fusion functions.
    """
    plans: list[Plan] = []
    reset = _list.set(ListedPlans(plans, trial, alone))
    try:
        yield plans
    finally:
        _list.reset(reset)
