"""Normalisations: kernels with the bits of numerics/norm.py.

A kernel is compiled for the dtypes, the kind, and the number of columns of a thread. What no kernel takes (dtypes other than
fp32, bf16 and fp16, a weight and a bias of two dtypes) goes to the torch definition, which computes it or says what is wrong.
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
from opfuse.kernels.engine.variants import C_TYPES, addresses, variant_of
from opfuse.kernels.norms import trials
from opfuse.kernels.norms.call import NormCall, NormVariant, call_of
from opfuse.numerics import norm as definition
from opfuse.numerics.chain import Rounding
from opfuse.numerics.layouts import ceil_div, round_up
from opfuse.numerics.norm import BLOCKS, EIGHT, THREADS, Norm, NormGradients, Statistics

_FORWARD, _BACKWARD, _SUMS = map(parameter_of, ("norm_forward.cu", "norm_backward.cu", "norm_sums.cu"))

_ADDERS = 32  # sums that one block of norm_sums.cu adds up
_SUM_BYTES = 8192  # shared memory for the sums of one eight of columns of every thread
_MOST_SHARED = 1 << 16  # bytes of shared memory, which every device has
_ADD = {"per_op": 1, "single": 2}


@kernel("norm_forward.cu", reference=definition.norm_forward, tolerance=BITWISE, trials=trials.forward)
def norm_forward(launch: Launcher, x: Tensor, norm: Norm, *, dtype: torch.dtype | None = None) -> tuple[Tensor, Statistics]:
    """Reads ``x`` once."""
    call = call_of(x, norm, None, [dtype or x.dtype])
    if call is None:
        return definition.norm_forward(x, norm, dtype=dtype)
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    run_forward(launch, call, y)
    return y, call.statistics


def run_forward(
    launch: Launcher, call: NormCall, y: Tensor | None, amax: Tensor | None = None, *, dtype: torch.dtype | None = None
) -> None:
    """Queue the kernel that finds the statistics and stores them in ``call.statistics``.

    y: memory for the result; None: it is not stored. amax: fp32 (1,), raised to the largest magnitude of the result; None: that
    is not measured. dtype: to which the result is rounded before it is measured, where it is not stored.
    """
    form = call.form() if y is None else call.form(y)
    variant = _forward_variant(form, dtype if y is None else y.dtype, y is not None, amax is not None)
    fields = _FORWARD(norm=call.fields(), **addresses({"y": y, "amax": amax}))
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
"""The dtypes of dy, of dx, and of what is added to dx, if anything is."""


class _BackwardTensors(NamedTuple):
    """What a backward kernel reads beside the call (dy, extra) and what it makes; parts: fp32 (blocks, sums, pitch)."""

    dy: Tensor
    extra: Tensor | None
    dx: Tensor
    parts: Tensor
    d_weight: Tensor | None
    d_bias: Tensor | None


@kernel("norm_backward.cu", reference=definition.norm_backward, tolerance=BITWISE, trials=trials.backward)
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
    """Reads ``dy``, ``x`` and ``extra`` once. Gradients of parameters are summed in two steps, in a fixed order."""
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
    fields = _BACKWARD(
        norm=call.without_bias().fields(), **addresses({"dy": dy, "extra": extra, "dx": dx, "parts": parts}), pitch=pitch
    )
    device = call.x.get_device()
    launch(variant, "norm_backward", Grid(blocks, THREADS, shared), _BACKWARD.layout, *fields, device=device)
    if sums:
        added = addresses({"parts": parts, "d_weight": d_weight, "d_bias": d_bias})
        fields = _SUMS(**added, columns=call.columns, pitch=pitch, blocks=blocks)
        grid = Grid(ceil_div(sums * pitch, _ADDERS), THREADS)
        launch(_sums_variant(form.weight), "norm_sums", grid, _SUMS.layout, *fields, device=device)


@functools.cache
def _sums_variant(weight: torch.dtype) -> Variant:
    return variant_of("norm_sums.cu", _SUMS.layout, WEIGHT=C_TYPES[weight])


@functools.cache
def _backward_variant(form: NormVariant, types: _Dtypes, sums: int, rounding: Rounding) -> tuple[Variant, int]:
    """The variant, and how many bytes of shared memory its sums of columns take."""
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
