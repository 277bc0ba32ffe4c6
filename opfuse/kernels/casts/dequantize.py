"""Dequantize as the library calls it: kernels for CUDA tensors, whose results are those of numerics/dequantize.py.

Planes of every format, orientation and scale layout; the torch definition also runs on the device, for arrays that are not what
their layout says and for formats of a user's own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from opfuse.formats import COLUMNWISE, E2M1, SCALE_TILE
from opfuse.kernels.engine.launch import Grid
from opfuse.kernels.engine.parameters import parameter_of
from opfuse.kernels.engine.registry import BITWISE, Launcher, kernel
from opfuse.kernels.engine.variants import C_TYPES, PACK, VECTOR, on_bytes, variant_of
from opfuse.numerics.dequantize import dequantize as definition
from opfuse.numerics.hadamard import SIZE, sign_mask
from opfuse.numerics.layouts import SCALE_DTYPES, Layout, ceil_div
from opfuse.numerics.scalars import fl32

_PARAMETERS = parameter_of("dequantize.cu")
_NVFP4, _PLANE = parameter_of("dequantize_nvfp4.cu"), parameter_of("nvfp4_plane.cuh", "Plane")
_THREADS, _WARP, _TILE = 256, 32, 128
_NVFP4_ROWS, _NVFP4_COLUMNS, _NVFP4_TILE_BYTES = 8, 256, 256  # of a warp by rows; of a row of a tile by columns
_WHOLE = 63  # the shift that leaves 0: one scale for all

_SCALE_TYPES = {"fp32": "float", "e8m0": "u8"}
_ROWS = {"tensor": 1, "row": 2, "block": 2, "mx": 2}
_ROWS_ACROSS = {2: 8, 4: 4}
"""Rows of a thread: by family, and by the bytes of a result where each column has scales of its own. More share the loads of
scales, fewer keep more threads in flight."""


class _ScalesOfKernel(NamedTuple):
    """Where scales lie, for the kernel: entry (r, c) of rows r 2^row_shift … and columns c 2^column_shift …"""

    row_stride: int
    column_stride: int
    row_shift: int
    column_shift: int
    tiles_across: int


@kernel("dequantize.cu", reference=definition, tolerance=BITWISE)
def dequantize(
    launch: Launcher,
    data: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    *,
    layout: Layout,
    dtype: torch.dtype,
) -> torch.Tensor:
    """One read of ``data``, one write of the result."""
    if layout.format.family == "nv":
        return dequantize_nv.run(launch, data, scale, amax, layout=layout, dtype=dtype)
    if dtype not in C_TYPES or not _stored_as(layout, data, scale, amax):
        return definition(data, scale, amax, layout=layout, dtype=dtype)
    turned = layout.usage == COLUMNWISE and not layout.across
    rows, columns = layout.shape
    if layout.format.family == "tensor" and not turned:
        rows, columns = 1, rows * columns
    group = VECTOR // dtype.itemsize
    rows_each = 1 if turned else _ROWS_ACROSS[dtype.itemsize] if layout.across else _ROWS[layout.format.family]
    aligned = on_bytes(data, 8) and (columns % group == 0 or rows == 1) and not (turned and (columns % group or rows % PACK))
    if turned:
        entry, blocks = "dequantize_tile", ceil_div(rows, _TILE) * ceil_div(columns, _TILE)
    else:
        warps = ceil_div(rows, rows_each) * ceil_div(columns, _WARP * group)
        entry, blocks = "dequantize_rows", ceil_div(warps, _THREADS // _WARP)
    variant = variant_of(
        "dequantize.cu",
        _PARAMETERS.layout,
        entry=entry,
        ELEMENT=layout.element.name.upper(),
        SCALE=_SCALE_TYPES[layout.format.scale],
        OUT=C_TYPES[dtype],
        ROWS=rows_each,
        ACROSS=layout.across,
        ALIGNED=aligned,
    )
    out = torch.empty(layout.shape, dtype=dtype, device=data.device)
    addresses = {"data": data.data_ptr(), "scale": scale.data_ptr(), "out": out.data_ptr()}
    fields = _PARAMETERS(**addresses, rows=rows, columns=columns, **_scales(layout)._asdict())
    launch(variant, entry, Grid(blocks, _THREADS), _PARAMETERS.layout, *fields, device=data.get_device())
    return out


@kernel("dequantize_nvfp4.cu", reference=definition, tolerance=BITWISE)
def dequantize_nv(
    launch: Launcher,
    data: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    *,
    layout: Layout,
    dtype: torch.dtype,
) -> torch.Tensor:
    """One read of ``data``, one write of the result; what was rotated is turned back."""
    turned, (rows, columns), fmt = layout.usage == COLUMNWISE, layout.shape, layout.format
    launchable = dtype in C_TYPES and layout.lines[1] % 2 == 0 and (not fmt.rht or (turned and rows % SIZE == 0))
    if amax is None or not launchable or not _stored_as(layout, data, scale, amax):
        return definition(data, scale, amax, layout=layout, dtype=dtype)
    whole = (columns * dtype.itemsize % VECTOR == 0 and rows % SIZE == 0) if turned else columns % PACK == 0
    if turned:
        entry, blocks = "decode_columns", ceil_div(rows, _TILE) * ceil_div(columns, _NVFP4_TILE_BYTES // dtype.itemsize)
    else:
        warps = ceil_div(rows, _NVFP4_ROWS) * ceil_div(columns, _NVFP4_COLUMNS)
        entry, blocks = "decode_rows", ceil_div(warps, _THREADS // _WARP)
    variant = variant_of(
        "dequantize_nvfp4.cu",
        _NVFP4.layout,
        entry=entry,
        OUT=C_TYPES[dtype],
        ROTATED=bool(fmt.rht),
        SIGNS=sign_mask(fmt.rht),
        ALIGNED=whole and on_bytes(data, 8),
    )
    out = torch.empty(layout.shape, dtype=dtype, device=data.device)
    quads = layout.tiled_shape[1] // SCALE_TILE[1]
    fields = _NVFP4(
        plane=_PLANE(codes=data.data_ptr(), scales=scale.data_ptr(), amax=amax.data_ptr(), quads=quads),
        out=out.data_ptr(),
        rows=rows,
        columns=columns,
        unit=fl32(1 / (E2M1.max * fmt.encode_max)),
        swizzled=layout.swizzled,
        per_line=fmt.per_row,
    )
    launch(variant, entry, Grid(blocks, _THREADS), _NVFP4.layout, *fields, device=data.get_device())
    return out


def _scales(layout: Layout) -> _ScalesOfKernel:
    """The place of each scale, in rows and columns of the matrix."""
    if layout.format.family == "tensor":
        return _ScalesOfKernel(0, 0, _WHOLE, _WHOLE, 0)
    if layout.format.family == "row":
        strides, shifts = (1, 0), (0, _WHOLE)
    else:
        width, (lines, length) = layout.scale_shape[-1], layout.block
        strides = (1, width) if layout.scale_across or layout.across else (width, 1)
        shifts = (lines.bit_length() - 1, length.bit_length() - 1)
    if layout.usage == COLUMNWISE:
        strides, shifts = strides[::-1], shifts[::-1]
    return _ScalesOfKernel(*strides, *shifts, layout.tiled_shape[1] // SCALE_TILE[1] if layout.swizzled else 0)


def _stored_as(layout: Layout, data: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor | None) -> bool:
    """Whether the arrays are those of a layout that kernels know, contiguous and on one device: what their addresses rely on."""
    arrays = [(data, layout.data_shape), (scale, layout.scale_shape), (amax, layout.amax_shape)]
    if not layout.is_known:
        return False
    dtypes = (scale.dtype, None if amax is None else amax.dtype) == (
        SCALE_DTYPES[layout.format.scale],
        None if layout.amax_shape is None else torch.float32,
    )
    return dtypes and all(
        each is None or (tuple(each.shape) == shape and each.is_contiguous() and each.device == data.device)
        for each, shape in arrays
    )
