"""Where the plans of calls come from: the cache, or made for one call alone; and what a call does if it finds none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from opfuse.errors import PlanMissError, describe


class PlanPolicy(NamedTuple):
    """on_miss: as of :func:`on_miss`. trial, alone: as of :func:`trial_plans`."""

    on_miss: str = "plan"
    trial: bool = False
    alone: bool = False


_policy: ContextVar[PlanPolicy] = ContextVar("opfuse_plan_policy", default=PlanPolicy())  # noqa: B039

plan_policy = _policy.get
"""The policy of the context."""


@contextmanager
def _with_policy(**changes: Any) -> Iterator[None]:
    reset = _policy.set(plan_policy()._replace(**changes))
    try:
        yield
    finally:
        _policy.reset(reset)


@contextmanager
def on_miss(policy: str) -> Iterator[None]:
    """Inside the block a call without a plan makes one (``"plan"``) or raises PlanMissError (``"error"``)."""
    if policy not in ("plan", "error"):
        raise PlanMissError(describe("on_miss", wanted="'plan' or 'error'", got=repr(policy), cure="choose one of the two"))
    with _with_policy(on_miss=policy):
        yield


@contextmanager
def trial_plans(*, alone: bool = False) -> Iterator[None]:
    """Inside the block a plan is made for each call, which no cache keeps.

    alone: without fusions if that changes no bit: not under ``rounding="single"``, nor with fusion functions.
    """
    with _with_policy(trial=True, alone=alone):
        yield


def check_miss(where: str, why: Callable[[], str]) -> None:
    """PlanMissError where a plan may not be made now: inside ``on_miss("error")``, and while a CUDA graph is captured."""
    if plan_policy().on_miss == "error" or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        cure = "run the call once before graph capture or on_miss('error')"
        raise PlanMissError(describe(f"plan of {where}", wanted="a plan made before", got=why(), cure=cure))
