"""Figures of what a cast did to a tensor, for :mod:`opfuse.inspect`: on a GPU one kernel, elsewhere numerics/figures.py."""

from __future__ import annotations

import torch

from opfuse.kernels.casts import trials
from opfuse.kernels.engine.launch import Grid
from opfuse.kernels.engine.parameters import parameter_of
from opfuse.kernels.engine.registry import Launcher, Tolerance, kernel
from opfuse.kernels.engine.variants import C_TYPES, VECTOR, on_bytes, variant_of
from opfuse.numerics.figures import COUNTS, EXPONENTS
from opfuse.numerics.figures import cast_figures as definition
from opfuse.numerics.layouts import ceil_div

_PARAMETERS = parameter_of("cast_figures.cu")
_BLOCK, _THREADS = 16384, 256  # elements, threads


@kernel("cast_figures.cu", reference=definition, tolerance=Tolerance(ulp=4096), trials=trials.FIGURES)
def cast_figures(
    launch: Launcher, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, *, reach: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads each tensor once. Sums have another order than the definition's: 4096 units of fp64, the tolerance, are 1e-12."""
    if x.dtype not in C_TYPES:
        return definition(x, q, scale, reach=reach)
    x, q, scale = (each.contiguous() for each in (x, q, scale))
    blocks, device = ceil_div(x.numel(), _BLOCK), x.device
    amax = torch.zeros(1, dtype=torch.float32, device=device)
    parts = torch.empty(blocks, 2, dtype=torch.float64, device=device)
    counts = torch.zeros(len(COUNTS) + EXPONENTS, dtype=torch.int64, device=device)
    types = {"IN": C_TYPES[x.dtype], "ONE_SCALE": scale.numel() == 1}
    aligned = all(on_bytes(each, VECTOR) for each in (x, q, scale) if each.numel() > 1)
    variant = variant_of("cast_figures.cu", _PARAMETERS.layout, **types, ALIGNED=aligned)
    read = {"x": x.data_ptr(), "q": q.data_ptr(), "scale": scale.data_ptr(), "size": x.numel(), "reach": reach}
    fields = _PARAMETERS(**read, amax=amax.data_ptr(), parts=parts.data_ptr(), counts=counts.data_ptr())
    launch(variant, "cast_figures", Grid(blocks, _THREADS), _PARAMETERS.layout, *fields, device=x.get_device())
    return torch.cat((amax.double(), parts.sum(0))), counts
