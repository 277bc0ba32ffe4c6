"""A fused cast is of what the op would have read: the value in the op's compute dtype, not in that of its producer."""

from __future__ import annotations

import pytest
import torch

import opfuse
from opfuse import ops, recipes

KINDS = ("fp8_current", "fp8_block", "mxfp8", "nvfp4", "delayed")
PRODUCERS = {
    "norm": lambda: ops.RMSNorm(64),
    "layer norm": lambda: ops.LayerNorm(64),
    "linear and activation": lambda: ops.Sequential(ops.Linear(64, 64), ops.GELU()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("producer", PRODUCERS)
def test_fp32_producers_into_a_bf16_linear_are_rounded_before_the_cast(producer, kind):
    torch.manual_seed(0)
    first, last = PRODUCERS[producer](), ops.Linear(64, 64, dtype=torch.bfloat16)
    model = ops.Sequential(*(first if isinstance(first, ops.Sequential) else (first,)), last)
    x = torch.randn(256, 64)
    recipe = recipes.recipe_of(kind, {"disable_stochastic_rounding": True} if kind == "nvfp4" else {})
    with torch.no_grad(), opfuse.autocast(recipe=recipe):
        plain = first(x)
        got = model(x)
        assert plain.dtype == torch.float32
        assert torch.equal(got, last(plain.to(torch.bfloat16)))


def test_the_cast_of_the_rounded_value_has_other_bits():
    """The case above can fail: rounding first moves codes, so a cast of the fp32 value would show."""
    x = torch.randn(256, 64, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    for kind in ("fp8_current", "mxfp8"):
        quantizer = recipes.recipe_of(kind, {}).quantizer(recipes.QuantizerRole())
        assert not torch.equal(quantizer(x).dequantize(), quantizer(x.bfloat16()).dequantize().float())
