"""FP8 products of the package's own for compute capability 9.0: groups of lines in one launch (kernels/cuda/product.cu).

The sums are those of cuBLASLt's products, in its order, so their bits are the same: which one multiplies changes nothing but
time. Only where the library parts a long sum of a small result among blocks, which adds in another order, can bits differ. Lines
of the left that have scales of their own need not be a multiple of 4 here.

So the choice between library and kernel is a question of time alone, which the table :data:`FASTER` answers for one product.
The library runs what the kernel refuses, results in fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from opfuse.kernels.engine.compiling import Variant
from opfuse.kernels.engine.launch import Grid
from opfuse.kernels.engine.parameters import CStruct, parameter_of
from opfuse.kernels.engine.registry import BITWISE, Launcher, kernel
from opfuse.kernels.engine.variants import C_TYPES, variant_of
from opfuse.kernels.engine.windows import BLANK, window
from opfuse.kernels.products import emulated as definition
from opfuse.kernels.products.stored import Stored
from opfuse.numerics.layouts import ceil_div

TENSORS, TILES, LINES, ROWS = range(4)
SCALING = {(None, None): TENSORS, ((1, 0), (1, 0)): ROWS, ((1, 128), (128, 128)): TILES, ((1, 128), (1, 128)): LINES}
"""How the sums are scaled, by the blocks of both operands."""


class Reach(NamedTuple):
    """Products of one form for which this kernel is at least as fast as the library: tiles of the result, length of the sum."""

    tiles: int
    length: int


FASTER = {
    (TENSORS, True): Reach(112, 8192),
    (TENSORS, False): Reach(112, 1 << 31),
    (TILES, False): Reach(112, 1 << 31),
}
"""By scaling and fast sums, as measured on an H200 for 256 to 16384 lines (benchmarks/choices.py). Of fewer tiles the library
splits the sums, or the tiles, and is up to 1.8 times as fast. Scales of lines on both sides cost this kernel 2 %.
"""

ADDED = {(TENSORS, False): Reach(112, 1 << 31), (LINES, False): Reach(112, 1 << 31)}
"""Likewise, for which sums in fp32 that this kernel adds in place cost less than the library's and an addition."""

LEAST_LINES = 256
"""Fewer were not measured."""

CAPACITIES = (1, 8, 32, 128)
"""Groups of a launch that are compiled for."""

_THREADS = 3 * 128
_STORED_LINES = 64
_PROCESSORS = 132  # of an H100 and an H200, where no device is asked
_GROUP = parameter_of("product.cu", "Group")

Pair = tuple[Stored, Stored, int]
"""Left, right, and how many lines of the left count."""


class GroupProduct(NamedTuple):
    """A product of a launch. first: the number of its first tile. result: its address. scales: those of left and right."""

    pair: Pair
    first: int
    result: int
    scales: tuple[int, ...]

    @property
    def fields(self) -> tuple[int | float, ...]:
        """Those of Group in product.cuh."""
        left, right, lines = self.pair
        length, (left_scale, right_scale) = left.layout.lines[1], self.scales
        return _GROUP(
            left=left.data.data_ptr(),
            right=right.data.data_ptr(),
            result=self.result,
            left_scale=left_scale,
            right_scale=right_scale,
            lines=lines,
            length=length,
            first=self.first,
            pitch=length,
            left_pitch=left.scale.shape[-1],
            right_pitch=right.scale.shape[-1],
        )


class Form(NamedTuple):
    """What a launch is compiled for, but for the number of groups.

    turned: it makes a transpose, too. short: tiles have half of their lines, for runs of lines that are few.
    """

    scaling: int
    fast: bool
    left: str
    right: str
    out_dtype: torch.dtype
    turned: bool = False
    short: bool = False

    @property
    def shared(self) -> int:
        """Bytes of a block, as product.cuh lays them out and asserts.

        Stages have 128 codes of each line and column of a tile, its scales in fp32, of lines from a multiple of four on, and two
        barriers of 8 bytes. Each of two consumers has rooms of 64 lines of 128 bytes for results, and 128 x 128 bytes for a
        transpose.
        """
        lines, columns = self.tile
        stages = 6 - self.turned if self.fast else 5 if self.short else 3
        rooms = 2 if self.fast or self.short or self.turned else 4
        results = 2 * rooms * 64 * 128 + self.turned * 2 * 128 * 128
        scales = {TILES: (lines + 4) * 4, LINES: (lines + 4 + columns) * 4}.get(self.scaling, 0)
        return stages * ((lines + columns) * 128 + scales + 16) + results

    @property
    def tile(self) -> tuple[int, int]:
        """Lines and columns of the results that a block makes at once."""
        return (128 if self.fast or self.short else 256, 128)

    @property
    def defines(self) -> dict[str, str | int]:
        """The definitions of product.cuh."""
        return {
            "SCALING": self.scaling,
            "FAST": int(self.fast),
            "LEFT": self.left,
            "RIGHT": self.right,
            "RESULT": C_TYPES[self.out_dtype],
            "SHARED": self.shared,
            **({"SHORT": 1} if self.short else {}),
        }

    def grid(self, tiles: int, device: int) -> Grid:
        """For so many tiles, or fewer."""
        return Grid(min(tiles, _processors(device)), _THREADS, self.shared)

    def tiles(self, lines: int, columns: int) -> int:
        """Of a result."""
        return ceil_div(lines, self.tile[0]) * ceil_div(columns, self.tile[1])

    def groups(self, pairs: Sequence[Pair], columns: int, *, result: int = 0, done: int = 0) -> tuple[list[GroupProduct], int]:
        """Products whose results lie one below the other, after ``done`` lines of others; how many tiles they have."""
        row = columns * self.out_dtype.itemsize
        firsts = [*accumulate((self.tiles(lines, columns) for *_, lines in pairs), initial=0)]
        starts = accumulate((lines for *_, lines in pairs), initial=done)
        scales = ((left.scale.data_ptr(), right.scale.data_ptr()) for left, right, _ in pairs)
        found = [
            GroupProduct(*each) for each in zip(pairs, firsts, (result and result + start * row for start in starts), scales)
        ]
        return found, firsts[-1]

    def fields(
        self,
        product: CStruct,
        groups: Sequence[GroupProduct],
        columns: int,
        pitches: Sequence[int],
        *,
        tiles: int,
        table: int = 0,
        at: int = 0,
    ) -> tuple[int | float, ...]:
        """Those of Product in product.cuh."""
        device = groups[0].pair[0].data.get_device()
        return product(
            result=boxes(self.out_dtype, columns * self.out_dtype.itemsize, _STORED_LINES, device),
            windows=[boxes(torch.uint8, pitch, 128, device) for pitch in pitches],
            groups=[group.fields for group in groups],
            count=len(groups),
            tiles=tiles,
            columns=columns,
            table=table,
            at=at,
        )


@kernel("product.cu", reference=definition.grouped_product, tolerance=BITWISE)
def grouped_product(
    launch: Launcher,
    lefts: Sequence[Stored],
    rights: Sequence[Stored],
    lines: Sequence[int],
    *,
    out_dtype: torch.dtype,
    fast: bool = False,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """For planes of one format on each side, with lines, and arrays in place; rights of one number of lines."""
    columns, device = rights[0].layout.lines[0], lefts[0].data.device
    form = form_of(lefts[0], rights[0], out_dtype, fast=fast)
    result = torch.empty(sum(lines), columns, dtype=out_dtype, device=device) if out is None else out
    most = CAPACITIES[-1]
    for start in range(0, len(lefts), most):
        part = slice(start, start + most)
        pairs = [*zip(lefts[part], rights[part], lines[part])]
        _launch(launch, form, pairs, result, sum(lines[:start]), accumulate=accumulate)
    return result


def is_faster(left: Stored, right: Stored, *, fast: bool, added: bool = False, groups: int = 1) -> bool:
    """Whether products that both this kernel and the library take are made here, for speed. added: in place, in fp32.

    groups: of so many lines and columns each, in one launch.
    """
    form = form_of(left, right, torch.bfloat16, fast=fast)
    reach = (ADDED if added else FASTER).get((form.scaling, form.fast))
    (lines, length), (columns, _) = left.layout.lines, right.layout.lines
    tiles = groups * form.tiles(lines, columns)
    return reach is not None and lines >= LEAST_LINES and tiles >= reach.tiles and length <= reach.length


def _launch(launch: Launcher, form: Form, pairs: Sequence[Pair], result: torch.Tensor, done: int, *, accumulate: bool) -> None:
    """Queue the products of these pairs, whose results lie one below the other in ``result``, after ``done`` lines of others."""
    capacity, columns, device = capacity_for(len(pairs)), result.shape[1], result.get_device()
    pitches = [left.layout.lines[1] for left, *_ in pairs]
    pitches = pitches[:1] if len(set(pitches)) == 1 else pitches + pitches[:1] * (capacity - len(pitches))
    variant, product = compiled(form, capacity, len(pitches), accumulate=accumulate)
    groups, tiles = form.groups(pairs, columns, result=result.data_ptr(), done=done)
    fields = form.fields(product, groups, columns, pitches, tiles=tiles)
    launch(variant, "product", form.grid(tiles, device), product.layout, *fields, device=device)


def capacity_for(groups: int) -> int:
    """The least of :data:`CAPACITIES` that takes so many."""
    return next(most for most in CAPACITIES if most >= groups)


def form_of(left: Stored, right: Stored, out_dtype: torch.dtype, *, fast: bool, turned: bool = False) -> Form:
    """The form of a product of such planes. fast: its sums, where their scaling has fast ones. turned: as in :class:`Form`."""
    scaling = SCALING[left.layout.format.block, right.layout.format.block]
    one, other = (plane.layout.element.name.upper() for plane in (left, right))
    return Form(scaling, fast and scaling in (TENSORS, ROWS), one, other, out_dtype, turned)


@functools.cache
def compiled(form: Form, groups: int, maps: int, *, accumulate: bool = False, runs: int = 0) -> tuple[Variant, CStruct]:
    """What multiplies in this form, and its parameter. runs: RUNS of product.cuh."""
    product = parameter_of("product.cu", "Product", GROUPS=groups, MAPS=maps)
    counts = {"GROUPS": groups, "MAPS": maps, "ACCUMULATE": accumulate, **({"RUNS": runs} if runs else {})}
    return variant_of("product.cu", product.layout, **form.defines, **counts), product


def boxes(dtype: torch.dtype, pitch: int, lines: int, device: int) -> tuple[int, ...]:
    """The map of boxes of so many lines of 128 bytes."""
    return window(dtype, pitch, (lines, 128 // dtype.itemsize)) if device >= 0 else BLANK


@functools.cache
def _processors(device: int) -> int:
    """Multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device >= 0 else _PROCESSORS
