"""FP8 products of the package's own for compute capability 9.0: groups of lines in one launch (kernels/cuda/product.cu).

The sums are those of cuBLASLt's products, in its order, so their bits are the same: which one multiplies changes nothing but
time. Lines of the left that have scales of their own need not be a multiple of 4 here.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from opfuse.kernels.engine.compiling import Variant
from opfuse.kernels.engine.launch import Grid
from opfuse.kernels.engine.parameters import parameter_of
from opfuse.kernels.engine.registry import BITWISE, Launcher, kernel
from opfuse.kernels.engine.variants import C_TYPES, variant_of
from opfuse.kernels.engine.windows import BLANK, WORDS, window
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
    (TENSORS, True): Reach(32, 8192),
    (TENSORS, False): Reach(112, 1 << 31),
    (TILES, False): Reach(64, 1 << 31),
}
"""By scaling and fast sums, as measured on an H200 for 256 to 16384 lines. Scales of lines on both sides cost it 2 %."""

ADDED = {(TENSORS, False): Reach(112, 1 << 31), (LINES, False): Reach(112, 1 << 31)}
"""Likewise, for which sums in fp32 that this kernel adds in place cost less than the library's and an addition."""

LEAST_LINES = 256
"""Fewer were not measured."""

CAPACITIES = (1, 8, 32, 128)
"""Groups of a launch that are compiled for."""

_THREADS = 3 * 128
_STORED_LINES = 64
_MAP, _END = f"{WORDS}Q", "IIIfPI36x"
GROUP = parameter_of("product.cu", "Group")
NO_GROUP, _NO_TABLE = (0,) * GROUP.count, (0, 0)
_PROCESSORS = 132  # of an H100 and an H200, where no device is asked


Pair = tuple[Stored, Stored, int]
"""Left, right, and how many lines of the left count."""


class Form(NamedTuple):
    """What a launch is compiled for, but for the number of groups. turned: it makes a transpose, too."""

    scaling: int
    fast: bool
    left: str
    right: str
    out_dtype: torch.dtype
    turned: bool = False

    @property
    def shared(self) -> int:
        """Bytes of a block: stages of both operands, the result on its way, scales, barriers."""
        stages, boxes = (6, 2) if self.fast else (4, 3)
        own = 4 * 64 * 128 + self.turned * 2 * 128 * 128
        stages -= self.turned
        return stages * (boxes * 128 * 128 + 16) + (stages + 1) * 512 * (self.scaling == LINES) + own

    @property
    def tile(self) -> tuple[int, int]:
        """Lines and columns of the results that a block makes at once."""
        return (128, 128) if self.fast else (256, 128)

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
        }

    def packing(self, groups: int, maps: int) -> str:
        """Of Product in product.cuh."""
        return _MAP * (1 + maps) + GROUP.packing * groups + _END

    def grid(self, tiles: int, device: int) -> Grid:
        """For so many tiles, or fewer."""
        return Grid(min(tiles, _processors(device)), _THREADS, self.shared)

    def fields(
        self, groups: Sequence[Pair], pitches: Sequence[int], columns: int, *, capacity: int = 1, result: int = 0, done: int = 0
    ) -> tuple[Grid, list[int | float]]:
        """The grid, and the fields of Product, for results at an address, after ``done`` lines of others."""
        device = groups[0][0].data.get_device()
        (tall, wide), row = self.tile, columns * self.out_dtype.itemsize
        firsts = [*accumulate((ceil_div(count, tall) * ceil_div(columns, wide) for *_, count in groups), initial=0)]
        starts = accumulate((count for *_, count in groups), initial=done)
        maps = [boxes(self.out_dtype, row, _STORED_LINES, device), *(boxes(torch.uint8, pitch, 128, device) for pitch in pitches)]
        fields: list[int | float] = [word for words in maps for word in words]
        for (left, right, count), first, start in zip(groups, firsts, starts):
            length = left.layout.lines[1]
            left_at, right_at, left_scale, right_scale = (
                array.data_ptr() for array in (left.data, right.data, left.scale, right.scale)
            )
            fields += GROUP(
                left=left_at,
                right=right_at,
                result=result and result + start * row,
                left_scale=left_scale,
                right_scale=right_scale,
                lines=count,
                length=length,
                first=first,
                pitch=length,
                left_pitch=left.scale.shape[-1],
                right_pitch=right.scale.shape[-1],
            )
        fields += NO_GROUP * (capacity - len(groups))
        grid = self.grid(firsts[-1], device)
        return grid, [*fields, len(groups), firsts[-1], columns, 1.0, *_NO_TABLE]


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
        groups = [*zip(lefts[part], rights[part], lines[part])]
        _launch(launch, form, groups, result, sum(lines[:start]), accumulate=accumulate)
    return result


def is_faster(left: Stored, right: Stored, *, fast: bool, added: bool = False) -> bool:
    """Whether a product that both this kernel and the library take is made here, for its speed. added: in place, in fp32."""
    form = form_of(left, right, torch.bfloat16, fast=fast)
    reach = (ADDED if added else FASTER).get((form.scaling, form.fast))
    (lines, length), (columns, _) = left.layout.lines, right.layout.lines
    tiles = ceil_div(lines, form.tile[0]) * ceil_div(columns, form.tile[1])
    return reach is not None and lines >= LEAST_LINES and tiles >= reach.tiles and length <= reach.length


def _launch(launch: Launcher, form: Form, groups: Sequence[Pair], result: torch.Tensor, done: int, *, accumulate: bool) -> None:
    """Queue the products of these groups, whose results lie one below the other in ``result``, after ``done`` lines of others."""
    capacity = next(most for most in CAPACITIES if most >= len(groups))
    pitches = [left.layout.lines[1] for left, *_ in groups]
    pitches = pitches[:1] if len(set(pitches)) == 1 else pitches + pitches[:1] * (capacity - len(pitches))
    variant, layout = compiled(form, capacity, len(pitches), accumulate=accumulate)
    grid, fields = form.fields(groups, pitches, result.shape[1], capacity=capacity, result=result.data_ptr(), done=done)
    launch(variant, "product", grid, layout, *fields, device=result.get_device())


def form_of(left: Stored, right: Stored, out_dtype: torch.dtype, *, fast: bool, turned: bool = False) -> Form:
    scaling = SCALING[left.layout.format.block, right.layout.format.block]
    one, other = (plane.layout.element.name.upper() for plane in (left, right))
    return Form(scaling, fast and scaling in (TENSORS, ROWS), one, other, out_dtype, turned)


@functools.cache
def compiled(form: Form, groups: int, maps: int, *, accumulate: bool = False, runs: int = 0) -> tuple[Variant, struct.Struct]:
    """What multiplies in this form, and how its parameter is packed. runs: RUNS of product.cuh."""
    layout = struct.Struct(form.packing(groups, maps))
    counts = {"GROUPS": groups, "MAPS": maps, "ACCUMULATE": accumulate, **({"RUNS": runs} if runs else {})}
    return variant_of("product.cu", layout, **form.defines, **counts), layout


def boxes(dtype: torch.dtype, pitch: int, lines: int, device: int) -> tuple[int, ...]:
    """The map of boxes of so many lines of 128 bytes."""
    return window(dtype, pitch, (lines, 128 // dtype.itemsize)) if device >= 0 else BLANK


@functools.cache
def _processors(device: int) -> int:
    """Multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device >= 0 else _PROCESSORS
