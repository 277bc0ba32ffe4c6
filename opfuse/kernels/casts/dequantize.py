"""Dequantization of planes of every format, usage and scale layout: kernels with the bits of numerics/dequantize.py.

Arrays whose shapes or dtypes their layout does not say, and planes in a user's own format, are dequantized by the torch
definition, also on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from opfuse.formats import COLUMNWISE, E2M1, SCALE_TILE
from opfuse.kernels.casts import trials
from opfuse.kernels.engine.joining import together
from opfuse.kernels.engine.launch import Grid
from opfuse.kernels.engine.parameters import parameter_of
from opfuse.kernels.engine.registry import BITWISE, Launcher, kernel
from opfuse.kernels.engine.variants import C_TYPES, PACK, VECTOR, addresses, on_bytes, variant_of
from opfuse.numerics.dequantize import StoredPlane
from opfuse.numerics.dequantize import dequantize as definition
from opfuse.numerics.dequantize import dequantize_groups as definition_of_groups
from opfuse.numerics.hadamard import SIZE, sign_mask
from opfuse.numerics.layouts import SCALE_DTYPES, Layout, ceil_div
from opfuse.numerics.scalars import fl32

_PARAMETERS = parameter_of("dequantize.cu")
_FP4, _PLANE = parameter_of("dequantize_fp4.cu"), parameter_of("dequantize_fp4.cu", "Coded")
_THREADS, _WARP, _TILE = 256, 32, 128
_FP4_ROWS, _FP4_COLUMNS, _FP4_TILE_BYTES = 8, 256, 256  # of a warp that decodes rows; bytes of a row of a tile of results
_WHOLE = 63  # a shift that makes 0 of any row or column, so that all have one scale

_SCALE_TYPES = {"fp32": "float", "e8m0": "u8"}
_ROWS = {"tensor": 1, "row": 2, "block": 2, "mx": 2}
_ROWS_ACROSS = {2: 8, 4: 4}
"""Rows that one thread decodes: by family; and by the bytes of a result, where each column has scales of its own. With more rows
a load of a scale serves more results, with fewer more threads run at once."""


class _ScalesOfKernel(NamedTuple):
    """Where a kernel finds the scale of element (row, column).

    Its number is (row >> row_shift) * row_stride + (column >> column_shift) * column_stride; of swizzled scales, the shifts say
    the same, and tiles_across how many tiles of scales lie side by side (else 0).
    """

    row_stride: int
    column_stride: int
    row_shift: int
    column_shift: int
    tiles_across: int


@kernel("dequantize.cu", reference=definition, tolerance=BITWISE, trials=trials.decoded)
def dequantize(
    launch: Launcher,
    data: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    *,
    layout: Layout,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Reads ``data`` once and writes the result once; rotated values are rotated back."""
    return _decode(launch, (data, scale, amax, layout), torch.empty(layout.shape, dtype=dtype, device=data.device))


@kernel("dequantize.cu", reference=definition_of_groups, tolerance=BITWISE, trials=trials.decoded_groups)
def dequantize_groups(launch: Launcher, planes: Sequence[StoredPlane], *, dtype: torch.dtype) -> torch.Tensor:
    """One launch for up to ``JOINED`` planes."""
    heights, width = [layout.shape[0] for *_, layout in planes], planes[0][-1].shape[1]
    result = torch.empty(sum(heights), width, dtype=dtype, device=planes[0][0].device)
    with together(launch) as each:
        for plane, out in zip(planes, result.split(heights), strict=True):
            if out.numel():
                _decode(each, plane, out)
    return result


def _decode(launch: Launcher, plane: StoredPlane, out: torch.Tensor) -> torch.Tensor:
    """Dequantize a plane into ``out`` (rows, columns), in its dtype; returns ``out``."""
    data, scale, amax, layout = plane
    work = _decode_fp4 if layout.element == E2M1 else _decode_fp8
    if out.dtype not in C_TYPES or not _stored_as(layout, data, scale, amax) or not work(launch, plane, out):
        out.copy_(definition(data, scale, amax, layout=layout, dtype=out.dtype))
    return out


def _decode_fp8(launch: Launcher, plane: StoredPlane, out: torch.Tensor) -> bool:
    data, scale, _, layout = plane
    turned, dtype = layout.usage == COLUMNWISE and not layout.across, out.dtype
    rows, columns = layout.shape
    if layout.format.family == "tensor" and not turned:
        rows, columns = 1, rows * columns
    group = VECTOR // dtype.itemsize
    rows_each = 1 if turned else _ROWS_ACROSS[dtype.itemsize] if layout.across else _ROWS[layout.format.family]
    on_vectors = on_bytes(data, 8) and on_bytes(out, VECTOR)
    aligned = on_vectors and (columns % group == 0 or rows == 1) and not (turned and (columns % group or rows % PACK))
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
    tensors = addresses({"data": data, "scale": scale, "out": out})
    fields = _PARAMETERS(**tensors, rows=rows, columns=columns, **_scales(layout)._asdict())
    launch(variant, entry, Grid(blocks, _THREADS), _PARAMETERS.layout, *fields, device=data.get_device())
    return True


def _decode_fp4(launch: Launcher, plane: StoredPlane, out: torch.Tensor) -> bool:
    """Launch the kernel, if it takes such planes; returns whether it does."""
    data, scale, amax, layout = plane
    turned, (rows, columns), fmt, dtype = layout.usage == COLUMNWISE, layout.shape, layout.format, out.dtype
    if layout.lines[1] % 2 or (fmt.rht and not (turned and rows % SIZE == 0)):
        return False
    whole = (columns * dtype.itemsize % VECTOR == 0 and rows % SIZE == 0) if turned else columns % PACK == 0
    if turned:
        entry, blocks = "decode_columns", ceil_div(rows, _TILE) * ceil_div(columns, _FP4_TILE_BYTES // dtype.itemsize)
    else:
        warps = ceil_div(rows, _FP4_ROWS) * ceil_div(columns, _FP4_COLUMNS)
        entry, blocks = "decode_rows", ceil_div(warps, _THREADS // _WARP)
    variant = variant_of(
        "dequantize_fp4.cu",
        _FP4.layout,
        entry=entry,
        PER_SCALE=layout.block[1],
        OUT=C_TYPES[dtype],
        ROTATED=bool(fmt.rht),
        SIGNS=sign_mask(fmt.rht),
        ALIGNED=whole and on_bytes(data, 8) and on_bytes(out, VECTOR),
    )
    fields = _FP4(
        plane=_PLANE(**addresses({"codes": data, "scales": scale, "amax": amax}), quads=layout.tiled_shape[1] // SCALE_TILE[1]),
        out=out.data_ptr(),
        rows=rows,
        columns=columns,
        unit=0.0 if amax is None else fl32(1 / (E2M1.max * fmt.encode_max)),
        swizzled=layout.swizzled,
        per_line=fmt.per_row,
    )
    launch(variant, entry, Grid(blocks, _THREADS), _FP4.layout, *fields, device=data.get_device())
    return True


def _scales(layout: Layout) -> _ScalesOfKernel:
    """Where each scale lies, by rows and columns of the matrix."""
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
    """Whether kernels know the layout, and the arrays have its shapes and dtypes, contiguous and on one device."""
    arrays = [(data, layout.data_shape), (scale, layout.scale_shape), (amax, layout.amax_shape)]
    if not layout.is_decoded:
        return False
    if scale.dtype != SCALE_DTYPES[layout.format.scale] or (amax is not None and amax.dtype != torch.float32):
        return False
    return all(
        each is None or (tuple(each.shape) == shape and each.is_contiguous() and each.device == data.device)
        for each, shape in arrays
    )
