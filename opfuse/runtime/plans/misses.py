"""What a call does that finds no plan: makes one, for itself or for later calls too, or raises.

It warns of misses that repeat and, once a process, of what a plan finds on this machine: a release of torch that nobody tried,
products that no hardware runs.
"""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import torch

from opfuse.errors import OpfuseWarning, PlanMissError, describe
from opfuse.kernels.engine.launch import is_capturing
from opfuse.keys import Miss
from opfuse.recipes.availability import Arch, support
from opfuse.recipes.rates import BF16, RATES, RECORD
from opfuse.recipes.recipe import Recipe
from opfuse.torch_private.names import TRIED


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
    if plan_policy().on_miss == "error" or is_capturing():
        cure = "run the call once before graph capture or on_miss('error')"
        raise PlanMissError(describe(f"plan of {where}", wanted="a plan made before", got=why(), cure=cure))


SAME, AGAIN = 16, 3
"""How many misses in a row are warned of: if all differ in the same single leaf; if their keys had plans that were dropped."""

CURES = {
    "env.recipe": "make the recipe once, outside of the loop, and pass that object",
    "env.rows_class": "pad the rows to a multiple of 128, or keep to few sizes",
    "env.aligned": "pass tensors whose memory begins at a multiple of 16 bytes",
    "env.amax_group": "make the process group once",
    "rules": "register fusions once, outside of the loop",
    "inputs": "keep dtypes, devices and requires_grad of inputs and parameters as they are",
    "ops": "build the ops once; a change of an op is another pipeline",
}
"""What to do about a leaf, by the beginning of its path."""


class ThrashingDetector:
    """Detects misses of one cache of ``size`` plans that repeat."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.warned = False
        self._last: deque[Miss] = deque(maxlen=SAME)

    def record(self, where: str, miss: Miss) -> str | None:
        """The warning, once, when misses begin to repeat; else None. where: how the pipeline is called."""
        self._last.append(miss)
        if self.warned or len(self._last) < AGAIN or (found := self._pattern()) is None:
            return None
        self.warned = True
        path, got = found
        cure = next((cure for begin, cure in CURES.items() if path.startswith(begin)), "keep this value as it is")
        return describe(f"plans of {where}", wanted="keys that come back", got=got, cure=cure)

    def _pattern(self) -> tuple[str, str] | None:
        """The path of the leaf that changes, and what happens."""
        again = [miss for miss in list(self._last)[-AGAIN:] if miss.again]
        paths = Counter(difference.path for miss in self._last for difference in miss.differences)
        if len(again) == AGAIN:
            path = paths.most_common(1)[0][0] if paths else "key"
            return path, f"more than {self.size} in turn, so that each is dropped before it comes back; what flips is {path}"
        alone = {difference.path for miss in self._last for difference in miss.differences if len(miss.differences) == 1}
        if len(self._last) == SAME and len(alone) == 1 and paths.total() == SAME:
            path, last = alone.pop(), self._last[-1].differences[0]
            return path, f"{SAME} misses in a row that differ in {path} alone, the last time {last}"
        return None


# -- what a plan finds on this machine -------------------------------------------------------------------------------------------


def warn_of_machine(recipe: Recipe | None, device: str, arch: Arch) -> None:
    """Warn, once each, of an untried torch and of a recipe whose products are emulated on a CUDA device."""
    _warn_of_torch(torch.__version__)
    if recipe is not None and device == "cuda":
        _warn_of_emulation(recipe, arch)


@cache
def _warn_of_torch(installed: str) -> None:
    release = _release(installed)
    if not _release(TRIED[0]) <= release <= _release(TRIED[-1]):
        wanted, cure = f"a release from {TRIED[0]} to {TRIED[-1]}, which were tried", "run `opfuse doctor --only torch`"
        text = describe("torch", wanted=wanted, got=installed, cure=f"{cure}, which names what has changed")
        warnings.warn(text, OpfuseWarning, stacklevel=4)


def _release(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


_emulated: set[tuple[str, Arch]] = set()


def _warn_of_emulation(recipe: Recipe, arch: Arch) -> None:
    if (key := (recipe.kind, arch)) in _emulated:
        return
    _emulated.add(key)
    found = support(recipe, arch)
    if found.status == "emulated":
        got = f"emulated products on compute capability {arch[0]}.{arch[1]}: {found.reason}"
        text = describe(f"recipe {recipe.kind}", wanted="products that this GPU runs natively", got=got, cure=_cost(recipe.kind))
        warnings.warn(text, OpfuseWarning, stacklevel=5)


def _cost(kind: str) -> str:
    """What emulation costs, and where a user learns what else there is."""
    rate = RATES.get(kind)
    slow = "" if rate is None or rate >= BF16 else f", at {BF16 / rate:.2f} times the time of bf16 on an H200 ({RECORD})"
    return f"go on with the exact numbers{slow}, or choose a native recipe from `opfuse doctor`"
