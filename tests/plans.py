"""The plans that calls use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opfuse.compiler.plan import Plan
from opfuse.events import PlanUsed, subscribed


@contextmanager
def plans_used() -> Iterator[list[Plan]]:
    """The plans that calls inside the block run under, in order."""
    plans: list[Plan] = []
    with subscribed(lambda used: plans.append(used.plan), PlanUsed):
        yield plans
