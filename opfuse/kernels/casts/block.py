"""Casts with an fp32 scale for each block: one kernel for blocks of 128, with the bits of numerics/casts.py.

Blocks of other sizes, in a user's own format, are cast by the torch definition, also on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from opfuse.errors import ShapeError, describe
from opfuse.formats import COLUMNWISE, ROWWISE
from opfuse.kernels.casts import trials
from opfuse.kernels.engine.compiling import Variant
from opfuse.kernels.engine.launch import Grid
from opfuse.kernels.engine.parameters import parameter_of
from opfuse.kernels.engine.registry import BITWISE, Launcher, kernel
from opfuse.kernels.engine.variants import C_TYPES, PACK, VECTOR, WIDEST, new_planes, on_bytes, variant_of
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
) -> tuple[list[definition.Encoded], dict[str, int | float]]:
    """Memory for planes of a matrix of ``dtype``, and the fields of the struct Blocks in block_scale.cuh."""
    planes, fields = new_planes(layouts, device)
    pitches = {layout.usage: layout.scale_shape[1] for layout in layouts}
    fields |= {"row_pitch": pitches.get(ROWWISE, 0), "column_pitch": pitches.get(COLUMNWISE, 0)}
    return planes, {**fields, "eps": eps, "inf_value": min(torch.finfo(dtype).max, FLT_MAX)}
