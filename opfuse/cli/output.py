"""What commands print with: one place for streams, colours and formats."""

from __future__ import annotations

import json
from collections.abc import Sized
from typing import Any

import typer

from opfuse.errors import number_of


def echo(text: str) -> None:
    """A line, or several, on stdout."""
    typer.echo(text)


def echo_json(value: Any) -> None:
    """Plain values as JSON on stdout."""
    typer.echo(json.dumps(value, indent=2))


def counted(things: Sized, noun: str) -> str:
    """``no findings``, ``1 finding``, ``2 findings``."""
    text = number_of(len(things), noun)
    return text if things else text.replace("0", "no", 1)


def error(text: str) -> None:
    """A message on stderr."""
    typer.echo(text, err=True)
