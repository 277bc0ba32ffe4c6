"""A recipe's ``keep``: operands that the backward pass makes anew, bit for bit, or from an input that was kept in FP8."""

import copy
import re
from contextlib import nullcontext

import pytest
import torch
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

import opfuse
from opfuse import ops
from opfuse.compiler.registry import use_rules
from opfuse.errors import RecipeError, SavedTensorError
from opfuse.recipes import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    QuantizerRole,
)
from opfuse.runtime.replay.dispatch import interpreted
from opfuse.tensors.quantizers import Float8CurrentScalingQuantizer, HybridQuantizer, MXFP8Quantizer
from tests.compiler.harness import CASES, OVERRIDES, UNFUSED, generator_of, randn, recipe_for, to
from tests.turns import in_turn

WIDTH, ROWS = 64, 64


def made() -> ops.Sequential:
    """A norm, a gated activation, an activation with a mask and a scale behind it, a norm without parameters."""
    gated = ops.RMSNorm(WIDTH), ops.Linear(WIDTH, 256, bias=False), ops.SwiGLU(), ops.Linear(128, 96)
    masked = ops.GELU(), ops.Dropout(0.25), ops.ConstantScale(0.5), ops.Linear(96, WIDTH), ops.L2Normalization()
    return to(ops.Sequential(*gated, *masked, ops.Linear(WIDTH, WIDTH)), torch.bfloat16)


SETTINGS = [(kind, override) for kind, override in CASES if kind != "none"]


def steps(model, recipe, *, count=3, call=lambda model, x: model(x), around=nullcontext, keep_graph=False):
    """Results and gradients of several training steps: interpreted, recorded, repeated."""
    model, found = copy.deepcopy(model), []
    with around(model) if around is not nullcontext else nullcontext():
        for step in range(count):
            torch.manual_seed(step)
            x = randn(ROWS, WIDTH, seed=step).requires_grad_()
            with opfuse.autocast(recipe=recipe):
                y = call(model, x)
            for _ in range(1 + keep_graph):
                grads = torch.autograd.grad(y, [x, *model.parameters()], randn(ROWS, WIDTH, seed=9), retain_graph=keep_graph)
            found += [y, *grads]
    return found


def equal(left, right):
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right))


def saved(model, recipe):
    with opfuse.autocast(recipe=recipe):
        return opfuse.saved(model, randn(ROWS, WIDTH).requires_grad_())


def explained(model, recipe):
    with opfuse.autocast(recipe=recipe):
        return opfuse.explain(model, randn(ROWS, WIDTH).requires_grad_())


def remade_of(model, recipe):
    plans = explained(model, recipe).plans
    return [each for plan in plans for operands in plan.rematerialized.values() for each in operands]


@pytest.mark.few(apart=True)
@pytest.mark.row("B35")
@pytest.mark.parametrize(("kind", "override"), in_turn(SETTINGS, of=2))
def test_b35_recompute_changes_no_bit(kind, override):
    fields = {"disable_stochastic_rounding": True} if kind == "nvfp4" else {}
    model, every = made(), recipe_for(kind, override, keep="all", **fields)
    wanted = steps(model, every)
    for keep in (None, "recompute"):
        assert equal(steps(model, every.replace(keep=keep)), wanted), keep


@pytest.mark.row("B35")
@pytest.mark.parametrize("override", OVERRIDES)
def test_b35_inputs_and_weights_are_not_saved_but_remade(override):
    """No input of a product, and no weight, is saved in any form but the weight itself; nothing beside what ops save."""
    model, default = made(), recipe_for("fp8_block", override)
    roles = [each.role for each in remade_of(model, default.replace(keep="recompute"))]
    assert roles.count("input") == 4
    assert roles.count("weight") == (0 if override == "high_precision" else 4)
    text = explained(model, default.replace(keep="recompute")).details()
    blocks = r"fp8_block_1d_e4m3 \(power-of-two scales\)"
    formats = {None: blocks, "dequantized": blocks, "high_precision": "high precision"}
    assert re.search(rf"linear input: {formats[override]} of \d+:gelu \d+:dropout \d+:constant_scale\n", text)
    before, now = saved(model, default.replace(keep="all")), saved(model, default.replace(keep="recompute"))
    assert now.totals.own < before.totals.own
    assert [value.name for value in now.values if value.usages] == []
    assert {value.memory.partition(" ")[0] for value in now.values if value.name == "w"} == {"parameter"}


@pytest.mark.row("B35")
@pytest.mark.parametrize("override", OVERRIDES)
def test_b35_by_default_casts_of_weights_and_of_norms_results_are_made_anew(override):
    """These take little time; what follows an activation is saved as under "all"."""
    model, default = made(), recipe_for("fp8_block", override)
    remade = [each.role for each in remade_of(model, default)]
    assert (remade.count("input"), remade.count("weight")) == (2, 0 if override == "high_precision" else 4)
    every, now = saved(model, default.replace(keep="all")).values, saved(model, default).values
    assert {value.memory.partition(" ")[0] for value in now if value.name == "w"} == {"parameter"}
    rest, as_before = ([(v.op, v.name, v.format, v.bytes) for v in values if v.name != "w"] for values in (now, every))
    missing = [value for value in as_before if value not in rest]
    assert [value for value in rest if value not in as_before] == []
    assert [name for _, name, _, _ in missing] == ["x", "x"]  # of the linears behind the two norms


@pytest.mark.row("B35")
@pytest.mark.parametrize(("keep", "others"), [(None, 0), ("recompute", 0), ("quantized", 4)])
def test_b35_the_amax_of_what_is_cast_again_is_found_once(keep, others):
    """Four bytes are saved for each; what follows from an input in FP8 has another amax in the backward pass."""
    model, recipe = made(), recipe_for("fp8_current", keep=keep)
    names = [value.name for value in saved(model, recipe).values]
    assert names.count("amax") == len(remade_of(model, recipe)) - others >= 4
    assert "amax" not in [value.name for value in saved(model, recipe_for("fp8_block", keep=keep)).values]


@pytest.mark.row("B35")
def test_b35_an_amax_that_only_one_direction_follows_is_no_help_to_the_other():
    """Rows scaled by the amax of the tensor, columns by blocks."""

    def quantizer(role):
        return HybridQuantizer(Float8CurrentScalingQuantizer(torch.float8_e4m3fn), MXFP8Quantizer())

    model, recipe = (
        to(ops.Sequential(ops.RMSNorm(WIDTH), ops.Linear(WIDTH, WIDTH)), torch.bfloat16),
        CustomRecipe(qfactory=quantizer, allow_mixed_emulation=True),
    )
    assert remade_of(model, recipe)
    assert equal(steps(model, recipe), steps(model, recipe.replace(keep="all")))


@pytest.mark.row("B35")
@pytest.mark.parametrize("act", [ops.SwiGLU, ops.SReLU])
def test_b35_quantized_casts_what_follows_from_the_kept_input_under_its_own_amax(act):
    """The values of the kept codes may be larger than those of the forward pass, and then none of them saturates."""

    def columns_of(x, dtype):
        return Float8CurrentScalingQuantizer(dtype).quantize(x.detach()).dequantize(torch.float32, "columnwise")

    width, larger = WIDTH * (1 + (act is ops.SwiGLU)), 0
    for seed in range(12):
        last = ops.Linear(WIDTH, WIDTH, bias=False)
        model = to(ops.Sequential(act(), last), torch.bfloat16)
        x, dy = (randn(ROWS, width, seed=seed) * 3).requires_grad_(), randn(ROWS, WIDTH, seed=9)
        with opfuse.autocast(recipe=Float8CurrentScaling(keep="quantized")):
            y = model(x)
        (got,) = torch.autograd.grad(y, [last.weight], dy)
        kept = kept_of(x)
        with torch.no_grad():
            h, exact = model[0](kept), model[0](x)
        larger += bool(h.abs().max() > exact.abs().max())
        wanted = columns_of(dy, torch.float8_e5m2).t() @ columns_of(h, torch.float8_e4m3fn)
        assert (got.float() - wanted).norm() < 2e-3 * wanted.norm()
    assert larger


@pytest.mark.row("B35")
@pytest.mark.parametrize("kind", ["delayed", "fp8_block", pytest.param("fp8_current", marks=pytest.mark.slow)])
def test_b35_a_chain_that_rounds_once_has_the_same_bits_by_default(kind):
    """There ``keep="recompute"`` is refused, since an activation reads more bits than are saved; a norm rounds either way."""
    model, recipe = made(), recipe_for(kind, rounding="single")
    assert any(each.role == "input" for each in remade_of(model, recipe))
    assert equal(steps(model, recipe), steps(model, recipe.replace(keep="all")))


@pytest.mark.row("B35")
@pytest.mark.parametrize("kind", ["delayed", "fp8_block", pytest.param("fp8_current", marks=pytest.mark.slow)])
def test_b35_interpreter_programs_fusions_and_checkpoints_agree(kind):
    model, recipe = made(), recipe_for(kind, keep="quantized")
    wanted = steps(model, recipe)
    with interpreted():
        assert equal(steps(model, recipe, count=2), wanted[: 2 * len(wanted) // 3])
    assert equal(steps(model, recipe, call=lambda model, x: checkpoint(model, x, use_reentrant=False)), wanted)
    with use_rules(UNFUSED):
        assert equal(steps(model, recipe, count=2), wanted[: 2 * len(wanted) // 3])
    if kind != "delayed":  # whose gradients count once
        assert equal(steps(model, recipe, keep_graph=True), wanted)


@pytest.mark.row("B35")
@pytest.mark.parametrize("kind", ["delayed", "fp8_block"])
def test_b35_kept_casts_of_weights_have_both_planes_and_are_not_made_anew(kind):
    model, recipe = made(), recipe_for(kind, keep="recompute")
    wanted = steps(model, recipe_for(kind, keep="all"))
    for keep in (None, "recompute"):
        assert equal(steps(model, recipe.replace(keep=keep), around=opfuse.kept_weights), wanted), keep


def experts(*, single, bias):
    """Two layers of three experts with a gated activation between them."""
    options = {"bias": bias, "single_grouped_weight": single}
    first, second = ops.GroupedLinear(3, WIDTH, 128, **options), ops.GroupedLinear(3, WIDTH, 96, **options)
    return to(ops.Sequential(first, ops.SwiGLU(), second), torch.bfloat16)


SPLITS = torch.tensor([128, 0, 256])


def expert_steps(model, recipe, around=nullcontext):
    model, found = copy.deepcopy(model), []
    with around(model) if around is not nullcontext else nullcontext():
        for step in range(3):
            x = randn(int(SPLITS.sum()), WIDTH, seed=step).requires_grad_()
            with opfuse.autocast(recipe=recipe):
                y = model(x, SPLITS, SPLITS)
            found += [y, *torch.autograd.grad(y, [x, *model.parameters()], randn(*y.shape, seed=9))]
    return found


def expert_bytes(model, recipe):
    with opfuse.autocast(recipe=recipe):
        return opfuse.saved(model, randn(int(SPLITS.sum()), WIDTH).requires_grad_(), SPLITS, SPLITS)


@pytest.mark.few(apart=True)
@pytest.mark.row("B35")
@pytest.mark.parametrize(("kind", "override", "single"), in_turn(SETTINGS, (True, False), of=4))
def test_b35_casts_of_experts_are_made_anew_group_by_group(kind, override, single):
    """No weight and no result of the activation is saved, and no bit changes, under scales of the groups that move too."""
    model = experts(single=single, bias=kind == "fp8_block")
    default = recipe_for(kind, override, **({"disable_stochastic_rounding": True} if kind == "nvfp4" else {}))
    every = default.replace(keep="all")
    wanted = expert_steps(model, every)
    for keep in (None, "recompute"):
        assert equal(expert_steps(model, default.replace(keep=keep)), wanted), keep
    values = expert_bytes(model, default.replace(keep="recompute")).values
    read = [value for value in values if value.op.endswith("grouped_linear") and value.usages]
    assert [value.name for value in read if override != "high_precision"] == ["x"] * (override != "high_precision")
    if override is None:  # whose gradients follow from codes
        sizes = [expert_bytes(model, default.replace(keep=keep)).totals.own for keep in ("quantized", "recompute", None, "all")]
        assert sizes == sorted({*sizes})


@pytest.mark.row("B35")
@pytest.mark.parametrize("kind", ["delayed", "fp8_block", pytest.param("fp8_current", marks=pytest.mark.slow)])
def test_b35_casts_of_experts_run_as_interpreted_and_beside_kept_weights(kind):
    model, recipe = experts(single=False, bias=False), recipe_for(kind, keep="quantized")
    wanted = expert_steps(model, recipe)
    with interpreted():
        assert equal(expert_steps(model, recipe), wanted)
    assert equal(expert_steps(model, recipe, around=opfuse.kept_weights), wanted)


@pytest.mark.row("B35")
def test_b35_quantized_is_the_reference_in_plain_torch():
    """Linear, squared ReLU, linear under MXFP8: everything behind the kept input follows from its E4M3 codes."""
    recipe = MXFP8BlockScaling(keep="quantized")
    first, act, second = ops.Linear(WIDTH, 128), ops.SReLU(), ops.Linear(128, WIDTH)
    model = to(ops.Sequential(first, act, second), torch.bfloat16)
    x, dy = randn(ROWS, WIDTH).requires_grad_(), randn(ROWS, WIDTH, seed=9)
    with opfuse.autocast(recipe=recipe):
        y = model(x)
        z = first(x).detach()
    assert torch.equal(y, steps(model, MXFP8BlockScaling(), count=1)[0])  # the forward pass does not know of it
    got = torch.autograd.grad(y, [x, *model.parameters()], dy)

    kept = kept_of(z)
    h = kept.float().clamp(min=0).square().bfloat16()
    dh = product(rows(dy, "grad_output"), columns(second.weight, "weight"))
    dz = (dh.float() * (2 * kept.float().clamp(min=0))).bfloat16()
    dx = product(rows(dz, "grad_output"), columns(first.weight, "weight"))
    dw1 = product(columns(dz, "grad_output"), columns(x, "input"))
    dw2 = product(columns(dy, "grad_output"), columns(h, "input"))
    wanted = dx, dw1, dz.float().sum(0).bfloat16(), dw2, dy.float().sum(0).bfloat16()
    assert equal(got, wanted)


def kept_of(x):
    """E4M3 values of blocks of 128 columns, each under the largest power of two with which none exceeds 448."""
    blocks = pad(x.detach().float(), (0, -x.shape[-1] % 128)).unflatten(-1, (-1, 128))
    exponent = torch.frexp(448 / blocks.abs().amax(-1, keepdim=True)).exponent - 1
    codes = torch.ldexp(blocks, exponent).to(torch.float8_e4m3fn).float()
    return torch.ldexp(codes, -exponent).flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def rows(x, role):
    return planes(x, role).dequantize(torch.float32, "rowwise")


def columns(x, role):
    return planes(x, role).dequantize(torch.float32, "columnwise").t().contiguous()


def planes(x, role):
    return MXFP8BlockScaling().quantizer(QuantizerRole(tensor_type=role)).quantize(x.detach())


def product(left, right):
    """Of lines by lines, in fp32, rounded once."""
    return (left @ right.t()).bfloat16()


def residual():
    skip, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    skip.set_extra_output_channel(0, "skip", output_to_caller=False)
    add.set_extra_input_channel(0, "skip")
    return [skip, ops.Linear(WIDTH, WIDTH), ops.GELU(), add, ops.Linear(WIDTH, WIDTH)]


class Mine(ops.GELU):
    """Runs code that is not the library's."""

    def op_forward(self, ctx, input_, **kwargs):
        return super().op_forward(ctx, input_, **kwargs)


class Drawn(ops.Activation):
    math = ops.Pointwise("drawn", "x", ("dy * x",), lambda x: x * torch.rand_like(x), lambda dy, x: (dy * x,))


OTHERS = {
    "an input that is kept in FP8": lambda: [ops.SiLU(cache_quantized_input=True), ops.Linear(WIDTH, WIDTH)],
    "math of one's own that draws": lambda: [ops.Linear(WIDTH, WIDTH), Drawn(), ops.Linear(WIDTH, WIDTH)],
    "a sum with what is not saved": residual,
    "an op of one's own": lambda: [ops.Linear(WIDTH, WIDTH), Mine(), ops.Linear(WIDTH, WIDTH)],
    "a norm whose bias is not saved": lambda: [ops.LayerNorm(WIDTH), ops.Linear(WIDTH, WIDTH)],
    "a reshape": lambda: [ops.Linear(WIDTH, WIDTH), ops.GELU(), ops.Reshape((-1, WIDTH)), ops.Linear(WIDTH, WIDTH)],
}


@pytest.mark.row("B35")
@pytest.mark.parametrize("name", OTHERS)
def test_b35_what_does_not_follow_from_saved_state_is_saved_as_ever(name):
    model = to(ops.Sequential(*OTHERS[name]()), torch.bfloat16)
    recipe = Float8BlockScaling(keep="recompute")
    assert equal(steps(model, recipe), steps(model, Float8BlockScaling()))
    assert {each.role for each in remade_of(model, recipe)} == {"weight"}


def routed(routing, *ops_behind, grouped):
    """Rows for experts, what is done to them, and a product that reads them."""
    last = ops.GroupedLinear(3, WIDTH, 32, bias=False, pad_splits=True) if grouped else ops.Linear(WIDTH, 32)
    if grouped:
        routing.set_extra_output_channel(0, "splits")
        last.set_extra_input_channel(0, "splits")
    return to(ops.Sequential(routing, *ops_behind, last), torch.bfloat16)


def routed_steps(model, recipe, *, frozen):
    model, found = copy.deepcopy(model), []
    for step in range(3):
        x = randn(ROWS, WIDTH, seed=step).requires_grad_(not frozen)
        chosen = torch.randint(-1, 3, (ROWS, 2), generator=generator_of(step))
        with opfuse.autocast(recipe=recipe):
            y, *_ = model(x, *[chosen] * (model[0].num_extra_inputs))
        wanted = [*([] if frozen else [x]), *model[-1].parameters()]
        found += [y, *torch.autograd.grad(y, wanted, randn(*y.shape, seed=9))]
    return found


def permute():
    return ops.TokenPermute(3)


def of_gate():
    return ops.TokenDispatch(3, WIDTH, top_k=2)


BEHIND = {
    "none": list,
    "scale": lambda: [ops.ConstantScale(0.5)],
    "activation and scale": lambda: [ops.GELU(), ops.ConstantScale(0.5)],
}


@pytest.mark.few(apart=True)
@pytest.mark.row("B35")
@pytest.mark.parametrize(
    ("behind", "routing", "grouped", "frozen"), in_turn(BEHIND, [permute, of_gate], [False, True], [False, True], of=2)
)
def test_b35_rows_for_experts_are_made_anew_for_every_reader(behind, routing, grouped, frozen):
    """A product without groups, or with them; under "recompute" also behind ops that do not save what they read."""
    model, recipe = routed(routing(), *BEHIND[behind](), grouped=grouped), Float8BlockScaling()
    wanted = routed_steps(model, recipe.replace(keep="all"), frozen=frozen)
    for keep in (None, "recompute"):
        assert equal(routed_steps(model, recipe.replace(keep=keep), frozen=frozen), wanted), keep


@pytest.mark.row("B35")
def test_b35_quantized_measures_rows_for_experts_once():
    """They follow from an input that is saved as it is, so that their amax is that of the forward pass."""
    model, x, chosen = routed(permute(), grouped=False), randn(ROWS, WIDTH).requires_grad_(), torch.zeros(ROWS, 2).long()
    for keep in (None, "quantized"):
        with opfuse.autocast(recipe=Float8CurrentScaling(keep=keep)):
            names = [value.name for value in opfuse.saved(model, x, *[chosen] * model[0].num_extra_inputs).values]
        assert names.count("amax") == 2, keep  # of the rows, and of the weight


class Squared(ops.TokenPermute):
    """Code of one's own where rows are found."""

    def route(self, ctx, input_):
        route = super().route(ctx, input_)
        return route._replace(x=route.x * route.x)


class Tripled(ops.RMSNorm):
    """Code of one's own where a norm's result is cast."""

    def produce_cast(self, ctx, x, cast):
        return cast(3 * self.produce(ctx, x))


@pytest.mark.row("B35")
def test_b35_nothing_is_made_anew_without_code_of_ones_own():
    """A method that the backward pass would not call: the op's, or one that was put on an object."""
    permute = ops.TokenPermute(3)
    permute.route = lambda ctx, x, own=permute.route: (found := own(ctx, x))._replace(x=found.x * found.x)
    norm = to(ops.Sequential(Tripled(WIDTH), ops.Linear(WIDTH, WIDTH)), torch.bfloat16)
    default, every = Float8BlockScaling(), Float8BlockScaling(keep="all")
    for model in (routed(Squared(3), grouped=True), routed(permute, grouped=True)):
        assert equal(routed_steps(model, default, frozen=False), routed_steps(model, every, frozen=False))
    assert equal(steps(norm, default), steps(norm, every))


def test_a_weight_that_changes_before_the_backward_pass_is_noticed():
    model = made()
    x = randn(ROWS, WIDTH).requires_grad_()
    with opfuse.autocast(recipe=Float8BlockScaling(keep="recompute")):
        y = model(x)
    with torch.no_grad():
        model[-1].weight.add_(1)
    with pytest.raises(SavedTensorError, match="changed in place"):
        y.sum().backward()


def test_a_delayed_scale_that_has_moved_since_is_not_read():
    """The region ends, and with it the scale of the call, before the backward pass begins."""
    model, recipe = made(), DelayedScaling(amax_history_len=1, keep="recompute")
    wanted = steps(model, DelayedScaling(amax_history_len=1), count=2)
    assert equal(steps(model, recipe, count=2), wanted)


@pytest.mark.row("B35")
def test_b35_what_contradicts_another_field_is_refused():
    for override in ("dequantized", "high_precision"):
        refused = rf"wants another keep: backward_override='{override}' is for gradients of what ran"
        with pytest.raises(RecipeError, match=refused):
            Float8CurrentScaling(keep="quantized", backward_override=override)
    with pytest.raises(RecipeError, match=r"wants rounding='per_op'.*got keep='recompute', rounding='single'"):
        MXFP8BlockScaling(keep="recompute", rounding="single")
    with pytest.raises(RecipeError, match=r"keep.*got 'everything'"):
        MXFP8BlockScaling(keep="everything")
    assert MXFP8BlockScaling(keep="quantized", rounding="single").keep == "quantized"


@pytest.mark.row("B35")
@pytest.mark.parametrize("norm", [ops.RMSNorm, ops.LayerNorm])
def test_b35_quantized_keeps_inputs_of_norms(norm):
    """Their gradients are those of the codes under the statistics of the input itself, which some columns dominate."""
    width = 320  # the last block has 64 columns
    model = to(ops.Sequential(norm(width)), torch.float32)
    x, dy = randn(ROWS, width).float(), randn(ROWS, width, seed=9).float()
    x[:, ::128] *= 1000
    x.requires_grad_()
    with opfuse.autocast(recipe=MXFP8BlockScaling(keep="quantized")):
        y = model(x)
    dx, dw, *_ = torch.autograd.grad(y, [x, *model.parameters()], dy)
    centre = x.detach().double().mean(-1, keepdim=True) if norm is ops.LayerNorm else 0.0
    rstd = (x.detach().double() - centre).square().mean(-1, keepdim=True).add(1e-5).rsqrt()
    codes_of = x.detach() - centre.float() if norm is ops.LayerNorm else x
    xhat, g = kept_of(codes_of).double() * rstd, dy.double() * model[0].weight.detach().double()
    mean = g.mean(-1, keepdim=True) if norm is ops.LayerNorm else 0.0
    torch.testing.assert_close(dx.double(), rstd * (g - mean - xhat * (g * xhat).mean(-1, keepdim=True)), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(dw.double(), (dy.double() * xhat).sum(0), rtol=1e-4, atol=1e-4)
    assert not torch.equal(kept_of(x), x)


@pytest.mark.row("B35")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_b35_a_mean_takes_no_bits_of_what_a_layer_norm_keeps(dtype):
    """The mean of every other row is a hundred times the deviations from it; a norm covers two dimensions."""
    model = to(ops.Sequential(ops.LayerNorm((3, 64))), dtype)
    x, dy, grads = randn(ROWS, 3, 64, dtype=torch.float32), randn(ROWS, 3, 64, seed=9, dtype=dtype), []
    x = (x + torch.tensor([0.1, 100.2]).repeat(ROWS // 2)[:, None, None]).to(dtype).requires_grad_()  # in bf16 the mean is 100
    for keep in (None, "quantized"):
        for _ in range(3):  # interpreted, recorded, repeated
            with opfuse.autocast(recipe=MXFP8BlockScaling(keep=keep)):
                y = model(x)
            grads.append(torch.autograd.grad(y, [x, *model.parameters()], dy))
    exact, got = grads[2], grads[5]
    assert all(equal(grads[3], each) for each in grads[4:])
    assert not torch.equal(got[1], exact[1])
    for a, b in zip(got, exact):
        assert (a - b).float().norm() < 0.05 * b.float().norm()


@pytest.mark.row("B35")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_b35_quantized_saves_no_more_bytes_of_narrow_rows(dtype):
    """A row of one column would have a scale of four bytes for its code."""
    for width in range(1, 8):
        for op in (ops.GELU(), ops.RMSNorm((8, width)), ops.LayerNorm((8, width))):
            x, found = randn(ROWS, 8, width, dtype=dtype).requires_grad_(), []
            fewer = max(0, width * (dtype.itemsize - 1) - 4)
            for keep in ("recompute", "quantized"):
                with opfuse.autocast(recipe=MXFP8BlockScaling(keep=keep)):
                    found.append(opfuse.saved(to(ops.Sequential(op), dtype), x).values)
            plain, quantized = (sum(value.bytes for value in values) for values in found)
            assert quantized == plain - ROWS * 8 * fewer
            assert (found[1][0].format == "plain") == (fewer == 0)


@pytest.mark.row("B35")
def test_b35_quantized_leaves_what_no_cast_takes():
    for dtype, size in ((torch.float64, (ROWS, WIDTH)), (torch.float32, ())):
        x = torch.randn(size, dtype=dtype, requires_grad=True)
        grads = []
        for recipe in (None, MXFP8BlockScaling(keep="quantized")):
            with opfuse.autocast(recipe=recipe):
                grads += torch.autograd.grad(ops.Sequential(ops.GELU())(x).sum(), x)
        assert torch.equal(*grads)


@pytest.mark.row("B35")
def test_b35_an_input_that_its_op_caches_is_no_other_under_quantized():
    model = to(ops.Sequential(ops.GELU(cache_quantized_input=True)), torch.bfloat16)
    assert equal(steps(model, MXFP8BlockScaling(keep="quantized")), steps(model, MXFP8BlockScaling()))


@pytest.mark.row("B35")
@pytest.mark.parametrize("norm", [ops.RMSNorm, ops.LayerNorm])
def test_b35_quantized_leaves_an_input_that_came_quantized(norm):
    """Gradients are those of the values that came, and no second cast of them."""
    model, x, found = to(ops.Sequential(norm(WIDTH)), torch.bfloat16), MXFP8Quantizer()(randn(ROWS, WIDTH)), []
    for keep in ("recompute", "quantized"):
        with opfuse.autocast(recipe=MXFP8BlockScaling(keep=keep)):
            assert opfuse.saved(model, x).values[0].format == "mxfp8_e4m3"
            found.append(torch.autograd.grad(model(x), list(model.parameters()), randn(ROWS, WIDTH, seed=9)))
    assert equal(*found)
