"""The NVFP4 cast and its global amaxes as the library calls them: kernels for CUDA tensors, with the results of quantize.py.

Planes that no quantizer makes (lines of odd length, rotated rows, rotation of other than bf16, tiles of rotated or row-scaled
lines) take the torch definition, on the device too.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from opfuse.errors import QuantizerError, describe
from opfuse.formats import COLUMNWISE, SCALE_TILE, USAGES
from opfuse.kernels import quantize
from opfuse.kernels.cast import new_encoded, tensor_amax
from opfuse.kernels.hadamard import SIZE, sign_mask
from opfuse.kernels.launch import Grid
from opfuse.kernels.layouts import Layout, ceil_div
from opfuse.kernels.nvfp4_cases import AMAXES, CASTS
from opfuse.kernels.registry import BITWISE, Launcher, kernel
from opfuse.kernels.variants import C_TYPES, on_bytes, variant_of

_PLANE = "PPPq"
_CAST = struct.Struct(f"P{_PLANE}{_PLANE}PqqfIII")
_AMAX = struct.Struct("PPPqq")

_THREADS, _WARP = 256, 32
_WARP_ROWS, _WARP_COLUMNS = 4, 512  # cast_rows
_TILE_ROWS, _TILE_BYTES, _SQUARE_COLUMNS = 128, 256, 128  # cast_tile, whose rows are of so many bytes, and cast_square
_AMAX_TILE = (128, 64)
_VECTOR = 16  # bytes
_NO_PLANE = (0, 0, 0, 0)


@kernel("amax_nvfp4.cu", reference=quantize.amaxes_nv, tolerance=BITWISE, cases=AMAXES)
def amaxes_nv(launch: Launcher, x: torch.Tensor, layouts: Sequence[Layout]) -> list[torch.Tensor]:
    """One read of ``x``. Planes that hold it as it is, under one amax, share a tensor."""
    signs = _rotation(layouts)
    if not _launchable(x, layouts):
        return quantize.amaxes_nv(x, layouts)
    if not signs and not layouts[0].format.per_row:
        return [tensor_amax.run(launch, x)] * len(layouts)
    x = x.contiguous()
    rows, columns = x.shape
    amaxes = {layout.usage: torch.zeros(layout.lines[0] if layout.format.per_row else 1, device=x.device) for layout in layouts}
    variant = variant_of(
        "amax_nvfp4.cu",
        _AMAX,
        IN=C_TYPES[x.dtype],
        ROTATED=bool(signs),
        SIGNS=sign_mask(signs),
        ALIGNED=on_bytes(x, 8) and columns % 2 == 0,
    )
    grid = Grid(ceil_div(rows, _AMAX_TILE[0]) * ceil_div(columns, _AMAX_TILE[1]), _THREADS)
    addresses = (amaxes[usage].data_ptr() if usage in amaxes else 0 for usage in USAGES)
    launch(variant, "amax_nvfp4", grid, _AMAX, x.data_ptr(), *addresses, rows, columns, device=x.get_device())
    return [amaxes[layout.usage] for layout in layouts]


@kernel("cast_nvfp4.cu", reference=quantize.cast_nv, tolerance=BITWISE, cases=CASTS)
def cast_nv(
    launch: Launcher,
    x: torch.Tensor,
    amaxes: Sequence[torch.Tensor],
    layouts: Sequence[Layout],
    *,
    rows: int = 1,
    seed: torch.Tensor | None = None,
    error: quantize.ErrorMode | None = None,
) -> list[quantize.Encoded]:
    """One read of ``x``; ``rows`` is 1 or 16, and the layouts agree on the largest block scale and on swizzling."""
    signs, fmt = _rotation(layouts), layouts[0].format
    whole_lines = all(layout.lines[1] % 2 == 0 for layout in layouts)
    if not (_launchable(x, layouts) and whole_lines) or (rows > 1 and (signs or fmt.per_row)):
        return quantize.cast_nv(x, amaxes, layouts, rows=rows, seed=seed, error=error)
    if rows > 1 and any(amax is not amaxes[0] for amax in amaxes):  # tiles are cast once, under one amax
        alone = [cast_nv.run(launch, x, [a], [layout], rows=rows, seed=seed, error=error) for a, layout in zip(amaxes, layouts)]
        return [plane for planes in alone for plane in planes]
    x = x.contiguous()
    height, width = x.shape
    planes = {layout.usage: new_encoded(x, layout) for layout in layouts}
    tiled = COLUMNWISE in planes
    variant = variant_of(
        "cast_nvfp4.cu",
        _CAST,
        IN=C_TYPES[x.dtype],
        ROUNDING=error or ("NEAREST" if seed is None else "STOCHASTIC"),
        ROTATED=bool(signs),
        SIGNS=sign_mask(signs),
        ALIGNED=on_bytes(x, _VECTOR) and width % SIZE == 0 and not (tiled and height % SIZE),
    )
    fields = {layout.usage: _plane(x, layout, planes[layout.usage], amax) for layout, amax in zip(layouts, amaxes)}
    launch(
        variant,
        *_grid(x, rows, tiled=tiled),
        _CAST,
        x.data_ptr(),
        *(field for usage in USAGES for field in fields.get(usage, _NO_PLANE)),
        0 if seed is None else _address(seed, (1,), torch.int64, x),
        *(height, width, fmt.encode_max, layouts[0].swizzled, fmt.per_row, 0),
        device=x.get_device(),
    )
    return [planes[layout.usage] for layout in layouts]


def _rotation(layouts: Sequence[Layout]) -> tuple[int, ...]:
    """The signs under which columns are rotated; none if they are not."""
    return next((layout.format.rht for layout in layouts if layout.format.rht), ())


def _launchable(x: torch.Tensor, layouts: Sequence[Layout]) -> bool:
    """Whether the kernels know such planes."""
    rotated = [layout for layout in layouts if layout.format.rht]
    plain = x.dtype in C_TYPES and len({layout.format.per_row for layout in layouts}) == 1
    if not rotated:
        return plain
    whole = x.dtype == torch.bfloat16 and x.shape[0] % SIZE == 0
    return plain and whole and all(layout.usage == COLUMNWISE and not layout.format.per_row for layout in rotated)


def _grid(x: torch.Tensor, rows: int, *, tiled: bool) -> tuple[str, Grid]:
    """The entry that makes the planes, and its blocks."""
    height, width = x.shape
    if rows > 1:
        return "cast_square", Grid(ceil_div(height, _TILE_ROWS) * ceil_div(width, _SQUARE_COLUMNS), _THREADS)
    if tiled:
        return "cast_tile", Grid(ceil_div(height, _TILE_ROWS) * ceil_div(width, _TILE_BYTES // x.itemsize), _THREADS)
    warps = ceil_div(height, _WARP_ROWS) * ceil_div(width, _WARP_COLUMNS)
    return "cast_rows", Grid(ceil_div(warps, _THREADS // _WARP), _THREADS)


def _plane(x: torch.Tensor, layout: Layout, plane: quantize.Encoded, amax: torch.Tensor) -> tuple[int, int, int, int]:
    """The fields of Plane in nvfp4.cuh."""
    shape = (layout.lines[0] if layout.format.per_row else 1,)
    quads = layout.tiled_shape[1] // SCALE_TILE[1]
    return plane[0].data_ptr(), plane[1].data_ptr(), _address(amax, shape, torch.float32, x), quads


def _address(value: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, x: torch.Tensor) -> int:
    """Of numbers on the device of ``x``; QuantizerError for anything else, which a kernel would misread."""
    if value.dtype != dtype or value.shape != shape or value.device != x.device or not value.is_contiguous():
        got, wanted = f"{value.dtype} {tuple(value.shape)} on {value.device}", f"{dtype} {shape} on {x.device}, contiguous"
        raise QuantizerError(describe("amax or seed of an NVFP4 cast", wanted=wanted, got=got, cure="take what amaxes_nv gives"))
    return value.data_ptr()
