"""CUDA graphs of whole steps, threads, streams and compiled pipelines on the device: the bits of eager calls."""

import copy
import gc
import threading

import pytest
import torch
from torch import nn

import opfuse
from opfuse import ops
from opfuse.errors import UnsupportedError
from opfuse.recipes.availability import device_arch
from tests.gpu.test_pipelines import CASES, RECIPES, REPLAYS, WIDTH, Step, same
from tests.ops.test_op_errors import raised

SWIGLU = [case for case in CASES if case.values[0] == "swiglu"]


def twins(name, recipe, device):
    """Two equal models with a step behind each, so that delayed scales are no longer the first ones; and inputs."""
    first = Step(name, recipe, device)
    first()
    other = copy.deepcopy(first.model)
    return first.model, other, torch.randn_like(first.dy).requires_grad_()


def eager(model, x, dy, recipe):
    x = x.detach().requires_grad_()
    with opfuse.autocast(recipe=recipe):
        y = model(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], dy)]


def eager_call(model, x, recipe):
    with opfuse.autocast(recipe=recipe):
        return model(x)


def states(model):
    held = {id(state): state for op in model.modules() for state in getattr(op, "quantizer_states", ())}
    return [tensor for state in held.values() for tensor in (state.scale, state.amax_history, state.left_out)]


@pytest.mark.row("R12")
@pytest.mark.parametrize(("name", "make", "override"), SWIGLU)
def test_r12_graphed_passes_replay_on_new_values_and_states_advance(name, make, override, device):
    """A hundred steps, under delayed scaling each with the scales that the steps before have left; warm-up leaves none."""
    recipe = make(backward_override=override)
    model, other, x = twins(name, recipe, device)
    graph = opfuse.graphed(model, (x,), recipe=recipe)
    assert same(states(model), states(other))
    for step in range(REPLAYS):
        torch.manual_seed(step)
        values, dy = torch.randn_like(x) * (1 + step % 7), torch.randn_like(x)
        given = values.requires_grad_()
        y = graph(given)
        got = [y.detach().clone(), *torch.autograd.grad(y, [given, *model.parameters()], dy)]
        assert same(got, eager(other, given, dy, recipe)), step
    assert same(states(model), states(other))
    assert not states(model) or "delayed" in str(type(recipe)).lower()


@pytest.mark.row("R12")
@pytest.mark.parametrize("stored", ["current", "block", "mxfp8"])
def test_r12_graphs_of_weights_that_live_quantized_see_what_an_optimizer_writes(stored, device):
    recipe = RECIPES[stored]()
    with opfuse.quantized_model_init(recipe=recipe):
        model = ops.Sequential(ops.Linear(WIDTH, WIDTH, device=device), ops.GELU(), ops.Linear(WIDTH, WIDTH, device=device))
    other, x = copy.deepcopy(model), torch.randn(128, WIDTH, device=device, requires_grad=True)
    graph = opfuse.graphed(model, (x,), recipe=recipe)
    for _ in range(10):
        given = torch.randn_like(x).requires_grad_()
        y, dy = graph(given), torch.randn_like(x)
        got = [y.detach().clone(), *torch.autograd.grad(y, [given, *model.parameters()], dy)]
        assert same(got, eager(other, given, dy, recipe))
        with torch.no_grad():
            for one, two in zip(model.parameters(), other.parameters()):
                one.mul_(0.5)
                two.mul_(0.5)


@pytest.mark.row("R12")
@pytest.mark.parametrize("stored", [False, True])
def test_r12_torchs_own_graphed_callables(stored, device):
    """In a region around capture and calls; a recipe without state has nothing that warm-up could change."""
    recipe = RECIPES["current"]()
    with opfuse.quantized_model_init(enabled=stored, recipe=recipe):
        model, other, x = twins("swiglu", recipe, device)
    gc.collect()
    with opfuse.autocast(recipe=recipe):
        graph = torch.cuda.make_graphed_callables(model, (x,))
    for _ in range(REPLAYS):
        given, dy = torch.randn_like(x).requires_grad_(), torch.randn_like(x)
        y = graph(given)
        got = [y.detach().clone(), *torch.autograd.grad(y, [given, *model.parameters()], dy)]
        assert same(got, eager(other, given, dy, recipe))


@pytest.mark.row("R12")
def test_r12_graphs_add_up_gradients_and_are_freed(device):
    """Gradients lie in memory of the graphs, which a second backward pass writes again; `del` and the collector free it."""
    recipe = RECIPES["current"]()
    model, other, _ = twins("swiglu", recipe, device)
    x = torch.randn(8192, WIDTH, device=device, dtype=next(model.parameters()).dtype)
    graph = opfuse.graphed(model, (torch.empty_like(x).requires_grad_(),), recipe=recipe)
    given = x.clone().requires_grad_()
    wanted = x.clone().requires_grad_()
    for step in range(1, 4):
        for call, value in ((graph, given), (lambda v: eager_call(other, v, recipe), wanted)):
            call(value).backward(x * step)
        assert same([given.grad, *(p.grad for p in model.parameters())], [wanted.grad, *(p.grad for p in other.parameters())])
    del call
    given.grad = None
    model.zero_grad()
    gc.collect()
    held = torch.cuda.memory_allocated(device)
    del graph
    gc.collect()
    assert held - torch.cuda.memory_allocated(device) >= 4 * x.nbytes  # at least the input, the result and their gradients


class ReadsHost(ops.BasicOperation):
    """Multiplies by what the host reads."""

    def op_forward(self, ctx, input_, **_):
        return input_ * float(input_.amax())

    def op_backward(self, ctx, grad_output):
        return grad_output, ()


def test_what_the_host_reads_is_refused_before_capture_with_the_op(device):
    x = torch.randn(128, WIDTH, device=device)
    splits = torch.tensor([100, 28], device=device)
    grouped = ops.Sequential(ops.GroupedLinear(2, WIDTH, WIDTH, pad_splits=True, device=device), ops.GELU())
    recipe = RECIPES["current"]()
    with raised(UnsupportedError, RuntimeError, "GroupedLinear.*host does not wait", "values read from the device"):
        opfuse.graphed(grouped, (x, splits), recipe=recipe)
    for given, wrong in ((splits, "values on a device"), (splits.cpu(), "a tensor on the CPU")):
        with opfuse.autocast(recipe=recipe):
            grouped(x, given)
            gc.collect()
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                with raised(UnsupportedError, RuntimeError, "GroupedLinear.*graph capture", wrong):
                    grouped(x, given)
                x.add(1)  # the capture goes on
    with raised(UnsupportedError, RuntimeError, "CUDA tensors", "one on cpu"):
        opfuse.graphed(grouped, (x, splits.cpu()), recipe=recipe)
    with raised(UnsupportedError, RuntimeError, "ReadsHost.*host does not wait", "values read"):
        opfuse.graphed(ops.Sequential(ops.Linear(WIDTH, WIDTH, device=device), ReadsHost()), (x,), recipe=recipe)
    with opfuse.autocast(recipe=recipe):
        y = grouped(x, splits)
    assert y.shape == x.shape  # the stream captures nothing


@pytest.mark.row("R12")
def test_r12_experts_whose_rows_stay_are_captured_under_a_recipe(device):
    """A list says that the numbers are constants of the graph; in bf16 without a bias splits may change on the device."""
    x, recipe = torch.randn(256, WIDTH, device=device, dtype=torch.bfloat16), RECIPES["current"]()
    made = {"device": device, "dtype": torch.bfloat16}
    fixed, free = (ops.Sequential(ops.GroupedLinear(2, WIDTH, WIDTH, bias=bias, **made), ops.GELU()) for bias in (True, False))
    splits = torch.tensor([128, 128], device=device)
    for model, given, how in ((fixed, [192, 64], recipe), (free, splits, None)):

        def call(model=model, given=given, how=how):
            with torch.no_grad(), opfuse.autocast(enabled=how is not None, recipe=how):
                return model(x, given)

        for _ in range(3):
            call()
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = call()
        for step in range(REPLAYS):
            x.normal_()
            splits.copy_(torch.tensor([step, 256 - step], device=device))
            graph.replay()
            assert torch.equal(y, call()), step


@pytest.mark.row("R12")
@pytest.mark.skipif(not (9, 0) <= device_arch() < (10, 0), reason="no kernel multiplies groups of unknown sizes here")
@pytest.mark.parametrize("kind", ["block", "current", "delayed"])
def test_r12_experts_train_as_graphs_whose_splits_change_on_the_device(kind, device):
    made, recipe = {"bias": False, "device": device, "dtype": torch.bfloat16}, RECIPES[kind]()
    model = ops.Sequential(
        ops.GroupedLinear(4, WIDTH, 2 * WIDTH, **made), ops.SwiGLU(), ops.GroupedLinear(4, WIDTH, WIDTH, **made)
    )
    other, x = copy.deepcopy(model), torch.randn(512, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
    splits = torch.tensor([128, 128, 128, 128], device=device)
    graph = opfuse.graphed(model, (x, splits, splits), recipe=recipe)
    for step in range(20):
        new = torch.tensor([step * 7, 512 - step * 20, 0, step * 13], device=device)
        given, dy = torch.randn_like(x).requires_grad_(), torch.randn_like(x)
        y = graph(given, new, new)
        got = [y.detach().clone(), *torch.autograd.grad(y, [given, *model.parameters()], dy)]
        with opfuse.autocast(recipe=recipe):
            wanted = other(given, new, new)
        assert same(got, [wanted.detach(), *torch.autograd.grad(wanted, [given, *other.parameters()], dy)]), step


@pytest.mark.row("R13")
def test_r13_threads_train_on_streams_of_their_own(device):
    """Four threads, each with its recipe, its model and its stream, for ten steps: the bits of one after the other."""
    kinds = [recipe() for recipe in RECIPES.values()]
    models = [Step("swiglu", recipe, device).model for recipe in kinds]
    alone = [copy.deepcopy(model) for model in models]
    xs = [[torch.randn(128, WIDTH, device=device, dtype=torch.bfloat16) for _ in range(10)] for _ in kinds]
    found: list[list] = [[] for _ in kinds]

    def train(i):
        with torch.cuda.stream(torch.cuda.Stream(device)):
            found[i] = [eager(models[i], x, x, kinds[i]) for x in xs[i]]
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    threads = [threading.Thread(target=train, args=(i,)) for i in range(len(kinds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, recipe in enumerate(kinds):
        assert all(same(got, eager(alone[i], x, x, recipe)) for got, x in zip(found[i], xs[i], strict=True)), recipe
        assert same(states(models[i]), states(alone[i]))


@pytest.mark.row("R13")
@pytest.mark.parametrize("kind", RECIPES)
def test_r13_two_microbatches_forward_before_either_backward_on_two_streams(kind, device):
    recipe = RECIPES[kind]()
    model, other, x = twins("swiglu", recipe, device)
    batches, streams = [torch.randn_like(x) for _ in range(2)], [torch.cuda.Stream(device) for _ in range(2)]
    for call in (model, other):
        outputs = []
        with opfuse.autocast(recipe=recipe):
            for batch, stream in zip(batches, streams):
                used = stream if call is model else torch.cuda.current_stream()
                used.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(used):
                    outputs.append(call(batch.detach().requires_grad_()))
                torch.cuda.current_stream().wait_stream(used)  # before the region ends, whose update reads what casts counted
        for y in outputs:
            y.float().square().mean().backward()
        torch.cuda.synchronize()
    assert same([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])
    assert same(states(model), states(other))


@pytest.mark.parametrize("stored", [False, True])
def test_compiled_layers_compute_the_bits_of_eager_ones(stored, device):
    recipe = RECIPES["current"]()
    torch._dynamo.reset()
    with opfuse.quantized_model_init(enabled=stored, recipe=recipe):
        stack = nn.Sequential(*[ops.Sequential(ops.RMSNorm(WIDTH), ops.Linear(WIDTH, WIDTH), ops.GELU()) for _ in range(3)])
    stack.to(device)
    other = copy.deepcopy(stack)
    for layer in stack:
        layer.compile(backend="aot_eager", fullgraph=True)
    for _ in range(4):
        x = torch.randn(128, WIDTH, device=device)
        assert same(eager(stack, x, x, recipe), eager(other, x, x, recipe))
    torch._dynamo.reset()


class Residuals(nn.Module):
    """Pipelines with sums between them, which a compiler makes kernels of."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(
            ops.Sequential(ops.RMSNorm(WIDTH), ops.Linear(WIDTH, WIDTH), ops.GELU()) for _ in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + 2 * layer(x)
        return x


@pytest.mark.filterwarnings("ignore:torch.compile.mode:opfuse.errors.OpfuseWarning")
@pytest.mark.row("R12")
@pytest.mark.parametrize("kind", ["none", "current", "delayed", "block"])
def test_r12_compiled_code_becomes_cuda_graphs_around_pipelines(kind, device):
    recipe = RECIPES[kind]() if kind != "none" else None
    torch._dynamo.reset()
    model = Residuals(3).to(device)
    other = copy.deepcopy(model)
    call = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for _ in range(6):  # the second call of a graph is captured, later ones are replayed
        torch.compiler.cudagraph_mark_step_begin()
        x, dy = torch.randn(128, WIDTH, device=device), torch.randn(128, WIDTH, device=device)
        got = [each.clone() for each in eager(call, x, dy, recipe)]
        assert same(got, eager(other, x, dy, recipe))
    assert same(states(model), states(other))
    torch._dynamo.reset()


@pytest.mark.row("R12")
@pytest.mark.parametrize("kind", ["current", "delayed"])
def test_r12_compiled_models_as_graphs(kind, device):
    """A CUDA graph of each pass, in which neither torch.compile nor a pipeline takes the host any time."""
    recipe = RECIPES[kind]()
    torch._dynamo.reset()
    model = Residuals(3).to(device)
    other = copy.deepcopy(model)
    model.compile(fullgraph=True)
    x = torch.randn(128, WIDTH, device=device, requires_grad=True)
    graph = opfuse.graphed(model, (x,), recipe=recipe)
    for _ in range(6):
        given, dy = torch.randn_like(x).requires_grad_(), torch.randn_like(x)
        y = graph(given)
        got = [y.detach().clone(), *torch.autograd.grad(y, [given, *model.parameters()], dy)]
        assert same(got, eager(other, given, dy, recipe))
    assert same(states(model), states(other))
    torch._dynamo.reset()
