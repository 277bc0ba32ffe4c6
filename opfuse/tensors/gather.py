"""The all-gather protocol of FSDP2, for parameters that are sharded along their rows.

Shards travel quantized, as row parts. Where all rows share a scale, shards make one quantized parameter only if their
quantizer reduces amaxes over the ranks; otherwise their values travel and the parameter is plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from opfuse.errors import ShapeError, describe
from opfuse.tensors.rows import join_rows, row_parts, row_unit, shares_scale
from opfuse.tensors.storage import QuantizedStorage

if TYPE_CHECKING:
    from opfuse.tensors.tensor import QuantizedTensor


class Gathering(NamedTuple):
    """shard: this rank's record. shape: of the whole parameter. quantized: whether planes travel, or values."""

    shard: QuantizedStorage
    shape: torch.Size
    quantized: bool


def before(
    shard: QuantizedTensor, shape: Sequence[int], *, ranks: int, dtype: torch.dtype | None
) -> tuple[tuple[torch.Tensor, ...], Gathering]:
    """What a shard gives to the gather along dimension 0, and what :func:`after` needs. ShapeError for uneven shards."""
    storage = shard.record
    if storage.shape[0] * ranks != shape[0]:
        wanted = f"{ranks} equal shards of a multiple of {row_unit(storage)} rows"
        raise ShapeError(describe(f"FSDP2 shard of a {storage.format} parameter", wanted=wanted, got=f"{shape[0]} rows",
                                  cure="pad the parameter's rows"))  # fmt: skip
    one_scale = getattr(shard.quantizer, "with_amax_reduction", False)
    gathering = Gathering(storage, torch.Size(shape), quantized=one_scale or not shares_scale(storage))
    return tuple(row_parts(storage)) if gathering.quantized else (storage.dequantize(dtype),), gathering


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
    if gathering.quantized:
        storage = replace(join_rows(gathering.shard, gathered, gathering.shape), dtype=dtype)
        whole, tensors = shard.over(storage), storage.tensors()
    else:
        whole = gathered[0].reshape(gathering.shape).to(dtype)
        tensors = (whole,)
    if out is None:
        others = {t.untyped_storage().data_ptr() for t in (*gathered, *gathering.shard.tensors())}
        return whole, tuple(t for t in tensors if t.untyped_storage().data_ptr() not in others)
    out = getattr(out, "_local_tensor", out)
    for target, source in zip(out.record.tensors() if gathering.quantized else (out,), tensors, strict=True):
        if target.data_ptr() != source.data_ptr():
            target.data.copy_(source)
    return None
