"""FP8 products of groups that are runs of one matrix's rows, in one launch, where the device alone knows how long they are.

They are those of hopper.py, tile by tile: its sums, its order, its bits. A launch is the same whatever the sizes are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from opfuse.kernels.engine.registry import BITWISE, Launcher, kernel
from opfuse.kernels.products import emulated as definition
from opfuse.kernels.products.hopper import CAPACITIES, GROUP, NO_GROUP, TENSORS, Form, boxes, compiled, form_of
from opfuse.kernels.products.stored import Stored
from opfuse.numerics.layouts import ceil_div
from opfuse.numerics.row_groups import RowGroups, most_tiles

_OF_LINES, _OF_SUMS = 1, 2
_NUMBER = torch.float32.itemsize


@kernel("product.cu", reference=definition.product_of_rows, tolerance=BITWISE)
def product_of_rows(
    launch: Launcher,
    left: Stored,
    rights: Sequence[Stored],
    groups: RowGroups,
    *,
    out_dtype: torch.dtype,
    fast: bool = False,
) -> torch.Tensor:
    """For planes that hopper.py takes. The device finds out how many tiles there are."""
    columns, form = rights[0].layout.lines[0], form_of(left, rights[0], out_dtype, fast=fast)
    result = torch.empty(groups.rows, columns, dtype=out_dtype, device=left.data.device)
    height = form.tile[0]
    tiles = most_tiles(groups.rows, groups.number, height) * ceil_div(columns, form.tile[1])
    runs = [(left, right, result.data_ptr(), groups.rows, 0) for right in rights]
    _launch(launch, form, runs, result, groups, tiles=tiles, kind=_OF_LINES, at=groups.at(height))
    return result


@kernel("product.cu", reference=definition.product_over_rows, tolerance=BITWISE)
def product_over_rows(
    launch: Launcher, left: Stored, right: Stored, groups: RowGroups, *, out_dtype: torch.dtype, fast: bool = False
) -> torch.Tensor:
    """For planes that hopper.py takes, of matrices whose groups begin on tiles."""
    lines, columns = left.layout.lines[0], right.layout.lines[0]
    form = form_of(left, right, out_dtype, fast=fast)
    result = torch.empty(groups.number, lines, columns, dtype=out_dtype, device=left.data.device)
    each = ceil_div(lines, form.tile[0]) * ceil_div(columns, form.tile[1])
    step = lines * columns * out_dtype.itemsize
    runs = [(left, right, result.data_ptr() + i * step, lines, i * each) for i in range(groups.number)]
    _launch(launch, form, runs, result, groups, tiles=groups.number * each, kind=_OF_SUMS, at=1)
    return result


def _launch(
    launch: Launcher,
    form: Form,
    runs: Sequence[tuple[Stored, Stored, int, int, int]],
    result: torch.Tensor,
    groups: RowGroups,
    *,
    tiles: int,
    kind: int,
    at: int,
) -> None:
    """Queue the products of (left, right, address of the result, lines, first tile); ``tiles`` is how many there are at most."""
    columns, device, (left, *_) = result.shape[-1], result.get_device(), runs[0]
    capacity = next(most for most in CAPACITIES if most >= len(runs))
    variant, layout = compiled(form, capacity, 1, runs=kind)
    size = form.out_dtype.itemsize
    words = [*boxes(form.out_dtype, columns * size, 64, device), *boxes(torch.uint8, left.layout.lines[1], 128, device)]
    fields = [*words, *_groups(form, runs), *NO_GROUP * (capacity - len(runs))]
    end = len(runs), tiles, columns, 1.0, groups.table.data_ptr(), at
    launch(variant, "product", form.grid(tiles, device), layout, *fields, *end, device=device)


def _groups(form: Form, runs: Sequence[tuple[Stored, Stored, int, int, int]]) -> Iterator[int | float]:
    for i, (left, right, result, lines, first) in enumerate(runs):
        length = left.layout.lines[1]
        yield from GROUP(
            left=left.data.data_ptr(),
            right=right.data.data_ptr(),
            result=result,
            left_scale=_scales(left, i, form),
            right_scale=_scales(right, i, form),
            lines=lines,
            length=length,
            first=first,
            pitch=length,
            left_pitch=left.scale.shape[-1],
            right_pitch=right.scale.shape[-1],
        )


def _scales(plane: Stored, group: int, form: Form) -> int:
    """The address of a plane's scales; of that of a group, where each has one."""
    alone = form.scaling == TENSORS and plane.scale.numel() > 1
    return plane.scale.data_ptr() + (group * _NUMBER if alone else 0)
