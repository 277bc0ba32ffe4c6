"""What is recorded of a plan, as tests ask for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from opfuse.compiler.plan import Plan
from opfuse.core.cast import Cast
from opfuse.runtime.replay.replayable import Recorded


def plans_of(model) -> list[Plan]:
    """Those of the pipelines of a Sequential."""
    return [plan for run in model.runs() if hasattr(run, "cache") for _, plan in run.cache.items()]


def forwards(plans: Iterable[Plan]) -> list[Recorded]:
    """Forward passes of segments."""
    return _of(plans, int)


def stretches(plans: Iterable[Plan]) -> list[Recorded]:
    """Parts of backward passes behind, or around, code of the user's own."""
    return _of(plans, tuple)


def casts(plans: Iterable[Plan]) -> list[Recorded]:
    """Casts beside code of the user's own."""
    return _of(plans, Cast)


def under(plan: Plan, key: Any) -> list[Recorded]:
    """What is kept under a key of a plan."""
    return [made for _, made in plan.programs[key].recorded()] if key in plan.programs else []


def backwards(*recorded: Recorded) -> list[Recorded]:
    """The backward passes behind forward passes, also those that take what was saved in blocks."""
    return [made for each in recorded for behind in each.behind for _, made in behind.recorded()]


def _of(plans: Iterable[Plan], kind: type) -> list[Recorded]:
    return [made for plan in plans for key in plan.programs if isinstance(key, kind) for made in under(plan, key)]
