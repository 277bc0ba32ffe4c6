"""How far training is, on stderr: bars on a terminal, else a line now and then."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from opfuse.cli.output import error

if TYPE_CHECKING:
    from opfuse.train import OnNamedStep, TrainStep

LINES = 10
"""Lines where there is no terminal to draw a bar on."""


def is_due(number: int, total: int) -> bool:
    """Whether a line is to be printed after ``number`` of ``total``."""
    return number * LINES // total > (number - 1) * LINES // total


def reporter() -> AbstractContextManager[OnNamedStep]:
    """A function to call after each step of training: it draws a bar for each run on a terminal, else prints lines."""
    return bars() if sys.stderr.isatty() else lines()


@contextmanager
def bars() -> Iterator[OnNamedStep]:
    """A progress bar for each run."""
    columns = (TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        tasks: dict[str, TaskID] = {}

        def on_step(label: str, step: TrainStep) -> None:
            if label not in tasks:
                tasks[label] = progress.add_task(label, total=step.total, loss="")
            progress.update(tasks[label], completed=step.number, loss=_losses(step))

        yield on_step


@contextmanager
def lines() -> Iterator[OnNamedStep]:
    """A few lines for each run."""

    def on_step(label: str, step: TrainStep) -> None:
        if is_due(step.number, step.total):
            error(f"{label:>12}  step {step.number}/{step.total}  {_losses(step)}")

    yield on_step


def _losses(step: TrainStep) -> str:
    return f"loss {step.loss:.3f}" + ("" if step.validation is None else f"  validation {step.validation:.3f}")
