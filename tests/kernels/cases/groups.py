"""Cases of kernels over groups of rows whose sizes only the device knows."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from opfuse.formats import (
    COLUMNWISE,
    E4M3,
    E5M2,
    ROWWISE,
    USAGES,
    Element,
    NumberFormat,
    Usage,
    fp8_block,
    fp8_row,
    fp8_tensor,
)
from opfuse.kernels.casts.groups import cast_block_groups, row_groups
from opfuse.kernels.casts.scaled_groups import (
    cast_current_groups,
    cast_lines_groups,
    cast_recording_groups,
    cast_row_groups,
    group_amaxes,
    group_line_amaxes,
)
from opfuse.kernels.engine.registry import Arguments, Case, CaseTable
from opfuse.kernels.products.runs import product_of_rows, product_over_rows, products_into
from opfuse.kernels.products.stored import Stored
from opfuse.numerics import group_casts
from opfuse.numerics.layouts import Layout
from opfuse.numerics.row_groups import RowGroups
from tests.kernels.cases.matrices import DTYPES, hard, matrix
from tests.kernels.cases.products import FORMATS, stored

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
    """Groups of rows, as many in each as :data:`SIZES` says under this name."""
    return groups_of(SIZES[sizes], device)


def groups_of(sizes: Sequence[int], device: torch.device) -> RowGroups:
    """Groups of rows of these sizes."""
    splits, rows = torch.tensor(sizes), sum(sizes)
    return RowGroups(row_groups.reference(splits, rows).to(device), rows, len(splits))


def _index(groups: RowGroups, read: int) -> torch.Tensor:
    """Which of so many rows each row of the groups is: most of them several times, some of them never."""
    drawn = torch.randint(read, (groups.rows,), generator=torch.Generator().manual_seed(3))
    return drawn.to(groups.table.device)


def _table(sizes: str, dtype: torch.dtype, device: torch.device) -> Arguments:
    return Arguments((torch.tensor(SIZES[sizes], dtype=dtype, device=device), sum(SIZES[sizes])))


class _GroupsCast(NamedTuple):
    sizes: str
    columns: int
    dtype: str
    usages: Sequence[Usage]
    pow2: bool
    indexed: bool = False

    def arguments(self, device: torch.device) -> Arguments:
        groups = known_groups(self.sizes, device)
        shape = groups.rows, self.columns
        read = 1 + groups.rows // 2 if self.indexed else groups.rows
        x = matrix(self.sizes, lambda draw, dtype: hard(read, self.columns, draw, dtype), DTYPES[self.dtype], device)
        shapes = {ROWWISE: shape, COLUMNWISE: (groups.padded_rows, self.columns)}
        fmt = fp8_block(E4M3 if self.pow2 else E5M2, 1)
        layouts = [Layout(fmt, usage, shapes[usage]) for usage in self.usages]
        options = {"eps": 0.0 if self.pow2 else 0.25, "pow2": self.pow2}
        return Arguments((x, groups, layouts), {**options, "index": _index(groups, read)} if self.indexed else options)


class _GroupsProduct(NamedTuple):
    sizes: str
    kind: str
    widths: tuple[int, int]
    fast: bool

    def plane(self, which: int, usage: Usage, groups: RowGroups, draw: torch.Generator) -> Stored:
        """A plane of exact codes and scales, of the width ``widths[which]``; scales of tensors and columns differ by group."""
        fmt, width, rows = FORMATS[self.kind][which], self.widths[which], groups.rows if usage == ROWWISE else groups.padded_rows
        device = groups.table.device
        made = stored(fmt, *((rows, width) if usage == ROWWISE else (width, rows)), draw, device)
        if fmt.family == "tensor" or (fmt.family == "row" and usage == COLUMNWISE):
            shape = groups.number, *made.layout.scale_shape
            made = made._replace(scale=torch.exp2(torch.randint(-3, 4, shape, generator=draw).float()).to(device))
        return made._replace(layout=Layout(fmt, usage, (rows, width)))


_Multiplied = TypeVar("_Multiplied", bound=_GroupsProduct)


class _OfRows(_GroupsProduct):
    def arguments(self, device: torch.device) -> Arguments:
        draw, groups, (length, columns) = torch.Generator().manual_seed(1), known_groups(self.sizes, device), self.widths
        left = self.plane(0, ROWWISE, groups, draw)
        rights = [stored(FORMATS[self.kind][1], columns, length, draw, device) for _ in range(groups.number)]
        return Arguments((left, rights, groups), {"out_dtype": torch.bfloat16, "fast": self.fast})


class _OverRows(_GroupsProduct):
    def planes(self, device: torch.device) -> tuple[Stored, Stored, RowGroups]:
        """Two columnwise planes, with zeros behind the rows of each group, as casts leave them, and the groups."""
        draw, groups = torch.Generator().manual_seed(2), known_groups(self.sizes, device)
        planes = [self.plane(which, COLUMNWISE, groups, draw) for which in (0, 1)]
        there = torch.zeros(groups.padded_rows, dtype=torch.bool, device=device).index_fill_(0, groups.places(), True)
        left, right = (made._replace(data=made.data.where(there, 0)) for made in planes)
        return left, right, groups

    def arguments(self, device: torch.device) -> Arguments:
        return Arguments(self.planes(device), {"out_dtype": torch.bfloat16, "fast": self.fast})

    def into(self, device: torch.device, *, accumulate: bool) -> Arguments:
        """A call that adds into or overwrites given results; those of every third group are not wanted."""
        planes = left, right, groups = self.planes(device)
        shape = left.layout.lines[0], right.layout.lines[0]
        results = {i: torch.full(shape, -0.0 if i % 2 else 0.5, device=device) for i in range(groups.number) if i % 3 != 2}
        return Arguments((*planes, results), {"fast": self.fast, "accumulate": accumulate})


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
_SCALED = (("tensors", False), ("tensors, e5m2", True), ("rows", False), ("rows", True))
"""Kinds of operands other than blocks, and whether the unit keeps the sums (fast)."""


def _products(made: type[_Multiplied], blocks: str) -> dict[str, _Multiplied]:
    """All sizes with scales of blocks; the first four, of at most eight groups, with each of the other kinds, too."""
    found = [*((name, blocks, False) for name in SIZES), *((name, *kind) for kind in _SCALED for name in [*SIZES][:4])]
    each = [made(name, kind, widths, fast) for (name, kind, fast), widths in zip(found, itertools.cycle(_WIDTHS))]
    return {f"{one.sizes}, {one.kind}, {one.widths}{', fast' * one.fast}": one for one in each}


class _ScaledCast(NamedTuple):
    sizes: str
    columns: int
    dtype: str
    usages: Sequence[Usage]
    pow2: bool
    indexed: bool

    def read(self, device: torch.device) -> tuple[torch.Tensor, RowGroups, dict[str, Any]]:
        """A matrix of hard values, one NaN and one infinity among them if there are enough rows; its groups; an index, if any."""
        groups = known_groups(self.sizes, device)
        rows = 1 + groups.rows // 2 if self.indexed else groups.rows

        def made(draw: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
            x = hard(rows, self.columns, draw, dtype)
            if rows > 40:
                x[-1, -1], x[40, self.columns // 2] = -torch.inf, torch.nan
            return x

        x = matrix(self.sizes, made, DTYPES[self.dtype], device)
        return x, groups, {"index": _index(groups, rows)} if self.indexed else {}

    def layouts(self, groups: RowGroups, of: Callable[[Element], NumberFormat]) -> list[Layout]:
        shapes = {ROWWISE: (groups.rows, self.columns), COLUMNWISE: (groups.padded_rows, self.columns)}
        return [Layout(of(E4M3 if self.pow2 else E5M2), usage, shapes[usage]) for usage in self.usages]

    @property
    def rule(self) -> dict[str, Any]:
        return {"eps": 0.0 if self.pow2 else 0.25, "pow2": self.pow2}

    def amaxes(self, device: torch.device) -> Arguments:
        x, groups, index = self.read(device)
        return Arguments((x, groups), index)

    def line_amaxes(self, device: torch.device) -> Arguments:
        x, groups, index = self.read(device)
        return Arguments((x, groups, self.usages), index)

    def current(self, device: torch.device) -> Arguments:
        x, groups, index = self.read(device)
        amaxes = group_casts.group_amaxes(x, groups, **index)
        return Arguments((x, groups, amaxes, self.layouts(groups, fp8_tensor)), {**index, **self.rule})

    def recording(self, device: torch.device) -> Arguments:
        x, groups, index = self.read(device)
        draw = torch.Generator().manual_seed(3)
        scales = [scale.to(device) for scale in torch.exp2(torch.randint(-20, 20, (groups.number,), generator=draw)).split(1)]
        amaxes = [torch.full((1,), 0.5 * (i % 2), device=device) for i in range(groups.number)]
        return Arguments((x, groups, [*zip(scales, amaxes)], self.layouts(groups, fp8_tensor)), index)

    def lines(self, device: torch.device) -> Arguments:
        x, groups, index = self.read(device)
        amaxes = group_casts.group_line_amaxes(x, groups, self.usages, **index)
        return Arguments((x, groups, amaxes, self.layouts(groups, fp8_row)), {**index, **self.rule})

    def row(self, device: torch.device) -> Arguments:
        x, groups, index = self.read(device)
        return Arguments((x, groups, self.layouts(groups, fp8_row)), {**index, **self.rule})


_SCALED_CASTS = {
    f"{name}, {columns} columns, {dtype}, {'+'.join(usages)}, {pow2}{', indexed' * indexed}": _ScaledCast(
        name, columns, dtype, usages, pow2, indexed
    )
    for (indexed, name, dtype), columns, usages, pow2 in zip(
        itertools.product((False, True), SIZES, DTYPES),
        itertools.cycle((200, 67, 256, 1120)),
        itertools.cycle(_USAGES),
        itertools.cycle((True, False)),
    )
}
_INDEXED: dict[str, Case] = {
    f"{name}, {columns} columns, {dtype}, {'+'.join(usages)}, indexed": _GroupsCast(
        name, columns, dtype, usages, True, True
    ).arguments
    for name, columns, dtype, usages in zip(
        SIZES,
        itertools.cycle((256, 200, 67, 1120)),
        itertools.cycle(DTYPES),
        itertools.cycle((USAGES, (ROWWISE,), USAGES, (COLUMNWISE,))),
    )
}


def _cases(made: Callable[[_ScaledCast, torch.device], Arguments]) -> dict[str, Case]:
    return {name: functools.partial(made, case) for name, case in _SCALED_CASTS.items()}


_OF_ROWS: dict[str, Case] = {name: case.arguments for name, case in _products(_OfRows, "1x128, 128x128").items()}
_OVER: dict[str, _OverRows] = _products(_OverRows, "1x128, 1x128")
_OVER_ROWS: dict[str, Case] = {name: case.arguments for name, case in _OVER.items()}
_INTO: dict[str, Case] = {
    f"{name}{', added' * accumulate}": functools.partial(case.into, accumulate=accumulate)
    for (name, case), accumulate in zip(_OVER.items(), itertools.cycle((True, True, False)))
}

CASES: CaseTable = {
    row_groups: _TABLES,
    cast_block_groups: {**_CASTS, **_INDEXED},
    group_amaxes: _cases(_ScaledCast.amaxes),
    cast_current_groups: _cases(_ScaledCast.current),
    cast_recording_groups: _cases(_ScaledCast.recording),
    group_line_amaxes: _cases(_ScaledCast.line_amaxes),
    cast_lines_groups: _cases(_ScaledCast.lines),
    cast_row_groups: _cases(_ScaledCast.row),
    product_of_rows: _OF_ROWS,
    product_over_rows: _OVER_ROWS,
    products_into: _INTO,
}
