"""What a file expects of its rules, counted on the plan of a training call on a CPU: nothing is computed, whatever the sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from opfuse.compiler.cover import Outcome
from opfuse.compiler.registry import RuleSet
from opfuse.config.findings import Problem, sentence
from opfuse.config.operations import PipelineEntry
from opfuse.config.order import RuleChange
from opfuse.errors import OpfuseError, number_of
from opfuse.recipes import Recipe
from opfuse.recipes.autocast import under
from opfuse.runtime.fuser import planned_on


class PlannedCall(NamedTuple):
    """The training call that is planned. columns: None if they are unknown."""

    entries: Sequence[PipelineEntry]
    rules: RuleSet
    recipe: Recipe | None
    dtype: torch.dtype
    rows: int
    columns: int | None


def unmet(changes: Sequence[RuleChange], call: PlannedCall) -> Iterator[Problem]:
    """A problem for every number that is not as an entry expects."""
    expecting = [(i, change) for i, change in enumerate(changes) if change.expect is not None]
    if not expecting:
        return
    outcomes = _outcomes(call)
    for i, change in expecting:
        place = ("fusions", "rules", i, "expect")
        if isinstance(outcomes, Problem):
            yield Problem(outcomes.code, outcomes.message, outcomes.help, place)
            continue
        own = [outcome for outcome in outcomes if outcome.rule == change.name]
        counts = Counter(outcome.status for outcome in own)
        reasons = [f"{' '.join(outcome.ops)}: {outcome.reason}" for outcome in own if outcome.reason]
        help = "; ".join([*reasons[:1], f"`opfuse explain --why-not {change.name}` says why, place by place"])
        for status, wanted in (change.expect or {}).items():
            if (got := counts[status]) != wanted:
                others = ", ".join(f"{n} {other}" for other, n in counts.items())
                message = (
                    f"rule {change.name!r} is {status} {number_of(got, 'time')}, not {wanted}: {others or 'it has no outcome'}"
                )
                yield Problem("not-as-expected", message, help, (*place, status))


def _outcomes(call: PlannedCall) -> Sequence[Outcome] | Problem:
    """What became of each rule at each place; a Problem where there is no plan to count on."""
    if call.columns is None:
        return Problem("not-countable", "nothing tells the columns of the input", "add a data section")
    x = torch.empty(call.rows, call.columns, dtype=call.dtype, device="meta", requires_grad=True)
    try:
        ops = [entry.build(dtype=call.dtype, device="meta") for entry in call.entries]
        with under(call.recipe):
            plan = planned_on("cpu", ops, x, call.rules)
    except OpfuseError as error:
        return Problem("not-countable", *sentence(str(error)))
    return plan.outcomes
