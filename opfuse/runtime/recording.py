"""Who wants to know which plans run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from opfuse.compiler.plan import Plan


class RecordedPlans(NamedTuple):
    """Plans that ran, in order. trial: each was made for its call, and no cache knows of it.

    alone: without fusions, wherever that changes no bit.
    """

    plans: list[Plan]
    trial: bool
    alone: bool = False


_recording: ContextVar[RecordedPlans | None] = ContextVar("opfuse_recording", default=None)


def recording() -> RecordedPlans | None:
    """The innermost one that is around."""
    return _recording.get()


@contextmanager
def recorded_plans(*, trial: bool = False, alone: bool = False) -> Iterator[list[Plan]]:
    """The plans that run inside the block, in order. trial: make a plan for every call, as if no pipeline had a cache.

    alone: one without fusions, wherever that changes no bit: recipes that round once keep theirs, as do functions of the user's.
    """
    plans: list[Plan] = []
    reset = _recording.set(RecordedPlans(plans, trial, alone))
    try:
        yield plans
    finally:
        _recording.reset(reset)
