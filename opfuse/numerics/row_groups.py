"""Groups of consecutive rows of a matrix: the host knows how many groups there are, only the device how many rows each has.

A table of int32 tells kernels where the groups lie. Its entries have four numbers:

    header     one entry: [tiles of 128 rows, tiles of 256 rows, 0, 0]
    groups     one for each group: [first row, end, first tile of 128 rows, number of tiles of 128 rows]
    tiles      one for each tile of 128 rows: [group, first row, end of the group, 0]; room for as many as any sizes take
    tall       the same for tiles of 256 rows

No tile has rows of two groups, so a group that is cast or multiplied tile by tile has the bits that it has alone. Entries behind
the last tile are zeros. In a plane stored by columns, each group begins on a tile of 128 rows, and zeros fill its last tile.

Groups lie inside of the matrix, whatever the sizes: a size below 0 counts as 0, and rows behind the last one are cut off.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

TILE, TALL = 128, 256
MOST_GROUPS = 128
"""How many groups a table can have."""

_FOUR = 4


class RowGroups(NamedTuple):
    """The ``rows`` of a matrix in a ``number`` of groups, which lie as ``table`` says."""

    table: torch.Tensor
    rows: int
    number: int

    @property
    def tiles(self) -> int:
        """How many tiles of 128 rows there are, at most."""
        return most_tiles(self.rows, self.number, TILE)

    @property
    def padded_rows(self) -> int:
        """How many rows the matrix has in which each group begins on a tile."""
        return TILE * self.tiles

    def at(self, height: int) -> int:
        """The number of the entry at which the tiles of ``height`` rows begin."""
        return 1 + self.number + (self.tiles if height == TALL else 0)

    @property
    def entries(self) -> torch.Tensor:
        """int32 (number, 4): the table's entries of groups."""
        return self.table.view(-1, _FOUR)[1 : 1 + self.number]

    def of_rows(self) -> torch.Tensor:
        """int64 (rows,): the group of each row. Nothing waits for the device."""
        rows = torch.arange(self.rows, device=self.table.device)
        return torch.searchsorted(self.entries[:, 1].long(), rows, right=True).clamp_(max=self.number - 1)

    def places(self) -> torch.Tensor:
        """int64 (rows,): where each row lies in the padded matrix. Nothing waits for the device."""
        first, _, tile, _ = self.entries.long().unbind(1)
        return torch.arange(self.rows, device=self.table.device) + (tile * TILE - first).index_select(0, self.of_rows())

    def ranges(self) -> list[tuple[int, int, int]]:
        """First row, end and first tile of each group, for which the host waits."""
        return [(int(first), int(end), int(tile)) for first, end, tile, _ in self.entries]  # reads that a recording sees


def most_tiles(rows: int, groups: int, height: int) -> int:
    """How many tiles of ``height`` rows there are at most, for any sizes of groups; each may fill its last tile in part."""
    return (rows + (height - 1) * min(groups, rows)) // height


def table_size(rows: int, groups: int) -> int:
    """How many numbers a table has."""
    return _FOUR * (1 + groups + most_tiles(rows, groups, TILE) + most_tiles(rows, groups, TALL))


def row_groups(splits: torch.Tensor, rows: int) -> torch.Tensor:
    """The table, int32, of a matrix of ``rows`` rows. splits: integers (groups,), how many rows each group has."""
    table = torch.zeros(table_size(rows, len(splits)) // _FOUR, _FOUR, dtype=torch.int32, device="cpu")
    entries: dict[int, list[tuple[int, int, int, int]]] = {TILE: [], TALL: []}
    end = 0
    for group, size in enumerate(map(int, splits)):  # reads that a recording sees
        first, end = end, min(end + max(size, 0), rows)
        table[1 + group] = torch.tensor(
            (first, end, len(entries[TILE]), -(-(end - first) // TILE)), dtype=torch.int32, device="cpu"
        )
        for height, found in entries.items():
            found += [(group, row, end, 0) for row in range(first, end, height)]
    at = 1 + len(splits)
    for place, height in enumerate((TILE, TALL)):
        found = entries[height]
        table[0, place] = len(found)
        if found:
            table[at : at + len(found)] = torch.tensor(found, dtype=torch.int32, device="cpu")
        at += most_tiles(rows, len(splits), height)
    return table.flatten().to(splits.device)


def rows_read(x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """The matrix that a cast of groups is of: rows ``index`` of ``x`` (tokens, columns), int64 (rows,); None: ``x``."""
    return x if index is None else x.index_select(0, index)


def padded(x: torch.Tensor, groups: RowGroups) -> torch.Tensor:
    """``x`` (rows, columns) with each group on a tile, and zeros between them: (padded rows, columns)."""
    return x.new_zeros(groups.padded_rows, x.shape[1]).index_copy_(0, groups.places(), x)
