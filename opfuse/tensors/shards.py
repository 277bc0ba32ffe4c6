"""Shards of a quantized parameter on several ranks, whose rows share one scale or amax, which is found over all ranks.

Each rank writes its own rows. Once a shard knows its ranks, a write takes the largest amax of all shards; all ranks write in the
same order, as optimizers do.

So the rows are those of the whole weight, bit for bit. Sending scales along with every gather would leave one weight with
several scales, which no product reads. An optimizer with masters writes all weights at once, with the amaxes of one collective.
Whether rows agree is checked once, and again after bytes came from elsewhere; rows that do not agree are cast once more, and
reported.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from opfuse.errors import OpfuseWarning, describe
from opfuse.formats import COLUMNWISE, ROWWISE, USAGES
from opfuse.kernels.casts.tensor import tensor_amax
from opfuse.tensors.planes import mirrored
from opfuse.tensors.quantized import Quantized
from opfuse.tensors.quantizers.base import Quantizer
from opfuse.tensors.quantizers.ranks import AmaxRanks, in_distributed_run, reduce_amax
from opfuse.tensors.rows import shared_by_rows
from opfuse.torch_private.sharding import local_tensor


class Ranks(NamedTuple):
    """The processes that hold one parameter. agreed: whether the scales that its rows share are known to be equal.

    groups: one for each dimension of the mesh over which torch has spread it; None stands for this process alone.
    """

    groups: tuple[Any, ...]
    agreed: bool

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self


def join(parameter: torch.Tensor) -> None:
    """Tell the shard of a quantized DTensor parameter which ranks hold the others."""
    shard: Any = local_tensor(parameter, None)
    over = [dimension for dimension, placement in enumerate(getattr(parameter, "placements", ())) if placement.is_shard()]
    for dimension in over if hasattr(shard, "record") else ():
        _share(shard, parameter.device_mesh, dimension)  # type: ignore[attr-defined]


def agree(shard: Quantized, mesh: Any) -> bool:
    """Whether row parts of the shards on ``mesh`` make one parameter: the scales that their rows share are equal from now on.

    Checked once, and again after bytes came from elsewhere; a check waits for the device and for the other ranks.
    """
    if not is_mirror(shard) and not shared_by_rows(shard.record):
        return True
    ranks = _share(shard, mesh)
    if ranks is None:
        return False
    if not ranks.agreed:
        if not _is_alike(shard, ranks):
            wanted, got = "rows that were written after their ranks knew of each other", "rows of several scales, cast once more"
            cure = "load values into the model before it is sharded, or write them after its first forward pass"
            warnings.warn(describe("FSDP2 gather", wanted=wanted, got=got, cure=cure), OpfuseWarning, stacklevel=2)
            shard.quantize_(shard.dequantize())
        shard.ranks = ranks._replace(agreed=True)
    return True


def learn(shard: Quantized, copy: Quantized) -> None:
    """Take over what :func:`agree` found for a copy of ``shard``, and the bytes if the copy was cast again."""
    if copy.ranks != shard.ranks:
        for mine, its in zip(shard.held.tensors(), copy.held.tensors(), strict=True):
            mine.copy_(its)
    shard.ranks, shard.alternates = copy.ranks, copy.alternates


def is_mirror(shard: Quantized) -> bool:
    """Whether the columnwise plane can be made from the rowwise one."""
    return shard.usages == USAGES and shard.quantizer is not None and shard.quantizer.planes_agree


def writer(tensor: Quantized) -> Quantizer | None:
    """The quantizer of values that are written into ``tensor``."""
    quantizer = tensor.quantizer
    return quantizer if quantizer is None or tensor.ranks is None else quantizer.reducing(tensor.ranks.groups)


def amaxes(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """The amaxes over ranks for casts of ``sources`` into ``targets``, by index, in one collective for each group of ranks."""
    by_group: dict[tuple[torch.device, AmaxRanks], dict[int, torch.Tensor]] = {}
    for i, (target, source) in enumerate(zip(targets, sources)):
        quantizer = writer(target) if isinstance(target, Quantized) and _is_alone(target, source) else None
        if quantizer is not None and quantizer.is_quantizable(source) and quantizer.measured(source.shape, source.dtype):
            ranks: AmaxRanks = quantizer.amax_reduction_group  # type: ignore[attr-defined]
            by_group.setdefault((source.device, ranks), {})[i] = tensor_amax(source.detach())
    together = {key: reduce_amax(torch.cat([*values.values()]), key[1]).split(1) for key, values in by_group.items()}
    return {i: amax for key, values in by_group.items() for i, amax in zip(values, together[key])}


def _is_alone(target: Quantized, source: torch.Tensor) -> bool:
    return not isinstance(source, Quantized) and source.shape == target.shape and source.device == target.device


def unsure(ranks: Ranks | None) -> Ranks | None:
    """``ranks`` after bytes came from elsewhere: no longer known to agree."""
    return None if ranks is None else ranks._replace(agreed=False)


def process_groups(value: object) -> list[object]:
    """The process groups that a quantizer and those inside it hold, which can be neither copied nor saved."""
    if isinstance(value, getattr(torch.distributed, "ProcessGroup", ())):
        return [value]
    inner = vars(value).values() if is_dataclass(value) else value if isinstance(value, tuple) else ()
    return [group for tensor in inner for group in process_groups(tensor)]


def _share(shard: Quantized, mesh: Any, *dimension: int) -> Ranks | None:
    """The ranks of ``shard``, with those along a dimension of ``mesh``; None if they cannot find scales together."""
    together, known = in_distributed_run(), () if shard.ranks is None else shard.ranks.groups
    group = mesh.get_group(*dimension) if together else None
    if shard.quantizer is None or _name(group) in map(_name, known):
        return cast("Ranks | None", shard.ranks)
    reducing = shard.quantizer.reducing((*known, group))
    if reducing is not None and (together or reducing == shard.quantizer):
        shard.ranks = Ranks((*known, group), agreed=False)
    return cast("Ranks | None", shard.ranks)


def _name(group: Any) -> str | None:
    return None if group is None else group.group_name


def _is_alike(shard: Quantized, ranks: Ranks) -> bool:
    """Whether planes that should agree do, and scales that rows share are equal on all ranks, bit for bit."""
    mirror = not is_mirror(shard) or _same_bytes(mirrored(shard.plane(ROWWISE)).tensors(), shard.plane(COLUMNWISE).tensors())
    shared = [value.reshape(-1).view(torch.int32) for value in shared_by_rows(shard.record)]
    if not shared or not in_distributed_run():
        return mirror
    own = torch.cat([shared[0].new_full((1,), mirror), *shared])
    most = torch.cat([own, ~own])
    for group in ranks.groups:
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    largest, least = most[: len(own)], ~most[len(own) :]
    return bool(least[0]) and torch.equal(largest, least)


def _same_bytes(some: tuple[torch.Tensor, ...], others: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in zip(some, others, strict=True))
