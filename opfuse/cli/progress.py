"""How far a command is, on stderr: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from opfuse.cli.output import error

LINES = 10
"""Lines where there is no terminal to draw a bar on."""


def is_due(number: int, total: int) -> bool:
    """Whether a line is to be printed after ``number`` of ``total``."""
    return number * LINES // total > (number - 1) * LINES // total


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """What is to be called after each of ``total`` equal parts, from any thread."""
    if not sys.stderr.isatty():
        numbers = count(1)
        yield lambda: error(f"{what} {number}/{total}") if is_due(number := next(numbers), total) else None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
