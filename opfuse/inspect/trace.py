"""Traces: the plans that processes wrote to files, read back and compared.

A trace is a file of JSON lines, format version 1, written by ``runtime/plans/trace.py``; a directory of them is one run, with
a file for each process. The first line describes the process, each next line a plan that was made, or what :func:`opfuse.watch`
records of training: the model, a step, a cast; a process that was not killed adds a last line of counts. Each line has a
checksum, ``crc32``: a line that differs from what was written is refused.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from opfuse.errors import TraceError, describe, nearest
from opfuse.runtime.plans.written import unsealed

SUFFIX = ".jsonl"


class TraceRecord(BaseModel):
    """A line, or a part of one: exactly these keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Process(TraceRecord):
    """The process that wrote the file. settings: settings of torch that may change results. started: in UTC."""

    record: Literal["process"]
    version: Literal[1]
    rank: int
    ranks: int
    pid: int
    started: str
    command: list[str]
    versions: dict[str, str]
    device: str
    environment: dict[str, str]
    settings: dict[str, Any]


class KeyLeaf(TraceRecord):
    """A value of a key, and where it came from: ``default``, ``environment NAME``, ``fp8.yaml:7:12``, ``train.py:88``."""

    path: str
    value: Any
    source: str | None

    def __str__(self) -> str:
        return f"{self.path} = {self.value!r}" + (f"  ({self.source})" if self.source else "")


class KeyDifference(TraceRecord):
    """A leaf in which a key differs from the nearest that had a plan."""

    path: str
    old: Any
    new: Any
    old_source: str | None
    new_source: str | None

    def __str__(self) -> str:
        sources = [f"{when}: {source}" for when, source in (("was", self.old_source), ("now", self.new_source)) if source]
        same = self.old_source == self.new_source
        return f"{self.path}: {self.old!r} -> {self.new!r}" + ("" if same else f" ({', '.join(sources)})")


class PlanLine(TraceRecord):
    """A call that found no plan, and the plan that was made for it.

    number: among the misses of the process. call: among the calls of the pipeline. key: digits of the key, the same in every
    process; nearest: those of the plan that came closest, None for the first. again: the key had a plan that the cache dropped.
    thrash: told if misses repeat in a pattern. plan: the graph and its groups, as ``opfuse explain`` has them; None if dropped.
    """

    record: Literal["plan"]
    number: int
    call: int
    seconds: float
    pipeline: str
    handle: str
    ms: float
    key: str
    nearest: str | None
    again: bool
    differences: list[KeyDifference]
    thrash: str | None
    leaves: list[KeyLeaf]
    plan: dict[str, Any] | None
    outcomes: list[dict[str, Any]]

    @property
    def why(self) -> str:
        """The reason of the miss in a line."""
        if self.nearest is None:
            return "first plan: the cache was empty"
        again = ("planned before, and dropped",) * self.again
        return "; ".join((*again, *map(str, self.differences))) or "nothing of the key that is told differs"


class ModelLine(TraceRecord):
    """The model that is watched, by the name of its class. modules: what became of each that ``fuse_`` converted, alike ones
    once: module, class, recipe, what it became, and its status. every: casts are looked at in each such training call.
    """

    record: Literal["model"]
    model: str
    every: int
    modules: list[tuple[str, str, str, str, str]]


class StepLine(TraceRecord):
    """What the training script logged after a step, which is a number of training calls of the model.

    seconds: since the process began. ms: milliseconds since it logged before, None for the first. memory, peak: bytes that are
    allocated on the model's GPU, and that were at most; of a model on the CPU, those of the process. figures: by name.
    """

    record: Literal["step"]
    step: int
    seconds: float
    ms: float | None
    memory: int
    peak: int
    figures: dict[str, float]


class CastLine(TraceRecord):
    """What a cast did in a step that was looked at: the fields of :class:`~opfuse.inspect.casts.CastFigures`."""

    record: Literal["cast"]
    step: int
    op: str
    tensor: str
    format: str
    plane: str
    elements: int
    amax: float
    nonfinite: float
    saturated: float
    flushed: float
    sqnr: float | None
    scales: dict[int, float]


class PipelineCounts(TraceRecord):
    """Plans alive, calls that found one, and calls that did not."""

    pipeline: str
    handle: str
    plans: int
    hits: int
    misses: int


class Counts(TraceRecord):
    """What the process came to."""

    record: Literal["counts"]
    seconds: float
    pipelines: list[PipelineCounts]


TraceLine = Process | PlanLine | ModelLine | StepLine | CastLine | Counts
_LINE: TypeAdapter[TraceLine] = TypeAdapter(Annotated[TraceLine, Field(discriminator="record")])
AnyLine = TypeVar("AnyLine", bound=TraceRecord)


@dataclass(frozen=True)
class Trace:
    """What one process wrote. counts: None where it was killed, or is still running. steps, casts, models: what it recorded."""

    path: Path
    process: Process
    plans: tuple[PlanLine, ...]
    counts: Counts | None
    steps: tuple[StepLine, ...] = ()
    casts: tuple[CastLine, ...] = ()
    models: tuple[ModelLine, ...] = ()

    @classmethod
    def of(cls, path: Path, process: Process, lines: Sequence[TraceRecord]) -> Trace:
        """The lines of a process, by what they are."""

        def all_of(kind: type[AnyLine]) -> tuple[AnyLine, ...]:
            return tuple(line for line in lines if isinstance(line, kind))

        counts = next(reversed(all_of(Counts)), None)
        return cls(path, process, all_of(PlanLine), counts, all_of(StepLine), all_of(CastLine), all_of(ModelLine))


def read(path: str | Path) -> tuple[Trace, ...]:
    """The trace at ``path``, or all of a directory by rank. TraceError for what is none."""
    place = Path(path)
    files = sorted(place.glob(f"*{SUFFIX}")) if place.is_dir() else [place]
    if not files:
        raise TraceError(
            describe(str(path), wanted="a trace", got=f"no *{SUFFIX} file", cure="write one: OPFUSE_TRACE=DIR, opfuse.dump()")
        )
    return tuple(
        sorted((trace for file in files for trace in _file(file)), key=lambda trace: (trace.process.rank, trace.process.started))
    )


def _file(path: Path) -> Iterator[Trace]:
    """The processes that wrote to a file: several, where a container gave one that goes on the number of the one before."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        cure = "name a file that OPFUSE_TRACE or opfuse.dump() wrote, or a directory of them"
        got = (error.strerror if isinstance(error, OSError) else "") or str(error)
        raise TraceError(describe(str(path), wanted="a trace", got=got, cure=cure)) from None
    found = [_line(path, number, line) for number, line in enumerate(lines, 1) if number < len(lines) or _is_whole(line)]
    if not found or not isinstance(found[0], Process):
        got, cure = "another first line" if found else "an empty file", "write it anew: OPFUSE_TRACE=DIR, opfuse.dump()"
        raise TraceError(describe(str(path), wanted="a process in the first line", got=got, cure=cure))
    begins = [at for at, record in enumerate(found) if isinstance(record, Process)]
    for at, end in zip(begins, (*begins[1:], len(found))):
        if isinstance(process := found[at], Process):
            yield Trace.of(path, process, found[at + 1 : end])


def _is_whole(line: str) -> bool:
    """Whether a line that no newline ends has a record as a whole. Any other was cut while it was written, and is left out."""
    try:
        json.JSONDecoder().raw_decode(line)
    except (ValueError, RecursionError):
        return False
    return True


def _line(path: Path, number: int, line: str) -> TraceLine:
    try:
        return _LINE.validate_python(unsealed(line))
    except ValueError as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"msg": str(error), "loc": ()}
        if first.get("type") == "union_tag_not_found":
            first = {"msg": "a line that is no record of a trace", "loc": ()}
        got = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
        cure = "read it with the opfuse that wrote it, or write it anew"
        raise TraceError(describe(f"{path}:{number}", wanted="a line of format version 1", got=got, cure=cure)) from None


# -- answers -----------------------------------------------------------------------------------------------------------------


def plans_of(traces: Iterable[Trace]) -> list[PlanLine]:
    """The plans of all ranks."""
    return [plan for trace in traces for plan in trace.plans]


def find(traces: Iterable[Trace], key: str) -> PlanLine:
    """The latest plan whose key begins with ``key``. TraceError, with the nearest, if there is none or several."""
    plans = plans_of(traces)
    found = {plan.key: plan for plan in plans if plan.key.startswith(key)}
    if len(found) == 1:
        return found.popitem()[1]
    known = sorted({plan.key for plan in plans})
    got = f"{key!r}, which {', '.join(sorted(found))} begin with" if found else f"{key!r}{nearest(key, known)}"
    raise TraceError(describe("key", wanted="the first digits of one key", got=got, cure=f"name one of {', '.join(known)}"))


def differences(old: PlanLine, new: PlanLine) -> list[KeyDifference]:
    """The leaves in which two keys differ, with both sources."""
    before, after = ({leaf.path: leaf for leaf in plan.leaves} for plan in (old, new))
    nothing = KeyLeaf(path="", value="nothing", source=None)
    found = []
    for path in {**before, **after}:
        left, right = before.get(path, nothing), after.get(path, nothing)
        if left.value != right.value:
            fields = {"old": left.value, "new": right.value, "old_source": left.source, "new_source": right.source}
            found.append(KeyDifference(path=path, **fields))
    return found


@dataclass(frozen=True)
class Odd:
    """A rank that differs from most in the ``occurrence``-th plan of a pipeline.

    key: that of its plan, None if it made none. most: that of most ranks' plans, None if most made none. differences: from the
    plan of most ranks; if there is none, from the rank's own nearest plan.
    """

    rank: int
    pipeline: str
    occurrence: int
    key: str | None
    most: str | None
    differences: tuple[KeyDifference, ...]

    def __str__(self) -> str:
        what = "; ".join(map(str, self.differences)) if self.key else "it made no such plan"
        alone = "" if self.most else "most ranks made no such plan: "
        return f"rank {self.rank} disagrees in plan {self.occurrence} of {self.pipeline}: {alone}{what}"


def odd_ranks(traces: Sequence[Trace]) -> list[Odd]:
    """The ranks that disagree with most others about a key, compared plan by plan in the order in which each pipeline made them.

    The number of a rank's device does not count. If as many ranks have one key as another, the first key is right.
    """
    by_rank = [(trace.process.rank, dict(_numbered(trace))) for trace in traces]
    found = []
    for place in dict.fromkeys(place for _, numbered in by_rank for place in numbered):
        plans = {rank: numbered.get(place) for rank, numbered in by_rank}
        votes = Counter(None if plan is None else plan.key for plan in plans.values())
        most = votes.most_common(1)[0][0]  # of as many votes the first
        other = next((plan for plan in plans.values() if plan is not None and plan.key == most), None)
        for rank, plan in plans.items():
            key = None if plan is None else plan.key
            if key != most:
                apart = () if plan is None else plan.differences if other is None else differences(other, plan)
                found.append(Odd(rank, *place, key, most, tuple(apart)))
    return found


def _numbered(trace: Trace) -> Iterator[tuple[tuple[str, int], PlanLine]]:
    """Each plan with the name of its pipeline and its number among those of that name."""
    seen: Counter[str] = Counter()
    for plan in trace.plans:
        seen[plan.pipeline] += 1
        yield (plan.pipeline, seen[plan.pipeline]), plan
