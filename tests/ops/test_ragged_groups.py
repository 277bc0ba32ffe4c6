"""Groups of rows whose sizes stay on the device: one table, one cast and one product for all, with the bits of each alone.

On a CPU the definitions run, where the test says that the device makes these products.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import opfuse
from opfuse import ops, recipes
from opfuse.errors import QuantizedTensorError, ShapeError
from opfuse.formats import COLUMNWISE, E4M3, E5M2, USAGES, fp8_block, fp8_tensor, mxfp8
from opfuse.inspect.casts import figures
from opfuse.kernels.casts.groups import row_groups
from opfuse.kernels.products import grouped
from opfuse.kernels.products.backends import MX_GROUPS
from opfuse.kernels.products.native import Machine
from opfuse.kernels.products.runs import product_of_rows
from opfuse.numerics.row_groups import TALL, TILE, RowGroups, most_tiles, padded
from opfuse.runtime.replay.dispatch import interpreted
from opfuse.runtime.replay.replayable import Recorded
from opfuse.tensors import gemm
from opfuse.tensors.groups import groups_of, listed_splits, written
from opfuse.tensors.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8RowQuantizer,
    GroupedQuantizer,
    MXFP8Quantizer,
)
from opfuse.tensors.ragged import (
    RaggedProducts,
    _supported,
    cast_in_groups,
    casts_in_groups,
    copied_to,
    encoding_in_groups,
    groups_in,
)
from tests.compiler.harness import gradient, randn, same
from tests.kernels.cases.groups import CASES as PRODUCTS
from tests.program.fake import fake_device, launches_seen
from tests.program.test_program import refusal_of

BF16 = torch.bfloat16
RECIPE = recipes.Float8BlockScaling()
SIZES = ((100, 0, 28, 200), (128, 128, 0, 0), (0, 0, 0, 1), (300, 0, 1, 127))
QUANTIZER = Float8BlockQuantizer(torch.float8_e4m3fn, block_scaling_dim=1)
every_size = pytest.mark.parametrize("sizes", SIZES, ids=str)


def known(sizes: tuple[int, ...], rows: int) -> RowGroups:
    return RowGroups(row_groups(torch.tensor(sizes), rows), rows, len(sizes))


@pytest.fixture
def on_device(monkeypatch):
    """Say that the CPU is a device that makes products of groups of unknown sizes; the list has what was cast so."""
    cast: list[tuple[int, ...]] = []

    def counted(quantizer, x, splits, index=None, **options):
        cast.append(tuple(splits.tolist()))
        return cast_in_groups(quantizer, x, splits, index, **options)

    def counted_too(quantizer, shape, dtype, splits, device):
        found = encoding_in_groups(quantizer, shape, dtype, splits, device)
        cast.extend([tuple(splits.tolist())] * (found is not None))
        return found

    monkeypatch.setattr(RaggedProducts, "supported_on", lambda *_: True)
    monkeypatch.setattr("opfuse.core.grouped_cast.cast_in_groups", counted)
    monkeypatch.setattr("opfuse.core.grouped_cast.encoding_in_groups", counted_too)
    return cast


# -- the table -------------------------------------------------------------------------------------------------------------------


@every_size
def test_tiles_have_rows_of_one_group_and_all_rows_once(sizes):
    rows = sum(sizes)
    groups = known(sizes, rows)
    fours = groups.table.view(-1, 4).tolist()
    for place, height in enumerate((TILE, TALL)):
        tiles = fours[groups.at(height) :][: most_tiles(rows, len(sizes), height)]
        used = tiles[: fours[0][place]]
        found = [(group, row) for group, first, end, _ in used for row in range(first, min(first + height, end))]
        assert found == [(i, row) for i, (first, end, _) in enumerate(groups.ranges()) for row in range(first, end)]
        assert not any(map(any, tiles[len(used) :]))
    x = randn(rows, 8)
    spread = padded(x, groups)
    for first, end, tile in groups.ranges():
        assert same(spread[tile * TILE :][: end - first], x[first:end])
    assert int(spread.count_nonzero()) == int(x.count_nonzero())


MOST_SHARED = 227 << 10
"""Bytes of shared memory that a block can have on compute capability 9.0."""


@pytest.mark.row("R10")
@pytest.mark.cpu
def test_r10_launches_of_short_tiles_read_the_table_of_their_height_and_have_blocks_for_all_tiles():
    """Where few rows are expected in a group, one may have many all the same."""
    heights = set()
    for case in PRODUCTS[product_of_rows].values():
        queued = []
        arguments = case(torch.device("cpu"))
        product_of_rows.run(
            lambda variant, entry, grid, layout, *fields, device, queued=queued: queued.append((variant.defines, grid, fields)),
            *arguments.args,
            **arguments.kwargs,
        )
        [(defines, grid, fields)] = queued
        _, rights, groups = arguments.args
        short, fast = "SHORT=1" in defines, "FAST=1" in defines
        height = TILE if short or fast else TALL
        heights.add((height, fast))
        count, tiles, columns, at, *_ = fields[-15:]  # of Product in product.cuh
        assert short is (not fast and groups.rows <= 128 * groups.number)
        assert (count, columns, at) == (groups.number, rights[0].layout.lines[0], groups.at(height))
        down = int(groups.table[int(height == TALL)])
        assert down == sum(-(-(end - first) // height) for first, end, _ in groups.ranges())
        assert down * -(-columns // 128) <= tiles
        assert 1 <= grid.blocks <= tiles
        assert grid.shared <= MOST_SHARED
    assert heights == {(TILE, True), (TILE, False), (TALL, False)}


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ((64, 99, 5), [(0, 64), (64, 128), (128, 128)]),
        ((-3, 64, 64), [(0, 0), (0, 64), (64, 128)]),
        ((1 << 62, 1 << 62, -1), [(0, 128), (128, 128), (128, 128)]),
        ((3, 4, 0), [(0, 3), (3, 7), (7, 7)]),
    ],
)
@pytest.mark.cpu
def test_groups_stay_inside_of_the_matrix_whatever_the_sizes_are(sizes, wanted):
    groups = known(sizes, 128)
    assert [(first, end) for first, end, _ in groups.ranges()] == wanted
    assert groups.table.view(-1, 4)[0, 0] <= groups.tiles
    assert 0 <= int(groups.of_rows().min()) <= int(groups.of_rows().max()) < 3


# -- the cast --------------------------------------------------------------------------------------------------------------------


FP8 = torch.float8_e4m3fn
QUANTIZERS = {
    "blocks": lambda _: QUANTIZER,
    "rows": lambda _: Float8RowQuantizer(FP8),
    "current": lambda _: Float8CurrentScalingQuantizer(FP8, force_pow_2_scales=True),
    "delayed": lambda i: Float8Quantizer(torch.full((1,), 2.0**-i), torch.full((1,), 2.0 * (i % 2)), FP8),
}


@pytest.mark.few
@pytest.mark.row("X11")
@every_size
@pytest.mark.parametrize("usages", [USAGES, USAGES[:1], USAGES[1:]], ids=str)
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_a_cast_in_groups_is_that_of_each_group(kind, sizes, usages):
    wanting = {usage: usage in usages for usage in USAGES}
    each, other = ([QUANTIZERS[kind](i).wanting(**wanting) for i in range(len(sizes))] for _ in range(2))
    x, quantizer = randn(sum(sizes), 144).to(BF16), each[0]
    made = cast_in_groups(quantizer, x, torch.tensor(sizes), each=each)
    alone = GroupedQuantizer(tuple(other), sizes, rowwise=quantizer.rowwise, columnwise=quantizer.columnwise)
    wanted, groups = alone.quantize(x), groups_in(made)
    assert all(map(same, [t for q in each for t in q.state], [t for q in other for t in q.state]))
    assert made.usages == wanted.usages
    for usage in usages:
        plane, members = made.plane(usage), wanted.plane(usage).members
        assert same(plane.dequantize(BF16), wanted.dequantize(BF16, usage))
        for (first, end, tile), member in zip(groups.ranges(), members, strict=True):
            at = tile * TILE if usage == COLUMNWISE else first
            codes = plane.data.t() if usage == COLUMNWISE else plane.data
            assert same(codes[at : at + end - first], member.data.t() if usage == COLUMNWISE else member.data)
        assert refusal_of(lambda *tensors: [plane.with_tensors(tensors).dequantize(BF16)], *plane.tensors()) == ""  # noqa: B023
    again = made.with_tensors(made.tensors())
    assert [type(again.plane(usage)) for usage in usages] == [type(made.plane(usage)) for usage in usages]
    assert all(same(one, other) for one, other in zip(again.tensors(), made.tensors(), strict=True))


@every_size
@pytest.mark.parametrize("element", [E4M3, E5M2], ids=str)
def test_a_cast_of_small_blocks_in_groups_is_that_of_each_group(element, sizes):
    """In a columnwise plane each group begins on a tile, so that no block has rows of two."""
    x, quantizer = randn(sum(sizes), 160).to(BF16), MXFP8Quantizer(element.dtype)
    made = cast_in_groups(quantizer, x, torch.tensor(sizes))
    assert same(made.dequantize(BF16), quantizer.wanting(columnwise=False).quantize(x).dequantize(BF16))
    columns = made.dequantize(BF16, COLUMNWISE)
    for first, end, _ in groups_in(made).ranges():
        group = F.pad(x[first:end], (0, 0, 0, (first - end) % 32))
        alone = quantizer.quantize(group).dequantize(BF16, COLUMNWISE) if len(group) else group
        assert same(columns[first:end], alone[: end - first])
    assert not casts_in_groups(MXFP8Quantizer(with_2d_quantization=True), 4), "tiles of 32 rows would have those of two groups"


def test_a_layer_of_small_blocks_whose_sizes_stay_has_the_bits_of_one_that_knows_them(on_device, monkeypatch):
    """The emulated one pads groups with rows of zeros; that of a device has these in its tiles."""
    recipe, sizes = recipes.MXFP8BlockScaling(), (100, 0, 28, 200)
    op, x, splits = layer(out_features=160, pad_splits=True), randn(328, 128).to(BF16), torch.tensor(sizes)
    stayed = step(op, x, splits, recipe=recipe)
    assert on_device == [sizes] * 2
    monkeypatch.setattr(RaggedProducts, "supported_on", lambda *_: False)
    assert all(map(same, stayed, step(op, x, splits, recipe=recipe)))


@every_size
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_what_is_told_of_a_cast_in_groups_and_what_is_derived(kind, sizes):
    x, each = randn(sum(sizes), 144).to(BF16), [QUANTIZERS[kind](i) for i in range(len(sizes))]
    made, wanted = cast_in_groups(each[0], x, torch.tensor(sizes), each=each), GroupedQuantizer((*each,), sizes).quantize(x)
    (found,), (known,) = ([one.read() for one in figures(x, storage)] for storage in (made, wanted))
    assert replace(found, sqnr=None) == replace(known, sqnr=None)
    assert found.sqnr == pytest.approx(known.sqnr, rel=1e-6)
    if made.rowwise.format.family == "tensor":
        turned = made.only(USAGES[0], why="a test").derived(COLUMNWISE)
        assert all(same(one, other) for one, other in zip(turned.tensors(), made.columnwise.tensors(), strict=True))


# -- layers ----------------------------------------------------------------------------------------------------------------------


def layer(out_features: int = 144, **options: Any) -> ops.GroupedLinear:
    torch.manual_seed(3)
    return ops.GroupedLinear(4, 128, out_features, dtype=BF16, **{"bias": False, **options})


def experts(**options: Any) -> ops.Sequential:
    torch.manual_seed(4)
    up = ops.GroupedLinear(4, 128, 256, bias=False, dtype=BF16, **options)
    return ops.Sequential(up, ops.SwiGLU(), ops.GroupedLinear(4, 128, 144, bias=False, dtype=BF16, **options))


def step(model, x, *splits, recipe=RECIPE) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    model.zero_grad(set_to_none=True)
    with interpreted():
        with opfuse.autocast(recipe=recipe):
            y = model(x, *splits)
        y.backward(gradient(y, 7))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def frozen_biases(**options: Any) -> ops.GroupedLinear:
    """Biases are added without the sizes; only their gradients want these."""
    op = layer(bias=True, **options)
    for name in op.bias_names:
        op.get_parameter(name).requires_grad_(False)
    return op


MODELS = {
    "a layer": (layer, 1, {}),
    "biases that do not train": (frozen_biases, 1, {}),
    "one weight": (layer, 1, {"single_grouped_weight": True}),
    "padded": (layer, 1, {"pad_splits": True}),
    "experts": (experts, 2, {}),
}


SCALED = {
    "rows": recipes.CustomRecipe(qfactory="fp8_row_scaled"),
    "current": recipes.Float8CurrentScaling(),
    "delayed": recipes.DelayedScaling(amax_history_len=4),
}


@pytest.mark.few
@pytest.mark.row("B24", "X11")
@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("name", ["one weight", "experts"])
def test_b24_scales_of_groups_are_those_where_the_host_knows_the_sizes(name, kind, request):
    """Of several steps, whose sizes change: delayed scales are those of the amaxes of steps before, group by group."""
    make, layers, options = MODELS[name]
    models = [make(**options) for _ in range(2)]

    def steps(model):
        for sizes in SIZES:
            x, splits = randn(sum(sizes), 128, seed=sum(sizes)).to(BF16), torch.tensor(sizes)
            yield step(model, x, *[splits] * layers, recipe=SCALED[kind])

    wanted = [*steps(models[0])]
    cast = request.getfixturevalue("on_device")
    for got, want in zip(steps(models[1]), wanted, strict=True):
        assert all(same(one + 0, other + 0) for one, other in zip(got, want, strict=True))  # zeros of either sign are zeros
    assert len(cast) == len(SIZES) * 2 * layers


OVERRIDDEN = [
    recipe.replace(backward_override=override)
    for recipe in (RECIPE, SCALED["current"], SCALED["rows"])
    for override in ("dequantized", "high_precision")
]


@pytest.mark.few
@pytest.mark.row("B25")
@pytest.mark.parametrize("recipe", OVERRIDDEN, ids=lambda recipe: f"{recipe.kind} {recipe.backward_override}")
@pytest.mark.parametrize(
    ("name", "stored"), [("a layer", False), ("one weight", False), ("one weight", True), ("experts", False)]
)
def test_b25_gradients_under_an_override_need_no_sizes(name, stored, recipe, request):
    """Their products are torch's of groups, over values of what was quantized or over what came; a product reads no size."""
    make, layers, options = MODELS[name]
    with opfuse.quantized_model_init(enabled=stored, recipe=recipe):
        model = make(**options)
    x, splits = randn(328, 128).to(BF16), torch.tensor(SIZES[0])
    wanted = step(copy.deepcopy(model), x, *[splits] * layers, recipe=recipe)
    cast, monkeypatch = map(request.getfixturevalue, ("on_device", "monkeypatch"))
    monkeypatch.setattr(grouped, "_arch", lambda device: (9, 0))
    monkeypatch.setattr("opfuse.ops.grouped_linear.read_sizes", None)
    got = step(copy.deepcopy(model), x, *[splits] * layers, recipe=recipe)
    assert cast == [SIZES[0]] * layers
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=2e-2)
    assert same(got[0], wanted[0])


@pytest.mark.parametrize("recipe", OVERRIDDEN, ids=lambda recipe: f"{recipe.kind} {recipe.backward_override}")
@pytest.mark.parametrize("form", [{}, {"single_grouped_weight": True}], ids=["apart", "single"])
def test_gradients_under_an_override_that_are_added_to_main_grad(form, recipe, request):
    """The host reads the sizes for them; what was cast in groups is dequantized before its rows are taken apart."""
    found = []
    for there in (False, True):
        if there:
            request.getfixturevalue("on_device")
        op = layer(accumulate_into_main_grad=True, **form)
        for weight in op.parameters():
            weight.main_grad = torch.zeros(weight.shape)
        step(op, randn(328, 128).to(BF16), torch.tensor(SIZES[0]), recipe=recipe)
        found.append([weight.main_grad for weight in op.parameters()])
    assert all(map(same, *found))


def test_rows_are_no_groups_of_what_was_not_cast_apart():
    """Their codes would pass for values."""
    x, splits = randn(328, 128).to(BF16), torch.tensor(SIZES[0])
    for made in (cast_in_groups(QUANTIZER, x, splits), QUANTIZER.quantize(x)):
        with pytest.raises(QuantizedTensorError, match="wants groups that were cast apart"):
            groups_of(made, SIZES[0])


@pytest.mark.few
@pytest.mark.row("X11")
@pytest.mark.parametrize("kind", ["blocks", *SCALED])
@pytest.mark.parametrize("form", [{}, {"single_grouped_weight": True}], ids=["apart", "single"])
@pytest.mark.parametrize("overwritten", [False, True])
def test_gradients_that_are_added_to_main_grad(overwritten, form, kind, request):
    """With the bits of sizes of the host; what a group without rows has stays as it is, or is overwritten by zeros."""
    found = []
    for there in (False, True):
        if there:
            request.getfixturevalue("on_device")
        op = layer(accumulate_into_main_grad=True, **form)
        op.get_parameter(op.weight_names[-1]).overwrite_main_grad = overwritten
        for i, weight in enumerate(op.parameters()):
            weight.main_grad = torch.full(weight.shape, -0.0 if i % 2 else torch.nan)
            if there and i == 0:  # strided, which no kernel writes
                weight.main_grad = weight.main_grad.mT.contiguous().mT
        for sizes in SIZES[:3]:
            step(op, randn(sum(sizes), 128).to(BF16), torch.tensor(sizes), recipe={"blocks": RECIPE, **SCALED}[kind])
        found.append([weight.main_grad for weight in op.parameters()])
    assert all(map(same, *found))


@pytest.mark.few
@pytest.mark.row("B24", "X11")
@every_size
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stored", [False, True])
def test_b24_steps_have_the_bits_that_they_have_where_the_host_knows_the_sizes(name, sizes, stored, request):
    make, layers, options = MODELS[name]
    with opfuse.quantized_model_init(enabled=stored, recipe=RECIPE):
        model = make(**options)
    x, splits = randn(sum(sizes), 128, seed=sum(sizes)).to(BF16), torch.tensor(sizes)
    wanted = step(copy.deepcopy(model), x, *[splits] * layers)
    cast = request.getfixturevalue("on_device")
    got = step(copy.deepcopy(model), x, *[splits] * layers)
    assert cast == [sizes] * 2 * layers
    assert all(map(same, got, wanted))


@pytest.mark.parametrize("frozen", ["weights", "a weight", "input"])
def test_gradients_that_nobody_wants(frozen, on_device):
    op, x, splits = layer(), randn(328, 128).to(BF16), torch.tensor(SIZES[0])
    wanted = step(op, x, splits)
    for name in {"weights": op.weight_names, "a weight": op.weight_names[:1], "input": ()}[frozen]:
        op.get_parameter(name).requires_grad_(False)
    if frozen == "input":
        with interpreted(), opfuse.autocast(recipe=RECIPE):
            y = op(x, splits)
        y.backward(gradient(y, 7))
        assert all(same(op.get_parameter(name).grad, want) for name, want in zip(op.weight_names, wanted[2:]))
    else:
        assert all(map(same, step(op, x, splits)[:2], wanted[:2]))
    assert len(on_device) == 4


def test_gradients_that_are_put_off(request):
    found = []
    for known_there in (False, True):
        if known_there:
            request.getfixturevalue("on_device")
        op = layer(delay_wgrad_compute=True)
        step(op, randn(328, 128).to(BF16), torch.tensor(SIZES[0]))
        op.backward_dw()
        found.append([weight.grad for weight in op.parameters()])
    assert all(map(same, *found))


UNLIKE = {
    "a bias that trains": ({"bias": True}, RECIPE),
    "features of no whole pieces": ({"out_features": 136}, RECIPE),
    "another format": ({}, recipes.NVFP4BlockScaling(backward_override="dequantized")),
    "two-dimensional blocks of the input": ({}, recipes.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1)),
}


@pytest.mark.parametrize("why", UNLIKE)
def test_the_host_reads_the_sizes_of_what_no_kernel_takes(why, monkeypatch):
    options, recipe = UNLIKE[why]
    op = ops.GroupedLinear(4, 128, **{"out_features": 128, "bias": False, "dtype": BF16, **options})
    for weight in op.parameters():
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    monkeypatch.setattr("opfuse.core.grouped_cast.cast_in_groups", None)
    asked = []
    monkeypatch.setattr(RaggedProducts, "supported_on", lambda products, *_: asked.append(products) is not None)
    step(op, randn(328, 128).to(BF16), torch.tensor(SIZES[0]), recipe=recipe)
    assert why == "features of no whole pieces" or not asked


FAST = {"all": (False,) * 3, "backward": (True, False, False), "none": (True,) * 3}
"""By ``split_accumulator``: whether sums may have fewer bits than fp32, of fprop, dgrad and wgrad."""


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("split", FAST)
def test_each_product_is_asked_for_with_the_sums_of_the_recipe(split, added, monkeypatch):
    asked = []

    def noted(definition, *args, **options):
        asked.append(options["fast"])
        return definition(*args, **options)

    for name in ("multiply_rows", "multiply_over_rows", "products_into"):
        monkeypatch.setattr(gemm, name, partial(noted, getattr(gemm, name)))
    op = layer(accumulate_into_main_grad=added)
    for weight in op.parameters():
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    recipe = RECIPE.replace(split_accumulator=split)
    step(op, randn(328, 128).to(BF16), torch.tensor(SIZES[0]), recipe=recipe)
    assert tuple(asked) == FAST[split]


def test_a_device_is_asked_for_the_formats_of_each_operand(monkeypatch):
    asked = set()
    monkeypatch.setattr(RaggedProducts, "supported_on", lambda products, *_: bool(asked.add(products)))
    step(layer(), randn(328, 128).to(BF16), torch.tensor(SIZES[0]), recipe=recipes.Float8CurrentScaling())
    assert asked == {RaggedProducts(fp8_tensor(E4M3), fp8_tensor(E5M2), fp8_tensor(E4M3), (128, 144))}


@pytest.mark.parametrize("given", [list, torch.tensor])
@pytest.mark.cpu
def test_what_the_host_has_is_checked_and_copied(given, on_device):
    op, x = layer(), randn(328, 128).to(BF16)
    wanted = step(op, x, torch.tensor(SIZES[0]))
    del on_device[:]
    assert all(map(same, step(op, x, given(SIZES[0])), wanted))
    assert on_device == [SIZES[0]] * 2
    for recorded in (False, True):
        if recorded:
            with pytest.raises(ShapeError, match="with the sum 327"), opfuse.autocast(recipe=RECIPE):
                op(x, given((100, 0, 27, 200)))
        else:
            with pytest.raises(ShapeError, match="with the sum 327"):
                step(op, x, given((100, 0, 27, 200)))


@pytest.mark.row("X11")
@pytest.mark.unrun
@pytest.mark.parametrize("given", [list, torch.tensor])
@pytest.mark.cpu
def test_one_program_repeats_all_sizes_that_the_host_has(given, monkeypatch, request):
    """The second call is recorded although its sizes are new; each call checks those that it has."""
    request.getfixturevalue("on_device")
    op = layer()
    with fake_device(monkeypatch), launches_seen(monkeypatch):
        for sizes in ((128, 64, 0, 64), (0, 0, 200, 56)):
            op_output(op, randn(256, 128).to(BF16), given(sizes))
        with pytest.raises(ShapeError, match="with the sum 256"):
            op_output(op, randn(256, 128).to(BF16), given((128, 64, 0, 63)))
    (made,) = (made for _, plan in op._fuser.cache.items() for looks in plan.programs.values() for made in looks.values())
    assert isinstance(made, Recorded)


def op_output(op, x, splits) -> torch.Tensor:
    with opfuse.autocast(recipe=RECIPE):
        return op(x, splits)


@pytest.mark.unrun
@pytest.mark.cpu
def test_a_list_is_a_constant_of_a_graph_and_no_program_copies_it_there(monkeypatch, request):
    """A graph would copy from memory that is let go of."""
    request.getfixturevalue("on_device")
    op, x = layer(), randn(328, 128).to(BF16).requires_grad_()

    def trained() -> list[torch.Tensor]:
        y = op_output(op, x, list(SIZES[0]))
        return [y, *torch.autograd.grad(y, [x, *op.parameters()], gradient(y, 7))]

    with fake_device(monkeypatch), launches_seen(monkeypatch):
        for _ in range(2):
            op_output(op, x, list(SIZES[0]))
    with interpreted():
        wanted = trained()
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    monkeypatch.setattr("opfuse.runtime.replay.replayable.Recorded.repeat", None)
    assert all(map(same, trained(), wanted))
    splits, seen = listed_splits(SIZES[0], where="a test"), []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Seen():
        assert copied_to(splits, torch.device("meta")).shape == splits.shape
    assert set(seen) == {torch.ops.aten.full.default, torch.ops.aten.cat.default}
    assert same(written(SIZES[1], torch.int64, splits.device), torch.tensor(SIZES[1]))


@pytest.mark.parametrize(
    ("widths", "dtype", "arch", "made"),
    [
        ((128, 144), BF16, (9, 0), True),
        ((128, 136), BF16, (9, 0), False),
        ((136, 128), torch.float16, (9, 0), False),
        ((128, 144), torch.float32, (9, 0), False),
        ((128, 144), torch.float16, (9, 0), True),
        ((128, 144), BF16, (8, 9), False),
        ((128, 144), BF16, (10, 0), False),
    ],
)
def test_devices_that_make_products_of_groups_in_one_launch(widths, dtype, arch, made, monkeypatch):
    monkeypatch.setattr("opfuse.tensors.ragged.machine_of", lambda device: Machine(arch, (13, 0)))
    monkeypatch.setattr("opfuse.tensors.ragged.kernels_run_on", lambda device: True)
    _supported.cache_clear()
    products = RaggedProducts(fp8_block(E4M3, 1), fp8_block(E4M3, 1), fp8_block(E4M3, 2), widths)
    assert products.supported_on(torch.device("cuda", 0), dtype) == made
    assert not products.supported_on(torch.device("cpu"), dtype)
    _supported.cache_clear()


@pytest.mark.parametrize(
    ("arch", "layer", "why"),
    [
        ((10, 0), (256, E4M3, False), ""),
        ((10, 3), (256, E4M3, False), ""),
        ((12, 0), (256, E4M3, False), "compute capability: wants >= 10.0 and < 11.0, got 12.0"),
        ((9, 0), (256, E4M3, False), "compute capability: wants >= 10.0 and < 11.0, got 9.0"),
        ((10, 0), (160, E4M3, False), "length of the sum: wants a positive multiple of 128, got 160"),
        ((10, 0), (256, E5M2, False), "elements: wants e4m3 twice, got ('e5m2', 'e4m3')"),
        ((10, 0), (256, E4M3, True), "wgrad: wants a result in bf16, got one that is added in fp32"),
    ],
)
@pytest.mark.parametrize("right", [True, False], ids=["certified", "wrong there"])
def test_small_blocks_stay_where_the_library_multiplies_them_rightly(arch, layer, why, right, monkeypatch):
    monkeypatch.setattr("opfuse.tensors.ragged.machine_of", lambda device: Machine(arch, (13, 0)))
    monkeypatch.setattr("opfuse.tensors.ragged.kernels_run_on", lambda device: True)
    monkeypatch.setattr("opfuse.kernels.products.native.is_certified", lambda what, device: right and what == MX_GROUPS)
    _supported.cache_clear()
    outputs, element, added = layer
    products = RaggedProducts(mxfp8(E4M3), mxfp8(element), mxfp8(E4M3), (128, outputs), added)
    assert products.refusal(Machine(arch, (13, 0)), BF16) == why
    assert products.supported_on(torch.device("cuda", 0), BF16) == (right and not why)
    assert products.refusal(Machine((10, 0), (13, 0)), torch.float16)
    _supported.cache_clear()


def test_only_known_casts_are_made_in_groups():
    assert casts_in_groups(QUANTIZER, 128)
    for other in (Float8BlockQuantizer(torch.float8_e4m3fn), Float8BlockQuantizer(torch.float8_e4m3fn, block_scaling_dim=1)):
        assert not casts_in_groups(other, 129)
    assert not casts_in_groups(Float8BlockQuantizer(torch.float8_e4m3fn), 4)


def test_what_a_device_copies_is_not_the_memory_of_the_caller():
    """Who pins it may write the next sizes there before the copy of these has run."""
    splits, copied = torch.tensor([3, 5]), []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._to_copy.default:
                copied.append(args[0].data_ptr())
            return func(*args, **(kwargs or {}))

    with Seen():
        copied_to(splits, torch.device("meta"))
        assert copied_to(splits, splits.device) is splits
    assert len(copied) == 1
    assert copied[0] != splits.data_ptr()
