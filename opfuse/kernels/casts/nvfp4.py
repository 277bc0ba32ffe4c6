"""The NVFP4 cast and its global amaxes: kernels with the bits of numerics/casts.py.

Planes that no quantizer makes are cast by the torch definition, also on a GPU: lines of odd length, rotated rows, rotation of
other dtypes than bf16, square blocks of rotated or row-scaled lines. So are planes in a user's own format.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from opfuse.formats import COLUMNWISE, SCALE_TILE, USAGES
from opfuse.kernels.casts import trials
from opfuse.kernels.casts.row import line_amaxes
from opfuse.kernels.casts.tensor import tensor_amax
from opfuse.kernels.engine.compiling import Variant
from opfuse.kernels.engine.launch import Grid
from opfuse.kernels.engine.parameters import parameter_of
from opfuse.kernels.engine.registry import BITWISE, Launcher, kernel
from opfuse.kernels.engine.variants import C_TYPES, VECTOR, addresses, new_plane, on_bytes, variant_of
from opfuse.numerics import casts as definition
from opfuse.numerics.hadamard import SIZE, sign_mask
from opfuse.numerics.layouts import Layout, are_known, ceil_div, check_amaxes, check_array, check_cast

_PLANE, _PLANES = parameter_of("fp4_plane.cuh", "Plane"), parameter_of("nvfp4.cuh", "Nvfp4")
_CAST, _AMAX = parameter_of("cast_nvfp4.cu"), parameter_of("amax_nvfp4.cu")

_THREADS, _WARP = 256, 32
_WARP_ROWS, _WARP_COLUMNS = 4, 512  # cast_rows
_TILE_ROWS, _TILE_BYTES, _SQUARE_COLUMNS = 128, 256, 128  # cast_tile, whose rows are of so many bytes, and cast_square
_AMAX_TILE = (128, 64)
_NO_PLANE = _PLANE(codes=0, scales=0, amax=0, quads=0)


@kernel("amax_nvfp4.cu", reference=definition.amaxes_nv, tolerance=BITWISE, trials=trials.amaxes_nv)
def amaxes_nv(launch: Launcher, x: torch.Tensor, layouts: Sequence[Layout]) -> list[torch.Tensor]:
    """Reads ``x`` once. Planes of unrotated values under one amax share the tensor of that amax."""
    if not _is_known(tuple(layouts), x.shape, x.dtype):
        return definition.amaxes_nv(x, layouts)
    signs = _rotation(layouts)
    if not signs and not layouts[0].format.per_row:
        return [tensor_amax.run(launch, x)] * len(layouts)
    if not signs:
        return line_amaxes.run(launch, x, [layout.usage for layout in layouts])
    x = x.contiguous()
    rows, columns = x.shape
    amaxes = {layout.usage: torch.zeros(layout.amax_shape or (), dtype=torch.float32, device=x.device) for layout in layouts}
    variant = variant_of(
        "amax_nvfp4.cu",
        _AMAX.layout,
        SIGNS=sign_mask(signs),
        ALIGNED=on_bytes(x, 4) and columns % 2 == 0,
    )
    grid = Grid(ceil_div(rows, _AMAX_TILE[0]) * ceil_div(columns, _AMAX_TILE[1]), _THREADS)
    fields = _AMAX(x=x.data_ptr(), **addresses(amaxes, USAGES), rows=rows, columns=columns)
    launch(variant, "amax_nvfp4", grid, _AMAX.layout, *fields, device=x.get_device())
    return [*amaxes.values()]


@kernel("cast_nvfp4.cu", reference=definition.cast_nv, tolerance=BITWISE, trials=trials.cast_nv)
def cast_nv(
    launch: Launcher,
    x: torch.Tensor,
    amaxes: Sequence[torch.Tensor],
    layouts: Sequence[Layout],
    *,
    rows: int = 1,
    seed: torch.Tensor | None = None,
    error: definition.ErrorMode | None = None,
) -> list[definition.Encoded]:
    """Reads ``x`` once; once for each plane if square blocks have several amaxes."""
    x = x.contiguous()
    asked = _AskedPlane(tuple(layouts), x.shape, x.dtype, rows, error, seed is not None)
    work = _work(asked, on_bytes(x, VECTOR))
    if work is None:
        return definition.cast_nv(x, amaxes, layouts, rows=rows, seed=seed, error=error)
    check_amaxes(amaxes, layouts, x.device, where="cast_nv")
    if rows > 1 and any(amax is not amaxes[0] for amax in amaxes):  # tiles are cast once, under one amax
        alone = [cast_nv.run(launch, x, [a], [layout], rows=rows, seed=seed, error=error) for a, layout in zip(amaxes, layouts)]
        return [plane for planes in alone for plane in planes]
    planes = {layout.usage: new_plane(layout, x.device) for layout in layouts}
    fields = {layout.usage: _plane(layout, planes[layout.usage], amax) for layout, amax in zip(layouts, amaxes)}
    made = _PLANES(
        **{usage: fields.get(usage, _NO_PLANE) for usage in USAGES},
        seed=0 if seed is None else _address_of_seed(seed, x),
        rows=x.shape[0],
        columns=x.shape[1],
        encode_max=layouts[0].format.encode_max,
        swizzled=layouts[0].swizzled,
        per_line=layouts[0].format.per_row,
    )
    launch(*work, _CAST.layout, *_CAST(x=x.data_ptr(), planes=made), device=x.get_device())
    return [*planes.values()]


class _AskedPlane(NamedTuple):
    """What the kernel of a cast depends on: the planes, the matrix, how many rows share a scale, and how values are rounded."""

    layouts: tuple[Layout, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: int
    error: definition.ErrorMode | None
    is_stochastic: bool

    @property
    def rounding(self) -> str:
        """The value of the macro ROUNDING in nvfp4.cuh."""
        return self.error or ("STOCHASTIC" if self.is_stochastic else "NEAREST")


@functools.lru_cache(maxsize=4096)
def _work(asked: _AskedPlane, on_vectors: bool) -> tuple[Variant, str, Grid] | None:
    """The launch that casts a contiguous matrix; None if no kernel makes such planes. Errors: of :func:`definition.check_nv`."""
    layouts, shape, dtype, rows, error, _ = asked
    definition.check_nv(rows, error)
    signs = _rotation(layouts)
    whole_lines = all(layout.lines[1] % 2 == 0 for layout in layouts)
    if not (_is_known(layouts, shape, dtype) and whole_lines) or (rows > 1 and (signs or layouts[0].format.per_row)):
        return None
    (height, width), tiled = shape, any(layout.usage == COLUMNWISE for layout in layouts)
    if rows > 1:
        entry, blocks = "cast_square", ceil_div(height, _TILE_ROWS) * ceil_div(width, _SQUARE_COLUMNS)
    elif tiled:
        entry, blocks = "cast_tile", ceil_div(height, _TILE_ROWS) * ceil_div(width, _TILE_BYTES // dtype.itemsize)
    else:
        warps = ceil_div(height, _WARP_ROWS) * ceil_div(width, _WARP_COLUMNS)
        entry, blocks = "cast_rows", ceil_div(warps, _THREADS // _WARP)
    variant = variant_of(
        "cast_nvfp4.cu",
        _CAST.layout,
        entry=entry,
        IN=C_TYPES[dtype],
        ROUNDING=asked.rounding,
        ROTATED=bool(signs),
        SIGNS=sign_mask(signs),
        ALIGNED=on_vectors and width % SIZE == 0 and not (tiled and height % SIZE),
    )
    return variant, entry, Grid(blocks, _THREADS)


@functools.lru_cache(maxsize=4096)
def _is_known(layouts: tuple[Layout, ...], shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether kernels can make such planes of a matrix of ``shape`` and ``dtype``. Errors: of :func:`layouts.check_cast`."""
    check_cast(shape, dtype, layouts, family="nv", where="an NVFP4 cast")
    rotated = [layout for layout in layouts if layout.format.rht]
    whole = dtype == torch.bfloat16 and shape[0] % SIZE == 0
    if not are_known(layouts):
        return False
    return not rotated or (whole and all(each.usage == COLUMNWISE and not each.format.per_row for each in rotated))


def _rotation(layouts: Sequence[Layout]) -> tuple[int, ...]:
    """The 16 signs of the Hadamard transform that rotates columns; none if they are not rotated."""
    return next((layout.format.rht for layout in layouts if layout.format.rht), ())


def _plane(layout: Layout, plane: definition.Encoded, amax: torch.Tensor) -> tuple[int | float, ...]:
    data, scale = plane
    return _PLANE(**addresses({"codes": data, "scales": scale, "amax": amax}), quads=layout.tiled_shape[1] // SCALE_TILE[1])


def _address_of_seed(seed: torch.Tensor, x: torch.Tensor) -> int:
    check_array(seed, (1,), torch.int64, x.device, where="cast_nv seed")
    return seed.data_ptr()
