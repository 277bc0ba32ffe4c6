"""Casts with one scale for the whole tensor, and MXFP8 casts: kernels with the bits of numerics/casts.py.

A launch takes a contiguous matrix of any size; if its rows do not start on 16 bytes, the kernel moves single elements. Matrix and
layouts are checked (numerics/layouts.py) once for each combination of shape, dtype and layouts. Planes in a user's own format are
cast by the torch definition, also on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from opfuse.formats import COLUMNWISE, ROWWISE, USAGES
from opfuse.kernels.casts import trials
from opfuse.kernels.engine.compiling import Variant
from opfuse.kernels.engine.launch import Grid
from opfuse.kernels.engine.parameters import parameter_of
from opfuse.kernels.engine.registry import BITWISE, Launcher, kernel
from opfuse.kernels.engine.variants import C_TYPES, PACK, VECTOR, addresses, new_planes, on_bytes, variant_of
from opfuse.numerics import casts as definition
from opfuse.numerics.layouts import Layout, are_known, ceil_div, check_cast, check_choice, check_dtype, check_number
from opfuse.numerics.layouts import transposed as definition_of_transposed
from opfuse.numerics.scales import ScaleRounding

_AMAX = parameter_of("amax.cu")
_AMAX_BLOCK = 8192  # elements

TENSOR_SCALE, _CAST_TENSOR = parameter_of("tensor_scale.cuh", "TensorScale"), parameter_of("cast_tensor.cu")
_TRANSPOSE = parameter_of("transpose.cu")
_ROWS_BLOCK = 4096  # elements
_TILE, _TILE_THREADS = (256, 64), 512

MX_PLANES, _CAST_MX = parameter_of("mx_tile.cuh", "MxPlanes"), parameter_of("cast_mx.cu")
_MX_BLOCK = 32
_MX_ROWS_BLOCK = 8192  # elements
_MX_TILES = {False: (32, 256, 128), True: (128, 128, 256)}  # swizzled: rows, columns, threads
_MX_THREADS = 512  # of a multiprocessor at least
_MX_BIAS: dict[ScaleRounding, int] = {"ceil": 0x1FFFFF, "floor": 0}


_Work = tuple[Variant, str, Grid]
"""Variant, name of the kernel in it, and grid of a launch."""


@kernel("amax.cu", reference=definition.tensor_amax, tolerance=BITWISE, trials=trials.AMAX)
def tensor_amax(launch: Launcher, x: torch.Tensor) -> torch.Tensor:
    """Reads ``x`` once."""
    x = x.contiguous()
    out = torch.zeros(1, dtype=torch.float32, device=x.device)
    grid = Grid(ceil_div(x.numel(), _AMAX_BLOCK), 256)
    fields = _AMAX(x=x.data_ptr(), amax=out.data_ptr(), size=x.numel())
    launch(_amax_variant(x.dtype, on_bytes(x, VECTOR)), "amax", grid, _AMAX.layout, *fields, device=x.get_device())
    return out


@functools.cache
def _amax_variant(dtype: torch.dtype, on_vectors: bool) -> Variant:
    check_dtype(dtype, where="tensor_amax")
    return variant_of("amax.cu", _AMAX.layout, IN=C_TYPES[dtype], ALIGNED=on_vectors)


@kernel("cast_tensor.cu", reference=definition.cast_current, tolerance=BITWISE, trials=trials.CURRENT)
def cast_current(
    launch: Launcher, x: torch.Tensor, amax: torch.Tensor, layouts: Sequence[Layout], *, eps: float = 0.0, pow2: bool = False
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Reads ``x`` once; every thread computes the scale from ``amax``."""
    if not are_known(layouts):
        return definition.cast_current(x, amax, layouts, eps=eps, pow2=pow2)
    return _cast_tensor(launch, x, layouts, (0, check_number(amax, x.device, where="cast_current amax")), (eps, pow2))


@kernel("cast_tensor.cu", reference=definition.cast_recording, tolerance=BITWISE, trials=trials.RECORDING)
def cast_recording(
    launch: Launcher, x: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor, layouts: Sequence[Layout]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Reads ``x`` once, and finds its amax on the way."""
    if not are_known(layouts):
        return definition.cast_recording(x, scale, amax, layouts)
    device = x.device
    scaling = check_number(scale, device, where="cast_recording scale"), check_number(amax, device, where="cast_recording amax")
    return _cast_tensor(launch, x, layouts, scaling)


def _cast_tensor(
    launch: Launcher,
    x: torch.Tensor,
    layouts: Sequence[Layout],
    scaling: tuple[int, int],
    rule: tuple[float, bool] = (0.0, False),
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Data of the planes, and their decode scale, fp32 (1,).

    scaling: addresses of the scale, 0 if it is computed from the amax, and of the amax. rule: eps and pow2 of that computation.
    """
    x = x.contiguous()
    work = _tensor_work(tuple(layouts), x.shape, x.dtype, on_bytes(x, VECTOR), scaling[0] != 0)
    data = {layout.usage: torch.empty(layout.data_shape, dtype=torch.uint8, device=x.device) for layout in layouts}
    decode_scale = torch.empty(1, dtype=torch.float32, device=x.device)
    (scale, amax), (eps, pow2), (rows, columns) = scaling, rule, layouts[0].shape
    scaled = TENSOR_SCALE(scale=scale, amax=amax, decode_scale=decode_scale.data_ptr(), eps=eps, pow2=pow2)
    fields = _CAST_TENSOR(x=x.data_ptr(), **addresses(data, USAGES), scale=scaled, rows=rows, columns=columns)
    launch(*work, _CAST_TENSOR.layout, *fields, device=x.get_device())
    return [*data.values()], decode_scale


@functools.lru_cache(maxsize=4096)
def _tensor_work(
    layouts: tuple[Layout, ...], shape: tuple[int, ...], dtype: torch.dtype, on_vectors: bool, record: bool
) -> _Work:
    """The launch that casts a contiguous matrix of ``shape`` and ``dtype`` to these planes. record: under a given scale."""
    check_cast(shape, dtype, layouts, family="tensor", where="cast_recording" if record else "cast_current")
    rows, columns = shape
    usages = {layout.usage for layout in layouts}
    entry = "cast_tile" if COLUMNWISE in usages else "cast_rows"
    grids = {
        "cast_tile": Grid(ceil_div(rows, _TILE[0]) * ceil_div(columns, _TILE[1]), _TILE_THREADS),
        "cast_rows": Grid(ceil_div(rows * columns, _ROWS_BLOCK), 256),
    }
    variant = variant_of(
        "cast_tensor.cu",
        _CAST_TENSOR.layout,
        entry=entry,
        IN=C_TYPES[dtype],
        OUT=layouts[0].element.name.upper(),
        RECORD=record,
        ROWWISE=ROWWISE in usages,
        ALIGNED=on_vectors and not (entry == "cast_tile" and (columns % PACK or rows % VECTOR)),
    )
    return variant, entry, grids[entry]


@kernel("transpose.cu", reference=definition_of_transposed, tolerance=BITWISE, trials=trials.turned)
def transposed(launch: Launcher, x: torch.Tensor) -> torch.Tensor:
    """Reads ``x`` once: the codes of a columnwise plane under one scale, from those of the rowwise one.

    Elements are bytes; others take the torch definition.
    """
    if x.dtype != torch.uint8 or x.ndim != 2:
        return definition_of_transposed(x)
    x, (rows, columns) = x.contiguous(), x.shape
    aligned = on_bytes(x, PACK) and columns % PACK == 0 and rows % VECTOR == 0
    variant = variant_of("transpose.cu", _TRANSPOSE.layout, ALIGNED=aligned)
    turned = torch.empty((columns, rows), dtype=torch.uint8, device=x.device)
    grid = Grid(ceil_div(rows, _TILE[0]) * ceil_div(columns, _TILE[1]), _TILE_THREADS)
    fields = _TRANSPOSE(x=x.data_ptr(), turned=turned.data_ptr(), rows=rows, columns=columns)
    launch(variant, "transpose", grid, _TRANSPOSE.layout, *fields, device=x.get_device())
    return turned


@kernel("cast_mx.cu", reference=definition.cast_mx, tolerance=BITWISE, trials=trials.MX)
def cast_mx(
    launch: Launcher, x: torch.Tensor, layouts: Sequence[Layout], *, rows: int = 1, rounding: ScaleRounding = "ceil"
) -> list[definition.Encoded]:
    """Reads ``x`` once."""
    if not are_known(layouts):
        return definition.cast_mx(x, layouts, rows=rows, rounding=rounding)
    x = x.contiguous()
    work = _mx_work(tuple(layouts), x.shape, x.dtype, on_bytes(x, VECTOR), rows)
    planes, fields = new_mx(layouts, x.device, rounding)
    launch(*work, _CAST_MX.layout, *_CAST_MX(x=x.data_ptr(), planes=MX_PLANES(**fields)), device=x.get_device())
    return planes


@functools.lru_cache(maxsize=4096)
def _mx_work(layouts: tuple[Layout, ...], shape: tuple[int, ...], dtype: torch.dtype, on_vectors: bool, block_rows: int) -> _Work:
    """The launch that casts a contiguous matrix of ``shape`` and ``dtype`` to these planes, in blocks of ``block_rows`` x 32."""
    check_cast(shape, dtype, layouts, family="mx", where="cast_mx")
    check_choice(block_rows, definition.MX_ROWS, where="cast_mx rows")
    (rows, columns), usages, swizzled = shape, {layout.usage for layout in layouts}, layouts[0].swizzled
    tile_rows, tile_columns, threads = _MX_TILES[swizzled]
    tiled = block_rows > 1 or COLUMNWISE in usages or columns % _MX_BLOCK != 0
    entry = "cast_tile" if tiled else "cast_rows"
    aligned = on_vectors and not (tiled and columns % PACK)
    variant = variant_of(
        "cast_mx.cu",
        _CAST_MX.layout,
        entry=entry,
        IN=C_TYPES[dtype],
        OUT=layouts[0].element.name.upper(),
        ROWWISE=ROWWISE in usages,
        COLUMNWISE=COLUMNWISE in usages,
        SQUARE=block_rows > 1,
        SWIZZLED=swizzled,
        ALIGNED=aligned,
        RESIDENT=_MX_THREADS // threads if aligned else 1,
    )
    grids = {
        "cast_tile": Grid(ceil_div(rows, tile_rows) * ceil_div(columns, tile_columns), threads),
        "cast_rows": Grid(ceil_div(rows * columns, _MX_ROWS_BLOCK), 256),
    }
    return variant, entry, grids[entry]


def new_mx(
    layouts: Sequence[Layout], device: torch.device, rounding: ScaleRounding
) -> tuple[list[definition.Encoded], dict[str, int | float]]:
    """Memory for planes, and a kernel's fields, with what it adds to the bits of an amax before it takes the exponent."""
    check_choice(rounding, _MX_BIAS, where="cast_mx rounding")
    planes, fields = new_planes(layouts, device)
    return planes, {**fields, "bias": _MX_BIAS[rounding]}
