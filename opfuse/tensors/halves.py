"""Parameters of FSDP2 that hold one plane at a time: in the forward pass the rowwise one, in the backward pass the other.

Planes that were cast apart take as many bytes on the wire as bf16 if both travel. A pipeline reads one of them in each pass, and
FSDP2 gathers in each pass, where it frees parameters in between: so the plane that is read travels. The other one is fetched
from the shards when something reads it: a recomputation in the backward pass, or code outside of pipelines. That is a collective
operation, which all ranks come to, as they run the same program.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from opfuse.formats import COLUMNWISE, ROWWISE, USAGES, NumberFormat
from opfuse.tensors.planes import map_tensors
from opfuse.tensors.quantized import Quantized
from opfuse.tensors.rows import join_rows, row_parts
from opfuse.tensors.storage import QuantizedStorage

_WHY = "it did not travel in this pass"


class Halves(NamedTuple):
    """The records of a whole parameter, each of one plane, over the buffers of the gather; and where a plane is fetched from."""

    records: dict[str, QuantizedStorage]
    shard: Quantized
    group: Any

    def __deepcopy__(self, memo: Any) -> Halves:
        return self

    def away(self, held: QuantizedStorage) -> dict[str, NumberFormat]:
        """The formats of the planes that are not in ``held``, by usage."""
        return {usage: record.format for usage, record in self.records.items() if usage not in held.usages}

    def whole(self, held: QuantizedStorage) -> QuantizedStorage:
        """``held`` with the plane that is away, fetched from all ranks into memory of its own."""
        for usage in self.away(held):
            piece, outputs = _half_on(held.device, self.shard, usage), []
            for part in row_parts(piece):
                outputs.append(part.new_empty((part.shape[0] * dist.get_world_size(self.group), *part.shape[1:])))
                _gather(outputs[-1], part, group=self.group)
            plane = join_rows(piece, outputs, held.shape).plane(usage)
            held = replace(held, rowwise=plane) if usage == ROWWISE else replace(held, columnwise=plane)
        return held


def travelling(shard: Quantized, ranks: int) -> str | None:
    """The usage of the plane that travels alone in the pass that gathers now; None: all planes do, in every pass.

    Decided at the first gather, when FSDP2 makes its buffers: these fit both planes where their parts are of one size.
    """
    if shard.usages != USAGES:
        return None
    group = _group_of_parameters()
    if shard.alternates is None:
        frees = group is not None and group._reshard_after_forward and getattr(group, "reshard_after_backward", True)
        shard.alternates = bool(ranks > 1 and frees and len({_sizes(shard, usage) for usage in USAGES}) == 1)
    if not shard.alternates:
        return None
    return COLUMNWISE if group is not None and group._training_state.name == "PRE_BACKWARD" else ROWWISE


def half(storage: QuantizedStorage, usage: str) -> QuantizedStorage:
    """The record of one plane."""
    return storage.only(usage, why=_WHY)


def halves(shard: Quantized, here: QuantizedStorage, gathered: Sequence[torch.Tensor], group: Any) -> Halves:
    """The record ``here`` of the plane that came as ``gathered``, and one of the other plane, over the same buffers."""
    (usage,) = here.usages
    other = COLUMNWISE if usage == ROWWISE else ROWWISE
    piece, rows = _half_on(here.device, shard, other), here.shape[0] // shard.shape[0]
    views = [buffer.view(rows * part.shape[0], *part.shape[1:]) for buffer, part in zip(gathered, row_parts(piece), strict=True)]
    there = replace(join_rows(piece, views, here.shape), dtype=here.dtype)
    return Halves({usage: here, other: there}, shard, group)


def _half_on(device: torch.device, shard: Quantized, usage: str) -> QuantizedStorage:
    """The record of one plane of a shard, which FSDP2 may keep on the CPU."""
    return map_tensors(half(shard.record, usage), lambda plane: plane.to(device, non_blocking=True))


def _sizes(shard: Quantized, usage: str) -> tuple[tuple[int, torch.dtype], ...]:
    return tuple((part.numel(), part.dtype) for part in row_parts(half(shard.record, usage)))


def _group_of_parameters() -> Any:
    """FSDP2's record of what it gathers now, which knows the pass. It tells parameters nothing of it: read off Python's stack."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if hasattr(owner, "_training_state") and hasattr(owner, "_reshard_after_forward"):
            return owner
        frame = frame.f_back
    return None


_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the second is the older name
