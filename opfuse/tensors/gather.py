"""The all-gather protocol of FSDP2, for parameters that are sharded along their rows.

Shards travel quantized, as row parts: of two planes that hold the same values one travels, and the other is made from it. What
all rows share is equal on all ranks (:mod:`opfuse.tensors.shards`) and stays where it is; where it cannot be, values travel and
the parameter is plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from opfuse.errors import ShapeError, describe
from opfuse.formats import ROWWISE
from opfuse.tensors.planes import mirrored
from opfuse.tensors.rows import join_rows, row_parts, row_unit
from opfuse.tensors.shards import agree, is_mirror
from opfuse.tensors.storage import QuantizedStorage

if TYPE_CHECKING:
    from opfuse.tensors.tensor import QuantizedTensor


class Gathering(NamedTuple):
    """sent: the record whose row parts travel; None: values do. mirrored: whether the columnwise plane is made after the gather.

    shape: of the whole parameter. owned: the tensors of this rank's shard.
    """

    sent: QuantizedStorage | None
    mirrored: bool
    shape: torch.Size
    owned: tuple[torch.Tensor, ...]


def before(
    shard: QuantizedTensor, shape: Sequence[int], *, mesh: Any, dtype: torch.dtype | None
) -> tuple[tuple[torch.Tensor, ...], Gathering]:
    """What a shard gives to the gather along dimension 0, and what :func:`after` needs. ShapeError for uneven shards."""
    storage, ranks = shard.record, mesh.size()
    if storage.shape[0] * ranks != shape[0]:
        wanted = f"{ranks} equal shards of a multiple of {row_unit(storage)} rows"
        raise ShapeError(describe(f"FSDP2 shard of a {storage.format} parameter", wanted=wanted, got=f"{shape[0]} rows",
                                  cure="pad the parameter's rows"))  # fmt: skip
    if not agree(shard, mesh):
        return (storage.dequantize(dtype),), Gathering(None, False, torch.Size(shape), storage.tensors())
    mirror = is_mirror(shard)
    sent = storage.only(ROWWISE, why="it is made after the gather") if mirror else storage
    return tuple(row_parts(sent)), Gathering(sent, mirror, torch.Size(shape), storage.tensors())


def after(
    shard: QuantizedTensor,
    gathered: Sequence[torch.Tensor],
    gathering: Gathering,
    *,
    dtype: torch.dtype,
    out: Any,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
    """The whole parameter and the tensors it owns beside ``gathered``; or None, with its bytes written into ``out``.

    Gathering brings back values that autograd already knows, so no version is bumped.
    """
    whole: torch.Tensor
    tensors: Sequence[torch.Tensor]
    if gathering.sent is not None:
        if gathering.sent.shape == gathering.shape:  # where there is one rank, torch hands over the first part alone
            gathered = [part.clone() for part in row_parts(gathering.sent)]
        storage = replace(join_rows(gathering.sent, gathered, gathering.shape), dtype=dtype)
        if gathering.mirrored:
            storage = replace(storage, columnwise=mirrored(storage.plane(ROWWISE)), why=shard.record.why)
        whole, tensors = _whole(shard, storage), storage.tensors()
    else:
        whole = gathered[0].reshape(gathering.shape).to(dtype)
        tensors = (whole,)
    if out is None:
        others = {t.untyped_storage().data_ptr() for t in (*gathered, *gathering.owned)}
        return whole, tuple(t for t in tensors if t.untyped_storage().data_ptr() not in others)
    out = getattr(out, "_local_tensor", out)
    for target, source in zip(out.record.tensors() if gathering.sent is not None else (out,), tensors, strict=True):
        if target.data_ptr() != source.data_ptr():
            target.data.copy_(source)
    return None


def _whole(shard: QuantizedTensor, storage: QuantizedStorage) -> QuantizedTensor:
    """The parameter of ``storage`` that ``shard`` is a part of; all ranks have it, so that writes into it reduce nothing."""
    whole = shard.over(storage)
    whole.ranks = None
    return whole
