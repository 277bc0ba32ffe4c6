"""Counts of the plans and programs that pipelines keep for later calls."""

from __future__ import annotations

import builtins
import gc
import sys
from collections.abc import Iterable, Sequence
from types import CodeType
from typing import NamedTuple

from opfuse.compiler.plan import Plan, PlanKey
from opfuse.keys import Cache
from opfuse.program.program import Program
from opfuse.runtime.recorded import RecordedBackward, RecordedValues


class CacheInfo(NamedTuple):
    """Plans alive, calls that found one, calls that did not, and why the last one did not.

    programs: recordings alive. block_bytes: the most device memory that a call of one has for small tensors; none is held between
    calls. host_bytes: what recordings, their code, parameters and looks take of the host's memory; counting takes some
    milliseconds for each recording. A pipeline keeps at most 64 plans, a segment of a plan programs for 32
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
    plans = [plan for each in caches for _, plan in each.items()]
    programs = [program for plan in plans for program in _programs(plan)]
    return CacheInfo(
        sum(map(len, caches)),
        sum(each.hits for each in caches),
        sum(each.misses for each in caches),
        last_miss,
        len(programs),
        max((program.block_bytes for program in programs), default=0),
        _bytes_of([*(plan.programs for plan in plans), *(program.constants for program in programs)])
        + sum(program.frame_bytes for program in programs),
    )


def _programs(plan: Plan) -> list[Program]:
    made = (each for looks in list(plan.programs.values()) for each in list(looks.values()))
    return [program for each in made if isinstance(each, RecordedValues | RecordedBackward) for program in each.programs()]


_PLAIN = (dict, list, tuple, frozenset, str, bytes, int, float, CodeType, memoryview)
_OWN = ("opfuse.program.", "opfuse.runtime.recorded", "opfuse.runtime.run", "opfuse.core.context", "opfuse.tensors.storage")
"""Modules whose objects belong to one recording. What else it holds, as ops, torch's functions and tensors, is shared."""


def _bytes_of(things: Sequence[object]) -> int:
    """Bytes of objects and of what belongs to them, each object once."""
    seen, waiting, total = {id(vars(builtins))}, [*things], 0
    while waiting:
        each = waiting.pop()
        if id(each) not in seen and (isinstance(each, _PLAIN) or type(each).__module__.startswith(_OWN)):
            seen.add(id(each))
            total += sys.getsizeof(each)
            waiting += _parts(each) if isinstance(each, CodeType) else gc.get_referents(each)
    return total


def _parts(code: CodeType) -> tuple[object, ...]:
    """What Python's collector does not see of code, since it is in no cycle."""
    return code.co_consts, code.co_names, code.co_varnames, code.co_linetable, code.co_exceptiontable
