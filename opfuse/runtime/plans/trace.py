"""What a process planned, as lines of JSON: ``OPFUSE_TRACE=dir`` writes them as they come, ``opfuse.dump(path)`` all at once.

A line is an object whose ``record`` says what it is; ``inspect/trace.py`` has the models that read it, and says what they mean.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import platform
import re
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

import opfuse
from opfuse.compiler import plain as plans
from opfuse.compiler.plan import Plan, PlanKey
from opfuse.core.watched import all_enrolled
from opfuse.domains import checked_arguments
from opfuse.environment import OTHERS, VARIABLES, variable
from opfuse.errors import OpfuseWarning, OutputError, TraceError, describe, os_error_text
from opfuse.events import PlanMissed, subscribe_everywhere
from opfuse.keys import Cache, Leaf, Miss, leaves, plain
from opfuse.recipes import RECIPES
from opfuse.recipes.settings import settings_of
from opfuse.runtime.plans.written import owner_only, sealed
from opfuse.tensors.quantizers.ranks import in_distributed_run

VERSION = 1
"""The version of the format. A reader refuses any other."""

TRACE, ARGUMENTS = "OPFUSE_TRACE", "OPFUSE_TRACE_ARGUMENTS"
MASK = "***"
"""What stands for an argument of the command line, which may be a secret."""

_INDEX = re.compile(r"^(\w+):\d+$")


class PlanRecord(NamedTuple):
    """A plan that was made. number: of the miss in the process. call: of the call in the pipeline. ms: milliseconds it took."""

    number: int
    call: int
    seconds: float
    key: PlanKey
    miss: Miss
    ms: float
    thrash: str | None


class TracedPipeline(Protocol):
    """The parts of a pipeline that are traced, as :class:`~opfuse.runtime.fuser.OperationFuser` says."""

    cache: Cache[PlanKey, Plan]
    history: Any

    @property
    def handle(self) -> str: ...

    @property
    def where(self) -> str: ...


_START = time.time()


def rank() -> tuple[int, int]:
    """The rank of this process and the number of ranks, from torch.distributed or from the variables of a launcher."""
    if in_distributed_run():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")]
    return (int(found[0]), int(found[1])) if all(text.isdecimal() for text in found) else (0, 1)


def versions() -> dict[str, str]:
    """The versions of opfuse, torch and Python."""
    return {"opfuse": opfuse.__version__, "torch": torch.__version__, "python": platform.python_version()}


@cache
def recorded_variables() -> frozenset[str]:
    """The variables that may change what is computed, or how fast: no others are written down, since some hold secrets."""
    rules = (rule for cls in RECIPES.values() for _, rule in settings_of(cls).values() if rule is not None)
    return frozenset((*VARIABLES, *OTHERS, *(name for rule in rules for name in rule.environment)))


def process() -> dict[str, Any]:
    """The record of the process as a whole."""
    number, ranks = rank()
    cuda = torch.cuda.is_available()
    return {
        "record": "process",
        "version": VERSION,
        "rank": number,
        "ranks": ranks,
        "pid": os.getpid(),
        "started": datetime.fromtimestamp(_START, UTC).isoformat(timespec="milliseconds"),
        "command": list(sys.argv) if variable(ARGUMENTS) == "1" else [*sys.argv[:1], *(MASK for _ in sys.argv[1:])],
        "versions": versions(),
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {platform.machine()}",
        "environment": {name: os.environ[name] for name in sorted(recorded_variables()) if name in os.environ},
        "settings": {
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "seed": torch.initial_seed(),
            "threads": torch.get_num_threads(),
        },
    }


def key_id(values_of_key: Iterator[Leaf]) -> str:
    """16 digits that are equal for equal keys in every process; sources and the number of the device do not count."""
    rows = [
        (leaf.path, _INDEX.sub(r"\1", value) if isinstance(value := plain(leaf.value), str) else value) for leaf in values_of_key
    ]
    return hashlib.blake2b(json.dumps(rows).encode(), digest_size=8).hexdigest()


def plan_record(pipeline: TracedPipeline, record: PlanRecord, plan: Plan | None) -> dict[str, Any]:
    """A plan and why it was made. plan: None if the cache has dropped it."""
    key_leaves = list(leaves(record.key))
    nearest = record.miss.nearest
    differences = [{**vars(each), "old": _side(each.old), "new": _side(each.new)} for each in record.miss.differences]
    return {
        "record": "plan",
        "number": record.number,
        "call": record.call,
        "seconds": round(record.seconds, 3),
        "pipeline": pipeline.where,
        "handle": pipeline.handle,
        "ms": round(record.ms, 3),
        "key": key_id(iter(key_leaves)),
        "nearest": None if nearest is None else key_id(leaves(nearest)),
        "again": record.miss.again,
        "differences": differences,
        "thrash": record.thrash,
        "leaves": [{"path": leaf.path, "value": plain(leaf.value), "source": leaf.source} for leaf in key_leaves],
        "plan": None if plan is None else plans.pipeline(plan),
        "outcomes": [] if plan is None else [plans.outcome(each) for each in plan.outcomes],
    }


def _side(value: object) -> Any:
    """A side of a difference: a leaf as it is, a composite by its text."""
    return plain(value) if len(list(leaves(value))) == 1 else repr(value)


def counts(pipelines: list[TracedPipeline]) -> dict[str, Any]:
    """How often each pipeline found a plan."""
    rows = [(each, each.cache) for each in pipelines]
    written = [
        {"pipeline": each.where, "handle": each.handle, "plans": len(own), "hits": own.hits, "misses": own.misses}
        for each, own in rows
        if own.misses
    ]
    return {"record": "counts", "seconds": round(time.time() - _START, 3), "pipelines": written}


def records(pipelines: list[TracedPipeline]) -> Iterator[dict[str, Any]]:
    """Everything that is known now."""
    yield process()
    for pipeline, one in in_order(pipelines):
        yield plan_record(pipeline, one, dict(pipeline.cache.items()).get(one.key))
    yield counts(pipelines)


def traced() -> list[TracedPipeline]:
    """The pipelines that are alive."""
    return [each for each in all_enrolled() if hasattr(each, "history")]


def in_order(pipelines: list[TracedPipeline]) -> list[tuple[TracedPipeline, PlanRecord]]:
    """The plans that the pipelines remember, in the order in which they were made."""
    found = [(pipeline, one) for pipeline in pipelines for one in list(pipeline.history)]  # another thread may plan
    return sorted(found, key=lambda pair: pair[1].number)


def text(found: Iterator[Mapping[str, Any]]) -> str:
    """Lines of JSON, each with a checksum."""
    return "".join(sealed(record) + "\n" for record in found)


def write(path: Path, pipelines: list[TracedPipeline]) -> Path:
    """Everything that is known now, into ``path``. OutputError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", encoding="utf-8", opener=owner_only) as file:
            file.write(text(records(pipelines)))
    except OSError as error:
        got = os_error_text(error)
        raise OutputError(describe(str(path), wanted="a file to write", got=got, cure="name another path")) from None
    return path


@checked_arguments(TraceError)
def dump(path: str | Path) -> Path:
    """Write what this process planned: live pipelines, their keys with sources, every miss and why, the environment.

    The file is its owner's alone. Of the environment it has variables that may change results or speed; of the command line the
    program alone, unless OPFUSE_TRACE_ARGUMENTS is 1.

    The format is lines of JSON, as of ``OPFUSE_TRACE``; ``opfuse cache``, ``opfuse report`` and ``opfuse diff`` read it.
    OutputError if the file cannot be written.
    """
    return write(Path(path), traced())


# -- as it comes -------------------------------------------------------------------------------------------------------------


class Writer:
    """Appends records to the file of this process in a directory; what cannot be written is told once, and training goes on.

    Each plan is written once.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory.absolute() / f"rank{rank()[0]}-{os.getpid()}.jsonl"
        self.pid = os.getpid()
        self.failed = False
        self.pipelines: dict[str, TracedPipeline] = {}
        self.written: set[int] = set()
        self.append(process())
        atexit.register(self.end)

    def append(self, record: Mapping[str, Any]) -> None:
        """One more line."""
        if self.failed:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a", encoding="utf-8", opener=owner_only) as file:
                file.write(text(iter([record])))
        except OSError as error:
            self.failed = True
            got, cure = os_error_text(error), f"name a directory in {TRACE} that can be written"
            warnings.warn(
                describe(f"trace {self.path}", wanted="a file to write", got=got, cure=cure), OpfuseWarning, stacklevel=2
            )

    def catch_up(self) -> None:
        """Write the plans that pipelines made before this writer listened."""
        for pipeline, one in in_order(traced()):
            self.plan(pipeline, one, dict(pipeline.cache.items()).get(one.key))

    def plan(self, pipeline: TracedPipeline, record: PlanRecord, plan: Plan | None) -> None:
        """Write a plan that was made, once."""
        if record.number not in self.written:
            self.written.add(record.number)
            self.pipelines[pipeline.handle] = pipeline
            self.append(plan_record(pipeline, record, plan))

    def end(self) -> None:
        """The process ends."""
        if os.getpid() == self.pid and self.path.exists():
            self.append(counts(list(self.pipelines.values())))


@cache
def _writer(directory: str, pid: int) -> Writer:
    return Writer(Path(directory))


_recording: list[Writer] = []
"""Writers that get plans whatever ``OPFUSE_TRACE`` says."""


@contextmanager
def recording(directory: Path) -> Iterator[Writer]:
    """The writer of this process in ``directory``, which gets the plans until the block ends; those that were made come first.

    OutputError if nothing can be written there.
    """
    path = directory / f".opfuse-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.touch()
        path.unlink()
    except OSError as error:
        got, cure = os_error_text(error), "name another directory"
        raise OutputError(describe(str(directory), wanted="a directory to write in", got=got, cure=cure)) from None
    writer = _writer(os.path.abspath(directory), os.getpid())
    writer.catch_up()
    _recording.append(writer)
    try:
        yield writer
    finally:
        _recording.remove(writer)
        writer.end()


def _write_missed(event: PlanMissed) -> None:
    """Write a plan that was made into the directory of ``OPFUSE_TRACE``, if it names one, and to those that record."""
    directory = variable(TRACE)
    named = [_writer(os.path.abspath(directory), os.getpid())] if directory else []
    for writer in dict.fromkeys((*_recording, *named)):
        if writer.pid == os.getpid():  # and not that of a process which has forked this one
            writer.plan(event.pipeline, event.record, event.plan)


subscribe_everywhere(_write_missed, PlanMissed)


def since_start() -> float:
    """Seconds since the process began to trace."""
    return time.time() - _START
