"""Pipelines as ops of a graph of torch.compile: the numbers of eager calls, no graph break, and nothing kept for too long."""

from __future__ import annotations

import copy
import itertools
import shutil

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import opfuse
from opfuse import ops, recipes
from opfuse.errors import SavedTensorError, UnsupportedError
from opfuse.runtime.compiled import held_calls
from tests.ops.test_op_errors import raised

pytestmark = pytest.mark.cpu
DELAYED = recipes.DelayedScaling(amax_history_len=2)
RECIPES = (
    None,
    DELAYED,
    recipes.Float8CurrentScaling(),
    recipes.Float8CurrentScaling(backward_override="high_precision"),
    recipes.Float8BlockScaling(),
    recipes.MXFP8BlockScaling(backward_override="dequantized"),
    recipes.NVFP4BlockScaling(disable_rht=True),  # which rounds gradients at random
)


class Model(nn.Module):
    """An embedding, pipelines with an extra input and an extra output, an op alone, and torch between them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 32)
        self.first = ops.Sequential(ops.RMSNorm(32), ops.MakeExtraOutput(), ops.Linear(32, 64), ops.SwiGLU())
        self.second = ops.Sequential(ops.Linear(32, 32, bias=False), ops.AddExtraInput(), ops.Linear(32, 32))
        self.last = ops.GELU()

    def forward(self, tokens):
        y, normed = self.first(torch.tanh(self.table(tokens)))
        return self.last(torch.sin(self.second(y, normed))) * 2


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    assert held_calls() == 0


def step(call, model, inputs, recipe):
    """Output, gradients and state of a step that starts with the same random numbers."""
    torch.manual_seed(1)
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        y = call(inputs)
    y.square().mean().backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    return [y.detach(), *grads, *model.state_dict().values()]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_every_recipe_trains_and_infers_with_the_numbers_of_eager_calls():
    """One graph for all recipes, one more when rows change, and the same two without gradients."""
    model = Model()
    eager, compiled = copy.deepcopy(model), torch.compile(model, backend="aot_eager", fullgraph=True)
    for rows, recipe in [*itertools.product((16, 32), RECIPES), (48, DELAYED)]:
        tokens = torch.randint(0, 16, (2, rows))
        assert same(step(compiled, model, tokens, recipe), step(eager, eager, tokens, recipe)), (recipe, rows)
        with torch.no_grad(), opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            assert torch.equal(compiled(tokens), eager(tokens))
    assert counters["stats"]["unique_graphs"] == 4
    assert not counters["graph_break"]
    assert model.first.cache_info()[:3] == eager.first.cache_info()[:3]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a compiler")
def test_inductor_compiles_what_is_around_a_pipeline():
    """Its own sums and functions round otherwise than eager ones; under a pipeline alone nothing does."""
    model = nn.Sequential(ops.RMSNorm(32), nn.ReLU(), ops.Sequential(ops.Linear(32, 64), ops.SwiGLU()), nn.ReLU())
    eager, compiled = copy.deepcopy(model), torch.compile(model, fullgraph=True)
    for recipe in RECIPES:
        x = torch.randn(32, 32)
        assert same(step(compiled, model, x, recipe), step(eager, eager, x, recipe)), recipe
    assert not counters["graph_break"]


def test_what_torch_autocast_says_in_compiled_code():
    model = ops.Sequential(ops.Linear(32, 32), ops.GELU())

    def call(x):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        return y.float() + model(x)

    compiled, x = torch.compile(call, backend="aot_eager", fullgraph=True), torch.randn(32, 32)
    assert same(step(compiled, model, x, None), step(call, model, x, None))


def test_parameters_that_ops_share_and_frozen_ones():
    model = ops.Sequential(ops.Linear(32, 32), ops.GELU(), ops.Linear(32, 32))
    model[2].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        x = torch.randn(32, 32, requires_grad=True)
        step_of = [
            [y.detach(), *torch.autograd.grad(y.sum(), [x, model[0].weight, model[2].bias])] for y in (compiled(x), model(x))
        ]
        assert same(*step_of)


# -- what is kept ----------------------------------------------------------------------------------------------------------------


def small():
    return ops.Sequential(ops.RMSNorm(32), ops.Linear(32, 32), ops.GELU())


def test_what_a_call_keeps_goes_with_its_graph():
    compiled, x = torch.compile(small(), backend="aot_eager", fullgraph=True), torch.randn(4, 32, requires_grad=True)
    y = compiled(x)
    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert held_calls() == 1
    assert torch.equal(first, *torch.autograd.grad(y.sum(), x))
    assert held_calls() == 0
    several = [compiled(x), compiled(x)]
    assert held_calls() == 2
    several.clear()
    assert held_calls() == 0
    with torch.no_grad():
        several.append(compiled(x))
    assert held_calls() == 0


def test_arguments_and_results_may_be_written_over():
    """As compilers do with memory that their graph reads no more."""
    model, (x, dy) = small(), torch.randn(2, 4, 32)
    wanted = torch.autograd.grad(model(x.requires_grad_()), [x, *model.parameters()], dy)
    tensors = [x, *model.parameters()]
    (run,) = model.runs()
    given = [tensors[0].detach().clone(), *tensors[1:]]
    y, token = torch.ops.opfuse.pipeline(given, [True] * len(given), 1, f"{run.handle}, call 0", None)
    y.detach().zero_()
    given[0].zero_()
    sizes, looks = [size for t in given for size in t.shape], [number for t in given for number in (t.ndim, 0)]
    with torch.no_grad():
        found = torch.ops.opfuse.pipeline_backward(token, [dy], sizes, looks, x.device)
        assert same(found, wanted)
        with raised(SavedTensorError, RuntimeError, "forward pass has kept", "a copy"):
            torch.ops.opfuse.pipeline_backward(token + 1, [dy], sizes, looks, x.device)


def test_a_parameter_that_changes_before_the_backward_pass():
    model = small()
    y = torch.compile(model, backend="aot_eager", fullgraph=True)(torch.randn(4, 32, requires_grad=True))
    with torch.no_grad():
        model[1].weight.add_(1)
    with raised(SavedTensorError, RuntimeError, "as the forward pass left them", "changed in place"):
        y.sum().backward()


# -- checkpoints -----------------------------------------------------------------------------------------------------------------


@pytest.mark.row("H26")
def test_checkpoints_around_what_is_compiled_and_inside_of_it():
    """Under delayed scaling, whose scales have moved when the backward pass runs, and which would count amaxes twice."""
    results = []
    for around in (None, False, True):
        torch.manual_seed(0)
        model = small()
        call = compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        if around is not None:
            call = lambda x, c=compiled, around=around: checkpoint(c, x, use_reentrant=around)  # noqa: E731
        for i in range(3):
            x = torch.full((16, 32), 1.0 + i).requires_grad_()
            result = [*step(call, model, x, DELAYED), x.grad]
        results.append(result)
    assert same(results[0], results[1])
    assert same(results[0], results[2])
    inside = torch.compile(lambda x: checkpoint(model, x, use_reentrant=False), backend="aot_eager", fullgraph=True)
    with raised(UnsupportedError, RuntimeError, "a call that runs once", "a checkpoint inside"):
        step(inside, model, x, DELAYED)


# -- what is no op of a graph ----------------------------------------------------------------------------------------------------


def test_other_parameters_than_those_of_the_ops_are_refused():
    model, x = small(), torch.randn(4, 32)

    def call(x, weight):
        return torch.func.functional_call(model, {"1.weight": weight}, (x,))

    with raised(UnsupportedError, RuntimeError, "parameters of its ops", "functional_call"):
        torch.compile(call, backend="eager", fullgraph=True)(x, torch.zeros(32, 32))


def test_lists_within_lists_with_modules_between():
    inner = ops.Sequential(
        ops.Linear(32, 32), ops.AddExtraInput(), nn.ReLU(), ops.Sequential(ops.Dropout(0.5), ops.MakeExtraOutput())
    )
    model, x = ops.Sequential(nn.Linear(32, 32), inner, ops.GELU()), torch.randn(4, 32)
    calls = torch.compile(model, backend="aot_eager", fullgraph=True), copy.deepcopy(model)
    results = []
    for call in calls:
        torch.manual_seed(1)
        results.append(call(x, x))
    assert same(*results)


def test_a_list_that_changes_and_a_copy_are_compiled_anew():
    model, x = small(), torch.randn(4, 32)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))
    model.append(ops.ReLU())
    assert torch.equal(compiled(x), model(x))
    other = copy.deepcopy(model)
    assert len({other.handle, model.handle, *(run.handle for each in (other, model) for run in each.runs())}) == 4
    with torch.no_grad():
        other[1].weight.zero_()
    assert torch.equal(torch.compile(other, backend="eager", fullgraph=True)(x), other(x))


@torch.no_grad()
def test_a_quantized_input_breaks_the_graph():
    quantize, model = ops.Sequential(ops.Quantize()), ops.Sequential(ops.Linear(32, 32), ops.GELU())
    with opfuse.autocast(recipe=recipes.Float8CurrentScaling()):
        x = quantize(torch.randn(32, 32))
        assert type(x) is not torch.Tensor
        assert torch.equal(torch.compile(model, backend="eager")(x), model(x))


class ReadsValues(ops.BasicOperation):
    """Its forward cannot run without memory."""

    def op_forward(self, ctx, input_, **_):
        return input_ * float(input_.numpy().max())

    def op_backward(self, ctx, grad_output):
        return grad_output, ()


@torch.no_grad()
def test_an_op_that_needs_memory_to_run_breaks_the_graph():
    model, x = ops.Sequential(ops.Linear(32, 32), ReadsValues()), torch.randn(4, 32)
    assert torch.equal(torch.compile(model, backend="eager")(x), model(x))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, backend="eager", fullgraph=True)(x)
