"""What commands print with: one place for streams, colours and formats."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
"""The option that every command has."""

CONFIG_HELP = "A file, or an example of the package by name, such as quickstart."

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help=CONFIG_HELP, show_default=False)]
"""The argument of every command that reads one configuration."""


class Format(enum.StrEnum):
    """How findings are printed."""

    text = "text"
    json = "json"
    github = "github"


def echo(text: str) -> None:
    """A line, or several, on stdout."""
    typer.echo(text)


def echo_json(value: Any) -> None:
    """Plain values as JSON on stdout."""
    typer.echo(json.dumps(value, indent=2))


def error(text: str) -> None:
    """A message on stderr."""
    typer.echo(text, err=True)
