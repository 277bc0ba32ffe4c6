"""Quantized parameters: the planes they have and keep in training and inference, and what other recipes make of them."""

from __future__ import annotations

import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.compiler.plan import Plan
from opfuse.errors import GemmError, MissingPlaneError, RecipeError
from opfuse.formats import COLUMNWISE, ROWWISE, USAGES
from opfuse.recipes import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRole,
    Recipe,
)
from opfuse.tensors import QuantizedTensor
from opfuse.tensors.gemm import clash
from opfuse.tensors.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8RowQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from tests.compiler.harness import CASES, HAS_OVERRIDE, Step, bits, differences, plain, randn, recipe_for, run, same, to, train
from tests.plans import plans_used
from tests.turns import in_turn

BF16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn
QUANTIZED = [(name, override) for name, override in CASES if name != "none"]
DERIVES = ("fp8_current", "delayed", "fp8_block")
"""Recipes whose weights have one scale, or one for each square block: columnwise bytes are the rowwise ones, transposed."""

BOTH = {
    "fp8_current": Float8CurrentScalingQuantizer(E4M3),
    "delayed": Float8CurrentScalingQuantizer(E4M3),
    "fp8_row": Float8RowQuantizer(E4M3),
    "fp8_block": Float8BlockQuantizer(E4M3),
    "mxfp8": MXFP8Quantizer(),
    "nvfp4": NVFP4Quantizer(with_2d_quantization=True),
}
"""What each recipe casts a stored weight with, in both directions; delayed scaling, too, with the scale of what is written."""


def mlp(recipe: Recipe | None = None, *, bias: bool = True) -> ops.Sequential:
    """Two linears and an activation, with weights that live quantized under ``recipe``."""
    torch.manual_seed(0)
    with opfuse.quantized_model_init(enabled=recipe is not None, recipe=recipe):
        layers = (ops.Linear(64, 96, bias=bias, dtype=BF16), ops.GELU(), ops.Linear(96, 64, bias=bias, dtype=BF16))
    return ops.Sequential(*layers)


def linear(weight: torch.Tensor) -> ops.Sequential:
    """One linear with this weight, which may be quantized."""
    model = ops.Sequential(ops.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=BF16))
    model[0].weight = torch.nn.Parameter(weight)
    return model


def stored(recipe: Recipe) -> ops.Sequential:
    """One linear whose weight was made quantized under ``recipe``."""
    torch.manual_seed(0)
    with opfuse.quantized_model_init(recipe=recipe):
        return ops.Sequential(ops.Linear(64, 96, bias=False, dtype=BF16))


def weight_planes(model: torch.nn.Module) -> list[torch.Tensor]:
    """Copies of the bytes of all quantized parameters."""
    quantized = [p for p in model.parameters() if isinstance(p, QuantizedTensor)]
    return [t.detach().clone() for p in quantized for t in p.record.tensors()]


def infer(model: torch.nn.Module, x: torch.Tensor, recipe: Recipe | None) -> torch.Tensor:
    with torch.no_grad(), opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        return model(x)


# -- alternating -----------------------------------------------------------------------------------------------------------


ALTERNATING = ("train infer train infer", "infer train infer train")


@pytest.mark.few(apart=True)
@pytest.mark.row("U01", "U13")
@pytest.mark.parametrize(
    ("name", "override", "stages", "stored", "bias"), in_turn(CASES, ALTERNATING, (True, False), (True, False), of=4)
)
def test_u01_u13_training_and_inference_alternate(name, override, stages, stored, bias):
    """The gradients of a training step are those of a model that never saw an inference."""
    recipe, x = recipe_for(name, override), randn(32, 64)
    model, alone = (mlp(recipe if stored else None, bias=bias) for _ in range(2))
    before = weight_planes(model)
    for step, stage in enumerate(stages.split()):
        if stage == "infer":
            assert infer(model, x, recipe).isfinite().all()
            continue
        got, want = (train(m, x, step=Step(recipe, seed=step)).tensors for m in (model, alone))
        assert differences(got, want) == []
        assert [key for key, value in got.items() if key.startswith("grad") and (value is None or not value.any())] == []
        for m in (model, alone):
            m.zero_grad()
    assert all(map(same, before, weight_planes(model)))
    for parameter in (model[0].weight, model[2].weight):
        assert isinstance(parameter, QuantizedTensor) is (stored and recipe is not None)
        if isinstance(parameter, QuantizedTensor):
            assert parameter.usages == parameter.quantizer.usages == USAGES


@pytest.mark.few(apart=True)
@pytest.mark.row("U01")
@pytest.mark.parametrize(("name", "override"), in_turn(QUANTIZED, of=2))
@pytest.mark.filterwarnings("ignore:a step on weights")
def test_u01_validation_between_steps_changes_no_training(name, override):
    """Validation sees other data than training, of another size."""
    recipe, x = recipe_for(name, override), randn(32, 64)
    losses = []
    for validates in (True, False):
        model = mlp(recipe)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(3):
            if validates:
                model.eval()
                infer(model, 8 * x, recipe)
                model.train()
            torch.manual_seed(step)
            with opfuse.autocast(recipe=recipe):
                loss = (model(x) - x).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if validates:
            assert model.cache_info().plans == 2
    assert losses[:3] == losses[3:]


# -- planes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.row("U03")
@pytest.mark.parametrize("name", BOTH)
def test_u03_a_frozen_weight_has_the_planes_it_was_made_with(name):
    recipe, x = recipe_for(name), randn(32, 64)
    made = mlp(recipe)
    made.requires_grad_(False)
    infer(made, x, recipe)
    assert made[0].weight.usages == USAGES

    rowwise = BOTH[name].wanting(columnwise=False)
    model = linear(rowwise(randn(96, 64, seed=1)))
    model.requires_grad_(False)
    infer(model, x, recipe)
    train(model, x, step=Step(recipe, input_grad=False))
    assert model[0].weight.usages == (ROWWISE,)


@pytest.mark.row("U03", "U09")
@pytest.mark.parametrize("name", BOTH)
def test_u03_u09_data_is_asked_for_and_not_the_flags_of_a_quantizer(name):
    """A product reads the columnwise plane if the input wants a gradient: it is there, or derived, or refused before any cast."""
    recipe, x, values = recipe_for(name), randn(32, 64), randn(96, 64, seed=1)
    whole = BOTH[name](values)
    half = QuantizedTensor(whole.record.only(ROWWISE, why="nobody wanted it"), quantizer=BOTH[name])
    assert half.quantizer.usages == USAGES
    model = linear(half)
    for kind in ("frozen", "trained"):
        model[0].weight.requires_grad_(kind == "trained")
        if name in DERIVES:
            got, want = (run(m, x, step=Step(recipe)).tensors for m in (model, linear(whole)))
            assert same(got["grad of input"], want["grad of input"])
            continue
        with opfuse.autocast(recipe=recipe), pytest.raises(MissingPlaneError) as caught:
            model(x.clone().requires_grad_())
        for text in ("Linear(", "weight", "columnwise", "nobody wanted it", "backward_override"):
            assert text in str(caught.value)
    model[0].weight.requires_grad_(True)
    assert run(model, x, step=Step(recipe, input_grad=False)).tensors["grad of 0.weight"] is not None
    assert model[0].weight.usages == (ROWWISE,)


@pytest.mark.row("U03")
@pytest.mark.parametrize("name", HAS_OVERRIDE)
@pytest.mark.parametrize("override", ["dequantized", "high_precision"])
def test_u03_under_an_override_rowwise_data_is_enough(name, override):
    """And both planes, where a weight has them, stay."""
    recipe, x = recipe_for(name, override), randn(32, 64)
    whole = BOTH[name](randn(96, 64, seed=1))
    results = []
    for weight in (whole.record.only(ROWWISE, why=""), whole.record):
        model = linear(QuantizedTensor(weight, quantizer=BOTH[name]))
        results.append(train(model, x, step=Step(recipe)).tensors)
        assert model[0].weight.usages == weight.usages
        dy = randn(32, 96, seed=100)
        assert same(results[-1]["grad of input"], dy @ model[0].weight.detach().dequantize())
    assert [key for key in results[0] if not key.startswith("saved") and not same(results[0][key], results[1][key])] == []


@pytest.mark.row("U09")
@pytest.mark.parametrize("name", BOTH)
def test_u09_made_under_no_grad_and_trained_later(name):
    recipe, x = recipe_for(name), randn(32, 64)
    with torch.no_grad():
        later = mlp(recipe)
    assert later[0].weight.usages == USAGES
    got, want = (run(model, x, step=Step(recipe)).tensors for model in (later, mlp(recipe)))
    assert differences(got, want) == []


@pytest.mark.row("U02")
@pytest.mark.parametrize("name", BOTH)
def test_u02_another_quantizer_of_the_op_leaves_the_parameter_s_alone(name):
    """The parameter's is complete from the start, and a copy: not the recipe's own object, not the op's next one."""
    recipe = recipe_for(name)
    model = mlp(recipe)
    parameter = model[0].weight
    kept = parameter.quantizer
    op = model[0].basic_ops[0]
    assert kept is not op.stored_quantizer("weight", recipe)
    assert kept == op.stored_quantizer("weight", recipe)
    assert kept.usages == USAGES
    for other in (recipe, Float8CurrentScaling(use_power_2_scales=True)):
        infer(model, randn(32, 64), other.replace(on_recipe_change="dequantize"))
        op.reset_recipe_state(other)
    assert parameter.quantizer is kept
    copied = randn(96, 64, seed=2)
    with torch.no_grad():
        parameter.copy_(copied)
    assert same(plain(parameter), kept.quantize(copied).dequantize())


@pytest.mark.row("U11")
@pytest.mark.parametrize(("name", "override"), QUANTIZED)
def test_u11_quantizers_are_known_before_the_first_call(name, override):
    recipe, model, x = recipe_for(name, override), mlp(), randn(32, 64)
    op = model[0].basic_ops[0]
    with opfuse.autocast(recipe=recipe):
        early = op.get_input_quantizer(), op.get_grad_output_quantizer()
        plans = train(model, x, step=Step(recipe)).plans
        late = op.get_input_quantizer(), op.get_grad_output_quantizer()
    assert [q.formats for q in early] == [q.formats for q in late]
    (cast,) = [node.spec.quantizer for node in plans[0].graph.nodes if node.op == 0 and node.name.endswith("[input]")]
    assert cast.formats[0] == early[0].formats[0]


@pytest.mark.row("U12")
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("write", ["copy_", "optimizer"])
@pytest.mark.filterwarnings("ignore:a step on weights")
def test_u12_a_write_reaches_both_planes_and_the_next_call(name, write):
    recipe, x = recipe_for(name), randn(32, 64)
    if name == "nvfp4":
        recipe = recipe.replace(disable_stochastic_rounding=True)
    model = stored(recipe)
    weight = model[0].weight
    train(model, x, step=Step(recipe))
    if write == "copy_":
        target = randn(96, 64, seed=2)
        with torch.no_grad():
            weight.copy_(target)
    else:
        target = weight.detach().dequantize() - 0.5 * weight.grad
        torch.optim.SGD([weight], lr=0.5).step()
    written = weight.quantizer.quantize(target)
    for usage in USAGES:
        assert same(weight.detach().dequantize(usage=usage), written.dequantize(usage=usage))
    model.zero_grad()
    fresh = stored(recipe)
    fresh[0].basic_ops[0].quantizer_states.load_dict(model[0].basic_ops[0].quantizer_states.to_dict())
    with torch.no_grad():
        fresh[0].weight.copy_(target)
    got, want = (train(m, x, step=Step(recipe)).tensors for m in (model, fresh))
    assert differences(got, want) == []


# -- other recipes ---------------------------------------------------------------------------------------------------------

TYPES = {
    "fp8_current": Float8CurrentScaling,
    "fp8_block": Float8BlockScaling,
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": lambda **fields: NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, **fields),
}
CHANGES = [(old, new) for old in TYPES for new in TYPES if old != new]
WITHIN: dict[str, tuple[Recipe, Recipe]] = {
    "scale rule": (MXFP8BlockScaling(), MXFP8BlockScaling(scale_rule="ocp_floor")),
    "mxfp8 tiles": (MXFP8BlockScaling(), MXFP8BlockScaling(enable_2d_quantization=True)),
    "powers of two": (Float8CurrentScaling(), Float8CurrentScaling(use_power_2_scales=True)),
    "fp32 scales": (Float8BlockScaling(), Float8BlockScaling(use_f32_scales=True)),
    "gradients in E5M2": (Float8CurrentScaling(fp8_format="E4M3"), Float8CurrentScaling()),
    "override": (MXFP8BlockScaling(), MXFP8BlockScaling(backward_override="dequantized")),
    "rotation": (NVFP4BlockScaling(), NVFP4BlockScaling(disable_rht=True)),
    "delayed and current": (Float8CurrentScaling(), DelayedScaling()),
    "history": (DelayedScaling(amax_history_len=16), DelayedScaling(amax_history_len=32)),
}
"""Changes that leave the format of a weight as it is."""


@pytest.mark.row("U05", "U10")
@pytest.mark.parametrize("change", WITHIN)
def test_u05_u10_changes_that_keep_the_format_go_on_with_the_same_bytes(change):
    old, new = WITHIN[change]
    model, x = mlp(old), randn(32, 64)
    train(model, x, step=Step(old))
    before = weight_planes(model)
    for recipe in (new, old, new):
        with plans_used() as plans:
            train(model, x, step=Step(recipe))
        casts = [node.name for plan in plans for node in plan.graph.nodes if node.name.endswith("[weight]")]
        assert casts == []
    assert all(map(same, before, weight_planes(model)))
    if isinstance(new, DelayedScaling):
        states = model[0].basic_ops[0].quantizer_states
        state = states.get(QuantizerRole(tensor_type="input"), length=1, device=None)
        assert len(state.amax_history) == new.amax_history_len
        assert state.scale.item() != 1
        assert not any("weight" in key for key in states.to_dict())


@pytest.mark.row("U06")
@pytest.mark.parametrize(("old", "new"), CHANGES)
@pytest.mark.parametrize("override", [None, "dequantized"])
def test_u06_another_format_is_an_error_that_names_both(old, new, override, monkeypatch):
    model, x = mlp(TYPES[old]()), randn(32, 64)
    before = weight_planes(model)
    monkeypatch.setattr(Quantizer, "quantize", lambda *_: pytest.fail("cast before the check"))
    for grad in (True, False):
        region = opfuse.autocast(recipe=TYPES[new](backward_override=override))
        with torch.set_grad_enabled(grad), region, pytest.raises(RecipeError) as caught:
            model(x)
        stored, wanted = (str(BOTH[name].formats[0].as_stored) for name in (old, new))
        for text in ("Linear(", "weight", type(TYPES[new]()).__name__, stored, wanted, "'dequantize'", "'keep'"):
            assert text in str(caught.value)
    assert model.cache_info().plans == 0
    assert all(map(same, before, weight_planes(model)))


@pytest.mark.few
@pytest.mark.row("U05", "U06")
@pytest.mark.parametrize(("old", "new"), CHANGES)
@pytest.mark.parametrize("override", [None, "dequantized", "high_precision"])
def test_u05_u06_dequantize_computes_as_from_the_plain_values(old, new, override):
    """Bit for bit, and the parameter keeps its bytes."""
    recipe = TYPES[new](backward_override=override, on_recipe_change="dequantize")
    x, stored = randn(32, 64), BOTH[old](randn(96, 64, seed=1))
    model, reference = linear(stored), linear(stored.dequantize())
    before = weight_planes(model)
    got, want = (run(m, x, step=Step(recipe)).tensors for m in (model, reference))
    assert [key for key in want if not key.startswith("saved") and not same(got[key], want[key])] == []
    assert all(map(same, before, weight_planes(model)))


def product(name: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A product of fp32 values, rounded once."""
    left, right = left.float(), right.float()
    return {"fprop": lambda: left @ right.t(), "dgrad": lambda: left @ right, "wgrad": lambda: left.t() @ right}[name]().to(BF16)


def clashing(plan: Plan) -> list[str]:
    """The products of operands whose formats cannot meet."""
    return [each.name for each in plan.graph.products if clash(each.name, each.left, each.right)]


@pytest.mark.row("U06")
@pytest.mark.parametrize(("old", "new"), CHANGES)
def test_u06_keep_multiplies_as_stored_where_mixing_is_allowed(old, new):
    recipe = TYPES[new](on_recipe_change="keep", allow_mixed_emulation=True)
    x, weight = randn(32, 64), BOTH[old](randn(96, 64, seed=1))
    result = run(linear(weight), x, step=Step(recipe))
    got, dy = result.tensors, randn(32, 96, seed=100)
    xq = recipe.quantizer(QuantizerRole(tensor_type="input")).quantize(x)
    dyq = recipe.quantizer(QuantizerRole(tensor_type="grad_output")).quantize(dy)
    y = product("fprop", xq.dequantize(torch.float32), weight.dequantize(torch.float32))
    dx = product("dgrad", dyq.dequantize(torch.float32), weight.dequantize(torch.float32, COLUMNWISE))
    assert same(got["output 0"], y)
    assert same(got["grad of input"], dx)
    assert clashing(result.plans[0]) == ["fprop", "dgrad"]
    with (
        opfuse.autocast(recipe=recipe.replace(allow_mixed_emulation=False)),
        pytest.raises(GemmError, match="allow_mixed_emulation"),
    ):
        linear(weight)(x)


KEEPS: dict[str, tuple[Quantizer, Recipe]] = {
    "block 1d under 2d": (Float8BlockQuantizer(E4M3, block_scaling_dim=1), Float8BlockScaling()),
    "block 2d under 1d": (Float8BlockQuantizer(E4M3), Float8BlockScaling(w_block_scaling_dim=1)),
    "4 over 6": (NVFP4Quantizer(nvfp4_use_4over6=True), NVFP4BlockScaling()),
    "E5M2": (MXFP8Quantizer(torch.float8_e5m2), MXFP8BlockScaling()),
    "high precision": (IdentityQuantizer(), MXFP8BlockScaling()),
}
"""Other formats that the recipe's can meet."""


@pytest.mark.row("U06")
@pytest.mark.parametrize("kind", KEEPS)
def test_u06_keep_needs_no_leave_to_mix_where_formats_meet(kind):
    quantizer, recipe = KEEPS[kind]
    model, x = linear(quantizer(randn(96, 64, seed=1))), randn(32, 64)
    with opfuse.autocast(recipe=recipe), pytest.raises(RecipeError) as caught:
        model(x)
    stored, wanted = str(quantizer.formats[0]), str(recipe.quantizer(QuantizerRole(tensor_type="weight")).formats[0])
    assert stored != wanted
    assert stored in str(caught.value)
    assert wanted in str(caught.value)
    result = run(model, x, step=Step(recipe.replace(on_recipe_change="keep")))
    assert not clashing(result.plans[0])
    reference = linear(quantizer(randn(96, 64, seed=1)).dequantize())
    exact = run(reference, x).tensors
    for name in ("output 0", "grad of input"):
        error = (result.tensors[name] - exact[name]).float().norm() / exact[name].float().norm()
        assert error < 0.25


@pytest.mark.row("U06")
def test_u06_the_policy_is_in_the_plan_key():
    model, x = mlp(MXFP8BlockScaling()), randn(32, 64)
    other = Float8CurrentScaling(on_recipe_change="dequantize")
    first = train(model, x, step=Step(other)).plans
    kept = train(model, x, step=Step(other.replace(on_recipe_change="keep", allow_mixed_emulation=True))).plans
    assert model.cache_info().plans == 2
    assert first[0] is not kept[0]
    assert "env.recipe.on_recipe_change: 'dequantize' -> 'keep'" in model.cache_info().last_miss
    with opfuse.autocast(recipe=Float8CurrentScaling()), pytest.raises(RecipeError):
        model(x)
    assert train(model, x, step=Step(other)).plans == first


@pytest.mark.row("U06")
def test_u06_a_stored_weight_is_told_apart_by_every_part_of_its_format():
    """The signature in the key is a text: formats that differ must differ in it."""
    quantizers = [quantizer for quantizer, _ in KEEPS.values()] + list(BOTH.values())
    quantizers += [
        NVFP4Quantizer(row_scaled_nvfp4=True),
        NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
        NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, with_random_sign_mask=False),
    ]
    formats = {fmt for quantizer in quantizers for fmt in quantizer.formats}
    assert len({str(fmt) for fmt in formats}) == len(formats)


@pytest.mark.row("U06")
def test_u06_a_custom_recipe_that_agrees_with_the_stored_planes_is_no_change():
    def qfactory(role: QuantizerRole) -> Quantizer:
        return MXFP8BlockScaling().quantizer(role)

    model, x = mlp(MXFP8BlockScaling()), randn(32, 64)
    got, want = (run(model, x, step=Step(r)).tensors for r in (CustomRecipe(qfactory=qfactory), MXFP8BlockScaling()))
    assert differences(got, want) == []


def test_nothing_is_asked_of_a_stored_weight_without_a_recipe():
    model, x = to(mlp(MXFP8BlockScaling()), BF16), randn(32, 64)
    got = run(model, x).tensors
    assert got["grad of input"] is not None
    assert bits(got["output 0"]).any()
