"""More than 2^31 elements in groups of rows and in products: lines on either side of element 2^31 are what they are alone."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from opfuse.formats import COLUMNWISE, E4M3, ROWWISE, USAGES, fp8_block, fp8_row, fp8_tensor
from opfuse.kernels.casts.groups import cast_block_groups, row_groups
from opfuse.kernels.casts.scaled_groups import cast_current_groups, cast_recording_groups, cast_row_groups, group_amaxes
from opfuse.kernels.products.chained import product_chain
from opfuse.kernels.products.runs import product_of_rows, product_over_rows, products_into
from opfuse.kernels.products.stored import Stored
from opfuse.numerics.chain import Stage
from opfuse.numerics.layouts import Layout
from opfuse.numerics.row_groups import TILE, RowGroups
from opfuse.recipes import availability
from tests.gpu.test_large import FORMATS, encoding, matrix, same
from tests.kernels.cases.chains import OPS

pytestmark = pytest.mark.slow

FAR = 2**31
own_products = pytest.mark.skipif(availability.device_arch() != (9, 0), reason="products of compute capability 9.0")


class Groups(NamedTuple):
    """Groups of the rows of a matrix that is larger than 2^31, and the same without the first, for rows from ``first`` on.

    The group that is the first of ``last`` has rows on either side of the element 2^31.
    """

    every: RowGroups
    last: RowGroups
    first: int

    @property
    def rows(self) -> slice:
        return slice(self.first, None)

    @property
    def padded(self) -> slice:
        """Where tiles of the groups in ``last`` lie in a columnwise plane of them all."""
        first = -(-self.first // TILE) * TILE
        return slice(first, first + self.used)

    @property
    def used(self) -> int:
        """Rows of the tiles of the groups in ``last``."""
        return TILE * sum(-(-size // TILE) for size in LAST)


LAST = (700, 0, 500)


def made_groups(sizes, device):
    return RowGroups(row_groups(torch.tensor(sizes, device=device), sum(sizes)), sum(sizes), len(sizes))


def groups_of(width, device):
    """Of a matrix with lines of ``width``."""
    first = FAR // width // 16 * 16 - 300
    return Groups(made_groups((first, *LAST), device), made_groups(LAST, device), first)


def group_layouts(fmt, groups, columns):
    return [Layout(fmt, ROWWISE, (groups.rows, columns)), Layout(fmt, COLUMNWISE, (groups.padded_rows, columns))]


def assert_same_groups(found, alone, groups):
    """Codes of both planes, of the rows of the last groups."""
    (rows, columns), (some_rows, some_columns) = found, alone
    assert same(rows[groups.rows], some_rows)
    assert same(columns[:, groups.padded], some_columns[:, : groups.used])


def test_r10_scaled_casts_of_groups_past_2_31(device):
    groups = groups_of(1024, device)
    x = matrix((groups.every.rows, 1024), device)
    some, fmt = x[groups.rows].clone(), fp8_tensor(E4M3)
    both = (x, groups.every), (some, groups.last)
    amaxes, few = (group_amaxes(*each) for each in both)
    assert torch.equal(amaxes[1:], few)
    assert amaxes[-1] == 5.0
    layouts = [group_layouts(fmt, of, 1024) for _, of in both]
    (codes, scales), (some_codes, some_scales) = (
        cast_current_groups(*each, amax, planes) for each, amax, planes in zip(both, (amaxes, few), layouts)
    )
    assert same(scales[1:], some_scales)
    assert_same_groups(codes, some_codes, groups)
    states = [[(torch.full((1,), 60.0, device=device), torch.zeros(1, device=device)) for _ in amax] for amax in (amaxes, few)]
    (codes, scales), (some_codes, some_scales) = (
        cast_recording_groups(*each, state, planes) for each, state, planes in zip(both, states, layouts)
    )
    assert same(scales[1:], some_scales)
    assert_same_groups(codes, some_codes, groups)
    assert torch.equal(torch.cat([amax for _, amax in states[0]]), amaxes)


def test_r10_row_cast_of_groups_past_2_31(device):
    groups = groups_of(1024, device)
    x = matrix((groups.every.rows, 1024), device)
    both = (x, groups.every), (x[groups.rows].clone(), groups.last)
    found, alone = (cast_row_groups(*each, group_layouts(fp8_row(E4M3), each[1], 1024)) for each in both)
    assert_same_groups(*([codes for codes, _ in planes] for planes in (found, alone)), groups)
    (_, of_rows), (_, of_columns) = found
    assert same(of_rows[groups.rows], alone[0][1])
    assert same(of_columns[1:], alone[1][1])


@pytest.mark.parametrize("indexed", [False, True], ids=["", "indexed"])
def test_r10_block_cast_of_groups_past_2_31(indexed, device):
    """By the index, rows in another order are read from both sides of the element 2^31."""
    groups, fmt = groups_of(1024, device), FORMATS["blocks"]
    x = matrix((groups.every.rows, 1024), device)
    if indexed:
        index = torch.arange(groups.first, groups.every.rows, device=device).flip(0)
        layouts = group_layouts(fmt, groups.last, 1024)
        found = cast_block_groups(x, groups.last, layouts, index=index)
        alone = cast_block_groups(x[index], groups.last, layouts)
        assert all(same(*arrays) for planes in zip(found, alone) for arrays in zip(*planes))
        return
    both = (x, groups.every), (x[groups.rows].clone(), groups.last)
    found, alone = (cast_block_groups(*each, group_layouts(fmt, each[1], 1024)) for each in both)
    assert_same_groups(*([codes for codes, _ in planes] for planes in (found, alone)), groups)
    (_, of_rows), (_, of_columns) = found
    assert same(of_rows[:, groups.rows], alone[0][1])
    tiles = slice(groups.padded.start // TILE, groups.padded.stop // TILE)
    assert same(of_columns[tiles], alone[1][1][: groups.used // TILE])


# -- products --------------------------------------------------------------------------------------------------------------

KINDS = {
    "tensors, fast": (fp8_tensor(E4M3), fp8_tensor(E4M3)),
    "rows": (fp8_row(E4M3), fp8_row(E4M3)),
    "1x128, 128x128": (fp8_block(E4M3, 1), fp8_block(E4M3, 2)),
    "1x128, 1x128": (fp8_block(E4M3, 1), fp8_block(E4M3, 1)),
}
each_left = pytest.mark.parametrize("kind", ["tensors, fast", "rows", "1x128, 128x128"])
each_sum = pytest.mark.parametrize("kind", ["tensors, fast", "rows", "1x128, 1x128"])


def operand(fmt, usage, shape, device, *, groups=None):
    """Random codes, and scales from 0.5 to 1.5; with ``groups`` those of tensors and columns of each."""
    layout = Layout(fmt, usage, shape)
    codes = torch.randn(layout.data_shape, device=device).to(torch.float8_e4m3fn).view(torch.uint8)
    apart = groups is not None and (fmt.family == "tensor" or (fmt.family == "row" and usage == COLUMNWISE))
    sizes = (groups.number, *layout.scale_shape) if apart else layout.scale_shape
    return Stored(codes, torch.rand(sizes, device=device) + 0.5, None, layout)


def lines_from(plane, first):
    """A rowwise plane of the lines from ``first`` on."""
    family, shape = plane.layout.format.family, (plane.layout.shape[0] - first, plane.layout.shape[1])
    scale = plane.scale if family == "tensor" else plane.scale[..., first:]
    layout = plane.layout.replace(shape=shape)
    return Stored(plane.data[first:], scale.clone().contiguous(), None, layout)


def places_of(width):
    """Lines of a matrix so wide that is larger than 2^31, and the first of some that lie on either side of element 2^31."""
    near = FAR // width // 16 * 16
    return near + 900, near - 300


@own_products
@each_left
@pytest.mark.parametrize(("length", "columns"), [(4112, 144), (144, 2064)], ids=["left", "result"])
def test_r10_products_of_groups_of_rows_past_2_31(kind, length, columns, device):
    of_left, of_right = KINDS[kind]
    groups = groups_of(max(length, columns), device)
    left = operand(of_left, ROWWISE, (groups.every.rows, length), device, groups=groups.every)
    rights = [operand(of_right, ROWWISE, (columns, length), device) for _ in range(groups.every.number)]
    alone = lines_from(left, groups.first)
    if left.has_scales_of_groups:
        alone = alone._replace(scale=left.scale[1:].clone())
    options = {"out_dtype": torch.bfloat16, "fast": "fast" in kind}
    whole = product_of_rows(left, rights, groups.every, **options)
    assert same(whole[groups.rows], product_of_rows(alone, rights[1:], groups.last, **options))


def last_groups(plane, groups):
    """Of a columnwise plane of all groups that of the last ones."""
    fmt, lines = plane.layout.format, plane.layout.lines[0]
    layout = plane.layout.replace(shape=(groups.last.padded_rows, lines))
    data = torch.zeros(layout.data_shape, dtype=torch.uint8, device=plane.data.device)
    data[:, : groups.used] = plane.data[:, groups.padded]
    scale = plane.scale[1:].clone()
    if fmt.family == "block":
        scale, tiles = torch.zeros(layout.scale_shape, device=data.device), groups.used // TILE
        scale[:tiles] = plane.scale[groups.padded.start // TILE :][:tiles]
    return Stored(data, scale, None, layout)


def columnwise(fmt, lines, groups, device):
    """A plane of random codes, with zeros behind the rows of each group."""
    made = operand(fmt, COLUMNWISE, (groups.padded_rows, lines), device, groups=groups)
    behind = torch.ones(groups.padded_rows, dtype=torch.bool, device=device).index_fill_(0, groups.places(), False)
    made.data.masked_fill_(behind, 0)
    return made


@own_products
@each_sum
def test_r10_products_over_groups_of_rows_past_2_31(kind, device):
    groups = groups_of(4112, device)
    planes = [columnwise(fmt, lines, groups.every, device) for fmt, lines in zip(KINDS[kind], (4112, 144))]
    few = [last_groups(plane, groups) for plane in planes]
    options = {"out_dtype": torch.bfloat16, "fast": "fast" in kind}
    whole = product_over_rows(*planes, groups.every, **options)
    assert same(whole[1:], product_over_rows(*few, groups.last, **options))
    into = [{i: torch.ones(4112, 144, device=device) for i in range(of.number)} for of in (groups.every, groups.last)]
    for each, of, results in ((planes, groups.every, into[0]), (few, groups.last, into[1])):
        products_into(*each, of, results, fast="fast" in kind)
    assert all(same(into[0][1 + i], result) for i, result in into[1].items())


@own_products
@each_sum
def test_r10_results_of_groups_past_2_31(kind, device):
    """The last of them has elements on either side of element 2^31."""
    columns = 16512
    lines, groups = (FAR // (4 * columns) // 16 + 2) * 16, made_groups((140, 0, 260, 130), device)
    planes = [columnwise(fmt, count, groups, device) for fmt, count in zip(KINDS[kind], (lines, columns))]
    whole = product_over_rows(*planes, groups, out_dtype=torch.bfloat16, fast="fast" in kind)
    alone = {3: torch.empty(lines, columns, dtype=torch.bfloat16, device=device)}
    products_into(*planes, groups, alone, fast="fast" in kind, accumulate=False)
    assert whole.numel() > FAR > whole[:3].numel()
    assert same(whole[3], alone[3])


@own_products
@each_sum
@pytest.mark.parametrize("accumulate", [False, True], ids=["", "added"])
def test_r10_a_result_past_2_31_of_a_group_that_is_given(kind, accumulate, device):
    columns = 16400
    lines, groups = (FAR // columns // 16 + 25) * 16, made_groups((200, 0, 300), device)
    left, right = (columnwise(fmt, count, groups, device) for fmt, count in zip(KINDS[kind], (lines, columns)))
    some = slice(lines - 800, lines)
    scale = left.scale if left.layout.format.family == "tensor" else left.scale[:, some].contiguous()
    few = Stored(left.data[some], scale, None, left.layout.replace(shape=(groups.padded_rows, 800)))
    whole, alone = (torch.ones(count, columns, device=device) for count in (lines, 800))
    for each, result in ((left, whole), (few, alone)):
        products_into(each, right, groups, {0: result}, fast="fast" in kind, accumulate=accumulate)
    assert lines * columns > FAR > (lines - 800) * columns
    assert same(whole[some], alone)


@own_products
@pytest.mark.parametrize(("length", "columns"), [(4112, 144), (144, 2064)], ids=["left", "result"])
@pytest.mark.parametrize("cast", [None, *USAGES, "blocks"])
def test_r10_product_with_chain_and_cast_past_2_31(cast, length, columns, device):
    """The result where nothing is cast, else codes; and the input of the activation, which is kept."""
    lines, first = places_of(max(length, columns))
    fast, usage = cast != "blocks", cast if cast in USAGES else ROWWISE
    of_left, of_right = KINDS["tensors, fast" if fast else "1x128, 128x128"]
    left, right = operand(of_left, ROWWISE, (lines, length), device), operand(of_right, ROWWISE, (columns, length), device)
    right.scale.mul_(length**-0.5)
    bias = torch.randn(columns, device=device, dtype=torch.bfloat16)
    made = []
    for operand_of in (left, lines_from(left, first)):
        matrix_of = operand_of.layout.shape[0], columns
        stages = [Stage(OPS["bias"], {"bias": bias}), Stage(OPS["gelu"])]
        encode = None if cast is None else encoding("tensor" if fast else "blocks", usage, matrix_of, device)
        options = {"shape": torch.Size(matrix_of), "dtype": torch.bfloat16, "keep": (1,), "fast": fast}
        made.append(product_chain(operand_of, right, stages, encode, **options))
    (planes, y, kept), (some_planes, some_y, some_kept) = made
    assert same(kept[1][first:], some_kept[1])
    if cast is None:
        assert same(y[first:], some_y)
        return
    ((codes, scale),), ((some_codes, some_scale),) = planes, some_planes
    assert same(codes[first:] if usage == ROWWISE else codes[:, first:], some_codes)
    assert same(scale if fast else scale[:, first:], some_scale)
