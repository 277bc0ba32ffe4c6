"""The example of fusions of one's own; the schema that editors read."""

import json
import re
from pathlib import Path

import torch

import opfuse
from opfuse.cli.app import main
from opfuse.config import load
from opfuse.config.schema import configuration_schema
from opfuse.recipes import RECIPES
from tests.plans import plans_used

ROOT = Path(__file__).parents[2]


def test_rank11_custom_fusion_does_what_it_says():
    config = load(ROOT / "configs/custom_fusion.yaml")
    x = torch.randn(32, 256, dtype=config.dtype)
    with opfuse.autocast(recipe=config.recipe), plans_used() as plans:
        config.build()(x)
    fused = plans[0].fusions
    assert fused[:2] == ("gemm_act_mxfp8", "gemm_gated_mxfp8")
    assert "norm_cast" in fused
    assert "epilogue" not in fused
    assert "backward_activation_bias" not in config.rules.names


def test_the_schema_names_every_recipe_op_and_key(capsys):
    found = configuration_schema()
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert found["required"] == ["version", "recipe", "pipeline"]
    assert found["additionalProperties"] is False
    mapping = found["properties"]["recipe"]["discriminator"]["mapping"]
    assert set(mapping) == {*RECIPES, "none"}
    written, parameter = found["$defs"]["MXFP8BlockScaling"]["properties"]["fp8_format"]["anyOf"]
    assert written["enum"] == ["E4M3", "HYBRID"]
    assert re.fullmatch(parameter["pattern"], "${format}")
    assert found["$defs"]["Linear"]["required"] == ["op", "in_features", "out_features"]
