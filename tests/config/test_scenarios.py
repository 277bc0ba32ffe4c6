"""Every file in configs/ loads, builds and computes; the committed schema is that of the models."""

import json
from pathlib import Path

import pytest
import torch

import opfuse
from opfuse.config import load
from opfuse.config.schema import schema, schema_text
from opfuse.recipes import RECIPES
from opfuse.runtime.fuser import recorded_plans

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_scenario_runs_forward_and_backward(path):
    config = load(path)
    model = config.build()
    x = torch.randn(32, config.data.columns, dtype=config.dtype, requires_grad=True)
    with opfuse.autocast(enabled=config.recipe is not None, recipe=config.recipe), recorded_plans() as plans:
        logits = model(x)
    torch.nn.functional.cross_entropy(logits.float(), torch.arange(32)).backward()
    assert logits.shape == (32, config.data.classes)
    gradients = [x.grad, *(p.grad for p in model.parameters())]
    assert all(g is not None and bool(g.isfinite().all()) for g in gradients)
    assert all(bool((g != 0).any()) for g in gradients)
    assert plans[0].fusions
    assert plans[0].key.env.recipe == config.recipe


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_recipe_could_take_every_scenario(path):
    config = load(path)
    sizes = {size for entry in config.pipeline for name, size in entry.arguments if name in ("in_features", "out_features")}
    assert sizes
    assert all(size % 128 == 0 for size in sizes)
    assert config.train.batch_size % 128 == 0


def test_there_is_a_scenario_for_every_recipe_and_override():
    found = {(None if c.recipe is None else c.recipe.kind, c.recipe and c.recipe.backward_override) for c in map(load, CONFIGS)}
    overrides = (None, "dequantized", "high_precision")
    wanted = {(kind, override) for kind in ("fp8_current", "fp8_block", "mxfp8") for override in overrides}
    assert found >= wanted | {("nvfp4", None), ("nvfp4", "dequantized"), ("delayed", None), (None, None)}
    assert {kind for kind, _ in found} == {None, *RECIPES}


def test_rank11_custom_fusion_does_what_it_says():
    config = load(ROOT / "configs/custom_fusion.yaml")
    x = torch.randn(32, 256, dtype=config.dtype)
    with opfuse.autocast(recipe=config.recipe), recorded_plans() as plans:
        config.build()(x)
    fused = plans[0].fusions
    assert fused[:2] == ("gemm_bias_gelu_mxfp8", "gemm_gated_mxfp8")
    assert "norm_quantize" in fused
    assert "epilogue" not in fused
    assert "backward_activation_bias" not in config.rules.names


def test_the_committed_schema_is_that_of_the_models():
    assert (ROOT / "opfuse/config/schema.json").read_text() == schema_text(), "run `opfuse schema > opfuse/config/schema.json`"


def test_the_schema_names_every_recipe_op_and_key():
    found = schema()
    assert found["required"] == ["version", "recipe", "pipeline"]
    assert found["additionalProperties"] is False
    mapping = found["properties"]["recipe"]["discriminator"]["mapping"]
    assert set(mapping) == {*RECIPES, "none"}
    assert found["$defs"]["MXFP8BlockScaling"]["properties"]["fp8_format"]["enum"] == ["E4M3", "HYBRID"]
    assert found["$defs"]["Linear"]["required"] == ["op", "in_features", "out_features"]
    json.dumps(found)
