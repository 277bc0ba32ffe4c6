"""``opfuse check``: everything wrong in configurations, at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from opfuse.cli.output import echo
from opfuse.config.findings import FORMATS
from opfuse.config.load import check as check_file


def check(configs: Sequence[Path], *, format: str) -> None:
    """Print the findings of all files, in one of :data:`FORMATS`, and end with 1 if there are any."""
    findings = [finding for path in configs for finding in check_file(path)]
    if findings or format == "json":
        echo(FORMATS[format](findings))
    if format == "text":
        echo(f"{_count(findings, 'finding')} in {_count(configs, 'file')}")
    raise typer.Exit(1 if findings else 0)


def _count(things: Sequence[Any], noun: str) -> str:
    return f"{len(things) or 'no'} {noun}{'' if len(things) == 1 else 's'}"
