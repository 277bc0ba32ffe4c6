"""A script for te.ops runs by changing its import, or is told what opfuse has not."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path

import pytest
import torch

import opfuse
from opfuse import ops, te
from opfuse.errors import NotHereError, RecipeError, UnknownArgumentError, UnsupportedError
from opfuse.te.ops import KEYWORDS

BF16 = torch.bfloat16


def mlp() -> ops.Sequential:
    """As te.ops' own documentation writes it, keywords at their defaults among them."""
    return te.ops.Sequential(
        te.ops.LayerNorm(64, eps=1e-5, zero_centered_gamma=False, sm_margin=0),
        te.ops.Linear(64, 256, bias=True, dtype=BF16, tensor_parallel_mode=None, sequence_parallel=False),
        te.ops.SwiGLU(),
        te.ops.Linear(128, 64, dtype=BF16, rng_state_tracker_function=None, userbuffers_options=None),
    ).to(BF16)


def step(model: torch.nn.Module, x: torch.Tensor, region) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    model.zero_grad()
    with region:
        y = model(x)
    y.sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def test_a_script_computes_what_opfuse_computes_and_fuses_as_much():
    torch.manual_seed(0)
    model, x, recipe = mlp(), torch.randn(32, 64, dtype=BF16), opfuse.recipes.DelayedScaling()
    plain = ops.Sequential(ops.LayerNorm(64), ops.Linear(64, 256), ops.SwiGLU(), ops.Linear(128, 64)).to(BF16)
    plain.load_state_dict(copy.deepcopy(model.state_dict()))
    for region in (
        lambda: te.autocast(True, False, te.recipe.DelayedScaling(fp8_format=te.recipe.Format.HYBRID)),
        lambda: te.autocast(enabled=True, recipe=recipe),
        lambda: te.fp8_autocast(enabled=True, calibrating=False, fp8_recipe=recipe, fp8_group=None),
    ):
        got, wanted = step(model, x, region()), step(plain, x, opfuse.autocast(recipe=recipe))
        assert all(map(torch.equal, got, wanted))
    fused = [[*plan.fusions] for run in model.runs() for _, plan in run.cache.items()]
    assert fused == [[*plan.fusions] for run in plain.runs() for _, plan in run.cache.items()]
    assert fused[0]


def test_ops_with_keywords_of_te_ops_are_named_by_patterns_as_opfuse_has_them():
    assert {name: getattr(te.ops, name).kind for name in KEYWORDS} == {name: getattr(ops, name).kind for name in KEYWORDS}
    basic = [name for name in KEYWORDS if hasattr(getattr(ops, name), "word")]
    assert len(basic) > 5
    assert {name: getattr(te.ops, name).word for name in basic} == {name: getattr(ops, name).word for name in basic}


def test_the_gradient_of_a_residual_fuses_with_a_norm_of_te_ops():
    def fused(of) -> list[str]:
        model = of.Sequential(of.MakeExtraOutput(), of.RMSNorm(32), of.BasicLinear(32, 32), of.AddExtraInput())
        story = opfuse.explain(model, torch.randn(32, 32, requires_grad=True), torch.randn(32, 32))
        return [line for line in str(story).splitlines() if " fused " in line]

    assert fused(te.ops) == fused(ops)
    assert any("backward_add_rms_norm" in line for line in fused(te.ops))


def test_names_of_its_modules_are_refused_with_what_to_use_instead():
    page = (Path(opfuse.__file__).parents[1] / "docs" / "migrate.md").read_text(encoding="utf-8")
    section = page.partition("## te modules")[2].partition("## ")[0]
    assert set(re.findall(r"`te\.(\w+)`", section)) == set(te.INSTEAD)
    with pytest.raises(NotHereError, match=r"opfuse\.te: wants .*, got Linear, which it has not\. Cure: use nn\.Linear, .*fuse_"):
        _ = te.Linear
    assert not any(hasattr(te, name) for name in (*te.INSTEAD, "Lineer"))


def test_the_page_on_coming_from_there_is_true():
    page = (Path(opfuse.__file__).parents[1] / "docs" / "migrate.md").read_text(encoding="utf-8")
    space: dict = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "migrate.md", "exec"), space)
    assert space["model"][1].weight.grad.abs().sum() > 0
    keywords = [each for table in (te.ops.KEYWORDS, te.recipe.KEYWORDS) for taken in table.values() for each in taken]
    assert [keyword for keyword in keywords if f"{keyword}=" not in page] == []
    named = {
        name for line in page.splitlines() if line.startswith("| `te.ops.") for name in re.findall(r"\w+", line.split("|")[1])
    }
    absent = {"AdaptiveLayerNorm"}
    assert named >= absent
    ours = {
        name for name in dir(ops) if isinstance(getattr(ops, name), type) and issubclass(getattr(ops, name), ops.FusibleOperation)
    }
    (alone,) = [line for line in page.splitlines() if line.startswith("| only in `opfuse.ops` |")]
    untold = ours - named - set(re.findall(r"\w+", alone))
    assert untold == set(), "docs/migrate.md has a row of ops that te.ops has, too, and one of ops only in opfuse.ops: add these"
    assert not any(hasattr(te.ops, name) for name in absent)


def test_disabled_regions_are_of_high_precision():
    model, x = mlp(), torch.randn(32, 64, dtype=BF16)
    assert all(map(torch.equal, step(model, x, te.fp8_autocast(enabled=False)), step(model, x, te.autocast(False))))


def test_weights_made_under_the_former_name_live_quantized():
    with te.fp8_model_init(True, te.recipe.MXFP8BlockScaling()):
        made = te.ops.Linear(64, 64, dtype=BF16)
    assert isinstance(made.weight, opfuse.tensors.QuantizedTensor)


@pytest.mark.parametrize("name", te.ops.KEYWORDS)
def test_keywords_that_opfuse_has_not_are_refused_by_name_unless_at_their_defaults(name):
    sizes = {"Linear": (8, 8), "BasicLinear": (8, 8), "GroupedLinear": (2, 8, 8), "L2Normalization": ()}.get(
        name, () if "Scaled" in name else (8,)
    )
    wanted = {"tanh_clamp_scale": 2.0} if "Tanh" in name else {}
    op = functools.partial(getattr(te.ops, name), **wanted)
    assert issubclass(op.func, getattr(ops, name))
    for keyword, (default, cure) in te.ops.KEYWORDS[name].items():
        assert type(op(*sizes, **{keyword: default})).__name__ == name
        with pytest.raises(
            UnsupportedError, match=re.escape(f"te.ops.{name}: wants {keyword}={default!r}, got 'column'. Cure: {cure}")
        ):
            op(*sizes, **{keyword: "column"})
    with pytest.raises(UnknownArgumentError):
        op(*sizes, tensor_paralel_mode=None)


def test_keywords_as_scripts_write_them():
    """By the names and defaults of te.ops, not by the table that refuses other values."""
    assert te.ops.Bias(64, tensor_parallel=False, tensor_parallel_group=None).bias.shape == (64,)
    assert te.ops.L2Normalization(eps=1e-5, seq_length=None, micro_batch_size=None).spec.eps == 1e-5
    with pytest.raises(UnsupportedError, match="wants tensor_parallel=False, got True"):
        te.ops.Bias(64, tensor_parallel=True)
    with pytest.raises(UnsupportedError, match="wants seq_length=None, got 4096"):
        te.ops.L2Normalization(seq_length=4096)


def test_what_a_gated_unit_of_an_mlp_may_be_asked_for():
    """By the names and the default of te.ops, not by the table that refuses them."""
    clamp = {"tanh_clamp_scale": 2.0}
    for name in ("ScaledSwiGLU", "ScaledSiTUGLU", "ScaledClampedQGeGLU", "ScaledSReLU", "ScaledTanhSReLU"):
        op = functools.partial(getattr(te.ops, name), **(clamp if "Tanh" in name else {}))
        op(activation_recompute_in_mlp=False)
        with pytest.raises(UnsupportedError, match="the input is kept"):
            op(activation_recompute_in_mlp=True)


def test_other_ops_are_opfuse_s_own():
    assert te.ops.GELU is ops.GELU
    assert te.ops.Sequential is ops.Sequential
    assert {"GELU", "Linear"} <= {*dir(te.ops)}
    with pytest.raises(AttributeError):
        te.ops.Attention  # noqa: B018


def test_calibration_is_refused():
    with pytest.raises(UnsupportedError, match="calibrating=False"):
        te.fp8_autocast(calibrating=True)


@pytest.mark.parametrize("given", [opfuse.recipes.MXFP8BlockScaling(), "mxfp8", 1, None], ids=str)
def test_a_region_is_told_of_what_is_no_switch(given):
    """A recipe in the first place would have been taken for True, and the region for one of current scaling."""
    for region in (opfuse.autocast, te.autocast, te.fp8_autocast):
        with pytest.raises(RecipeError, match=r"autocast: wants enabled to be True or False.*recipe="):
            region(given)


@pytest.mark.parametrize("name", te.recipe.KEYWORDS)
def test_recipes_take_the_peer_s_keywords_at_their_defaults_and_are_opfuse_s_own(name):
    needed = {"qfactory": te.factories.mxfp8_factory} if name == "CustomRecipe" else {}
    theirs, ours = getattr(te.recipe, name), getattr(opfuse.recipes, name)
    taken = {keyword: default for keyword, (default, _) in te.recipe.KEYWORDS[name].items()}
    made = theirs(**needed, **taken)
    assert made == ours(**needed)
    assert type(made) is ours
    assert isinstance(made, theirs)
    assert not isinstance(made, te.recipe.DelayedScaling) or name == "DelayedScaling"
    for keyword, (default, cure) in te.recipe.KEYWORDS[name].items():
        wanted = re.escape(f"te.recipe.{name}: wants {keyword}={default!r}, got 'other'. Cure: {cure}")
        with pytest.raises(UnsupportedError, match=wanted):
            theirs(**needed, **{keyword: "other"})
    with pytest.raises(opfuse.recipes.UnknownFieldError):
        theirs(**needed, fp8_dpaa=False)

    class Mine(theirs):
        pass

    assert type(Mine(**needed)) is Mine
    assert isinstance(Mine(**needed), ours)


def test_values_as_the_peer_spells_them():
    made = te.recipe.NVFP4BlockScaling(nvfp4_4over6="none", nvfp4_4over6_e4m3_use_256="none", fp4_format="E2M1")
    assert made == opfuse.recipes.NVFP4BlockScaling(nvfp4_4over6_e4m3_use_256=None)
    assert te.recipe.Format is opfuse.recipes.Format
    assert {"MXFP8BlockScaling", "Format"} <= {*dir(te.recipe)}


BASES = {
    "high_precision_factory": None,
    "delayed_scaling_factory": opfuse.recipes.DelayedScaling(),
    "current_scaling_factory": opfuse.recipes.Float8CurrentScaling(),
    "float8_block_scaling_factory": opfuse.recipes.Float8BlockScaling(),
    "mxfp8_factory": opfuse.recipes.MXFP8BlockScaling(),
    "nvfp4_factory": opfuse.recipes.NVFP4BlockScaling(),
}


@pytest.mark.parametrize("name", BASES)
def test_factories_by_the_peer_s_names_are_its_recipes(name):
    x, recipe = torch.randn(32, 64, dtype=BF16), te.recipe.CustomRecipe(qfactory=getattr(te.factories, name))
    model = mlp()
    other = copy.deepcopy(model)
    regions = [opfuse.autocast(enabled=used is not None, recipe=used) for used in (recipe, BASES[name])]
    results = []
    for module, region in zip((model, other), regions):
        torch.manual_seed(0)
        results.append(step(module, x, region))
    assert all(map(torch.equal, *results))
    assert {*te.factories.__all__} == {each for each in dir(te.factories) if each.endswith("_factory")}
