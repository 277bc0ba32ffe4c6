"""Models derived from recipes and ops: every field, no second list."""

import dataclasses
import inspect
from dataclasses import MISSING

import pytest
import torch

from opfuse.config import loads, operations, recipes
from opfuse.core.spec import argument, domains, spec_of
from opfuse.ops import OPS
from opfuse.recipes import RECIPES, Format, MXFP8BlockScaling
from opfuse.recipes.settings import settings_of


def config(recipe="{kind: none}", ops="[{op: gelu}]", rest=""):
    return loads(f"version: 1\nrecipe: {recipe}\npipeline: {{dtype: bfloat16, ops: {ops}}}\n{rest}", "f.yaml")


@pytest.mark.parametrize("kind", [kind for kind in RECIPES if kind != "custom"])
def test_a_recipe_section_has_the_fields_of_its_class(kind):
    assert recipes.MODELS[kind].model_fields.keys() == {"kind", *settings_of(RECIPES[kind])}
    assert config(f"{{kind: {kind}}}").recipe == RECIPES[kind]()


@pytest.mark.row("B33")
def test_a_recipe_knows_where_its_fields_were_written():
    recipe = config("{kind: mxfp8, fp8_format: HYBRID, backward_override: dequantized}").recipe
    assert recipe == MXFP8BlockScaling(fp8_format=Format.HYBRID, backward_override="dequantized")
    assert recipe.sources["fp8_format"] == "f.yaml:2:35"
    assert recipe.sources["backward_override"] == "f.yaml:2:62"
    assert recipe.sources["rounding"] == "default"


@pytest.mark.row("B33")
def test_a_written_field_wins_over_the_environment_and_an_absent_one_does_not(monkeypatch):
    monkeypatch.setenv("OPFUSE_BACKWARD_OVERRIDE", "high_precision")
    assert config("{kind: mxfp8, backward_override: null}").recipe.backward_override is None
    recipe = config("{kind: mxfp8}").recipe
    assert recipe.backward_override == "high_precision"
    assert recipe.sources["backward_override"] == "environment OPFUSE_BACKWARD_OVERRIDE"


def constructor(cls):
    """Defaults of what a caller may give, by argument."""
    ours = ("spec", "owner", *operations.PLACEMENT)
    parameters = inspect.signature(cls).parameters.items()
    return {name: MISSING if p.default is p.empty else p.default for name, p in parameters if name not in ours}


@pytest.mark.parametrize("name", OPS)
def test_an_op_has_the_parameters_of_its_constructor(name):
    written = {key for key in operations.MODELS[name].model_fields if key not in ("op", *operations.CHANNELS)}
    assert written == {operations.SPELLINGS.get(p, p) for p in constructor(OPS[name]).keys() - operations.IN_CODE.keys()}


@pytest.mark.parametrize("name", OPS)
def test_the_constructor_declares_the_spec(name):
    """A hyper-parameter is written once, with its type and default."""
    spec = spec_of(OPS[name])
    fields = dataclasses.fields(spec)
    assert not fields or spec is OPS[name].__init__.spec
    assert constructor(OPS[name]) == {argument(field.name): field.default for field in fields}
    assert domains(spec).keys() == {field.name for field in dataclasses.fields(spec)}, "a field that nothing checks"


def test_ops_are_built_as_written_and_anew_each_time():
    linear = "{op: linear, in_features: 64, out_features: 32, bias: false}"
    found = config(ops=f"[{{op: layer_norm, size: 64, eps: 1e-6}}, {linear}, {{op: dropout, p: 0.5}}]")
    norm, linear, dropout = found.build()
    assert norm.eps == 1e-6
    assert norm.normalized_shape == (64,)
    assert linear.bias is None
    assert dropout.p == 0.5
    assert all(p.dtype == torch.bfloat16 for p in found.build().parameters())
    assert found.build()[1].weight is not found.build()[1].weight
    assert found.build(device="meta")[1].weight.is_meta


def test_channels_join_ops_of_one_pipeline():
    ops = "[{op: make_extra_output, extra_output: skip}, {op: gelu}, {op: add_extra_input, extra_input: [skip]}]"
    found = config(ops=ops)
    x = torch.randn(4, 8, dtype=found.dtype)
    y = found.build()(x)
    torch.testing.assert_close(y, torch.nn.functional.gelu(x, approximate="tanh") + x)


def test_extra_tensors_without_a_channel_are_the_callers():
    model = config(ops="[{op: linear, in_features: 8, out_features: 8}, {op: add_extra_input}]").build()
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    assert model(x, x).shape == (4, 8)


def test_defaults_of_what_is_not_written():
    found = config()
    assert found.data is None
    assert found.train.batch_size == 128
    assert found.rules.level == 2
    assert found.recipe is None
