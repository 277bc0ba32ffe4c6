"""How a call of a pipeline treats the delayed-scaling states of its casts.

An ordinary call has no pass. A checkpoint runs a call twice: the first run keeps the scales of its casts in the outermost
``autocast`` region, and the recomputation casts with these, whatever the states hold by then.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from contextvars import ContextVar

from opfuse.torch_private.compiler import compiled_autograd


class Pass(enum.Enum):
    """A call that is not an ordinary one.

    FIRST: a recomputation will follow. TRAINED: as FIRST, and amaxes are counted although gradients are off, as in the forward of
    a reentrant checkpoint. RECOMPUTE: the recomputation, which records nothing. DRY_RUN: a call that leaves no trace.
    """

    FIRST = "first"
    TRAINED = "trained"
    RECOMPUTE = "recompute"
    DRY_RUN = "dry run"


_PASS: ContextVar[Pass | None] = ContextVar("opfuse_pass", default=None)

current_pass = _PASS.get
"""The pass around, or None."""


@contextlib.contextmanager
def running(kind: Pass) -> Iterator[None]:
    """Calls inside the block are of this pass."""
    reset = _PASS.set(kind)
    try:
        yield
    finally:
        _PASS.reset(reset)


def is_recomputing() -> bool:
    """Whether casts leave states alone: in a recomputation, and in a call that only inspects."""
    return _PASS.get() in (Pass.RECOMPUTE, Pass.DRY_RUN)


def is_trained() -> bool:
    """Whether casts count their amaxes although gradients are off."""
    return _PASS.get() is Pass.TRAINED


def in_compiled_autograd() -> bool:
    """Whether compiled autograd runs the backward pass: it never says that a pass is over."""
    module = compiled_autograd()
    return module is not None and bool(module.in_compiled_autograd_region)
