"""The all-gather protocol of FSDP2, for parameters that are sharded along their rows.

Shards travel quantized, as row parts. Where all rows share a scale, shards make one quantized parameter only if their
quantizer reduces amaxes over the ranks; otherwise their values travel and the parameter is plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from opfuse.errors import ShapeError, describe
from opfuse.tensors.planes import tensor_pairs
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
    tensor: QuantizedTensor, shape: Sequence[int], *, ranks: int, dtype: torch.dtype | None
) -> tuple[tuple[torch.Tensor, ...], Gathering]:
    """What a shard gives to the gather along dimension 0, and what :func:`after` needs. ShapeError for uneven shards."""
    storage = tensor.storage
    if storage.shape[0] * ranks != shape[0]:
        wanted = f"{ranks} equal shards of a multiple of {row_unit(storage)} rows"
        raise ShapeError(describe(f"FSDP2 shard of a {storage.format} parameter", wanted=wanted, got=f"{shape[0]} rows",
                                  cure="pad the parameter's rows"))  # fmt: skip
    one_scale = getattr(tensor.quantizer, "with_amax_reduction", False)
    gathering = Gathering(storage, torch.Size(shape), quantized=one_scale or not shares_scale(storage))
    return tuple(row_parts(storage)) if gathering.quantized else (storage.dequantize(dtype),), gathering


def after(
    tensor: QuantizedTensor,
    gathered: Sequence[torch.Tensor],
    gathering: Gathering,
    *,
    dtype: torch.dtype,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
    """The whole parameter and the tensors it owns beside ``gathered``; or None, with its bytes written into ``out``.

    Gathering brings back values that autograd already knows, so no version is bumped.
    """
    if not gathering.quantized:
        values = gathered[0].reshape(gathering.shape).to(dtype)
        return _result(values, [values], gathered) if out is None else _rewrite([(out, values)])
    storage = replace(join_rows(gathering.shard, gathered, gathering.shape), dtype=dtype)
    if out is None:
        return _result(tensor.over(storage), storage.tensors(), [*gathered, *gathering.shard.tensors()])
    return _rewrite(tensor_pairs(getattr(out, "_local_tensor", out).storage, storage))


def _result(
    parameter: torch.Tensor, tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """``parameter`` and those of its tensors whose memory is not that of ``others``."""
    foreign = {other.untyped_storage().data_ptr() for other in others}
    return parameter, tuple(t for t in tensors if t.untyped_storage().data_ptr() not in foreign)


def _rewrite(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, source in pairs:
        if target.data_ptr() != source.data_ptr():
            target.data.copy_(source)
