"""Normalisations against a copy of the same matrix in the same process: ``python -m benchmarks.norms``.

A kernel's bandwidth counts the fewest bytes that its result needs, for each element. 100 % is torch's own copy. Beside it, what
PyTorch takes for the same result: eagerly, and compiled (``--peers``).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch

from benchmarks.timing import Call, device_time, host_time
from opfuse.formats import E4M3, ROWWISE, USAGES, Usage, fp8_block, fp8_tensor, mxfp8
from opfuse.kernels.encoding import Blocks, Encoding, Microscaled, Recording
from opfuse.kernels.layouts import Layout
from opfuse.kernels.norm import Norm, NormKind
from opfuse.kernels.norm_cast import norm_cast
from opfuse.kernels.norm_rows import norm_backward, norm_forward
from opfuse.tensors.quantizers import Float8CurrentScalingQuantizer

SHAPES = ((16384, 8192), (4096, 4096))
BUFFERS = 3

Shape = tuple[int, int]
Make = Callable[[Shape], Call]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def norm(kind: NormKind, shape: Shape) -> Norm:
    if kind == "l2_normalization":
        return Norm(kind)
    return Norm(kind, random(shape[1]), random(shape[1]) if kind == "layer_norm" else None)


def forward(kind: NormKind) -> Make:
    def make(shape: Shape) -> Call:
        x, value = random(*shape), norm(kind, shape)
        return lambda: norm_forward(x, value)

    return make


def backward(kind: NormKind, *, adds: bool = False) -> Make:
    def make(shape: Shape) -> Call:
        x, dy, value = random(*shape), random(*shape), norm(kind, shape)
        _, statistics = norm_forward(x, value)
        options = {"extra": random(*shape)} if adds else {}
        return lambda: norm_backward(dy, x, value, statistics, **options)

    return make


def delayed(shape: Shape, usages: Sequence[Usage]) -> Encoding:
    layouts = [Layout(fp8_tensor(E4M3), usage, shape) for usage in usages]
    return Recording(torch.full((1,), 3.7, device="cuda"), torch.zeros(1, device="cuda"), layouts)


def current(shape: Shape, usages: Sequence[Usage]) -> Encoding:
    quantizer = Float8CurrentScalingQuantizer(torch.float8_e4m3fn, columnwise=len(usages) > 1)
    encoding = quantizer.encoding(shape, torch.bfloat16)
    assert encoding is not None
    return encoding


def blocks(shape: Shape, usages: Sequence[Usage]) -> Encoding:
    return Blocks([Layout(fp8_block(E4M3, 1), usage, shape) for usage in usages])


def microscaled(shape: Shape, usages: Sequence[Usage]) -> Encoding:
    return Microscaled([Layout(mxfp8(E4M3), usage, shape) for usage in usages])


def cast(encoding: Callable[[Shape, Sequence[Usage]], Encoding], *usages: Usage, kind: NormKind = "rms_norm") -> Make:
    def make(shape: Shape) -> Call:
        x, value, encode = random(*shape), norm(kind, shape), encoding(shape, usages)
        return lambda: norm_cast(x, value, encode)

    return make


# Name: (fewest bytes for each element, how to make a call).
NORMS: dict[str, tuple[float, Make]] = {
    "RMSNorm": (4, forward("rms_norm")),
    "LayerNorm": (4, forward("layer_norm")),
    "L2 norm": (4, forward("l2_normalization")),
    "RMSNorm, delayed, row": (3, cast(delayed, ROWWISE)),
    "LayerNorm, delayed, row": (3, cast(delayed, ROWWISE, kind="layer_norm")),
    "RMSNorm, 1x128, row": (3.03, cast(blocks, ROWWISE)),
    "RMSNorm, MXFP8, row": (3.03, cast(microscaled, ROWWISE)),
    "RMSNorm, current, row": (3, cast(current, ROWWISE)),
    "RMSNorm, delayed, row + col": (4, cast(delayed, *USAGES)),
    "RMSNorm, 1x128, row + col": (4.06, cast(blocks, *USAGES)),
    "RMSNorm, MXFP8, row + col": (4.06, cast(microscaled, *USAGES)),
    "RMSNorm, current, row + col": (4, cast(current, *USAGES)),
    "d RMSNorm": (6, backward("rms_norm")),
    "d RMSNorm + d extra": (8, backward("rms_norm", adds=True)),
    "d LayerNorm": (6, backward("layer_norm")),
    "d L2 norm": (6, backward("l2_normalization")),
}


def eager_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-5)


def eager_cast(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes, and the amax."""
    y = eager_norm(x, weight)
    return (y.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn), y.abs().amax()


def peers(shape: Shape) -> dict[str, dict[str, float]]:
    """Microseconds of what PyTorch has for the same result, by name of the kernel and of the peer."""
    weight, scale = random(shape[1]), torch.full((1,), 3.7, device="cuda")
    inputs = [random(*shape) for _ in range(BUFFERS)]
    calls: dict[str, tuple[Callable[..., object], tuple[torch.Tensor, ...]]] = {
        "RMSNorm": (eager_norm, (weight,)),
        "RMSNorm, delayed, row": (eager_cast, (weight, scale)),
    }
    took: dict[str, dict[str, float]] = {}
    for name, (function, arguments) in calls.items():
        for how, f in (("eager", function), ("torch.compile", torch.compile(function))):
            run = [lambda f=f, x=x, given=arguments: f(x, *given) for x in inputs]
            took.setdefault(name, {})[how] = device_time(run).median
    return took


def measure(shape: Shape) -> list[dict[str, object]]:
    """One row for each normalisation."""
    matrices = [random(*shape) for _ in range(BUFFERS)]
    targets = [torch.empty_like(x) for x in matrices]
    copy = device_time([lambda x=x, y=y: y.copy_(x) for x, y in zip(matrices, targets)])
    rows: list[dict[str, object]] = [{"shape": list(shape), "norm": "copy", "us": copy.median, "percent": 100.0}]
    for name, (size, make) in NORMS.items():
        took = device_time([make(shape) for _ in range(BUFFERS)])
        percent = 100 * size / 4 * copy.median / took.median
        rows.append({"shape": list(shape), "norm": name, "us": took.median, "bytes": size, "percent": percent})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", action="store_true", help="time of the host alone")
    parser.add_argument("--peers", action="store_true", help="what PyTorch takes for the same")
    arguments = parser.parse_args()
    for shape in SHAPES:
        took = peers(shape) if arguments.peers else {}
        for row in measure(shape):
            others = "".join(f"  {how} {us:.1f} us" for how, us in took.get(str(row["norm"]), {}).items())
            print(
                f"{shape[0]:6d} x {shape[1]:5d}  {row['norm']!s:30s} {row['us']:8.1f} us {row['percent']:6.1f} % of copy{others}"
            )
    for name, (_, make) in NORMS.items() if arguments.host else ():
        print(f"host            {name:30s} {host_time(make((256, 256))).median:8.1f} us")


if __name__ == "__main__":
    main()
