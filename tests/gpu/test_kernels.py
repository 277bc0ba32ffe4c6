"""Every kernel over all its cases against its definition on the CPU; streams, threads, graphs, devices, sizes past 2^31."""

import concurrent.futures
import threading

import pytest
import torch

from opfuse.errors import PlanMissError
from opfuse.formats import COLUMNWISE, E4M3, ROWWISE, USAGES, fp8_tensor
from opfuse.kernels.casts import tensor as casts
from opfuse.kernels.engine import launch, registry
from opfuse.numerics.chain import Stage
from opfuse.numerics.layouts import Layout
from tests.gpu.guards import Guards
from tests.kernels import catalogue
from tests.kernels.cases.chains import EXACT

CASES = [pytest.param(kernel, case, id=f"{kernel.name}: {case}") for kernel, cases in catalogue.CASES.items() for case in cases]


def tensors(value):
    """All tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return tensors(list(value.values()))
    return [t for each in value for t in tensors(each)] if isinstance(value, (tuple, list)) else []


def tolerance_of(kernel, arguments, result):
    """Codes and scales of a chain of exact ops are equal; what its kernel allows is for sums, and for other ops."""
    stages = [stage for each in arguments.args if isinstance(each, list) for stage in each if isinstance(stage, Stage)]
    exact = all(stage.math.name in EXACT for stage in stages)
    return registry.BITWISE if exact and not result.is_floating_point() else kernel.tolerance


@pytest.mark.row("D01", "D02", "D03", "D04", "D05", "D06", "D07")
@pytest.mark.parametrize(("kernel", "case"), CASES)
def test_r1_r8_r10_r18_launch_equals_definition(kernel, case, device):
    """Results, and arguments changed in place; no byte outside of results, where there are any.

    Planes to dequantize are of random bytes, scales and their padding too, so that every code of a scale is met.
    """
    here, there = (catalogue.CASES[kernel][case](torch.device(where)) for where in ("cpu", device))
    wanted = kernel.reference(*here.args, **here.kwargs)
    with Guards() as guards:
        got = kernel(*there.args, **there.kwargs)
    if wanted is not None and registry.leading(here.args).numel():
        guards.check()
    for result, definition in zip(tensors((got, there.args)), tensors((wanted, here.args)), strict=True):
        mismatch = tolerance_of(kernel, here, definition).mismatch(result, definition)
        assert mismatch is None, mismatch


def matrix(device, rows=512, columns=256, seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, device=device, dtype=torch.bfloat16)


def cast(x, amax=None):
    layouts = [Layout(fp8_tensor(E4M3), usage, tuple(x.shape)) for usage in USAGES]
    amax = torch.zeros(1, device=x.device) if amax is None else amax
    return tensors(casts.cast_recording(x, torch.full((1,), 3.7, device=x.device), amax, layouts)) + [amax]


def equal(results, expected):
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(results, expected, strict=True))


def test_r11_a_hundred_runs_give_the_same_bits(device):
    x = matrix(device)
    first = cast(x)
    assert all(equal(cast(x), first) for _ in range(100))


def test_r12_captured_graph_replays_on_new_values(device):
    x, amax = matrix(device), torch.zeros(1, device=device)
    cast(x, amax)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cast(x, amax)
    for seed in range(100):
        x.copy_(matrix(device, seed=seed))
        amax.zero_()
        graph.replay()
        assert equal(captured, cast(x))


def test_r12_no_synchronisation(device):
    x = matrix(device)
    cast(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        cast(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_r12_first_use_during_capture_is_refused(device, monkeypatch):
    monkeypatch.setattr(launch, "_loaded", {})
    x, amax = matrix(device), torch.zeros(1, device=device)
    with pytest.raises(PlanMissError, match="before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        cast(x, amax)


def test_r12_a_thread_that_has_launched_nothing_may_capture(device):
    """CuPy asks each thread's first launch for its context, which must not break the capture."""
    x = matrix(device)
    expected, captured = cast(x), []

    def capture():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured.append(cast(x))
        graph.replay()
        torch.cuda.synchronize()

    thread = threading.Thread(target=capture)
    thread.start()
    thread.join()
    assert equal(captured[0], expected)


def test_launching_leaves_the_users_stream_of_cupy(device):
    cupy = pytest.importorskip("cupy")
    before = cupy.cuda.get_current_stream()
    with torch.cuda.stream(torch.cuda.Stream(device)):
        cast(matrix(device))
        assert cupy.cuda.get_current_stream() == before


def test_reference_computes_every_kernel_if_asked(device, monkeypatch):
    """OPFUSE_REFERENCE=1 launches nothing, and gives the same bits."""
    expected = cast(matrix(device))
    monkeypatch.setenv("OPFUSE_REFERENCE", "1")
    monkeypatch.setattr(launch, "_loaded", {})
    registry._enabled.cache_clear()
    try:
        assert equal(cast(matrix(device)), expected)
    finally:
        registry._enabled.cache_clear()
    assert launch._loaded == {}


def test_r13_work_follows_the_current_stream(device):
    """Behind a queue of work on a side stream, a cast reads what that work writes."""
    expected, side = cast(matrix(device)), torch.cuda.Stream(device)
    x = torch.zeros_like(matrix(device))
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.copy_(matrix(device))
        got = cast(x)
    side.synchronize()
    assert equal(got, expected)


def test_r13_threads_with_streams_of_their_own(device):
    """Sixteen threads, each with its own matrix and stream; the first uses of kernels meet as well."""
    launch._loaded.clear()
    expected = [cast(matrix(device, seed=seed)) for seed in range(16)]
    launch._loaded.clear()
    torch.cuda.synchronize()
    barrier = threading.Barrier(16)

    def work(seed):
        stream = torch.cuda.Stream(device)
        barrier.wait()
        with torch.cuda.stream(stream):
            x = matrix(device, seed=seed)
            results = [cast(x) for _ in range(50)]
        stream.synchronize()
        return all(equal(result, expected[seed]) for result in results)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(16)))


def test_r13_a_new_thread_has_a_context(device):
    """The first thing that a thread does is to launch, on tensors that another made."""
    x = matrix(device)
    expected, amax = cast(x), torch.zeros(1, device=device)
    results = []
    thread = threading.Thread(target=lambda: results.append(cast(x, amax)))
    thread.start()
    thread.join()
    assert equal(results[0], expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_r13_the_tensor_says_the_device():
    here, there = (cast(matrix(torch.device("cuda", i))) for i in (0, 1))
    x = matrix(torch.device("cuda", 1))
    assert equal(cast(x), there)
    assert [t.device.index for t in here + there] == [0] * len(here) + [1] * len(there)
    assert torch.cuda.current_device() == 0


@pytest.mark.slow
@pytest.mark.parametrize("usages", [(ROWWISE,), (COLUMNWISE,)], ids="+".join)
@pytest.mark.parametrize("shape", [(2**21 + 16, 1024), (1, 2**31 + 16), (2**31 + 16, 1), (1040, 2**21 + 24)], ids=str)
def test_r10_indices_past_2_31(shape, usages, device):
    """Compared on the GPU, part by part, with torch's own conversion of values that need no saturation."""
    x = torch.randn(shape[0] * shape[1] // 4096 + 1, device=device, dtype=torch.bfloat16).clamp_(-3, 3)
    x = x.repeat(4096)[: shape[0] * shape[1]].reshape(shape)
    x.view(-1)[-1] = 5.0
    layouts = [Layout(fp8_tensor(E4M3), usage, shape) for usage in usages]
    amax = torch.zeros(1, device=device)
    ((data,), _) = casts.cast_recording(x, torch.full((1,), 64.0, device=device), amax, layouts)
    assert amax.item() == casts.tensor_amax(x).item() == 5.0
    lines = x if usages == (ROWWISE,) else x.t()
    step = max(1, 2**27 // lines.shape[1])
    for start in range(0, lines.shape[0], step):
        part = lines[start : start + step]
        for columns in (slice(None),) if part.numel() < 2**28 else (slice(a, a + 2**27) for a in range(0, part.shape[1], 2**27)):
            expected = (part[:, columns].float() * 64).to(torch.float8_e4m3fn).view(torch.uint8)
            assert torch.equal(data[start : start + step, columns], expected)
