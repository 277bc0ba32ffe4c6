"""The normalisations as the library calls them: kernels for CUDA tensors, with the bits of numerics/norm.py.

A kernel is compiled for the types, the kind and how many columns a thread has. What a kernel cannot take goes to the torch
definition, which runs it or says what is wrong: other dtypes than fp32, bf16, fp16, parameters of two dtypes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from opfuse.kernels.engine.compiling import Variant
from opfuse.kernels.engine.launch import Grid
from opfuse.kernels.engine.parameters import parameter_of
from opfuse.kernels.engine.registry import BITWISE, Launcher, kernel
from opfuse.kernels.engine.variants import C_TYPES, variant_of
from opfuse.kernels.norms.call import NormCall, NormVariant, addresses, call_of
from opfuse.numerics import norm as definition
from opfuse.numerics.chain import Rounding
from opfuse.numerics.layouts import ceil_div, round_up
from opfuse.numerics.norm import BLOCKS, EIGHT, THREADS, Norm, NormGradients, Statistics

_FORWARD, _BACKWARD, _SUMS = map(parameter_of, ("norm_forward.cu", "norm_backward.cu", "norm_sums.cu"))

_ADDERS = 32  # sums of a block that adds up parts
_SUM_BYTES = 8192  # of shared memory for the sums of an eight of columns of every thread
_MOST_SHARED = 1 << 16  # bytes, which every device has
_ADD = {"per_op": 1, "single": 2}


@kernel("norm_forward.cu", reference=definition.norm_forward, tolerance=BITWISE)
def norm_forward(launch: Launcher, x: Tensor, norm: Norm, *, dtype: torch.dtype | None = None) -> tuple[Tensor, Statistics]:
    """One read of ``x``."""
    call = call_of(x, norm, None, [dtype or x.dtype])
    if call is None:
        return definition.norm_forward(x, norm, dtype=dtype)
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    run_forward(launch, call, y)
    return y, call.statistics


def run_forward(
    launch: Launcher, call: NormCall, y: Tensor | None, amax: Tensor | None = None, *, dtype: torch.dtype | None = None
) -> None:
    """Queue the kernel that stores the statistics, and y and its magnitude where there is room for them.

    dtype: what y is rounded to, where it is measured without being stored.
    """
    form = call.form() if y is None else call.form(y)
    variant = _forward_variant(form, dtype if y is None else y.dtype, y is not None, amax is not None)
    fields = _FORWARD(norm=call.fields(), **addresses(y=y, amax=amax))
    launch(variant, "norm_forward", call.grid, _FORWARD.layout, *fields, device=call.x.get_device())


@functools.cache
def _forward_variant(form: NormVariant, made: torch.dtype | None, stores: bool, measures: bool) -> Variant:
    dtypes = [] if made is None else [made]
    return variant_of(
        "norm_forward.cu",
        _FORWARD.layout,
        **form.defines(form.held(*dtypes)),
        IO=C_TYPES[made or form.x],
        STORES=stores,
        MEASURES=measures,
        RESIDENT=form.resident(*dtypes),
    )


_Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype | None]
"""Of dy, of dx, and of what is added to it, if anything is."""


class _BackwardTensors(NamedTuple):
    """What a backward kernel reads beside the call, and what it makes."""

    dy: Tensor
    extra: Tensor | None
    dx: Tensor
    parts: Tensor
    d_weight: Tensor | None
    d_bias: Tensor | None


@kernel("norm_backward.cu", reference=definition.norm_backward, tolerance=BITWISE)
def norm_backward(
    launch: Launcher,
    dy: Tensor,
    x: Tensor,
    norm: Norm,
    statistics: Statistics,
    *,
    extra: Tensor | None = None,
    rounding: Rounding = "per_op",
    dtype: torch.dtype | None = None,
) -> NormGradients:
    """One read of ``dy``, ``x`` and ``extra``; the gradients of parameters are summed in two passes of fixed order."""
    dtype, others = dtype or x.dtype, [dy] if extra is None else [dy, extra]
    call = call_of(x, norm, statistics, [dtype], *others)
    if call is None or rounding not in _ADD or any(t.shape != x.shape for t in others):
        return definition.norm_backward(dy, x, norm, statistics, extra=extra, rounding=rounding, dtype=dtype)
    weight, bias = (None if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (norm.weight, norm.bias))
    sums = (weight is not None) + (bias is not None)
    dx = torch.empty(x.shape, dtype=dtype, device=x.device)
    blocks, pitch = min(BLOCKS, call.grid.blocks), round_up(call.columns, EIGHT)
    parts = torch.empty((blocks, sums, pitch), dtype=torch.float32, device=x.device)
    made = _BackwardTensors(dy.contiguous(), None if extra is None else extra.contiguous(), dx, parts, weight, bias)
    _run_backward(launch, call, made, rounding)
    return NormGradients(dx, weight, bias)


def _run_backward(launch: Launcher, call: NormCall, tensors: _BackwardTensors, rounding: Rounding) -> None:
    dy, extra, dx, parts, d_weight, d_bias = tensors
    blocks, sums, pitch = parts.shape
    form = call.form(dy, dx) if extra is None else call.form(dy, dx, extra)
    variant, shared = _backward_variant(form, (dy.dtype, dx.dtype, None if extra is None else extra.dtype), sums, rounding)
    fields = _BACKWARD(norm=call.without_bias().fields(), **addresses(dy=dy, extra=extra, dx=dx, parts=parts), pitch=pitch)
    device = call.x.get_device()
    launch(variant, "norm_backward", Grid(blocks, THREADS, shared), _BACKWARD.layout, *fields, device=device)
    if sums:
        added = addresses(parts=parts, d_weight=d_weight, d_bias=d_bias)
        fields = _SUMS(**added, columns=call.columns, pitch=pitch, blocks=blocks)
        grid = Grid(ceil_div(sums * pitch, _ADDERS), THREADS)
        launch(_sums_variant(form.weight), "norm_sums", grid, _SUMS.layout, *fields, device=device)


@functools.cache
def _sums_variant(weight: torch.dtype) -> Variant:
    return variant_of("norm_sums.cu", _SUMS.layout, WEIGHT=C_TYPES[weight])


@functools.cache
def _backward_variant(form: NormVariant, types: _Dtypes, sums: int, rounding: Rounding) -> tuple[Variant, int]:
    """The variant, and the bytes of shared memory for sums of columns."""
    dy, dx, extra = types
    dtypes = [dtype for dtype in types if dtype is not None]
    held = form.held(*dtypes) if sums * form.packs * _SUM_BYTES <= _MOST_SHARED else 0
    variant = variant_of(
        "norm_backward.cu",
        _BACKWARD.layout,
        **form.defines(held),
        GRAD=C_TYPES[dy],
        EXTRA=C_TYPES[extra or dx],
        IO=C_TYPES[dx],
        ADD=0 if extra is None else _ADD[rounding],
        RESIDENT=form.resident_backward(*dtypes),
    )
    return variant, sums * held * _SUM_BYTES
