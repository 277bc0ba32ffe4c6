"""For optimizers that keep flat pieces of masters on each rank (ZeRO): casts of pieces into whole weights, and buffers for these.

The ranks find all scales in one collective, and each writes the bytes of its pieces. The framework gathers the bytes of all
weights at once, in its own buffers, and columnwise planes are made of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch.autograd.graph import increment_version

from opfuse.domains import checked_arguments
from opfuse.errors import QuantizedTensorError, QuantizerError, ShapeError, describe, number_of
from opfuse.formats import COLUMNWISE, ROWWISE, USAGES
from opfuse.kernels.casts.encoding import Current
from opfuse.kernels.casts.tensor import tensor_amax
from opfuse.numerics.layouts import layout_of
from opfuse.tensors.planes import mirrored
from opfuse.tensors.quantizers import Float8CurrentScalingQuantizer, HybridQuantizer, Quantizer
from opfuse.tensors.quantizers.ranks import reduce_amax
from opfuse.tensors.tensor import QuantizedTensor


@torch.no_grad()
@checked_arguments(QuantizedTensorError)
def quantize_master_weights(
    weights: Sequence[QuantizedTensor],
    masters: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None] | None = None,
    group: Any = None,
) -> None:
    """Cast each piece of a master, fp32, into the whole weight, one scale for the weight on all ranks of ``group``.

    masters: this rank's piece of each weight, in the order of its elements; None where it has none. start_offsets: the element of
    the weight that a piece begins at; None: masters are whole.

    Once all elements were written on some rank, gather the raw data of the rowwise planes and call
    :func:`post_all_gather_processing`: then weights are, bit for bit, what ``weight.copy_(master)`` makes of whole masters.

    QuantizerError, before anything is written, unless all planes of all weights are FP8 under one scale of their own amax: pieces
    of other formats need not hold whole blocks. ShapeError for a piece that the weight has no room for.
    """
    starts = [0 if master is not None else None for master in masters] if start_offsets is None else list(start_offsets)
    for name, given in (("masters", masters), ("start_offsets", starts)):
        if len(given) != len(weights):
            cure = "pass one entry for each weight, None where this rank has no piece"
            raise ShapeError(describe("quantize_master_weights", wanted=f"{len(weights)} {name}", got=len(given), cure=cure))
    for weight, master, start in zip(weights, masters, starts):
        _check_format(weight)
        if master is not None and (start is None or start < 0 or start + master.numel() > weight.numel()):
            wanted = f"a piece of {number_of(weight.numel(), 'element')}"
            got = f"{number_of(master.numel(), 'element')} from {start} on"
            cure = "pass pieces of the flat weight, and where they begin"
            raise ShapeError(describe("quantize_master_weights", wanted=wanted, got=got, cure=cure))
    if not weights:
        return
    amaxes = reduce_amax(torch.cat([_amax(weight, master) for weight, master in zip(weights, masters)]), group)
    for weight, master, start, amax in zip(weights, masters, starts, amaxes.split(1)):
        _write(weight, amax, master, start or 0)


@checked_arguments(QuantizedTensorError)
def post_all_gather_processing(weights: Sequence[QuantizedTensor]) -> None:
    """Make the columnwise planes of ``weights`` from rowwise planes whose raw data was gathered.

    QuantizerError for a weight whose planes are cast apart.
    """
    for weight in weights:
        if weight.quantizer is None or not weight.quantizer.planes_agree:
            wanted, cure = "planes that hold the same values", "cast whole values: weight.copy_(master)"
            raise QuantizerError(describe("post_all_gather_processing", wanted=wanted, got=repr(weight), cure=cure))
    for weight in weights:
        if weight.usages == USAGES:
            made = mirrored(weight.plane(ROWWISE))
            for old, new in zip(weight.plane(COLUMNWISE).tensors(), made.tensors(), strict=True):
                old.copy_(new)
        increment_version([weight, *weight.record.tensors()])


@checked_arguments(QuantizedTensorError)
def replace_raw_data(tensor: QuantizedTensor, new_raw_data: torch.Tensor) -> None:
    """Move the rowwise data of ``tensor``, with its values, to ``new_raw_data``, a part of a buffer of many weights.

    QuantizedTensorError unless that is memory of the same shape, dtype and device; MissingPlaneError without a rowwise plane.
    """
    plane = tensor.plane(ROWWISE)
    old = plane.data
    wanted, got = ((t.shape, t.dtype, t.device) for t in (old, new_raw_data))
    if wanted != got or not new_raw_data.is_contiguous():
        cure = "pass a contiguous view of the buffer, of the shape of tensor.rowwise.data"
        described = [f"{tuple(shape)} {dtype} on {device}" for shape, dtype, device in (wanted, got)]
        raise QuantizedTensorError(describe("replace_raw_data", wanted=described[0], got=described[1], cure=cure))
    with torch.no_grad():
        new_raw_data.detach().copy_(old)
    tensor.data = tensor.over(
        replace(tensor.record, rowwise=replace(plane, data=new_raw_data.detach())), readonly=tensor.readonly
    )


def _check_format(weight: QuantizedTensor) -> None:
    """QuantizerError for the first direction that is not of one scale."""
    for usage in weight.usages:
        quantizer = _of(weight, usage)
        if not isinstance(quantizer, Float8CurrentScalingQuantizer):
            wanted, got = f"{usage} data in FP8 under one scale of its own amax", f"{weight.format_of(usage)} by {quantizer!r}"
            cure = "cast whole values: weight.copy_(master); or shard the weights with FSDP2, each rank with whole blocks"
            raise QuantizerError(describe("quantize_master_weights", wanted=wanted, got=got, cure=cure))


def _of(weight: QuantizedTensor, usage: str) -> Quantizer | None:
    """The quantizer of one direction."""
    if isinstance(weight.quantizer, HybridQuantizer):
        return weight.quantizer.rowwise_quantizer if usage == ROWWISE else weight.quantizer.columnwise_quantizer
    return weight.quantizer


def _amax(weight: QuantizedTensor, piece: torch.Tensor | None) -> torch.Tensor:
    if piece is None or not piece.numel():
        return torch.zeros(1, dtype=torch.float32, device=weight.device)
    return tensor_amax(piece.float().reshape(1, -1)).reshape(1)


def _write(weight: QuantizedTensor, amax: torch.Tensor, piece: torch.Tensor | None, start: int) -> None:
    """The scale of ``amax``, and the bytes of this rank's piece, in each plane by its own quantizer."""
    values = amax.new_zeros(0) if piece is None else piece.float().reshape(-1)
    place = torch.arange(start, start + len(values), device=weight.device)
    for usage in weight.usages:
        quantizer, plane = cast(Float8CurrentScalingQuantizer, _of(weight, usage)), weight.plane(usage)
        row = values if len(values) else amax.new_zeros(1)  # to find the scale
        layout = layout_of(plane.format, ROWWISE, (1, len(row)))
        ((data, scale, *_),) = Current(amax, [layout], eps=quantizer.amax_epsilon, pow2=quantizer.force_pow_2_scales)(row[None])
        cast(torch.Tensor, plane.scale).copy_(scale)
        matrix = plane.data if usage == ROWWISE else plane.data.t()
        matrix[place // matrix.shape[1], place % matrix.shape[1]] = data.reshape(-1)[: len(values)]
    increment_version([weight, *weight.record.tensors()])
