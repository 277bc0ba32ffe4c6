"""Casts with an fp32 scale for each block: one kernel for blocks of 128, with the bits of numerics/casts.py.

Blocks of other sizes, in a user's own format, are cast by the torch definition, also on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from opfuse.errors import ShapeError, describe
from opfuse.formats import COLUMNWISE, ROWWISE, USAGES
from opfuse.kernels.casts import trials
from opfuse.kernels.engine.compiling import Variant
from opfuse.kernels.engine.launch import Grid
from opfuse.kernels.engine.parameters import parameter_of
from opfuse.kernels.engine.registry import BITWISE, Launcher, kernel
from opfuse.kernels.engine.variants import C_TYPES, PACK, VECTOR, WIDEST, on_bytes, variant_of
from opfuse.numerics import casts as definition
from opfuse.numerics.layouts import Layout, are_known, ceil_div, check_cast
from opfuse.numerics.scalars import FLT_MAX

BLOCKS, _PARAMETERS = parameter_of("block_scale.cuh", "Blocks"), parameter_of("cast_block.cu")
_BLOCK, _THREADS = 128, 256


@kernel("cast_block.cu", reference=definition.cast_block, tolerance=BITWISE, trials=trials.BLOCK)
def cast_block(
    launch: Launcher, x: torch.Tensor, layouts: Sequence[Layout], *, eps: float = 0.0, pow2: bool = True
) -> list[definition.Encoded]:
    """Reads ``x`` once. ShapeError if there are several rows of 2^31 columns or more."""
    if not are_known(layouts):
        return definition.cast_block(x, layouts, eps=eps, pow2=pow2)
    x = x.contiguous()
    variant, grid = _work(tuple(layouts), x.shape, x.dtype, on_bytes(x, VECTOR), pow2=bool(pow2))
    planes, fields = new_blocks(layouts, x.dtype, x.device, eps=eps)
    launch(
        variant,
        "cast_block",
        grid,
        _PARAMETERS.layout,
        *_PARAMETERS(x=x.data_ptr(), blocks=BLOCKS(**fields)),
        device=x.get_device(),
    )
    return planes


@functools.lru_cache(maxsize=4096)
def _work(
    layouts: tuple[Layout, ...], shape: tuple[int, ...], dtype: torch.dtype, on_vectors: bool, *, pow2: bool
) -> tuple[Variant, Grid]:
    """The variant and grid that cast a contiguous matrix of ``shape`` and ``dtype`` to these planes."""
    check_cast(shape, dtype, layouts, family="block", where="cast_block")
    rows, columns = shape
    if rows > 1 and columns >= WIDEST:
        raise ShapeError(
            describe("cast_block", wanted=f"rows of less than {WIDEST} columns", got=columns, cure="cast parts of them")
        )
    usages = {layout.usage for layout in layouts}
    variant = variant_of(
        "cast_block.cu",
        _PARAMETERS.layout,
        IN=C_TYPES[dtype],
        OUT=layouts[0].element.name.upper(),
        SQUARE=layouts[0].block[0] != 1,
        POW2=pow2,
        ROWWISE=ROWWISE in usages,
        COLUMNWISE=COLUMNWISE in usages,
        ALIGNED=on_vectors and columns % PACK == 0 and not (rows % VECTOR and COLUMNWISE in usages),
    )
    return variant, Grid(ceil_div(rows, _BLOCK) * ceil_div(columns, _BLOCK), _THREADS)


def new_blocks(
    layouts: Sequence[Layout], dtype: torch.dtype, device: torch.device, *, eps: float
) -> tuple[list[definition.Encoded], dict[str, Any]]:
    """Memory for planes of a matrix of ``dtype``, and the fields of the struct Blocks in block_scale.cuh."""
    planes = {layout.usage: _new_plane(layout, device) for layout in layouts}
    (row_data, row_scale, row_pitch), (column_data, column_scale, column_pitch) = (_addresses(planes.get(u)) for u in USAGES)
    rows, columns = layouts[0].shape
    addresses = {"rowwise": row_data, "columnwise": column_data, "row_scale": row_scale, "column_scale": column_scale}
    sizes = {"rows": rows, "columns": columns, "row_pitch": row_pitch, "column_pitch": column_pitch}
    fields = {**addresses, **sizes, "eps": eps, "inf_value": min(torch.finfo(dtype).max, FLT_MAX)}
    return [planes[layout.usage] for layout in layouts], fields


def _new_plane(layout: Layout, device: torch.device) -> definition.Encoded:
    """Memory for the data (uint8) and scales (fp32) of a plane; the kernel stores the padding of scales as well."""
    data = torch.empty(layout.data_shape, dtype=torch.uint8, device=device)
    return data, torch.empty(layout.scale_shape, dtype=torch.float32, device=device)


def _addresses(plane: definition.Encoded | None) -> tuple[int, int, int]:
    """Addresses of data and of scales, and how many scales a row has; zeros for a plane that is not wanted."""
    return (0, 0, 0) if plane is None else (plane[0].data_ptr(), plane[1].data_ptr(), plane[1].shape[1])
