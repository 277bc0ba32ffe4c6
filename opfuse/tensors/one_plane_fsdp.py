"""Parameters of FSDP2 that hold one plane at a time: in the forward pass the rowwise one, in the backward pass the other.

A pipeline reads one plane in each pass, and FSDP2 gathers in each pass if it frees parameters in between. So of planes that were
cast apart only the one that the pass reads travels: both would take as many bytes as bf16. Of planes that hold the same values
the rowwise one always travels, and is transposed in the backward pass alone. Anything else that reads a missing plane, such as a
recomputation or code outside of pipelines, makes it from the other plane or fetches it from the shards. A fetch is a collective
operation, which all ranks reach, since they run the same program.

FSDP2 does not tell a parameter which pass runs. That is read from Python's stack; where it is not found, both planes travel.
The signature of the weight says which plane is absent, so nothing reads stale bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from opfuse.formats import COLUMNWISE, ROWWISE, USAGES, NumberFormat
from opfuse.tensors.planes import map_tensors, mirrored
from opfuse.tensors.quantized import Quantized
from opfuse.tensors.row_collectives import gathered_rows
from opfuse.tensors.rows import join_rows, row_parts
from opfuse.tensors.shards import is_mirror
from opfuse.tensors.storage import Plane, QuantizedStorage
from opfuse.torch_private.sharding import is_parameter_group, reshards_after_forward, training_state
from opfuse.torch_private.stack import owners

_WHY = "it did not travel in this pass"


class PlaneRecords(NamedTuple):
    """The records of a whole parameter, each of one plane, over memory that FSDP2 fills and frees.

    shard: this rank's part. group: the ranks from which a missing plane is fetched; None if the columnwise plane is made from the
    rowwise one, which is always there.
    """

    records: dict[str, QuantizedStorage]
    shard: Quantized
    group: Any

    def __deepcopy__(self, memo: Any) -> PlaneRecords:
        return self

    def away(self, held: QuantizedStorage) -> dict[str, NumberFormat]:
        """The formats of the planes that are not in ``held``, by usage."""
        return {usage: record.format for usage, record in self.records.items() if usage not in held.usages}

    def whole(self, held: QuantizedStorage) -> QuantizedStorage:
        """``held`` with the plane that is away: fetched from all ranks into memory of its own, or made from the other one."""
        for usage in self.away(held):
            plane = self._mirrored(usage) if self.group is None else self._fetched(held, usage)
            held = replace(held, rowwise=plane) if usage == ROWWISE else replace(held, columnwise=plane)
        return held

    def _mirrored(self, usage: str) -> Plane:
        rowwise = self.records[ROWWISE].plane(ROWWISE)
        return rowwise if usage == ROWWISE else mirrored(rowwise)

    def _fetched(self, held: QuantizedStorage, usage: str) -> Plane:
        piece = _one_plane_on(held.device, self.shard, usage)
        return gathered_rows(piece, dist.get_world_size(self.group), self.group).plane(usage)


def alone(shard: Quantized, ranks: int) -> str | None:
    """The usage of the only plane that the gathering pass reads; None: all planes are there in every pass.

    Decided at the first gather, when FSDP2 makes its buffers: these serve both passes if the parts of both planes have one size,
    or if only one of the planes ever travels.
    """
    if shard.usages != USAGES:
        return None
    group = _group_of_parameters()
    if shard.alternates is None:
        frees = group is not None and reshards_after_forward(group) and getattr(group, "reshard_after_backward", True)
        fits = is_mirror(shard) or len({_sizes(shard, usage) for usage in USAGES}) == 1
        shard.alternates = bool(ranks > 1 and frees and fits)
    if not shard.alternates:
        return None
    return COLUMNWISE if group is not None and training_state(group).name == "PRE_BACKWARD" else ROWWISE


def one_plane(storage: QuantizedStorage, usage: str) -> QuantizedStorage:
    """The record of one plane."""
    return storage.only(usage, why=_WHY)


def mirrors(storage: QuantizedStorage) -> dict[str, QuantizedStorage]:
    """A record of each plane of ``storage``."""
    return {usage: one_plane(storage, usage) for usage in storage.usages}


def records_of_planes(shard: Quantized, here: QuantizedStorage, gathered: Sequence[torch.Tensor]) -> dict[str, QuantizedStorage]:
    """The record ``here`` of the plane that came as ``gathered``, and one of the other plane, over the same buffers."""
    (usage,) = here.usages
    other = COLUMNWISE if usage == ROWWISE else ROWWISE
    piece, rows = _one_plane_on(here.device, shard, other), here.shape[0] // shard.shape[0]
    views = [buffer.view(rows * part.shape[0], *part.shape[1:]) for buffer, part in zip(gathered, row_parts(piece), strict=True)]
    there = replace(join_rows(piece, views, here.shape), dtype=here.dtype)
    return {usage: here, other: there}


def _one_plane_on(device: torch.device, shard: Quantized, usage: str) -> QuantizedStorage:
    """The record of one plane of a shard, which FSDP2 may keep on the CPU."""
    return map_tensors(one_plane(shard.record, usage), lambda plane: plane.to(device, non_blocking=True))


def _sizes(shard: Quantized, usage: str) -> tuple[tuple[int, torch.dtype], ...]:
    return tuple((part.numel(), part.dtype) for part in row_parts(one_plane(shard.record, usage)))


def _group_of_parameters() -> Any:
    """FSDP2's group of the parameters that are gathered now, which knows the pass; read off Python's stack, since FSDP2 does not
    pass it on.
    """
    return next(filter(is_parameter_group, owners()), None)
