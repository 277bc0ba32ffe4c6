"""Quantized products of a linear layer against torch's own in bf16, same process and sizes: ``python -m benchmarks.gemm``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.timing import Call, device_time, host_time
from opfuse.recipes.recipe import SPLIT
from opfuse.tensors.gemm import GEMMS, gemm
from opfuse.tensors.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8RowQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

SIZES = ((8192, 4096, 14336), (4096, 7168, 4096))
"""(tokens, input features, output features)."""

ONE, TILE = (Float8BlockQuantizer(torch.float8_e4m3fn, block_scaling_dim=dims) for dims in (1, 2))
FP8 = Float8CurrentScalingQuantizer(torch.float8_e4m3fn)
FORMATS = {
    "fp8 per tensor": {"input": FP8, "weight": FP8, "grad_output": FP8},
    "fp8 per row": dict.fromkeys(("input", "weight", "grad_output"), Float8RowQuantizer(torch.float8_e4m3fn)),
    "fp8 blocks": {"input": ONE, "weight": TILE, "grad_output": ONE},
    "mxfp8": dict.fromkeys(("input", "weight", "grad_output"), MXFP8Quantizer()),
    "nvfp4": dict.fromkeys(("input", "weight", "grad_output"), NVFP4Quantizer()),
}


def product(name: str, sizes: tuple[int, int, int], kind: str) -> Call:
    """One product over new random operands, with a result in bf16."""
    tokens, inputs, outputs = sizes
    shapes = {"input": (tokens, inputs), "weight": (outputs, inputs), "grad_output": (tokens, outputs)}
    left, right = (
        torch.randn(shapes[role], device="cuda", dtype=torch.bfloat16) for role in (GEMMS[name].left, GEMMS[name].right)
    )
    if kind != "bf16":
        left, right = FORMATS[kind][GEMMS[name].left].quantize(left), FORMATS[kind][GEMMS[name].right].quantize(right)
    return lambda: gemm(name, left, right, dtype=torch.bfloat16, fast=name not in SPLIT["backward"])


def measure() -> Iterator[dict[str, Any]]:
    """One row for each size, product and format: TFLOP/s, and how many times as fast as bf16."""
    for sizes in SIZES:
        work = 2 * sizes[0] * sizes[1] * sizes[2]
        for name in GEMMS:
            plain = 0.0
            for kind in ("bf16", *FORMATS):
                took = device_time([product(name, sizes, kind)], launches=8, repeats=5).median
                plain = plain or took
                yield {"sizes": sizes, "product": name, "kind": kind, "tflops": work / took / 1e6, "times": plain / took}


def records() -> Iterator[dict[str, Any]]:
    """Figures for the record."""
    for row in measure():
        name = f"{row['kind']} {row['product']}, {'x'.join(map(str, row['sizes']))}"
        yield {"name": name, "value": row["tflops"], "unit": "TFLOP/s", "limit": None, "met": None}
        yield {"name": name, "value": row["times"], "unit": "x bf16", "limit": None, "met": None}


def main() -> None:
    for row in measure():
        print(
            f"{row['sizes']} {row['product']} {row['kind']:15s} {row['tflops']:6.0f} TFLOP/s {row['times']:5.2f} x bf16",
            flush=True,
        )
    for kind in ("bf16", *FORMATS):
        print(f"host {kind:15s} {host_time(product('fprop', (256, 256, 256), kind)).median:6.1f} us")


if __name__ == "__main__":
    main()
