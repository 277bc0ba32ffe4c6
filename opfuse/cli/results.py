"""What a command found: tables on stdout, pages and files on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Column, Table

from opfuse.cli.output import echo, error
from opfuse.config import Config
from opfuse.errors import OutputError, describe, os_error_text
from opfuse.runtime.plans.written import OWNER_ONLY
from opfuse.train import usable
from opfuse.train.files import writable, write

_WIDEST = 10_000
"""Columns of the widest table in a file."""


def show_rows(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """A table of plain rows on stdout. Its first column is never folded where the table has a title."""
    first = Column(columns[0], no_wrap=title is not None)
    table = Table(first, *columns[1:], title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    show(table)


def show(table: Table) -> None:
    """A table on stdout: as wide as the terminal, with cells folded; in a file or a pipe as wide as its rows."""
    console = Console(highlight=False)
    if not console.is_terminal:
        width = console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum
        console = Console(highlight=False, width=max(width, 1))
    for column in table.columns:
        column.overflow = "fold"
    console.print(table)


def written(path: Path, content: bytes, cure: str, *, mode: int = OWNER_ONLY) -> None:
    """Write ``content`` to ``path``. OutputError, which names ``cure``, if that cannot be done. mode: of the file."""
    try:
        write(path, content, mode=mode)
    except OSError as failed:
        raise OutputError(describe(str(path), wanted="a file to write", got=os_error_text(failed), cure=cure)) from None


def device_for(device: str) -> torch.device:
    """The device to train on, which is said on stderr. UnsupportedError if it is not here."""
    place = usable(device)
    error(f"trains on {place}" + (f", {torch.cuda.get_device_name(place)}" if place.type == "cuda" else ""))
    return place


def directory_for(config: Config, out: Path | None) -> Path:
    """Where the results of a configuration go: ``out``, or ``runs/NAME``. OutputError if no file can be written there."""
    return writable(out or Path("runs") / config.name)


def print_files(paths: Sequence[Path], *, as_json: bool) -> None:
    """Say which files were written, and why no plot is among them."""
    if not any(path.suffix == ".png" for path in paths):
        error("no plot: matplotlib is not installed (pip install matplotlib)")
    if not as_json:
        echo(f"wrote    {', '.join(map(str, paths))}")


def write_or_salvage(write: Callable[[Path], list[Path]], directory: Path, text: Callable[[], str]) -> list[Path]:
    """What ``write`` wrote into ``directory``. If it cannot, the results go to a new directory, else ``text`` to stdout, and
    OutputError says so: nothing that was computed is lost.
    """
    try:
        return write(directory)
    except OSError as failed:
        got = os_error_text(failed)
    try:
        written = write(Path(tempfile.mkdtemp(prefix="opfuse-")))
        place = f"what was computed is in {written[0].parent}"
    except OSError:
        echo(text())
        place = "what was computed is on stdout"
    raise OutputError(describe(str(directory), wanted="room for the results", got=got, cure=f"make room; {place}"))
