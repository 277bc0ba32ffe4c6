"""``opfuse check``: everything wrong in configurations, at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from opfuse.cli.output import CONFIG_HELP, Format, Json, echo
from opfuse.config import Finding, load
from opfuse.config.findings import FORMATS
from opfuse.errors import ConfigError


def check(
    configs: Annotated[list[Path], typer.Argument(metavar="CONFIG...", help=CONFIG_HELP, show_default=False)],
    format: Annotated[Format, typer.Option(help="How to print findings.")] = Format.text,
    as_json: Json = False,
) -> None:
    """Find what is wrong in configurations."""
    chosen = Format.json if as_json else format
    findings = [finding for path in configs for finding in _findings(path)]
    if findings or chosen is Format.json:
        echo(FORMATS[chosen](findings))
    if chosen is Format.text:
        echo(f"{_count(findings, 'finding')} in {_count(configs, 'file')}")
    raise typer.Exit(1 if findings else 0)


def _findings(path: Path) -> tuple[Finding, ...]:
    try:
        load(path)
    except ConfigError as error:
        return error.findings
    return ()


def _count(things: list[Finding] | list[Path], noun: str) -> str:
    return f"{len(things) or 'no'} {noun}{'' if len(things) == 1 else 's'}"
