"""Delayed-scaling states that were used since their last update, and the update of all of them at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from opfuse.kernels.casts.delayed import delayed_update
from opfuse.numerics.delayed import UpdateRule
from opfuse.program.prepared import prepared
from opfuse.recipes.amaxes import reduce_amaxes
from opfuse.recipes.delayed import DelayedScalingState, PreparedUpdate
from opfuse.tensors.quantizers.ranks import in_distributed_run

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class LastUse:
    """How a state was last used: what its update needs."""

    rule: UpdateRule
    group: ProcessGroup | None
    shared: bool
    name: str


UsesByState = Mapping[DelayedScalingState, LastUse]
"""In order of first use, each with its last."""


class Pending:
    """States used since the last update, in order of first use."""

    def __init__(self) -> None:
        self._uses: dict[DelayedScalingState, LastUse] = {}
        self._self = weakref.ref(self)

    def add(self, uses: UsesByState) -> None:
        """Count these uses. One call for all casts of a pass: it is part of every step."""
        for state in uses:
            if state not in self._uses:
                state.counts_for(self._self)
        self._uses.update(uses)

    def __call__(self, completed: bool = True) -> None:
        """Update every state once, or drop what they counted. Ranks of a group must have used the same states in one order."""
        uses, self._uses = self._uses, {}
        if completed:
            _reduce(uses)
            _update(list(uses), [use.rule for use in uses.values()])
        else:
            for _, states in _grouped({state: state.scale.device for state in uses}):
                torch._foreach_zero_([state.amax for state in states])
        for state in uses:
            state.counts_for(None)


def _update(states: list[DelayedScalingState], rules: list[UpdateRule]) -> None:
    if not states:
        return
    first, looks = states[0], [state.look for state in states]
    batch = first.batch
    if batch is None or batch.looks != looks or batch.states != states or batch.rules != rules:
        batch = first.batch = PreparedUpdate(states, looks, rules, [*_prepared(states, rules)])
    for update in batch.updates:
        update()
    for state, rule in zip(states, rules):
        if state.rule is not rule:
            state.updated(rule)


def _prepared(states: list[DelayedScalingState], rules: list[UpdateRule]) -> Iterator[Callable[[], object]]:
    """The update of the states of each device."""
    rule_of = dict(zip(states, rules))
    for _, there in _grouped({state: state.scale.device for state in states}):
        histories, scales, left_out = zip(*((state.amax_history, state.scale, state.left_out) for state in there))
        yield prepared(delayed_update, histories, scales, left_out, [rule_of[state] for state in there])


_LookOfStates = TypeVar("_LookOfStates", bound=Hashable)


def _grouped(keys: Mapping[DelayedScalingState, _LookOfStates]) -> Iterator[tuple[_LookOfStates, list[DelayedScalingState]]]:
    """States by key, both in order of first appearance."""
    groups: dict[_LookOfStates, list[DelayedScalingState]] = {}
    for state, key in keys.items():
        groups.setdefault(key, []).append(state)
    yield from groups.items()


def _reduce(uses: UsesByState) -> None:
    """Slot 0 of every history becomes its maximum over the ranks of its group."""
    if not in_distributed_run():
        return
    shared = {state: (use.group, state.scale.device) for state, use in uses.items() if use.shared}
    for (group, _), states in _grouped(shared):
        names = [_told(state, uses[state]) for state in states]
        reduce_amaxes([state.amax for state in states], names, group, new=not all(state.agreed for state in states))
        for state in states:
            state.agreed = True


def _told(state: DelayedScalingState, use: LastUse) -> str:
    """What ranks must agree on: the cast, and whether its state was used before, since a loaded state has another scale."""
    return use.name if state.rule is None else f"{use.name}, used before"
