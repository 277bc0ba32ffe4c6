"""Chains whose result is cast in the same kernel, forward and backward.

The kernel stores the result itself only if asked to, as for a backward pass in high precision. What it cannot take runs as two
kernels, the chain and the cast. If the scale depends on the amax of the whole result, there are two kernels in any case. The
first finds the amax; the second casts the stored result or, if that takes fewer bytes, computes the result again and casts it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from opfuse.kernels.casts.encoding import EncodedArrays, Encoding, Measured, apart, original
from opfuse.kernels.casts.room import room_for
from opfuse.kernels.chains import trials
from opfuse.kernels.chains.call import ChainCall, Tensors, backward_call, forward_call
from opfuse.kernels.chains.chain import backward_chain, backward_chain_amax, forward_chain, forward_chain_amax, run
from opfuse.kernels.chains.tiles import CASTS
from opfuse.kernels.engine.registry import Launcher, Tolerance, kernel
from opfuse.numerics.chain import Rounding, Stage

ForwardResult = tuple[list[EncodedArrays], Tensor | None, dict[int, Tensor]]
"""The planes of y, y if it was asked for, and what is kept."""

BackwardResult = tuple[list[EncodedArrays], Tensor | None, Tensors]
"""The planes of dx, dx if it was asked for, and the operand gradients of each stage."""


def forward_then_cast(
    x: Tensor,
    stages: Sequence[Stage],
    encode: Encoding,
    *,
    rounding: Rounding = "per_op",
    dtype: torch.dtype | None = None,
    keep: Collection[int] = (),
    stores: bool = False,
) -> ForwardResult:
    """:func:`forward_chain`, and the cast of its result."""
    y, kept = forward_chain(x, stages, rounding=rounding, dtype=dtype, keep=keep)
    return encode(y), y if stores else None, kept


def backward_then_cast(
    dy: Tensor,
    stages: Sequence[Stage],
    saved_inputs: Mapping[int, Tensor],
    encode: Encoding,
    *,
    rounding: Rounding = "per_op",
    dtype: torch.dtype | None = None,
    stores: bool = False,
) -> BackwardResult:
    """:func:`backward_chain`, and the cast of its dx."""
    dx, grads = backward_chain(dy, stages, saved_inputs, rounding=rounding, dtype=dtype)
    return encode(dx), dx if stores else None, grads


@kernel("chain_tile.cu", reference=forward_then_cast, tolerance=Tolerance(ulp=1), trials=trials.cast_forward)
def forward_chain_cast(
    launch: Launcher,
    x: Tensor,
    stages: Sequence[Stage],
    encode: Encoding,
    *,
    rounding: Rounding = "per_op",
    dtype: torch.dtype | None = None,
    keep: Collection[int] = (),
    stores: bool = False,
) -> ForwardResult:
    """Reads ``x`` and each operand once; twice if the scale depends on the amax of the whole result, and that is not stored."""
    if isinstance(encode, Measured):
        return _forward_measured(launch, x, stages, encode, rounding=rounding, dtype=dtype, keep=keep, stores=stores)
    call = forward_call(x, stages, rounding, dtype, keep, stores=stores) if type(encode) in CASTS else None
    planes = None if call is None else _run_cast(launch, call, encode)
    if call is None or planes is None:
        return forward_then_cast(x, stages, encode, rounding=rounding, dtype=dtype, keep=keep, stores=stores)
    return planes, call.result, call.kept


@kernel("chain_tile.cu", reference=backward_then_cast, tolerance=Tolerance(ulp=4), trials=trials.cast_backward)
def backward_chain_cast(
    launch: Launcher,
    dy: Tensor,
    stages: Sequence[Stage],
    saved_inputs: Mapping[int, Tensor],
    encode: Encoding,
    *,
    rounding: Rounding = "per_op",
    dtype: torch.dtype | None = None,
    stores: bool = False,
) -> BackwardResult:
    """Reads ``dy``, saved tensors and operands once."""
    known = type(encode) in CASTS
    call = backward_call(dy, stages, saved_inputs, rounding, dtype, casts=True, stores=stores) if known else None
    planes = None if call is None else _run_cast(launch, call, encode)
    if call is None or planes is None:
        return backward_then_cast(dy, stages, saved_inputs, encode, rounding=rounding, dtype=dtype, stores=stores)
    return planes, call.result, call.grads


def _run_cast(launch: Launcher, call: ChainCall, encode: Encoding) -> list[EncodedArrays] | None:
    """Queue the kernel of a call and of a cast; the planes that it makes. None, and nothing is done, if there is none."""
    kind = CASTS[type(encode)]
    fit = kind.fit(call, encode)
    if fit is None:
        return None
    cut, defines = fit
    planes, fields = room_for(encode, call.tensors[0], call.dtype)
    run(launch, "chain_tile", call, cut, defines=defines, rest=fields, encode=kind.encode)
    return planes


def _forward_measured(
    launch: Launcher,
    x: Tensor,
    stages: Sequence[Stage],
    encode: Measured,
    *,
    rounding: Rounding,
    dtype: torch.dtype | None,
    keep: Collection[int],
    stores: bool,
) -> ForwardResult:
    first = max(keep, default=0) if rounding == "per_op" else 0  # a stage whose input is there when the amax is known
    rest = stages[first:]
    if stores or encode.under is None or not (first or x.dtype == dtype or dtype is None) or not is_light(rest):
        y, kept, amax = forward_chain_amax.run(launch, x, stages, rounding=rounding, dtype=dtype, keep=keep)
        return encode.given(cast(Tensor, y), amax), y if stores else None, kept
    dense = x.contiguous()  # once for both
    _, kept, amax = forward_chain_amax.run(launch, dense, stages, rounding=rounding, dtype=dtype, keep=keep, stores=False)
    again, under = kept[first] if first else dense, encode.under(amax)
    encoded, _, _ = forward_chain_cast.run(launch, again, rest, under, rounding=rounding, dtype=dtype)
    return encoded, None, {i: x if tensor is dense else tensor for i, tensor in kept.items()}


def is_light(stages: Sequence[Stage]) -> bool:
    """Whether these ops read no more bytes than their result has: no second half, no operand for each element."""
    return not any(stage.math.is_gated or "full" in stage.math.operands.values() for stage in stages)


def _backward_measured(
    dy: Tensor,
    stages: Sequence[Stage],
    saved_inputs: Mapping[int, Tensor],
    encode: Measured,
    *,
    stores: bool = False,
    **options: Any,
) -> BackwardResult:
    dx, grads, amax = backward_chain_amax(dy, stages, saved_inputs, **options)
    return encode.given(dx, amax), dx if stores else None, grads


# By the type of the encoding. For others a chain and its cast are two calls, as where the amax of a gradient is to be found: one
# call would count what it was given as read until its end (KernelSized), where the second kernel reads the result alone.
_FORWARD: Mapping[type, Callable[..., ForwardResult]] = dict.fromkeys((*CASTS, Measured), forward_chain_cast)
_BACKWARD: Mapping[type, Callable[..., BackwardResult]] = {
    **dict.fromkeys(CASTS, backward_chain_cast),
    Measured: _backward_measured,
}


def forward_chain_encoded(
    x: Tensor, stages: Sequence[Stage], encode: Encoding, **options: Any
) -> tuple[list[EncodedArrays], dict[int, Tensor]]:
    """The planes of :func:`forward_chain`'s result, and what is kept, in as few kernels as the encoding allows."""
    inner, stores = apart(encode)
    encoded, y, kept = _FORWARD.get(type(inner), forward_then_cast)(x, stages, inner, stores=stores, **options)
    return [*encoded, *original(y)], kept


def backward_chain_encoded(
    dy: Tensor, stages: Sequence[Stage], saved_inputs: Mapping[int, Tensor], encode: Encoding, **options: Any
) -> tuple[list[EncodedArrays], Tensors]:
    """The planes of :func:`backward_chain`'s dx, and operand gradients, in as few kernels as the encoding allows."""
    inner, stores = apart(encode)
    encoded, dx, grads = _BACKWARD.get(type(inner), backward_then_cast)(dy, stages, saved_inputs, inner, stores=stores, **options)
    return [*encoded, *original(dx)], grads
