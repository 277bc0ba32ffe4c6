"""What an explicit quantize node runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from opfuse.core.context import Value
from opfuse.recipes import DelayedScaling, Recipe
from opfuse.recipes.delayed import DelayedScalingState, touch_backward, touch_forward
from opfuse.tensors.quantizers import Float8Quantizer, Quantizer
from opfuse.tensors.storage import QuantizedStorage
from opfuse.tensors.tensor import QuantizedTensor


@dataclass(frozen=True, eq=False)
class Cast:
    """Quantizes a tensor for one role of one op.

    quantizer: how, with the planes that will be read. state: delayed-scaling state that scales come from and amaxes go to,
    or None. group: ranks that share those amaxes. where: the op, for error messages.
    """

    role: str
    quantizer: Quantizer
    where: str
    recipe: Recipe
    state: DelayedScalingState | None = None
    group: Any = None

    def __call__(self, x: Value) -> QuantizedStorage:
        """Planes of ``x`` of shape (..., K); what is quantized already passes through."""
        if isinstance(x, QuantizedTensor):
            x = x.storage
        if isinstance(x, QuantizedStorage):
            return x
        quantizer = self.quantizer
        quantizer.check(x.shape, where=f"{self.where} {self.role}")
        if self.state is not None:
            quantizer = self._current(self.state)
        return quantizer.quantize(x)

    def _current(self, state: DelayedScalingState) -> Quantizer:
        """The quantizer over the state's live tensors, which are due for an update from now on."""
        recipe = cast(DelayedScaling, self.recipe)
        state.resize(recipe.amax_history_len)
        if self.role == "grad_output":
            touch_backward(state, recipe, group=self.group)
        else:
            touch_forward(state, recipe)
        wanted = cast(Float8Quantizer, self.quantizer)
        return state.quantizer(wanted.fp8_dtype).wanting(rowwise=wanted.rowwise, columnwise=wanted.columnwise)
