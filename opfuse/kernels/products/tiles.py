"""Products in which a row has the same bits whatever rows are beside it: made in tiles, all of one number of rows.

A library chooses how it multiplies by the number of rows, and with that the order of its sums: a row alone and the same row
in a batch differ in their last bits. Here it is asked for one shape only, of operands that start on one alignment.

Formats and dtypes decide whether a product is made so, never the number of rows. Tiles start on one alignment because the
library chooses its algorithm by that as well. Emulated products are cut likewise, also on a CPU, whose library has other
kernels for few rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

ROWS: Mapping[str, int] = {"cpu": 64, "cuda": 1024}
"""Rows of a tile by device: many of them keep a device busy, few cost a small batch little."""

TileCut = Callable[[torch.Tensor], torch.Tensor]
"""Takes the rows of a tile out of all rows, into memory of its own; zeros fill the last tile."""


def rows_of(device: str) -> int:
    """Rows of a tile on devices of this type."""
    return ROWS.get(device, ROWS["cuda"])


def in_tiles(count: int, device: str, product: Callable[[TileCut], torch.Tensor]) -> torch.Tensor:
    """The results of ``product`` for each tile of ``count`` rows, one below the other, without those that fill the last tile."""
    rows = rows_of(device)
    made = [product(partial(_cut, start=start, rows=rows)) for start in range(0, max(count, 1), rows)]
    return (made[0] if len(made) == 1 else torch.cat(made))[:count]


def lines_from(x: torch.Tensor, start: int, rows: int) -> torch.Tensor:
    """The lines of a tile where they lie; a copy that zeros fill where the tile is not whole."""
    piece = x[start : start + rows]
    return piece if len(piece) == rows else torch.constant_pad_nd(piece, (0, 0) * (x.ndim - 1) + (0, rows - len(piece)))


def _cut(x: torch.Tensor, start: int, rows: int) -> torch.Tensor:
    piece = lines_from(x, start, rows)
    return piece.clone() if len(x) >= start + rows else piece
