"""The inspector of saved values: what autograd's own hooks see, named, with the memory that each value is in."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import opfuse
from opfuse import ops, recipes
from opfuse.errors import DtypeError, OpfuseError, PipelineError
from opfuse.inspect.saved import Saved
from opfuse.tensors.quantizers import Float8CurrentScalingQuantizer, MXFP8Quantizer, Quantizer
from tests.compiler.harness import HAS_OVERRIDE, OVERRIDES, generator_of, randn, recipe_for, to

BF16 = torch.bfloat16
ROWS, K, N = 64, 96, 160


def block() -> ops.Sequential:
    return to(ops.Sequential(ops.LayerNorm(K), ops.Linear(K, N), ops.GELU(), ops.Linear(N, K, bias=False)), BF16)


def call(recipe: recipes.Recipe | None, model: torch.nn.Module | None = None, *extras: torch.Tensor) -> Saved:
    x = randn(ROWS, K).requires_grad_()
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        return opfuse.saved(model or block(), x, *extras)


def counted(model: torch.nn.Module, x: torch.Tensor, recipe: recipes.Recipe | None) -> tuple[int, int]:
    """Bytes of distinct storages that hooks see in a real call: all but parameters, and all but parameters and the input."""
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        parts = tensor.record.tensors() if isinstance(tensor, opfuse.tensors.QuantizedTensor) else (tensor,)
        sizes.update({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts})
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        model(x)
    for parameter in model.parameters():
        parts = parameter.record.tensors() if isinstance(parameter, opfuse.tensors.QuantizedTensor) else (parameter,)
        for part in parts:
            sizes.pop(part.untyped_storage().data_ptr(), None)
    everything = sum(sizes.values())
    return everything, everything - sizes.get(x.untyped_storage().data_ptr(), 0)


class Checkpointed(torch.nn.Module):
    """A pipeline and a module of torch in an activation checkpoint, and a pipeline behind it. way: how the checkpoint runs."""

    def __init__(self, way: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.head, self.way = torch.nn.Sequential(block(), torch.nn.GELU()), to(ops.Linear(K, N), BF16), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.way(self.inner, x))  # type: ignore[no-any-return]


@pytest.mark.few
@pytest.mark.parametrize("name", ["none", "delayed", "mxfp8"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.cpu
def test_what_a_checkpoint_in_the_model_recomputes_is_not_held(name: str, reentrant: bool) -> None:
    """Held are its input, whatever runs in it, and what the pipeline behind it saves."""
    recipe = recipe_for(name)
    model = Checkpointed(partial(checkpoint, use_reentrant=reentrant))
    found, plain = call(recipe, model), call(recipe, Checkpointed(lambda inner, x: inner(x)))
    assert found.totals == counted(model, randn(ROWS, K).requires_grad_(), recipe)
    (held,) = [value for value in found.values if value.op == "torch"]
    assert (held.memory, held.shape, held.bytes) == ("input", (ROWS, K), ROWS * K * 2)
    inside = (ROWS, N)  # of the wide activation
    assert inside in {value.shape for value in plain.values} - {value.shape for value in found.values}
    assert plain.totals.own > 2 * found.totals.own


@pytest.mark.row("B31")
@pytest.mark.parametrize("name", ["none", "delayed", *HAS_OVERRIDE])
def test_b31_totals_are_those_of_a_real_call_under_every_override(name):
    found = call(recipe_for(name))
    assert found.totals == counted(block(), randn(ROWS, K).requires_grad_(), recipe_for(name))
    assert found.baseline == counted(block(), randn(ROWS, K).requires_grad_(), None)
    assert list(found.by_override) == ([] if name == "none" else [str(override) for override in OVERRIDES])
    for override in OVERRIDES if name in HAS_OVERRIDE else ():
        want = counted(block(), randn(ROWS, K).requires_grad_(), recipe_for(name, override))
        assert found.by_override[str(override)] == want
    assert list(found.by_keep) == ([] if name == "none" else ["None", "all", "recompute", "quantized"])
    for keep in ("all", "recompute", "quantized") if name != "none" else ():
        want = counted(block(), randn(ROWS, K).requires_grad_(), recipe_for(name, keep=keep))
        assert found.by_keep[keep] == want
        assert want[1] > found.totals.own if keep == "all" else want[1] < found.totals.own
    if name == "delayed":
        assert found.by_override["None"] == found.totals
        for override in OVERRIDES[1:]:
            assert f"got backward_override={override!r}" in found.by_override[override].reason


@pytest.mark.row("B11", "B31")
@pytest.mark.parametrize("override", OVERRIDES)
def test_b11_b31_every_value_with_its_planes(override):
    found = call(recipes.MXFP8BlockScaling(backward_override=override))
    usage = {None: ("columnwise",), "dequantized": ("rowwise",), "high_precision": ()}[override]
    got = [(v.op.partition(":")[2], v.name, v.format, v.usages, v.dtype, v.shape) for v in found.values]
    form = "mxfp8_e4m3" if usage else "plain"
    assert got == [
        ("layer_norm", "x", "plain", (), "bfloat16", (ROWS, K)),
        ("layer_norm", "weight", "plain", (), "bfloat16", (K,)),
        ("layer_norm", "mean", "plain", (), "float32", (ROWS,)),
        ("layer_norm", "rstd", "plain", (), "float32", (ROWS,)),
        ("basic_linear", "x", form, usage, "bfloat16", (ROWS, K)),
        ("basic_linear", "w", "plain", (), "bfloat16", (N, K)),
        ("gelu", "x", "plain", (), "bfloat16", (ROWS, N)),
        ("basic_linear", "x", form, usage, "bfloat16", (ROWS, N)),
        ("basic_linear", "w", "plain", (), "bfloat16", (K, N)),
    ]
    assert [v.memory for v in found.values] == [
        *("input", "parameter 0.weight", "own", "own", "own", "parameter 1.weight", "own", "own", "parameter 3.weight")
    ]
    assert found.totals.bytes == sum(v.bytes for v in found.values if not v.memory.startswith("parameter"))
    assert found.totals.bytes - found.totals.own == ROWS * K * 2


def test_memory_that_two_hold_is_counted_once_and_named_by_the_first():
    """A module of torch saves its output, of which the next pipeline saves a view."""
    between = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Unflatten(0, (2, -1)))
    found = call(None, torch.nn.Sequential(ops.Sequential(ops.SiLU()), between, ops.Sequential(ops.SReLU())))
    first, second, plain = found.values
    assert (first.name, first.memory, second.memory) == ("x", "input", "own")
    assert first.op != second.op
    assert (plain.op, plain.name, plain.memory) == ("torch", "", f"{second.op} x")
    assert found.totals == (2 * ROWS * K * 2, ROWS * K * 2)


@pytest.mark.parametrize("name", ["fp8_current", "nvfp4"])
def test_a_quantized_parameter_is_its_own_memory(name):
    with opfuse.quantized_model_init(recipe=recipe_for(name)):
        model = ops.Sequential(ops.Linear(K, N, dtype=BF16))
    found = call(recipe_for(name), model)
    (x, w) = found.values
    assert (w.name, w.memory, w.usages) == ("w", "parameter 0.weight", ("rowwise", "columnwise"))
    assert w.bytes == model[0].weight.record.nbytes
    assert found.totals == (x.bytes, x.bytes)


def test_values_are_plain_for_json_and_told_as_text():
    found = call(recipes.Float8CurrentScaling(backward_override="dequantized"))
    values = json.loads(json.dumps(found.to_dict()))
    assert values["bytes"] == found.totals.bytes
    assert values["by_override"]["high_precision"]["own"] == found.by_override["high_precision"].own
    assert values["baseline"] == {"dtype": "bfloat16", **found.baseline._asdict()}
    assert [value["name"] for value in values["values"]] == [value.name for value in found.values]
    text = str(found)
    for value in found.values:
        assert any(str(value.bytes) in line and line.endswith(value.memory) and value.op in line for line in text.splitlines())
    assert f"{found.by_override['None'].own / found.baseline.own:.1%} of bfloat16" in text
    assert f"keep=recompute {found.by_keep['recompute'].bytes:>32} bytes" in text
    assert "keep=None" not in text
    assert "keep=quantized                     refused: Float8CurrentScaling: wants another keep" in text


@pytest.mark.cpu
def test_what_gradients_pay_is_told_beside_the_bytes():
    """Of all parameters together, as a real step has them; what makes the same bits anew pays nothing."""
    model, x = block(), randn(ROWS, K)
    dy = torch.randn((ROWS, K), generator=generator_of(0)).to(BF16)

    def flat(recipe):
        with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x)
        return torch.cat([g.double().flatten() for g in torch.autograd.grad(y, [*model.parameters()], dy)])

    recipe = recipes.MXFP8BlockScaling(backward_override="dequantized")
    with opfuse.autocast(recipe=recipe):
        found = opfuse.saved(model, x, errors=True)
    exact = flat(None)
    for name, error in found.errors.items():
        field, value = name.split("=")
        off = flat(recipe.replace(**{field: None if value == "None" else value})) - exact
        assert error == pytest.approx(float(off.norm() / exact.norm()), rel=1e-6)
    assert f"gradients {found.errors['keep=None']:.1%} off" in str(found)
    assert found.errors["backward_override=high_precision"] < found.errors["backward_override=None"]
    assert json.loads(json.dumps(found.to_dict()))["errors"] == found.errors
    assert all(p.grad is None for p in model.parameters())
    assert call(recipe).errors == {}
    assert opfuse.saved(model, x, errors=True).errors == {}


@pytest.mark.parametrize("told", [False, True])
def test_the_callers_main_grad_is_left_alone_and_its_gradient_counts(told):
    """What looks at a training call adds to a buffer of its own."""
    plain, model = (ops.Sequential(ops.Linear(K, K, bias=False, accumulate_into_main_grad=main)) for main in (False, True))
    model.load_state_dict(plain.state_dict())
    x, (weight,) = randn(ROWS, K), model.parameters()
    buffer = weight.main_grad = torch.full((K, K), 3.0)
    if told:
        weight.grad_added_to_main_grad = False
    with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()):
        want, found = (opfuse.saved(each, x, errors=True).errors for each in (plain, model))
        opfuse.host_times(model, x, calls=1)
    assert found == pytest.approx(want, rel=1e-6)
    assert found["keep=None"] > 0
    assert weight.main_grad is buffer
    assert (buffer == 3).all()
    assert getattr(weight, "grad_added_to_main_grad", None) == (False if told else None)


@pytest.mark.row("B31")
@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float16])
def test_b31_the_baseline_is_the_same_call_in_its_own_dtype(dtype):
    x, model = randn(ROWS, K).to(dtype).requires_grad_(), to(block(), dtype)
    with opfuse.autocast(recipe=recipe_for("mxfp8")):
        found = opfuse.saved(model, x)
    name = str(dtype).removeprefix("torch.")
    assert (found.dtype, found.baseline) == (name, counted(to(block(), dtype), x, None))
    assert f"{name}, no recipe" in str(found)
    model[0].to(torch.float64 if dtype is torch.float32 else torch.float32)
    assert opfuse.saved(model, x).dtype == "mixed dtypes"


# -- settings that refuse the call ----------------------------------------------------------------------------------------------


def ragged() -> tuple[torch.nn.Module, torch.Tensor]:
    """A call whose rows MXFP8 cannot cast columnwise."""
    return ops.Sequential(ops.Linear(K, N)), torch.randn(100, K, requires_grad=True)


def clashing(role: recipes.QuantizerRole) -> Quantizer:
    """Formats of gradients and operands that do not meet, which the forward pass never finds out."""
    return Float8CurrentScalingQuantizer(torch.float8_e5m2) if role.is_gradient else MXFP8Quantizer()


@pytest.mark.row("B31")
@pytest.mark.parametrize(
    ("make", "recipe", "reason"),
    [
        (ragged, recipes.MXFP8BlockScaling(), "divisible by 32 for columnwise mxfp8_e4m3 data, got 100"),
        (lambda: (block().float(), torch.randn(ROWS, K)), recipes.CustomRecipe(qfactory=clashing), "two formats of one family"),
    ],
    ids=["planes", "products"],
)
def test_b31_only_the_override_in_use_may_refuse_the_call(make, recipe, reason):
    model, x = make()
    with opfuse.autocast(recipe=recipe.replace(backward_override="dequantized")):
        found = opfuse.saved(model, x)
        explained = opfuse.explain(model, x, overrides=True)
    assert found.totals == found.by_override["dequantized"] == counted(model, x, recipe.replace(backward_override="dequantized"))
    refused = found.by_override["None"]
    assert reason in refused.reason
    assert explained.saved_by_override["None"] == refused
    for told in (str(found), str(explained)):
        assert [line for line in told.splitlines() if "backward_override=None" in line and line.endswith(str(refused))]
    assert json.loads(json.dumps(found.to_dict()))["by_override"]["None"] == {"refused": refused.reason}
    assert json.loads(json.dumps(explained.to_dict()))["saved_bytes_by_override"]["None"] == {"refused": refused.reason}
    with opfuse.autocast(recipe=recipe):
        for inspect in (opfuse.saved, opfuse.explain):
            with pytest.raises(OpfuseError, match=reason):
                inspect(model, x)


def test_a_model_that_needs_its_dtype_has_a_baseline():
    class Fixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = ops.SiLU(), torch.nn.Linear(K, N)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).float())

    found = opfuse.saved(Fixed(), torch.randn(ROWS, K, requires_grad=True))
    assert found.baseline == found.totals


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_buffers_stay_as_they_are_in_every_comparison(dtype):
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(K), ops.Linear(K, N)).to(dtype)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()):
        opfuse.saved(model, torch.randn(ROWS, K, dtype=dtype))
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("inspect", [opfuse.saved, opfuse.explain])
def test_what_is_no_call_of_a_pipeline_is_refused_by_name(inspect):
    x = randn(ROWS, K)
    for model, inputs, error, said in (
        (block(), ([1.0],), DtypeError, "input: wants a torch.Tensor, got list"),
        (torch.relu, (x,), PipelineError, "wants an nn.Module, got builtin_function_or_method"),
        (torch.nn.Linear(K, N, dtype=BF16), (x,), PipelineError, "wants a module that runs ops of opfuse, got Linear"),
        (ops.Sequential(), (x,), PipelineError, "wants a module that runs ops of opfuse, got Sequential"),
    ):
        with pytest.raises(error, match=f"inspected call.*{said}.*Cure: "):
            inspect(model, *inputs)


@pytest.mark.parametrize("inspect", [opfuse.saved, opfuse.explain])
def test_what_a_model_takes_besides_tensors_is_inspected_as_it_is_called(inspect):
    model, x = ops.GroupedLinear(2, K, N, dtype=BF16), randn(ROWS, K)
    listed, given = (
        inspect(model, x, splits) for splits in ([ROWS // 4, ROWS - ROWS // 4], torch.tensor([ROWS // 4, ROWS - ROWS // 4]))
    )
    assert str(listed) == str(given)


# -- inputs that are views ------------------------------------------------------------------------------------------------------

VIEWS = {
    "rows": lambda base: base[:ROWS, :K],
    "later rows": lambda base: base[ROWS:, :K],
    "columns": lambda base: base[:ROWS, 3 : K + 3],
    "transposed": lambda base: base.t()[:ROWS, :K],
    "repeated": lambda base: base[:1, :K].expand(ROWS, K),
    "whole": lambda base: base.flatten()[: ROWS * K].view(ROWS, K),
}


@pytest.mark.few
@pytest.mark.row("B31")
@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "computed"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_b31_a_view_counts_the_memory_that_it_keeps_alive(view, leaf, override):
    base = torch.randn(2 * ROWS, 2 * K, dtype=BF16)
    x = view(base).requires_grad_() if leaf else view(base.requires_grad_() * 2)
    model, recipe = (
        ops.Sequential(ops.SiLU(), ops.Linear(K, N, dtype=BF16)),
        recipes.MXFP8BlockScaling(backward_override=override),
    )
    with opfuse.autocast(recipe=recipe):
        found = opfuse.saved(model, x)
    assert found.totals == counted(model, x, recipe)
    assert found.baseline == counted(model, x, None)
    first = found.values[0]
    assert (first.memory, first.bytes) == ("input", ROWS * K * 2)
    assert found.totals.bytes - found.totals.own == x.untyped_storage().nbytes()


def test_inputs_that_share_memory_count_once():
    both = torch.randn(ROWS, 2 * K)
    x, scale = both[:, :K], both[:, K]
    found = opfuse.saved(ops.Sequential(ops.ScaledSReLU()), x.requires_grad_(), scale)
    assert [value.memory for value in found.values] == ["input", "input"]
    assert found.totals == (both.nbytes, 0)


def test_a_view_of_a_parameter_is_that_parameter_s_memory():
    model = ops.Sequential(ops.Linear(K, K, bias=False))
    found = opfuse.saved(model, model[0].weight.detach()[: K // 2].requires_grad_())
    assert {value.memory for value in found.values} == {"parameter 0.weight"}
    assert found.totals == (0, 0)


def test_nothing_is_saved_without_gradients():
    with torch.no_grad():
        found = call(recipes.MXFP8BlockScaling())
    assert found.values == ()
    assert found.totals == found.baseline == (0, 0)
    assert "0 bytes" in str(found)


def test_explain_shows_the_same_values():
    recipe = recipes.MXFP8BlockScaling()
    with opfuse.autocast(recipe=recipe):
        explained = opfuse.explain(block(), randn(ROWS, K).requires_grad_(), overrides=True)
    found = call(recipe)
    assert explained.saved == found.values
    assert explained.totals == found.totals
    assert explained.to_dict()["saved"] == found.to_dict()["values"]
    assert explained.saved_by_override == {name: totals.bytes for name, totals in found.by_override.items()}


@pytest.mark.parametrize("recipe", [None, recipes.DelayedScaling(), recipes.MXFP8BlockScaling(), recipes.NVFP4BlockScaling()])
def test_on_the_meta_device_bytes_are_those_of_a_call_with_memory(recipe: recipes.Recipe | None) -> None:
    model = block()
    model.append(ops.Dropout(0.5))
    x, on_meta = randn(ROWS, K), copy.deepcopy(model).to("meta")
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        wanted, found = opfuse.saved(model, x), opfuse.saved(on_meta, x.to("meta"))
        assert found.to_dict() == wanted.to_dict()
        assert found.totals.own > 0
        with pytest.raises(PipelineError, match="some on the meta device"):
            opfuse.saved(on_meta, x.to("meta"), errors=True)
