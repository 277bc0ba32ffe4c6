"""Runs of elementwise ops as one chain, which leaves in each op's context what the op alone would leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from opfuse.core.cast import Cast
from opfuse.core.context import Context, Value, values_of
from opfuse.kernels.casts.encoding import Encoding, WithOriginal, apart
from opfuse.kernels.chains.cast import backward_chain_encoded, forward_chain_encoded
from opfuse.kernels.chains.chain import backward_chain, forward_chain
from opfuse.numerics.chain import Rounding, Stage
from opfuse.tensors.gemm import PendingProduct
from opfuse.tensors.storage import QuantizedStorage

Input = torch.Tensor | PendingProduct
"""What a chain runs over: a tensor, or a product that is yet to be made."""


def run_chain(
    x: Input, contexts: Sequence[Context], cast: Cast | None = None, *, dtype: torch.dtype, rounding: Rounding = "per_op"
) -> Any:
    """The result, in ``dtype``, of the elementwise ops of ``contexts`` over ``x``, in ``dtype`` or fp32 sums; each op's state is
    saved in its context. cast: of the result, which is returned in its place; in one kernel where that can take it over.

    A product that is yet to be made is made together with them, in one kernel where that saves time.
    """
    stages: list[Stage] = []
    shape = x.shape
    for ctx in contexts:
        ctx.io_dtype = ctx.input_dtype = dtype
        ctx.extra_dtypes = [extra.dtype for extra in ctx.extras]
        stages.append(ctx.op.forward_stage(ctx, shape, x.device))
        shape = ctx.op.math.result_shape(shape)
    fused = None if cast is None else cast.fused(shape, dtype, x.device)
    encode = None if fused is None else fused.encoding
    read = [i for i, ctx in enumerate(contexts) if not ctx.op.reads(ctx).isdisjoint(ctx.op.math.inputs)]
    result, saved = _run(x, stages, encode, dtype=dtype, rounding=rounding, keep=read)
    for i, (ctx, stage) in enumerate(zip(contexts, stages)):
        ctx.op.save_stage(ctx, stage, saved.get(i))
    if fused is not None:
        return fused.storage(result)
    return result if cast is None else cast(result)


def _run(x: Input, stages: list[Stage], encode: Encoding | None, **options: Any) -> tuple[Any, dict[int, torch.Tensor]]:
    """The result of stages over ``x`` or, where there is an ``encode``, its planes; and what is kept."""
    if isinstance(x, PendingProduct):
        if (together := x.chained(stages, encode, **options)) is not None:
            encoded, y, saved = together
            return y if encode is None else encoded, saved
        x = x.compute()
    values = values_of(x)  # as a kernel reads it; the caller's tensor is saved
    run = forward_chain if encode is None else partial(forward_chain_encoded, encode=encode)
    result, saved = run(values, stages, **options)
    return result, {i: x if tensor is values else tensor for i, tensor in saved.items()}


def run_chain_backward(
    dy: torch.Tensor, contexts: Sequence[Context], cast: Cast | None = None, *, rounding: Rounding = "per_op"
) -> Any:
    """dx of a chain run by :func:`run_chain`, from the saved state; gradients of operands are left in the contexts.

    cast: of dx, which is returned in its place; in one kernel where that can take it over.
    """
    if cast is not None:
        return run_chain_backward_stored(dy, contexts, cast, stores=False, rounding=rounding)[0]
    stages, saved, _ = _backward_stages(dy, contexts)
    dx, grads = backward_chain(dy, stages, saved, rounding=rounding, dtype=contexts[0].io_dtype)
    _set_grads(contexts, grads)
    return dx.to(contexts[0].input_dtype)


def run_chain_backward_stored(
    dy: torch.Tensor, contexts: Sequence[Context], cast: Cast, *, stores: bool = True, rounding: Rounding = "per_op"
) -> tuple[QuantizedStorage, torch.Tensor | None]:
    """The cast of dx, and dx itself, which the same kernel stores. stores: whether it is wanted; else None."""
    stages, saved, shape = _backward_stages(dy, contexts)
    first = contexts[0]
    fused = cast.fused(shape, first.io_dtype, dy.device) if first.io_dtype == first.input_dtype else None
    if fused is None:
        dx = run_chain_backward(dy, contexts, rounding=rounding)
        return cast(dx), dx if stores else None
    inner, kept = apart(fused.encoding)
    encode = WithOriginal(fused.encoding.layouts, inner) if stores else fused.encoding
    encoded, grads = backward_chain_encoded(dy, stages, saved, encode, rounding=rounding, dtype=first.io_dtype)
    _set_grads(contexts, grads)
    planes = encoded if kept or not stores else encoded[:-1]
    return fused.storage(planes), encoded[-1][0] if stores else None


def _backward_stages(dy: torch.Tensor, contexts: Sequence[Context]) -> tuple[list[Stage], dict[int, torch.Tensor], torch.Size]:
    """The stages of a chain with the gradient ``dy``, the inputs that they saved, and the shape of the chain's input."""
    stages: list[Stage] = []
    saved: dict[int, torch.Tensor] = {}
    shape = dy.shape
    for i, ctx in reversed(tuple(enumerate(contexts))):
        stages.insert(0, ctx.op.backward_stage(ctx, shape, dy.device))
        shape = ctx.op.math.input_shape(shape)
        if (x := ctx.op.saved_input(ctx)) is not None:
            saved[i] = x
        elif ctx.op.math.needs_input and ctx.op.reads(ctx).isdisjoint(ctx.op.math.inputs):
            saved[i] = unread(shape, ctx.io_dtype, dy.device)
    return stages, saved, shape


def remake_chain(x: torch.Tensor, contexts: Sequence[Context], cast: Cast | None) -> Value:
    """The result of a chain whose ops have run, from the first op's input ``x`` and saved operands; cast if ``cast`` is given."""
    stages, shape = [], x.shape
    for ctx in contexts:
        shape = ctx.op.math.result_shape(shape)
        stages.append(ctx.op.backward_stage(ctx, shape, x.device))
    dtype, rounding = contexts[0].io_dtype, contexts[0].env.rounding
    fused = None if cast is None else cast.fused(shape, dtype, x.device)
    if fused is None:
        y, _ = forward_chain(x, stages, rounding=rounding, dtype=dtype, keep=[])
        return y if cast is None else cast(y)
    encoded, _ = forward_chain_encoded(x, stages, fused.encoding, rounding=rounding, dtype=dtype, keep=[])
    return fused.storage(encoded)


def _set_grads(contexts: Sequence[Context], grads: Sequence[Mapping[str, torch.Tensor]]) -> None:
    for ctx, operand_grads in zip(contexts, grads):
        ctx.op.set_operand_grads(ctx, operand_grads)


def unread(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """In place of a value that only unwanted gradients read: one zero, expanded to ``shape``."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)
