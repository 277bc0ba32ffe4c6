"""An op of CUDA text of your own, in a pipeline. On a CPU its definition in torch runs."""

import torch

from opfuse import ops
from opfuse.core.spec import hyper_parameters

CODE = r"""
extern "C" __global__ void soft_threshold(const scalar_t* x, scalar_t* y, long long rows, long long columns, double bound) {
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= rows * columns) return;
    scalar_t b = (scalar_t)bound, v = x[at];
    y[at] = v > b ? v - b : v < -b ? v + b : (scalar_t)0;
}
extern "C" __global__ void soft_threshold_backward(const scalar_t* dy, const scalar_t* x, scalar_t* dx,
    long long rows, long long columns,
                                                   double bound) {
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= rows * columns) return;
    scalar_t b = (scalar_t)bound;
    dx[at] = x[at] > b || x[at] < -b ? dy[at] : (scalar_t)0;
}
"""


@ops.raw_kernel(
    CODE,
    forward="soft_threshold",
    backward="soft_threshold_backward",
    dtypes={torch.float32: "float", torch.float64: "double"},
)
class SoftThreshold(ops.RawKernelOperation):
    """y = x - clamp(x, -bound, bound)."""

    @hyper_parameters
    def __init__(self, *, bound: float = 0.5) -> None:
        super().__init__()

    @staticmethod
    def reference(x, *, bound):
        return torch.nn.functional.softshrink(x, bound)


def main() -> float:
    """Train a pipeline with the op for a few steps; return the last loss."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = ops.Sequential(ops.Linear(16, 32), SoftThreshold(bound=0.1), ops.Linear(32, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(64, 16, device=device)
    wanted = x.sum(1, keepdim=True)
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(x) - wanted).square().mean()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


if __name__ == "__main__":
    print(f"loss {main():.3f}")
