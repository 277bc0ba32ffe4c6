"""GroupedLinear: each group is a linear layer of its own, under every recipe and override, for any split of the rows."""

from __future__ import annotations

import copy
import importlib
import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

import opfuse
from opfuse import errors, ops, recipes
from opfuse.compiler.graph import BACKWARD
from opfuse.kernels.products import grouped as products
from opfuse.numerics import chain as definition
from opfuse.recipes import QuantizerRole
from opfuse.tensors import QuantizedTensor
from opfuse.tensors.gemm_grouped import Groups, grouped_rows
from opfuse.tensors.groups import GroupedPlane
from opfuse.tensors.quantizers import HybridQuantizer, IdentityQuantizer, NVFP4Quantizer, Quantizer
from opfuse.tensors.storage import QuantizedStorage
from tests.compiler.harness import CASES, HAS_OVERRIDE, OVERRIDES, differences, randn, recipe_for, rowwise, same, saved_values
from tests.plans import plans_used
from tests.turns import in_turn

BF16 = torch.bfloat16
K, N = 64, 96
EVEN, NONE, RAGGED = (64, 0, 32, 32), (0, 0, 0), (1, 31, 0, 96)
SPLITS = (EVEN, NONE, RAGGED)
ACTIVE = OVERRIDES[1:]
FORMS = {"apart": {}, "single": {"single_grouped_weight": True, "single_grouped_bias": True}}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
every_split = pytest.mark.parametrize("splits", SPLITS, ids=str)


def recipe_of(name: str, override: str | None) -> recipes.Recipe | None:
    """A recipe of the harness whose casts are all deterministic."""
    return recipe_for(name, override, **({"disable_stochastic_rounding": True} if name == "nvfp4" else {}))


def needs_whole_blocks(name: str, override: str | None) -> bool:
    """Whether the recipe makes columnwise data that is blocked along rows."""
    return name in ("mxfp8", "nvfp4") and override is None


def grouped(groups: int, dtype: torch.dtype = BF16, **options: object) -> ops.GroupedLinear:
    torch.manual_seed(3)
    return ops.GroupedLinear(groups, K, N, dtype=dtype, **options)


def weights_of(op: ops.GroupedLinear) -> list[torch.Tensor]:
    return list(op.weight) if op.single_grouped_weight else [getattr(op, name) for name in op.weight_names]


def biases_of(op: ops.GroupedLinear) -> list[torch.Tensor]:
    return list(op.bias) if op.single_grouped_bias else [getattr(op, name) for name in op.bias_names]


def step(op, x, splits, recipe, *, scales=None, plans=None, dy=None) -> dict[str, torch.Tensor]:
    """Output and all gradients of one step. dy: the gradient of the output; random by default."""
    x = x.detach().clone().requires_grad_()
    extras = [] if scales is None else [scales.detach().clone().requires_grad_()]
    op.zero_grad(set_to_none=True)
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe), plans_used() as ran:
        y = op(x, torch.tensor(splits), *extras)
    y.backward(randn(*y.shape, seed=100, dtype=y.dtype) if dy is None else dy)
    if plans is not None:
        plans += ran
    grads = {f"grad of {name}": p.grad for name, p in op.named_parameters()}
    scale = {f"grad of extra {i}": extra.grad for i, extra in enumerate(extras)}
    return {"output": y.detach(), "grad of input": x.grad, **grads, **scale}


def linears(op: ops.GroupedLinear, x, splits, recipe, layers=None) -> dict[str, torch.Tensor]:
    """The same step by one Linear a group."""
    if layers is None:
        layers = layers_of(op)
    x = x.detach().clone().requires_grad_()
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        y = torch.cat([layer(piece) for layer, piece in zip(layers, x.split(splits))])
    y.backward(randn(*y.shape, seed=100, dtype=y.dtype))
    found = {"output": y.detach(), "grad of input": x.grad}
    for kind, single in (("weight", op.single_grouped_weight), ("bias", op.single_grouped_bias)):
        grads = [getattr(layer, kind).grad for layer in layers if getattr(layer, kind) is not None]
        named = {f"grad of {kind}{i}": grad for i, grad in enumerate(grads)}
        found |= {f"grad of {kind}": torch.stack(grads)} if single else named
    return found


def layers_of(op: ops.GroupedLinear) -> list[ops.Linear]:
    """A Linear for each group, with the same parameters."""
    layers = [ops.Linear(K, N, bias=op.use_bias, dtype=weights_of(op)[0].dtype) for _ in range(op.num_groups)]
    with torch.no_grad():
        for i, layer in enumerate(layers):
            layer.weight.copy_(weights_of(op)[i])
            if op.use_bias:
                layer.bias.copy_(biases_of(op)[i])
    return layers


# -- values --------------------------------------------------------------------------------------------------------------


@pytest.mark.few(apart=True)
@pytest.mark.row("B24", "B25")
@pytest.mark.parametrize(("name", "override", "splits", "form"), in_turn(CASES, zip(SPLITS), FORMS.values(), of=len(FORMS)))
def test_b24_b25_every_group_is_a_linear_of_its_own(name, override, splits, form):
    op, x = grouped(len(splits), **form), randn(sum(splits), K)
    recipe = recipe_of(name, override)
    if splits == RAGGED and needs_whole_blocks(name, override):
        with opfuse.autocast(recipe=recipe), pytest.raises(errors.ShapeError, match="pad_splits=True"):
            op(x, torch.tensor(splits))
        return
    assert differences(step(op, x, splits, recipe), linears(op, x, splits, recipe)) == []


@pytest.mark.cpu  # kernels have the order of their own
@every_form
def test_sums_over_the_rows_of_a_group_have_the_definition_of_all_sums(form, monkeypatch):
    """Another order of sums in that one definition moves the gradients of both layers alike."""
    op, x = grouped(4, torch.float32, **form), randn(128, K, dtype=torch.float32)
    before = step(op, x, EVEN, None)

    def backwards(stage, name, grad, dtype):
        return grad.flip(0).cumsum(0)[-1] if len(grad) else grad.sum(0)

    monkeypatch.setattr(definition, "_reduced", backwards)
    found = step(op, x, EVEN, None)
    assert differences(found, linears(op, x, EVEN, None)) == []
    assert all("bias" in name for name in differences(found, before))
    assert differences(found, before)


@pytest.fixture
def one_launch(monkeypatch) -> list[str]:
    """torch's grouped product takes tensors of the CPU as those of a GPU; what it made."""
    made: list[str] = []

    def multiply(name, *operands):
        made.append(name)
        return real(name, *operands)

    real = products.multiply
    monkeypatch.setattr(products, "takes", lambda *_: True)
    monkeypatch.setattr(products, "_arch", lambda device: (9, 0))
    monkeypatch.setattr(products, "multiply", multiply)
    return made


def small_integers(*shape: int) -> torch.Tensor:
    return torch.randint(-8, 9, shape).to(BF16)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("sizes", "reach", "form", "forward"),
    [
        (EVEN, 1 << 33, "apart", 1),
        (EVEN, 1 << 20, "single", 1),
        (EVEN, 1 << 20, "apart", 0),  # with copies of the weights
        ((128, 0, 0, 0), 1 << 20, "single", 0),  # more rows of a group
    ],
)
def test_groups_of_few_rows_are_multiplied_in_one_launch(sizes, reach, form, forward, request):
    """With the sums of each group alone, in an order of its own; a batch-invariant product is one for each.

    Sums of few small integers are exact in fp32 in any order, so their bits show that each has the same products and is rounded
    once. Random ones are as close as another order moves them.
    """
    monkeypatch, made = map(request.getfixturevalue, ("monkeypatch", "one_launch"))
    monkeypatch.setattr(products, "FASTER", {**products.FASTER, "fprop": reach})
    op, x = grouped(4, bias=False, **FORMS[form]), randn(128, K)
    exact, whole, dy = copy.deepcopy(op), small_integers(128, K), small_integers(128, N)
    with torch.no_grad():
        for weight in weights_of(exact):
            weight.copy_(small_integers(N, K))
    found = step(op, x, sizes, None)
    assert made == [*["fprop"] * forward, "dgrad", "wgrad"]
    found_exact = step(exact, whole, sizes, None, dy=dy)
    monkeypatch.setattr(products, "takes", lambda *_: False)
    alone = step(op, x, sizes, None)
    assert found.keys() == alone.keys()
    for name in found:
        torch.testing.assert_close(found[name], alone[name], rtol=2**-7, atol=1e-2)
    assert differences(found_exact, step(exact, whole, sizes, None, dy=dy)) == []
    weights = [weight.detach() for weight in weights_of(op)]
    monkeypatch.setattr(products, "takes", lambda *_: True)
    del made[:]
    grouped_rows("fprop", x, weights, Groups(sizes), dtype=BF16, invariant=True)
    assert made == []


@pytest.mark.few
@pytest.mark.row("B24")
@every_form
@pytest.mark.parametrize(("name", "override"), CASES)
def test_b24_the_weight_gradient_of_an_empty_group_is_exactly_zero(name, override, form):
    op = grouped(4, **form)
    found = step(op, randn(128, K), EVEN, recipe_of(name, override))
    weight, bias = (found[f"grad of {kind}"][1] if form else found[f"grad of {kind}1"] for kind in ("weight", "bias"))
    assert same(weight, torch.zeros(N, K, dtype=BF16))
    assert same(bias, torch.zeros(N, dtype=BF16))
    assert found["output"].abs().sum() > 0


def test_delayed_scaling_keeps_a_state_for_each_tensor_of_each_group():
    op, x = grouped(4), randn(128, K)
    layers, recipe = layers_of(op), recipes.DelayedScaling(amax_history_len=4)
    for i in range(3):
        for layer in layers:
            layer.zero_grad(set_to_none=True)
        assert differences(step(op, x * (1 + i), EVEN, recipe), linears(op, x * (1 + i), EVEN, recipe, layers)) == []
    assert len(op.quantizer_states) == 3 * 4
    scales, wanted = ([float(v) for each in made for v in _scales(each)] for made in ([op], layers))
    assert sorted(scales) == sorted(wanted)
    other = grouped(4)
    other.load_state_dict(op.state_dict())
    assert differences(step(op, x, EVEN, recipe), step(other, x, EVEN, recipe)) == []


def _scales(op):
    return [value for key, value in op.state_dict().items() if key.endswith(".scale")]


def test_states_of_casts_are_those_of_the_slots():
    op, recipe = grouped(2), recipes.DelayedScaling(amax_history_len=4)
    step(op, randn(64, K), (32, 32), recipe)
    made = len(op.quantizer_states)
    assert [op.num_quantizers(mode) for mode in ("forward", "backward")] == [4, 2]
    assert [role.tensor_type for role in op.get_quantizer_roles("forward")] == ["input", "weight"] * 2
    with opfuse.autocast(recipe=recipe):
        slots = [op.get_quantizer(mode, i) for mode, n in (("forward", 4), ("backward", 2)) for i in range(n)]
    assert len(op.quantizer_states) == made == len({id(slot.scale) for slot in slots})


@pytest.mark.row("B25", "B05")
@pytest.mark.parametrize("name", HAS_OVERRIDE)
@every_split
def test_b25_b05_high_precision_gradients_are_those_without_a_recipe(splits, name):
    op, x = grouped(len(splits), scale_bias=True), randn(sum(splits), K)
    scales = randn(sum(splits), seed=5)
    overridden, plain = (step(op, x, splits, r, scales=scales) for r in (recipe_of(name, "high_precision"), None))
    assert set(differences(overridden, plain)) <= {"output"}
    if sum(splits):
        assert not same(overridden["output"], plain["output"])


@pytest.mark.row("B25", "B24", "B06")
@pytest.mark.parametrize("name", HAS_OVERRIDE)
@every_split
@pytest.mark.cpu
def test_b25_b06_dequantized_gradients_are_the_chain_rule_group_by_group(splits, name):
    op, x = grouped(len(splits), scale_bias=True), randn(sum(splits), K)
    scales, recipe = randn(sum(splits), seed=5), recipe_of(name, "dequantized")
    found = step(op, x, splits, recipe, scales=scales)
    dy = randn(sum(splits), N, seed=100)
    pieces = zip(*(t.split(splits) for t in (dy, x, scales)))
    dx, ds = [], []
    for i, (dy_i, x_i, s_i) in enumerate(pieces):
        wq, xq = rowwise(recipe, "weight", getattr(op, f"weight{i}")), rowwise(recipe, "input", x_i)
        dx.append(dy_i @ wq)
        ds.append((dy_i.float() * getattr(op, f"bias{i}").float()).sum(1).to(BF16))
        assert same(found[f"grad of weight{i}"], dy_i.t() @ xq)
        assert same(found[f"grad of bias{i}"], (dy_i.float() * s_i.float()[:, None]).sum(0).to(BF16))
    assert same(found["grad of input"], torch.cat(dx))
    assert same(found["grad of extra 0"], torch.cat(ds))


@every_form
def test_scaled_bias_is_the_bias_times_the_scale_of_the_row(form):
    op, x, s = grouped(4, scale_bias=True, **form), randn(128, K), randn(128, seed=5)
    y = step(op, x, EVEN, None, scales=s)["output"]
    pieces = zip(x.split(EVEN), s.split(EVEN), weights_of(op), biases_of(op))
    wanted = [((x_i @ w.t()).float() + s_i.float()[:, None] * b.float()).to(BF16) for x_i, s_i, w, b in pieces]
    assert same(y, torch.cat(wanted).detach())


@pytest.mark.few
@pytest.mark.row("B25", "B07")
@pytest.mark.parametrize("name", HAS_OVERRIDE)
@every_split
def test_b25_b07_forward_is_the_same_under_every_override(splits, name):
    op, x = grouped(len(splits)), randn(sum(splits), K)
    overrides = ACTIVE if splits == RAGGED else OVERRIDES
    outputs = [step(op, x, splits, recipe_of(name, override))["output"] for override in overrides]
    assert all(same(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("leading", [(128,), (4, 32), (2, 2, 32)], ids=str)
@pytest.mark.parametrize(("name", "override"), [("none", None), ("mxfp8", None), ("fp8_current", "dequantized")])
def test_leading_dimensions_are_rows(leading, name, override):
    op, x, recipe = grouped(4, scale_bias=True), randn(128, K), recipe_of(name, override)
    scales = randn(128, seed=5)
    flat = step(op, x, EVEN, recipe, scales=scales)
    found = step(op, x.reshape(*leading, K), EVEN, recipe, scales=scales.reshape(leading))
    assert found["output"].shape == (*leading, N)
    assert [key for key in flat if not same(found[key], flat[key].reshape(found[key].shape))] == []


# -- planes, saved state -------------------------------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.row("B25", "B08", "B09")
@pytest.mark.parametrize("name", HAS_OVERRIDE)
@pytest.mark.parametrize("override", OVERRIDES)
@every_form
def test_b25_b08_b09_no_columnwise_plane_and_no_gradient_is_cast_under_an_override(form, override, name, monkeypatch):
    calls = []
    quantize = Quantizer.quantize

    def spy(self, x):
        if not isinstance(self, (IdentityQuantizer, HybridQuantizer, ops.grouped_linear.GroupedQuantizer)):
            calls.append(self.columnwise)
        return quantize(self, x)

    monkeypatch.setattr(Quantizer, "quantize", spy)
    plans = []
    step(grouped(4, **form), randn(128, K), EVEN, recipe_of(name, override).replace(keep="all"), plans=plans)
    assert len(calls) == (12 if override is None else 8)
    assert any(calls) is (override is None)
    backward = [node for plan in plans for node in plan.graph.nodes if node.directions == {BACKWARD}]
    assert bool(backward) is (override is None)


@pytest.mark.row("B25", "B10")
@pytest.mark.parametrize("name", HAS_OVERRIDE)
@pytest.mark.parametrize("splits", [EVEN, RAGGED], ids=str)
@every_form
def test_b25_b10_high_precision_saves_the_callers_tensor(form, splits, name):
    op, x = grouped(4, **form), randn(128, K).requires_grad_()
    with opfuse.autocast(recipe=recipe_of(name, "high_precision")), saved_values() as saved:
        op(x, torch.tensor(splits))
    assert saved["0.x"] is x
    assert all(saved[f"0.{weight}"] is getattr(op, weight) for weight in op.weight_names)


SNAPSHOT = {None: ("columnwise",), "dequantized": ("rowwise",)}


@pytest.mark.row("B25", "B11")
@pytest.mark.parametrize("name", HAS_OVERRIDE)
@pytest.mark.parametrize("override", SNAPSHOT)
@every_form
def test_b25_b11_saved_operands(form, override, name):
    op, x = grouped(4, **form), randn(128, K).requires_grad_()
    with opfuse.autocast(recipe=recipe_of(name, override).replace(keep="all")), saved_values() as saved:
        op(x, torch.tensor(EVEN))
    for key in ("0.x", *(f"0.{weight}" for weight in op.weight_names)):
        assert isinstance(saved[key], QuantizedStorage)
        assert saved[key].usages == SNAPSHOT[override]
    assert isinstance(saved["0.x"].plane(*SNAPSHOT[override]), GroupedPlane)
    assert [member.shape[0] for member in saved["0.x"].plane(*SNAPSHOT[override]).members] == list(EVEN)


@pytest.mark.row("B25", "B12")
@pytest.mark.parametrize(("x_grad", "w_grad", "s_grad"), [(True, True, True), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)])
@pytest.mark.parametrize(
    ("name", "override"), [("none", None), *((name, o) for name in ("fp8_block", "mxfp8") for o in OVERRIDES)]
)
@pytest.mark.cpu
def test_b25_b12_nothing_is_saved_that_no_gradient_needs(name, override, x_grad, w_grad, s_grad):
    op, x = grouped(2, scale_bias=True), randn(64, K).requires_grad_(bool(x_grad))
    scales = randn(64, seed=5).requires_grad_(bool(s_grad))
    for parameter in op.parameters():
        parameter.requires_grad_(False)
    op.weight1.requires_grad_(bool(w_grad))
    recipe = recipe_of(name, override)
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe), saved_values() as saved:
        y = op(x, torch.tensor((32, 32)), scales)
    kept = {key.removeprefix("0.") for key, value in saved.items() if value is not None}
    wanted = {"x"} if w_grad else set()
    assert kept == wanted | ({"weight0", "weight1"} if x_grad else set()) | ({"bias0", "bias1"} if s_grad else set())
    if y.requires_grad:
        y.sum().backward()
        assert (op.weight0.grad, op.weight1.grad is None) == (None, not w_grad)


def test_only_biases_that_train_save_the_scales_and_make_no_columnwise_plane():
    op = grouped(4, scale_bias=True)
    for weight in weights_of(op):
        weight.requires_grad_(False)
    scales = randn(128, seed=5)
    with opfuse.autocast(recipe=recipe_of("mxfp8", None)), saved_values() as saved:
        y = op(randn(128, K), torch.tensor(RAGGED), scales)
    assert {key for key, value in saved.items() if value is not None} == {"0.scales"}
    y.backward(dy := randn(128, N, seed=100))
    wanted = [(dy.float() * scales.float()[:, None])[a:b].sum(0).to(BF16) for a, b in ((0, 1), (1, 32), (32, 32), (32, 128))]
    assert [same(bias.grad, want) for bias, want in zip(biases_of(op), wanted)] == [True] * 4


# -- padding -------------------------------------------------------------------------------------------------------------


def settled(quantizer: Quantizer) -> Quantizer:
    """The same quantizer without stochastic rounding."""
    changed = {f.name: settled(sub) for f in fields(quantizer) if isinstance(sub := getattr(quantizer, f.name), Quantizer)}
    return replace(quantizer, **changed, **({"stochastic_rounding": False} if isinstance(quantizer, NVFP4Quantizer) else {}))


def preset_of(name: str, **asked: str) -> recipes.Recipe:
    """A preset of the zoo whose casts are all deterministic; of every role as if it had the fields ``asked``."""
    return recipes.CustomRecipe(qfactory=lambda role: settled(recipes.zoo.PRESETS[name](replace(role, **asked))))


# a device's products in high precision of other sizes add in another order
PADDED = [
    *("fp8_current", "fp8_block", "mxfp8", "nvfp4", "delayed"),
    *(
        pytest.param(name, marks=pytest.mark.cpu if "precision" in name or "dequantized" in name else ())
        for name in recipes.zoo.PRESETS
    ),
]


@pytest.mark.few
@pytest.mark.row("B24", "B28")
@every_form
@pytest.mark.parametrize("name", PADDED)
def test_b24_b28_padded_splits_are_linears_over_padded_rows(name, form):
    recipe = preset_of(name) if name in recipes.zoo.PRESETS else recipe_of(name, None)
    op, x = grouped(4, pad_splits=True, **form), randn(128, K)
    found = step(op, x, RAGGED, recipe)
    sizes = [32, 32, 0, 96]
    fill = lambda t: torch.cat([torch.nn.functional.pad(p, (0, 0, 0, n - len(p))) for p, n in zip(t.split(RAGGED), sizes)])  # noqa: E731
    cut = lambda t: torch.cat([p[:n] for p, n in zip(t.split(sizes), RAGGED)])  # noqa: E731
    layers, wide = layers_of(op), fill(x).requires_grad_()
    if name in recipes.zoo.PRESETS:  # a preset may treat experts apart from other linear layers
        recipe = preset_of(name, module_type="grouped_linear")
    with opfuse.autocast(recipe=recipe):
        y = torch.cat([layer(piece) for layer, piece in zip(layers, wide.split(sizes))])
    y.backward(fill(randn(128, N, seed=100)))
    assert same(found["output"], cut(y.detach()))
    assert same(found["grad of input"], cut(wide.grad))
    for i, layer in enumerate(layers):
        assert same(found["grad of weight"][i] if form else found[f"grad of weight{i}"], layer.weight.grad)
        assert same(found["grad of bias"][i] if form else found[f"grad of bias{i}"], layer.bias.grad)


@pytest.mark.parametrize("name", ["fp8_current", "delayed", "fp8_block", "fp8_row", "nvfp4"])
@pytest.mark.cpu
def test_padding_fills_groups_of_rows_and_no_weights(name):
    """Weights in one parameter are groups of rows, too, of which 48 fill no last block."""
    found = []
    for form in FORMS.values():
        torch.manual_seed(3)
        op = ops.GroupedLinear(4, K, 48, pad_splits=True, dtype=BF16, **form)
        made = step(op, randn(128, K), RAGGED, recipe_of(name, None))
        apart = [[each for key, each in made.items() if kind in key] for kind in ("output", "input", "weight", "bias")]
        found.append([torch.cat([each.reshape(-1, each.shape[-1]) for each in some]) for some in apart])
    assert all(map(same, *found))


@pytest.mark.cpu  # a device's products of other sizes add in another order
@pytest.mark.parametrize("override", ACTIVE)
@pytest.mark.parametrize("name", HAS_OVERRIDE)
def test_padding_changes_nothing_under_an_override(name, override):
    x, recipe = randn(128, K), recipe_of(name, override)
    padded, plain = (step(grouped(4, pad_splits=pad), x, RAGGED, recipe) for pad in (True, False))
    assert differences(padded, plain) == []


@pytest.mark.row("B24", "B27")
@pytest.mark.parametrize(("name", "multiple"), [("mxfp8", 32), ("nvfp4", 16)])
def test_b24_b27_ragged_splits_are_refused_with_the_cure(name, multiple):
    op, x = grouped(4), randn(128, K)
    with opfuse.autocast(recipe=recipe_of(name, None)), pytest.raises(errors.ShapeError) as caught:
        op(x, torch.tensor(RAGGED))
    for text in (
        "GroupedLinear",
        "input",
        str(RAGGED),
        f"multiple of {multiple} rows",
        name,
        "pad_splits=True",
        "backward_override",
    ):
        assert text in str(caught.value)
    with opfuse.autocast(recipe=recipe_of(name, None)), torch.no_grad():
        assert op(x, torch.tensor(RAGGED)).shape == (128, N)


# -- usages of stored weights --------------------------------------------------------------------------------------------


def stored(recipe: recipes.Recipe, **form: object) -> ops.GroupedLinear:
    with opfuse.quantized_model_init(recipe=recipe):
        return grouped(4, **form)


@pytest.mark.few(apart=True)
@pytest.mark.row("U04")
@pytest.mark.parametrize(
    ("name", "override", "stages", "form"),
    in_turn([case for case in CASES if case[0] != "none"], ("train infer train infer", "infer train infer train"), FORMS, of=3),
)
def test_u04_training_and_inference_alternate_on_stored_weights(name, override, stages, form):
    recipe, x, form = recipe_of(name, override), randn(128, K), FORMS[form]
    op = stored(recipe, **form)
    assert all(isinstance(op.parameter(weight), QuantizedTensor) for weight in op.weight_names)
    before = [tensor.clone() for weight in op.weight_names for tensor in op.parameter(weight).record.tensors()]
    steps = []
    for stage in stages.split():
        if stage == "train":
            steps.append(step(op, x, EVEN, recipe))
        else:
            with torch.no_grad(), opfuse.autocast(recipe=recipe):
                op(x, torch.tensor(EVEN))
    after = [tensor for weight in op.weight_names for tensor in op.parameter(weight).record.tensors()]
    assert all(same(a, b) for a, b in zip(before, after, strict=True))
    if name != "delayed":  # whose scales move
        fresh = step(stored(recipe, **form), x, EVEN, recipe)
        assert [differences(found, fresh) for found in steps] == [[], []]


@pytest.mark.few
@pytest.mark.row("U04")
@pytest.mark.cpu  # a device's product of all groups adds in an order of its own
@pytest.mark.parametrize("name", HAS_OVERRIDE)
@pytest.mark.parametrize("override", OVERRIDES)
def test_u04_weights_stored_as_one_compute_as_those_stored_apart(override, name):
    recipe, x = recipe_of(name, override), randn(128, K)
    apart, single = (step(stored(recipe, **form), x, EVEN, recipe) for form in FORMS.values())
    for i in range(4):
        assert same(single["grad of weight"][i], apart[f"grad of weight{i}"])
    assert same(single["output"], apart["output"])
    assert same(single["grad of input"], apart["grad of input"])


@pytest.mark.row("U04", "H17")
@pytest.mark.parametrize("name", [*HAS_OVERRIDE, "delayed"])
@pytest.mark.filterwarnings("ignore:a step on weights")
def test_u04_an_optimizer_step_rewrites_a_weight_stored_as_one(name):
    recipe, x = recipe_of(name, None), randn(128, K)
    op = stored(recipe, single_grouped_weight=True)
    optimizer = torch.optim.SGD(op.parameters(), lr=0.5)
    before = op.weight.dequantize().detach().clone()
    step(op, x, EVEN, recipe)
    grad = op.weight.grad.clone()
    optimizer.step()
    member = op.weight.quantizer.quantizers[0]
    moved = (before - 0.5 * grad).unbind()
    if name != "delayed":
        wanted = torch.stack([member.quantize(matrix).dequantize() for matrix in moved])
        assert same(op.weight.dequantize().detach(), wanted)
    assert not same(op.weight.dequantize().detach()[0], before[0])
    assert same(op.weight.dequantize().detach()[1], before[1])  # no rows, no gradient
    step(op, x, EVEN, recipe)


@pytest.mark.row("U04", "H17")
@pytest.mark.parametrize("name", [*HAS_OVERRIDE, "delayed"])
def test_u04_groups_of_a_weight_stored_as_one_are_read_and_written_one_by_one(name):
    """Each is quantized, over the bytes of the whole; who writes one leaves every byte of the others."""
    recipe, x = recipe_of(name, None), randn(128, K)
    op, apart = stored(recipe, single_grouped_weight=True), stored(recipe)
    whole, values = op.weight, randn(4, *op.weight.shape[1:], seed=5)
    assert all(same(whole[i].dequantize(), group.dequantize()) for i, group in enumerate(whole.unbind()))
    with torch.no_grad():
        for i, write in enumerate((lambda: whole[0].copy_(values[0]), lambda: whole.__setitem__(1, values[1]))):
            before = [[tensor.clone() for tensor in group.record.tensors()] for group in whole]
            count = whole._version
            write()
            changed = [not all(map(same, was, group.record.tensors())) for was, group in zip(before, whole)]
            assert changed == [group == i for group in range(4)]
            assert whole._version > count
            getattr(apart, f"weight{i}").copy_(values[i])
        both, written = [whole[0], whole[1]], [apart.weight0, apart.weight1]
        for write in (lambda to: torch._foreach_copy_(to, [*values[2:]]), lambda to: [each.mul_(2) for each in to]):
            write(both)
            write(written)
        torch._foreach_add_([whole[0], whole[1]], 1.0)
        torch._foreach_add_(written, 1.0)
        assert "grad_fn=Invalid" in repr(both[1])  # as of a plain view, once another one was written
        whole[2].copy_(apart.weight2)  # bytes, not a cast of values
        whole[3, 1:] = values[3, 1:]
        for i in (0, 1, 2):
            assert all(map(same, whole[i].record.tensors(), getattr(apart, f"weight{i}").record.tensors()))
        apart.weight3.copy_(whole[3])
    assert same(step(op, x, EVEN, recipe)["output"], step(apart, x, EVEN, recipe)["output"])


@pytest.mark.few
@pytest.mark.row("U04", "U02")
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", [*HAS_OVERRIDE, "delayed"])
def test_u04_stored_weights_are_loaded_with_their_bytes_where_they_are_held_the_other_way(name, assign):
    recipe = recipe_of(name, None)
    held = [stored(recipe, **form, bias=False) for form in ({}, {"single_grouped_weight": True})]
    for source, target in (held, held[::-1]):
        for state in map(copy.deepcopy, (source.state_dict(), opfuse.to_planes(source.state_dict()))):  # not the source's memory
            with torch.no_grad():
                for parameter in target.parameters():
                    parameter.zero_()
            target.load_state_dict(state, assign=assign)
            for mine, its in zip(weights_of(target), weights_of(source), strict=True):
                assert all(map(same, mine.record.tensors(), its.record.tensors()))
    with torch.no_grad():
        for each in weights_of(held[0]):
            each.add_(1)  # they can be written


@pytest.mark.row("U04", "U02")
@pytest.mark.parametrize("other", ["fp8_block", "fp8_current", "none"])
def test_u04_weights_stored_in_several_formats_are_loaded_as_one_by_their_values(other):
    held, mixed = (stored(recipe_of("mxfp8", None), bias=False) for _ in range(2))
    target = stored(recipe_of("mxfp8", None), single_grouped_weight=True, bias=False)
    with torch.no_grad():
        mixed.weight2.copy_(randn(*mixed.weight2.shape, seed=7))
    odd = randn(*held.weight1.shape, seed=8) if other == "none" else stored(recipe_of(other, None), bias=False).weight1.detach()
    target.load_state_dict({**held.state_dict(), "weight1": odd, "weight2": mixed.weight2})
    values = [
        weight if weight is odd and other == "none" else weight.dequantize() for weight in (held.weight0, odd, mixed.weight2)
    ]
    for found, wanted in zip(target.weight.detach(), values):
        assert same(found.dequantize(), held.weight0.quantizer(wanted.detach()).dequantize())


@pytest.mark.row("U04", "U02")
def test_u04_a_stored_weight_is_copied_saved_and_loaded(tmp_path):
    recipe = recipe_of("mxfp8", None)
    op = stored(recipe, single_grouped_weight=True)
    torch.save(op.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    other = stored(recipe, single_grouped_weight=True)
    with torch.no_grad():
        other.weight.zero_()
    other.load_state_dict(state)
    x = randn(128, K)
    wanted = step(op, x, EVEN, recipe)
    for each in (other, copy.deepcopy(op)):
        assert differences(step(each, x, EVEN, recipe), wanted) == []
    whole = op.weight.detach()
    some = whole[0:2]
    assert type(some) is QuantizedTensor
    assert same(some.dequantize(), whole.dequantize()[0:2])
    assert same(some.unbind()[1].rowwise.data, whole[1].rowwise.data)
    with pytest.raises(errors.QuantizedTensorError, match="rows cut from a larger tensor"):
        some.mul_(2)
    wanted = whole.dequantize()[2:4]
    some.copy_(whole[2:4])
    assert same(whole.dequantize()[0:2], wanted)
    assert same(op.weight[2].dequantize(), op.weight.dequantize()[2])
    with pytest.raises(errors.QuantizedTensorError, match="members"):
        _ = op.weight.rowwise.data


def test_a_per_tensor_weight_stored_as_one_derives_its_columnwise_plane():
    recipe = recipe_of("fp8_current", None)
    op, x = stored(recipe, single_grouped_weight=True), randn(128, K)
    wanted = step(op, x, EVEN, recipe)
    op.weight.update_usage(columnwise_usage=False)
    op.weight.update_usage(columnwise_usage=True)
    assert differences(step(op, x, EVEN, recipe), wanted) == []


# -- dtypes, names, keys -------------------------------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.row("H15")
@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("name", ["none", *HAS_OVERRIDE])
def test_h15_casting_after_the_split_is_casting_group_by_group_in_the_compute_dtype(name, override):
    recipe, x = recipe_of(name, override), randn(128, K, dtype=torch.float32)
    op = grouped(4, torch.float32)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        found, wanted = step(op, x, EVEN, recipe), linears(op, x, EVEN, recipe)
        whole = step(grouped(1, torch.float32), x, (128,), recipe)
    assert found["output"].dtype == BF16
    assert found["grad of input"].dtype == torch.float32
    assert differences(found, wanted) == []
    single = ops.Linear(K, N)
    single.load_state_dict({"weight": op.weight0, "bias": grouped(1, torch.float32).bias0}, strict=False)
    low = torch.autocast(torch.get_default_device().type, torch.bfloat16)
    with low, opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        assert same(single(x).detach(), whole["output"])


def test_names_are_those_of_te_ops():
    assert list(grouped(2).state_dict()) == ["weight0", "weight1", "bias0", "bias1"]
    assert list(grouped(2, single_grouped_weight=True, bias=False).state_dict()) == ["weight"]
    assert (grouped(2).num_extra_inputs, grouped(2, scale_bias=True).num_extra_inputs) == (1, 2)
    assert grouped(2, bias=False, scale_bias=True).num_extra_inputs == 1
    assert {role.module_type for role in grouped(2).get_quantizer_roles("forward")} == {"grouped_linear"}


def test_a_state_loads_whichever_way_weights_are_held():
    apart, single = (grouped(3, **form) for form in FORMS.values())
    for p in apart.parameters():
        torch.nn.init.normal_(p)
    single.load_state_dict(apart.state_dict())
    assert same(single.weight.detach(), torch.stack(weights_of(apart)).detach())
    back = grouped(3)
    back.load_state_dict(single.state_dict())
    assert [same(a.detach(), b.detach()) for a, b in zip(back.parameters(), apart.parameters())] == [True] * 6
    back.load_state_dict(apart.state_dict())


def test_equal_seeds_draw_equal_weights_whichever_way_they_are_held():
    apart, single = (grouped(3, **form) for form in FORMS.values())
    assert same(single.weight.detach(), torch.stack(weights_of(apart)).detach())


@pytest.mark.row("X01")
def test_x01_splits_are_data_and_the_number_of_groups_is_not():
    model, x = ops.Sequential(grouped(4)), randn(128, K)
    with opfuse.autocast(recipe=recipe_of("mxfp8", "dequantized")):
        outputs = [model(x, torch.tensor(splits)) for splits in (EVEN, RAGGED, (0, 0, 0, 128))]
    info = model.cache_info()
    assert (info.plans, info.hits, info.misses) == (1, 2, 1)
    assert not same(outputs[0].detach(), outputs[1].detach())
    fusers = [ops.Sequential(grouped(n)).runs()[0] for n in (4, 5, 4)]
    assert len({fuser.structure for fuser in fusers}) == 2
    assert len({ops.Sequential(grouped(4, pad_splits=pad)).runs()[0].structure for pad in (False, True)}) == 2


def test_splits_may_be_a_list_or_int32_and_changed_in_place():
    op, x = grouped(4), randn(128, K)
    wanted = op(x, torch.tensor(EVEN))
    assert same(op(x, list(EVEN)), wanted)
    splits = torch.tensor(EVEN, dtype=torch.int32)
    assert same(op(x, splits), wanted)
    splits.copy_(torch.tensor(RAGGED))
    assert same(op(x, splits), op(x, torch.tensor(RAGGED)))


ERRORS = {
    "sum": (torch.tensor([64, 0, 32, 33]), errors.ShapeError, "the sum 128"),
    "negative": (torch.tensor([64, -32, 64, 32]), errors.ShapeError, "numbers of rows"),
    "groups": (torch.tensor([64, 64]), errors.ShapeError, r"shape \(4,\)"),
    "dtype": (torch.tensor([64.0, 0, 32, 32]), errors.DtypeError, "int64 or int32"),
}


@pytest.mark.parametrize("recipe", ["none", "mxfp8"])
@pytest.mark.parametrize("wrong", ERRORS)
def test_splits_that_do_not_fit_are_refused(wrong, recipe):
    splits, error, text = ERRORS[wrong]
    made = recipe_of(recipe, None)
    with opfuse.autocast(enabled=made is not None, recipe=made), pytest.raises(error, match=text) as caught:
        grouped(4)(randn(128, K), splits)
    assert "GroupedLinear" in str(caught.value)


def test_arguments_that_do_not_fit_are_refused():
    with pytest.raises(errors.SpecError, match="num_groups"):
        ops.GroupedLinear(0, 8, 8)
    with pytest.raises(errors.ShapeError, match=r"\(\.\.\., 64\)"):
        grouped(2)(randn(4, 63), torch.tensor([2, 2]))
    with pytest.raises(errors.ShapeError, match="one scale for each row"):
        grouped(2, scale_bias=True)(randn(4, K), torch.tensor([2, 2]), randn(3))
    with pytest.raises(errors.PipelineError, match="2 extra inputs"):
        grouped(2, scale_bias=True)(randn(4, K), torch.tensor([2, 2]))
    with pytest.raises(errors.SpecError, match="at most num_groups=4"):
        ops.TokenDispatch(4, 8, top_k=5)
    with pytest.raises(errors.ShapeError, match="flatten"):
        ops.TokenDispatch(4, 8)(torch.ones(2, 3, 8))
    with pytest.raises(errors.ShapeError, match="places"):
        ops.TokenCombine()(torch.ones(3, 8), torch.tensor([[0], [1]]))


@pytest.mark.few(apart=True)
@pytest.mark.parametrize(("name", "override", "form"), in_turn(CASES, FORMS, of=2))
def test_delayed_weight_gradients_are_those_that_were_put_off(name, override, form):
    recipe, form, inputs = recipe_of(name, override), FORMS[form], [randn(128, K, seed=i) for i in range(2)]
    now, later = grouped(4, **form), grouped(4, delay_wgrad_compute=True, **form)
    for op in (now, later):
        for x in inputs:
            with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
                y = op(x, torch.tensor(EVEN))
            y.backward(randn(*y.shape, seed=100))
    assert all(later.parameter(name).grad is None for name in later.weight_names)
    copy.deepcopy(later).backward_dw()  # a copy owes nothing
    for _ in range(3):
        later.backward_dw()
    assert [key for key, p in now.named_parameters() if not same(p.grad, later.get_parameter(key).grad)] == []


# -- in pipelines --------------------------------------------------------------------------------------------------------


class Block(ops.FusedOperation):
    """Ops that a user runs together."""

    def fuser_forward(self, basic_op_ctxs, input_, **given):
        return super().fuser_forward(basic_op_ctxs, input_, **given)

    def fuser_backward(self, basic_op_ctxs, grad_output, **given):
        return super().fuser_backward(basic_op_ctxs, grad_output, **given)


@pytest.mark.few(apart=True)
@every_form
@pytest.mark.parametrize(("name", "override"), CASES)
def test_a_fused_op_of_the_user_casts_groups_as_the_pipeline_does(name, override, form):
    x, scales, recipe = randn(128, K), randn(128, seed=5), recipe_of(name, override)
    plain = step(grouped(4, scale_bias=True, **form), x, EVEN, recipe, scales=scales)
    fused = step(Block([grouped(4, scale_bias=True, **form)]), x, EVEN, recipe, scales=scales)
    renamed = {key.replace("basic_ops.0.", ""): value for key, value in fused.items()}
    assert differences(renamed, plain) == []


@pytest.mark.parametrize("name", HAS_OVERRIDE)
def test_what_was_quantized_as_one_tensor_is_cast_again_group_by_group(name):
    op, x, recipe = grouped(4), randn(128, K), recipe_of(name, None)
    quantizer = recipe.quantizer(QuantizerRole()).wanting(rowwise=True, columnwise=False)
    with opfuse.autocast(recipe=recipe):
        left, apart = ops.Sequential(ops.Quantize(), op)(x, torch.tensor(EVEN)), op(x, torch.tensor(EVEN))
        wanted = op(quantizer.quantize(x).dequantize(), torch.tensor(EVEN))
        given = op(quantizer(x), torch.tensor(EVEN))
    assert same(left.detach(), apart.detach())
    assert same(given.detach(), wanted.detach())


def moe(dtype: torch.dtype, groups: int = 4, top_k: int = 2, **options: object) -> ops.Sequential:
    torch.manual_seed(4)
    dispatch, combine = ops.TokenDispatch(groups, K, top_k=top_k, dtype=dtype), ops.TokenCombine()
    first, second = (ops.GroupedLinear(groups, *sizes, bias=False, dtype=dtype, **options) for sizes in ((K, 2 * N), (N, K)))
    act = ops.ScaledSwiGLU()
    for i, name in enumerate(("splits", "probabilities", "places")):
        dispatch.set_extra_output_channel(i, name, output_to_caller=False)
    for op, name in ((first, "splits"), (act, "probabilities"), (second, "splits"), (combine, "places")):
        op.set_extra_input_channel(0, name)
    return ops.Sequential(dispatch, first, act, second, combine)


def dense(model: ops.Sequential, x: torch.Tensor) -> torch.Tensor:
    """The mixture token by token, every expert for every token."""
    dispatch, first, _, second, _ = model
    p = torch.softmax(x @ dispatch.weight.t(), -1)
    kept = torch.zeros_like(p).scatter(1, p.topk(dispatch.top_k).indices, 1.0) * p
    y = torch.zeros_like(x)
    for i in range(dispatch.num_groups):
        a, b = (x @ getattr(first, f"weight{i}").t()).chunk(2, -1)
        y = y + kept[:, i, None] * ((a * torch.sigmoid(a) * b) @ getattr(second, f"weight{i}").t())
    return y


def test_a_mixture_of_experts_is_its_dense_formula():
    model, x = moe(torch.float64), torch.randn(37, K, dtype=torch.float64, requires_grad=True)
    wanted, found = dense(model, x), model(x)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    dy = torch.randn_like(wanted)
    parameters = (x, *model.parameters())
    for got, want in zip(torch.autograd.grad(found, parameters, dy), torch.autograd.grad(wanted, parameters, dy), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_the_gate_computes_in_fp32_under_torch_autocast(dtype):
    """The groups of every token, their p and the gradient of the gate are those without torch.autocast, p rounded once."""
    router, x = ops.TokenDispatch(16, K, top_k=2), torch.randn(256, K)
    found = []
    for enabled in (False, True):
        router.zero_grad()
        given = x.clone().requires_grad_()
        with torch.autocast(torch.get_default_device().type, dtype, enabled=enabled):
            rows, splits, p, places = router(given)
            p.backward(torch.arange(512.0).div(512).to(dtype).to(p.dtype))
        found.append((splits, places, p.to(dtype), rows.to(dtype), given.grad, router.weight.grad))
        assert (rows.dtype, p.dtype) == ((dtype, dtype) if enabled else (torch.float32, torch.float32))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.few(apart=True)
@pytest.mark.parametrize(("name", "override"), CASES)
def test_a_mixture_of_experts_trains_under_every_recipe(name, override):
    model, x = moe(BF16, pad_splits=True), randn(96, K).requires_grad_()
    recipe = recipe_of(name, override)
    exact = dense(copy.deepcopy(model).double(), x.detach().double()).detach()
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe), plans_used() as plans:
        y = model(x)
    y.backward(randn(*y.shape, seed=100))
    assert float((y.detach().double() - exact).norm() / exact.norm()) < (0.3 if name == "nvfp4" else 0.1)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in (x, *model.parameters()))
    assert {"epilogue", "epilogue_groups"} & {*plans[0].fusions}  # the second also has the cast that follows


def test_channels_of_splits_are_as_good_as_splits_of_the_caller():
    model, x = moe(BF16), randn(96, K)
    dispatch, first, _, second, _ = model
    alone = [ops.GroupedLinear(4, op.in_features, op.out_features, bias=False, dtype=BF16) for op in (first, second)]
    for op, source in zip(alone, (first, second)):
        op.load_state_dict(source.state_dict())
    router = ops.TokenDispatch(4, K, top_k=2, dtype=BF16)
    router.load_state_dict(dispatch.state_dict())
    rows, splits, p, places = router(x)
    parts = ops.Sequential(alone[0], ops.ScaledSwiGLU(), alone[1])
    assert same(ops.TokenCombine()(parts(rows, splits, p, splits), places).detach(), model(x).detach())


@pytest.mark.row("B31")
def test_b31_bytes_saved_are_told_for_every_override():
    op, x = grouped(4, bias=False), randn(128, K).requires_grad_()
    with opfuse.autocast(recipe=recipe_of("mxfp8", None)):
        found = opfuse.saved(op, x, torch.tensor(EVEN))
    values = {value.name: value for value in found.values}
    assert values["x"].usages == ("columnwise",)
    assert values["x"].bytes > 128 * K
    assert found.by_override["high_precision"].own == 0


@pytest.mark.row("D10")
def test_d10_the_benchmark_measures_the_listed_shapes_forward_and_backward_under_every_override(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    benchmark = importlib.import_module("grouped")
    assert (benchmark.ROWS, benchmark.GROUPS, benchmark.IN, benchmark.OUT) == ((16384, 32768, 65536, 98304), (4, 8), 7168, 2048)
    assert set(benchmark.OVERRIDES) == set(OVERRIDES)
    calls = []
    found = list(benchmark.measure(lambda call: calls.append(call()) or 1.0, rows=(256,), sizes=(K, N), device="cpu"))
    kinds = [name for name in HAS_OVERRIDE if name in recipes.RECIPES]
    assert len(found) == len(calls) == 2 * 2 * (6 + 3 * len(kinds))
    assert {(r["groups"], r["what"]) for r in found} == {(n, what) for n in (4, 8) for what in ("forward", "forward + backward")}
    assert {r["variant"] for r in found} >= {f"{name}, {override}" for name in kinds for override in OVERRIDES}
    assert json.loads(json.dumps(found)) == found
