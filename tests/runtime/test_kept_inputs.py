"""``opfuse.checkpoint(…, keep_inputs=recipe)``: what a checkpoint keeps, in low precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import opfuse
from opfuse import ops, recipes
from opfuse.errors import PipelineError, RecipeError
from opfuse.recipes import QuantizerRole
from tests.ops.test_op_errors import raised

RECIPES = {
    "fp8_current": recipes.Float8CurrentScaling(),
    "fp8_block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(disable_rht=True),
}
every = pytest.mark.parametrize("kind", RECIPES)
both = pytest.mark.parametrize("reentrant", [False, True])


def pipeline() -> ops.Sequential:
    torch.manual_seed(0)
    return ops.Sequential(ops.Linear(128, 256), ops.GELU(), ops.Linear(256, 128)).bfloat16()


def given(rows: int = 128) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, 128, dtype=torch.bfloat16, requires_grad=True)


def decoded(x: torch.Tensor, recipe: recipes.Recipe) -> torch.Tensor:
    return recipe.quantizer(QuantizerRole()).wanting(rowwise=True, columnwise=False)(x.detach()).dequantize()


class Layer(nn.Module):
    """A residual layer: its input is read by a norm and by a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(128), nn.Linear(128, 128)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.tanh(self.linear(self.norm(x)))
        return x + (y if scale is None else y * scale)


@pytest.mark.cpu
@both
@pytest.mark.parametrize("kind", ["fp8_current", "mxfp8"])
def test_the_bits_are_those_of_the_forward_pass_where_a_cast_is_all_that_reads_the_input(kind, reentrant):
    model, x, recipe = pipeline(), given(), RECIPES[kind]
    found = []
    for keep in (None, recipe):
        model.zero_grad()
        x.grad = None
        with opfuse.autocast(recipe=recipe):
            y = opfuse.checkpoint(model, x, use_reentrant=reentrant, keep_inputs=keep)
        y.sum().backward()
        found.append([y, x.grad, *[p.grad for p in model.parameters()]])
    assert all(map(torch.equal, *found))


@pytest.mark.cpu
@both
@every
def test_elsewhere_gradients_are_those_at_the_rounded_input(kind, reentrant):
    torch.manual_seed(0)
    layer, x, recipe = Layer(), given().float().detach().requires_grad_(), RECIPES[kind]
    y = opfuse.checkpoint(layer, x, use_reentrant=reentrant, keep_inputs=recipe)
    assert torch.equal(y, layer(x))
    y.backward(x.detach())
    got = [x.grad, *[p.grad for p in layer.parameters()]]
    rounded = decoded(x, recipe).requires_grad_()
    want = torch.autograd.grad(layer(rounded), [rounded, *layer.parameters()], x.detach())
    assert all(map(torch.equal, got, want))
    assert not torch.equal(rounded, x)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, recipe: recipes.Recipe | None) -> None:
        super().__init__()
        self.inner, self.recipe = inner, recipe

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return opfuse.checkpoint(self.inner, x * 1, *others, keep_inputs=self.recipe)


@pytest.mark.cpu
@every
def test_it_keeps_a_half_of_the_bytes_or_less_and_saved_counts_them(kind):
    recipe, x = RECIPES[kind], given()
    with opfuse.autocast(recipe=recipe):
        whole, kept = (opfuse.saved(Checkpointed(pipeline(), each), x).totals.bytes for each in (None, recipe))
    planes = recipe.quantizer(QuantizerRole()).wanting(rowwise=True, columnwise=False)(x.detach()).record.tensors()
    assert whole == x.nbytes
    assert kept == sum(plane.nbytes for plane in planes) < 0.55 * whole


@pytest.mark.cpu
def test_only_what_wants_a_gradient_and_fits_the_format_is_cast():
    """A mask of large negative numbers would be lost by one scale; so would a vector, and rows that no block divides."""
    kept = []

    def function(*tensors: torch.Tensor | None) -> torch.Tensor:
        kept.append(tensors)
        return sum(tensor.float().square().sum() for tensor in tensors)

    mask = torch.full((128, 128), -1e9)
    vector, weight = torch.randn(128, requires_grad=True), nn.Parameter(torch.randn(128, 128))
    double, odd, x = (torch.randn(*size, requires_grad=True) for size in ((64, 32), (64, 33), (64, 32)))
    tensors = mask, vector, weight, double.double(), odd * 1, x * 1
    opfuse.checkpoint(function, *tensors, keep_inputs=RECIPES["mxfp8"]).backward()
    forward, again = kept
    assert all(map(torch.equal, forward, tensors))
    assert [torch.equal(one, other) for one, other in zip(again, tensors)] == [True] * 5 + [False]
    assert torch.equal(again[-1], decoded(tensors[-1], RECIPES["mxfp8"]))


@pytest.mark.cpu
def test_a_checkpoint_in_a_checkpoint_and_torchs_wrapper_have_the_same_gradients():
    torch.manual_seed(0)
    layers, x, recipe = [Layer(), Layer()], given().float().detach().requires_grad_(), RECIPES["mxfp8"]

    def gradients(call) -> list[torch.Tensor]:
        parameters = [x, *(p for layer in layers for p in layer.parameters())]
        return [*torch.autograd.grad(call(x).square().sum(), parameters)]

    def inner(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = opfuse.checkpoint(layer, x, keep_inputs=recipe)
        return x

    wrapped = [checkpoint_wrapper(layer, checkpoint_fn=opfuse.checkpoint, keep_inputs=recipe) for layer in layers]
    one = gradients(inner)
    assert all(map(torch.equal, one, gradients(lambda x: wrapped[1](wrapped[0](x)))))
    outer = gradients(lambda x: opfuse.checkpoint(inner, x))
    assert all(torch.isfinite(grad).all() for grad in outer)
    torch.testing.assert_close(outer, one, rtol=0.1, atol=0.1)


@pytest.mark.cpu
def test_what_is_no_recipe_for_it_is_refused():
    model, x = pipeline(), given()
    with raised(RecipeError, ValueError, "finds scales in the tensor", "DelayedScaling, which scales by earlier steps"):
        opfuse.checkpoint(model, x, keep_inputs=recipes.DelayedScaling())
    with raised(PipelineError, ValueError, "wants a recipe", "got str"):
        opfuse.checkpoint(model, x, keep_inputs="fp8_block")
