"""Warnings of the machine: a torch that nobody tried, and products that a GPU does not run natively."""

from __future__ import annotations

import warnings

import pytest
import torch

from opfuse import ops, recipes
from opfuse.errors import OpfuseWarning
from opfuse.runtime.plans import misses
from opfuse.torch_private.names import TRIED

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was warned of yet."""
    misses._warn_of_torch.cache_clear()
    monkeypatch.setattr(misses, "_emulated", set())


@pytest.mark.parametrize("release", ["2.10.1", "2.99.0.dev20270101+cpu", "3.0.0"])
def test_a_release_of_torch_that_nobody_tried_is_warned_of_once(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", release)
    with pytest.warns(OpfuseWarning, match=r"torch: wants a release from 2\.11 to .*opfuse doctor --only torch"):
        ops.Sequential(ops.Linear(16, 16))(torch.ones(4, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("error", OpfuseWarning)
        ops.Sequential(ops.Linear(16, 16))(torch.ones(4, 16))


@pytest.mark.parametrize("release", [*TRIED, "2.12"])
def test_releases_between_the_oldest_and_the_newest_are_not_warned_of(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", f"{release}.1+cu130")
    with warnings.catch_warnings():
        warnings.simplefilter("error", OpfuseWarning)
        ops.Sequential(ops.Linear(16, 16))(torch.ones(4, 16))


@pytest.mark.parametrize(
    ("recipe", "arch", "told"),
    [
        (recipes.MXFP8BlockScaling(), (9, 0), r"compute capability 9\.0: .*at 1\.19 times the time of bf16 on an H200"),
        (recipes.NVFP4BlockScaling(), (8, 9), r"compute capability 8\.9: .*at 1\.17 times"),
        (recipes.Float8CurrentScaling(), (8, 0), r"compute capability 8\.0: .*go on with the exact numbers, or choose"),
    ],
)
def test_emulated_products_on_a_gpu_are_warned_of_once(recipe: recipes.Recipe, arch: tuple[int, int], told: str) -> None:
    with pytest.warns(OpfuseWarning, match=told):
        misses.warn_of_machine(recipe, "cuda", arch)
    misses.warn_of_machine(recipe, "cuda", arch)
    misses.warn_of_machine(recipe, "cpu", (0, 0))


def test_native_products_and_plain_calls_are_not_warned_of() -> None:
    misses.warn_of_machine(recipes.Float8CurrentScaling(), "cuda", (9, 0))
    misses.warn_of_machine(None, "cuda", (8, 0))
