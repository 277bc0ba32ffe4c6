"""Runs of elementwise ops over their contexts: one call of a chain, which leaves in each context what the op alone would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from opfuse.core.cast import Cast
from opfuse.core.context import Context
from opfuse.kernels.chains.cast import backward_chain_encoded, forward_chain_encoded
from opfuse.kernels.chains.chain import backward_chain, forward_chain
from opfuse.numerics.chain import Rounding, Stage
from opfuse.ops.operands import values_of
from opfuse.tensors.storage import QuantizedStorage


def run_chain(x: torch.Tensor, contexts: Sequence[Context], *, dtype: torch.dtype, rounding: Rounding = "per_op") -> torch.Tensor:
    """The elementwise ops of ``contexts`` over ``x`` (in ``dtype`` or fp32 sums), each leaving its saved state; in ``dtype``."""
    stages, _ = _forward_stages(x, contexts, dtype)
    values = values_of(x)
    y, kept = forward_chain(values, stages, rounding=rounding, dtype=dtype, keep=_kept(contexts))
    _save_stages(contexts, stages, {i: x if tensor is values else tensor for i, tensor in kept.items()})
    return y


def run_chain_cast(
    x: torch.Tensor, contexts: Sequence[Context], cast: Cast, *, dtype: torch.dtype, rounding: Rounding = "per_op"
) -> QuantizedStorage:
    """:func:`run_chain` and the cast of its result, in one kernel where the cast can be taken over."""
    stages, shape = _forward_stages(x, contexts, dtype)
    fused = cast.fused(shape, dtype, x.device)
    keep, values = _kept(contexts), values_of(x)
    if fused is None:
        y, kept = forward_chain(values, stages, rounding=rounding, dtype=dtype, keep=keep)
        result = cast(y)
    else:
        encoded, kept = forward_chain_encoded(values, stages, fused.encoding, rounding=rounding, dtype=dtype, keep=keep)
        result = fused.storage(encoded)
    _save_stages(contexts, stages, {i: x if tensor is values else tensor for i, tensor in kept.items()})
    return result


def _forward_stages(x: torch.Tensor, contexts: Sequence[Context], dtype: torch.dtype) -> tuple[list[Stage], torch.Size]:
    """The stages of a chain over ``x``, and the shape of its result."""
    stages: list[Stage] = []
    shape = x.shape
    for ctx in contexts:
        ctx.io_dtype = ctx.input_dtype = dtype
        ctx.extra_dtypes = [extra.dtype for extra in ctx.extras]
        stages.append(ctx.op.forward_stage(ctx, shape, x.device))
        if ctx.op.math.is_gated:
            shape = torch.Size((*shape[:-1], shape[-1] // 2))
    return stages, shape


def _kept(contexts: Sequence[Context]) -> list[int]:
    """The stages whose inputs the backward pass reads."""
    return [i for i, ctx in enumerate(contexts) if not ctx.op.reads(ctx).isdisjoint(ctx.op.math.inputs)]


def _save_stages(contexts: Sequence[Context], stages: Sequence[Stage], kept: Mapping[int, torch.Tensor]) -> None:
    for i, (ctx, stage) in enumerate(zip(contexts, stages)):
        ctx.op.save_stage(ctx, stage, kept.get(i))


def run_chain_backward(dy: torch.Tensor, contexts: Sequence[Context], *, rounding: Rounding = "per_op") -> torch.Tensor:
    """dx of a chain run by :func:`run_chain`, from the saved state; gradients of operands are left in the contexts."""
    stages, saved, _ = _backward_stages(dy, contexts)
    dx, grads = backward_chain(dy, stages, saved, rounding=rounding, dtype=contexts[0].io_dtype)
    _set_grads(contexts, grads)
    return dx.to(contexts[0].input_dtype)


def run_chain_backward_cast(
    dy: torch.Tensor, contexts: Sequence[Context], cast: Cast, *, rounding: Rounding = "per_op"
) -> QuantizedStorage:
    """:func:`run_chain_backward` and the cast of its result, in one kernel where the cast can be taken over."""
    stages, saved, shape = _backward_stages(dy, contexts)
    first = contexts[0]
    fused = cast.fused(shape, first.io_dtype, dy.device) if first.io_dtype == first.input_dtype else None
    if fused is None:
        return cast(run_chain_backward(dy, contexts, rounding=rounding))
    encoded, grads = backward_chain_encoded(dy, stages, saved, fused.encoding, rounding=rounding, dtype=first.io_dtype)
    _set_grads(contexts, grads)
    return fused.storage(encoded)


def _backward_stages(dy: torch.Tensor, contexts: Sequence[Context]) -> tuple[list[Stage], dict[int, torch.Tensor], torch.Size]:
    """The stages of a chain with the gradient ``dy``, the inputs that they saved, and the shape of the chain's input."""
    stages: list[Stage] = []
    saved: dict[int, torch.Tensor] = {}
    shape = dy.shape
    for i, ctx in reversed(tuple(enumerate(contexts))):
        stages.insert(0, ctx.op.backward_stage(ctx, shape, dy.device))
        if ctx.op.math.is_gated:
            shape = torch.Size((*shape[:-1], 2 * shape[-1]))
        if (x := ctx.op.saved_input(ctx)) is not None:
            saved[i] = x
        elif ctx.op.math.needs_input and ctx.op.reads(ctx).isdisjoint(ctx.op.math.inputs):
            saved[i] = unread(shape, ctx.io_dtype, dy.device)
    return stages, saved, shape


def _set_grads(contexts: Sequence[Context], grads: Sequence[Mapping[str, torch.Tensor]]) -> None:
    for ctx, operand_grads in zip(contexts, grads):
        ctx.op.set_operand_grads(ctx, operand_grads)


def unread(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What stands for a value that only unwanted gradients read: one zero, seen under ``shape``."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)
