"""Casts with an fp32 scale for each line, a row or a column: kernels with the bits of numerics/casts.py.

Where only rows have scales, one kernel reads the tensor once. Where columns have scales too, one kernel finds the amaxes of all
lines, and a second one casts.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from opfuse.formats import COLUMNWISE, ROWWISE, USAGES, Usage
from opfuse.kernels.casts import trials
from opfuse.kernels.engine import rows
from opfuse.kernels.engine.compiling import Variant
from opfuse.kernels.engine.launch import Grid
from opfuse.kernels.engine.parameters import parameter_of
from opfuse.kernels.engine.registry import BITWISE, Launcher, kernel
from opfuse.kernels.engine.variants import C_TYPES, PACK, VECTOR, addresses, new_plane, on_bytes, variant_of
from opfuse.numerics import casts as definition
from opfuse.numerics.layouts import Layout, are_known, ceil_div, check_amaxes, check_cast, check_matrix

_AMAX = parameter_of("amax_lines.cu")
_AMAX_TILE, _AMAX_THREADS = (128, 256), 256
_ROW = parameter_of("cast_row.cu")
_RESIDENT = {True: 4, False: 1}
"""Blocks of threads that must fit on a multiprocessor: with vector loads (True), or element by element, in more registers."""
LINES, _LINE = parameter_of("cast_lines.cu"), parameter_of("cast_lines.cu", "Lines")
_NO_LINE = _LINE(codes=0, amax=0, scale=0)
_TILE, _TILE_THREADS = (256, 64), 512


@kernel("amax_lines.cu", reference=definition.line_amaxes, tolerance=BITWISE, trials=trials.LINE_AMAXES)
def line_amaxes(launch: Launcher, x: torch.Tensor, usages: Sequence[Usage]) -> list[torch.Tensor]:
    """Reads ``x`` once."""
    check_matrix(x.shape, x.dtype, where="line_amaxes")
    x = x.contiguous()
    height, width = x.shape
    sizes = {ROWWISE: height, COLUMNWISE: width}
    amaxes = {usage: torch.zeros(sizes[usage], dtype=torch.float32, device=x.device) for usage in usages}
    grid = Grid(ceil_div(height, _AMAX_TILE[0]) * ceil_div(width, _AMAX_TILE[1]), _AMAX_THREADS)
    variant = variant_of("amax_lines.cu", _AMAX.layout, IN=C_TYPES[x.dtype], ALIGNED=on_bytes(x, VECTOR) and width % PACK == 0)
    fields = _AMAX(x=x.data_ptr(), **addresses(amaxes, USAGES), rows=height, columns=width, tiles=0, index=0)
    launch(variant, "amax_lines", grid, _AMAX.layout, *fields, device=x.get_device())
    return [amaxes[usage] for usage in usages]


@kernel("cast_row.cu", reference=definition.cast_row, tolerance=BITWISE, trials=trials.ROW)
def cast_row(
    launch: Launcher, x: torch.Tensor, layouts: Sequence[Layout], *, eps: float = 0.0, pow2: bool = False
) -> list[definition.Encoded]:
    """Reads ``x`` once for rows alone, twice for columns or both."""
    if not are_known(layouts):
        return definition.cast_row(x, layouts, eps=eps, pow2=pow2)
    x = x.contiguous()
    check_cast(x.shape, x.dtype, layouts, family="row", where="cast_row")
    usages = [layout.usage for layout in layouts]
    if COLUMNWISE in usages:
        return cast_lines.run(launch, x, line_amaxes.run(launch, x, usages), layouts, eps=eps, pow2=pow2)
    return [launch_rows(launch, x, None, layouts[0], eps=eps, pow2=pow2)]


def launch_rows(
    launch: Launcher, x: torch.Tensor, index: torch.Tensor | None, layout: Layout, *, eps: float, pow2: bool
) -> definition.Encoded:
    """The rowwise plane of a contiguous matrix, or of its rows ``index``, int64 (rows,), contiguous."""
    variant = _row_variant(x.shape[1], x.dtype, on_bytes(x, VECTOR), layout.element.name, bool(pow2), indexed=index is not None)
    data, scale = plane = new_plane(layout, x.device)
    height, width = layout.shape
    tensors = addresses({"x": x, "codes": data, "scale": scale, "index": index})
    fields = _ROW(**tensors, rows=height, columns=width, eps=eps, packs=rows.packs(width))
    launch(variant, "cast_row", rows.grid(height, width), _ROW.layout, *fields, device=x.get_device())
    return plane


@functools.lru_cache(maxsize=4096)
def _row_variant(columns: int, dtype: torch.dtype, on_vectors: bool, element: str, pow2: bool, *, indexed: bool) -> Variant:
    """The variant that casts rows of ``columns`` elements of ``dtype``."""
    is_aligned = on_vectors and columns % PACK == 0
    shared = rows.defines(columns, rows.held(columns, dtype.itemsize), is_aligned=is_aligned)
    own: dict[str, Any] = {"OUT": element.upper(), "POW2": pow2, "RESIDENT": _RESIDENT[is_aligned], "INDEXED": indexed}
    return variant_of("cast_row.cu", _ROW.layout, IN=C_TYPES[dtype], **own, **shared)


@kernel("cast_lines.cu", reference=definition.cast_lines, tolerance=BITWISE, trials=trials.LINES)
def cast_lines(
    launch: Launcher,
    x: torch.Tensor,
    amaxes: Sequence[torch.Tensor],
    layouts: Sequence[Layout],
    *,
    eps: float = 0.0,
    pow2: bool = False,
) -> list[definition.Encoded]:
    """Reads ``x`` once."""
    if not are_known(layouts):
        return definition.cast_lines(x, amaxes, layouts, eps=eps, pow2=pow2)
    x = x.contiguous()
    variant, grid = _lines_work(tuple(layouts), x.shape, x.dtype, on_bytes(x, VECTOR), bool(pow2))
    check_amaxes(amaxes, layouts, x.device, where="cast_lines")
    planes = {layout.usage: new_plane(layout, x.device) for layout in layouts}
    alone = {"down": 0, "tiles": 0, "groups": 0, "index": 0}
    fields = LINES(x=x.data_ptr(), **line_fields(planes, amaxes), rows=x.shape[0], columns=x.shape[1], eps=eps, **alone)
    launch(variant, "cast_lines", grid, LINES.layout, *fields, device=x.get_device())
    return [*planes.values()]


def line_fields(planes: Mapping[Usage, definition.Encoded], amaxes: Sequence[torch.Tensor]) -> dict[str, tuple[int | float, ...]]:
    """The fields ``row`` and ``column`` of the parameter of cast_lines.cu: codes, amaxes and scales of each plane."""
    made = dict.fromkeys(USAGES, _NO_LINE)
    for (usage, (codes, scale)), amax in zip(planes.items(), amaxes, strict=True):
        made[usage] = _LINE(**addresses({"codes": codes, "amax": amax, "scale": scale}))
    return {"row": made[ROWWISE], "column": made[COLUMNWISE]}


@functools.lru_cache(maxsize=4096)
def _lines_work(
    layouts: tuple[Layout, ...], shape: tuple[int, ...], dtype: torch.dtype, on_vectors: bool, pow2: bool
) -> tuple[Variant, Grid]:
    """The variant and grid that cast a contiguous matrix of ``shape`` and ``dtype`` to these planes."""
    check_cast(shape, dtype, layouts, family="row", where="cast_lines")
    (height, width), usages = shape, {layout.usage for layout in layouts}
    variant = variant_of(
        "cast_lines.cu",
        LINES.layout,
        IN=C_TYPES[dtype],
        OUT=layouts[0].element.name.upper(),
        ROWWISE=ROWWISE in usages,
        COLUMNWISE=COLUMNWISE in usages,
        POW2=pow2,
        ALIGNED=on_vectors and width % PACK == 0 and not (height % VECTOR and COLUMNWISE in usages),
    )
    return variant, Grid(ceil_div(height, _TILE[0]) * ceil_div(width, _TILE[1]), _TILE_THREADS)
