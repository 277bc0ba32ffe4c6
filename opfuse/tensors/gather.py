"""The all-gather protocol of FSDP2, for parameters that are sharded along their rows.

Shards travel quantized, as row parts: of two planes that hold the same values one travels, and the other is made from it. Where
FSDP2 frees parameters between the passes, each pass gathers the plane that it reads (:mod:`opfuse.tensors.one_plane_fsdp`).
Scales that all rows share are equal on all ranks (:mod:`opfuse.tensors.shards`) and do not travel; where they cannot be equal,
values travel in high precision and the parameter is plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch

from opfuse.errors import ShapeError, describe, number_of
from opfuse.formats import ROWWISE, NumberFormat
from opfuse.tensors.one_plane_fsdp import PlaneRecords, alone, mirrors, one_plane, records_of_planes
from opfuse.tensors.planes import formats_of, mirrored, with_formats
from opfuse.tensors.quantized import Quantized
from opfuse.tensors.rows import join_rows, row_parts, row_unit
from opfuse.tensors.shards import agree, is_mirror, learn
from opfuse.tensors.storage import QuantizedStorage
from opfuse.torch_private.sharding import local_tensor

MATRIX = 2
"""Dimensions of a parameter whose shards are rows; one of more is a stack of matrices."""


class Gathering(NamedTuple):
    """sent: the record whose row parts travel; None: values do. mirrors: whether the columnwise plane is made of what travels.

    alone: the usage of the plane that this pass reads; None: all are there. shape: of the whole parameter. owned: the tensors of
    this rank's shard. group: the ranks. source: what was gathered from: the shard, or a copy of one that FSDP2 keeps on the CPU.
    """

    sent: QuantizedStorage | None
    mirrors: bool
    alone: str | None
    shape: torch.Size
    owned: tuple[torch.Tensor, ...]
    group: Any
    source: Quantized


def before(
    shard: Quantized, shape: Sequence[int], *, mesh: Any, dtype: torch.dtype | None
) -> tuple[tuple[torch.Tensor, ...], Gathering]:
    """What a shard sends to the gather along dimension 0, and what :func:`after` needs. ShapeError for uneven shards."""
    storage, ranks = shard.record, mesh.size()
    if storage.shape[0] * ranks != shape[0]:
        where, wanted = f"FSDP2 shard of a {storage.format} parameter", f"{ranks} equal shards"
        got = number_of(shape[0], "matrix")
        cure = "shard over a number of ranks that divides them, or dequantize() the parameter before"
        if len(shape) == MATRIX:
            wanted, got = f"{wanted} of a multiple of {row_unit(storage)} rows", number_of(shape[0], "row")
            cure = "pad the parameter's rows"
        raise ShapeError(describe(where, wanted=wanted, got=got, cure=cure))
    gathering = Gathering(storage, is_mirror(shard), None, torch.Size(shape), storage.tensors(), None, shard)
    if not agree(shard, mesh):
        return (storage.dequantize(dtype),), gathering._replace(sent=None)
    usage = alone(shard, ranks)
    if usage is not None:
        gathering = gathering._replace(alone=usage, group=None if gathering.mirrors else mesh.get_group())
    travels = ROWWISE if gathering.mirrors else usage
    sent = storage if travels is None else one_plane(storage, travels)
    return tuple(row_parts(sent)), gathering._replace(sent=sent)


def after(
    shard: Quantized,
    gathered: Sequence[torch.Tensor],
    gathering: Gathering,
    *,
    dtype: torch.dtype,
    out: Any,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
    """The whole parameter and the tensors it owns beside ``gathered``; or None, with its bytes written into ``out``.

    The values are those that autograd knows already, so no version is bumped.
    """
    out = local_tensor(out, out)
    if gathering.source is not shard:
        if gathering.source.is_cuda:  # made on the stream of the gather, and read on this one when it is gone
            gathering.source.record_stream(torch.cuda.current_stream())
        learn(shard, gathering.source)
    if gathering.sent is None:
        whole = gathered[0].reshape(gathering.shape).to(dtype)
        if out is None:
            return _owned(whole, [whole], gathered, gathering)
        _write([out], [whole])
        return None
    storage = replace(_joined(shard, gathered, gathering, first=out is None), dtype=dtype)
    if out is None:
        return _first(shard, storage, gathered, gathering)
    for usage in storage.usages:
        _hold(out, usage, storage.plane(usage).format)
        _write(out.held.plane(usage).tensors(), storage.plane(usage).tensors())
    if gathering.alone is not None:
        out.hold(gathering.alone)
    return None


def _joined(shard: Quantized, gathered: Sequence[torch.Tensor], gathering: Gathering, *, first: bool) -> QuantizedStorage:
    """The planes that ``gathered`` makes: those of this pass, or all at the ``first`` gather, which allocates their memory."""
    sent = cast(QuantizedStorage, gathering.sent)
    if sent.shape == gathering.shape:  # where there is one rank, torch hands over the first part alone
        gathered = [part.clone() for part in row_parts(sent)]
    storage = join_rows(sent, gathered, gathering.shape)
    if not gathering.mirrors or (gathering.alone == ROWWISE and not first):
        return storage
    return replace(storage, columnwise=mirrored(storage.plane(ROWWISE)), why=shard.held.why)


def _first(
    shard: Quantized, storage: QuantizedStorage, gathered: Sequence[torch.Tensor], gathering: Gathering
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The whole parameter of ``storage``. All ranks have it, so that writes into it reduce nothing."""
    whole = shard.over(storage, quantizer=shard.quantizer and shard.quantizer.of_groups(0, storage.shape[0]))
    whole.ranks, tensors = None, list(storage.tensors())
    if gathering.alone is not None:
        records = mirrors(storage) if gathering.mirrors else records_of_planes(shard, storage, gathered)
        whole.plane_records = PlaneRecords(records, shard, gathering.group)
        whole.hold(gathering.alone)
        tensors = [tensor for record in records.values() for tensor in record.tensors()]
    return _owned(whole, tensors, gathered, gathering)


def _owned(
    whole: torch.Tensor, tensors: Sequence[torch.Tensor], gathered: Sequence[torch.Tensor], gathering: Gathering
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    others = {t.untyped_storage().data_ptr() for t in (*gathered, *gathering.owned)}
    return whole, tuple(t for t in tensors if t.untyped_storage().data_ptr() not in others)


def _hold(out: Quantized, usage: str, fmt: NumberFormat) -> None:
    """Hold the plane of ``usage``, whose bytes a gather writes next: of its scales it says what that of the shard does."""
    out.hold(usage)
    out._storage = with_formats(out._storage, formats_of(out._storage) | {usage: fmt})
    if out.plane_records is not None:
        out.plane_records.records[usage] = out._storage


def _write(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        if target.data_ptr() != source.data_ptr():
            target.data.copy_(source)
