"""Where a run stands, on disk: enough to go on from it with the same bits, and to know that it is the same run."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from opfuse.errors import OutputError, describe, told_of
from opfuse.train.files import write

FOLDER, CONFIGURATION = "checkpoints", "config.yaml"


@dataclass(frozen=True)
class RunState:
    """A run after ``step`` steps.

    model, optimizer, schedule: their state dicts. generators: of torch's default generators, by device type. losses,
    validation, seconds, fusions, cache: as far as the curve has come.
    """

    step: int
    model: dict[str, Any]
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    generators: dict[str, torch.Tensor]
    losses: list[float]
    validation: list[tuple[int, float]]
    seconds: float
    fusions: list[tuple[str, str, int]]
    cache: dict[str, Any]


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a comparison, one for each of its runs, in place of the one before.

    run: what makes it this run and no other, in words. resume: whether to go on from what is there. failed: takes what could
    not be written, and training goes on; None: it is raised. told: takes a sentence for each run that was to go on.
    """

    directory: Path
    run: Mapping[str, str]
    resume: bool = False
    failed: Callable[[OutputError], None] | None = None
    told: Callable[[str], None] = lambda _: None

    def path(self, label: str) -> Path:
        """The file of one run."""
        return self.directory / FOLDER / f"{label}.pt"

    def begin(self, configuration: bytes) -> None:
        """Put the configuration beside the checkpoints."""
        self._put(self.directory / CONFIGURATION, configuration)

    def save(self, label: str, saved: RunState) -> None:
        """Write it as a whole, in place of the last one."""
        content = io.BytesIO()
        torch.save({"run": dict(self.run), **asdict(saved)}, content)
        self._put(self.path(label), content.getvalue())

    def _put(self, path: Path, content: bytes) -> None:
        try:
            for part in path.parent.glob(f".{path.name}.*.tmp"):  # of a process that was killed while it wrote
                part.unlink()
            write(path, content)
        except OSError as error:
            cure = "make room; what was written before is whole"
            problem = OutputError(describe(str(path), wanted="room for what a run can go on from", got=told_of(error), cure=cure))
            if self.failed is None:
                raise problem from None
            self.failed(problem)

    def load(self, label: str) -> RunState | None:
        """What to go on from; None if there is nothing. OutputError if it is of another run, or no checkpoint at all."""
        path = self.path(label)
        if not self.resume:
            return None
        if not path.exists():
            self.told(f"{label}: no checkpoint to go on from, so it begins anew")
            return None
        found = read(path)
        others = found.pop("run")
        for name, value in self.run.items():
            if others.get(name) != value:
                wanted, got = difference(others.get(name, ""), value)
                cure = "go on with what the run began with, or begin anew without --resume"
                raise OutputError(describe(f"{path} {name}", wanted=wanted, got=got, cure=cure))
        self.told(f"{label}: goes on after step {found['step']}")
        return RunState(**found)


def read(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, on the CPU. OutputError if it is none."""
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(found, dict) and found.keys() == {"run", *(field.name for field in fields(RunState))}:
            return found
        got = "a file of something else"
    except OSError as error:
        got = told_of(error)
    except Exception as error:  # what bytes that are no checkpoint raise is torch's business: several types, that of pickle too
        got = str(error).partition("\n")[0] or type(error).__name__
    raise OutputError(describe(str(path), wanted="a checkpoint of opfuse run", got=got, cure="run without --resume"))


def difference(before: str, now: str) -> tuple[str, str]:
    """Where two texts first differ, line by line: what stood there, and what does now."""
    old, new = before.splitlines(), now.splitlines()
    length = max(len(old), len(new))
    lines = (tuple(text[i] if i < len(text) else "nothing" for text in (old, new)) for i in range(length))
    number, (was, found) = next(((i, pair) for i, pair in enumerate(lines, 1) if pair[0] != pair[1]), (1, (before, now)))
    return (was, found) if length == 1 else (f"line {number} to be {was!r}", repr(found))
