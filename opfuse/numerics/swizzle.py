"""The scale layout that block-scaled matrix products read: 128x4 tiles of 512 consecutive bytes.

Entry (i, j) of a padded (R, C) array, R a multiple of 128 and C of 4, lies at byte
``((i // 128) * (C // 4) + j // 4) * 512 + (i % 32) * 16 + (i % 128 // 32) * 4 + j % 4``
(cuBLAS documentation, "1D block scaling factors layout"). Written as a permutation of the axes of the tiles below.
"""

from __future__ import annotations

import torch

from opfuse.formats import SCALE_TILE

_ROWS, _COLS = SCALE_TILE
_GROUP = 32  # rows i and i + 32 of a tile are neighbours, so that a tile is 32 runs of 16 bytes


def swizzle(scale: torch.Tensor) -> torch.Tensor:
    """A padded (R, C) array in tile order, as R * C flat bytes. All entries move, the padding's too."""
    rows, cols = scale.shape
    tiles = scale.reshape(rows // _ROWS, _ROWS // _GROUP, _GROUP, cols // _COLS, _COLS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle(flat: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The (R, C) array of ``shape`` whose tile order is ``flat``; the inverse of :func:`swizzle`."""
    rows, cols = shape
    tiles = flat.reshape(rows // _ROWS, cols // _COLS, _GROUP, _ROWS // _GROUP, _COLS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, cols)
