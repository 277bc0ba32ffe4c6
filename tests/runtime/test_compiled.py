"""Pipelines as ops of a graph of torch.compile: the numbers of eager calls, no graph break, and nothing kept for too long."""

from __future__ import annotations

import copy
import gc
import itertools
import shutil
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import opfuse
from opfuse import ops, recipes
from opfuse.errors import OpfuseWarning, SavedTensorError, UnsupportedError
from opfuse.runtime.compile.saved_call import saved_calls
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
    assert saved_calls() == 0


def step(call, model, inputs, recipe):
    """Output, gradients and state of a step that starts with the same random numbers."""
    torch.manual_seed(1)
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        y = call(inputs)
    y, *more = y if isinstance(y, tuple) else (y,)
    sum((each.square().mean() for each in more), y.square().mean()).backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    return [y.detach(), *grads, *model.state_dict().values()]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_every_recipe_trains_and_infers_with_the_numbers_of_eager_calls():
    """One graph for all recipes, one more when rows change, and the same two without gradients."""
    model = Model()
    eager, compiled = copy.deepcopy(model), torch.compile(model, backend="aot_eager", fullgraph=True)
    for rows, recipe in [*itertools.product((16,), RECIPES), *itertools.product((32,), RECIPES[:3]), (48, DELAYED)]:
        tokens = torch.randint(0, 16, (2, rows))
        assert same(step(compiled, model, tokens, recipe), step(eager, eager, tokens, recipe)), (recipe, rows)
        with torch.no_grad(), opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            assert torch.equal(compiled(tokens), eager(tokens))
    assert counters["stats"]["unique_graphs"] == 4
    assert not counters["graph_break"]
    assert model.first.cache_info()[:3] == eager.first.cache_info()[:3]


def test_gradients_pass_views_that_stand_alone():
    """At both ends and between products. Autograd follows such views by itself; a compiled call notes them."""
    first, last = ops.Reshape((2, 32, 64)), ops.Reshape((64, 64))
    middle = [ops.Linear(64, 64), ops.MakeExtraOutput(), ops.Reshape((32, 2, 64)), ops.Identity(), ops.Reshape((64, 64))]
    model = ops.Sequential(first, *middle, ops.GELU(), ops.Linear(64, 64), last)
    eager, call = copy.deepcopy(model), torch.compile(model, backend="aot_eager", fullgraph=True)
    for recipe in RECIPES:
        found = []
        for run, of in ((eager, eager), (call, model)):
            x = torch.linspace(-1, 1, 4096).reshape(64, 64).requires_grad_()
            found.append([*step(run, of, x, recipe), x.grad])
        assert same(*found), recipe
        assert found[0][-1].count_nonzero() > 0


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


REGION = opfuse.autocast(recipe=recipes.Float8CurrentScaling())


def test_a_region_inside_of_compiled_code_runs_beside_its_graphs():
    """torch takes no manager of contexts that it does not know; nothing computes without the recipe."""
    model, x = small(), torch.randn(32, 32)

    def made_inside(x):
        with opfuse.autocast(recipe=recipes.Float8CurrentScaling()):
            return model(x) + 1

    def entered_inside(x):
        with REGION:
            return model(x) + 1

    with REGION:
        wanted = model(x) + 1
    for call in (made_inside, entered_inside):
        assert torch.equal(torch.compile(call, backend="eager")(x), wanted)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(call, backend="eager", fullgraph=True)(x)


def test_sizes_that_are_marked_as_dynamic_and_stances():
    """One graph from the first call on; and what a stance forbids to compile was compiled."""
    model = small()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for rows, stance in ((32, "default"), (64, "fail_on_recompile"), (96, "force_eager")):
        x = torch.randn(rows, 32)
        torch._dynamo.mark_dynamic(x, 0)
        with REGION, torch.compiler.set_stance(stance):
            assert torch.equal(compiled(x), model(x))
    assert counters["stats"]["unique_graphs"] == 1


def test_compiled_autograd_is_refused_and_an_engine_runs_the_pass():
    model, x = small(), torch.randn(4, 32, requires_grad=True)
    with raised(UnsupportedError, RuntimeError, "backward of ops", "got compiled autograd"):
        y = model(x).sum()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            y.backward()
    assert x.grad is None
    model(x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("recipe", [recipes.Float8CurrentScaling(), DELAYED], ids=lambda recipe: recipe.kind)
def test_compiled_autograd_around_a_compiled_pipeline_loses_no_scale(recipe):
    """It never says that a pass is over, whereupon scales of gradients would move."""
    model, x = small(), torch.randn(32, 32)
    with opfuse.autocast(recipe=recipe):
        want = torch.autograd.grad(model(x).sum(), model[0].weight)[0]
        y = torch.compile(model, backend="aot_eager", fullgraph=True)(x).sum()
    refused = raised(UnsupportedError, RuntimeError, "delayed scaling: wants a backward pass of autograd's engine")
    with refused if recipe is DELAYED else nullcontext():
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            y.backward()
        assert torch.equal(model[0].weight.grad, want)
    del y, refused
    torch._dynamo.reset()
    gc.collect()  # compiled autograd keeps what it was called with last


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


# -- parameters of all kinds -----------------------------------------------------------------------------------------------------


def experts(**options):
    """Two grouped products over sorted rows, of which a call says how many each group has."""
    layers = [ops.GroupedLinear(3, 32, width, pad_splits=True, **options) for width in (64, 32)]
    return ops.Sequential(layers[0], ops.SwiGLU(), layers[1])


def routed():
    """With a gate of its own, from which the numbers of rows come."""
    gate, back, layers = ops.TokenDispatch(3, 32, top_k=2), ops.TokenCombine(), experts()
    for index, name in ((0, "splits"), (2, "places")):
        gate.set_extra_output_channel(index, name, output_to_caller=False)
    for op, name in ((layers[0], "splits"), (layers[2], "splits"), (back, "places")):
        op.set_extra_input_channel(0, name)
    return ops.Sequential(gate, *layers, back)


def gated():
    return ops.Sequential(ops.RMSNorm(32), ops.Linear(32, 64), ops.SwiGLU(), ops.Linear(32, 32))


MX, BLOCKS = recipes.MXFP8BlockScaling(), recipes.Float8BlockScaling()
KINDS = {
    "linear, FP8 stored": (gated, recipes.Float8CurrentScaling(), True),
    "linear, MXFP8 stored": (gated, MX, True),
    "linear, NVFP4 stored": (gated, recipes.NVFP4BlockScaling(disable_rht=True), True),
    "grouped": (experts, DELAYED, False),
    "grouped, one parameter stored": (lambda: experts(single_grouped_weight=True), DELAYED, True),
    "routed": (routed, MX, False),
    "main_grad, stored": (lambda: ops.Sequential(ops.Linear(32, 32, accumulate_into_main_grad=True), ops.GELU()), BLOCKS, True),
    "grouped, main_grad": (lambda: experts(single_grouped_weight=True, accumulate_into_main_grad=True), DELAYED, False),
}


def with_buffers(model):
    """The model, whose weights have ``main_grad`` where their op adds to it."""
    for each in model.parameters():
        each.main_grad, each.grad_added_to_main_grad = torch.zeros(each.shape), False
    return model


MORE = {"linear, FP8 stored", "linear, MXFP8 stored", "grouped", "main_grad, stored"}
"""What a graph does as under NVFP4, whose codes share bytes, with weights that live quantized in other ops, and with buffers."""


@pytest.mark.row("H26")
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in MORE)) for kind in KINDS])
def test_parameters_that_live_quantized_in_groups_and_with_buffers(kind):
    """Each is an op of one graph, another when rows change, and what an optimizer writes is seen."""
    make, recipe, stored = KINDS[kind]
    with opfuse.quantized_model_init(enabled=stored, recipe=recipe):
        model = make()
    eager, model = with_buffers(copy.deepcopy(model)), with_buffers(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for rows in (32, 96, 160):
        x, splits = torch.randn(rows, 32), [torch.tensor([rows - 24, 24, 0])] * (2 if kind.startswith("grouped") else 0)
        found = [step(lambda x, call=call: call(x, *splits), own, x, recipe) for call, own in ((compiled, model), (eager, eager))]  # noqa: B023
        assert same(*found), rows
        for one, other in zip(model.parameters(), eager.parameters()):
            assert torch.equal(one.main_grad, other.main_grad)
            with torch.no_grad():
                one.mul_(0.5)
                other.mul_(0.5)
    assert counters["stats"]["unique_graphs"] == 2
    assert "main_grad" not in kind or any(each.main_grad.any() for each in model.parameters())


def test_other_values_of_a_weight_that_lives_quantized_are_refused():
    with opfuse.quantized_model_init(recipe=recipes.Float8CurrentScaling()):
        model, other = small(), small()

    def call(x, weight):
        return torch.func.functional_call(model, {"1.weight": weight}, (x,))

    with raised(UnsupportedError, RuntimeError, "parameters of its ops", "functional_call"):
        torch.compile(call, backend="eager", fullgraph=True)(torch.randn(4, 32), other[1].weight)


def test_a_weight_transposed_in_its_own_memory_is_another():
    model = ops.Sequential(ops.Linear(32, 32, bias=False), ops.GELU())

    def call(x, weight):
        return torch.func.functional_call(model, {"0.weight": weight.t()}, (x,))

    with raised(UnsupportedError, RuntimeError, "parameters of its ops", "functional_call"):
        torch.compile(call, backend="aot_eager", fullgraph=True)(torch.randn(4, 32), model[0].weight)


class Alone(nn.Module):
    """Ops that are called as modules."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = ops.Linear(32, 32), ops.GELU()

    def forward(self, x):
        return x + self.act(self.linear(x))


@pytest.mark.parametrize("layer", [gated, Alone])
def test_layers_of_one_form_are_compiled_once(layer):
    """One by one, more of them than torch compiles of one function; a layer of another width is another graph."""
    stack = nn.Sequential(*[layer() for _ in range(10)])
    eager = copy.deepcopy(stack)
    for each in stack:
        each.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        x = torch.randn(16, 32, requires_grad=True)
        assert same(step(stack, stack, x, DELAYED), step(eager, eager, x, DELAYED))
    assert counters["stats"]["unique_graphs"] == 1
    other = ops.Sequential(ops.RMSNorm(32), ops.Linear(32, 96), ops.SwiGLU(), ops.Linear(48, 32))
    x = torch.randn(16, 32, requires_grad=True)
    assert torch.equal(torch.compile(other, backend="aot_eager", fullgraph=True)(x), other(x))
    assert counters["stats"]["unique_graphs"] == 2


# -- what is kept ----------------------------------------------------------------------------------------------------------------


def small():
    return ops.Sequential(ops.RMSNorm(32), ops.Linear(32, 32), ops.GELU())


def test_what_a_call_keeps_goes_with_its_graph():
    compiled, x = torch.compile(small(), backend="aot_eager", fullgraph=True), torch.randn(4, 32, requires_grad=True)
    y = compiled(x)
    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert saved_calls() == 1
    with raised(UnsupportedError, RuntimeError, "wants plain tensors and gradients", "is_grads_batched"):
        torch.autograd.grad(y, x, torch.stack([y.detach(), y.detach()]), retain_graph=True, is_grads_batched=True)
    assert torch.equal(first, *torch.autograd.grad(y.sum(), x))
    assert saved_calls() == 0
    several = [compiled(x), compiled(x)]
    assert saved_calls() == 2
    several.clear()
    assert saved_calls() == 0
    with torch.no_grad():
        several.append(compiled(x))
    assert saved_calls() == 0


def test_tensors_of_inference_mode():
    """They count no writes; of one that a training call reads a copy is kept."""
    model = small()
    compiled, parameters = torch.compile(model, backend="eager", fullgraph=True), [*model.parameters()]
    with torch.inference_mode():
        x = torch.randn(4, 32)
        assert torch.equal(compiled(x), model(x))
    found, wanted = ([y.detach(), *torch.autograd.grad(y.sum(), parameters)] for y in (compiled(x), model(x.clone())))
    assert same(found, wanted)


def test_arguments_and_results_may_be_written_over():
    """As compilers do with memory that their graph reads no more."""
    model, (x, dy) = small(), torch.randn(2, 4, 32)
    wanted = torch.autograd.grad(model(x.requires_grad_()), [x, *model.parameters()], dy)
    tensors = [x, *model.parameters()]
    (run,) = model.runs()
    given = [tensors[0].detach().clone(), *tensors[1:]]
    wanted_of = [*[True] * len(given), False]
    y, token = torch.ops.opfuse.pipeline([*given, run.ticket], wanted_of, 1, [int(run.ticket), 0, 0, 0], None)
    y.detach().zero_()
    given[0].zero_()
    sizes, looks = [size for t in given for size in t.shape], [number for t in given for number in (t.ndim, 0)]
    with torch.no_grad():
        found = torch.ops.opfuse.pipeline_backward([token], [dy], sizes, looks, x.device)
        assert same(found, wanted)
        with raised(SavedTensorError, RuntimeError, "forward pass has kept", "a copy"):
            torch.ops.opfuse.pipeline_backward([token + 1], [dy], sizes, looks, x.device)


def test_results_may_be_written_over_though_ops_have_saved_them():
    """The extra output is the input that the product saves."""
    model = ops.Sequential(ops.GELU(), ops.MakeExtraOutput(), ops.Linear(32, 32))
    x = torch.randn(8, 32)

    @torch.compile(backend="eager", fullgraph=True)
    def written(x):
        y, extra = model(x)
        with torch.no_grad():
            extra.detach().zero_()
        return y

    written(x).sum().backward()
    found = model[2].weight.grad
    model.zero_grad()
    model(x)[0].sum().backward()
    assert torch.equal(found, model[2].weight.grad)


def test_a_parameter_that_changes_before_the_backward_pass():
    model = small()
    y = torch.compile(model, backend="aot_eager", fullgraph=True)(torch.randn(4, 32, requires_grad=True))
    with torch.no_grad():
        model[1].weight.add_(1)
    with raised(SavedTensorError, RuntimeError, "as the forward pass left them", "changed in place"):
        y.sum().backward()


# -- checkpoints -----------------------------------------------------------------------------------------------------------------


def test_a_pipeline_that_one_graph_calls_twice_updates_its_scales_once():
    """After the backward pass around both calls, as in eager code: an update between them would be another history."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = ops.Sequential(ops.Linear(32, 32))

        def forward(self, x):
            return self.part(torch.sin(self.part(x)))

    model = Twice()
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    for i in range(3):
        x = torch.randn(16, 32) * 10**i
        assert same(step(model, model, x, DELAYED), step(compiled, other, x, DELAYED))


@pytest.mark.row("H26")
def test_checkpoints_around_what_is_compiled():
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
    assert len({int(each.ticket) for each in (other, model, *other.runs(), *model.runs())}) == 4
    with torch.no_grad():
        other[1].weight.zero_()
    assert torch.equal(torch.compile(other, backend="eager", fullgraph=True)(x), other(x))


@torch.no_grad()
def test_a_quantized_input_breaks_the_graph_and_the_reason_has_a_cure():
    quantize, model = ops.Sequential(ops.Quantize()), ops.Sequential(ops.Linear(32, 32), ops.GELU())
    with opfuse.autocast(recipe=recipes.Float8CurrentScaling()):
        x = quantize(torch.randn(32, 32))
        assert type(x) is not torch.Tensor
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"no op of a graph .* an input that is quantized.*dequantize"):
            torch.compile(model, backend="eager", fullgraph=True)(x)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(model, backend="eager")(x), model(x))


BROKEN = {
    "in place": (lambda: ops.Sequential(ops.Linear(32, 32), ops.AddExtraInput(in_place=True)), {}, "in_place=False"),
    "keywords": (
        lambda: ops.Sequential(ops.Linear(32, 32), WithKeyword()),
        {"op_kwargs": {1: {"factor": 2}}},
        "when it is made",
    ),
}


class WithKeyword(ops.BasicOperation):
    """Takes a number with each call."""

    def op_forward(self, ctx, input_, *, factor=1, **_):
        return input_ * factor

    def op_backward(self, ctx, grad_output):
        return grad_output, ()


@torch.no_grad()
@pytest.mark.parametrize("broken", BROKEN)
def test_what_breaks_the_graph_names_a_cure(broken):
    make, keywords, cure = BROKEN[broken]
    model, x = make(), torch.randn(4, 32)
    given = [torch.zeros(4, 32)] if broken == "in place" else []
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"no op of a graph .*{cure}"):
        torch.compile(model, backend="eager", fullgraph=True)(x, *given, **keywords)
    torch._dynamo.reset()
    given = [each.clone() for each in given]
    assert torch.equal(
        torch.compile(model, backend="eager")(x, *given, **keywords), model(x, *[0 * g for g in given], **keywords)
    )


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


MADE_INSIDE = {
    "an op": (ops.GELU,),
    "a product": (ops.Linear, 32, 32),
    "an op of one's own": (WithKeyword,),
    "a pipeline": (ops.Sequential, torch.nn.Tanh()),
}


@pytest.mark.parametrize("what", MADE_INSIDE)
def test_ops_that_compiled_code_makes_are_refused_with_the_cure(what):
    def call(x):
        kind, *arguments = MADE_INSIDE[what]
        return kind(*arguments)(x)

    with pytest.raises(opfuse.errors.UnsupportedError, match=r"wants to be made before .*torch.compile\. Cure: make it before"):
        torch.compile(call, backend="eager")(torch.randn(4, 32))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="an op that is made in it; make it before, as in the constructor"):
        torch.compile(call, backend="eager", fullgraph=True)(torch.randn(4, 32))


def test_a_function_that_is_not_compiled_makes_ops_for_compiled_code():
    @torch.compiler.disable
    def make():
        return ops.GELU()

    def call(x):
        return make()(x)

    x = torch.randn(4, 32)
    assert torch.equal(torch.compile(call, backend="eager")(x), call(x))


# -- files of compilers ----------------------------------------------------------------------------------------------------------


def traced(model):
    """The graph of a call of ``model``, with what torch gives a compiler beside it."""
    found = []
    torch._dynamo.reset()
    torch.compile(model, backend=lambda graph, inputs: found.append((graph, inputs)) or graph.forward)(torch.randn(8, 32))
    return found[0]


def numbers(model):
    """What the op of a pipeline in a graph knows it by, but for its numbers of this process."""
    (node,) = [node for node in traced(model)[0].graph.nodes if node.target is torch.ops.opfuse.pipeline]
    return node.args[3][3:]


class Halved(ops.ReLU):
    """An op of one's own."""


def test_a_file_of_a_compiler_is_of_these_ops_and_this_code(monkeypatch):
    """A graph that Inductor has on disk tells the shapes of results: another op or another opfuse may make others."""

    def pipeline(act):
        return ops.Sequential(ops.Linear(32, 64), act())

    def of_another(name, *args):
        with monkeypatch.context() as patch:
            patch.setattr(f"opfuse.core.watched.{name}", lambda *_: 7)
            return numbers(pipeline(*args))

    known = {kind: numbers(pipeline(kind)) for kind in (ops.GELU, ops.SwiGLU, Halved)}
    assert known[ops.GELU] == numbers(pipeline(ops.GELU))
    assert len({*map(tuple, known.values())}) == 3
    assert known[ops.GELU][0] == 0 != known[Halved][0]
    assert of_another("package_code", ops.GELU) != known[ops.GELU]
    assert of_another("class_code", Halved)[1:] == known[Halved][1:]
    assert of_another("class_code", Halved) != known[Halved]


def test_inductor_asks_for_the_numbers_of_an_op():
    from torch._inductor.codecache import compiled_fx_graph_hash

    graph, inputs = traced(ops.Sequential(ops.Linear(32, 64)))
    (node,) = [node for node in graph.graph.nodes if node.target is torch.ops.opfuse.pipeline]
    given, keys = [torch.zeros_like(each) for each in inputs], []
    for last in (1, 2, 1):
        node.update_arg(3, [*node.args[3][:-1], last])
        graph.recompile()
        keys.append(compiled_fx_graph_hash(graph, given, {}, [])[0])
    assert keys[0] == keys[2] != keys[1]


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "default"])
def test_compiling_with_cuda_graphs_is_told_of(mode):
    """They end in front of pipelines. What torch.compile was asked for is known where there is no GPU, too."""
    model, x = torch.compile(ops.Sequential(ops.Linear(32, 32)), mode=mode, fullgraph=True), torch.randn(8, 32)
    with nullcontext() if mode == "default" else pytest.warns(OpfuseWarning, match=r"opfuse\.graphed_step"):
        model(x)
