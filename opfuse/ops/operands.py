"""How linear layers read the operands of their products, and what they save of them for the backward pass."""

from __future__ import annotations

from typing import Any

import torch

from opfuse.core.context import Context, Value
from opfuse.errors import MissingPlaneError, describe, problem_of
from opfuse.formats import ROWWISE
from opfuse.recipes.policy import saved_planes
from opfuse.tensors.storage import QuantizedStorage
from opfuse.tensors.tensor import QuantizedTensor


def values_of(x: torch.Tensor) -> torch.Tensor:
    """An input as kernels take it: a quantized tensor is dequantized; the caller saves it as it came."""
    return x.detach().dequantize() if isinstance(x, QuantizedTensor) else x


def multiplied(weight: Any, other: Value) -> Value:
    """A weight as a product reads it: a quantized parameter gives its planes if ``other`` is quantized, else its values."""
    if not isinstance(weight, QuantizedTensor):
        return weight  # type: ignore[no-any-return]
    return weight.held if isinstance(other, QuantizedStorage) else weight.dequantize()


def in_dtype(operand: Value, dtype: torch.dtype) -> Value:
    """A plain operand in ``dtype``; a quantized one as it is."""
    return operand if isinstance(operand, QuantizedStorage) else operand.to(dtype)


def saved_operand(ctx: Context, operand: Any, role: str) -> Any:
    """What the backward products read of an operand: a quantized parameter itself, a plane of its cast, or the tensor.

    A parameter is saved itself so that autograd notices a change before the backward pass. An operand that the backward pass
    makes anew is saved as the parameter that it is made of, or as None. MissingPlaneError for an operand that was quantized
    elsewhere without the plane that is read.
    """
    if role in ctx.rematerialized:
        return ctx.op.parameter(role) if role in ctx.op.parameter_names else None
    if not isinstance(operand, QuantizedStorage):
        return operand
    try:
        return saved_planes(operand, ctx.env.backward_override)
    except MissingPlaneError as error:
        cure = f"pass {role}.dequantize(), or keep both ops in one Sequential, whose Quantize makes what the product reads"
        raise _missing(ctx, role, "data for both the forward and the backward products", error, cure) from error


def check_forward(ctx: Context, operand: Value, role: str) -> None:
    """MissingPlaneError unless the forward product can read the operand."""
    if not isinstance(operand, QuantizedStorage):
        return
    try:
        operand.plane(ROWWISE)
    except MissingPlaneError as error:
        cure = f"quantize it with rowwise=True, or pass {role}.dequantize()"
        raise _missing(ctx, role, "rowwise data, which the forward product reads", error, cure) from error


def _missing(ctx: Context, role: str, wanted: str, error: MissingPlaneError, cure: str) -> MissingPlaneError:
    got = f"one that was quantized elsewhere: {problem_of(error)}"
    return MissingPlaneError(describe(f"{ctx.op.label} {role}", wanted=wanted, got=got, cure=cure))
