"""Tensors with torch's negative bit, as ``z.conj().imag`` has it: their values are those that lie in memory, negated."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_map_only

import opfuse
from opfuse import ops, recipes
from opfuse.core.fused import FusedOperation
from opfuse.errors import UnsupportedError
from opfuse.kernels.engine.registry import Kernel
from opfuse.runtime.replay.dispatch import interpreted
from tests.compiler.harness import generator_of
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


@pytest.fixture(autouse=True)
def kernels_of_a_device(monkeypatch):
    """Kernels read what lies in memory, as those of a GPU do; the definitions, which run on a CPU, are torch's own ops."""

    def call(self, *args, **kwargs):
        lying = tree_map_only(torch.Tensor, lambda each: torch._neg_view(each) if each.is_neg() else each, (args, kwargs))
        return self.reference(*lying[0], **lying[1])

    monkeypatch.setattr(Kernel, "__call__", call)


class Turned(ops.BasicOperation):
    """An op whose result and gradient have the bit, as it computes both with complex numbers."""

    saves = ()

    def op_forward(self, ctx, x):
        ctx.save()
        return torch.complex(x, -x).conj().imag

    def op_backward(self, ctx, dy):
        return torch.complex(dy, -dy).conj().imag, ()


class TurnedTwice(FusedOperation):
    """The same of a fused op."""

    def fuser_forward(self, contexts, x, *, basic_op_extra_inputs, **rest):
        for context in contexts:
            context.save()
        return torch.complex(x, -x).conj().imag, [() for _ in contexts]

    def fuser_backward(self, contexts, dy, *, basic_op_grad_extra_outputs):
        return torch.complex(dy, -dy).conj().imag, [() for _ in contexts], [() for _ in contexts]


def negative(seed: int) -> torch.Tensor:
    generator = generator_of(seed)
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


@pytest.mark.few(apart=True)
@pytest.mark.parametrize(("place", "how", "recipe"), in_turn((0, 1, 2), ("repeated", "interpreted", "compiled"), RECIPES, of=4))
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


@pytest.mark.few
@pytest.mark.parametrize("turned", [Turned, lambda: TurnedTwice([ops.Identity(), ops.Identity()])], ids=["an op", "a fused op"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_results_of_an_op_count_and_not_what_lies_in_memory(recipe, turned):
    """Of an op of the user's own and its gradient, in every run."""

    def ended(between):
        torch.manual_seed(0)
        return ops.Sequential(ops.GELU(), ops.RMSNorm(64), between, ops.RMSNorm(64), ops.GELU(), ops.Linear(64, 64))

    one, other = ended(turned()), ended(ops.Identity())
    for i in range(ROUNDS):
        x, grad = (negative(2 * i + j).resolve_neg().contiguous() for j in range(2))
        found = []
        for model in (one, other):
            leaf = x.clone().requires_grad_()
            with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
                y = model(leaf)
            y.backward(grad)
            found.append([y, leaf.grad, *(p.grad for p in model.parameters())])
            model.zero_grad()
        assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    "call", [lambda model: model, lambda model: torch.compile(model, backend="aot_eager")], ids=["", "compiled"]
)
@pytest.mark.parametrize("assigned", [False, True], ids=["in a first call", "later"])
@pytest.mark.cpu
def test_a_parameter_is_refused(assigned, call):
    model, x = ops.Sequential(ops.RMSNorm(64), ops.GELU()), torch.ones(64, 64)
    run, given = call(model), torch.nn.Parameter(negative(0)[0])
    if assigned:
        run(x)
        model[0].weight.data = given.data
    else:
        model[0].weight = given
    with raised(UnsupportedError, RuntimeError, r"wants a parameter|wants parameters", r"as \w+ lies? in memory", "negative bit"):
        run(x)
    model[0].weight.data = given.data.resolve_neg()
    assert torch.equal(run(x), model(x))
