"""Parameters stored under delayed scaling: no quantize node casts them, but writes do, with the op's own states."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from opfuse.recipes import Recipe
from opfuse.recipes.delayed import DelayedScalingState, is_recomputing, touch_forward
from opfuse.tensors.quantizers import Float8Quantizer, GroupedQuantizer, Quantizer
from opfuse.tensors.tensor import QuantizedTensor

if TYPE_CHECKING:
    from opfuse.core.operation import BasicOperation


def touch_stored(op: BasicOperation, role: str, recipe: Recipe) -> None:
    """Have the states of a parameter updated as the cast of a forward pass that records gradients would.

    Nothing where it was stored otherwise, with other elements than the recipe's, and in a recomputation.
    """
    asked = op.quantizer_role(role)
    delayed = recipe.delayed_scaling(asked)
    if delayed is None or is_recomputing():
        return
    stored = op.parameter(role)
    members = _members(stored.quantizer) if isinstance(stored, QuantizedTensor) else ()
    if any(member.fp8_dtype != delayed.fp8_dtype(asked) for member in members):
        return
    for state in follow(op, role, length=delayed.amax_history_len):
        touch_forward(state, delayed)


def follow(op: BasicOperation, role: str, *, length: int | None = None) -> tuple[DelayedScalingState, ...]:
    """The states that writes to a parameter cast with; none where it is not stored under delayed scaling.

    A state gets other tensors when it moves, loads, or remembers another ``length`` of steps: the parameter's quantizer is
    from now on over those that the state has.
    """
    stored = op.parameter(role)
    if not isinstance(stored, QuantizedTensor):
        return ()
    quantizer = stored.quantizer
    members = _members(quantizer)
    states = tuple(state for slot in op.state_slots(role) if (state := op.quantizer_states.find(slot)) is not None)
    if not members or len(members) != len(states):
        return ()
    for state in states:
        state.resize(length or len(state.amax_history))
        state.to(stored.device)
    live = tuple(
        state.live_quantizer(member.fp8_dtype, rowwise=member.rowwise, columnwise=member.columnwise)
        for member, state in zip(members, states)
    )
    if any(old.scale is not new.scale or old.amax is not new.amax for old, new in zip(members, live)):
        stored.quantizer = replace(quantizer, quantizers=live) if isinstance(quantizer, GroupedQuantizer) else live[0]
    return states


def _members(quantizer: Quantizer | None) -> tuple[Float8Quantizer, ...]:
    """The quantizers that cast with a delayed scale, one for each group; none unless all do."""
    members = quantizer.quantizers if isinstance(quantizer, GroupedQuantizer) else (quantizer,)
    found = tuple(member for member in members if isinstance(member, Float8Quantizer))
    return found if len(found) == len(members) else ()
