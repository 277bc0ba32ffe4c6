"""Cases of grouped products.

Codes are -1, 0 and 1, and scales of blocks and rows are powers of two. So every sum is exact, in the 13 fraction bits of the
matrix unit and in fp32, and the results are equal whatever the order of sums and scales. tests/gpu compares random values with
cuBLASLt.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Sequence

import torch

from opfuse.formats import E4M3, E5M2, ROWWISE, NumberFormat, fp8_block, fp8_row, fp8_tensor
from opfuse.kernels.engine.registry import Arguments, CaseTable
from opfuse.kernels.products.hopper import grouped_product
from opfuse.kernels.products.stored import Stored
from opfuse.numerics.layouts import Layout
from opfuse.numerics.scalars import encode
from tests.kernels.cases.matrices import DTYPES

FORMATS: dict[str, tuple[NumberFormat, NumberFormat]] = {
    "tensors": (fp8_tensor(E4M3), fp8_tensor(E4M3)),
    "tensors, e5m2": (fp8_tensor(E5M2), fp8_tensor(E4M3)),
    "tensors, e5m2 on the right": (fp8_tensor(E4M3), fp8_tensor(E5M2)),
    "1x128, 128x128": (fp8_block(E4M3, 1), fp8_block(E4M3, 2)),
    "1x128, 1x128": (fp8_block(E4M3, 1), fp8_block(E4M3, 1)),
    "rows": (fp8_row(E4M3), fp8_row(E4M3)),
}

_SIZES: dict[str, tuple[int, Sequence[tuple[int, int]]]] = {
    "whole tiles": (128, ((256, 128), (512, 256))),
    "parts of tiles": (336, ((257, 272), (64, 272), (130, 272))),
    "more stages than a block has": (128, ((128, 1040), (300, 1040))),
    "lengths of their own": (208, ((144, 16), (144, 400), (144, 32), (144, 128), (144, 912))),
    "more tiles than blocks": (1168, tuple((lines, 144) for lines in (1100, 3, 400, 900, 1, 260, 640, 700))),
    "a line": (16, ((1, 16),)),
    "more groups than some launches": (16, tuple((1 + i % 70, 32) for i in range(9))),
    "more groups than a launch": (16, tuple((1 + i % 70, 32) for i in range(131))),
}
"""Lines of each right operand; and for each group, the lines of its left operand and their length."""

_ROWS = ("parts of tiles", "lengths of their own")
"""Sizes for operands scaled by rows, whose own steps come at the end of a tile."""

_NUMBERS = ("a line", "more groups than some launches", "more groups than a launch")
"""Sizes that differ from the others only in the number of groups: one kind of operands is enough for them."""


def stored(fmt: NumberFormat, lines: int, length: int, generator: torch.Generator, device: torch.device) -> Stored:
    layout = Layout(fmt, ROWWISE, (lines, length))
    values = torch.randint(-1, 2, (lines, length), generator=generator).float()
    scale = torch.full(layout.scale_shape, 0.75)
    if fmt.family != "tensor":
        scale = torch.exp2(torch.randint(-3, 4, layout.scale_shape, generator=generator).float())
    return Stored(encode(values, layout.element).to(device), scale.to(device), None, layout)


def _case(kind: str, sizes: str, out_dtype: torch.dtype, fast: bool, device: torch.device) -> Arguments:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{kind} {sizes}".encode()))
    columns, groups = _SIZES[sizes]
    left, right = FORMATS[kind]
    lefts = [stored(left, lines, length, generator, device) for lines, length in groups]
    rights = [stored(right, columns, length, generator, device) for _, length in groups]
    counts = [max(1, lines - i % 2) for i, (lines, _) in enumerate(groups)]  # the last line of each second one only fills a block
    return Arguments((lefts, rights, counts), {"out_dtype": out_dtype, "fast": fast})


_RESULTS = ("bf16", "fp16")


def _meet(kind: str, sizes: str, dtype: str, fast: bool) -> bool:
    """Whether there is such a case. Element formats and dtypes of results change only conversions, so few sizes meet them."""
    if fast and not kind.startswith(("tensors", "rows")):
        return False
    if kind == "rows":
        return sizes in _ROWS and dtype == "bf16"
    if "e5m2" in kind:
        return sizes == "lengths of their own" and dtype == "bf16"
    return (kind == "tensors" or sizes not in _NUMBERS) and (dtype == "bf16" or sizes == "parts of tiles")


CASES: CaseTable = {
    grouped_product: {
        f"{kind}, {sizes}, {dtype}{', fast' * fast}": functools.partial(_case, kind, sizes, DTYPES[dtype], fast)
        for kind, sizes, dtype, fast in itertools.product(FORMATS, _SIZES, _RESULTS, (False, True))
        if _meet(kind, sizes, dtype, fast)
    }
}
