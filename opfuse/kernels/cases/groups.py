"""The calls that kernels over groups of rows are compared with their definitions on, whose sizes the device alone knows."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from opfuse.formats import COLUMNWISE, E4M3, E5M2, ROWWISE, USAGES, Usage, fp8_block
from opfuse.kernels.cases.matrices import DTYPES, hard, matrix
from opfuse.kernels.cases.products import FORMATS, stored
from opfuse.kernels.casts.groups import cast_block_groups, row_groups
from opfuse.kernels.engine.registry import Arguments, Case, CaseTable
from opfuse.kernels.products.runs import product_of_rows, product_over_rows
from opfuse.kernels.products.stored import Stored
from opfuse.numerics.layouts import Layout
from opfuse.numerics.row_groups import RowGroups

SIZES: dict[str, Sequence[int]] = {
    "whole tiles": (256, 128, 0, 512),
    "parts of tiles": (1, 0, 300, 127, 0, 129, 16, 67),
    "no rows at either end": (0, 0, 200, 0),
    "fewer rows than groups": (0, 1, 0, 0, 1, 0),
    "one group": (259,),
    "the most groups": tuple(i * 7 % 11 for i in range(128)),
}

_USAGES: Sequence[Sequence[Usage]] = ((COLUMNWISE,), (ROWWISE,), USAGES, USAGES, USAGES)


def known_groups(sizes: str, device: torch.device) -> RowGroups:
    """Groups of these :data:`SIZES`."""
    splits = torch.tensor(SIZES[sizes])
    rows = int(splits.sum())
    return RowGroups(row_groups.reference(splits, rows).to(device), rows, len(splits))


def _table(sizes: str, dtype: torch.dtype, device: torch.device) -> Arguments:
    return Arguments((torch.tensor(SIZES[sizes], dtype=dtype, device=device), sum(SIZES[sizes])))


class _GroupsCast(NamedTuple):
    sizes: str
    columns: int
    dtype: str
    usages: Sequence[Usage]
    pow2: bool

    def arguments(self, device: torch.device) -> Arguments:
        groups = known_groups(self.sizes, device)
        shape = groups.rows, self.columns
        x = matrix(self.sizes, lambda draw, dtype: hard(*shape, draw, dtype), DTYPES[self.dtype], device)
        shapes = {ROWWISE: shape, COLUMNWISE: (groups.padded_rows, self.columns)}
        fmt = fp8_block(E4M3 if self.pow2 else E5M2, 1)
        layouts = [Layout(fmt, usage, shapes[usage]) for usage in self.usages]
        return Arguments((x, groups, layouts), {"eps": 0.0 if self.pow2 else 0.25, "pow2": self.pow2})


class _GroupsProduct(NamedTuple):
    sizes: str
    kind: str
    widths: tuple[int, int]

    def plane(self, which: int, usage: Usage, groups: RowGroups, draw: torch.Generator) -> Stored:
        """A plane of exact codes and scales, as wide as one of ``widths``; a tensor's scale is one for each group."""
        fmt, width, rows = FORMATS[self.kind][which], self.widths[which], groups.rows if usage == ROWWISE else groups.padded_rows
        device = groups.table.device
        made = stored(fmt, *((rows, width) if usage == ROWWISE else (width, rows)), draw, device)
        if fmt.family == "tensor":
            made = made._replace(scale=torch.exp2(torch.randint(-3, 4, (groups.number,), generator=draw).float()).to(device))
        return made._replace(layout=Layout(fmt, usage, (rows, width)))


class _OfRows(_GroupsProduct):
    def arguments(self, device: torch.device) -> Arguments:
        draw, groups, (length, columns) = torch.Generator().manual_seed(1), known_groups(self.sizes, device), self.widths
        left = self.plane(0, ROWWISE, groups, draw)
        rights = [stored(FORMATS[self.kind][1], columns, length, draw, device) for _ in range(groups.number)]
        return Arguments((left, rights, groups), {"out_dtype": torch.bfloat16})


class _OverRows(_GroupsProduct):
    def arguments(self, device: torch.device) -> Arguments:
        """Behind the rows of a group are zeros, which is what casts leave there."""
        draw, groups = torch.Generator().manual_seed(2), known_groups(self.sizes, device)
        planes = [self.plane(which, COLUMNWISE, groups, draw) for which in (0, 1)]
        there = torch.zeros(groups.padded_rows, dtype=torch.bool, device=device).index_fill_(0, groups.places(), True)
        cut = [made._replace(data=made.data.where(there, 0)) for made in planes]
        return Arguments((*cut, groups), {"out_dtype": torch.bfloat16})


_WIDTHS = ((144, 272), (912, 128), (32, 400), (1040, 336), (16, 16))

_TABLES: dict[str, Case] = {
    f"{name}, {dtype}": functools.partial(_table, name, dtype) for name in SIZES for dtype in (torch.int32, torch.int64)
}
_CASTS: dict[str, Case] = {
    f"{name}, {columns} columns, {dtype}, {'+'.join(usages)}, {pow2}": _GroupsCast(name, columns, dtype, usages, pow2).arguments
    for (name, dtype), columns, usages, pow2 in zip(
        itertools.product(SIZES, DTYPES),
        itertools.cycle((200, 67, 256, 1120)),
        itertools.cycle(_USAGES),
        itertools.cycle((True, False)),
    )
}
_OF_ROWS: dict[str, Case] = {
    f"{name}, {widths}": _OfRows(name, "1x128, 128x128", widths).arguments
    for name, widths in zip(SIZES, itertools.cycle(_WIDTHS))
}
_OVER_ROWS: dict[str, Case] = {
    f"{name}, {widths}": _OverRows(name, "1x128, 1x128", widths).arguments
    for name, widths in zip(SIZES, itertools.cycle(_WIDTHS))
}

CASES: CaseTable = {
    row_groups: _TABLES,
    cast_block_groups: _CASTS,
    product_of_rows: _OF_ROWS,
    product_over_rows: _OVER_ROWS,
}
