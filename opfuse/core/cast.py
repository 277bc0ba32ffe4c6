"""What an explicit quantize node runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from opfuse.core.context import Value
from opfuse.core.signature import Env
from opfuse.recipes import DelayedScaling
from opfuse.recipes.delayed import DelayedScalingState, touch_backward, touch_forward
from opfuse.tensors.quantizers import Float8Quantizer, Quantizer
from opfuse.tensors.storage import QuantizedStorage
from opfuse.tensors.tensor import QuantizedTensor

if TYPE_CHECKING:
    from opfuse.core.operation import BasicOperation

GRADIENT = "grad_output"
"""The role of what flows back into an op; all other roles are operands of its forward."""


@dataclass(frozen=True, eq=False)
class Cast:
    """Quantizes a tensor for one role of one op, in the dtype in which the op would have read it; nominally it keeps its own.

    quantizer: how, with the planes that will be read. where: the op and the role, for error messages. state: delayed-scaling
    state that scales come from and amaxes go to, or None. group: ranks that share those amaxes.
    """

    role: str
    quantizer: Quantizer
    op: BasicOperation
    env: Env
    where: str
    state: DelayedScalingState | None = None
    group: Any = None

    def __call__(self, x: Value) -> QuantizedStorage:
        """Planes of ``x`` of shape (..., K); what is quantized already passes through."""
        if isinstance(x, QuantizedTensor):
            x = x.storage
        if isinstance(x, QuantizedStorage):
            return x
        quantizer = self.quantizer
        quantizer.check(x.shape, where=self.where)
        if self.state is not None:
            quantizer = self._current(self.state)
        storage = quantizer.quantize(x.to(self.op.compute_dtype(self.env, x)))
        return storage if storage.dtype == x.dtype else replace(storage, dtype=x.dtype)

    def _current(self, state: DelayedScalingState) -> Quantizer:
        """The quantizer over the state's live tensors, which are due for an update from now on."""
        recipe = cast(DelayedScaling, self.env.recipe)
        state.resize(recipe.amax_history_len)
        if self.role == GRADIENT:
            touch_backward(state, recipe, group=self.group)
        elif self.env.grad:
            touch_forward(state, recipe)
        wanted = cast(Float8Quantizer, self.quantizer)
        return state.quantizer(wanted.fp8_dtype).wanting(rowwise=wanted.rowwise, columnwise=wanted.columnwise)
