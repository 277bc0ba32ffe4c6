"""What thresholds of choice decide between, on both sides of each: ``python -m benchmarks.choices``.

Needs compute capability 9.0. :data:`FASTER` and :data:`ADDED` (kernels/products/hopper.py) choose between the package's own
product and cuBLASLt's, the latter where sums are added to a gradient in fp32; :data:`CHEAPER` (kernels/products/chained.py)
between a product with its chain in one launch and one launch after the other. Bits are the same. Each figure is the speed of the
package's own way in that of the alternative; where it is chosen, it should not be slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import NoneType
from typing import Any, NamedTuple

import torch

from benchmarks import chained
from benchmarks.products import BF16, FEATURES, KINDS, Kind, figure, operand
from benchmarks.timing import Call, compared
from opfuse.formats import COLUMNWISE, E4M3, NumberFormat
from opfuse.kernels.casts.encoding import Blocks, Measured, RecordingScale
from opfuse.kernels.casts.groups import row_groups
from opfuse.kernels.products.chained import CHEAPER, slower
from opfuse.kernels.products.hopper import ADDED, FASTER, SCALING, Form, grouped_product, is_faster
from opfuse.kernels.products.native import _scaled_mm
from opfuse.kernels.products.runs import product_over_rows, products_into
from opfuse.kernels.products.stored import Stored
from opfuse.numerics.layouts import Layout
from opfuse.numerics.row_groups import RowGroups
from tests.kernels.cases.chain_casts import encoding_of

LEAST = 0.97
"""Of the speed of the alternative, where the package's own way is chosen: less is no noise."""

Sizes = tuple[int, int, int]
"""Lines of the left, length of the sums, lines of the right."""

LENGTH, LINES = 4096, 4096
"""Of sums, and lines of either side, where another size is varied."""

ACROSS = 8
"""Tiles of the right in a result of as many tiles as a threshold asks for."""

UNBOUNDED = 1 << 31

CASTS: Mapping[type, str] = {NoneType: "", RecordingScale: "delayed", Measured: "current", Blocks: "1x128"}
"""Names of casts in benchmarks/chained.py, as :data:`CHEAPER` knows them."""

SPLIT = (8, 2048)
"""Groups and rows of each, of weight gradients that are added in one launch."""


class Choice(NamedTuple):
    """What is chosen between, whether the package's own way is, the alternative and that way."""

    name: str
    chosen: bool
    other: Call
    own: Call


def key_of(kind: Kind) -> tuple[int, bool]:
    """As the thresholds know a kind of product."""
    return SCALING[kind.left.block, kind.right.block], kind.fast


def form_of(kind: Kind) -> Form:
    scaling, fast = key_of(kind)
    return Form(scaling, fast, "E4M3", "E4M3", BF16)


def sides(form: Form, *, tiles: int, length: int, results: int = 1 << 40) -> Iterator[tuple[str, Sizes]]:
    """Problems at each bound of a threshold, and beyond it by a factor of two."""
    height, width = form.tile
    lines = height * tiles // ACROSS
    for across in (ACROSS // 2, ACROSS):
        yield f"{form.tiles(lines, across * width)} tiles", (lines, LENGTH, across * width)
    for longer in (length, 2 * length) if length < UNBOUNDED else ():
        yield f"sums of {longer}", (LINES, longer, LINES)
    for more in (results, 2 * results) if results < UNBOUNDED else ():
        yield f"{more} results", (more // (2 * LINES), LENGTH, 2 * LINES)


def operands(kind: Kind, sizes: Sizes, device: str) -> tuple[Stored, Stored]:
    lines, length, columns = sizes
    return operand(kind.left, lines, length, device), operand(kind.right, columns, length, device)


def plain(device: str) -> Iterator[Choice]:
    """Products that both kernels make: :data:`FASTER`."""
    for name, kind in KINDS.items():
        reach = FASTER.get(key_of(kind))
        for what, sizes in sides(form_of(kind), **reach._asdict()) if reach else ():
            left, right = operands(kind, sizes, device)
            library = partial(_scaled_mm, left, right, out_dtype=BF16, fast=kind.fast)
            own = partial(grouped_product, [left], [right], [sizes[0]], out_dtype=BF16, fast=kind.fast)
            yield Choice(f"product, {name}: {what}", is_faster(left, right, fast=kind.fast), library, own)


def added(device: str) -> Iterator[Choice]:
    """Products that are added to a gradient in fp32: :data:`ADDED`; and those of groups, in one launch."""
    for name, kind in KINDS.items():
        reach = ADDED.get(key_of(kind))
        for what, sizes in sides(form_of(kind), **reach._asdict()) if reach else ():
            left, right = operands(kind, sizes, device)
            total = torch.zeros(sizes[0], sizes[2], device=device)
            both = _library_adds(left, right, total), _own_adds(left, right, total)
            yield Choice(f"added to a gradient, {name}: {what}", is_faster(left, right, fast=False, added=True), *both)
        if reach:
            yield _groups(name, kind, device)


def _library_adds(left: Stored, right: Stored, total: torch.Tensor) -> Call:
    return lambda: total.add_(_scaled_mm(left, right, out_dtype=torch.float32, fast=False))


def _own_adds(left: Stored, right: Stored, total: torch.Tensor) -> Call:
    return lambda: grouped_product([left], [right], [len(total)], out_dtype=torch.float32, fast=False, out=total, accumulate=True)


def _groups(name: str, kind: Kind, device: str) -> Choice:
    """Weight gradients of groups: added in the launch, or after it."""
    (count, rows), features = SPLIT, FEATURES
    groups = RowGroups(row_groups(torch.full((count,), rows, device=device), count * rows), count * rows, count)
    left, right = (columnwise(fmt, lines, groups, device) for fmt, lines in zip((kind.left, kind.right), features[::-1]))
    totals = [*torch.zeros(count, *features[::-1], device=device)]

    def after() -> None:
        torch._foreach_add_(totals, [*product_over_rows(left, right, groups, out_dtype=torch.float32)])

    own = partial(products_into, left, right, groups, dict(enumerate(totals)))
    return Choice(f"added to a gradient, {name}: {count} groups of {rows}", True, after, own)


def columnwise(fmt: NumberFormat, lines: int, groups: RowGroups, device: str) -> Stored:
    """A plane of groups of rows in whole tiles, with a scale for each of them where the format has one for a tensor."""
    made = operand(fmt, lines, groups.padded_rows, device)
    scale = made.scale.repeat(groups.number, 1) if fmt.family == "tensor" else made.scale
    return made._replace(scale=scale, layout=Layout(fmt, COLUMNWISE, (groups.padded_rows, lines)))


def chains(device: str) -> Iterator[Choice]:
    """Products with bias and GELU behind them: :data:`CHEAPER`."""
    for name, kind in KINDS.items():
        form = form_of(kind)
        for cast, within in CHEAPER.get(key_of(kind), {}).items():
            what = chained.What(name, ("bias", "gelu"), CASTS[cast])
            for problem, sizes in sides(form, **within._asdict()):
                matrix = sizes[0], sizes[2]
                encode = encoding_of(what.cast, E4M3, what.usages, matrix, torch.device(device)) if what.cast else None
                chosen = not slower(form, encode, sizes[:2], sizes[2])
                label = f"with bias and GELU, {what.cast or 'no'} cast, {name}: {problem}"
                yield Choice(label, chosen, *chained.calls(what, sizes, device))


CHOICES: tuple[Callable[[str], Iterator[Choice]], ...] = (plain, added, chains)


def records(device: str = "cuda") -> Iterator[dict[str, Any]]:
    """Figures for the record, with a limit where the package's own way is chosen."""
    for choices in CHOICES:
        for choice in choices(device):
            ratio = compared(choice.other, choice.own, rounds=6, launches=4).ratio
            yield figure(choice.name, ratio, "x alternative", LEAST if choice.chosen else None)


def main() -> None:
    """Print a table."""
    for record in records():
        side = "other" if record["limit"] is None else "own"
        print(f"{record['name']:72s}{record['value']:6.3f} x alternative; chosen: {side}", flush=True)


if __name__ == "__main__":
    main()
