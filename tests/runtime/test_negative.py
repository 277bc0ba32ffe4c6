"""Tensors with torch's negative bit, as ``z.conj().imag`` has it: their values are those that lie in memory, negated."""

from __future__ import annotations

import pytest
import torch

import opfuse
from opfuse import ops, recipes
from opfuse.errors import UnsupportedError
from opfuse.runtime.programs import interpreted
from tests.ops.test_op_errors import raised
from tests.turns import in_turn

RECIPES = (
    None,
    recipes.DelayedScaling(amax_history_len=2),
    recipes.Float8CurrentScaling(),
    recipes.Float8BlockScaling(),
    recipes.MXFP8BlockScaling(backward_override="dequantized"),
    recipes.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
)
ROUNDS = 4  # interpreted, recorded, repeated, and with blocks of saved tensors


def negative(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    z = torch.view_as_complex(torch.randn(64, 64, 2, generator=generator).to(torch.get_default_device()))
    assert z.conj().imag.is_neg()
    return z.conj().imag


def trained(call, model, tensors, recipe):
    """Output and gradients of a step. tensors: input, extra input, incoming gradient."""
    x, extra, grad = tensors
    leaves = [each.detach().requires_grad_() for each in (x, extra)]
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        y = call(*leaves)
    y.backward(grad)
    found = [y.detach(), *(each.grad for each in leaves), *(p.grad for p in model.parameters())]
    model.zero_grad()
    return found


def model_of() -> ops.Sequential:
    torch.manual_seed(0)
    return ops.Sequential(ops.Linear(64, 64), ops.AddExtraInput(), ops.RMSNorm(64), ops.GELU(), ops.Linear(64, 64))


@pytest.mark.parametrize(("place", "how", "recipe"), in_turn((0, 1, 2), ("repeated", "interpreted", "compiled"), RECIPES, of=3))
def test_values_count_and_not_what_lies_in_memory(place, how, recipe):
    """Also where a program was recorded for tensors without the bit, which looks the same."""
    one, other = model_of(), model_of()
    call = torch.compile(one, backend="aot_eager") if how == "compiled" else one
    for i in range(ROUNDS):
        given = [negative(3 * i + j).resolve_neg().contiguous() for j in range(3)]
        odd = [*given]
        if i >= 1:
            odd[place] = torch._neg_view(-given[place])
        with interpreted():
            wanted = trained(other, other, given, recipe)
        with interpreted() if how == "interpreted" else torch.enable_grad():
            assert all(map(torch.equal, trained(call, one, odd, recipe), wanted))


@pytest.mark.parametrize("recipe", RECIPES[2:])
def test_a_quantizer_takes_them(recipe):
    quantizer, x = recipe.quantizer(recipes.QuantizerRole(tensor_type="input")), negative(0)
    assert torch.equal(quantizer(x).dequantize(), quantizer(x.resolve_neg()).dequantize())


def test_a_tensor_that_an_op_writes_into_is_refused():
    op, x = ops.AddExtraInput(in_place=True), torch.ones(64, 64)
    assert torch.equal(op(negative(0), x), x)
    with raised(UnsupportedError, RuntimeError, "as it lies in memory", "negative bit"):
        op(x, negative(0))
