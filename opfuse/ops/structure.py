"""Ops that move values and compute nothing: identity, reshape, a second output, an explicit quantization."""

from __future__ import annotations

from typing import Any

import torch

from opfuse.core.context import Context, Value, plain
from opfuse.core.operation import BasicOperation
from opfuse.core.spec import Shape, hyper_parameters
from opfuse.errors import ShapeError, describe, number_of
from opfuse.recipes.recipe import OVERRIDES
from opfuse.tensors.quantizers import IdentityQuantizer, Quantizer


class Identity(BasicOperation):
    """y = x, quantized or not."""

    traits = frozenset(("transparent", "view"))
    saves = ()
    forward_kwargs = ()
    accepts_quantized = True

    def op_forward(self, ctx: Context, input_: Value, **_: Any) -> Value:
        return input_

    def op_backward(self, ctx: Context, grad_output: Value) -> tuple[Value, tuple[()]]:
        return grad_output, ()


class Reshape(BasicOperation):
    """y = x.reshape(shape); one dimension may be -1."""

    traits = frozenset(("view",))
    saves = ()
    forward_kwargs = ()

    @hyper_parameters
    def __init__(self, shape: Shape) -> None:
        super().__init__()

    def op_forward(self, ctx: Context, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        try:
            return input_.reshape(self.shape)
        except RuntimeError as error:
            wanted = f"{number_of(input_.numel(), 'element')} to fit {self.shape}"
            cure = "name a shape of as many elements, or leave one dimension to be found: -1"
            raise ShapeError(describe(f"{self.label} input", wanted=wanted, got=tuple(input_.shape), cure=cure)) from error

    def op_backward(self, ctx: Context, grad_output: torch.Tensor) -> tuple[torch.Tensor, tuple[()]]:
        return grad_output.reshape(ctx.input_shape), ()


class MakeExtraOutput(BasicOperation):
    """y = x, quantized or not, and x once more as an extra output; the two gradients are summed.

    in_place: the sum may be accumulated where the extra gradient lies, which lets it ride in the product of the op that
    follows. The caller's tensors are never written.

    Both outputs lie in the memory of x. Where gradients are recorded, autograd lets nobody change either in place; clone it.
    """

    traits = frozenset(("transparent",))
    saves = ()
    forward_kwargs = ()
    accepts_quantized = True
    num_extra_outputs = 1

    @hyper_parameters
    def __init__(self, in_place: bool = False) -> None:
        super().__init__()

    def op_forward(self, ctx: Context, input_: Value, **_: Any) -> tuple[Value, torch.Tensor]:
        return input_, plain(input_)

    def op_backward(self, ctx: Context, grad_output: Value | None) -> tuple[torch.Tensor, tuple[()]]:
        parts = [plain(grad) for grad in (grad_output, *ctx.grad_extras) if grad is not None]
        return parts[0] if len(parts) == 1 else parts[0] + parts[1], ()


class Quantize(Identity):
    """Quantizes the activation (forward), its gradient (backward), or both; without a recipe it does nothing.

    A matrix product right after it multiplies this cast and makes none of its own, so all that the product reads is made here:
    columnwise data or the original, too. The same holds for the gradient of a product right before it. A product in groups of
    rows makes its own casts. Other ops compute on the dequantized values, and a product after them casts their result; only
    Identity and MakeExtraOutput pass quantized data on. Under a backward override gradients are not quantized.
    """

    traits = Identity.traits
    saves = ()
    is_cast = True
    accepts_quantized = True
    asks_casts = True
    forward_kwargs = ()

    @hyper_parameters
    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()

    def op_forward(self, ctx: Context, input_: Value, **_: Any) -> Value:
        return ctx.cast("input", input_)

    def op_backward(self, ctx: Context, grad_output: Value) -> tuple[Value, tuple[()]]:
        return ctx.cast("grad_output", grad_output), ()

    def quantized_roles(self) -> tuple[str, ...]:
        casts = (("input", self.spec.forward), ("grad_output", self.spec.backward))
        return tuple(role for role, wanted in casts if wanted)

    def narrow_quantizer(
        self, quantizer: Quantizer, role: str, override: str | None, backward_gemms: tuple[str, ...]
    ) -> Quantizer | None:
        if role == "grad_output" and OVERRIDES[override].backward != "quantized":
            return None
        if isinstance(quantizer, IdentityQuantizer) and quantizer.dtype is None:
            return None
        return quantizer.wanting(rowwise=True, columnwise=False)
