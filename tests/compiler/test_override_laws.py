"""X04, X05: an override is a custom recipe of hybrid quantizers, bit for bit, in outputs and gradients of any pipeline.

dequantized = Hybrid(row = Q, column = identity of the dequantized rowwise data) with an identity quantizer of gradients;
high_precision = Hybrid(row = Q, column = identity of the original) with the same.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import opfuse
from opfuse import ops
from opfuse.errors import GemmError, RecipeError
from opfuse.recipes import CustomRecipe, NVFP4BlockScaling, QuantizerRole, Recipe
from opfuse.tensors.quantizers import HybridQuantizer, IdentityQuantizer, NVFP4Quantizer, Quantizer
from tests.compiler.harness import HAS_OVERRIDE, Step, randn, recipe_for, run, same, to
from tests.compiler.pipelines import BLOCKS, pipeline

EXAMPLES = pytest.mark.parametrize("examples", [25, pytest.param(3000, marks=pytest.mark.slow)])
QUANTIZING = {"cached silu"}
"""Blocks with a cast that no quantizer of a role says: an override stops it, a custom recipe does not."""
SOURCES = {"dequantized": "rowwise_dequantized", "high_precision": "original"}
OPTIONS = {
    "fp8_current": st.fixed_dictionaries(
        {}, optional={"use_power_2_scales": st.booleans(), "amax_epsilon": st.sampled_from((0.0, 0.5))}
    ),
    "fp8_row": st.just({}),
    "fp8_block": st.fixed_dictionaries(
        {}, optional={"use_f32_scales": st.booleans(), "x_block_scaling_dim": st.just(2), "w_block_scaling_dim": st.just(1)}
    ),
    "mxfp8": st.fixed_dictionaries(
        {}, optional={"enable_2d_quantization": st.booleans(), "scale_rule": st.sampled_from(("te", "ocp_floor"))}
    ),
    "nvfp4": st.fixed_dictionaries(
        {"disable_rht": st.just(True)},
        optional={
            "disable_2d_quantization": st.booleans(),
            "row_scaled_activation": st.booleans(),
            "nvfp4_4over6": st.sampled_from(("weights", "activations", "all")),
        },
    ),
}


@st.composite
def recipes(draw: st.DrawFn, override: str, rounding: str) -> Recipe:
    name = draw(st.sampled_from(HAS_OVERRIDE))
    fields = draw(OPTIONS[name])
    if fields.get("x_block_scaling_dim") == 2:
        fields["w_block_scaling_dim"] = 1
    return recipe_for(name, override, rounding=rounding, **fields)


def as_hybrid(recipe: Recipe) -> CustomRecipe:
    """The custom recipe that the law equates with ``recipe``."""
    source = SOURCES[recipe.backward_override]

    def qfactory(role: QuantizerRole) -> Quantizer:
        if role.is_gradient:
            return IdentityQuantizer()
        return HybridQuantizer(recipe.quantizer(role), IdentityQuantizer(), columnwise_source=source)

    return CustomRecipe(qfactory=qfactory, rounding=recipe.rounding)


def check(model: torch.nn.Module, tensors: list[torch.Tensor], recipe: Recipe, *, input_grad: bool = True) -> None:
    left, right = (run(model, *tensors, step=Step(r, input_grad=input_grad)).tensors for r in (recipe, as_hybrid(recipe)))
    names = [name for name in left if not name.startswith(("saved", "state"))]
    assert names
    assert [name for name in names if not same(left[name], right[name])] == []


@pytest.mark.few
@pytest.mark.row("X04", "X05")
@EXAMPLES
@pytest.mark.parametrize("rounding", ["per_op", "single"])
@pytest.mark.parametrize("override", SOURCES)
def test_x04_x05_linear(override, rounding, examples):
    @given(
        recipe=recipes(override, rounding),
        leading=st.lists(st.integers(0, 9), min_size=1, max_size=3),
        sizes=st.tuples(st.sampled_from((32, 64, 160)), st.integers(1, 40)),
        dtype=st.sampled_from((torch.bfloat16, torch.float16, torch.float32)),
        grads=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    )
    @settings(max_examples=examples)
    def law(recipe, leading, sizes, dtype, grads):
        k, n = sizes
        model = to(ops.Sequential(ops.Linear(k, n)), dtype)
        input_grad, model[0].weight.requires_grad, model[0].bias.requires_grad = grads
        check(model, [randn(*leading, k, dtype=dtype)], recipe, input_grad=input_grad)

    law()


@pytest.mark.row("X04", "X05")
@EXAMPLES
@pytest.mark.parametrize("override", SOURCES)
def test_x04_x05_pipelines(override, examples):
    """Under "per_op" only: rules may fuse gradients in different places on the two sides, which then round at other places."""

    @given(
        recipe=recipes(override, "per_op"),
        blocks=st.lists(st.sampled_from(sorted(BLOCKS.keys() - QUANTIZING)), min_size=1, max_size=6),
        dtype=st.sampled_from((torch.bfloat16, torch.float32)),
        frozen=st.sets(st.integers(0, 7)),
    )
    @settings(max_examples=examples)
    def law(recipe, blocks, dtype, frozen):
        made = pipeline(blocks)
        model = made.model(dtype)
        for i, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(i not in frozen)
        check(model, made.tensors(dtype), recipe)

    law()


@pytest.mark.row("X04", "X05")
@pytest.mark.parametrize("override", SOURCES)
def test_x04_x05_under_torch_autocast(override):
    """fp32 parameters and inputs, bf16 products: the casts see bf16."""
    model = to(ops.Sequential(ops.RMSNorm(64), ops.Linear(64, 64), ops.GELU(), ops.Linear(64, 32)), torch.float32)
    for name in HAS_OVERRIDE:
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            check(model, [randn(32, 64, dtype=torch.float32)], recipe_for(name, override))


@pytest.mark.row("X06")
def test_x06_row_scaled_activations_train_under_an_override_or_a_hybrid_only():
    fields = {"row_scaled_activation": True, "disable_rht": True}
    model, x = to(ops.Sequential(ops.Linear(64, 64)), torch.bfloat16), randn(32, 64)
    with opfuse.autocast(recipe=NVFP4BlockScaling(**fields)), pytest.raises(RecipeError, match="row_scaled_activation=True"):
        model(x)
    with opfuse.autocast(recipe=NVFP4BlockScaling(**fields)), torch.no_grad():
        y = model(x)
    for override in SOURCES:
        trained = run(model, x, step=Step(NVFP4BlockScaling(**fields, backward_override=override))).tensors
        assert same(trained["output 0"], y)
    hybrid = run(model, x, step=Step(CustomRecipe(qfactory=_row_scaled_forward))).tensors
    assert same(hybrid["output 0"], y)


@pytest.mark.row("X06")
@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
def test_x06_a_row_scaled_format_in_a_backward_product_is_refused_by_its_roles(role):
    def factory(asked: QuantizerRole) -> Quantizer:
        return NVFP4Quantizer(row_scaled_nvfp4=asked.tensor_type == role)

    model, x = to(ops.Sequential(ops.Linear(64, 64)), torch.bfloat16), randn(32, 64)
    product = {"input": "wgrad of grad_output and input"}.get(role, "dgrad of grad_output and weight")
    with opfuse.autocast(recipe=CustomRecipe(qfactory=factory)), pytest.raises(GemmError, match=rf"Linear\(.*\) {product}"):
        model(x.requires_grad_())
    with opfuse.autocast(recipe=CustomRecipe(qfactory=factory)), torch.no_grad():
        y = model(x)
    for override in SOURCES if role != "grad_output" else ():
        trained = run(model, x, step=Step(CustomRecipe(qfactory=factory, backward_override=override))).tensors
        assert same(trained["output 0"], y)


def _row_scaled_forward(role: QuantizerRole) -> Quantizer:
    if role.is_gradient:
        return IdentityQuantizer()
    rowwise = NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True).quantizer(role)
    return HybridQuantizer(rowwise, NVFP4Quantizer())
