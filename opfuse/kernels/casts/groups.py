"""Casts of groups of rows whose sizes only the device knows: one launch casts each group of a matrix as if it were alone.

A launch has blocks for the most tiles that groups of any sizes can take, so it is the same for all sizes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from opfuse.errors import ShapeError, describe
from opfuse.formats import ROWWISE, USAGES
from opfuse.kernels.casts import trials
from opfuse.kernels.casts.block import BLOCKS, cast_block, new_blocks
from opfuse.kernels.engine.compiling import Variant
from opfuse.kernels.engine.launch import Grid
from opfuse.kernels.engine.parameters import parameter_of
from opfuse.kernels.engine.registry import BITWISE, Launcher, kernel
from opfuse.kernels.engine.variants import C_TYPES, PACK, VECTOR, WIDEST, addresses, on_bytes, variant_of
from opfuse.numerics import casts as definition
from opfuse.numerics import row_groups as grouping
from opfuse.numerics.layouts import Layout, ceil_div, check_cast
from opfuse.numerics.row_groups import MOST_GROUPS, TALL, TILE, RowGroups, most_tiles, table_size

_TABLE, _CAST = parameter_of("row_groups.cu"), parameter_of("cast_block_groups.cu")
_SPLITS = {torch.int32: "int", torch.int64: "long long"}
_THREADS = 256
FOUR_BYTES = 16
"""Bytes of an entry of a table of groups."""


class Reading(NamedTuple):
    """The rows that a launch reads: contiguous ``x`` (tokens, columns), or (tokens,) of one column, and the numbers of its rows.

    rows: int64, contiguous; None: all rows, in order.
    """

    x: torch.Tensor
    rows: torch.Tensor | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix that is cast."""
        return len(self.x if self.rows is None else self.rows), *self.x.shape[1:]

    @property
    def is_indexed(self) -> bool:
        return self.rows is not None

    @property
    def columns(self) -> int:
        return math.prod(self.x.shape[1:])

    @property
    def is_aligned(self) -> bool:
        """Whether every row is a number of whole vectors, each on a vector's alignment."""
        return on_bytes(self.x, VECTOR) and self.columns % PACK == 0

    @property
    def addresses(self) -> dict[str, int]:
        """The fields ``x`` and ``index`` of a kernel's parameter."""
        return addresses({"x": self.x, "index": self.rows})


def reading(x: torch.Tensor, index: torch.Tensor | None) -> Reading:
    """Rows of ``x``, of any layout. The values of ``index`` must be numbers of rows of ``x``; nothing checks that."""
    return Reading(x.contiguous(), None if index is None else index.contiguous())


def tiles_of(groups: RowGroups) -> int:
    """The address of the tiles in the table of groups."""
    return groups.table.data_ptr() + groups.at(TILE) * FOUR_BYTES


@kernel("row_groups.cu", reference=grouping.row_groups, tolerance=BITWISE, trials=trials.tables)
def row_groups(launch: Launcher, splits: torch.Tensor, rows: int) -> torch.Tensor:
    """The device stops with an assertion if ``splits`` do not add up to ``rows``. ShapeError for too many groups or rows."""
    splits, groups = splits.contiguous(), len(splits)
    if groups > MOST_GROUPS or rows >= WIDEST:
        wanted, got = f"at most {MOST_GROUPS} groups of less than {WIDEST} rows", f"{groups} groups of {rows} rows"
        raise ShapeError(describe("row_groups", wanted=wanted, got=got, cure="pass the sizes of groups as numbers of the host"))
    table = torch.empty(table_size(rows, groups), dtype=torch.int32, device=splits.device)
    variant = variant_of("row_groups.cu", _TABLE.layout, SPLIT=_SPLITS[splits.dtype])
    room = {"tiles": most_tiles(rows, groups, TILE), "tall": most_tiles(rows, groups, TALL)}
    fields = _TABLE(splits=splits.data_ptr(), table=table.data_ptr(), rows=rows, groups=groups, **room)
    launch(variant, "row_groups", Grid(1, _THREADS), _TABLE.layout, *fields, device=splits.get_device())
    return table


@kernel("cast_block_groups.cu", reference=definition.cast_block_groups, tolerance=BITWISE, trials=trials.BLOCK_GROUPS)
def cast_block_groups(
    launch: Launcher,
    x: torch.Tensor,
    groups: RowGroups,
    layouts: Sequence[Layout],
    *,
    index: torch.Tensor | None = None,
    eps: float = 0.0,
    pow2: bool = True,
) -> list[definition.Encoded]:
    """Reads each row that is cast once. Rowwise planes do not depend on groups: alone, :func:`cast_block` makes them."""
    if index is None and all(layout.usage == ROWWISE for layout in layouts):
        return cast_block.run(launch, x, layouts, eps=eps, pow2=pow2)
    read = reading(x, index)
    variant = _variant(tuple(layouts), read.shape, x.dtype, on_bytes(read.x, VECTOR), read.is_indexed, pow2=bool(pow2))
    planes, blocks = new_blocks(layouts, x.dtype, x.device, eps=eps)
    made = BLOCKS(**{**blocks, "rows": groups.rows})
    fields = _CAST(**read.addresses, tiles=tiles_of(groups), blocks=made, down=groups.tiles)
    grid = Grid(groups.tiles * ceil_div(x.shape[1], TILE), _THREADS)
    launch(variant, "cast_block_groups", grid, _CAST.layout, *fields, device=x.get_device())
    return planes


@functools.lru_cache(maxsize=4096)
def _variant(
    layouts: tuple[Layout, ...], shape: tuple[int, ...], dtype: torch.dtype, on_vectors: bool, indexed: bool, *, pow2: bool
) -> Variant:
    """The variant that casts a contiguous matrix of ``shape`` and ``dtype``; in columnwise planes each group begins on a tile."""
    rowwise, columnwise = ([layout for layout in layouts if layout.usage == usage] for usage in USAGES)
    for each in (*rowwise, *(layout.replace(shape=tuple(shape)) for layout in columnwise)):
        check_cast(shape, dtype, [each], family="block", where="cast_block_groups")
    rows, columns = shape
    if layouts[0].block != (1, TILE) or (rows > 1 and columns >= WIDEST):
        wanted, got = f"1x{TILE} blocks of rows of less than {WIDEST} columns", f"{layouts[0].format} of {tuple(shape)}"
        raise ShapeError(describe("cast_block_groups", wanted=wanted, got=got, cure="cast the groups one by one"))
    return variant_of(
        "cast_block_groups.cu",
        _CAST.layout,
        IN=C_TYPES[dtype],
        OUT=layouts[0].element.name.upper(),
        ROWWISE=bool(rowwise),
        COLUMNWISE=bool(columnwise),
        POW2=pow2,
        INDEXED=indexed,
        ALIGNED=on_vectors and columns % PACK == 0,
    )
