"""The casts of a run looked at, as its file asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from opfuse.config import Watching
from opfuse.errors import ConfigError, describe
from opfuse.inspect.watch import RECORDS, watch

Found = tuple[Mapping[str, Any], ...]
"""What was found of each cast, in order."""


@contextmanager
def watched(model: nn.Module, watching: Watching | None, *, step: int = 0, before: Found = ()) -> Iterator[Callable[[], Found]]:
    """Look at ``model``, after ``step`` steps in which ``before`` was found. ConfigError without the writer's package."""
    if watching is None:
        yield tuple
        return
    alarms = watching.alarms.model_dump()
    with _writer(watching.to) as writer, watch(model, every=watching.every, to=writer, alarms=alarms) as looking:
        looking.step = step
        yield lambda: (*before, *looking.records)[-RECORDS:]


@contextmanager
def _writer(to: str) -> Iterator[Any]:
    """The writer of a package that need not be here, closed at the end; None: records go into a file beside the report."""
    writer, close = _opened(to)
    try:
        yield writer
    finally:
        close()


def _opened(to: str) -> tuple[Any, Callable[[], None]]:
    """A writer, and the function that flushes and closes it."""
    if to == "jsonl":
        return None, lambda: None
    try:
        if to == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter()
            return writer, writer.close
        import wandb

        run = wandb.init()
        return run, run.finish
    except ImportError as error:
        cure = f"pip install {to}, or write `to: jsonl`"
        raise ConfigError(describe("watch.to", wanted=f"an installed {to}", got=str(error), cure=cure)) from None
