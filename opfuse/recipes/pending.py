"""Delayed-scaling states that were used since their last update, and the update of all of them at once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from opfuse.kernels.casts.delayed import delayed_update
from opfuse.numerics.delayed import UpdateRule
from opfuse.recipes.amaxes import in_distributed_run, reduce_amaxes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from opfuse.recipes.delayed import DelayedScalingState


@dataclass(frozen=True, eq=False)
class Use:
    """How a state was last used: what its update needs."""

    rule: UpdateRule
    group: ProcessGroup | None
    shared: bool
    name: str


class Pending:
    """States used since the last update, in order of first use."""

    def __init__(self) -> None:
        self._uses: dict[DelayedScalingState, Use] = {}

    def add(self, state: DelayedScalingState, use: Use) -> None:
        if state not in self._uses:
            state.counts_for(self)
        self._uses[state] = use

    def __call__(self, completed: bool = True) -> None:
        """Update every state once, or drop what they counted. Ranks of a group must have used the same states in one order."""
        with torch.no_grad():
            if completed:
                _reduce(self._uses)
            for _, states in _grouped({state: state.scale.device for state in self._uses}):
                if completed:
                    _update(states, [self._uses[state].rule for state in states])
                else:
                    torch._foreach_zero_([state.amax for state in states])
        for state in self._uses:
            state.counts_for(None)
        self._uses.clear()


def _update(states: list[DelayedScalingState], rules: list[UpdateRule]) -> None:
    histories, scales = [state.amax_history for state in states], [state.scale for state in states]
    delayed_update(histories, scales, [state.left_out for state in states], rules)
    for state, rule in zip(states, rules):
        state.rule = rule


_Key = TypeVar("_Key", bound=Hashable)


def _grouped(keys: Mapping[DelayedScalingState, _Key]) -> Iterator[tuple[_Key, list[DelayedScalingState]]]:
    """States by key, both in order of first appearance."""
    groups: dict[_Key, list[DelayedScalingState]] = {}
    for state, key in keys.items():
        groups.setdefault(key, []).append(state)
    yield from groups.items()


def _reduce(uses: Mapping[DelayedScalingState, Use]) -> None:
    """Slot 0 of every history becomes its maximum over the ranks of its group."""
    if not in_distributed_run():
        return
    shared = {state: (use.group, state.scale.device) for state, use in uses.items() if use.shared}
    for (group, _), states in _grouped(shared):
        reduce_amaxes([state.amax for state in states], [uses[state].name for state in states], group)
