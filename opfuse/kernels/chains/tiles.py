"""The casts that a chain's kernel does itself: their tiles, their fields of the parameter, and the planes that they make."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from opfuse.formats import COLUMNWISE, ROWWISE
from opfuse.kernels.casts.block import BLOCKS
from opfuse.kernels.casts.encoding import Blocks, BlocksOfGroups, Current, Encoding, Microscaled, RecordingScale
from opfuse.kernels.casts.tensor import MX_PLANES
from opfuse.kernels.chains.call import ChainCall, Tiling
from opfuse.kernels.chains.structure import ChainCode
from opfuse.kernels.engine.parameters import CStruct, parameter_of
from opfuse.kernels.engine.variants import PACK, VECTOR, WIDEST
from opfuse.numerics.layouts import Layout, are_known, check_cast
from opfuse.numerics.row_groups import TILE

_SUMMED_ROWS = 16  # of one part of a sum
_GROUP = 64  # columns that a warp has beside each other
_MOST_RESULTS = 64 * 128  # of a tile whose threads have registers for two strands of fp32, or beside sums over columns
_ROWS_BESIDE_SUMS = {"GROUPS": 4}  # of a thread of a larger tile that has registers for two strands beside sums over columns
_MOST_SUM_BYTES = 28 << 10  # of shared memory for parts of sums: a kernel has 48 KiB, of which casts hold 20 at most
_HELD = 3  # packs and numbers of rows and columns that a thread holds beside its inputs at no cost


class Tile(NamedTuple):
    """What a block of threads makes: rows and columns of results, or of dy.

    resident: blocks that share a multiprocessor, as many as leave threads their registers. ahead: rows of inputs that a thread
    loads before it needs them. Both are where compilation begins: it lowers them for a chain that would spill (ladder.py).
    """

    rows: int
    columns: int
    threads: int
    resident: int
    ahead: int

    @property
    def defines(self) -> tuple[str, ...]:
        return _defines(self)

    def holds(self, sums: int) -> bool:
        """Whether shared memory has room for the parts of so many sums over rows, one part for each 16 rows."""
        return sums * 4 * self.columns * self.rows // _SUMMED_ROWS <= _MOST_SUM_BYTES

    @property
    def own_rows(self) -> int:
        """How many rows a thread has."""
        return self.rows * self.columns // (PACK * self.threads)

    def lightened(self, part: float) -> Tile:
        """With room for the registers of a heavier chain: ``part`` as many blocks that share a multiprocessor."""
        return self._replace(resident=math.ceil(part * self.resident), ahead=1)

    def cut(self, call: ChainCall, padded: int = 0) -> Tiling:
        """How the call's results are cut into tiles of this size. padded: rows, if groups of them begin on tiles; else 0."""
        columns, groups = call.shape[-1], self.columns // _GROUP
        rows, down = call.shape.numel() // columns, padded // self.rows
        return Tiling(rows, columns, 3, groups, self.own_rows, self.threads, down)


@functools.cache
def _defines(tile: Tile) -> tuple[str, ...]:
    names = ("TILE_ROWS", "TILE_COLUMNS", "TILE_THREADS", "RESIDENT", "AHEAD")
    return tuple(f"{name}={value}" for name, value in zip(names, tile))


# For a direction, whether something is gated, and whether gradients of operands are added up; then tiles have 64 rows or 128.
_Kind = tuple[str, bool, bool]

_BLOCKS: Mapping[_Kind, Tile] = {
    ("forward", False, False): Tile(128, 128, 256, 3, 2),
    # Where its input is kept as well, eight rows a thread would leave room for two blocks of 256 only.
    ("forward", True, False): Tile(128, 128, 512, 2, 2),
    ("backward", False, False): Tile(128, 128, 256, 3, 4),
    ("backward", False, True): Tile(128, 128, 512, 2, 4),
    ("backward", True, False): Tile(128, 128, 256, 2, 2),
    ("backward", True, True): Tile(128, 128, 256, 2, 1),
}

# By measurements on an H200.
_TILES: Mapping[str, Mapping[_Kind, Tile]] = {
    "PLAIN": {
        ("backward", False, True): Tile(64, 128, 256, 3, 4),
        ("backward", True, True): Tile(128, 64, 256, 3, 4),
    },
    "TENSOR": {
        ("forward", False, False): Tile(128, 128, 256, 4, 2),
        ("forward", True, False): Tile(64, 64, 128, 9, 4),
        ("backward", False, False): Tile(64, 64, 128, 9, 1),
        ("backward", False, True): Tile(128, 64, 128, 4, 4),
        ("backward", True, False): Tile(128, 64, 256, 4, 2),
        ("backward", True, True): Tile(64, 64, 128, 5, 4),
    },
    "BLOCKS": _BLOCKS,
    "GROUPS": {**_BLOCKS, ("backward", True, True): Tile(128, 128, 512, 1, 1)},  # whose sums are over columns only
    "SQUARES": {
        **_BLOCKS,
        ("forward", True, False): Tile(128, 128, 256, 4, 2),
        ("backward", True, True): Tile(128, 128, 512, 1, 4),
    },
    "MX": {
        ("forward", False, False): Tile(32, 256, 128, 8, 1),
        ("forward", True, False): Tile(32, 256, 256, 4, 1),
        ("backward", False, False): Tile(32, 256, 128, 7, 1),
        ("backward", False, True): Tile(64, 128, 128, 5, 4),
        ("backward", True, False): Tile(32, 128, 128, 5, 2),
        ("backward", True, True): Tile(64, 128, 256, 2, 4),
    },
    "MX swizzled": {
        ("forward", False, False): Tile(128, 128, 256, 4, 1),
        ("forward", True, False): Tile(128, 128, 512, 2, 1),
        ("backward", False, False): Tile(128, 128, 256, 4, 1),
        ("backward", False, True): Tile(128, 128, 256, 3, 1),
        ("backward", True, False): Tile(128, 128, 256, 2, 1),
        ("backward", True, True): Tile(128, 128, 512, 1, 4),
    },
}


_SMALLEST = Tile(64, 64, 128, 1, 1)


def _tile(table: str, code: ChainCode, *, aligned: bool) -> Tile:
    """The tile for a structure, with room for the registers that it takes."""
    tile = _TILES[table][code.direction, code.depths[0] > 0, code.has_sums]
    if not aligned or "float" in (code.io, code.between) or code.depths[0] > 1 or code.column_sums:
        return tile.lightened(1 / 4)
    stored = code.stores or (code.direction == "forward" and code.saved)
    held = sum(1 << code.depths[i + 1] for i, _, _, _ in code.of_kind("row", "column"))
    heavy = code.source == "float" or (code.depths[0] and stored) or held > _HELD
    return tile.lightened(2 / 3) if heavy else tile


def plain_tile(call: ChainCall) -> Tile | None:
    """The tile for a call with sums whose result is not cast; None if there are too many sums for any."""
    tile, sums = _tile("PLAIN", call.code, aligned=call.is_aligned(call.shape[-1])), len(call.code.row_sums)
    return next((each for each in (tile, _SMALLEST) if each.holds(sums)), None)


@functools.lru_cache(maxsize=4096)
def _fitting(table: str, code: ChainCode, columns: int, aligned: bool) -> Tile | None:
    """The tile for results of so many columns; None if there is no kernel for them.

    The columns of a tile must lie together in every strand of dx, of which a kernel has room for two, but in a large tile not of
    fp32, and beside sums over columns only if a thread has few rows. Parts of sums over rows must fit beside what the cast holds.
    """
    tile, strands = _tile(table, code, aligned=aligned), code.depths[code.final]
    widths = [columns, *(stage.interleave for stage in code.stages)] if strands else []
    summed = code.column_sums and tile.own_rows > _ROWS_BESIDE_SUMS.get(table, 0)
    crowded = strands and (code.io == "float" or summed) and tile.rows * tile.columns > _MOST_RESULTS
    if crowded or strands > 1 or columns >= WIDEST or not tile.holds(len(code.row_sums)):
        return None
    return None if any(width % tile.columns for width in widths) else tile


@functools.lru_cache(maxsize=4096)
def _defines_of(
    cast: str, family: str, layouts: Sequence[Layout], shape: tuple[int, int], dtype: torch.dtype, *, padded: int
) -> tuple[str, ...]:
    """The definitions that every cast has. QuantizerError unless the planes are those of a matrix of ``shape``, of ``family``.

    padded: how many rows columnwise planes are of, if groups of rows begin on tiles; else 0.
    """
    given = {ROWWISE: shape, COLUMNWISE: (padded or shape[0], shape[1])}
    for planes in [layouts] if not padded else [[layout] for layout in layouts]:
        check_cast(given[planes[0].usage], dtype, planes, family=family, where="cast of a chain")
    first, usages = layouts[0], {layout.usage for layout in layouts}
    values = {
        "CAST": cast,
        "OUT": first.element.name.upper(),
        "ROWWISE": int(ROWWISE in usages),
        "COLUMNWISE": int(COLUMNWISE in usages),
        "ROWS_ALIGNED": int((padded or first.shape[0]) % VECTOR == 0),
        "SQUARE": int((first.format.block or (1,))[0] != 1),
        "SWIZZLED": int(first.swizzled),
    }
    return tuple(f"{name}={value}" for name, value in values.items())


class TileCast(NamedTuple):
    """A cast of tiles, in the header of ``name``.

    family: of its formats. encode: its Encode. defines: an encoding's own definitions, beside those that every cast has.
    table: the tiles for an encoding; None for one that the kernel does not know. padded: how many rows an encoding's columnwise
    planes are of, if groups of rows begin on tiles; else 0.
    """

    name: str
    family: str
    encode: CStruct
    defines: Callable[[Any], tuple[str, ...]]
    table: Callable[[Any], str | None]
    padded: Callable[[Any], int] = lambda _: 0

    def fit(self, call: ChainCall, encode: Encoding) -> tuple[Tiling, tuple[str, ...]] | None:
        """The tiles for a call and an encoding, and the definitions of both; None if there is no kernel for them.

        None, too, for sums over rows whose groups begin on tiles: pieces of sums are those of the matrix. QuantizerError unless
        the encoding is of what the chain makes.
        """
        columns, padded = call.shape[-1], self.padded(encode)
        made = (math.prod(call.shape[:-1]), columns << call.code.depths[call.code.final])
        defines = _defines_of(self.name, self.family, tuple(encode.layouts), made, call.dtype, padded=padded)
        takes = are_known(encode.layouts) and not (padded and call.code.row_sums)
        table = self.table(encode) if takes else None
        tile = _fitting(table, call.code, columns, call.is_aligned(columns)) if table else None
        return None if tile is None else (tile.cut(call, padded), (*tile.defines, *self.defines(encode), *defines))


_MX_TABLES = {(1, False): "MX", (1, True): "MX swizzled"}


def _pow2(encode: Blocks | BlocksOfGroups) -> tuple[str, ...]:
    return (f"POW2={int(encode.pow2)}",)


_ENCODE_TENSOR = parameter_of("tensor_scale.cuh", "TensorCodes")

CASTS: Mapping[type, TileCast] = {
    RecordingScale: TileCast("TENSOR", "tensor", _ENCODE_TENSOR, lambda _: ("RECORD=1",), lambda _: "TENSOR"),
    Current: TileCast("TENSOR", "tensor", _ENCODE_TENSOR, lambda _: ("RECORD=0",), lambda _: "TENSOR"),
    Blocks: TileCast(
        "BLOCKS",
        "block",
        BLOCKS,
        _pow2,
        lambda encode: "BLOCKS" if encode.layouts[0].block[0] == 1 else "SQUARES",
    ),
    BlocksOfGroups: TileCast(
        "BLOCKS",
        "block",
        parameter_of("block_groups.cuh", "BlockGroups"),
        lambda encode: ("GROUPED=1", "HERE=0", *_pow2(encode)),
        lambda encode: "GROUPS" if encode.layouts[0].block == (1, TILE) else None,
        lambda encode: encode.groups.padded_rows,
    ),
    Microscaled: TileCast(
        "MX",
        "mx",
        MX_PLANES,
        lambda _: (),
        lambda encode: _MX_TABLES.get((encode.rows, encode.layouts[0].swizzled)),
    ),
}
"""By the type of the encoding."""
