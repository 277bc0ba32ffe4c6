"""Where what is watched goes: lines of JSON, TensorBoard, Weights & Biases, or a function of one's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from opfuse.errors import OutputError, describe, os_error_text
from opfuse.formats import ROWWISE

Sink = Callable[[Mapping[str, Any]], None]
"""Takes one record: the fields of :data:`WATCHED`, and more that was found."""

SCALARS = ("amax", "saturated", "flushed", "nonfinite", "sqnr")
"""The figures of a cast that are one number."""

WATCHED = ("step", "op", "tensor", "plane", "format", *SCALARS)
"""The columns of a table of records."""


def sink_of(to: object) -> Sink:
    """What writes to ``to``.

    A path, to whose end lines of JSON go; a SummaryWriter, by ``add_scalar``; a run of W&B, by ``log``; a function of a record;
    None: nowhere. OutputError for anything else, and for a path that cannot be written.
    """
    if to is None:
        return lambda record: None
    if isinstance(to, str | Path):
        return _lines(Path(to))
    if hasattr(to, "add_scalar"):
        return _scalars(to)
    if callable(getattr(to, "log", None)):
        return _logged(to)
    if callable(to):
        return to
    cure = "pass a path, a SummaryWriter of torch.utils.tensorboard, a run of wandb, or a function"
    raise OutputError(describe("watch(to=)", wanted="something to write to", got=type(to).__name__, cure=cure))


def _lines(path: Path) -> Sink:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        got, cure = os_error_text(error), "name another path"
        raise OutputError(describe(str(path), wanted="a file to write", got=got, cure=cure)) from None

    def write(record: Mapping[str, Any]) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")

    return write


def _named(record: Mapping[str, Any]) -> dict[str, float]:
    names = (name for name in SCALARS if record.get(name) is not None)
    place = (record["op"], record["tensor"], *(() if record["plane"] == ROWWISE else (record["plane"],)))
    return {"/".join((*place, name)): record[name] for name in names}


def _scalars(writer: Any) -> Sink:
    def write(record: Mapping[str, Any]) -> None:
        for name, value in _named(record).items():
            writer.add_scalar(name, value, record["step"])

    return write


def _logged(run: Any) -> Sink:
    def write(record: Mapping[str, Any]) -> None:
        run.log(_named(record), step=record["step"])

    return write
