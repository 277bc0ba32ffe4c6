"""Hybrid quantization in training: a format for each direction of each operand, and so for each product of a linear."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.errors import GemmError, QuantizerError, RecipeError
from opfuse.formats import USAGES
from opfuse.recipes import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    QuantizerRole,
    Recipe,
)
from opfuse.tensors.gemm import GEMMS, gemm
from opfuse.tensors.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from tests.compiler.harness import Step, delayed_state, differences, randn, recipe_for, run, same, to, train
from tests.compiler.pipelines import COMPOSED
from tests.plans import plans_used
from tests.turns import in_turn

BF16 = torch.bfloat16
FORMATS: dict[str, Callable[[], Quantizer]] = {
    "fp8": lambda: Float8CurrentScalingQuantizer(torch.float8_e4m3fn),
    "block": lambda: Float8BlockQuantizer(torch.float8_e4m3fn, block_scaling_dim=1),
    "mxfp8": MXFP8Quantizer,
    "nvfp4": NVFP4Quantizer,
    "high precision": IdentityQuantizer,
}


def by_product(fprop: str, dgrad: str, wgrad: str, **fields: object) -> CustomRecipe:
    """A recipe of one format for each product. An operand whose two planes agree gets a plain quantizer."""
    planes = {"input": (fprop, wgrad), "weight": (fprop, dgrad), "grad_output": (dgrad, wgrad)}

    def qfactory(role: QuantizerRole) -> Quantizer:
        row, column = planes[role.tensor_type]
        return FORMATS[row]() if row == column else HybridQuantizer(FORMATS[row](), FORMATS[column]())

    return CustomRecipe(qfactory=qfactory, **fields)


def linear(bias: bool = True) -> tuple[ops.Sequential, torch.Tensor, torch.Tensor]:
    """A linear, an input and the gradient that the harness gives its output."""
    torch.manual_seed(0)
    return to(ops.Sequential(ops.Linear(64, 96, bias=bias)), BF16), randn(32, 64), randn(32, 96, seed=100)


def product(name: str, fmt: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """One product of operands that are cast for it alone, by plain quantizers."""
    what = GEMMS[name]
    operands = [
        FORMATS[fmt]().wanting(rowwise=plane == "rowwise", columnwise=plane == "columnwise").quantize(tensors[role])
        for role, plane in ((what.left, what.left_plane), (what.right, what.right_plane))
    ]
    made = gemm(name, *operands, dtype=BF16)
    exact = {"fprop": lambda a, b: a @ b.t(), "dgrad": lambda a, b: a @ b, "wgrad": lambda a, b: a.t() @ b}[name]
    reference = exact(*(operand.dequantize(torch.float64) for operand in operands))
    assert (made - reference).norm() <= 2**-7 * reference.norm()
    return made


# -- formats by product ----------------------------------------------------------------------------------------------------


@pytest.mark.few(2, apart=True)
@pytest.mark.row("H01", "H13", "H14")
@pytest.mark.parametrize(("fprop", "dgrad", "wgrad"), list(itertools.product(FORMATS, repeat=3)))
def test_h01_h13_h14_each_product_has_its_format(fprop, dgrad, wgrad):
    """All mixtures of up to three formats, either way round, hybrid operands beside plain ones; ``fp8 mxfp8 nvfp4`` is one."""
    model, x, dy = linear()
    recipe = by_product(fprop, dgrad, wgrad)
    got = run(model, x, step=Step(recipe)).tensors
    tensors = {"input": x, "weight": model[0].weight.detach(), "grad_output": dy}
    assert same(got["output 0"], product("fprop", fprop, tensors) + model[0].bias.detach())
    assert same(got["grad of input"], product("dgrad", dgrad, tensors))
    assert same(got["grad of 0.weight"], product("wgrad", wgrad, tensors))
    assert same(got["grad of 0.bias"], dy.float().sum(0).to(BF16))


PLAIN = {
    "fp8_current": {},
    "fp8_block": {},
    "mxfp8": {},
    "mxfp8 in tiles": {"enable_2d_quantization": True},
    "nvfp4": {"disable_stochastic_rounding": True},
    "nvfp4 unrotated": {"disable_stochastic_rounding": True, "disable_rht": True},
}


def plain_recipe(name: str) -> Recipe:
    return recipe_for(name.partition(" ")[0], **PLAIN[name])


def hybrid_of(recipe: Recipe) -> CustomRecipe:
    """The same formats, direction by direction."""
    return CustomRecipe(qfactory=lambda role: HybridQuantizer(recipe.quantizer(role), recipe.quantizer(role).copy()))


@pytest.mark.few
@pytest.mark.row("H12")
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("composed", COMPOSED)
def test_h12_a_hybrid_of_equal_formats_is_the_plain_recipe(composed, name):
    """Bit for bit: outputs, gradients, and what is saved. Random rounding, which draws once a cast, is off."""
    made, recipe = COMPOSED[composed](), plain_recipe(name)
    model, tensors = made.model(), made.tensors()
    got, want = (run(model, *tensors, step=Step(r)).tensors for r in (hybrid_of(recipe), recipe))
    assert differences(got, want) == []


@pytest.mark.row("H16")
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("fprop", "dgrad", "wgrad"), [("fp8", "mxfp8", "nvfp4"), ("nvfp4", "block", "high precision")])
@pytest.mark.filterwarnings("ignore:a step on weights")
def test_h16_a_stored_hybrid_weight_computes_what_casting_on_the_fly_does(fprop, dgrad, wgrad, bias):
    recipe, x = by_product(fprop, dgrad, wgrad), randn(32, 64)
    torch.manual_seed(0)
    fly = ops.Sequential(ops.Linear(64, 96, bias=bias, dtype=BF16))
    torch.manual_seed(0)
    with opfuse.quantized_model_init(recipe=recipe):
        stored = ops.Sequential(ops.Linear(64, 96, bias=bias, dtype=BF16))
    weight = stored[0].weight
    assert [str(weight.plane(usage).format) for usage in USAGES] == [str(FORMATS[f]().formats[0]) for f in (fprop, dgrad)]
    got, want = (run(model, x, step=Step(recipe)).tensors for model in (stored, fly))
    assert [key for key in want if not key.startswith("saved") and not same(got[key], want[key])] == []
    optimizer = torch.optim.SGD(stored.parameters(), lr=0.5)
    train(stored, x, step=Step(recipe))
    target = weight.detach().dequantize() - 0.5 * weight.grad
    optimizer.step()
    for usage, fmt in zip(USAGES, (fprop, dgrad)):
        assert same(weight.detach().dequantize(usage=usage), FORMATS[fmt]().quantize(target).dequantize(usage=usage))


# -- formats that do not meet ----------------------------------------------------------------------------------------------

CLASHES = {
    "fprop": ({"input": "mxfp8"}, "input and weight", "input rowwise mxfp8_e4m3, weight rowwise fp8_tensor_e4m3"),
    "dgrad": ({"weight": "nvfp4"}, "grad_output and weight", "grad_output rowwise fp8_tensor_e4m3, weight columnwise nvfp4"),
    "wgrad": (
        {"grad_output": "mxfp8"},
        "grad_output and input",
        "grad_output columnwise mxfp8_e4m3, input columnwise fp8_tensor",
    ),
}
"""For each product: a role whose plane in it has another format than the rest, the pair of roles, and how both are named."""


def clashing(name: str, **fields: object) -> CustomRecipe:
    """Per-tensor FP8 throughout but for one plane, so that exactly one product cannot be made."""
    odd, what = CLASHES[name][0], GEMMS[name]

    def qfactory(role: QuantizerRole) -> Quantizer:
        if role.tensor_type not in odd:
            return FORMATS["fp8"]()
        plane = what.left_plane if role.tensor_type == what.left else what.right_plane
        formats = [odd[role.tensor_type] if usage == plane else "fp8" for usage in USAGES]
        return HybridQuantizer(*(FORMATS[fmt]() for fmt in formats))

    return CustomRecipe(qfactory=qfactory, **fields)


@pytest.mark.row("H11")
@pytest.mark.parametrize("name", GEMMS)
def test_h11_formats_that_do_not_meet_are_refused_before_anything_is_cast(name, monkeypatch):
    model, x, _ = linear()
    monkeypatch.setattr(Quantizer, "quantize", lambda *_: pytest.fail("cast before the check"))
    with opfuse.autocast(recipe=clashing(name)), pytest.raises(GemmError) as caught:
        model(x.requires_grad_())
    _, pair, planes = CLASHES[name]
    for text in ("Linear(", f"{name} of {pair}", planes, "allow_mixed_emulation=True", "IdentityQuantizer"):
        assert text in str(caught.value)
    assert model.cache_info().plans == 0


@pytest.mark.row("H11")
@pytest.mark.parametrize("name", GEMMS)
def test_h11_only_products_of_the_call_count(name):
    """Inference makes one product, and an override computes the other two in high precision."""
    model, x, _ = linear()
    for recipe, grad in ((clashing(name), False), (clashing(name, backward_override="dequantized"), True)):
        with torch.set_grad_enabled(grad), opfuse.autocast(recipe=recipe):
            if name == "fprop":
                with pytest.raises(GemmError):
                    model(x)
            else:
                assert model(x).isfinite().all()
    model[0].weight.requires_grad_(False)
    with opfuse.autocast(recipe=clashing("wgrad")):
        model(x.clone().requires_grad_()).sum().backward()


@pytest.mark.row("H11")
@pytest.mark.parametrize("name", GEMMS)
def test_h11_mixed_formats_are_emulated_on_request_and_reported(name):
    model, x, dy = linear(bias=False)
    recipe = clashing(name, allow_mixed_emulation=True)
    got = run(model, x, step=Step(recipe)).tensors
    tensors = {"input": x, "weight": model[0].weight.detach(), "grad_output": dy}
    outputs = {"fprop": "output 0", "dgrad": "grad of input", "wgrad": "grad of 0.weight"}
    for each, key in outputs.items():
        if each != name:
            assert same(got[key], product(each, "fp8", tensors))
    what = GEMMS[name]
    sides = ((what.left, what.left_plane), (what.right, what.right_plane))
    left, right = (
        recipe.quantizer(QuantizerRole(tensor_type=r)).quantize(tensors[r]).dequantize(torch.float32, p) for r, p in sides
    )
    exact = {"fprop": lambda: left @ right.t(), "dgrad": lambda: left @ right, "wgrad": lambda: left.t() @ right}[name]()
    assert same(got[outputs[name]], exact.to(BF16))
    with opfuse.autocast(recipe=recipe):
        told = opfuse.explain(model, x.requires_grad_())
    assert told.backend == "emulated"
    (pipeline,) = told.to_dict()["pipelines"]
    (mixed,) = (each for each in pipeline["products"] if CLASHES[name][1] in each["reason"])
    assert (mixed["product"], mixed["status"]) == (name, "emulated")
    assert f"    {mixed['op']} {name}: emulated, {mixed['reason']}" in told.details().splitlines()


@pytest.mark.row("H10")
def test_h10_a_product_emits_neither_hybrid_nor_identity_data():
    class Emitter(ops.BasicOperation):
        def num_quantizers(self, mode):
            return {"forward": 3, "backward": 2}[mode]

        def op_forward(self, ctx, input_, **kwargs):
            return self.get_quantizer("forward", 2).quantize(input_).dequantize()

    def recipe(made: Quantizer) -> CustomRecipe:
        return CustomRecipe(qfactory=lambda role: made)

    for refused in (HybridQuantizer(MXFP8Quantizer(), NVFP4Quantizer()), IdentityQuantizer()):
        for mode, index, text in (("forward", 2, "Emitter() output"), ("backward", 1, "Emitter() grad_input")):
            with opfuse.autocast(recipe=recipe(refused)), pytest.raises(QuantizerError) as caught:
                Emitter().get_quantizer(mode, index)
            assert text in str(caught.value)
            assert type(refused).__name__ in str(caught.value)
        with opfuse.autocast(recipe=recipe(refused)):
            assert Emitter().get_quantizer("forward", 0) == refused
    with torch.no_grad(), opfuse.autocast(recipe=recipe(MXFP8Quantizer())):
        assert same(Emitter()(randn(32, 32)), MXFP8Quantizer().quantize(randn(32, 32)).dequantize())


# -- over time -------------------------------------------------------------------------------------------------------------


@pytest.mark.row("H34")
@pytest.mark.parametrize(("fprop", "dgrad", "wgrad"), [("fp8", "mxfp8", "nvfp4"), ("mxfp8", "mxfp8", "mxfp8")])
def test_h34_what_inference_cast_is_not_what_training_reads(fprop, dgrad, wgrad):
    """A rowwise cast of inference does not stand in for both planes, nor a cast of one recipe for that of another."""
    recipe = by_product(fprop, dgrad, wgrad)
    model, x, _ = linear()
    with torch.no_grad(), opfuse.autocast(recipe=recipe), plans_used() as plans:
        model(x)
    first = train(model, x, step=Step(recipe))
    usages = [
        [node.spec.quantizer.usages for node in plan.graph.nodes if node.name.endswith("[weight]")]
        for plan in (*plans, *first.plans)
    ]
    assert usages == [[("rowwise",)], [USAGES]]
    model.zero_grad()
    other = train(model, x, step=Step(MXFP8BlockScaling(scale_rule="ocp_floor"))).tensors
    model.zero_grad()
    again = train(model, x, step=Step(recipe)).tensors
    fresh = run(linear()[0], x, step=Step(recipe)).tensors
    assert differences(again, fresh) == []
    assert not same(other["output 0"], fresh["output 0"])
    assert model.cache_info().plans == 3


@pytest.mark.filterwarnings("ignore:a step on weights")
@pytest.mark.row("H31")
@pytest.mark.parametrize(("name", "stored"), in_turn(PLAIN, (False, True), of=2))
def test_h31_training_follows_the_plain_recipe(name, stored):
    """Ten steps of Adam: every loss of the hybrid is that of the plain recipe, and weights in bf16 lower it each time."""
    histories = []
    for recipe in (plain_recipe(name), hybrid_of(plain_recipe(name))):
        torch.manual_seed(0)
        with opfuse.quantized_model_init(enabled=stored, recipe=recipe):
            model = ops.Sequential(ops.Linear(64, 128, dtype=BF16), ops.GELU(), ops.Linear(128, 64, dtype=BF16))
        optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
        x, losses = randn(64, 64), []
        for _ in range(10):
            with opfuse.autocast(recipe=recipe):
                loss = (model(x) - x).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        histories.append(losses)
    plain, hybrid = histories
    assert hybrid == plain
    if not stored:  # a weight that lives quantized, without a master copy, loses small steps
        assert plain[-1] < 0.8 * plain[0]
        assert all(later < earlier for earlier, later in itertools.pairwise(plain))


def delayed_everywhere(role: QuantizerRole) -> DelayedScalingRequest:
    return DelayedScalingRequest(amax_history_len=4, amax_compute_algo="most_recent")


@pytest.mark.row("H32")
def test_h32_a_request_for_delayed_scaling_is_the_delayed_recipe():
    """Outputs, gradients, scales and histories of three steps."""
    made = COMPOSED["mlp"]()
    model, tensors = made.model(), made.tensors()
    recipes = CustomRecipe(qfactory=delayed_everywhere), DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent")
    got, want = (run(model, *tensors, step=Step(recipe, steps=3)).tensors for recipe in recipes)
    assert differences(got, want) == []
    assert len([key for key in got if key.startswith("state ")]) == 6 * len(("scale", "amax_history", "made_for"))
    assert [key for key in got if key.endswith("/scale") and (got[key] == 1).any()] == []


@pytest.mark.row("H32")
def test_h32_delayed_scaling_for_some_roles_and_hybrids_for_others():
    """Per-tensor FP8 throughout: activations by their history, weights and gradients by a hybrid of current scaling."""

    def qfactory(role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        return DelayedScalingRequest(amax_history_len=4) if role.tensor_type == "input" else current(role)

    def current(role: QuantizerRole) -> Quantizer:
        return HybridQuantizer(FORMATS["fp8"](), FORMATS["fp8"]())

    model, x, _ = linear()
    train(model, x, step=Step(CustomRecipe(qfactory=qfactory)))
    states = delayed_state(model)
    assert {key.partition("/")[0] for key in states} == {"state 0 input"}
    assert states["state 0 input/scale"].item() == (torch.full((), 448.0) / x.float().abs().max()).item()
    model.zero_grad()
    got = train(model, x, step=Step(CustomRecipe(qfactory=qfactory))).tensors
    want = run(linear()[0], x, step=Step(CustomRecipe(qfactory=current))).tensors  # the same tensor once more: the same scale
    names = [key for key in want if key.startswith(("grad", "output"))]
    assert [key for key in names if not same(got[key], want[key])] == []


@pytest.mark.row("H05", "H32")
def test_h05_h32_delayed_scaling_is_refused_inside_a_hybrid_and_under_an_override():
    with pytest.raises(
        TypeError, match=r"rowwise_quantizer: wants a Quantizer, got DelayedScalingRequest\. Cure: return the request"
    ):
        HybridQuantizer(DelayedScalingRequest(), MXFP8Quantizer())
    model, x, _ = linear()
    for override in ("dequantized", "high_precision"):
        recipe = CustomRecipe(qfactory=delayed_everywhere, backward_override=override)
        with (
            opfuse.autocast(recipe=recipe),
            pytest.raises(RecipeError, match=rf"without state under backward_override='{override}'"),
        ):
            model(x)


@pytest.mark.row("H32")
def test_h32_another_recipe_in_mid_training():
    """Each step is that of a model which only ever saw its recipe; no plan is made twice."""
    sequence = [
        by_product("fp8", "mxfp8", "nvfp4"),
        MXFP8BlockScaling(),
        by_product("nvfp4", "nvfp4", "nvfp4"),
        Float8CurrentScaling(),
    ]
    model, x, _ = linear()
    for recipe in sequence * 2:
        model.zero_grad()
        assert differences(train(model, x, step=Step(recipe)).tensors, run(linear()[0], x, step=Step(recipe)).tensors) == []
    assert model.cache_info().plans == len(sequence)
