"""Every file in configs/ loads, builds, computes and trains, and there is one for every recipe."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import opfuse
from opfuse.cli.explain import explained
from opfuse.config import Config, load
from opfuse.recipes import RECIPES
from opfuse.train import compare, to_dict
from tests.plans import plans_used
from tests.turns import in_turn

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))
every_configuration = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
loaded = functools.cache(load)
"""To load a file rehearses each of its ops."""


@every_configuration
def test_a_configuration_runs_forward_and_backward(path: Path) -> None:
    config = loaded(path)
    assert config.data is not None
    model = config.build()
    x = torch.randn(32, config.data.columns, dtype=config.dtype, requires_grad=True)
    with opfuse.autocast(enabled=config.recipe is not None, recipe=config.recipe), plans_used() as plans:
        logits = model(x)
    torch.nn.functional.cross_entropy(logits.float(), torch.arange(32)).backward()
    assert logits.shape == (32, config.data.classes)
    gradients = [x.grad, *(p.grad for p in model.parameters())]
    assert all(g is not None and bool(g.isfinite().all()) for g in gradients)
    assert all(bool((g != 0).any()) for g in gradients)
    assert plans[0].fusions
    assert plans[0].key.env.recipe == config.recipe


def small(config: Config) -> Config:
    """The configuration in batches of 32."""
    return replace(config, train=config.train.model_copy(update={"batch_size": 32}))


@pytest.mark.parametrize("path", in_turn(CONFIGS, of=4))
@pytest.mark.usefixtures("few_samples")
def test_every_configuration_trains(path: Path) -> None:
    config = small(loaded(path))
    result = compare(config, steps=2)
    found = to_dict(result)
    assert (found["name"], found["steps"], len(result.run.losses)) == (path.stem, 2, 2)
    assert found["loss_last"] < found["loss_first"]
    assert found["plan_cache"]["misses"] == found["plan_cache"]["plans"] == 2
    assert found["fusions"] == list(explained(config).fusions)
    assert found["fusions"], "every configuration shows a fusion"
    assert (result.baseline is None) == (config.recipe is None)
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_every_recipe_could_take_every_configuration() -> None:
    for config in map(loaded, CONFIGS):
        sizes = {size for entry in config.pipeline for name, size in entry.arguments if name in ("in_features", "out_features")}
        assert sizes, config.path
        assert all(size % 128 == 0 for size in sizes), config.path
        assert config.train.batch_size % 128 == 0, config.path


def test_there_is_a_configuration_for_every_recipe_and_override() -> None:
    found = {(None if c.recipe is None else c.recipe.kind, c.recipe and c.recipe.backward_override) for c in map(loaded, CONFIGS)}
    overrides = (None, "dequantized", "high_precision")
    wanted = {(kind, override) for kind in ("fp8_current", "fp8_block", "mxfp8") for override in overrides}
    assert found >= wanted | {("nvfp4", None), ("nvfp4", "dequantized"), ("delayed", None), (None, None)}
    assert {None, *RECIPES} - {kind for kind, _ in found} == set(), "write a configuration with each of these, in configs/"
