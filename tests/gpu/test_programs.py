"""Programs on the device: the bits of the interpreter, in CUDA graphs and on other streams; cuBLASLt by addresses."""

import copy

import pytest
import torch

import opfuse
from opfuse import ops, recipes
from opfuse.kernels.engine import bindings
from opfuse.kernels.engine.joining import READ_WORDS
from opfuse.runtime.replay import cublaslt
from opfuse.runtime.replay.cublaslt import Product, ProductForm
from opfuse.runtime.replay.dispatch import interpreted
from opfuse.runtime.replay.launch_graph import LaunchGraph
from opfuse.runtime.replay.replayable import Recorded

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16 = torch.bfloat16

RECIPES = {
    "none": None,
    "delayed": recipes.DelayedScaling(),
    "current": recipes.Float8CurrentScaling(),
    "block": recipes.Float8BlockScaling(),
    "row": recipes.CustomRecipe(qfactory="fp8_row_scaled"),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
}


def gated(device):
    layers = ops.RMSNorm(256), ops.Linear(256, 1024), ops.SwiGLU(), ops.Linear(512, 256)
    return ops.Sequential(*layers).to(device, BF16)


def step(model, recipe, x, dy, *inputs):
    x = x.detach().requires_grad_()
    model.zero_grad(set_to_none=True)
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x, *inputs)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def recorded_in(model):
    plans = [plan for run in model.runs() for _, plan in run.cache.items()]
    return [made for plan in plans for looks in plan.programs.values() for made in looks.values() if isinstance(made, Recorded)]


@pytest.mark.row("B21")
@pytest.mark.parametrize("name", RECIPES)
def test_repeated_steps_equal_interpreted_ones(device, name):
    model, recipe = gated(device), RECIPES[name]
    other = copy.deepcopy(model)
    for call in range(5):
        x, dy = (torch.randn(128, 256, device=device, dtype=BF16) * (call + 1) for _ in range(2))
        torch.manual_seed(call)
        got = step(model, recipe, x, dy)
        torch.manual_seed(call)
        with interpreted():
            wanted = step(other, recipe, x, dy)
        assert all(map(torch.equal, got, wanted)), call
    programs = [made.program for made in recorded_in(model)]
    assert any(program.launches for program in programs)
    native = name in ("delayed", "current", "block", "row") and torch.cuda.get_device_capability(device)[0] == 9
    assert any(program.products for program in programs) == (native and cublaslt.library() is not None)


@pytest.mark.row("R12")
@pytest.mark.parametrize("stream", ["default", "other"])
@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_launches_of_steps_that_are_alike_are_graphs_with_the_same_bits(device, name, stream, monkeypatch):
    """Of values that change, on the stream that is current."""
    launched, make = [], LaunchGraph.__init__

    def seen(graph, queue):
        make(graph, queue)
        launch = graph.launch
        graph.launch = lambda handle, where: [launched.append(where), launch(handle, where)][1]

    monkeypatch.setattr(LaunchGraph, "__init__", seen)
    where = torch.cuda.Stream() if stream == "other" else torch.cuda.current_stream()
    found = {}
    for graphs in ("0", "1"):
        monkeypatch.setenv("OPFUSE_LAUNCH_GRAPHS", graphs)
        torch.manual_seed(0)
        model, found[graphs] = gated(device), []
        x, dy = (torch.randn(128, 256, device=device, dtype=BF16) for _ in range(2))
        where.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(where):
            for _ in range(12):
                found[graphs].append([each.cpu() for each in step(model, RECIPES[name], x, dy)])
                x.mul_(1.25)
        where.synchronize()
        assert bool(launched) is (graphs == "1")
        assert bool(model.cache_info().graphs) is (graphs == "1")
    assert set(launched) == {where.cuda_stream}
    for one, other in zip(*found.values(), strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.row("R12")
@pytest.mark.parametrize("name", ["none", "current", "block", "mxfp8"])
def test_a_graph_of_programs_replays_for_other_values(device, name):
    model, recipe = gated(device), RECIPES[name]
    x = torch.randn(128, 256, device=device, dtype=BF16)
    stream = torch.cuda.Stream()
    with torch.no_grad(), opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        with torch.cuda.stream(stream):
            for _ in range(3):
                model(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = model(x)
        for _ in range(20):
            x.normal_()
            graph.replay()
            with interpreted():
                assert torch.equal(y, model(x))


def test_streams_run_one_program_at_the_same_time(device):
    model, recipe = gated(device), RECIPES["current"]
    x = [torch.randn(128, 256, device=device, dtype=BF16) for _ in range(4)]
    with torch.no_grad(), opfuse.autocast(recipe=recipe):
        with interpreted():
            wanted = [model(each) for each in x]
        for _ in range(3):
            model(x[0])
        streams = [torch.cuda.Stream() for _ in x]
        torch.cuda.synchronize()
        got = []
        for _ in range(20):
            for stream, each in zip(streams, x):
                with torch.cuda.stream(stream):
                    got.append(model(each))
        torch.cuda.synchronize()
    assert all(torch.equal(y, wanted[i % len(x)]) for i, y in enumerate(got))


SIZES = [(256, 256, 256), (16, 16, 16), (128, 512, 128), (48, 256, 4096), (4096, 128, 8192), (1024, 1024, 16384)]


@pytest.mark.parametrize("out", [BF16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_by_addresses_have_the_bits_of_torch(device, size, out):
    if cublaslt.library() is None or torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("nvmath and compute capability 9 make these products")
    m, n, k = size

    def rand(*shape):
        return torch.rand(shape, device=device)

    scalings = {(0, 0): (rand(1), rand(1)), (1, 1): (rand(m, 1), rand(1, n))}
    if k % 128 == 0 and n % 128 == 0 and m % 4 == 0:
        scalings[4, 5] = rand(k // 128, m).t(), rand(n // 128, -(-(k // 128) // 4) * 4).t()
        scalings[4, 4] = rand(k // 128, m).t(), rand(k // 128, n).t()
    workspace = torch.empty(cublaslt.WORKSPACE, dtype=torch.uint8, device=device)
    for (left, right), (left_scale, right_scale) in scalings.items():
        for fast in (False, True) if left < 4 else (False,):
            for element in (E4M3, E5M2) if left < 4 else (E4M3,):
                a, b = torch.randn(m, k, device=device).to(element), torch.randn(n, k, device=device).to(E4M3)
                wanted = torch._scaled_mm_v2(a, b.t(), [left_scale], [left], [], [right_scale], [right], [], None, out, [], fast)
                product = Product(ProductForm(m, n, k, element, E4M3, out, left, right, fast, device.index))
                assert product.found
                got = torch.empty(m, n, dtype=out, device=device)
                product.addresses[:] = [t.data_ptr() for t in (a, b, left_scale, right_scale, got, workspace)]
                product(torch.cuda.current_stream().cuda_stream)
                assert torch.equal(got, wanted), (left, right, fast, element)


def test_the_thread_of_a_backward_pass_gets_the_context(device):
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            seen.append(bindings.driver().ctxGetCurrent() != 0)
            return dy

    model = gated(device)
    x = torch.randn(128, 256, device=device, dtype=BF16, requires_grad=True)
    for _ in range(4):
        model(Look.apply(x)).sum().backward()
    assert all(seen)


@pytest.mark.parametrize("name", ["delayed", "current", "block", "row", "mxfp8"])
@pytest.mark.parametrize("splits", [(128,) * 10, (256, 0, 128, 384, 128, 0, 32, 96, 128, 128)])
def test_casts_of_experts_are_joined_with_the_same_bits(device, splits, name, monkeypatch):
    """A launch for eight groups, of the input and of the weights, where the interpreter has one for each.

    For all formats as for those whose splits the host reads: with these on the device, the cast of an input is one anyway.
    """
    monkeypatch.setattr(ops.GroupedLinear, "ragged_products", ops.BasicOperation.ragged_products)
    model, recipe = ops.Sequential(ops.GroupedLinear(10, 256, 512, bias=False)).to(device, BF16), RECIPES[name]
    other, sizes = copy.deepcopy(model), torch.tensor(splits)
    for _ in range(5):
        x, dy = (torch.randn(sum(splits), width, device=device, dtype=BF16) for width in (256, 512))
        with interpreted():
            wanted = step(other, recipe, x, dy, sizes)
        assert all(map(torch.equal, step(model, recipe, x, dy, sizes), wanted))
    (made,) = recorded_in(model)
    for program in made.programs():
        casts = [each.entry for each in program.launches if each.variant.source in READ_WORDS]
        assert casts
        assert all(casts.count(entry) <= 4 for entry in casts), casts
