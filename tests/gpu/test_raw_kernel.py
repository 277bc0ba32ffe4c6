"""Ops of a user's CUDA text on the device: the bits of their reference, on torch's stream, in CUDA graphs."""

import pytest
import torch

from examples.raw_kernel import CODE, SoftThreshold
from opfuse import ops
from opfuse.errors import PlanMissError

ROW_CODE = r"""
extern "C" __global__ void reversed(const scalar_t* x, scalar_t* y, long long rows, long long columns) {
    const long long start = blockIdx.x * columns;
    for (long long i = threadIdx.x; i < columns; i += blockDim.x) y[start + i] = x[start + columns - 1 - i];
}
extern "C" __global__ void reversed_backward(const scalar_t* dy, const scalar_t* x, scalar_t* dx,
    long long rows, long long columns) {
    const long long start = blockIdx.x * columns;
    for (long long i = threadIdx.x; i < columns; i += blockDim.x) dx[start + i] = dy[start + columns - 1 - i];
}
"""


@ops.raw_kernel(ROW_CODE, forward="reversed", backward="reversed_backward", grid="rows", block=64)
class Reversed(ops.RawKernelOperation):
    @staticmethod
    def reference(x):
        return x.flip(-1)


def passes(op, x, dy):
    x = x.detach().requires_grad_()
    y = op(x)
    return y.detach(), torch.autograd.grad(y, x, dy)[0]


@pytest.mark.parametrize("shape", [(1,), (257, 33), (2, 3, 1000), (0, 4)], ids=str)
@pytest.mark.parametrize("op", [SoftThreshold(bound=0.25), Reversed()], ids=lambda op: op.kind)
def test_both_passes_have_the_bits_of_the_reference(op, shape, device):
    x, dy = torch.randn(shape, device=device), torch.randn(shape, device=device)
    got, wanted = passes(op, x, dy), passes(op, x.cpu(), dy.cpu())
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, wanted, strict=True))
    strided = torch.randn(*shape[:-1], 2 * shape[-1], device=device)[..., ::2]
    assert torch.equal(op(strided).cpu(), op(strided.cpu()))


def test_it_runs_on_torchs_current_stream_behind_the_work_there(device):
    op, x = SoftThreshold(), torch.zeros(1 << 20, device=device)
    op(x)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        x.fill_(2.0)
        y = op(x)
        done = side.record_event()
    assert not done.query()  # nothing waited for the device
    side.synchronize()
    assert torch.equal(y, torch.full_like(y, 1.5))


def test_a_captured_step_reads_new_values(device):
    net = ops.Sequential(ops.Linear(64, 64), SoftThreshold(bound=0.1), ops.Linear(64, 64)).to(device)
    x = torch.randn(64, 64, device=device, requires_grad=True)

    def step():
        y = net(x)
        return y, *torch.autograd.grad(y.sum(), [x, *net.parameters()])

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(4):
            step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured = step()
    with torch.no_grad():
        x.copy_(torch.randn(64, 64, device=device))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


def test_a_first_use_inside_a_capture_is_refused(device):
    op = ops.raw_kernel(CODE + "// its only use", forward="soft_threshold", backward="soft_threshold_backward")(
        type("Late", (SoftThreshold,), {})
    )()
    x = torch.randn(16, device=device)
    with (
        pytest.raises(PlanMissError, match="wants a plan made before"),
        torch.no_grad(),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        op(x)
