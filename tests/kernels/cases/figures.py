"""Cases of cast_figures."""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch

from opfuse.kernels.casts.figures import cast_figures
from opfuse.kernels.engine.registry import Arguments, CaseTable
from tests.kernels.cases.matrices import DTYPES, hard

_SIZES = {"parts of blocks": 3 * 16384 + 4099, "a pack and three": 11, "misaligned": 20000, "empty": 0}


class _FigureArguments(NamedTuple):
    """A tensor of hard values and what a cast might make of them: some are lost, some 0, some not finite."""

    dtype: torch.dtype
    kind: str
    one_scale: bool

    def __call__(self, device: torch.device) -> Arguments:
        size, generator = _SIZES[self.kind], torch.Generator().manual_seed(zlib.crc32(f"{self.kind} {self.dtype}".encode()))
        x = hard(1, size + 1, generator, self.dtype).flatten()
        fate = torch.randint(0, 16, x.shape, generator=generator)
        q = torch.where(fate == 0, 0.0, x.float() * (1 + torch.randn(x.shape, generator=generator) / 32))
        q[fate == 1] = torch.nan
        x[fate == 2], x[fate == 3], x[fate == 4] = torch.inf, torch.nan, 0.0
        scale = torch.exp2(torch.randint(-149, 128, (size // 32 + 2,), generator=generator).float()).repeat_interleave(32)
        scale[::1024] = torch.nan
        scale = torch.full((1,), 2.0**-9) if self.one_scale else scale[:size]
        x = x.to(device)
        return Arguments(
            (x[1:] if self.kind == "misaligned" else x[:size], q[:size].to(device), scale.to(device)), {"reach": 464.0}
        )


CASES: CaseTable = {
    cast_figures: {
        f"{dtype}, {kind}, {'one scale' if one else 'scales'}": _FigureArguments(DTYPES[dtype], kind, one).__call__
        for dtype in DTYPES
        for kind in _SIZES
        for one in (False, True)
    }
}
