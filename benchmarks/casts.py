"""Cast kernels against a copy of the same matrix in the same process: ``python benchmarks/casts.py [--json FILE]``.

A kernel's bandwidth counts the fewest bytes that its result needs. 100 % is what torch's own copy reaches.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from timing import Call, device_time, host_time

from opfuse.formats import COLUMNWISE, E4M3, ROWWISE, Usage, fp8_tensor, mxfp8
from opfuse.kernels import cast
from opfuse.kernels.layouts import Layout
from opfuse.kernels.registry import sources_digest

SHAPES = ((16384, 8192), (8192, 14336), (4096, 4096))
LAST_LEVEL_CACHE = 64 << 20  # bytes, of the largest so far
ROW: tuple[Usage, ...] = (ROWWISE,)
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


# Name: (fewest bytes an element, how to make a call for a bf16 matrix).
CASTS: dict[str, tuple[float, Make]] = {
    "amax": (2, lambda x: lambda: cast.tensor_amax(x)),
    "delayed, row": (3, delayed(ROW)),
    "delayed, row + col": (4, delayed(BOTH)),
    "delayed, col": (3, delayed((COLUMNWISE,))),
    "current, row": (5, current(ROW)),
    "current, row + col": (6, current(BOTH)),
    "MXFP8, row": (3 + 1 / 32, mx(ROW)),
    "MXFP8, row swizzled": (3 + 1 / 32, mx(ROW, swizzled=True)),
    "MXFP8, col": (3 + 1 / 32, mx((COLUMNWISE,))),
    "MXFP8, row + col": (4 + 2 / 32, mx(BOTH)),
    "MXFP8, both swizzled": (4 + 2 / 32, mx(BOTH, swizzled=True)),
}


def measure(shape: tuple[int, int]) -> list[dict[str, object]]:
    """One row for each cast of a random bf16 matrix."""
    count = max(3, -(-4 * LAST_LEVEL_CACHE // (2 * shape[0] * shape[1])))
    matrices = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    targets = [torch.empty_like(x) for x in matrices]
    copy = device_time([lambda x=x, y=y: y.copy_(x) for x, y in zip(matrices, targets)])
    rows = [{"shape": list(shape), "cast": "copy", "us": copy.median, "bytes": 4, "percent": 100.0}]
    for name, (size, make) in CASTS.items():
        calls = [make(x) for x in matrices]
        took = device_time(calls)
        percent = 100 * size / 4 * copy.median / took.median
        rows.append({"shape": list(shape), "cast": name, "us": took.median, "bytes": size, "percent": percent, "range": took[1:]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [row for shape in SHAPES for row in measure(shape)]
    small = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    host = {name: host_time(make(small)).median for name, (_, make) in CASTS.items()}
    for row in rows:
        print(
            "{0[0]:6d} x {0[1]:5d}  {1:20s} {2:8.1f} us {3:6.1f} % of copy".format(
                *(row[k] for k in ("shape", "cast", "us", "percent"))
            )
        )
    for name, us in host.items():
        print(f"host            {name:20s} {us:8.1f} us")
    if arguments.json:
        machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "kernels": sources_digest()}
        arguments.json.write_text(json.dumps({**machine, "casts": rows, "host_us": host}, indent=1))


if __name__ == "__main__":
    main()
