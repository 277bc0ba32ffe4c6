"""Where what is watched goes: a trace, lines of JSON, TensorBoard, Weights & Biases, or a function of one's own."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opfuse.errors import OutputError, describe, os_error_text
from opfuse.formats import ROWWISE
from opfuse.runtime.plans.trace import recording

Write = Callable[[Mapping[str, Any]], None]
"""Takes one record: the fields of :data:`WATCHED` and more of a cast; ``step``, :data:`OF_STEP` and what was logged of a step."""

SCALARS = ("amax", "saturated", "flushed", "nonfinite", "sqnr")
"""The figures of a cast that are one number."""

WATCHED = ("step", "op", "tensor", "plane", "format", *SCALARS)
"""The columns of a table of records."""

OF_STEP = ("seconds", "ms", "memory", "peak")
"""What a record of a step has beside what was logged, as :class:`~opfuse.inspect.trace.StepLine` says."""


@dataclass(frozen=True)
class Sink:
    """Where records go. begin: takes what is known of the model before them. close: after the last."""

    write: Write
    begin: Write = lambda record: None
    close: Callable[[], None] = lambda: None


def sink_of(to: object) -> Sink:
    """What writes to ``to``.

    A path with a suffix, to whose end lines of JSON go; any other path, a directory for a trace with all that this process plans,
    which ``opfuse report`` reads; a SummaryWriter, by ``add_scalar``; a run of W&B, by ``log``; a function of a record; None:
    nowhere. OutputError for anything else, and for a path that cannot be written.
    """
    if to is None:
        return Sink(lambda record: None)
    if isinstance(to, str | Path):
        return _lines(Path(to)) if Path(to).suffix and not Path(to).is_dir() else _trace(Path(to))
    if hasattr(to, "add_scalar"):
        return _scalars(to)
    if callable(getattr(to, "log", None)):
        return _logged(to)
    if callable(to):
        return Sink(to)
    cure = "pass a directory, a file, a SummaryWriter of torch.utils.tensorboard, a run of wandb, or a function"
    raise OutputError(describe("watch(to=)", wanted="something to write to", got=type(to).__name__, cure=cure))


def _trace(directory: Path) -> Sink:
    stack = ExitStack()
    append = stack.enter_context(recording(directory)).append

    def write(record: Mapping[str, Any]) -> None:
        if "op" in record:
            append({"record": "cast", **record})
            return
        own = {name: record[name] for name in ("step", *OF_STEP)}
        append({"record": "step", **own, "figures": {name: _json(record[name]) for name in record if name not in own}})

    return Sink(write, lambda model: append({"record": "model", **model}), stack.close)


def _json(value: Any) -> Any:
    """``value``, or its name where JSON has no such number."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _lines(path: Path) -> Sink:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        got, cure = os_error_text(error), "name another path"
        raise OutputError(describe(str(path), wanted="a file to write", got=got, cure=cure)) from None

    def write(record: Mapping[str, Any]) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({name: _json(value) for name, value in record.items()}, allow_nan=False) + "\n")

    return Sink(write)


def _named(record: Mapping[str, Any]) -> dict[str, float]:
    if "op" not in record:
        return {name: value for name, value in record.items() if name not in ("step", "seconds") and value is not None}
    names = (name for name in SCALARS if record.get(name) is not None)
    place = (record["op"], record["tensor"], *(() if record["plane"] == ROWWISE else (record["plane"],)))
    return {"/".join((*place, name)): record[name] for name in names}


def _scalars(writer: Any) -> Sink:
    def write(record: Mapping[str, Any]) -> None:
        for name, value in _named(record).items():
            writer.add_scalar(name, value, record["step"])

    return Sink(write)


def _logged(run: Any) -> Sink:
    def write(record: Mapping[str, Any]) -> None:
        run.log(_named(record), step=record["step"])

    return Sink(write)
