"""The casts of casts.py with one scale for a tensor, or for each of its lines, of a matrix whose groups of rows are cast apart.

Rowwise planes are of the matrix, columnwise ones of that in which each group begins on a tile, with codes 0 between the groups
(row_groups.py). Every group has a scale of its own, or every column of every group. Nothing waits for a device.

index: int64 (rows,), which row of ``x`` each row of the matrix is; None: the matrix is ``x``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from opfuse.formats import COLUMNWISE, ROWWISE, Usage
from opfuse.numerics.casts import Encoded, cast_delayed, cast_tensor, line_amaxes
from opfuse.numerics.layouts import Layout, check_cast, lines_of, store_data
from opfuse.numerics.row_groups import RowGroups, padded, rows_read
from opfuse.numerics.scalars import encode
from opfuse.numerics.scales import decode_scale, reciprocal, scale_from_amax


def group_amaxes(x: torch.Tensor, groups: RowGroups, *, index: torch.Tensor | None = None) -> torch.Tensor:
    """fp32 (groups,), the largest ``|x|`` of each; 0 of one without rows; inf and NaN propagate."""
    (rows,) = line_amaxes(x, [ROWWISE])
    return _raised(rows.new_zeros(groups.number), groups.of_rows(), rows_read(rows, index))


def _raised(numbers: torch.Tensor, index: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """fp32 that are not negative, raised where ``index`` says: by their bits, which order as they do, with NaN at the end."""
    return numbers.view(torch.int32).scatter_reduce(0, index, to.view(torch.int32), "amax").view(torch.float32)


def cast_current_groups(
    x: torch.Tensor,
    groups: RowGroups,
    amaxes: torch.Tensor,
    layouts: Sequence[Layout],
    *,
    index: torch.Tensor | None = None,
    eps: float = 0.0,
    pow2: bool = False,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Data of per-tensor planes, each group under the scale of its amax, fp32 (groups,), and decode scales (groups, 1)."""
    x = rows_read(x, index)
    rowwise = check_group_cast(x.shape, x.dtype, groups, layouts, family="tensor", where="cast_current_groups")
    scale = scale_from_amax(amaxes, layouts[0].element.max, eps=eps, pow2=pow2)
    (codes,) = cast_tensor(x, scale[groups.of_rows(), None], [rowwise])
    return _placed(codes, groups, layouts), decode_scale(scale, amaxes)[:, None]


def cast_recording_groups(
    x: torch.Tensor,
    groups: RowGroups,
    states: Sequence[tuple[torch.Tensor, torch.Tensor]],
    layouts: Sequence[Layout],
    *,
    index: torch.Tensor | None = None,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Likewise under scales that are known. states: of each group its scale and an amax, fp32 (1,), which is raised in place."""
    x = rows_read(x, index)
    rowwise = check_group_cast(x.shape, x.dtype, groups, layouts, family="tensor", where="cast_recording_groups")
    for (_, amax), found in zip(states, group_amaxes(x, groups).split(1), strict=True):
        amax.copy_(torch.maximum(amax, found))
    scale = torch.cat([scale for scale, _ in states])
    (codes,) = cast_delayed(x, scale[groups.of_rows(), None], [rowwise])
    return _placed(codes, groups, layouts), reciprocal(scale)[:, None]


def group_line_amaxes(
    x: torch.Tensor, groups: RowGroups, usages: Sequence[Usage], *, index: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """fp32 for each usage, as :func:`line_amaxes`: (rows,) of rows, (groups, columns) of the columns of each group."""
    x = rows_read(x, index)
    found = dict(zip(usages, line_amaxes(x, usages)))
    if COLUMNWISE in found:
        index = groups.of_rows()[:, None].expand(x.shape)
        found[COLUMNWISE] = _raised(x.new_zeros(groups.number, x.shape[1], dtype=torch.float32), index, x.float().abs())
    return [found[usage] for usage in usages]


def cast_lines_groups(
    x: torch.Tensor,
    groups: RowGroups,
    amaxes: Sequence[torch.Tensor],
    layouts: Sequence[Layout],
    *,
    index: torch.Tensor | None = None,
    eps: float = 0.0,
    pow2: bool = False,
) -> list[Encoded]:
    """Planes with an fp32 scale for each row, and for each column of each group, (groups, columns), under these amaxes.

    Columns of a group without rows have the scale 0.
    """
    x = rows_read(x, index)
    check_group_cast(x.shape, x.dtype, groups, layouts, family="row", where="cast_lines_groups")

    def plane(layout: Layout, amax: torch.Tensor) -> Encoded:
        scale = scale_from_amax(amax, layout.element.max, eps=eps, pow2=pow2)
        decoded = decode_scale(scale, amax)
        if layout.usage == ROWWISE:
            return store_data(encode(x.float() * scale[:, None], layout.element), layout), decoded
        codes = encode(x.float() * scale[groups.of_rows()], layout.element)
        first, end, *_ = groups.entries.unbind(1)
        return _placed(codes, groups, [layout])[0], decoded.where((first < end)[:, None], 0.0)

    return [plane(*each) for each in zip(layouts, amaxes, strict=True)]


def cast_row_groups(
    x: torch.Tensor,
    groups: RowGroups,
    layouts: Sequence[Layout],
    *,
    index: torch.Tensor | None = None,
    eps: float = 0.0,
    pow2: bool = False,
) -> list[Encoded]:
    """:func:`cast_lines_groups` under the amaxes of ``x``. Rows know no groups: they are those of :func:`cast_row`."""
    x = rows_read(x, index)
    amaxes = group_line_amaxes(x, groups, [layout.usage for layout in layouts])
    return cast_lines_groups(x, groups, amaxes, layouts, eps=eps, pow2=pow2)


def check_group_cast(
    shape: Sequence[int], dtype: torch.dtype, groups: RowGroups, layouts: Sequence[Layout], *, family: str, where: str
) -> Layout:
    """The rowwise layout of a matrix; QuantizerError or DtypeError unless ``layouts`` are planes of it in these groups."""
    return _check_group_cast(tuple(shape), dtype, groups.padded_rows, tuple(layouts), family=family, where=where)


@functools.lru_cache(maxsize=4096)
def _check_group_cast(
    shape: tuple[int, ...], dtype: torch.dtype, padded_rows: int, layouts: tuple[Layout, ...], *, family: str, where: str
) -> Layout:
    apart = {ROWWISE: shape, COLUMNWISE: (padded_rows, *shape[1:])}
    for layout in layouts:
        check_cast(apart[layout.usage], dtype, [layout], family=family, where=where)
    return layouts[0].replace(usage=ROWWISE, shape=shape)


def _placed(codes: torch.Tensor, groups: RowGroups, layouts: Sequence[Layout]) -> list[torch.Tensor]:
    """The codes of all rows as these planes store them."""
    apart = {ROWWISE: lambda: codes, COLUMNWISE: lambda: padded(codes, groups)}
    return [store_data(lines_of(apart[layout.usage](), layout.usage), layout) for layout in layouts]
