"""Backward rules. Patterns are written in forward order, as everywhere; gradients flow through them from right to left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from opfuse.compiler.rules import fusion, is_, is_not, maybe, one_of, run
from opfuse.core.context import Context, Value
from opfuse.numerics.pointwise import compute_dtype
from opfuse.ops.pointwise import run_chain_backward, run_chain_backward_stored


def backward_activation_bias(dy: torch.Tensor, *, quantize: Context | None, chain: Sequence[Context]) -> Any:
    """Activation derivatives, bias gradients and the cast of the gradient for the products of the linear layer below."""
    return run_chain_backward(dy, chain, None if quantize is None else quantize.op, rounding=chain[0].env.rounding)


def backward_groups(dy: torch.Tensor, *, quantize: Context, chain: Sequence[Context]) -> Any:
    """Derivatives and the cast of each group of the gradient's rows, in one kernel; it stores the gradient itself if read."""
    reader, made = cast(Context, quantize.reader), quantize.op.by(*quantize.extras)
    stores = reader.op.reads_gradient(reader.needs)
    grad, reader.grad_output = run_chain_backward_stored(dy, chain, made, stores=stores, rounding=chain[0].env.rounding)
    return grad


def backward_elementwise(dy: torch.Tensor, *, chain: Sequence[Context]) -> torch.Tensor:
    """Derivatives of a run of elementwise ops, where no product reads a quantized gradient."""
    dx: torch.Tensor = run_chain_backward(dy, chain, rounding=chain[0].env.rounding)
    return dx


def backward_linear_add(dy: Value, *, extra: Context, basic_linear: Context) -> torch.Tensor | None:
    """dx = dy W, summed into the gradient of the extra output."""
    d_extra = extra.grad_extras[0]
    single = basic_linear.env.rounding == "single" and d_extra is not None
    dx: torch.Tensor | None = basic_linear.op.input_gradient(
        basic_linear, dy, out_dtype=compute_dtype(dy.dtype) if single else None
    )
    basic_linear.set_grads(params=(basic_linear.op.weight_gradient(basic_linear, dy),))
    if dx is None or d_extra is None:
        return dx if d_extra is None else d_extra
    return (dx + d_extra).to(d_extra.dtype)


def backward_linear_scale(
    dy: torch.Tensor, *, basic_linear: Context, quantize: Context | None, scale: Context
) -> torch.Tensor | None:
    """dx and dW of c x W^T. Rounded once, c multiplies the sums of both products; else it multiplies dy, as the op does."""
    single = basic_linear.env.rounding == "single"
    if single:
        grad: Value = dy if quantize is None else quantize.op(dy)
    else:
        grad = run_chain_backward(dy, [scale], None if quantize is None else quantize.op)
    factor = scale.spec.scale if single else None
    dx: torch.Tensor | None = basic_linear.op.input_gradient(
        basic_linear, grad, out_dtype=compute_dtype(dy.dtype) if single else None
    )
    basic_linear.set_grads(params=(basic_linear.op.weight_gradient(basic_linear, grad, scale=factor),))
    return dx if dx is None or factor is None else (dx * factor).to(basic_linear.input_dtype)


def backward_add_rms_norm(dy: torch.Tensor, *, extra: Context, norm: Context) -> torch.Tensor:
    """dx of the normalisation, plus the gradient of the extra output."""
    d_extra = extra.grad_extras[0]
    dx: torch.Tensor
    if d_extra is None:
        dx, params = norm.op.op_backward(norm, dy)
    else:
        dx, params = norm.op.backward_add(norm, dy, d_extra, rounding=norm.env.rounding)
    norm.set_grads(params=params)
    return dx


BACKWARD_LINEAR_ADD = fusion(
    "backward_linear_add",
    {"extra": "make_extra_output", "basic_linear": "basic_linear"},
    when=(is_("extra.in_place", True),),
    backward=backward_linear_add,
)

BACKWARD_LINEAR_SCALE = fusion(
    "backward_linear_scale",
    {"basic_linear": "basic_linear", "quantize": maybe("quantize"), "scale": "constant_scale"},
    backward=backward_linear_scale,
)

BACKWARD_ADD_RMS_NORM = fusion(
    "backward_add_rms_norm",
    {"extra": "make_extra_output", "norm": "rms_norm"},
    when=(is_("extra.in_place", False),),
    backward=backward_add_rms_norm,
)

BACKWARD_GROUPS = fusion(
    "backward_groups",
    {"quantize": "quantize_groups", "chain": run("elementwise", low=1)},
    when=(one_of("quantize.ragged.gradients.family", "block"),),
    backward=backward_groups,
)

BACKWARD_ACTIVATION_BIAS = fusion(
    "backward_activation_bias",
    {"quantize": maybe("builtin_cast"), "chain": run("elementwise", low=1)},
    when=(is_not("env.recipe", None), is_("env.recipe.backward_override", None)),
    backward=backward_activation_bias,
)

BACKWARD_ELEMENTWISE = fusion(
    "backward_elementwise",
    {"chain": run("elementwise", low=2)},
    backward=backward_elementwise,
)
