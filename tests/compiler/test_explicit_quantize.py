"""An explicit Quantize beside a matrix product: one cast, by the quantizer of the Quantize, with what the product reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.errors import DtypeError, GemmError
from opfuse.recipes import CustomRecipe, DelayedScalingRequest, MXFP8BlockScaling, NVFP4BlockScaling, QuantizerRole
from opfuse.tensors.gemm import gemm
from opfuse.tensors.quantizers import Float8CurrentScalingQuantizer, IdentityQuantizer, MXFP8Quantizer
from tests.compiler.harness import HAS_OVERRIDE, Step, delayed_state, randn, recipe_for, run, same, to
from tests.plans import plans_used

E5M2 = torch.float8_e5m2
ROWS, K, N = 128, 128, 64


def by_module(quantize: object, linear: object = None) -> CustomRecipe:
    """A recipe that answers an explicit Quantize and a linear in different ways; MXFP8 unless said otherwise."""
    answers: dict[str, Callable[[], object]] = {"quantize": lambda: quantize, "linear": lambda: linear or MXFP8Quantizer()}
    return CustomRecipe(qfactory=lambda role: answers[role.module_type]())


def layer(*before: torch.nn.Module, after: tuple[torch.nn.Module, ...] = ()) -> ops.Sequential:
    torch.manual_seed(0)
    return to(ops.Sequential(*before, ops.Linear(K, N, bias=False), *after), torch.bfloat16)


def casts(model: ops.Sequential, recipe: opfuse.recipes.Recipe) -> list[str]:
    """Classes and roles of the quantizers of the plan of ``model``, in order."""
    with opfuse.autocast(recipe=recipe), plans_used() as plans:
        model(randn(ROWS, K).requires_grad_())
    nodes = [node for node in plans[0].graph.nodes if node.is_cast]
    return [f"{type(node.spec.quantizer).__name__} {node.spec.role}" for node in nodes]


BEFORE: dict[str, Callable[[], list[torch.nn.Module]]] = {
    "directly": lambda: [ops.Quantize()],
    "through an identity": lambda: [ops.Quantize(), ops.Identity()],
    "past a second output": lambda: [ops.Quantize(), ops.MakeExtraOutput()],
    "twice": lambda: [ops.Quantize(), ops.Quantize()],
}


@pytest.mark.row("B05", "B10")
@pytest.mark.parametrize("name", HAS_OVERRIDE)
@pytest.mark.parametrize("before", BEFORE)
def test_b05_high_precision_reads_the_original_behind_an_explicit_quantize(before, name):
    x, step = randn(ROWS, K), Step(recipe_for(name, "high_precision"))
    got, wanted = run(layer(*BEFORE[before]()), x, step=step).tensors, run(layer(), x, step=step).tensors
    weight = next(key for key in got if key.startswith("grad of") and "weight" in key)
    assert same(got["output 0"], wanted["output 0"])
    assert same(got[weight], wanted["grad of 0.weight"])


@pytest.mark.row("B05", "B25")
@pytest.mark.parametrize("override", [None, "dequantized", "high_precision"])
@pytest.mark.parametrize("name", HAS_OVERRIDE)
def test_b05_b25_groups_are_cast_once_behind_an_explicit_quantize(name, override):
    x, splits, recipe = randn(ROWS, K), torch.tensor([ROWS // 2] * 2), recipe_for(name, override)
    torch.manual_seed(0)
    experts = ops.GroupedLinear(2, K, N, bias=False, dtype=torch.bfloat16)
    results = []
    for modules in ((experts,), (ops.Quantize(), experts)):
        torch.manual_seed(1)
        experts.zero_grad()
        with opfuse.autocast(recipe=recipe):
            y = ops.Sequential(*modules)(x, splits)
        y.backward(randn(*y.shape, seed=100))
        results.append((y.detach(), experts.weight0.grad, experts.weight1.grad))
    assert all(same(one, other) for one, other in zip(*results))


@pytest.mark.row("B25")
def test_b25_a_quantize_before_groups_casts_the_gradient_that_leaves_them():
    """It leaves them the cast of the input alone."""
    splits, found = torch.tensor([ROWS // 2] * 2), []
    torch.manual_seed(0)
    experts = ops.GroupedLinear(2, K, N, bias=False, dtype=torch.bfloat16)
    for modules in ((experts,), (ops.Quantize(backward=True), experts)):
        x = randn(ROWS, K).requires_grad_()
        with opfuse.autocast(recipe=MXFP8BlockScaling()):
            y = ops.Sequential(*modules)(x, splits)
        y.backward(randn(*y.shape, seed=100))
        found.append(x.grad)
    assert same(found[1], MXFP8Quantizer().quantize(found[0]).dequantize())
    assert not same(found[1], found[0])


@pytest.mark.row("B16")
def test_b16_the_quantize_says_in_which_format_a_product_reads_its_input():
    x, recipe = randn(ROWS, K), by_module(MXFP8Quantizer(fp8_dtype=E5M2))
    model = layer(ops.Quantize())
    assert casts(model, recipe)[0] == "MXFP8Quantizer input"
    weight = MXFP8Quantizer().quantize(model[1].weight.detach())
    wanted = gemm("fprop", MXFP8Quantizer(fp8_dtype=E5M2).quantize(x), weight, dtype=torch.bfloat16)
    assert same(run(model, x, step=Step(recipe)).tensors["output 0"], wanted)


@pytest.mark.row("B16")
def test_b16_the_quantize_says_in_which_format_a_product_reads_its_gradient():
    x, e5m2 = randn(ROWS, K), MXFP8Quantizer(fp8_dtype=E5M2)
    model = layer(after=(ops.Identity(), ops.Quantize(forward=False, backward=True)))
    got = run(model, x, step=Step(by_module(e5m2))).tensors["grad of input"]
    dy, weight = e5m2.quantize(randn(ROWS, N, seed=100)), MXFP8Quantizer().quantize(model[0].weight.detach())
    assert same(got, gemm("dgrad", dy, weight, dtype=torch.bfloat16))


@pytest.mark.row("H11")
def test_h11_a_format_that_the_weight_does_not_meet_is_refused_when_the_plan_is_made():
    recipe = by_module(Float8CurrentScalingQuantizer(torch.float8_e4m3fn))
    with pytest.raises(GemmError, match=r"BasicLinear.*fprop"):
        casts(layer(ops.Quantize()), recipe)


@pytest.mark.row("B16")
def test_b16_delayed_scaling_of_the_quantize_keeps_its_state():
    recipe = by_module(DelayedScalingRequest(), Float8CurrentScalingQuantizer(torch.float8_e4m3fn))
    x, model = randn(ROWS, K) * 1000, layer(ops.Quantize())
    results = []
    for _ in range(2):
        with opfuse.autocast(recipe=recipe):  # scales are updated where this ends
            results.append(model(x).detach().float())
    first, second = results
    exact = x.float() @ model[1].weight.detach().float().t()
    assert (first - exact).norm() > 0.5 * exact.norm()  # the scale of 1 saturates
    assert (second - exact).norm() < 0.1 * exact.norm()
    assert {key.rpartition("/")[0] for key in delayed_state(model)} == {"state 0 input"}


@pytest.mark.row("B16")
def test_b16_a_quantize_before_a_product_with_delayed_scaling_keeps_its_own_format():
    recipe = by_module(Float8CurrentScalingQuantizer(torch.float8_e4m3fn), DelayedScalingRequest())
    assert casts(layer(ops.Quantize()), recipe)[0] == "Float8CurrentScalingQuantizer input"


@pytest.mark.row("B16")
def test_b16_a_quantize_that_keeps_high_precision_leaves_the_cast_to_the_product():
    x, recipe = randn(ROWS, K), by_module(IdentityQuantizer())
    model = layer(ops.Quantize(True, True), after=(ops.Quantize(True, True),))
    got, wanted = (run(each, x, step=Step(recipe)).tensors for each in (model, layer()))
    assert same(got["output 0"], wanted["output 0"])
    assert same(got["grad of input"], wanted["grad of input"])
    assert same(got["grad of 1.weight"], wanted["grad of 0.weight"])


def test_a_second_output_between_a_quantize_and_groups_has_the_values_of_the_quantized_data():
    """What a tap gives depends on no op after it."""
    x, recipe, splits = randn(ROWS, K), MXFP8BlockScaling(), torch.tensor([ROWS // 2] * 2)
    grouped = ops.GroupedLinear(2, K, N, dtype=torch.bfloat16)
    with opfuse.autocast(recipe=recipe):
        _, tapped = ops.Sequential(ops.Quantize(), ops.MakeExtraOutput(), grouped)(x, splits)
        _, alone = ops.Sequential(ops.Quantize(), ops.MakeExtraOutput())(x)
    assert same(tapped.detach(), alone.detach())
    assert not same(tapped.detach(), x)


def test_a_second_output_behind_a_quantize_has_the_values_of_the_quantized_data():
    x, recipe = randn(ROWS, K), MXFP8BlockScaling()
    got = run(layer(ops.Quantize(), ops.MakeExtraOutput()), x, step=Step(recipe)).tensors
    quantizer = recipe.quantizer(QuantizerRole(tensor_type="input")).wanting(rowwise=True, columnwise=False)
    assert same(got["output 1"], quantizer.quantize(x).dequantize(x.dtype))


@pytest.mark.row("B27")
@pytest.mark.parametrize("grouped", [False, True], ids=["linear", "grouped linear"])
def test_b27_a_dtype_that_a_format_does_not_take_is_refused_with_the_op_and_the_operand(grouped):
    op = ops.GroupedLinear(2, K, N) if grouped else ops.Linear(K, N)
    extras = (torch.tensor([64, 64]),) if grouped else ()
    told = r"Linear\(.*\) input.*wants torch.bfloat16, got torch.float32"
    with pytest.raises(DtypeError, match=told), opfuse.autocast(recipe=NVFP4BlockScaling()):
        op(torch.randn(ROWS, K), *extras)


@pytest.mark.row("B27")
@pytest.mark.parametrize("grouped", [False, True], ids=["linear", "grouped linear"])
def test_b27_a_dtype_that_is_not_the_inputs_is_told_by_its_source_and_its_cures_work(grouped):
    op = ops.GroupedLinear(2, K, N) if grouped else ops.Linear(K, N)
    x, extras = randn(ROWS, K), (torch.tensor([64, 64]),) if grouped else ()
    told = (
        r"torch.float32, the dtype of the op's parameters.*Cure: call model.to\(torch.bfloat16\), or .*autocast.*disable_rht=True"
    )
    with pytest.raises(DtypeError, match=told), opfuse.autocast(recipe=NVFP4BlockScaling()):
        op(x, *extras)
    low = torch.autocast(x.device.type, torch.float16)
    told = r"torch.float16, the dtype of torch.autocast.*Cure: use torch.autocast with dtype=torch.bfloat16, or"
    with low, pytest.raises(DtypeError, match=told), opfuse.autocast(recipe=NVFP4BlockScaling()):
        op(x, *extras)
    with torch.autocast(x.device.type, torch.bfloat16), opfuse.autocast(recipe=NVFP4BlockScaling()):
        op(x, *extras)
    with opfuse.autocast(recipe=NVFP4BlockScaling(disable_rht=True)):
        op(x, *extras)
    with opfuse.autocast(recipe=NVFP4BlockScaling()):
        op.to(torch.bfloat16)(x, *extras)


@pytest.mark.row("B27")
def test_b27_a_dtype_of_the_input_is_cured_by_casting_it():
    told = r"got torch.float64. Cure: cast the input to torch.float32"
    with pytest.raises(DtypeError, match=told), opfuse.autocast(recipe=MXFP8BlockScaling()):
        ops.Sequential(ops.Quantize())(torch.randn(ROWS, K, dtype=torch.float64))
