"""Casts of groups of rows (groups.py) with a scale for each group, or for each column of a group: one launch for all groups.

Where scales follow from amaxes that are not known, another launch finds these first. For scales of groups whose rows are read
through an index, two do: the first finds the amax of each row that there is, once for all places to which it goes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch

from opfuse.formats import COLUMNWISE, ROWWISE, USAGES, Usage
from opfuse.kernels.casts import trials
from opfuse.kernels.casts.groups import FOUR_BYTES, Reading, reading, tiles_of
from opfuse.kernels.casts.row import LINES, launch_rows, line_amaxes, line_fields
from opfuse.kernels.casts.tensor import TENSOR_SCALE
from opfuse.kernels.engine.compiling import Variant
from opfuse.kernels.engine.launch import Grid
from opfuse.kernels.engine.parameters import CStruct, parameter_of
from opfuse.kernels.engine.registry import BITWISE, Launcher, kernel
from opfuse.kernels.engine.variants import C_TYPES, addresses, variant_of
from opfuse.numerics import group_casts as definition
from opfuse.numerics.casts import Encoded
from opfuse.numerics.group_casts import check_group_cast
from opfuse.numerics.layouts import Layout, ceil_div, check_matrix, check_number
from opfuse.numerics.row_groups import MOST_GROUPS, RowGroups

_AMAX, _AMAX_LINES = parameter_of("amax_groups.cu"), parameter_of("amax_lines.cu")
_AMAX_COLUMNS, _CAST_COLUMNS, _THREADS = 256, 64, 256
_CAPACITIES = (8, 32, MOST_GROUPS)
"""Numbers of groups for which the kernel is compiled; a launch takes the least that is enough."""


def _grid(groups: RowGroups, columns: int, width: int) -> Grid:
    return Grid(groups.tiles * ceil_div(columns, width), _THREADS)


@kernel("amax_groups.cu", reference=definition.group_amaxes, tolerance=BITWISE, trials=trials.GROUP_AMAXES)
def group_amaxes(launch: Launcher, x: torch.Tensor, groups: RowGroups, *, index: torch.Tensor | None = None) -> torch.Tensor:
    """Reads ``x`` once. With an index, the amaxes of its rows are then read in the order of the index."""
    check_matrix(x.shape, x.dtype, where="group_amaxes")
    amaxes = torch.zeros(groups.number, dtype=torch.float32, device=x.device)
    if index is not None:
        (of_rows,) = line_amaxes.run(launch, x, [ROWWISE])
        _raise_amaxes(launch, reading(of_rows, index), groups, {COLUMNWISE: amaxes})
        return amaxes
    read = reading(x, None)
    variant = variant_of("amax_groups.cu", _AMAX.layout, IN=C_TYPES[x.dtype], ALIGNED=read.is_aligned)
    fields = _AMAX(x=read.x.data_ptr(), tiles=tiles_of(groups), amax=amaxes.data_ptr(), columns=x.shape[1])
    launch(variant, "amax_groups", _grid(groups, x.shape[1], _AMAX_COLUMNS), _AMAX.layout, *fields, device=x.get_device())
    return amaxes


@kernel("cast_tensor_groups.cu", reference=definition.cast_current_groups, tolerance=BITWISE, trials=trials.CURRENT_GROUPS)
def cast_current_groups(
    launch: Launcher,
    x: torch.Tensor,
    groups: RowGroups,
    amaxes: torch.Tensor,
    layouts: Sequence[Layout],
    *,
    index: torch.Tensor | None = None,
    eps: float = 0.0,
    pow2: bool = False,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Reads each row that is cast once."""
    scaling = [(0, amaxes.data_ptr() + i * amaxes.itemsize) for i in range(groups.number)]
    return _cast(launch, reading(x, index), groups, layouts, scaling, eps=eps, pow2=pow2)


@kernel("cast_tensor_groups.cu", reference=definition.cast_recording_groups, tolerance=BITWISE, trials=trials.RECORDING_GROUPS)
def cast_recording_groups(
    launch: Launcher,
    x: torch.Tensor,
    groups: RowGroups,
    states: Sequence[tuple[torch.Tensor, torch.Tensor]],
    layouts: Sequence[Layout],
    *,
    index: torch.Tensor | None = None,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Reads each row that is cast once, and finds the amaxes on the way."""
    where = "cast_recording_groups"
    scaling = [
        (check_number(scale, x.device, where=f"{where} scale"), check_number(amax, x.device, where=f"{where} amax"))
        for scale, amax in states
    ]
    return _cast(launch, reading(x, index), groups, layouts, scaling, record=True)


def _cast(
    launch: Launcher,
    read: Reading,
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
    dtype, device = read.x.dtype, read.x.device
    check_group_cast(read.shape, dtype, groups, layouts, family="tensor", where="cast_tensor_groups")
    usages = frozenset(layout.usage for layout in layouts)
    types = {"IN": C_TYPES[dtype], "OUT": layouts[0].element.name.upper()}
    how = {"ALIGNED": read.is_aligned, "RECORD": record, "INDEXED": read.is_indexed}
    variant, parameter = _tensor_work(usages, *types.items(), number=groups.number, **how)
    data = {layout.usage: torch.empty(layout.data_shape, dtype=torch.uint8, device=device) for layout in layouts}
    decode = torch.empty(groups.number, 1, dtype=torch.float32, device=device)
    rule, first = {"eps": eps, "pow2": pow2}, decode.data_ptr()
    each = [
        TENSOR_SCALE(scale=scale, amax=amax, decode_scale=first + i * decode.itemsize, **rule)
        for i, (scale, amax) in enumerate(scaling)
    ]
    lies = {"tiles": tiles_of(groups), "columns": read.columns, "down": groups.tiles, "count": groups.number}
    fields = parameter(**read.addresses, **addresses(data, USAGES), **lies, groups=each)
    grid = _grid(groups, read.columns, _CAST_COLUMNS)
    launch(variant, "cast_tensor_groups", grid, parameter.layout, *fields, device=read.x.get_device())
    return [*data.values()], decode


@functools.cache
def _tensor_work(usages: frozenset[Usage], *types: tuple[str, str], number: int, **defines: bool) -> tuple[Variant, CStruct]:
    """The variant that casts ``number`` groups to planes of these usages, and the struct of its parameter."""
    capacity = next(most for most in _CAPACITIES if most >= number)
    parameter = parameter_of("cast_tensor_groups.cu", GROUPS=capacity)
    planes = {"ROWWISE": ROWWISE in usages, "COLUMNWISE": COLUMNWISE in usages}
    return variant_of("cast_tensor_groups.cu", parameter.layout, **dict(types), **planes, **defines, GROUPS=capacity), parameter


@kernel("amax_lines.cu", reference=definition.group_line_amaxes, tolerance=BITWISE, trials=trials.GROUP_LINE_AMAXES)
def group_line_amaxes(
    launch: Launcher, x: torch.Tensor, groups: RowGroups, usages: Sequence[Usage], *, index: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Reads each row once. Amaxes of rows do not depend on groups."""
    if index is None and COLUMNWISE not in usages:
        return line_amaxes.run(launch, x, usages)
    check_matrix(x.shape, x.dtype, where="group_line_amaxes")
    read = reading(x, index)
    rows, columns = read.shape
    shapes = {ROWWISE: (rows,), COLUMNWISE: (groups.number, columns)}
    amaxes = {usage: torch.zeros(shapes[usage], dtype=torch.float32, device=x.device) for usage in usages}
    _raise_amaxes(launch, read, groups, amaxes)
    return [amaxes[usage] for usage in usages]


def _raise_amaxes(launch: Launcher, read: Reading, groups: RowGroups, amaxes: Mapping[Usage, torch.Tensor]) -> None:
    """Raise amaxes of rows (rows,) and of the columns of groups (groups, columns), fp32, in one launch."""
    how = {"ALIGNED": read.is_aligned, "GROUPED": True, "INDEXED": read.is_indexed}
    variant = variant_of("amax_lines.cu", _AMAX_LINES.layout, IN=C_TYPES[read.x.dtype], **how)
    fields = _AMAX_LINES(
        **read.addresses, **addresses(amaxes, USAGES), rows=groups.rows, columns=read.columns, tiles=tiles_of(groups)
    )
    grid = _grid(groups, read.columns, _AMAX_COLUMNS)
    launch(variant, "amax_lines", grid, _AMAX_LINES.layout, *fields, device=read.x.get_device())


@kernel("cast_lines.cu", reference=definition.cast_lines_groups, tolerance=BITWISE, trials=trials.LINES_GROUPS)
def cast_lines_groups(
    launch: Launcher,
    x: torch.Tensor,
    groups: RowGroups,
    amaxes: Sequence[torch.Tensor],
    layouts: Sequence[Layout],
    *,
    index: torch.Tensor | None = None,
    eps: float = 0.0,
    pow2: bool = False,
) -> list[Encoded]:
    """Reads each row that is cast once."""
    read = reading(x, index)
    check_group_cast(read.shape, x.dtype, groups, layouts, family="row", where="cast_lines_groups")
    rows, columns = read.shape
    shapes = {ROWWISE: (rows,), COLUMNWISE: (groups.number, columns)}
    planes = {
        layout.usage: (
            torch.empty(layout.data_shape, dtype=torch.uint8, device=x.device),
            torch.zeros(shapes[layout.usage], dtype=torch.float32, device=x.device),
        )
        for layout in layouts
    }
    variant = variant_of(
        "cast_lines.cu",
        LINES.layout,
        IN=C_TYPES[x.dtype],
        OUT=layouts[0].element.name.upper(),
        ROWWISE=ROWWISE in planes,
        COLUMNWISE=COLUMNWISE in planes,
        POW2=pow2,
        ALIGNED=read.is_aligned,
        GROUPED=True,
        INDEXED=read.is_indexed,
    )
    lies = {"tiles": tiles_of(groups), "groups": groups.table.data_ptr() + FOUR_BYTES, "down": groups.tiles}
    fields = LINES(**read.addresses, **line_fields(planes, amaxes), rows=rows, columns=columns, eps=eps, **lies)
    launch(variant, "cast_lines", _grid(groups, columns, _CAST_COLUMNS), LINES.layout, *fields, device=x.get_device())
    return [*planes.values()]


@kernel("cast_lines.cu", reference=definition.cast_row_groups, tolerance=BITWISE, trials=trials.ROW_GROUPS)
def cast_row_groups(
    launch: Launcher,
    x: torch.Tensor,
    groups: RowGroups,
    layouts: Sequence[Layout],
    *,
    index: torch.Tensor | None = None,
    eps: float = 0.0,
    pow2: bool = False,
) -> list[Encoded]:
    """Reads each row that is cast twice; for a rowwise plane alone, which depends on no groups, once as :func:`cast_row` does."""
    if all(layout.usage == ROWWISE for layout in layouts):
        read = reading(x, index)
        check_group_cast(read.shape, x.dtype, groups, layouts, family="row", where="cast_row_groups")
        return [launch_rows(launch, *read, layout, eps=eps, pow2=pow2) for layout in layouts]
    amaxes = group_line_amaxes.run(launch, x, groups, [layout.usage for layout in layouts], index=index)
    return cast_lines_groups.run(launch, x, groups, amaxes, layouts, index=index, eps=eps, pow2=pow2)
