"""FP8 products of groups that are runs of one matrix's rows, in one launch, where the device alone knows how long they are.

They are those of hopper.py, tile by tile: its sums, its order, its bits. A launch is the same whatever the sizes are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate as running_sums

import torch

from opfuse.kernels.engine.registry import BITWISE, Launcher, kernel
from opfuse.kernels.products import emulated as definition
from opfuse.kernels.products.hopper import Form, GroupProduct, capacity_for, compiled, form_of
from opfuse.kernels.products.stored import Stored
from opfuse.numerics.layouts import ceil_div
from opfuse.numerics.row_groups import RowGroups, most_tiles

_OF_LINES, _OF_SUMS = 1, 2
_NUMBER = torch.float32.itemsize

SHORT = 128
"""With at most so many rows in a group, on average, tiles are short."""


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
    form = form._replace(short=not form.fast and groups.rows <= SHORT * groups.number)
    result = torch.empty(groups.rows, columns, dtype=out_dtype, device=left.data.device)
    height = form.tile[0]
    tiles = most_tiles(groups.rows, groups.number, height) * ceil_div(columns, form.tile[1])
    at = result.data_ptr()
    runs = [GroupProduct((left, right, groups.rows), 0, at, _scales(i, left, right)) for i, right in enumerate(rights)]
    _launch(launch, form, runs, columns, groups, tiles=tiles, kind=_OF_LINES, at=groups.at(height))
    return result


@kernel("product.cu", reference=definition.product_over_rows, tolerance=BITWISE)
def product_over_rows(
    launch: Launcher, left: Stored, right: Stored, groups: RowGroups, *, out_dtype: torch.dtype, fast: bool = False
) -> torch.Tensor:
    """For planes that hopper.py takes, of matrices whose groups begin on tiles."""
    lines, columns = left.layout.lines[0], right.layout.lines[0]
    result = torch.empty(groups.number, lines, columns, dtype=out_dtype, device=left.data.device)
    _launch_sums(launch, left, right, groups, dict(enumerate(result)), fast=fast)
    return result


@kernel("product.cu", reference=definition.products_into, tolerance=BITWISE)
def products_into(
    launch: Launcher,
    left: Stored,
    right: Stored,
    groups: RowGroups,
    results: Mapping[int, torch.Tensor],
    *,
    fast: bool = False,
    accumulate: bool = True,
) -> None:
    """As :func:`product_over_rows`; the results are contiguous, on 16 bytes."""
    _launch_sums(launch, left, right, groups, results, fast=fast, accumulate=accumulate)


def _launch_sums(
    launch: Launcher,
    left: Stored,
    right: Stored,
    groups: RowGroups,
    results: Mapping[int, torch.Tensor],
    *,
    fast: bool,
    accumulate: bool = False,
) -> None:
    """Queue the products over the rows of those groups that have a result; of the others no line counts."""
    lines, columns = left.layout.lines[0], right.layout.lines[0]
    some = next(iter(results.values()))
    form = form_of(left, right, some.dtype, fast=fast)
    counts = [lines if i in results else 0 for i in range(groups.number)]
    *firsts, tiles = running_sums((form.tiles(count, columns) for count in counts), initial=0)
    runs = [
        GroupProduct((left, right, count), first, results.get(i, some).data_ptr(), _scales(i, left, right))
        for i, (count, first) in enumerate(zip(counts, firsts))
    ]
    _launch(launch, form, runs, columns, groups, tiles=tiles, kind=_OF_SUMS, at=1, accumulate=accumulate)


def _launch(
    launch: Launcher,
    form: Form,
    runs: Sequence[GroupProduct],
    columns: int,
    groups: RowGroups,
    *,
    tiles: int,
    kind: int,
    at: int,
    accumulate: bool = False,
) -> None:
    """Queue the products of these runs; ``tiles`` is how many there are at most."""
    left, *_ = runs[0].pair
    device = left.data.get_device()
    variant, product = compiled(form, capacity_for(len(runs)), 1, accumulate=accumulate, runs=kind)
    fields = form.fields(product, runs, columns, [left.layout.lines[1]], tiles=tiles, table=groups.table.data_ptr(), at=at)
    launch(variant, "product", form.grid(tiles, device), product.layout, *fields, device=device)


def _scales(group: int, *planes: Stored) -> tuple[int, ...]:
    """The addresses of the planes' scales; of those of a group, where each has its own."""
    steps = (plane.scale.stride(0) * _NUMBER if plane.has_scales_of_groups else 0 for plane in planes)
    return tuple(plane.scale.data_ptr() + group * step for plane, step in zip(planes, steps))
