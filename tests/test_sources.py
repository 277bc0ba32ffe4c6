"""Where values came from: every leaf of a key says it, and equality knows nothing of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import opfuse
from opfuse import ops, recipes
from opfuse.compiler.rules import fusion
from opfuse.config import loads
from opfuse.keys import Leaf, leaves, plain

HERE = "tests/test_sources.py"
CONFIG = """version: 1
recipe: {kind: mxfp8, scale_rule: ocp_floor}
pipeline:
  dtype: bfloat16
  ops:
    - {op: linear, in_features: 32, out_features: 32}
fusions:
  level: O1
  rules: [{use: epilogue, when: {env.level: 1}}]
"""


def line() -> int:
    """The caller's."""
    return sys._getframe(1).f_lineno


def found(model: ops.Sequential) -> dict[str, Leaf]:
    """The leaves of the latest key."""
    return {leaf.path: leaf for leaf in leaves(model.runs()[0].cache.items()[-1][0])}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parent.parent)


def test_every_leaf_of_a_key_knows_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPFUSE_BACKWARD_OVERRIDE", "dequantized")
    model, made = ops.Sequential(ops.Linear(32, 32), ops.GELU()), line()
    recipe, built = recipes.MXFP8BlockScaling(scale_rule="ocp_floor"), line()
    with opfuse.autocast(recipe=recipe):
        entered = line() - 1
        model(torch.randn(32, 32))
    called = entered + 2
    key = found(model)
    assert [leaf.path for leaf in key.values() if not leaf.source] == []
    wanted = {
        "ops.0.0.op": made,
        "ops.1.op": made,
        "env.recipe": entered,
        "env.recipe.scale_rule": built,
        "env.amax_group": entered,
        "env.grad": called,
        "inputs.x.dtype": called,
        "inputs.params.0.weight.dtype": called,
    }
    assert {path: key[path].source for path in wanted} == {path: f"{HERE}:{number}" for path, number in wanted.items()}
    assert key["env.recipe.backward_override"].source == "environment OPFUSE_BACKWARD_OVERRIDE"
    assert key["env.recipe.rounding"].source == key["rules.epilogue"].source == key["env.level"].source == "default"
    assert key["env.rows_class"].source == "32 rows"


def test_a_file_is_told_by_line_and_column() -> None:
    config = loads(CONFIG, "mine.yaml")
    model = config.build()
    with opfuse.autocast(recipe=config.recipe):
        model(torch.randn(32, 32, dtype=torch.bfloat16))
    key = found(model)
    assert key["env.recipe.scale_rule"].source == "mine.yaml:2:35"
    assert key["ops.0.0.op"].source == "mine.yaml:6:7"
    assert (key["rules.epilogue"].source, key["rules.linear_add"].source) == ("mine.yaml:9:11", "default")
    assert key["env.level"].source == "mine.yaml:8:10"


def test_registered_rules_and_functions_are_told_by_their_line() -> None:
    def run(x, *, linear, scale):
        return scale.op.fuser_forward([scale], linear.op.produce(linear, x))[0]

    rule, written = fusion("mine", "linear=basic_linear scale=constant_scale", forward=run), line()
    model, x = ops.Sequential(ops.Linear(8, 8), ops.GELU()), torch.randn(4, 8)
    with opfuse.register_fusion(rule), opfuse.ops.register_forward_fusion(lambda ops, *, recipe: ops, name="function"):
        registered = line() - 1
        model(x)
    key = found(model)
    assert (key["rules.mine"].source, key["rules.function"].source) == (f"{HERE}:{written}", f"{HERE}:{registered}")
    model(x)
    assert f"rules.mine: registered -> nothing (was: {HERE}:{written})" in str(model.cache_info().last_miss)


def test_sources_take_no_part_in_equality() -> None:
    model, x = ops.Sequential(ops.Linear(32, 32)), torch.randn(32, 32)
    with opfuse.autocast(recipe=recipes.MXFP8BlockScaling(rounding="single")):
        model(x)
    with opfuse.autocast(recipe=recipes.MXFP8BlockScaling(rounding="single")):
        model(x)
    assert model.cache_info()[:3] == (1, 1, 1)


def test_leaves_are_plain_and_the_same_for_the_same_call() -> None:
    def told() -> str:
        model = ops.Sequential(ops.Linear(32, 32), ops.GELU())
        with opfuse.autocast(recipe=recipes.CustomRecipe(qfactory=recipes.zoo.mxfp8_fwd_high_precision_bwd)):
            model(torch.randn(32, 32))
        return json.dumps([(leaf.path, plain(leaf.value)) for leaf in found(model).values()], allow_nan=False)

    assert told() == told()
    assert " at 0x" not in told()
