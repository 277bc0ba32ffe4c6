"""Findings: what is wrong in a file, where, and what to do; printed so that an editor can jump to each."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from opfuse.errors import ConfigError, closest, nearest

PathStep = str | int
Loc = tuple[PathStep, ...]
"""Keys and indices from the top of a document to a value."""

WINDOW = 160
"""Columns of a source line that a finding shows at most."""


@dataclass(frozen=True)
class Span:
    """Where something stands: line and column from 1, and how many columns it covers on that line."""

    line: int
    column: int
    width: int = 1


@dataclass(frozen=True)
class Finding:
    """One thing wrong at one place. code: a short name to search for. source: the line it stands on."""

    path: str
    span: Span
    code: str
    message: str
    help: str = ""
    source: str = ""

    def __str__(self) -> str:
        span = self.span
        head = f"{self.path}:{span.line}:{span.column}: error[{self.code}]: {self.message}"
        help = f"\n      = help: {self.help}" if self.help else ""
        if not self.source.strip():
            return head + help
        start = max(0, span.column - WINDOW // 2)
        line = printable(self.source[start : start + WINDOW])
        column = span.column - 1 - start
        carets = "^" * max(1, min(span.width, len(line) - column))
        return f"{head}\n{span.line:>5} | {line}\n      | {' ' * column}{carets}{help}"

    def record(self) -> dict[str, Any]:
        """The finding as plain values."""
        flat = asdict(self)
        return {"path": self.path, **flat.pop("span"), **flat}


@dataclass(frozen=True)
class Problem:
    """A finding before it has a place: ``loc`` leads to the value, or with ``on="key"`` to its key."""

    code: str
    message: str
    help: str = ""
    loc: Loc = ()
    on: Literal["key", "value"] = "value"


class Refused(ValueError):
    """Raised by validators: one or more problems, each at a place below the value that was validated."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = problems


def shown(value: object) -> str:
    """A value in a message: YAML words for None, True and False, and never long."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return reprlib.repr(value)


def printable(text: str) -> str:
    """``text`` with a space for every character that could move a cursor or that no stream can encode."""
    return "".join(char if char.isprintable() else " " for char in text)


_WRITTEN = {
    r"build the op with (\w+)=(\w+)": r"write \1: \2",
    r",? and pad its input, torch\.nn\.functional\.pad\(x, \(0, (\d+)\)\)": r", and give its input \1 more columns",
    r"pad the last dimension, torch\.nn\.functional\.pad\(x, \(0, (\d+)\)\)": r"give it \1 more columns",
    r" and cut its result, y\[\.\.\., :\d+\]": "",
    r"recipe\.replace\((\w+)='(\w+)'\)": r"\1: \2 in the recipe",
    r"call model\.to\(torch\.(\w+)\), or use torch\.autocast with dtype=torch\.\w+": r"write dtype: \1 in the pipeline",
    r"with quantized=False": "quantized: false",
    r"disable_rht=True of NVFP4BlockScaling": "disable_rht: true in the recipe",
}
"""How a file says what cures say in Python."""


def sentence(error: str) -> tuple[str, str]:
    """What the first line of an error says, and the cure it names, as a file writes it."""
    message, _, cure = error.partition("\n")[0].partition(" Cure: ")
    for code, text in _WRITTEN.items():
        cure = re.sub(code, text, cure)
    return message, cure.rstrip(".")


def similar(name: str, known: Iterable[str]) -> str:
    """``did you mean 'gelu'?`` for the known name closest to ``name``, or an empty string."""
    return nearest(name[:100], known).removeprefix("; ")


def guesses(given: Iterable[str], known: Collection[str]) -> dict[str, str]:
    """By unknown name among ``given``, the known one that :func:`similar` proposes. What follows from a guess is no finding."""
    return {name: near for name in given if name not in known and (near := closest(name[:100], known)) is not None}


def refuse(findings: Sequence[Finding]) -> None:
    """ConfigError with all ``findings``, in the order of the file, unless there are none."""
    if findings:
        raise ConfigError(*sorted(findings, key=lambda finding: (finding.span.line, finding.span.column)))


def as_text(findings: Sequence[Finding]) -> str:
    """One block a finding."""
    return "\n".join(map(str, findings))


def as_json(findings: Sequence[Finding]) -> str:
    """A list of records."""
    return json.dumps([finding.record() for finding in findings], indent=2)


def as_github(findings: Sequence[Finding]) -> str:
    """Workflow commands that annotate the lines of a pull request."""
    return "\n".join(map(_annotation, findings))


def _annotation(finding: Finding) -> str:
    span = finding.span
    text = finding.message + (f" ({finding.help})" if finding.help else "")
    for raw, escaped in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")):
        text = text.replace(raw, escaped)
    path = finding.path.replace("%", "%25").replace(",", "%2C").replace(":", "%3A")
    place = f"file={path},line={span.line},col={span.column}"
    return f"::error {place},title={finding.code}::{text}"


FORMATS = {"text": as_text, "json": as_json, "github": as_github}
"""How findings are printed."""
