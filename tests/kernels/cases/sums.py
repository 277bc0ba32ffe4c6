"""Cases of scaled sums: factors of every size, one for all lines or one for each."""

from __future__ import annotations

import functools
import itertools
import zlib

import torch

from opfuse.kernels.engine.registry import Arguments, CaseTable
from opfuse.kernels.products.sums import scaled_sums
from opfuse.numerics.sums import Factors
from tests.kernels.cases.matrices import DTYPES

_SIZES = {"whole vectors": (264, (64, 3, 128, 0, 40, 8, 16, 1, 24, 5)), "parts of vectors": (259, (67, 1, 0, 12))}
_KINDS = ("none", "numbers", "lines of the left", "lines of both")
_UNITS = 2688.0, 1536.0


def _numbers(count: int, generator: torch.Generator) -> torch.Tensor:
    """Nonnegative fp32 numbers: about half are random bits, 0, subnormal and nonfinite ones among them."""
    bits = torch.randint(0, 1 << 31, (count,), generator=generator).to(torch.int32)
    wild = torch.rand(count, generator=generator) < 0.5
    numbers = torch.where(wild, bits.view(torch.float32), torch.rand(count, generator=generator) + 0.5)
    numbers[torch.rand(count, generator=generator) < 0.05] = 0
    return numbers


def _case(sizes: str, kind: str, dtype: torch.dtype, device: torch.device) -> Arguments:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{sizes} {kind}".encode()))
    columns, groups = _SIZES[sizes]
    sums, factors = [], []
    for rows in groups:
        powers = torch.exp2(torch.randint(-32, 46, (rows, columns), generator=generator).float())
        sums.append((torch.randn(rows, columns, generator=generator) * powers).to(device))
        sides = (rows if "left" in kind or "both" in kind else 1, columns if "both" in kind else 1)
        left, right = (None if kind == "none" else _numbers(count, generator).to(device) for count in sides)
        factors.append(Factors(left, right, *_UNITS))
    return Arguments((sums, factors), {"dtype": dtype})


CASES: CaseTable = {
    scaled_sums: {
        f"{sizes}, {kind}, {output}": functools.partial(_case, sizes, kind, dtype)
        for sizes, kind, (output, dtype) in itertools.product(_SIZES, _KINDS, DTYPES.items())
    }
}
