"""MXFP8 products of groups whose sizes only the device knows, in one launch of the library, by torch's ``scaled_grouped_mm``.

Groups are runs of one matrix's rows, as a table says where they lie (numerics/row_groups.py). Codes go over as planes store them.
Byte scales are moved into the order that the library reads: in it each group begins with a tile of its own, which are the tiles
of that table. So the order follows from the table, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType, SwizzleType

from opfuse.formats import COLUMNWISE, SCALE_TILE
from opfuse.kernels.products.backends import LibraryOperand, mx_operand
from opfuse.kernels.products.stored import Stored
from opfuse.numerics.layouts import load_scale, store_scale
from opfuse.numerics.row_groups import TILE, RowGroups, padded

_TILE_BYTES = SCALE_TILE[0] * SCALE_TILE[1]


class RunOperands(NamedTuple):
    """The operands of products of groups, as in runs.py: a left, of which each group meets a right, or one in such groups."""

    left: Stored
    rights: Sequence[Stored]
    groups: RowGroups

    def to(self, device: torch.device | str) -> RunOperands:
        """The same operands on another device."""
        moved = self.groups._replace(table=self.groups.table.to(device))
        return RunOperands(self.left.to(device), [right.to(device) for right in self.rights], moved)


class GroupedOperands(NamedTuple):
    """What ``scaled_grouped_mm`` is given: both codes, their byte scales, int32 (groups,) where each group ends.

    left: (lines, length), scales in two dimensions. right: (length, lines), or (groups, length, lines) with a line of scales for
    each group. filled: bool (groups,), which groups have rows, where a result for each is wanted; else None.
    """

    left: torch.Tensor
    right: torch.Tensor
    left_scales: torch.Tensor
    right_scales: torch.Tensor
    ends: torch.Tensor
    filled: torch.Tensor | None


def multiply_runs(runs: RunOperands, *, out_dtype: torch.dtype) -> torch.Tensor:
    """The products as runs.py defines them: (rows, right lines), or, over rows, (groups, left lines, right lines)."""
    over_rows = runs.left.layout.usage == COLUMNWISE
    given = operands_over_rows(runs) if over_rows else operands_of_rows(runs)
    scaling, order = [ScalingType.BlockWise1x32], [SwizzleType.SWIZZLE_32_4_4]
    result: torch.Tensor = F.scaled_grouped_mm(  # type: ignore[attr-defined]
        given.left,
        given.right,
        [given.left_scales],
        scaling,
        [given.right_scales],
        scaling,
        order,
        order,
        offs=given.ends,
        output_dtype=out_dtype,
    )
    if given.filled is not None:  # the library writes nothing where a sum has no terms
        result = torch.where(given.filled[:, None, None], result, 0)
    return result


def operands_of_rows(runs: RunOperands) -> GroupedOperands:
    """For a rowwise left: scales of each group begin on 128 lines of their own."""
    left, groups = runs.left, runs.groups
    apart = padded(load_scale(left.scale, left.layout), groups)
    scales = store_scale(apart, left.layout.replace(shape=(groups.padded_rows, left.layout.shape[1]), swizzled=True))
    rights = [mx_operand(right, True) for right in runs.rights]
    return GroupedOperands(
        mx_operand(left, False).codes,
        torch.stack([right.codes for right in rights]).transpose(1, 2),
        scales.view(torch.float8_e8m0fnu),
        torch.stack([right.scales[0].view(torch.uint8) for right in rights]).view(torch.float8_e8m0fnu),
        groups.entries[:, 1].contiguous(),
        None,
    )


def operands_over_rows(runs: RunOperands) -> GroupedOperands:
    """For columnwise planes, of matrices whose groups begin on tiles: all tiles of scales of a group lie together."""
    (right,), groups = runs.rights, runs.groups
    one, other = mx_operand(runs.left, False), mx_operand(right, True)
    tiles, first = groups.entries[:, 3], groups.entries[:, 2]
    return GroupedOperands(
        one.codes,
        other.codes.t(),
        _by_group(one, groups),
        _by_group(other, groups),
        (first + tiles) * TILE,
        tiles > 0,
    )


def _by_group(operand: LibraryOperand, groups: RowGroups) -> torch.Tensor:
    """Scales of lines over the padded rows, in tiles: of each group its tiles, line by line, in place of those of all groups."""
    columns = groups.tiles  # of tiles: 128 rows have four scales
    scales = operand.scales[0].view(torch.uint8).reshape(-1, columns, _TILE_BYTES)
    entries, column = groups.table.view(-1, 4).long(), torch.arange(columns, device=scales.device)
    of_tile = entries[groups.at(TILE) : groups.at(TILE) + columns, 0]
    _, _, first, count = groups.entries.long().index_select(0, of_tile).unbind(1)
    there = column < entries[0, 0]  # those behind the last group stay
    first, count = torch.where(there, first, column), torch.where(there, count, 1)
    line = torch.arange(len(scales), device=scales.device)[:, None]
    place = first * len(scales) + line * count + column - first
    flat = scales.reshape(-1, _TILE_BYTES)
    moved = torch.empty_like(flat).index_copy_(0, place.flatten(), flat)
    return moved.view(len(scales) * SCALE_TILE[0], columns * SCALE_TILE[1]).view(torch.float8_e8m0fnu)
