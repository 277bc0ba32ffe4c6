"""Casts and dequantize against a copy of the same matrix in the same process: ``python -m benchmarks.casts [--only NAME]``.

A kernel's bandwidth counts the fewest bytes that its result needs. 100 % is what torch's own copy reaches.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch

from benchmarks.timing import Call, device_time, host_time
from opfuse.formats import COLUMNWISE, E4M3, NVFP4, ROWWISE, Format, Usage, fp8_block, fp8_tensor, mxfp8
from opfuse.kernels import cast, quantize
from opfuse.kernels.cast_block import cast_block
from opfuse.kernels.cast_nvfp4 import amaxes_nv, cast_nv
from opfuse.kernels.decode import dequantize
from opfuse.kernels.hadamard import SIGNS
from opfuse.kernels.layouts import Layout

SHAPES = ((16384, 8192), (8192, 14336), (4096, 4096))
LAST_LEVEL_CACHE = 64 << 20  # bytes, of the largest so far
ROW: tuple[Usage, ...] = (ROWWISE,)
COL: tuple[Usage, ...] = (COLUMNWISE,)
BOTH: tuple[Usage, ...] = (ROWWISE, COLUMNWISE)

Make = Callable[[torch.Tensor], Call]


def tensor_layouts(x: torch.Tensor, usages: Sequence[Usage]) -> list[Layout]:
    return [Layout(fp8_tensor(E4M3), usage, (x.shape[0], x.shape[1])) for usage in usages]


def delayed(usages: Sequence[Usage]) -> Make:
    def make(x: torch.Tensor) -> Call:
        scale, amax, layouts = torch.full((1,), 3.7, device=x.device), torch.zeros(1, device=x.device), tensor_layouts(x, usages)
        return lambda: cast.cast_recording(x, scale, amax, layouts)

    return make


def current(usages: Sequence[Usage]) -> Make:
    def make(x: torch.Tensor) -> Call:
        layouts = tensor_layouts(x, usages)
        return lambda: cast.cast_current(x, cast.tensor_amax(x), layouts)

    return make


def mx(usages: Sequence[Usage], *, swizzled: bool = False) -> Make:
    def make(x: torch.Tensor) -> Call:
        layouts = [Layout(mxfp8(E4M3), usage, (x.shape[0], x.shape[1]), swizzled) for usage in usages]
        return lambda: cast.cast_mx(x, layouts)

    return make


def block(dims: int, usages: Sequence[Usage]) -> Make:
    def make(x: torch.Tensor) -> Call:
        layouts = [Layout(fp8_block(E4M3, dims), usage, (x.shape[0], x.shape[1])) for usage in usages]
        return lambda: cast_block(x, layouts)

    return make


def nv(usages: Sequence[Usage], *, rotated: bool = False, rows: int = 1, seed: int | None = None, measured: bool = False) -> Make:
    """The cast alone, under amaxes that are known; ``measured``: with the pass that finds them."""

    def make(x: torch.Tensor) -> Call:
        formats = {ROWWISE: NVFP4, COLUMNWISE: NVFP4.replace(rht=SIGNS if rotated else ())}
        layouts = [Layout(formats[usage], usage, (x.shape[0], x.shape[1])) for usage in usages]
        amaxes = amaxes_nv(x, layouts)
        random = None if seed is None else torch.tensor([seed], device=x.device)
        return lambda: cast_nv(x, amaxes_nv(x, layouts) if measured else amaxes, layouts, rows=rows, seed=random)

    return make


def decoded(fmt: Format, usage: Usage = ROWWISE, *, swizzled: bool = False) -> Make:
    """Dequantize to bf16 from a plane of random codes with modest scales."""

    def make(x: torch.Tensor) -> Call:
        layout = Layout(fmt, usage, (x.shape[0], x.shape[1]), swizzled)
        data = torch.randint(0, 256, layout.data_shape, dtype=torch.uint8, device=x.device)
        scale = torch.rand(layout.scale_shape, device=x.device)
        if layout.tiled:
            scale = torch.randint(64, 120, layout.scale_shape, dtype=torch.uint8, device=x.device)
        amax = None if layout.amax_shape is None else quantize.tensor_amax(x)
        return lambda: dequantize(data, scale, amax, layout=layout, dtype=x.dtype)

    return make


# Name: (fewest bytes an element, how to make a call for a bf16 matrix). "NVFP4,
# measured" and "stochastic" are the rotated cast of both planes with the pass over the matrix that finds its amaxes, and with
# random rounding.
CASTS: dict[str, tuple[float, Make]] = {
    "amax": (2, lambda x: lambda: cast.tensor_amax(x)),
    "delayed, row": (3, delayed(ROW)),
    "delayed, row + col": (4, delayed(BOTH)),
    "delayed, col": (3, delayed(COL)),
    "current, row": (5, current(ROW)),
    "current, row + col": (6, current(BOTH)),
    "MXFP8, row": (3 + 1 / 32, mx(ROW)),
    "MXFP8, row swizzled": (3 + 1 / 32, mx(ROW, swizzled=True)),
    "MXFP8, col": (3 + 1 / 32, mx(COL)),
    "MXFP8, row + col": (4 + 2 / 32, mx(BOTH)),
    "MXFP8, both swizzled": (4 + 2 / 32, mx(BOTH, swizzled=True)),
    "1x128, row": (3 + 1 / 32, block(1, ROW)),
    "1x128, col": (3 + 1 / 32, block(1, COL)),
    "1x128, row + col": (4 + 2 / 32, block(1, BOTH)),
    "128x128, row": (3, block(2, ROW)),
    "128x128, col": (3, block(2, COL)),
    "128x128, row + col": (4, block(2, BOTH)),
    "decode, row": (3, decoded(fp8_tensor(E4M3))),
    "decode, col": (3, decoded(fp8_tensor(E4M3), COLUMNWISE)),
    "decode 1x128, row": (3 + 1 / 32, decoded(fp8_block(E4M3, 1))),
    "decode 1x128, col": (3 + 1 / 32, decoded(fp8_block(E4M3, 1), COLUMNWISE)),
    "decode 128x128, row": (3, decoded(fp8_block(E4M3, 2))),
    "decode 128x128, col": (3, decoded(fp8_block(E4M3, 2), COLUMNWISE)),
    "decode MXFP8, row": (3 + 1 / 32, decoded(mxfp8(E4M3))),
    "decode MXFP8, col": (3 + 1 / 32, decoded(mxfp8(E4M3), COLUMNWISE)),
    "decode MX swz, row": (3 + 1 / 32, decoded(mxfp8(E4M3), swizzled=True)),
    "decode MX swz, col": (3 + 1 / 32, decoded(mxfp8(E4M3), COLUMNWISE, swizzled=True)),
    "NVFP4, row": (2.5 + 1 / 16, nv(ROW)),
    "NVFP4, row stochastic": (2.5 + 1 / 16, nv(ROW, seed=1)),
    "NVFP4, col": (2.5 + 1 / 16, nv(COL)),
    "NVFP4, row + col": (3 + 2 / 16, nv(BOTH)),
    "NVFP4, row + rotated": (3 + 2 / 16, nv(BOTH, rotated=True)),
    "NVFP4, measured": (5 + 2 / 16, nv(BOTH, rotated=True, measured=True)),
    "NVFP4, stochastic": (3 + 2 / 16, nv(BOTH, rotated=True, seed=1)),
    "NVFP4 16x16, both": (3 + 2 / 16, nv(BOTH, rows=16)),
    "decode NVFP4, row": (2.5 + 1 / 16, decoded(NVFP4)),
    "decode NVFP4, col": (2.5 + 1 / 16, decoded(NVFP4, COLUMNWISE)),
    "decode NVFP4, rotated": (2.5 + 1 / 16, decoded(NVFP4.replace(rht=SIGNS), COLUMNWISE)),
}


def measure(shape: tuple[int, int], only: str = "") -> list[dict[str, object]]:
    """One row for each cast of a random bf16 matrix whose name holds ``only``."""
    count = max(3, -(-4 * LAST_LEVEL_CACHE // (2 * shape[0] * shape[1])))
    matrices = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    targets = [torch.empty_like(x) for x in matrices]
    copy = device_time([lambda x=x, y=y: y.copy_(x) for x, y in zip(matrices, targets)])
    rows = [{"shape": list(shape), "cast": "copy", "us": copy.median, "bytes": 4, "percent": 100.0}]
    for name, (size, make) in CASTS.items():
        if only not in name:
            continue
        calls = [make(x) for x in matrices]
        took = device_time(calls)
        percent = 100 * size / 4 * copy.median / took.median
        rows.append({"shape": list(shape), "cast": name, "us": took.median, "bytes": size, "percent": percent})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="measure casts whose names hold this")
    arguments = parser.parse_args()
    rows = [row for shape in SHAPES for row in measure(shape, arguments.only)]
    small = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    host = {name: host_time(make(small)).median for name, (_, make) in CASTS.items() if arguments.only in name}
    for row in rows:
        place, name, us, percent = (row[k] for k in ("shape", "cast", "us", "percent"))
        print(f"{place[0]:6d} x {place[1]:5d}  {name:20s} {us:8.1f} us {percent:6.1f} % of copy")
    for name, us in host.items():
        print(f"host            {name:20s} {us:8.1f} us")


if __name__ == "__main__":
    main()
