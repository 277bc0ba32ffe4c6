"""Recipes as values: fields, errors, identity, where a value came from."""

import copy
import math
import os
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass, fields
from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from opfuse import keys, ops, recipes
from opfuse.cli.doctor import environment
from opfuse.errors import KeyValueError, OpfuseWarning, RecipeError
from opfuse.recipes import (
    RECIPES,
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRole,
    Recipe,
    UnknownFieldError,
    autocast,
    builtin,
    recipe_of,
    support,
)
from opfuse.recipes.settings import settings_of
from opfuse.tensors.quantizers import IdentityQuantizer, MXFP8Quantizer
from tests.compiler.fields import VALUES, names_of

ROOT = Path(__file__).parents[2]
OVERRIDES = (None, "high_precision", "dequantized")
ENVIRONMENT = ("OPFUSE_BACKWARD_OVERRIDE", "NVTE_BACKWARD_OVERRIDE")
POWERS = "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES"


def identity_everywhere(role):
    return IdentityQuantizer()


def another_factory(role):
    return IdentityQuantizer()


REQUIRED = {CustomRecipe: {"qfactory": identity_everywhere}}


def build(cls, **values):
    return cls(**{**REQUIRED.get(cls, {}), **values})


ALL = pytest.mark.parametrize("cls", RECIPES.values(), ids=list(RECIPES))
OVERRIDABLE = pytest.mark.parametrize("cls", [cls for cls in RECIPES.values() if cls is not DelayedScaling])


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("OPFUSE_", "NVTE_"))]:
        monkeypatch.delenv(name)


@pytest.mark.row("B01")
@ALL
def test_b01_override_default_is_none_and_a_fourth_value_is_refused(cls):
    assert build(cls).backward_override is None
    with pytest.raises(RecipeError, match=rf"{cls.__name__}.backward_override.*got 'zzz'"):
        build(cls, backward_override="zzz")
    for value in ([], 0, False, object()):
        with pytest.raises(RecipeError):
            build(cls, backward_override=value)


@pytest.mark.row("B01")
@OVERRIDABLE
@pytest.mark.parametrize("value", OVERRIDES)
def test_b01_override_accepts_three_values(cls, value):
    assert build(cls, backward_override=value).backward_override == value


@pytest.mark.row("B01")
@pytest.mark.parametrize("value", OVERRIDES[1:])
def test_b01_delayed_scaling_takes_none_of_them(value):
    assert DelayedScaling(backward_override=None).backward_override is None
    with pytest.raises(RecipeError, match=rf"DelayedScaling: wants backward_override=None, got backward_override='{value}'"):
        DelayedScaling(backward_override=value)


@pytest.mark.row("B02")
@OVERRIDABLE
def test_b02_r4_environment_is_read_when_the_recipe_is_built(cls, monkeypatch):
    assert build(cls).backward_override is None
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "dequantized")
    recipe = build(cls)
    assert recipe.backward_override == "dequantized"
    assert recipe.sources["backward_override"] == "environment NVTE_BACKWARD_OVERRIDE"
    monkeypatch.setenv("OPFUSE_BACKWARD_OVERRIDE", "high_precision")
    assert build(cls).backward_override == "high_precision"
    assert build(cls).sources["backward_override"] == "environment OPFUSE_BACKWARD_OVERRIDE"
    assert recipe.backward_override == "dequantized"


@pytest.mark.row("B02")
@ALL
@pytest.mark.parametrize("name", ENVIRONMENT)
@pytest.mark.parametrize("text", ["", " "])
def test_b02_r6_empty_environment_is_unset(cls, name, text, monkeypatch):
    monkeypatch.setenv(name, text)
    assert build(cls).backward_override is None
    assert build(cls).sources["backward_override"] == "default"


@pytest.mark.row("B02")
def test_b02_empty_opfuse_variable_lets_the_next_one_speak(monkeypatch):
    monkeypatch.setenv("OPFUSE_BACKWARD_OVERRIDE", "")
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "dequantized")
    assert MXFP8BlockScaling().backward_override == "dequantized"
    monkeypatch.setenv("OPFUSE_BACKWARD_OVERRIDE", "none")
    assert MXFP8BlockScaling().backward_override is None


@pytest.mark.row("B02")
def test_b02_bad_environment_names_the_variable(monkeypatch):
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "dequant")
    with pytest.raises(RecipeError, match=r"environment NVTE_BACKWARD_OVERRIDE.*set NVTE_BACKWARD_OVERRIDE=dequantized,"):
        MXFP8BlockScaling()


def test_values_of_a_variable_are_told_as_a_shell_writes_them(monkeypatch):
    """And what knows of no variable, such as the command that tells about them, goes on."""
    monkeypatch.setenv("OPFUSE_BACKWARD_OVERRIDE", "None")
    with pytest.raises(RecipeError, match="wants one of none, high_precision, dequantized, got 'None'; did you mean 'none'"):
        MXFP8BlockScaling()
    told = support("mxfp8", (9, 0))
    assert told.status == "refused"
    assert "did you mean 'none'" in told.reason
    assert "did you mean 'none'" in environment()["OPFUSE_BACKWARD_OVERRIDE"]
    assert support("delayed", (9, 0)).status == "native"


def test_a_bad_variable_stops_no_import():
    code = "import opfuse; opfuse.invariant"
    environ = {**os.environ, "OPFUSE_BACKWARD_OVERRIDE": "None"}
    subprocess.run([sys.executable, "-c", code], env=environ, check=True)


@pytest.mark.row("B03")
@pytest.mark.parametrize(("old", "new"), [("unquant", "'high_precision'"), ("dequant", "'dequantized'"), ("default", "None")])
def test_b03_legacy_value_names_the_new_one(old, new):
    with pytest.raises(RecipeError, match=f"write {new}"):
        MXFP8BlockScaling(backward_override=old)


@pytest.mark.row("B03")
@ALL
def test_b03_pair_of_switches_is_refused(cls):
    with pytest.raises(TypeError, match=r"backward_override"):
        build(cls, quantize_forward=False, quantize_backward=True)


@pytest.mark.row("B04")
@pytest.mark.parametrize("value", OVERRIDES[1:])
def test_b04_delayed_scaling_refuses_an_override(value):
    with pytest.raises(ValueError, match=rf"DelayedScaling.*{value}") as error:
        DelayedScaling(backward_override=value)
    assert isinstance(error.value, RecipeError)
    with pytest.raises(RecipeError, match=value):
        DelayedScaling().replace(backward_override=value)


@pytest.mark.row("B04")
def test_b04_r7_checks_survive_python_optimised():
    program = """
from opfuse.errors import RecipeError
from opfuse.recipes import *
cases = [
    (DelayedScaling, dict(backward_override="dequantized")), (MXFP8BlockScaling, dict(backward_override="zzz")),
    (Float8CurrentScaling, dict(fp8_format="E5M2")), (Float8BlockScaling, dict(x_block_scaling_dim=2)),
    (NVFP4BlockScaling, dict(nvfp4_4over6="all")), (DelayedScaling, dict(amax_history_len=0)), (CustomRecipe, dict(qfactory=3)),
]
for cls, values in cases:
    try:
        cls(**values)
    except RecipeError:
        print("refused")
"""
    done = subprocess.run(
        [sys.executable, "-O", "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["."] + sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["refused"] * 7


@pytest.mark.parametrize("value", ["dequantized", "zzz"])
def test_r5_environment_override_is_ignored_by_delayed_scaling_with_one_warning(value, monkeypatch):
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", value)
    with pytest.warns(OpfuseWarning, match="DelayedScaling takes no backward_override.*NVTE_BACKWARD_OVERRIDE") as caught:
        recipe = DelayedScaling()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert recipe.backward_override is None
    assert recipe.replace(margin=1).margin == 1  # asks the environment no more


@pytest.mark.row("B33")
def test_b33_precedence_argument_over_file_over_environment_over_default(monkeypatch):
    kinds = {}
    kinds["default"] = recipe_of("mxfp8", {})
    monkeypatch.setenv("OPFUSE_BACKWARD_OVERRIDE", "high_precision")
    kinds["environment OPFUSE_BACKWARD_OVERRIDE"] = recipe_of("mxfp8", {})
    kinds["fp8.yaml:2:30"] = recipe_of("mxfp8", {"backward_override": "dequantized"}, {"backward_override": "fp8.yaml:2:30"})
    kinds["argument"] = kinds["fp8.yaml:2:30"].replace(backward_override=None)
    assert [r.backward_override for r in kinds.values()] == [None, "high_precision", "dequantized", None]
    told = [r.sources["backward_override"] for r in kinds.values()]
    assert told[:3] == list(kinds)[:3]
    assert told[3].startswith("tests/recipes/test_recipe.py:")
    assert [r.sources["rounding"] for r in kinds.values()] == ["default"] * 4


@pytest.mark.row("B26")
@ALL
def test_b26_every_recipe_and_user_subclass_has_the_override(cls):
    @dataclass(frozen=True, kw_only=True)
    class Extended(cls):
        level: int = 3

    class Renamed(cls):
        pass

    for kind in (cls, Extended, Renamed):
        assert hasattr(kind, "backward_override")
        assert build(kind, **REQUIRED.get(cls, {})).backward_override is None
    extended = build(Extended, **REQUIRED.get(cls, {}))
    assert extended.level == 3
    assert extended.kind == cls.kind
    assert extended.replace(level=4) != extended
    assert extended.replace(level=True) != extended.replace(level=1)
    assert extended.replace(level=1.0) != extended.replace(level=1)
    assert len({extended, extended.replace(level=4), build(Renamed, **REQUIRED.get(cls, {})), build(cls)}) == 4
    assert extended.sources["level"] == "default"
    assert extended.replace(level=4).sources["level"].startswith("tests/recipes/test_recipe.py:")


@pytest.mark.row("B26")
def test_b26_subclass_default_is_checked_and_wins_over_the_environment(monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class Mine(MXFP8BlockScaling):
        backward_override: str = "dequantized"

    @dataclass(frozen=True, kw_only=True)
    class Wrong(MXFP8BlockScaling):
        backward_override: str = "unquant"

    monkeypatch.setenv("OPFUSE_BACKWARD_OVERRIDE", "high_precision")
    assert Mine().backward_override == "dequantized"
    assert Mine().sources["backward_override"] == "default"
    assert Mine(backward_override=None).backward_override is None
    with pytest.raises(RecipeError, match=r"Wrong\.backward_override"):
        Wrong()


@pytest.mark.row("B26")
def test_b26_subclass_with_its_own_constructor():
    class Preset(MXFP8BlockScaling):
        def __init__(self, careful):
            super().__init__(backward_override="dequantized" if careful else None)

    assert Preset(careful=True).backward_override == "dequantized"
    assert Preset(careful=True).sources["backward_override"].startswith("tests/recipes/test_recipe.py:")
    assert Preset(careful=True) != Preset(careful=False)
    assert copy.deepcopy(Preset(careful=True)) == Preset(careful=False).replace(backward_override="dequantized")
    with pytest.raises(TypeError, match="careless"):
        Preset(careless=True)


def test_r3_attribute_that_is_not_a_field_is_refused():
    class Unannotated(MXFP8BlockScaling):
        rounding = "single"

    class Undecorated(MXFP8BlockScaling):
        level: int = 3

    for cls, name in ((Unannotated, "rounding"), (Undecorated, "level")):
        with pytest.raises(RecipeError, match=rf"{name}.*@dataclass"):
            cls()


def test_r1_power_of_two_scales_reach_the_quantizer(monkeypatch):
    for tensor_type in ("input", "weight", "grad_output"):
        role = QuantizerRole(tensor_type=tensor_type)
        assert Float8CurrentScaling(use_power_2_scales=True).quantizer(role).force_pow_2_scales is True
        assert Float8CurrentScaling().quantizer(role).force_pow_2_scales is False
        assert Float8CurrentScaling(amax_epsilon=0.5).quantizer(role).amax_epsilon == 0.5
    monkeypatch.setenv(POWERS, "1")
    recipe = Float8CurrentScaling()
    assert (recipe.use_power_2_scales, recipe.sources["use_power_2_scales"]) == (True, f"environment {POWERS}")
    assert Float8CurrentScaling(use_power_2_scales=False).use_power_2_scales is False
    monkeypatch.setenv(POWERS, "0")
    assert Float8CurrentScaling().use_power_2_scales is False
    monkeypatch.setenv(POWERS, "maybe")
    with pytest.raises(RecipeError, match=POWERS):
        Float8CurrentScaling()


def test_r2_fp32_scales_reach_the_quantizer(monkeypatch):
    role = QuantizerRole(tensor_type="weight")
    assert Float8BlockScaling(use_f32_scales=True).quantizer(role).force_pow_2_scales is False
    assert Float8BlockScaling().quantizer(role).force_pow_2_scales is True
    monkeypatch.setenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
    assert Float8BlockScaling().quantizer(role).force_pow_2_scales is False


@pytest.mark.parametrize(
    ("cls", "keyword", "hint"),
    [
        (Float8CurrentScaling, "fp8_quant_fwd_inp", "amax_epsilon"),
        (Float8CurrentScaling, "use_power2_scales", "did you mean 'use_power_2_scales'"),
        (DelayedScaling, "amax_history_length", "did you mean 'amax_history_len'"),
        (DelayedScaling, "fp8_dpa", "attention"),
        (MXFP8BlockScaling, "margin", "scale_rule"),
        (NVFP4BlockScaling, "fp8_mha", "attention"),
    ],
)
def test_r3_r12_unknown_keyword_is_an_error_with_a_suggestion(cls, keyword, hint):
    with pytest.raises(UnknownFieldError, match=hint) as error:
        cls(**{keyword: True})
    assert isinstance(error.value, TypeError)
    assert isinstance(error.value, RecipeError)
    assert keyword in str(error.value)
    with pytest.raises(TypeError):
        cls().replace(**{keyword: True})


@ALL
def test_r8_recipes_are_frozen(cls):
    recipe = build(cls)
    with pytest.raises(FrozenInstanceError):
        recipe.backward_override = "garbage"
    with pytest.raises(FrozenInstanceError):
        del recipe.rounding
    with pytest.raises(TypeError):
        recipe.sources["rounding"] = "elsewhere"
    with pytest.raises(RecipeError):
        recipe.replace(rounding="never")
    with pytest.raises(TypeError):
        cls("per_op")


CHANGED = {
    "backward_override": "dequantized",
    "rounding": "single",
    "on_recipe_change": "keep",
    "allow_mixed_emulation": True,
    "split_accumulator": "all",
    "batch_invariant": True,
    "keep": "recompute",
    "fp8_format": {"HYBRID": "E4M3", "E4M3": "HYBRID"},
    "margin": 1,
    "amax_history_len": 16,
    "amax_compute_algo": "most_recent",
    "reduce_amax": False,
    "use_power_2_scales": True,
    "amax_epsilon": 1e-6,
    "use_f32_scales": True,
    "w_block_scaling_dim": 1,
    "x_block_scaling_dim": {1: 2},
    "grad_block_scaling_dim": {1: 2},
    "enable_2d_quantization": True,
    "scale_rule": {Float8CurrentScaling: "torchao_pow2", Float8BlockScaling: "deepgemm", MXFP8BlockScaling: "ocp_floor"},
    "disable_rht": False,
    "disable_stochastic_rounding": True,
    "disable_2d_quantization": True,
    "row_scaled_activation": True,
    "nvfp4_4over6": "weights",
    "nvfp4_4over6_e4m3_use_256": "weights",
    "nvfp4_4over6_err_mode": "MSE",
    "qfactory": another_factory,
}
BASES = {Float8BlockScaling: {"w_block_scaling_dim": 2}, NVFP4BlockScaling: {"disable_rht": True}}
NEEDS = {
    (Float8BlockScaling, "x_block_scaling_dim"): {"w_block_scaling_dim": 1},
    (Float8BlockScaling, "grad_block_scaling_dim"): {"w_block_scaling_dim": 1},
    (Float8CurrentScaling, "scale_rule"): {"use_power_2_scales": True},
    (NVFP4BlockScaling, "batch_invariant"): {"row_scaled_activation": True},
}
"""What the changed value of a field goes with."""


@ALL
def test_r9_r10_every_field_changes_identity_repr_and_hash(cls):
    base = build(cls, **BASES.get(cls, {}))
    assert base == build(cls, **BASES.get(cls, {}))
    assert hash(base) == hash(build(cls, **BASES.get(cls, {})))
    for field in fields(cls):
        if (cls, field.name) in ((DelayedScaling, "backward_override"), (Float8CurrentScaling, "batch_invariant")):
            continue
        assert field.name in CHANGED, "say in CHANGED of this file another value that the field can have"
        change = CHANGED[field.name]
        value = getattr(base, field.name)
        other = change.get(cls, change.get(getattr(value, "name", value))) if isinstance(change, dict) else change
        assert other is not None, f"say in CHANGED another {field.name} of {cls.__name__}, and in NEEDS what goes with it"
        changes = {field.name: other}
        base_of = base.replace(**NEEDS.get((cls, field.name), {}))
        other = base_of.replace(**changes)
        assert other != base_of, field.name
        assert hash(other) != hash(base_of)
        assert repr(other) != repr(base_of)
        assert [d.path for d in keys.diff(base_of, other)] == [field.name]
        assert keys.digest(other) == other.digest != base_of.digest


@ALL
def test_a_recipe_shows_what_differs_from_the_defaults(cls, monkeypatch):
    plain = build(cls)
    shown = f"{cls.__name__}(qfactory={plain.qfactory!r})" if cls is CustomRecipe else f"{cls.__name__}()"
    assert repr(plain) == repr(plain.replace(rounding="per_op")) == shown
    assert "rounding='single'" in repr(plain.replace(rounding="single"))
    if cls is not DelayedScaling:  # so does what the environment chose
        monkeypatch.setenv("OPFUSE_BACKWARD_OVERRIDE", "dequantized")
        assert "backward_override='dequantized'" in repr(build(cls))


def test_r10_recipes_of_different_classes_differ():
    recipes = [build(cls) for cls in RECIPES.values()]
    assert len(set(recipes)) == len(recipes)
    assert MXFP8BlockScaling() != "mxfp8"
    assert {MXFP8BlockScaling(): "plan"}[MXFP8BlockScaling(fp8_format="E4M3")] == "plan"


def test_r9_source_is_never_compared(monkeypatch):
    plain = MXFP8BlockScaling(backward_override="dequantized")
    monkeypatch.setenv("OPFUSE_BACKWARD_OVERRIDE", "dequantized")
    told = MXFP8BlockScaling()
    assert plain == told
    assert hash(plain) == hash(told)
    assert repr(plain) == repr(told)
    assert plain.sources != told.sources
    with pytest.raises(UnknownFieldError, match="marginn"):
        plain.with_sources({"marginn": "a.yaml:1:1"})


@ALL
def test_recipes_copy_and_pickle(cls):
    recipe = build(cls, rounding="single").with_sources({"rounding": "a.yaml:1:1"})
    for other in (copy.copy(recipe), copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe))):
        assert other == recipe
        assert other.sources == recipe.sources


def test_r11_nvfp4_contradictions_are_refused_at_construction():
    for values in ({"nvfp4_4over6": "all"}, {"nvfp4_4over6": "activations"}, {"row_scaled_activation": True}):
        with pytest.raises(RecipeError, match="disable_rht=True"):
            NVFP4BlockScaling(**values)
        NVFP4BlockScaling(**values, disable_rht=True)
    NVFP4BlockScaling(nvfp4_4over6="weights")
    with pytest.raises(RecipeError, match="write None"):
        NVFP4BlockScaling(nvfp4_4over6="none")


@ALL
def test_r11_any_two_fields_agree_or_are_refused_as_fields_of_the_recipe(cls):
    """Not as arguments of a quantizer that the recipe makes, of which its user knows nothing."""
    refusals = []
    for (one, values), (other, others) in combinations([(name, VALUES[name]) for name in names_of(cls)], 2):
        for chosen in ({one: a, other: b} for a in values for b in others):
            try:
                build(cls, **chosen)
            except RecipeError as error:
                refusals.append(str(error))
    assert all(text.startswith(cls.__name__) and "Cure: " in text for text in refusals)


WRONG = {
    "BOOLEAN": ("false", 0, 1, 1.0, None, [], object(), torch.tensor(True)),
    "INTEGER": ("1", 1.5, True, None, [1], math.nan, torch.ones(2), object(), 10**400),
    "NUMBER": ("0", True, None, [0.0], -1e-9, math.nan, math.inf, 10**400, 1e39, object()),
    "WORD": ("mx", "MAXX", 0, True, 3, [], {}, None, object()),
}
KINDS = {"boolean": "BOOLEAN", "integer": "INTEGER", "number": "NUMBER"}
FIELDS = [(cls, name) for cls in RECIPES.values() for name in settings_of(cls)]


@pytest.mark.parametrize(("cls", "name"), FIELDS, ids=lambda v: getattr(v, "__name__", v))
def test_a_value_outside_of_a_field_is_refused_with_its_place(cls, name):
    domain = settings_of(cls)[name][1].domain
    legal = next(iter(domain.schema.get("enum", ())), None)
    for wrong in WRONG[KINDS.get(domain.schema.get("type"), "WORD")]:
        if wrong is None and wrong in domain:
            continue
        with pytest.raises(RecipeError, match=rf"{cls.__name__}\.{name}: wants .*Cure: "):
            build(cls, **{name: wrong})
        with pytest.raises(RecipeError, match=rf"{cls.__name__}\.{name}: wants .*Cure: "):
            build(cls).replace(**{name: wrong})
    if isinstance(legal, str):
        with pytest.raises(RecipeError, match=f"did you mean {legal!r}|write {legal!r}|pass Format"):
            build(cls, **{name: legal[:-1] + "_"})


@pytest.mark.parametrize("margin", [2000, -2000, 127, -127])
def test_a_margin_whose_power_of_two_fp32_does_not_hold(margin):
    with pytest.raises(RecipeError, match=rf"DelayedScaling\.margin: wants an integer from -126 to 126, .* got {margin}\."):
        DelayedScaling(margin=margin)
    assert torch.ldexp(torch.ones(()), torch.tensor(-abs(margin) + 1)) < 2.0**-125
    assert (DelayedScaling(margin=126).margin, DelayedScaling(margin=-126).margin) == (126, -126)


@pytest.mark.parametrize("length", [0, -1, 2**20 + 1])
def test_a_history_without_steps_or_with_millions(length):
    with pytest.raises(RecipeError, match=r"DelayedScaling\.amax_history_len: wants a number of steps from 1 to 2\*\*20"):
        DelayedScaling(amax_history_len=length)


def test_integers_of_numpy_and_torch_are_taken_as_pythons():
    recipe = DelayedScaling(margin=np.int64(2), amax_history_len=torch.tensor(16))
    assert recipe == DelayedScaling(margin=2, amax_history_len=16)
    assert (type(recipe.margin), type(recipe.amax_history_len)) == (int, int)
    assert Float8CurrentScaling(amax_epsilon=np.float32(0.5)) == Float8CurrentScaling(amax_epsilon=0.5)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"amax_compute_algo": "most_recnt"}, r"got 'most_recnt'; did you mean 'most_recent'\?"),
        ({"amax_compute_algo": "MAX"}, r"got 'MAX'; did you mean 'max'\?"),
        ({"fp8_format": "E5M2"}, "E5M2 is for gradients only"),
        ({"fp8_format": "e4m3"}, r"Format\.E4M3 or Format\.HYBRID"),
        ({"fp8_format": 3}, r"Format\.E4M3 or Format\.HYBRID"),
    ],
)
def test_words_of_delayed_scaling(values, text):
    with pytest.raises(RecipeError, match=text):
        DelayedScaling(**values)
    assert DelayedScaling(fp8_format="HYBRID", amax_compute_algo="max") == DelayedScaling()


@pytest.mark.row("X06")
@pytest.mark.parametrize("product", ["wgrad", "dgrad"])
def test_x06_a_pipeline_under_row_scaled_activations_is_refused_by_the_name_of_the_field(product):
    """Also where only a product is wanted that reads no activation; without gradients it runs."""
    recipe = NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True)
    op = ops.Linear(32, 32, bias=False, dtype=torch.bfloat16).requires_grad_(product == "wgrad")
    model, x = ops.Sequential(op), torch.randn(32, 32, dtype=torch.bfloat16, requires_grad=product == "dgrad")
    with autocast(recipe=recipe), pytest.raises(RecipeError, match=r"row_scaled_activation=True with backward_override=None"):
        model(x)
    with autocast(recipe=recipe), torch.no_grad():
        assert model(x).isfinite().all()


@pytest.mark.row("X06")
def test_x06_row_scaled_activations_need_an_override_to_train():
    row_scaled = NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True)
    with pytest.raises(RecipeError, match=r"row_scaled_activation.*backward_override"):
        row_scaled.check_trainable()
    for override in OVERRIDES[1:]:
        row_scaled.replace(backward_override=override).check_trainable()
    for cls in RECIPES.values():
        build(cls).check_trainable()


@pytest.mark.parametrize("tiled", [("x", "w"), ("w", "grad"), ("x", "grad"), ("x", "w", "grad")])
def test_block_scaling_refuses_two_tiled_operands(tiled):
    dims = {f"{name}_block_scaling_dim": 2 if name in tiled else 1 for name in ("x", "w", "grad")}
    with pytest.raises(RecipeError, match="at most one"):
        Float8BlockScaling(**dims)


@pytest.mark.parametrize(
    ("cls", "values"),
    [
        (Float8CurrentScaling, {"fp8_format": "E5M2"}),
        (DelayedScaling, {"fp8_format": Format.E5M2}),
        (MXFP8BlockScaling, {"fp8_format": "e3m4"}),
        (Float8BlockScaling, {"fp8_format": 4}),
        (Float8BlockScaling, {"x_block_scaling_dim": 3}),
        (Float8BlockScaling, {"x_block_scaling_dim": True}),
        (DelayedScaling, {"amax_history_len": 0}),
        (DelayedScaling, {"amax_history_len": 4.0}),
        (DelayedScaling, {"margin": True}),
        (DelayedScaling, {"amax_compute_algo": max}),
        (Float8CurrentScaling, {"amax_epsilon": -1.0}),
        (Float8CurrentScaling, {"amax_epsilon": float("nan")}),
        (Float8CurrentScaling, {"use_power_2_scales": 1}),
        (MXFP8BlockScaling, {"scale_rule": "up"}),
        (NVFP4BlockScaling, {"nvfp4_4over6_err_mode": "mae"}),
        (CustomRecipe, {"qfactory": "mxfp8"}),
    ],
)
def test_g20_values_out_of_range_are_refused_by_name(cls, values):
    with pytest.raises(RecipeError, match=next(iter(values))):
        cls(**values)


def test_equal_values_of_other_spelling_are_the_same_recipe():
    assert Float8CurrentScaling(fp8_format="HYBRID", amax_epsilon=0) == Float8CurrentScaling()
    assert MXFP8BlockScaling(fp8_format="HYBRID").fp8_format is Format.HYBRID


@pytest.mark.parametrize("cls", [Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling])
@pytest.mark.parametrize("tensor_type", ["input", "weight", "grad_output"])
def test_hybrid_format_uses_e5m2_for_gradients_only(cls, tensor_type):
    role = QuantizerRole(tensor_type=tensor_type)
    dtype = {Format.HYBRID: "float8_e5m2", Format.E4M3: "float8_e4m3fn"}
    for fp8_format, gradient in dtype.items():
        wanted = gradient if tensor_type == "grad_output" else "float8_e4m3fn"
        quantizer = cls(fp8_format=fp8_format).quantizer(role)
        assert str(quantizer.fp8_dtype) == f"torch.{wanted}"
        assert (quantizer.rowwise, quantizer.columnwise) == (True, True)


def test_block_dimensions_by_role():
    recipe = Float8BlockScaling(x_block_scaling_dim=1, w_block_scaling_dim=1, grad_block_scaling_dim=2)
    dims = [recipe.quantizer(QuantizerRole(tensor_type=t)).block_scaling_dim for t in ("input", "weight", "grad_output")]
    assert dims == [1, 1, 2]


def test_g20_mxfp8_scale_rule_and_tiles_by_role():
    recipe = MXFP8BlockScaling(enable_2d_quantization=True, scale_rule="ocp_floor")
    made = [recipe.quantizer(QuantizerRole(tensor_type=t)) for t in ("input", "weight", "grad_output")]
    assert [q.with_2d_quantization for q in made] == [False, True, False]
    assert [q.scale_rule for q in made] == ["ocp_floor"] * 3
    assert MXFP8BlockScaling().quantizer(QuantizerRole()).scale_rule == "te"


NVFP4_FLAGS = ("with_rht", "with_2d_quantization", "stochastic_rounding", "row_scaled_nvfp4", "nvfp4_use_4over6")


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({}, {"input": "10000", "weight": "01000", "grad_output": "10100"}),
        ({"disable_rht": True}, {"input": "00000", "weight": "01000", "grad_output": "00100"}),
        ({"disable_stochastic_rounding": True}, {"input": "10000", "weight": "01000", "grad_output": "10000"}),
        ({"disable_2d_quantization": True}, {"input": "10000", "weight": "00000", "grad_output": "10100"}),
        ({"nvfp4_4over6": "weights"}, {"input": "10000", "weight": "01001", "grad_output": "10100"}),
        ({"nvfp4_4over6": "all", "disable_rht": True}, {"input": "00001", "weight": "01001", "grad_output": "00100"}),
        ({"row_scaled_activation": True, "disable_rht": True}, {"input": "00010", "weight": "01000", "grad_output": "00100"}),
    ],
)
def test_nvfp4_options_by_role(values, wanted):
    recipe = NVFP4BlockScaling(**values)
    for tensor_type, flags in wanted.items():
        quantizer = recipe.quantizer(QuantizerRole(tensor_type=tensor_type))
        assert "".join(str(int(getattr(quantizer, flag))) for flag in NVFP4_FLAGS) == flags, tensor_type


@pytest.mark.parametrize("cls", [Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling])
def test_unknown_tensor_type_is_refused_with_a_suggestion(cls):
    with pytest.raises(RecipeError, match="did you mean 'weight'"):
        cls().quantizer(QuantizerRole(tensor_type="weights"))


@pytest.mark.row("H08")
def test_h08_factory_is_called_once_per_role():
    seen = []

    def factory(role):
        seen.append(role)
        return None if role.name == "head" else IdentityQuantizer()

    recipe = CustomRecipe(qfactory=factory)
    assert seen == [QuantizerRole(tensor_type=t) for t in ("input", "weight", "grad_output")]
    seen.clear()
    roles = [QuantizerRole(tensor_type=t, name="fc1") for t in ("input", "weight", "grad_output", "output")]
    for role in 2 * roles:
        assert isinstance(recipe.quantizer(role), IdentityQuantizer)
    assert seen == roles
    with pytest.raises(ValueError, match=r"name='head'.*None"):
        recipe.quantizer(QuantizerRole(name="head"))


@pytest.mark.row("H08")
def test_h08_factory_identity_is_part_of_the_recipe():
    def factory_of(quantizer):
        def factory(role):
            return quantizer

        return factory

    first, second = factory_of(IdentityQuantizer()), factory_of(IdentityQuantizer())
    assert CustomRecipe(qfactory=first) == CustomRecipe(qfactory=first)
    assert CustomRecipe(qfactory=first) != CustomRecipe(qfactory=second)
    assert CustomRecipe(qfactory=identity_everywhere) != CustomRecipe(qfactory=another_factory)
    with pytest.raises(KeyValueError, match=r"CustomRecipe\.qfactory: wants .*, got int\. Cure: "):
        CustomRecipe(qfactory=(lambda a, role: a).__get__(3))


class Switched:
    """A factory whose answer depends on what its key cannot see."""

    def __init__(self) -> None:
        self.on = True

    def __call__(self, role):
        return MXFP8Quantizer() if self.on else IdentityQuantizer()

    def named(self, role):
        if not role.name:
            raise KeyError(role)
        return self(role)


@pytest.mark.row("H08")
def test_r9_what_a_factory_answers_is_part_of_the_recipe():
    factory = Switched()
    first, again = CustomRecipe(qfactory=factory), CustomRecipe(qfactory=factory)
    factory.on = False
    later = CustomRecipe(qfactory=factory)
    assert first == again != later
    assert [d.path for d in keys.diff(first, later)] == [f"{name}_quantizer" for name in ("input", "weight", "grad_output")]
    assert first.quantizer(QuantizerRole()) == MXFP8Quantizer(), "one recipe has one answer for ever"
    assert later.quantizer(QuantizerRole()) == IdentityQuantizer()
    assert first.replace(rounding="single").quantizer(QuantizerRole()) == IdentityQuantizer(), "a new recipe asks anew"


def test_r9_equal_recipes_share_the_answers_for_named_roles():
    factory, role = Switched(), QuantizerRole(name="fc1")
    first, second = CustomRecipe(qfactory=factory.named), CustomRecipe(qfactory=factory.named)
    assert first == second
    made = first.quantizer(role)
    factory.on = False
    assert second.quantizer(role) is made
    assert first.with_sources({}).quantizer(role) is made
    with pytest.raises(KeyError):
        first.quantizer(QuantizerRole())


def test_r9_any_callable_is_a_factory_by_identity():
    made = partial(lambda quantizer, role: quantizer, IdentityQuantizer())
    assert CustomRecipe(qfactory=made) == CustomRecipe(qfactory=made)
    assert CustomRecipe(qfactory=made) != CustomRecipe(qfactory=partial(made.func, *made.args))
    one, other = Switched(), Switched()
    assert CustomRecipe(qfactory=one.__call__) == CustomRecipe(qfactory=one.__call__) != CustomRecipe(qfactory=other.__call__)


def test_recipe_of_names_the_nearest_kind():
    with pytest.raises(RecipeError, match="did you mean 'mxfp8'"):
        recipe_of("mxpf8", {})
    assert recipe_of("delayed", {"margin": 2}) == DelayedScaling(margin=2)
    assert all(recipe_of(kind, REQUIRED.get(cls, {})).kind == kind for kind, cls in RECIPES.items())


def test_recipe_base_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        Recipe()


def test_r9_identity_is_found_once(monkeypatch):
    """The plan key hashes and compares recipes on every call: neither makes a digest."""
    recipe, other = Float8BlockScaling(), Float8BlockScaling()
    monkeypatch.setattr(keys, "digest", None)
    assert (hash(recipe), recipe) == (hash(other), other)


def test_every_recipe_that_is_written_has_a_kind_and_a_public_name():
    classes = [cls for cls in vars(builtin).values() if isinstance(cls, type) and issubclass(cls, recipes.Recipe)]
    written = {cls for cls in classes if cls.__module__ == builtin.__name__ and not cls.__name__.startswith("_")}
    assert {cls.__name__ for cls in written - {*recipes.RECIPES.values()}} == set(), (
        "add these to RECIPES of opfuse/recipes/kinds.py"
    )
    unlisted = {cls.__name__ for cls in recipes.RECIPES.values()} - {*recipes.__all__}
    assert unlisted == set(), "import these in opfuse/recipes/__init__.py and list them in its __all__"
