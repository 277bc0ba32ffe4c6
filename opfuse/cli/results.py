"""What a command found: tables on stdout, files in a directory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from opfuse.cli.output import echo
from opfuse.errors import OutputError, describe
from opfuse.train.files import reason

_WIDEST = 10_000
"""Columns of the widest table in a file."""


def show(table: Table) -> None:
    """A table on stdout: as wide as the terminal, with cells folded; in a file or a pipe as wide as its rows."""
    console = Console(highlight=False)
    if not console.is_terminal:
        width = console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum
        console = Console(highlight=False, width=max(width, 1))
    for column in table.columns:
        column.overflow = "fold"
    console.print(table)


def keep(write: Callable[[Path], list[Path]], directory: Path, text: Callable[[], str]) -> list[Path]:
    """What ``write`` wrote into ``directory``. If it cannot, the results go to a new directory, else ``text`` to stdout, and
    OutputError says so: nothing that was computed is lost.
    """
    try:
        return write(directory)
    except OSError as failed:
        got = reason(failed)
    try:
        written = write(Path(tempfile.mkdtemp(prefix="opfuse-")))
        place = f"what was computed is in {written[0].parent}"
    except OSError:
        echo(text())
        place = "what was computed is on stdout"
    raise OutputError(describe(str(directory), wanted="room for the results", got=got, cure=f"make room; {place}"))
