"""Where a run stands, on disk: enough to go on from it with the same bits, and to know that it is the same run."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from opfuse.errors import OutputError, describe, os_error_text, problem_of
from opfuse.tensors.archives import unarchived
from opfuse.train.files import write

FOLDER, CONFIGURATION = "checkpoints", "config.yaml"


@dataclass(frozen=True)
class RunState:
    """A run after ``step`` steps.

    model, optimizer, schedule: their state dicts. generators: of torch's default generators, by device type. losses,
    validation, seconds, plans, cache, fusions, measured: as far as the curve has come. watched: what casts did until then.
    """

    step: int
    model: dict[str, Any]
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    generators: dict[str, torch.Tensor]
    losses: list[float]
    validation: list[tuple[int, float]]
    seconds: float
    plans: list[dict[str, Any]]
    cache: dict[str, Any]
    fusions: list[tuple[str, str, int]]
    measured: list[tuple[int, float, int, int]]
    watched: list[Mapping[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a comparison: of each of its runs the last one, and the one before it, should the last be damaged.

    run: what makes it this run and no other, in words. resume: whether to go on from what is there. report: takes a sentence for
    each run that was to go on.
    """

    directory: Path
    run: Mapping[str, str]
    resume: bool = False
    report: Callable[[str], None] = lambda _: None

    def path(self, label: str) -> Path:
        """The last checkpoint of one run."""
        return self.directory / FOLDER / f"{label}.pt"

    def before(self, label: str) -> Path:
        """The checkpoint before it."""
        return self.directory / FOLDER / f"{label}.before.pt"

    def begin(self, configuration: bytes, labels: Iterable[str]) -> None:
        """Put the configuration beside the checkpoints. Of a run that begins anew, none of an earlier one is left to go on from.

        OutputError if it cannot be written.
        """
        for label in () if self.resume else labels:
            for path in (self.path(label), self.before(label)):
                path.unlink(missing_ok=True)
        _put(self.directory / CONFIGURATION, configuration)

    def save(self, label: str, saved: RunState) -> None:
        """Write a checkpoint; the last one becomes the one before. OutputError, with both as they were, if it cannot."""
        content = io.BytesIO()
        torch.save({"run": dict(self.run), **asdict(saved)}, content)
        _put(self.path(label), content.getvalue(), kept=self.before(label))

    def load(self, label: str) -> RunState | None:
        """What to go on from: the last checkpoint that is whole; None if there is nothing.

        OutputError if none of them is whole, or if it is of another run.
        """
        if not self.resume:
            return None
        there = [path for path in (self.path(label), self.before(label)) if path.exists()]
        if not there:
            self.report(f"{label}: no checkpoint to go on from, so it begins anew")
            return None
        path, found = self._whole(label, *there)
        others = found.pop("run")
        for name, value in self.run.items():
            if others.get(name) != value:
                wanted, got = difference(others.get(name, ""), value)
                cure = "go on with what the run began with, or begin anew: with --force in its place, or elsewhere with --out"
                raise OutputError(describe(f"{path} {name}", wanted=wanted, got=got, cure=cure))
        os.replace(path, self.path(label))  # so that what is damaged never becomes the checkpoint before
        self.report(f"{label}: goes on after step {found['step']}")
        return RunState(**found)

    def _whole(self, label: str, path: Path, *earlier: Path) -> tuple[Path, dict[str, Any]]:
        """The first checkpoint that is whole, and what it holds. The OutputError of the last of them if none is."""
        try:
            return path, read(path)
        except OutputError as problem:
            if not earlier:
                raise
            self.report(f"{label}: {problem_of(problem)}; the checkpoint before it takes its place")
            return self._whole(label, *earlier)


def _put(path: Path, content: bytes, kept: Path | None = None) -> None:
    """Write a file as a whole; what was there becomes ``kept``. OutputError, with all as it was, if it cannot be written."""
    try:
        for part in path.parent.glob(f".{path.name}.*.tmp"):  # of a process that was killed while it wrote
            part.unlink()
        write(path, content, kept=kept)
    except OSError as error:
        cure = "make room, and go on with --resume; what was written before is whole"
        text = describe(str(path), wanted="room for what a run can go on from", got=os_error_text(error), cure=cure)
        raise OutputError(text) from None


def read(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, on the CPU. OutputError if it is none, or damaged."""
    try:
        found: Any = unarchived(path)
        if isinstance(found, dict) and found.keys() == {"run", *(each.name for each in fields(RunState))}:
            return found
        got = "a file of something else"
    except OSError as error:
        got = os_error_text(error)
    except Exception as error:  # what bytes that are no checkpoint raise is torch's business: many types
        got = str(error).partition("\n")[0] or type(error).__name__
    cure = "have opfuse run --resume take the checkpoint before it, or begin anew without --resume"
    raise OutputError(describe(str(path), wanted="a checkpoint of opfuse run", got=got, cure=cure))


def difference(before: str, now: str) -> tuple[str, str]:
    """Where two texts first differ, line by line: what stood there, and what does now."""
    old, new = before.splitlines(), now.splitlines()
    length = max(len(old), len(new))
    lines = (tuple(text[i] if i < len(text) else "nothing" for text in (old, new)) for i in range(length))
    number, (was, found) = next(((i, pair) for i, pair in enumerate(lines, 1) if pair[0] != pair[1]), (1, (before, now)))
    return (was, found) if length == 1 else (f"line {number} to be {was!r}", repr(found))
