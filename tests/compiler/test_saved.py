"""The inspector of saved values: what autograd's own hooks see, named, with the memory that each value is in."""

from __future__ import annotations

import json

import pytest
import torch

import opfuse
from opfuse import ops, recipes
from opfuse.compiler.saved import Saved
from tests.compiler.harness import HAS_OVERRIDE, OVERRIDES, randn, recipe_for, to

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
        parts = tensor.storage.tensors() if isinstance(tensor, opfuse.QuantizedTensor) else (tensor,)
        sizes.update({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts})
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        model(x)
    for parameter in model.parameters():
        parts = parameter.storage.tensors() if isinstance(parameter, opfuse.QuantizedTensor) else (parameter,)
        for part in parts:
            sizes.pop(part.untyped_storage().data_ptr(), None)
    everything = sum(sizes.values())
    return everything, everything - sizes.get(x.untyped_storage().data_ptr(), 0)


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
    if name == "delayed":
        assert found.by_override == {"None": found.totals, "dequantized": None, "high_precision": None}


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
        ("linear", "x", form, usage, "bfloat16", (ROWS, K)),
        ("linear", "w", form, usage, "bfloat16", (N, K)),
        ("gelu", "x", "plain", (), "bfloat16", (ROWS, N)),
        ("linear", "x", form, usage, "bfloat16", (ROWS, N)),
        ("linear", "w", form, usage, "bfloat16", (K, N)),
    ]
    weights = ["parameter 1.weight", "parameter 3.weight"] if override == "high_precision" else ["own", "own"]
    assert [v.memory for v in found.values] == [
        *("input", "parameter 0.weight", "own", "own", "own", weights[0], "own", "own", weights[1])
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
    assert w.bytes == model[0].weight.storage.nbytes
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
    assert "refused by this recipe" in str(call(recipes.DelayedScaling()))


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
