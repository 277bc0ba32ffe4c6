"""The backward override: what each mode computes, saves and never makes, against explicit formulas and against plain runs."""

from __future__ import annotations

import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.compiler.graph import BACKWARD, QUANTIZE
from opfuse.errors import MissingPlaneError, ShapeError
from opfuse.tensors.quantizers import Quantizer
from opfuse.tensors.storage import QuantizedStorage
from tests.compiler.harness import (
    HAS_OVERRIDE,
    OVERRIDES,
    Step,
    differences,
    plain,
    randn,
    recipe_for,
    rowwise,
    run,
    same,
    saved_values,
    to,
    train,
)
from tests.compiler.pipelines import COMPOSED
from tests.plans import plans_used

BF16 = torch.bfloat16
SHAPES = {
    "2d": ((32, 64), 64),
    "2d, more inputs": ((32, 128), 64),
    "3d": ((2, 32, 64), 128),
    "4d": ((2, 2, 16, 64), 96),
    "one row": ((1, 64), 64),
    "ragged rows": ((33, 64), 64),
    "ragged 3d": ((3, 7, 64), 64),
    "ragged outputs": ((32, 64), 50),
    "no rows": ((0, 64), 64),
}
EVEN = ("2d", "2d, more inputs", "3d", "4d")
"""Shapes that have both planes of every operand in every format."""
ACTIVE = OVERRIDES[1:]


def linear(shape: str, *, bias: bool = True) -> tuple[ops.Sequential, torch.Tensor]:
    (*leading, k), n = SHAPES[shape]
    torch.manual_seed(0)
    return to(ops.Sequential(ops.Linear(k, n, bias=bias)), BF16), randn(*leading, k)


def results(tensors: dict) -> dict:
    """Outputs and gradients, without saved state."""
    return {name: value for name, value in tensors.items() if not name.startswith(("saved", "state"))}


def gradients(tensors: dict) -> dict:
    return {name: value for name, value in tensors.items() if name.startswith("grad")}


@pytest.mark.few
@pytest.mark.row("B05", "B28")
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("name", HAS_OVERRIDE)
@pytest.mark.parametrize("shape", SHAPES)
def test_b05_b28_high_precision_gradients_are_those_without_a_recipe(shape, name, bias):
    model, x = linear(shape, bias=bias)
    overridden, unquantized = (run(model, x, step=Step(recipe)) for recipe in (recipe_for(name, "high_precision"), None))
    assert differences(gradients(overridden.tensors), gradients(unquantized.tensors)) == []
    if x.numel():
        assert not same(overridden.tensors["output 0"], unquantized.tensors["output 0"])


@pytest.mark.row("B05", "B23")
@pytest.mark.parametrize("composed", ["mlp", "swiglu mlp"])
@pytest.mark.parametrize("name", HAS_OVERRIDE)
def test_b05_b23_every_gradient_of_a_pipeline_is_that_of_its_ops_without_a_recipe(name, composed):
    """The values are those of the quantized forward pass; from there on, each op's own backward pass, one after another."""
    made = COMPOSED[composed]()
    model, (x,) = made.model(), made.tensors()
    got = run(model, x, step=Step(recipe_for(name, "high_precision")))
    assert any(plan.fusions for plan in got.plans)
    values = [x]
    for op in model:
        with torch.no_grad(), opfuse.autocast(recipe=recipe_for(name, "high_precision")):
            values.append(ops.Sequential(op)(values[-1]))
    assert same(got.tensors["output 0"], values[-1])
    gradient = randn(*values[-1].shape, seed=100)
    for i in reversed(range(len(model))):
        leaf, parameters = values[i].detach().requires_grad_(), dict(model[i].named_parameters())
        gradient, *grads = torch.autograd.grad(ops.Sequential(model[i])(leaf), (leaf, *parameters.values()), gradient)
        for parameter, grad in zip(parameters, grads, strict=True):
            assert same(got.tensors[f"grad of {i}.{parameter}"], grad)
    assert same(got.tensors["grad of input"], gradient)


@pytest.mark.few
@pytest.mark.row("B06", "B22", "B28")
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("name", HAS_OVERRIDE)
@pytest.mark.parametrize("shape", SHAPES)
def test_b06_b22_b28_dequantized_gradients_are_the_chain_rule_of_the_quantized_forward(shape, name, bias):
    model, x = linear(shape, bias=bias)
    recipe = recipe_for(name, "dequantized")
    got = run(model, x, step=Step(recipe)).tensors
    dy = randn(*x.shape[:-1], model[0].out_features, seed=100)
    wq, xq = rowwise(recipe, "weight", model[0].weight), rowwise(recipe, "input", x)
    flat = dy.reshape(-1, dy.shape[-1])
    assert same(got["grad of input"], (flat @ wq).reshape(x.shape))
    assert same(got["grad of 0.weight"], flat.t() @ xq.reshape(flat.shape[0], xq.shape[-1]))
    if bias:
        assert same(got["grad of 0.bias"], dy.float().sum_to_size(dy.shape[-1]).to(BF16))


@pytest.mark.few
@pytest.mark.row("B07")
@pytest.mark.parametrize("name", HAS_OVERRIDE)
@pytest.mark.parametrize("shape", SHAPES)
def test_b07_forward_is_the_same_under_every_override(shape, name):
    model, x = linear(shape)
    overrides = OVERRIDES if shape in EVEN else ACTIVE
    outputs = [run(model, x, step=Step(recipe_for(name, override))).tensors["output 0"] for override in overrides]
    assert all(same(output, outputs[0]) for output in outputs)


@pytest.mark.few
@pytest.mark.row("B07")
@pytest.mark.parametrize("name", HAS_OVERRIDE)
@pytest.mark.parametrize("composed", COMPOSED)
def test_b07_forward_of_pipelines_is_the_same_under_every_override(composed, name):
    made = COMPOSED[composed]()
    model, tensors = made.model(), made.tensors()
    first, *others = (run(model, *tensors, step=Step(recipe_for(name, override))).tensors for override in OVERRIDES)
    for other in others:
        outputs = [key for key in first if key.startswith("output")]
        assert [key for key in outputs if not same(first[key], other[key])] == []


@pytest.mark.row("B08")
@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("name", HAS_OVERRIDE)
def test_b08_no_columnwise_plane_is_made(name, override, monkeypatch):
    """Whether a cast runs alone or inside the kernel of what it casts."""
    calls = []
    storage = Quantizer._storage

    def spy(self, shape, dtype, planes):
        cast = [plane.usage for plane in planes if plane.format.family != "identity"]
        if cast:
            calls.append("columnwise" in cast)
        return storage(self, shape, dtype, planes)

    monkeypatch.setattr(Quantizer, "_storage", spy)
    made = COMPOSED["swiglu mlp"]()
    plans = run(made.model(), *made.tensors(), step=Step(recipe_for(name, override))).plans
    assert len(calls) >= (6 if override is None else 4)
    assert any(calls) is (override is None)
    specs = [node.spec for plan in plans for node in plan.graph.nodes if node.kind == QUANTIZE]
    made_columnwise = [
        spec for spec in specs if "columnwise" in spec.quantizer.usages and spec.quantizer.formats[1].scale != "none"
    ]
    assert bool(made_columnwise) is (override is None)


@pytest.mark.row("B09")
@pytest.mark.parametrize("name", HAS_OVERRIDE)
@pytest.mark.parametrize("override", ACTIVE)
def test_b09_nothing_quantizes_a_gradient(name, override):
    made = COMPOSED["explicit casts"]()
    (plan,) = run(made.model(), *made.tensors(), step=Step(recipe_for(name, override))).plans
    assert not [node for node in plan.graph.nodes if node.directions == {BACKWARD}]
    assert "grad_output" not in {cast.role for cast in plan.casts.values()}
    (plain_plan,) = run(made.model(), *made.tensors(), step=Step(recipe_for(name))).plans
    assert "grad_output" in {cast.role for cast in plain_plan.casts.values()}


@pytest.mark.row("B10")
@pytest.mark.parametrize("name", HAS_OVERRIDE)
@pytest.mark.parametrize("shape", ["2d", "3d", "4d", "ragged 3d"])
def test_b10_high_precision_saves_the_caller_s_tensor(shape, name):
    model, x = linear(shape)
    x.requires_grad_()
    with opfuse.autocast(recipe=recipe_for(name, "high_precision")), saved_values() as saved:
        model(x)
    assert saved["0.x"] is x
    assert saved["0.w"] is model[0].weight


SNAPSHOT = {None: ("columnwise",), "dequantized": ("rowwise",), "high_precision": None}
"""Usages of the saved operands; None: the original tensor."""


@pytest.mark.row("B11")
@pytest.mark.parametrize("name", HAS_OVERRIDE)
@pytest.mark.parametrize("override", OVERRIDES)
def test_b11_saved_operands(override, name):
    made = COMPOSED["mlp"]()
    with opfuse.autocast(recipe=recipe_for(name, override, keep="all")), saved_values() as saved:
        made.model()(made.tensors()[0].requires_grad_())
    operands = [saved[key] for key in ("1.x", "1.w", "4.x", "4.w")]
    for operand in operands:
        if SNAPSHOT[override] is None:
            assert type(operand) in (torch.Tensor, torch.nn.Parameter)
            assert operand.dtype == BF16
            continue
        assert isinstance(operand, QuantizedStorage)
        assert operand.usages == SNAPSHOT[override]
        (missing,) = {"rowwise", "columnwise"} - set(operand.usages)
        with pytest.raises(MissingPlaneError, match=f"backward_override={override!r} saves the"):
            operand.plane(missing)


@pytest.mark.few
@pytest.mark.row("B12")
@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("name", ["none", *HAS_OVERRIDE])
@pytest.mark.parametrize(("x_grad", "w_grad"), [(True, True), (True, False), (False, True), (False, False)])
def test_b12_nothing_is_saved_that_no_gradient_needs(x_grad, w_grad, name, override):
    model, x = linear("2d")
    x.requires_grad_(x_grad)
    model[0].weight.requires_grad_(w_grad)
    model[0].bias.requires_grad_(False)
    recipe = None if name == "none" else recipe_for(name, override)
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe), saved_values() as saved:
        y = model(x)
    assert {key for key, value in saved.items() if value is not None} == {
        name for name, wanted in (("0.x", w_grad), ("0.w", x_grad)) if wanted
    }
    assert y.requires_grad is (x_grad or w_grad)


@pytest.mark.row("B16")
@pytest.mark.parametrize("name", HAS_OVERRIDE)
@pytest.mark.parametrize("override", OVERRIDES)
def test_b16_explicit_quantize(override, name):
    recipe, x, dy = recipe_for(name, override), randn(32, 64), randn(32, 64, seed=100)
    model = ops.Sequential(ops.Quantize(forward=True, backward=True))
    got = run(model, x, step=Step(recipe)).tensors
    assert same(got["output 0"], rowwise(recipe, "input", x))
    torch.manual_seed(7)  # a gradient may be rounded stochastically
    assert same(got["grad of input"], dy if override is not None else rowwise(recipe, "grad_output", dy))
    gradient_only = run(ops.Sequential(ops.Quantize(forward=False, backward=True)), x, step=Step(recipe)).tensors
    assert same(gradient_only["output 0"], x)
    assert same(gradient_only["grad of input"], got["grad of input"])


@pytest.mark.row("B16")
def test_b16_explicit_quantize_without_a_recipe_is_the_identity():
    x = randn(32, 64).requires_grad_()
    assert ops.Sequential(ops.Quantize(forward=True, backward=True))(x) is x


@pytest.mark.row("B20")
@pytest.mark.parametrize("name", HAS_OVERRIDE)
def test_b20_switching_the_override_switches_the_plan(name):
    model, x = linear("2d")
    sequence = [None, None, "high_precision", "dequantized", None, "dequantized"]
    got = [train(model, x, step=Step(recipe_for(name, override))) for override in sequence]
    info = model.cache_info()
    assert (info.plans, info.hits, info.misses) == (3, 3, 3)
    plans = {override: result.plans[0] for override, result in zip(sequence, got)}
    assert len({id(plan) for plan in plans.values()}) == 3
    for override, result in zip(sequence, got):
        assert result.plans == [plans[override]]
        assert plans[override].key.env.recipe.backward_override == override
        fresh = run(linear("2d")[0], x, step=Step(recipe_for(name, override)))
        assert same(result.tensors["grad of input"], fresh.tensors["grad of input"])
    assert not same(got[0].tensors["grad of input"], got[2].tensors["grad of input"])


@pytest.mark.few
@pytest.mark.row("B23", "B30")
@pytest.mark.parametrize("name", HAS_OVERRIDE)
@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("composed", ["mlp", "swiglu mlp"])
def test_b23_b30_a_fused_block_equals_its_modules_called_one_by_one(composed, override, name):
    made = COMPOSED[composed]()
    model, tensors = made.model(), made.tensors()
    together = run(model, *tensors, step=Step(recipe_for(name, override)))
    apart = run(torch.nn.Sequential(*model), *tensors, step=Step(recipe_for(name, override)))
    assert differences(results(together.tensors), results(apart.tensors)) == []
    assert len(together.plans) == 1
    assert len(apart.plans) == len(model)


@pytest.mark.row("B27")
@pytest.mark.parametrize(("name", "k", "multiple"), [("mxfp8", 48, 32), ("nvfp4", 40, 16)])
@pytest.mark.parametrize("override", OVERRIDES)
def test_b27_errors_name_shape_format_and_multiple(name, k, multiple, override):
    model = to(ops.Sequential(ops.Linear(k, 64)), BF16)
    with opfuse.autocast(recipe=recipe_for(name, override)), pytest.raises(ShapeError) as caught:
        model(randn(32, k))
    for text in (f"(32, {k})", f"divisible by {multiple}", name, "rowwise", "torch.nn.functional.pad(x, (0, "):
        assert text in str(caught.value)


@pytest.mark.row("B28")
@pytest.mark.parametrize(("name", "rows"), [("mxfp8", 33), ("nvfp4", 33)])
def test_b28_ragged_rows_need_a_columnwise_plane_only_without_an_override(name, rows):
    model, x = to(ops.Sequential(ops.Linear(64, 64)), BF16), randn(rows, 64)
    with opfuse.autocast(recipe=recipe_for(name)), pytest.raises(ShapeError, match="columnwise"):
        model(x)
    for override in ACTIVE:
        run(model, x, step=Step(recipe_for(name, override)))
    with opfuse.autocast(recipe=recipe_for(name)), torch.no_grad():
        assert model(x).shape == (rows, 64)


@pytest.mark.row("B29")
@pytest.mark.parametrize("name", HAS_OVERRIDE)
@pytest.mark.parametrize("override", OVERRIDES)
def test_b29_a_disabled_region_is_plain(override, name):
    model, x = linear("3d")
    want = run(model, x).tensors
    leaf = x.clone().requires_grad_()
    with opfuse.autocast(enabled=False, recipe=recipe_for(name, override)), plans_used() as plans:
        y = model(leaf)
    y.backward(randn(*y.shape, seed=100))
    assert same(plain(y), want["output 0"])
    assert same(leaf.grad, want["grad of input"])
    assert not [node for plan in plans for node in plan.graph.nodes if node.kind == QUANTIZE]


@pytest.mark.few
@pytest.mark.row("B28")
@pytest.mark.parametrize("name", HAS_OVERRIDE)
@pytest.mark.parametrize("override", OVERRIDES)
def test_b28_gradients_accumulate(override, name):
    model, x = linear("2d")
    recipe = recipe_for(name, override, **({"disable_stochastic_rounding": True} if name == "nvfp4" else {}))
    once = train(model, x, step=Step(recipe)).tensors
    train(model, x, step=Step(recipe))
    for parameter, key in ((model[0].weight, "grad of 0.weight"), (model[0].bias, "grad of 0.bias")):
        assert torch.equal(parameter.grad, 2 * run(model, x, step=Step(recipe)).tensors[key])
        assert once[key] is parameter.grad


CACHED = {
    "alone": lambda act: [act(ops.SiLU)],
    "mlp": lambda act: [ops.RMSNorm(64), ops.Linear(64, 128), act(ops.SwiGLU), ops.Linear(64, 64)],
    "chain": lambda act: [ops.Linear(64, 64), ops.ConstantScale(0.5), act(ops.GELU), ops.Bias(64), act(ops.ClampedSwiGLU)],
}


@pytest.mark.few
@pytest.mark.row("B11")
@pytest.mark.parametrize("rules", [None, opfuse.RuleSet(())], ids=["fused", "unfused"])
@pytest.mark.parametrize("name", HAS_OVERRIDE)
@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("made", CACHED)
def test_b11_under_an_override_an_activation_keeps_the_original_whatever_its_option(made, override, name, rules):
    """Else its gradient were neither that of the original tensor nor that of what the forward pass read."""

    def step(cached):
        torch.manual_seed(0)
        model = to(ops.Sequential(*CACHED[made](lambda cls: cls(cache_quantized_input=cached))), BF16)
        return run(model, randn(32, 64), step=Step(recipe_for(name, override), rules=rules)).tensors

    changed = differences(step(True), step(False))
    if override is None:
        assert "grad of input" in changed
        assert "output 0" not in changed
    else:
        assert changed == []
