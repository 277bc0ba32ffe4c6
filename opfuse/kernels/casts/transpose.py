"""The transpose of a matrix of bytes: under one scale, the columnwise FP8 plane is that of the rowwise codes."""

from __future__ import annotations

import torch

from opfuse.kernels.casts import trials
from opfuse.kernels.engine.launch import Grid
from opfuse.kernels.engine.parameters import parameter_of
from opfuse.kernels.engine.registry import BITWISE, Launcher, kernel
from opfuse.kernels.engine.variants import PACK, VECTOR, on_bytes, variant_of
from opfuse.numerics.layouts import ceil_div
from opfuse.numerics.layouts import transposed as definition

_PARAMETERS = parameter_of("transpose.cu")
_ROWS, _COLUMNS, _THREADS = 256, 64, 512


@kernel("transpose.cu", reference=definition, tolerance=BITWISE, trials=trials.turned)
def transposed(launch: Launcher, x: torch.Tensor) -> torch.Tensor:
    """Reads ``x`` once. Its elements are bytes; others take the torch definition."""
    if x.dtype != torch.uint8 or x.ndim != 2:
        return definition(x)
    x, (rows, columns) = x.contiguous(), x.shape
    aligned = on_bytes(x, PACK) and columns % PACK == 0 and rows % VECTOR == 0
    variant = variant_of("transpose.cu", _PARAMETERS.layout, ALIGNED=aligned)
    turned = torch.empty((columns, rows), dtype=torch.uint8, device=x.device)
    grid = Grid(ceil_div(rows, _ROWS) * ceil_div(columns, _COLUMNS), _THREADS)
    fields = _PARAMETERS(x=x.data_ptr(), turned=turned.data_ptr(), rows=rows, columns=columns)
    launch(variant, "transpose", grid, _PARAMETERS.layout, *fields, device=x.get_device())
    return turned
