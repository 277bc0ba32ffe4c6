"""Cases of rows that are put together behind experts: dtypes, numbers of rows a token, sizes with and without vectors."""

from __future__ import annotations

import functools
import zlib
from typing import NamedTuple

import torch

from opfuse.kernels.combine import combine_rows, combine_rows_backward
from opfuse.kernels.engine.registry import Arguments

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Combined(NamedTuple):
    """Rows of ``dtype`` for ``top_k`` experts of each token.

    weights: their dtype, or None. absent: some rows add nothing. tokens_in: the dtype of a token; None: that of the rows.
    """

    tokens: int
    top_k: int
    columns: int
    dtype: torch.dtype = BF16
    weights: torch.dtype | None = FP32
    absent: bool = False
    misaligned: bool = False
    scored: bool = True
    tokens_in: torch.dtype | None = None

    def random(self) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(repr(self).encode()))

    def matrix(self, rows: int, dtype: torch.dtype, random: torch.Generator, device: torch.device) -> torch.Tensor:
        first = int(self.misaligned)
        values = torch.randn(rows * self.columns + first, generator=random).to(dtype)
        return values.to(device)[first:].view(rows, self.columns)

    def places(self, random: torch.Generator, device: torch.device) -> torch.Tensor:
        places = torch.randperm(self.tokens * self.top_k, generator=random).view(self.tokens, self.top_k)
        if self.absent:
            places = torch.where(torch.rand(places.shape, generator=random) < 0.3, ~places, places)
        return places.to(device)

    def shares(self, random: torch.Generator, device: torch.device) -> torch.Tensor | None:
        if self.weights is None:
            return None
        return torch.rand(self.tokens, self.top_k, generator=random).to(self.weights).to(device)


def forward(case: Combined, device: torch.device) -> Arguments:
    random = case.random()
    rows = case.matrix(case.tokens * case.top_k, case.dtype, random, device)
    return Arguments((rows, case.places(random, device), case.shares(random, device)), {"dtype": case.tokens_in})


def backward(case: Combined, device: torch.device) -> Arguments:
    random = case.random()
    rows = case.matrix(case.tokens * case.top_k, case.dtype, random, device)
    dy = case.matrix(case.tokens, case.tokens_in or case.dtype, random, device)
    places, shares = case.places(random, device), case.shares(random, device)
    return Arguments((dy, places, shares, rows if case.scored else None), {"dtype": case.dtype})


_ALL = (
    Combined(5, 2, 64),
    Combined(33, 8, 2048),
    Combined(7, 4, 4104, absent=True),
    Combined(9, 1, 2048, weights=None),
    Combined(3, 3, 77, absent=True),
    Combined(4, 5, 2056, BF16, BF16, misaligned=True),
    Combined(2, 9, 256, BF16, BF16),
    Combined(6, 2, 512, FP16, FP16, absent=True),
    Combined(6, 6, 1024, FP32, FP32),
    Combined(6, 2, 100, FP32, None),
    Combined(6, 2, 128, BF16, FP32, scored=False),
    Combined(6, 2, 128, BF16, FP32, tokens_in=FP32),
    Combined(5, 3, 65, FP32, None, tokens_in=BF16),
)
CASES = {
    combine_rows: {str(case): functools.partial(forward, case) for case in _ALL},
    combine_rows_backward: {str(case): functools.partial(backward, case) for case in _ALL},
}
