"""An amax over ranks: the one number that pieces of a tensor on several of them share."""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.distributed as dist

from opfuse.errors import OpfuseError, describe

AmaxRanks: TypeAlias = "dist.ProcessGroup | tuple[dist.ProcessGroup | None, ...] | None"
"""Processes that find an amax together: None is all of them, a tuple one group after the other."""


HAS_RANKS = dist.is_available()
"""Whether this torch has torch.distributed."""


def in_distributed_run() -> bool:
    """Whether this process is one of a group of torch.distributed."""
    return HAS_RANKS and dist.is_initialized()


def checked_group(where: str, group: object, error: type[OpfuseError]) -> dist.ProcessGroup | None:
    """``group``, which may be a process group or None; ``error`` for anything else, as ranks that are not of a new group get."""
    if group is None or (HAS_RANKS and isinstance(group, dist.ProcessGroup)):
        return group
    cure = "pass what torch.distributed.new_group() returned to a rank of the group, or None for the default group"
    raise error(describe(where, wanted="None or a process group of torch.distributed", got=type(group).__name__, cure=cure))


def reduce_amax(amax: torch.Tensor, group: AmaxRanks) -> torch.Tensor:
    """The maximum of each element of ``amax`` over the processes of ``group``; ``amax`` itself outside a distributed run.

    Reduced as integer bits, since a floating-point maximum may lose a NaN, and on a device that the group has a backend for: the
    group of shards on the CPU may know NCCL alone.
    """
    if not in_distributed_run():
        return amax
    word = amax.view(torch.int32).clone()
    for process_group in group if isinstance(group, tuple) else (group,):
        word = word.to(collective_device(process_group, word.device))
        dist.all_reduce(word, op=dist.ReduceOp.MAX, group=process_group)
    return word.view(torch.float32).to(amax.device)


def collective_device(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """``device``, if ``group`` has a backend for its kind, else the first kind that it has one for."""
    kinds = [backend.partition(":")[0] for backend in dist.get_backend_config(group).split(",")]
    return device if device.type in kinds else torch.device(kinds[0])
