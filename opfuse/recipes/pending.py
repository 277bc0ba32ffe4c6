"""Delayed-scaling states that were used since their last update, and the update of all of them at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from opfuse.kernels.casts.delayed import delayed_update
from opfuse.kernels.engine.packed_launch import prepared
from opfuse.recipes.amaxes import reduce_amaxes
from opfuse.recipes.delayed import BoundUpdate, DelayedScalingState, LastUse
from opfuse.torch_private.operations import zero_each

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

UsesByState = Mapping[DelayedScalingState, LastUse]
"""In order of first use, each with its last."""


class Pending:
    """States used since the last update, in order of first use.

    It is part of every step. So it calls nothing for a state, and repeats the last update if states and uses are the same.
    """

    def __init__(self) -> None:
        self._uses: dict[DelayedScalingState, LastUse] = {}
        self._self = weakref.ref(self)

    def add(self, uses: UsesByState) -> None:
        """Count these uses: one call for all casts of a pass."""
        known, mine = self._uses, self._self
        for state in uses:
            if state not in known:
                if state.pending is not None:
                    state.drop_unfinished()
                state.pending = mine
                state.generation += 1
        known.update(uses)

    def __call__(self, completed: bool = True) -> None:
        """Update every state once, or drop what they counted. Ranks of a group must have used the same states in one order."""
        uses, self._uses = self._uses, {}
        if completed:
            _update(uses)
        else:
            for _, states in _grouped({state: state.scale.device for state in uses}):
                zero_each([state.amax for state in states])
        for state in uses:
            if state.pending is not self._self:
                state.drop_unfinished()
            state.pending = None
            state.generation += 1


def _update(uses: UsesByState) -> None:
    states, used = [*uses], [*uses.values()]
    if not states:
        return
    tensors_ids = [state.tensors_id for state in states]
    bound = states[0].bound
    if bound is None or bound.tensors_ids != tensors_ids or bound.uses != used:
        bound = states[0].bound = BoundUpdate(tensors_ids, used, [*_calls(uses)])
    for call in bound.calls:
        call()


def _calls(uses: UsesByState) -> Iterator[Callable[[], object]]:
    """What an update calls: amaxes of all ranks, a launch for each device, notes of rules, after which states have other ids."""
    for (group, _), states in _grouped({s: (use.group, s.scale.device) for s, use in uses.items() if use.shared}):
        yield partial(_reduce, states, [_agreed_name(state, uses[state]) for state in states], group)
    for _, states in _grouped({state: state.scale.device for state in uses}):
        histories, scales, left_out = zip(*((state.amax_history, state.scale, state.left_out) for state in states))
        yield prepared(delayed_update, histories, scales, left_out, [uses[state].rule for state in states])
    for state, use in uses.items():
        if state.rule is not use.rule:
            yield partial(state.updated, use.rule)


_GroupKey = TypeVar("_GroupKey", bound=Hashable)


def _grouped(keys: Mapping[DelayedScalingState, _GroupKey]) -> Iterator[tuple[_GroupKey, list[DelayedScalingState]]]:
    """States by key, both in order of first appearance."""
    groups: dict[_GroupKey, list[DelayedScalingState]] = {}
    for state, key in keys.items():
        groups.setdefault(key, []).append(state)
    yield from groups.items()


def _reduce(states: Sequence[DelayedScalingState], names: Sequence[str], group: ProcessGroup | None) -> None:
    """Slot 0 of every history becomes its maximum over the ranks of the group."""
    reduce_amaxes([state.amax for state in states], names, group, new=not all(state.agreed for state in states))
    for state in states:
        state.agreed = True


def _agreed_name(state: DelayedScalingState, use: LastUse) -> str:
    """What ranks must agree on: the cast, and whether its state was used before, since a loaded state has another scale."""
    return use.name if state.rule is None else f"{use.name}, used before"
