"""Casts of groups of rows (groups.py) with a scale for each group, or for each column of a group: one launch for all groups.

Where scales follow from amaxes that are not known, another launch finds these first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from opfuse.formats import COLUMNWISE, ROWWISE, USAGES, Usage
from opfuse.kernels.casts.row import cast_row, line_amaxes
from opfuse.kernels.casts.tensor import TENSOR_SCALE
from opfuse.kernels.engine.compiling import Variant
from opfuse.kernels.engine.launch import Grid
from opfuse.kernels.engine.parameters import CStruct, parameter_of
from opfuse.kernels.engine.registry import BITWISE, Launcher, kernel
from opfuse.kernels.engine.variants import C_TYPES, PACK, VECTOR, on_bytes, variant_of
from opfuse.numerics import group_casts as definition
from opfuse.numerics.casts import Encoded
from opfuse.numerics.checks import check_matrix, check_number
from opfuse.numerics.group_casts import check_group_cast
from opfuse.numerics.layouts import Layout, ceil_div
from opfuse.numerics.row_groups import MOST_GROUPS, TILE, RowGroups

_AMAX, _AMAX_LINES = parameter_of("amax_groups.cu"), parameter_of("amax_lines.cu")
_LINES, _LINE = parameter_of("cast_lines.cu"), parameter_of("cast_lines.cu", "Lines")
_NO_LINE = _LINE(codes=0, amax=0, scale=0)
_AMAX_COLUMNS, _CAST_COLUMNS, _THREADS, _FOUR_BYTES = 256, 64, 256, 16
_CAPACITIES = (8, 32, MOST_GROUPS)
"""Numbers of groups for which the kernel is compiled; a launch takes the least that is enough."""


def _tiles(groups: RowGroups) -> int:
    """The address of the tiles in the table of groups."""
    return groups.table.data_ptr() + groups.at(TILE) * _FOUR_BYTES


def _grid(groups: RowGroups, columns: int, width: int) -> Grid:
    return Grid(groups.tiles * ceil_div(columns, width), _THREADS)


def _is_aligned(x: torch.Tensor) -> bool:
    return on_bytes(x, VECTOR) and x.shape[1] % PACK == 0


@kernel("amax_groups.cu", reference=definition.group_amaxes, tolerance=BITWISE)
def group_amaxes(launch: Launcher, x: torch.Tensor, groups: RowGroups) -> torch.Tensor:
    """Reads ``x`` once."""
    check_matrix(x.shape, x.dtype, where="group_amaxes")
    x = x.contiguous()
    amaxes = torch.zeros(groups.number, dtype=torch.float32, device=x.device)
    variant = variant_of("amax_groups.cu", _AMAX.layout, IN=C_TYPES[x.dtype], ALIGNED=_is_aligned(x))
    fields = _AMAX(x=x.data_ptr(), tiles=_tiles(groups), amax=amaxes.data_ptr(), columns=x.shape[1])
    launch(variant, "amax_groups", _grid(groups, x.shape[1], _AMAX_COLUMNS), _AMAX.layout, *fields, device=x.get_device())
    return amaxes


@kernel("cast_tensor_groups.cu", reference=definition.cast_current_groups, tolerance=BITWISE)
def cast_current_groups(
    launch: Launcher,
    x: torch.Tensor,
    groups: RowGroups,
    amaxes: torch.Tensor,
    layouts: Sequence[Layout],
    *,
    eps: float = 0.0,
    pow2: bool = False,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Reads ``x`` once."""
    scaling = [(0, amaxes.data_ptr() + i * amaxes.itemsize) for i in range(groups.number)]
    return _cast(launch, x, groups, layouts, scaling, eps=eps, pow2=pow2)


@kernel("cast_tensor_groups.cu", reference=definition.cast_recording_groups, tolerance=BITWISE)
def cast_recording_groups(
    launch: Launcher,
    x: torch.Tensor,
    groups: RowGroups,
    states: Sequence[tuple[torch.Tensor, torch.Tensor]],
    layouts: Sequence[Layout],
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Reads ``x`` once, and finds the amaxes on the way."""
    where = "cast_recording_groups"
    scaling = [
        (check_number(scale, x.device, where=f"{where} scale"), check_number(amax, x.device, where=f"{where} amax"))
        for scale, amax in states
    ]
    return _cast(launch, x, groups, layouts, scaling, record=True)


def _cast(
    launch: Launcher,
    x: torch.Tensor,
    groups: RowGroups,
    layouts: Sequence[Layout],
    scaling: Sequence[tuple[int, int]],
    *,
    eps: float = 0.0,
    pow2: bool = False,
    record: bool = False,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Data of the planes, and fp32 decode scales (groups, 1).

    scaling: for each group the addresses of its scale, 0 if that is computed from its amax, and of its amax.
    """
    check_group_cast(x, groups, layouts, family="tensor", where="cast_tensor_groups")
    x = x.contiguous()
    usages = frozenset(layout.usage for layout in layouts)
    types = {"IN": C_TYPES[x.dtype], "OUT": layouts[0].element.name.upper()}
    variant, parameter = _tensor_work(usages, *types.items(), number=groups.number, ALIGNED=_is_aligned(x), RECORD=record)
    data = {layout.usage: torch.empty(layout.data_shape, dtype=torch.uint8, device=x.device) for layout in layouts}
    decode = torch.empty(groups.number, 1, dtype=torch.float32, device=x.device)
    rule, first = {"eps": eps, "pow2": pow2}, decode.data_ptr()
    each = [
        TENSOR_SCALE(scale=scale, amax=amax, decode_scale=first + i * decode.itemsize, **rule)
        for i, (scale, amax) in enumerate(scaling)
    ]
    out = {usage: data[usage].data_ptr() if usage in data else 0 for usage in USAGES}
    lies = {"tiles": _tiles(groups), "columns": x.shape[1], "down": groups.tiles, "count": groups.number}
    fields = parameter(x=x.data_ptr(), **out, **lies, groups=each)
    grid = _grid(groups, x.shape[1], _CAST_COLUMNS)
    launch(variant, "cast_tensor_groups", grid, parameter.layout, *fields, device=x.get_device())
    return [data[layout.usage] for layout in layouts], decode


@functools.cache
def _tensor_work(usages: frozenset[Usage], *types: tuple[str, str], number: int, **defines: bool) -> tuple[Variant, CStruct]:
    """The variant that casts ``number`` groups to planes of these usages, and the struct of its parameter."""
    capacity = next(most for most in _CAPACITIES if most >= number)
    parameter = parameter_of("cast_tensor_groups.cu", GROUPS=capacity)
    planes = {"ROWWISE": ROWWISE in usages, "COLUMNWISE": COLUMNWISE in usages}
    return variant_of("cast_tensor_groups.cu", parameter.layout, **dict(types), **planes, **defines, GROUPS=capacity), parameter


@kernel("amax_lines.cu", reference=definition.group_line_amaxes, tolerance=BITWISE)
def group_line_amaxes(launch: Launcher, x: torch.Tensor, groups: RowGroups, usages: Sequence[Usage]) -> list[torch.Tensor]:
    """Reads ``x`` once. Amaxes of rows do not depend on groups."""
    if COLUMNWISE not in usages:
        return line_amaxes.run(launch, x, usages)
    check_matrix(x.shape, x.dtype, where="group_line_amaxes")
    x = x.contiguous()
    rows, columns = x.shape
    shapes = {ROWWISE: (rows,), COLUMNWISE: (groups.number, columns)}
    amaxes = {usage: torch.zeros(shapes[usage], dtype=torch.float32, device=x.device) for usage in usages}
    addresses = {usage: amaxes[usage].data_ptr() if usage in amaxes else 0 for usage in USAGES}
    variant = variant_of("amax_lines.cu", _AMAX_LINES.layout, IN=C_TYPES[x.dtype], ALIGNED=_is_aligned(x), GROUPED=True)
    fields = _AMAX_LINES(x=x.data_ptr(), **addresses, rows=rows, columns=columns, tiles=_tiles(groups))
    launch(variant, "amax_lines", _grid(groups, columns, _AMAX_COLUMNS), _AMAX_LINES.layout, *fields, device=x.get_device())
    return [amaxes[usage] for usage in usages]


@kernel("cast_lines.cu", reference=definition.cast_lines_groups, tolerance=BITWISE)
def cast_lines_groups(
    launch: Launcher,
    x: torch.Tensor,
    groups: RowGroups,
    amaxes: Sequence[torch.Tensor],
    layouts: Sequence[Layout],
    *,
    eps: float = 0.0,
    pow2: bool = False,
) -> list[Encoded]:
    """Reads ``x`` once."""
    check_group_cast(x, groups, layouts, family="row", where="cast_lines_groups")
    x = x.contiguous()
    rows, columns = x.shape
    shapes = {ROWWISE: (rows,), COLUMNWISE: (groups.number, columns)}
    planes = {
        layout.usage: (
            torch.empty(layout.data_shape, dtype=torch.uint8, device=x.device),
            torch.zeros(shapes[layout.usage], dtype=torch.float32, device=x.device),
        )
        for layout in layouts
    }
    known = {layout.usage: amax for layout, amax in zip(layouts, amaxes, strict=True)}
    row, column = (
        _LINE(codes=planes[u][0].data_ptr(), amax=known[u].data_ptr(), scale=planes[u][1].data_ptr()) if u in planes else _NO_LINE
        for u in USAGES
    )
    variant = variant_of(
        "cast_lines.cu",
        _LINES.layout,
        IN=C_TYPES[x.dtype],
        OUT=layouts[0].element.name.upper(),
        ROWWISE=ROWWISE in planes,
        COLUMNWISE=COLUMNWISE in planes,
        POW2=pow2,
        ALIGNED=_is_aligned(x),
        GROUPED=True,
    )
    lies = {"tiles": _tiles(groups), "groups": groups.table.data_ptr() + _FOUR_BYTES, "down": groups.tiles}
    fields = _LINES(x=x.data_ptr(), row=row, column=column, rows=rows, columns=columns, eps=eps, **lies)
    launch(variant, "cast_lines", _grid(groups, columns, _CAST_COLUMNS), _LINES.layout, *fields, device=x.get_device())
    return [planes[layout.usage] for layout in layouts]


@kernel("cast_lines.cu", reference=definition.cast_row_groups, tolerance=BITWISE)
def cast_row_groups(
    launch: Launcher, x: torch.Tensor, groups: RowGroups, layouts: Sequence[Layout], *, eps: float = 0.0, pow2: bool = False
) -> list[Encoded]:
    """Reads ``x`` twice. Rowwise planes do not depend on groups: alone, :func:`cast_row` makes them, and reads ``x`` once."""
    if all(layout.usage == ROWWISE for layout in layouts):
        return cast_row.run(launch, x, layouts, eps=eps, pow2=pow2)
    amaxes = group_line_amaxes.run(launch, x, groups, [layout.usage for layout in layouts])
    return cast_lines_groups.run(launch, x, groups, amaxes, layouts, eps=eps, pow2=pow2)
