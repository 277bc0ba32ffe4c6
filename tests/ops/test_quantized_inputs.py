"""Inputs that the caller quantized: what the backward products of a linear layer read of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.errors import MissingPlaneError
from opfuse.recipes import CustomRecipe
from opfuse.tensors.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from tests.compiler.harness import OVERRIDES, randn

E4M3 = torch.float8_e4m3fn
QUANTIZERS: dict[str, Callable[[], Quantizer]] = {
    "fp8": lambda: Float8CurrentScalingQuantizer(E4M3),
    "block": lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=1),
    "mxfp8": MXFP8Quantizer,
    "nvfp4": NVFP4Quantizer,
}
HYBRID = HybridQuantizer(Float8CurrentScalingQuantizer(E4M3), Float8CurrentScalingQuantizer(torch.float8_e5m2))
INPUTS = {**{name: (name, make()) for name, make in QUANTIZERS.items()}, "hybrid": ("fp8", HYBRID)}
"""The format of the recipe, and the quantizer of the input."""


def layer(kind: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...], str]:
    torch.manual_seed(0)
    if kind == "grouped":
        return ops.GroupedLinear(1, 128, 64, bias=False, dtype=torch.bfloat16), (torch.tensor([128]),), "weight0"
    return ops.Linear(128, 64, bias=False, dtype=torch.bfloat16), (), "weight"


def gradient_and_exact(op: torch.nn.Module, extras: tuple, name: str, quantized: torch.Tensor, recipe: CustomRecipe) -> tuple:
    """dW of the op over a quantized input, and dy^T times the values that the input stands for."""
    with opfuse.autocast(recipe=recipe):
        y = op(quantized, *extras)
    dy = randn(*y.shape, seed=100)
    y.backward(dy)
    return getattr(op, name).grad, (dy.double().t() @ quantized.dequantize().double())


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


@pytest.mark.row("B05", "B06")
@pytest.mark.parametrize("override", OVERRIDES[1:])
@pytest.mark.parametrize("kind", ["linear", "grouped"])
@pytest.mark.parametrize("given", INPUTS)
def test_b05_b06_weight_gradients_read_the_values_of_an_input_that_came_quantized(given, kind, override):
    name, quantizer = INPUTS[given]
    recipe = CustomRecipe(qfactory=lambda _: QUANTIZERS[name](), backward_override=override)
    got, exact = gradient_and_exact(*layer(kind), quantizer(randn(128, 128)), recipe)
    assert error(got, exact) < 2**-8


@pytest.mark.row("B05")
def test_b05_an_input_that_carries_its_original_is_read_from_it():
    x, recipe = randn(128, 128), opfuse.recipes.MXFP8BlockScaling(backward_override="high_precision")
    got, _ = gradient_and_exact(*layer("linear"), HybridQuantizer(MXFP8Quantizer(), IdentityQuantizer())(x), recipe)
    assert torch.equal(got, randn(128, 64, seed=100).t() @ x)


@pytest.mark.row("U09")
@pytest.mark.parametrize("recipe", [opfuse.recipes.Float8CurrentScaling(), opfuse.recipes.DelayedScaling()], ids=lambda r: r.kind)
def test_u09_a_plane_that_can_be_derived_is(recipe):
    """Rowwise per-tensor FP8 holds all bytes: a Quantize called alone before a Linear called alone trains."""
    op, _, name = layer("linear")
    x = randn(128, 128)
    with opfuse.autocast(recipe=recipe):
        quantized = ops.Quantize()(x)
        y = op(quantized)
    assert quantized.record.usages == ("rowwise",)
    dy = randn(*y.shape, seed=100)
    y.backward(dy)
    assert error(getattr(op, name).grad, dy.double().t() @ quantized.dequantize().double()) < 0.1  # dy is cast


@pytest.mark.parametrize("override", OVERRIDES)
def test_rowwise_data_that_is_missing_is_refused_with_op_and_operand(override):
    op, _, _ = layer("linear")
    x = MXFP8Quantizer(rowwise=False)(randn(128, 128))
    recipe = opfuse.recipes.MXFP8BlockScaling(backward_override=override)
    with pytest.raises(MissingPlaneError, match=r"Linear\(.*\) input: wants rowwise data"), opfuse.autocast(recipe=recipe):
        op(x)


@pytest.mark.parametrize("override", OVERRIDES)
def test_groups_of_an_input_with_columnwise_data_alone_are_cast_anew(override):
    op, extras, _ = layer("grouped")
    with opfuse.autocast(recipe=opfuse.recipes.MXFP8BlockScaling(backward_override=override)):
        assert op(MXFP8Quantizer(rowwise=False)(randn(128, 128)), *extras).isfinite().all()
