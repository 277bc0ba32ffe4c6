"""Warnings of what a plan finds on this machine: a release of torch that nobody tried, products that no hardware runs.

Each is given once a process, when the first plan is made that it is about; calls that repeat a plan ask nothing.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch

from opfuse.errors import OpfuseWarning, describe
from opfuse.recipes.availability import Arch, support
from opfuse.recipes.rates import BF16, RATES, RECORD
from opfuse.recipes.recipe import Recipe
from opfuse.torch_private.names import TRIED


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
