"""Generated kernels of chains against a copy of the same matrix in the same process: ``python benchmarks/chains.py``.

A kernel's bandwidth counts the fewest bytes that its result needs, per element of the chain's result. 100 % is torch's own copy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from timing import Call, device_time, host_time

from opfuse.formats import E4M3, ROWWISE, USAGES, Usage, fp8_block, fp8_tensor
from opfuse.kernels.activations import POINTWISE
from opfuse.kernels.chain import backward_chain, forward_chain
from opfuse.kernels.chain_cast import backward_chain_cast, forward_chain_blocks, forward_chain_cast
from opfuse.kernels.encoding import Blocks, Recording
from opfuse.kernels.epilogue import Stage
from opfuse.kernels.layouts import Layout

SHAPES = ((16384, 8192), (4096, 4096))
BUFFERS = 3

Make = Callable[[tuple[int, int]], Call]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def stages(names: str, shape: tuple[int, int]) -> list[Stage]:
    """Stages of the ops for a result of ``shape``, none gated but a last SwiGLU."""
    made = []
    for name in names.split():
        op = POINTWISE[name]
        columns = shape[1] if op.is_gated else wide(names, shape)[1]
        shapes = {"row": (columns,), "full": (shape[0], columns), "column": shape[:1]}
        operands = {n: random(*shapes[kind]) for n, kind in op.operands.items()}
        made.append(Stage(op, operands, dict.fromkeys(op.constants, 1.1)))
    return made


def wide(names: str, shape: tuple[int, int]) -> tuple[int, int]:
    return (shape[0], shape[1] * (2 if "swiglu" in names else 1))


def forward(names: str, *keep: int) -> Make:
    def make(shape: tuple[int, int]) -> Call:
        x, ops = random(*wide(names, shape)), stages(names, shape)
        return lambda: forward_chain(x, ops, keep=keep)

    return make


def backward(names: str) -> Make:
    def make(shape: tuple[int, int]) -> Call:
        x, dy, ops = random(*wide(names, shape)), random(*shape), stages(names, shape)
        saved = {i: x for i, stage in enumerate(ops) if stage.math.needs_input}
        return lambda: backward_chain(dy, ops, saved)

    return make


def recording(shape: tuple[int, int], usages: Sequence[Usage]) -> Recording:
    layouts = [Layout(fp8_tensor(E4M3), usage, shape) for usage in usages]
    return Recording(torch.full((1,), 3.7, device="cuda"), torch.zeros(1, device="cuda"), layouts)


def forward_cast(names: str, *keep: int, usages: Sequence[Usage] = USAGES) -> Make:
    def make(shape: tuple[int, int]) -> Call:
        x, ops, encode = random(*wide(names, shape)), stages(names, shape), recording(shape, usages)
        return lambda: forward_chain_cast(x, ops, encode, keep=keep)

    return make


def forward_blocks(names: str) -> Make:
    def make(shape: tuple[int, int]) -> Call:
        x, ops = random(*wide(names, shape)), stages(names, shape)
        encode = Blocks([Layout(fp8_block(E4M3, 1), usage, shape) for usage in USAGES])
        return lambda: forward_chain_blocks(x, ops, encode)

    return make


def backward_cast(names: str, usages: Sequence[Usage] = USAGES) -> Make:
    def make(shape: tuple[int, int]) -> Call:
        x, dy, ops = random(*wide(names, shape)), random(*shape), stages(names, shape)
        saved = {i: x for i, stage in enumerate(ops) if stage.math.needs_input}
        encode = recording(wide(names, shape), usages)
        return lambda: backward_chain_cast(dy, ops, saved, encode)

    return make


# Name: (fewest bytes for each element of the chain's result, how to make a call).
CHAINS: dict[str, tuple[float, Make]] = {
    "constant_scale": (4, forward("constant_scale")),
    "bias": (4, forward("bias")),
    "bias, GELU": (4, forward("bias gelu")),
    "bias, GELU, input of GELU kept": (6, forward("bias gelu", 1)),
    "GELU, add": (6, forward("gelu add")),
    "SwiGLU": (6, forward("swiglu")),
    "bias, SwiGLU": (6, forward("bias swiglu")),
    "d bias alone": (2, backward("bias")),
    "d GELU": (6, backward("gelu")),
    "d GELU, d bias": (6, backward("bias gelu")),
    "d SwiGLU": (10, backward("swiglu")),
    "d SwiGLU, d bias": (10, backward("bias swiglu")),
    "bias, GELU, cast both": (4, forward_cast("bias gelu")),
    "bias, GELU, cast row": (3, forward_cast("bias gelu", usages=(ROWWISE,))),
    "bias, GELU, kept, cast both": (6, forward_cast("bias gelu", 1)),
    "bias, GELU, blocks both": (4.06, forward_blocks("bias gelu")),
    "SwiGLU, blocks both": (6.06, forward_blocks("swiglu")),
    "SwiGLU, cast both": (6, forward_cast("swiglu")),
    "d bias, cast both": (4, backward_cast("bias")),
    "d GELU, cast both": (6, backward_cast("gelu")),
    "d GELU, d bias, cast both": (6, backward_cast("bias gelu")),
    "d SwiGLU, cast both": (10, backward_cast("swiglu")),
    "d SwiGLU, d bias, cast both": (10, backward_cast("bias swiglu")),
}


def measure(shape: tuple[int, int]) -> list[dict[str, object]]:
    """One row for each chain."""
    matrices = [random(*shape) for _ in range(BUFFERS)]
    targets = [torch.empty_like(x) for x in matrices]
    copy = device_time([lambda x=x, y=y: y.copy_(x) for x, y in zip(matrices, targets)])
    rows: list[dict[str, object]] = [{"shape": list(shape), "chain": "copy", "us": copy.median, "percent": 100.0}]
    for name, (size, make) in CHAINS.items():
        took = device_time([make(shape) for _ in range(BUFFERS)])
        percent = 100 * size / 4 * copy.median / took.median
        rows.append({"shape": list(shape), "chain": name, "us": took.median, "bytes": size, "percent": percent})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", action="store_true", help="time of the host alone")
    arguments = parser.parse_args()
    for row in (row for shape in SHAPES for row in measure(shape)):
        place, name, us, percent = (row[k] for k in ("shape", "chain", "us", "percent"))
        print(f"{place[0]:6d} x {place[1]:5d}  {name:44s} {us:8.1f} us {percent:6.1f} % of copy")
    for name, (_, make) in CHAINS.items() if arguments.host else ():
        print(f"host            {name:44s} {host_time(make((256, 256))).median:8.1f} us")


if __name__ == "__main__":
    main()
