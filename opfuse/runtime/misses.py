"""``opfuse.on_miss``: what a call does if it finds no plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from opfuse.errors import PlanMissError, describe

_on_miss: ContextVar[str] = ContextVar("opfuse_on_miss", default="plan")


@contextmanager
def on_miss(policy: str) -> Iterator[None]:
    """Inside the block a call without a plan makes one (``"plan"``) or raises PlanMissError (``"error"``)."""
    if policy not in ("plan", "error"):
        raise PlanMissError(describe("on_miss", wanted="'plan' or 'error'", got=repr(policy), cure="choose one of the two"))
    reset = _on_miss.set(policy)
    try:
        yield
    finally:
        _on_miss.reset(reset)


def check_miss(where: str, why: Callable[[], str]) -> None:
    """PlanMissError where a plan may not be made now: inside ``on_miss("error")``, and while a CUDA graph is captured."""
    if _on_miss.get() == "error" or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        cure = "run the call once before graph capture or on_miss('error')"
        raise PlanMissError(describe(f"plan of {where}", wanted="a plan made before", got=why(), cure=cure))
