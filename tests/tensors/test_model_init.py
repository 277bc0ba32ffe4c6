"""Parameters made under ``quantized_model_init``."""

from __future__ import annotations

import pytest
import torch

import opfuse
from opfuse import ops, recipes
from opfuse.errors import OpfuseWarning
from opfuse.tensors import QuantizedTensor


@pytest.mark.parametrize("kind", ["fp8_current", "fp8_block", "mxfp8", "nvfp4", "delayed"])
def test_weight_is_the_cast_of_the_preserved_initial_value(kind: str) -> None:
    recipe = recipes.recipe_of(kind, {})
    with opfuse.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        linear = ops.Linear(128, 128, dtype=torch.bfloat16)
    weight = linear.weight
    assert isinstance(weight, torch.nn.Parameter)
    assert isinstance(weight, QuantizedTensor)
    value = weight.get_high_precision_init_val()
    assert value is not None
    assert value.device == torch.device("cpu")
    value = value.to(weight.device)
    assert torch.equal(weight.quantizer.quantize(value).dequantize(), weight.dequantize())
    assert weight.usages == ("rowwise", "columnwise")
    weight.clear_high_precision_init_val()
    assert weight.get_high_precision_init_val() is None


def test_nothing_is_preserved_unasked_and_nothing_quantized_when_disabled() -> None:
    with opfuse.quantized_model_init(recipe=recipes.MXFP8BlockScaling()):
        assert ops.Linear(32, 32).weight.get_high_precision_init_val() is None
    with opfuse.quantized_model_init(enabled=False, recipe=recipes.MXFP8BlockScaling()):
        assert type(ops.Linear(32, 32).weight) is torch.nn.Parameter


@pytest.mark.parametrize(("kind", "moved", "way"), [("mxfp8", 0.045, 0.009), ("fp8_current", 1.0, 0.017)])
def test_steps_below_half_a_step_of_the_format_are_lost(kind: str, moved: float, way: float) -> None:
    """What the warning is of. moved: the part of the weights that change; way: how far they come of the way."""
    torch.manual_seed(0)
    with opfuse.quantized_model_init(recipe=recipes.recipe_of(kind, {})):
        weight = ops.Linear(512, 128, bias=False, device="cpu").weight  # how far depends on the largest of its random values
    before = weight.dequantize().detach().clone()
    weight.grad = torch.ones_like(before)
    optimizer = torch.optim.AdamW([weight], lr=1e-4)
    with pytest.warns(OpfuseWarning, match=r"with_masters\(optimizer\)") as warned:
        [optimizer.step() for _ in range(100)]
    assert len(warned) == 100  # Python's filters show the first alone
    change = weight.dequantize().detach() - before
    assert (change != 0).float().mean().item() == pytest.approx(moved, rel=0.1)
    assert (change / -0.01).mean().item() == pytest.approx(way, rel=0.1)
