"""Counts of the plans and programs that pipelines keep for later calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from opfuse.compiler.plan import Plan, PlanKey
from opfuse.keys import Cache
from opfuse.program.program import Program
from opfuse.runtime.recorded import RecordedBackward, RecordedValues


class CacheInfo(NamedTuple):
    """Plans alive, calls that found one, calls that did not, and why the last one did not.

    programs: recordings alive. block_bytes: the most device memory that a call of one has for small tensors; none is held between
    calls. host_bytes: bytes of their parameters and texts. A pipeline keeps at most 64 plans, a segment of a plan programs for 32
    looks of its inputs, and each of these programs for 8 looks of gradients; the least recently used, or made, is dropped.
    """

    plans: int
    hits: int
    misses: int
    last_miss: str | None
    programs: int = 0
    block_bytes: int = 0
    host_bytes: int = 0


def info_of(caches: Iterable[Cache[PlanKey, Plan]], last_miss: str | None) -> CacheInfo:
    """The counts of several pipelines together."""
    caches = list(caches)
    programs = [program for each in caches for _, plan in each.items() for program in _programs(plan)]
    return CacheInfo(
        sum(map(len, caches)),
        sum(each.hits for each in caches),
        sum(each.misses for each in caches),
        last_miss,
        len(programs),
        max((program.block_bytes for program in programs), default=0),
        sum(program.host_bytes for program in programs),
    )


def _programs(plan: Plan) -> list[Program]:
    made = (each for looks in list(plan.programs.values()) for each in list(looks.values()))
    return [program for each in made if isinstance(each, RecordedValues | RecordedBackward) for program in each.programs()]
