"""``opfuse.compare_ranks``: whether the ranks of a job plan the same, asked while it runs."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from opfuse.errors import PipelineError, number_of
from opfuse.inspect.trace import Odd, PlanLine, Process, Trace, odd_ranks
from opfuse.keys import digest, leaves
from opfuse.runtime.plans import trace
from opfuse.tensors.quantizers.ranks import checked_group, in_distributed_run


@dataclass(frozen=True)
class ComparedRanks:
    """What the ranks of a group planned. plans: of each rank, in its order in the group; odd: what some planned otherwise."""

    plans: tuple[int, ...]
    odd: tuple[Odd, ...]

    @property
    def agree(self) -> bool:
        """Whether all planned the same for each pipeline."""
        return not self.odd

    def __str__(self) -> str:
        ranks = len(self.plans)
        plans = number_of(self.plans[0], "plan")
        same = f"all {ranks} ranks made the same {plans}" if ranks > 1 else f"one rank made {plans}"
        return "\n".join(map(str, self.odd)) or same


def compare_ranks(group: dist.ProcessGroup | None = None) -> ComparedRanks:
    """Compare the keys of all plans over the ranks of ``group`` (default: all), and name the rank that disagrees, and in what.

    A collective operation: every rank of the group calls it, at the same place of the program, and gets the same answer. Ranks
    that agree send a digest and a number each; keys with their sources travel only if digests differ. Compares the latest 256
    plans of each pipeline that is in use. Without torch.distributed there is one rank. PipelineError for what is no group.
    """
    checked_group("compare_ranks(group=)", group, PipelineError)
    gc.collect()  # what nobody holds lives until the collector runs, on each rank at another time
    plans = trace.in_order(trace.traced())
    own = [(pipeline.where, trace.key_id(leaves(found.key))) for pipeline, found in plans]
    digests = _gathered((digest(tuple(own)), len(own)), group)
    if len({digits for digits, _ in digests}) == 1:
        return ComparedRanks(tuple(number for _, number in digests), ())
    ranks = _gathered((trace.process(), [trace.plan_record(pipeline, found, None) for pipeline, found in plans]), group)
    traces = [_trace(*rank) for rank in ranks]
    return ComparedRanks(tuple(number for _, number in digests), tuple(odd_ranks(traces)))


def _gathered(what: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """What each rank has, in the order of the group."""
    if not in_distributed_run():
        return [what]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, what, group=group)
    return found


def _trace(fields: dict[str, Any], plans: list[dict[str, Any]]) -> Trace:
    """What a rank sent, as a trace of it would be read."""
    process = Process(**fields)
    return Trace(Path(f"rank {process.rank}"), process, tuple(PlanLine(**plan) for plan in plans), None)
