"""Counts of the plans and programs that pipelines keep for later calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from opfuse.compiler.plan import Plan, PlanKey
from opfuse.keys import Cache
from opfuse.runtime.replay.host_bytes import bytes_of


class CacheInfo(NamedTuple):
    """Plans alive, calls that found one, calls that did not, and why the last one did not.

    programs: recordings alive. block_bytes: the most device memory that a call of one has in one block; none is held between
    calls. host_bytes: what recordings, their code, parameters and layout keys take of the host's memory, without CUDA graphs
    of their launches, four for a recording; counting takes some milliseconds for each recording. A pipeline keeps at most 64
    plans, a segment of a plan programs for 32 layouts of its inputs, and each of these programs for 8 layouts of gradients;
    the least recently used, or made, is dropped. dropped: recordings that were dropped since those of the process took more
    of the host's memory than ``OPFUSE_PROGRAM_BYTES`` allows, the least recently used first; where it grows with every step,
    allow more, or call with fewer shapes. graphs: CUDA graphs that stand for what recordings queue, at calls with the
    addresses of earlier ones; where none come, the addresses of steps differ.
    """

    plans: int
    hits: int
    misses: int
    last_miss: str | None
    programs: int = 0
    block_bytes: int = 0
    host_bytes: int = 0
    dropped: int = 0
    graphs: int = 0


class CountedPipeline(Protocol):
    """The parts of a pipeline that are counted, as :class:`~opfuse.runtime.fuser.OperationFuser` says."""

    cache: Cache[PlanKey, Plan]
    last_missed: int


def info_of(pipelines: Iterable[CountedPipeline]) -> CacheInfo:
    """The counts of several pipelines together, and why the latest miss of all was one."""
    pipelines = [*pipelines]
    latest = max(pipelines, key=lambda pipeline: pipeline.last_missed, default=None)
    caches = [pipeline.cache for pipeline in pipelines]
    plans = [plan for each in caches for _, plan in each.items()]
    known = [each for plan in plans for each in list(plan.programs.values())]
    recorded = [what for each in known for _, what in each.recorded()]
    programs = [program for each in recorded for program in each.programs()]
    return CacheInfo(
        sum(map(len, caches)),
        sum(each.hits for each in caches),
        sum(each.misses for each in caches),
        None if latest is None or latest.cache.last_miss is None else str(latest.cache.last_miss),
        len(programs),
        max((program.block_bytes for program in programs), default=0),
        bytes_of([*(plan.programs for plan in plans), *(program.constants for program in programs)])
        + sum(program.frame_bytes for program in programs),
        sum(each.dropped for each in (*known, *(behind for what in recorded for behind in what.behind))),
        sum(program.graphs for program in programs),
    )
