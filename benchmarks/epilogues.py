"""Chains of elementwise ops and their casts against a copy in the same process: ``python -m benchmarks.epilogues [--peers]``.

A kernel's bandwidth counts the fewest bytes that its result needs, per element of the chain's result. 100 % is torch's own copy.
Beside them, what PyTorch takes for the same results: eagerly, and compiled (``--peers``).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from benchmarks.timing import Call, device_time, host_time
from opfuse.formats import E4M3, ROWWISE, USAGES, Usage, fp8_block, fp8_tensor, mxfp8
from opfuse.kernels.activations import POINTWISE
from opfuse.kernels.chain import backward_chain, backward_chain_amax, forward_chain, forward_chain_amax
from opfuse.kernels.chain_cast import backward_chain_cast, forward_chain_cast
from opfuse.kernels.encoding import Blocks, Encoding, Microscaled, Recording
from opfuse.kernels.epilogue import Stage
from opfuse.kernels.layouts import Layout

SHAPES = ((16384, 8192), (4096, 4096))
BUFFERS = 3

Shape = tuple[int, int]
Make = Callable[[Shape], Call]
Encode = Callable[[Shape, Sequence[Usage]], Encoding]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def stages(names: str, shape: Shape) -> list[Stage]:
    """Stages of the ops for a result of ``shape``, none gated but a last SwiGLU."""
    made = []
    for name in names.split():
        op = POINTWISE[name]
        columns = shape[1] if op.is_gated else wide(names, shape)[1]
        shapes = {"row": (columns,), "full": (shape[0], columns), "column": shape[:1]}
        operands = {n: random(*shapes[kind]) for n, kind in op.operands.items()}
        made.append(Stage(op, operands, dict.fromkeys(op.constants, 1.1)))
    return made


def wide(names: str, shape: Shape) -> Shape:
    return (shape[0], shape[1] * (2 if "swiglu" in names else 1))


# -- casts ---------------------------------------------------------------------------------------------------------------------


def delayed(shape: Shape, usages: Sequence[Usage]) -> Encoding:
    layouts = [Layout(fp8_tensor(E4M3), usage, shape) for usage in usages]
    return Recording(torch.full((1,), 3.7, device="cuda"), torch.zeros(1, device="cuda"), layouts)


def blocks(shape: Shape, usages: Sequence[Usage]) -> Encoding:
    return Blocks([Layout(fp8_block(E4M3, 1), usage, shape) for usage in usages])


def mx(shape: Shape, usages: Sequence[Usage]) -> Encoding:
    return Microscaled([Layout(mxfp8(E4M3), usage, shape) for usage in usages])


def mx_swizzled(shape: Shape, usages: Sequence[Usage]) -> Encoding:
    return Microscaled([Layout(mxfp8(E4M3), usage, shape, swizzled=True) for usage in usages])


# -- chains --------------------------------------------------------------------------------------------------------------------


def forward(names: str, *keep: int, amax: bool = False) -> Make:
    run = forward_chain_amax if amax else forward_chain

    def make(shape: Shape) -> Call:
        x, ops = random(*wide(names, shape)), stages(names, shape)
        return lambda: run(x, ops, keep=keep)

    return make


def backward(names: str, *, amax: bool = False) -> Make:
    run = backward_chain_amax if amax else backward_chain

    def make(shape: Shape) -> Call:
        x, dy, ops = random(*wide(names, shape)), random(*shape), stages(names, shape)
        saved = {i: x for i, stage in enumerate(ops) if stage.math.needs_input}
        return lambda: run(dy, ops, saved)

    return make


def forward_cast(names: str, encode: Encode, *keep: int, usages: Sequence[Usage] = USAGES) -> Make:
    def make(shape: Shape) -> Call:
        x, ops, encoding = random(*wide(names, shape)), stages(names, shape), encode(shape, usages)
        return lambda: forward_chain_cast(x, ops, encoding, keep=keep)

    return make


def backward_cast(names: str, encode: Encode, usages: Sequence[Usage] = USAGES) -> Make:
    def make(shape: Shape) -> Call:
        x, dy, ops = random(*wide(names, shape)), random(*shape), stages(names, shape)
        saved = {i: x for i, stage in enumerate(ops) if stage.math.needs_input}
        encoding = encode(wide(names, shape), usages)
        return lambda: backward_chain_cast(dy, ops, saved, encoding)

    return make


# Name: (fewest bytes for each element of the chain's result, how to make a call).
CHAINS: dict[str, tuple[float, Make]] = {
    "constant_scale": (4, forward("constant_scale")),
    "bias": (4, forward("bias")),
    "bias, GELU": (4, forward("bias gelu")),
    "bias, GELU, amax": (4, forward("bias gelu", amax=True)),
    "bias, GELU, input of GELU kept": (6, forward("bias gelu", 1)),
    "GELU, add": (6, forward("gelu add")),
    "SwiGLU": (6, forward("swiglu")),
    "bias, SwiGLU": (6, forward("bias swiglu")),
    "d bias alone": (2, backward("bias")),
    "d GELU": (6, backward("gelu")),
    "d GELU, d bias": (6, backward("bias gelu")),
    "d GELU, d bias, amax": (6, backward("bias gelu", amax=True)),
    "d SwiGLU": (10, backward("swiglu")),
    "d SwiGLU, d bias": (10, backward("bias swiglu")),
    "bias, GELU, cast both": (4, forward_cast("bias gelu", delayed)),
    "bias, GELU, cast row": (3, forward_cast("bias gelu", delayed, usages=(ROWWISE,))),
    "bias, GELU, kept, cast both": (6, forward_cast("bias gelu", delayed, 1)),
    "bias, GELU, blocks both": (4.06, forward_cast("bias gelu", blocks)),
    "bias, GELU, MXFP8 both": (4.06, forward_cast("bias gelu", mx)),
    "bias, GELU, MXFP8 swizzled both": (4.06, forward_cast("bias gelu", mx_swizzled)),
    "SwiGLU, cast both": (6, forward_cast("swiglu", delayed)),
    "SwiGLU, blocks both": (6.06, forward_cast("swiglu", blocks)),
    "SwiGLU, MXFP8 both": (6.06, forward_cast("swiglu", mx)),
    "d bias, cast both": (4, backward_cast("bias", delayed)),
    "d GELU, cast both": (6, backward_cast("gelu", delayed)),
    "d GELU, d bias, cast both": (6, backward_cast("bias gelu", delayed)),
    "d GELU, d bias, blocks both": (6.06, backward_cast("bias gelu", blocks)),
    "d GELU, d bias, MXFP8 both": (6.06, backward_cast("bias gelu", mx)),
    "d SwiGLU, cast both": (10, backward_cast("swiglu", delayed)),
    "d SwiGLU, d bias, cast both": (10, backward_cast("bias swiglu", delayed)),
    "d SwiGLU, d bias, blocks both": (10.13, backward_cast("bias swiglu", blocks)),
    "d SwiGLU, d bias, MXFP8 both": (10.13, backward_cast("bias swiglu", mx)),
}

# -- peers ---------------------------------------------------------------------------------------------------------------------


def fp8_both(y: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Codes of ``y`` and of its transpose under a given scale, and the amax so far."""
    codes = (y.float() * scale).clamp(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn)
    return codes, codes.t().contiguous(), torch.maximum(amax, y.abs().amax().float())


def bias_gelu(scale: torch.Tensor, amax: torch.Tensor, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return fp8_both(F.gelu(x + bias, approximate="tanh"), scale, amax)


def swiglu(scale: torch.Tensor, amax: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a, b = x.chunk(2, -1)
    return fp8_both(F.silu(a) * b, scale, amax)


def bias_gelu_backward(scale: torch.Tensor, amax: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    dx = torch.ops.aten.gelu_backward(dy, x, approximate="tanh")
    return *fp8_both(dx, scale, amax), dx.sum(0)


def bias_swiglu_backward(scale: torch.Tensor, amax: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a, b = x.chunk(2, -1)
    dx = torch.cat([torch.ops.aten.silu_backward(dy * b, a), dy * F.silu(a)], -1)
    return *fp8_both(dx, scale, amax), dx.sum(0)


# Name of the chain: (the same in PyTorch, shapes of its tensors for a result of a shape).
PEERS: dict[str, tuple[Callable[..., tuple[torch.Tensor, ...]], Callable[[Shape], Sequence[Sequence[int]]]]] = {
    "bias, GELU, cast both": (bias_gelu, lambda shape: (shape, shape[1:])),
    "SwiGLU, cast both": (swiglu, lambda shape: (wide("swiglu", shape),)),
    "d GELU, d bias, cast both": (bias_gelu_backward, lambda shape: (shape, shape)),
    "d SwiGLU, d bias, cast both": (bias_swiglu_backward, lambda shape: (shape, wide("swiglu", shape))),
}


def peer_calls(name: str, shape: Shape, *, compiled: bool) -> list[Call]:
    """Calls of a peer over tensors of their own."""
    function, shapes = PEERS[name]
    function = torch.compile(function) if compiled else function
    scaling = torch.full((1,), 3.7, device="cuda"), torch.zeros(1, device="cuda")

    def call() -> Call:
        tensors = [random(*each) for each in shapes(shape)]
        return lambda: function(*scaling, *tensors)

    return [call() for _ in range(BUFFERS)]


# -- measurements --------------------------------------------------------------------------------------------------------------


def copied(shape: Shape) -> float:
    """Microseconds that torch takes to copy a matrix."""
    matrices = [random(*shape) for _ in range(BUFFERS)]
    targets = [torch.empty_like(x) for x in matrices]
    return device_time([lambda x=x, y=y: y.copy_(x) for x, y in zip(matrices, targets)]).median


def measure(shape: Shape) -> list[dict[str, object]]:
    """One row for each chain."""
    copy = copied(shape)
    rows: list[dict[str, object]] = [{"shape": list(shape), "chain": "copy", "us": copy, "percent": 100.0}]
    for name, (size, make) in CHAINS.items():
        took = device_time([make(shape) for _ in range(BUFFERS)]).median
        rows.append({"shape": list(shape), "chain": name, "us": took, "bytes": size, "percent": 100 * size / 4 * copy / took})
    return rows


def measure_peers(shape: Shape) -> list[dict[str, object]]:
    """For each chain that has one, the time of the chain and of its peer."""
    rows: list[dict[str, object]] = []
    for name in PEERS:
        took = device_time([CHAINS[name][1](shape) for _ in range(BUFFERS)]).median
        for how in ("eager", "compiled"):
            peer = device_time(peer_calls(name, shape, compiled=how == "compiled")).median
            rows.append({"shape": list(shape), "chain": name, "peer": how, "us": took, "peer_us": peer, "times": peer / took})
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", action="store_true", help="time of the host alone")
    parser.add_argument("--peers", action="store_true", help="PyTorch in the same process")
    arguments = parser.parse_args()
    for row in (row for shape in SHAPES for row in measure(shape)):
        place, name, us, percent = (row[k] for k in ("shape", "chain", "us", "percent"))
        print(f"{place[0]:6d} x {place[1]:5d}  {name:44s} {us:8.1f} us {percent:6.1f} % of copy", flush=True)
    for row in measure_peers(SHAPES[0]) if arguments.peers else ():
        print(f"{row['peer']:15s} {row['chain']:44s} {row['peer_us']:8.1f} us, {row['times']:5.2f} times ours", flush=True)
    for name, (_, make) in CHAINS.items() if arguments.host else ():
        print(f"host            {name:44s} {host_time(make((256, 256))).median:8.1f} us")


if __name__ == "__main__":
    main()
