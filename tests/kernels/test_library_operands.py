"""What a call hands to the library on compute capability 10.0 and 12.0, beside torchao's layouts and torch's own checks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import ScalingType, SwizzleType

import opfuse
from opfuse import ops
from opfuse.formats import E4M3
from opfuse.kernels.products.backends import BACKENDS, Backend, LibraryOperand, Machine, backend_of
from opfuse.kernels.products.library_groups import RunOperands, operands_of_rows, operands_over_rows
from opfuse.kernels.products.stored import Stored
from opfuse.numerics.layouts import load_scale, unswizzle
from opfuse.numerics.row_groups import RowGroups
from opfuse.recipes import MXFP8BlockScaling, NVFP4BlockScaling
from opfuse.tensors.quantizers import Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer
from opfuse.tensors.ragged import cast_in_groups, groups_in
from opfuse.tensors.storage import QuantizedStorage

SIZES = [(1, 32), (5, 96), (128, 256), (130, 160), (300, 1056)]
BLOCKS = {f"block {dims}d": partial(Float8BlockQuantizer, E4M3.dtype, block_scaling_dim=dims) for dims in (1, 2)}
QUANTIZERS = {"mx": MXFP8Quantizer, "nv": NVFP4Quantizer, **BLOCKS}
BLACKWELL = Machine((10, 0), (13, 0))


def handed_over(plane: Stored, *, is_right: bool = False) -> LibraryOperand:
    row = backend_of(BACKENDS[plane.layout.format.family], BLACKWELL)
    assert isinstance(row, Backend)
    return row.operand(plane, is_right)


def stored(kind: str, lines: int, length: int, usage: str, *, swizzled: bool) -> Stored:
    shape = (lines, length) if usage == "rowwise" else (length, lines)
    magnitudes = torch.logspace(-3, 3, shape[0])[:, None] * torch.logspace(-3, 3, shape[1])
    x = torch.randn(shape, dtype=torch.bfloat16) * magnitudes
    directions = {"rowwise": usage == "rowwise", "columnwise": usage == "columnwise"}
    plane = QUANTIZERS[kind](optimize_for_gemm=swizzled, **directions).quantize(x.bfloat16()).plane(usage)
    return Stored(plane.data, plane.scale, plane.amax, plane.layout)


@pytest.mark.row("R10")
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("usage", ["rowwise", "columnwise"])
@pytest.mark.parametrize("kind", ["mx", "nv"])
@pytest.mark.parametrize(("lines", "length"), SIZES)
def test_scales_lie_as_torchao_writes_them(kind: str, lines: int, length: int, usage: str, swizzled: bool) -> None:
    to_blocked = pytest.importorskip("torchao.prototype.mx_formats.utils").to_blocked
    plane = stored(kind, lines, length, usage, swizzled=swizzled)
    handed = handed_over(plane)
    assert torch.equal(handed.scales[0].view(torch.uint8), to_blocked(load_scale(plane.scale, plane.layout)).flatten())
    assert handed.codes.is_contiguous()
    assert len(handed.codes) == lines


GROUPS = ((130, 0, 128, 5, 0, 1), (300,), (0, 0, 32, 97))


def in_groups(sizes: tuple[int, ...], columns: int) -> tuple[QuantizedStorage, RowGroups]:
    x = torch.randn(sum(sizes), columns, dtype=torch.bfloat16) * torch.logspace(-3, 3, columns)
    made = cast_in_groups(MXFP8Quantizer(), x.bfloat16(), torch.tensor(sizes))
    return made, groups_in(made)


def of(storage: QuantizedStorage, usage: str) -> Stored:
    plane = storage.plane(usage)
    return Stored(plane.data, plane.scale, plane.amax, plane.layout)


def scales_in(storage: QuantizedStorage, usage: str) -> torch.Tensor:
    plane = storage.plane(usage)
    return load_scale(plane.scale, plane.layout)


@pytest.mark.row("R10")
@pytest.mark.parametrize("sizes", GROUPS, ids=str)
def test_scales_of_groups_of_rows_lie_as_torchao_writes_them(sizes: tuple[int, ...]) -> None:
    """Byte for byte, beside its definitions for torch's grouped product, and its tiles of each group alone."""
    theirs = pytest.importorskip("torchao.prototype.moe_training.kernels.mxfp8.quant")
    (x, groups), weights = in_groups(sizes, 256), torch.randn(len(sizes), 160, 256)
    rights = [MXFP8Quantizer().quantize(weight) for weight in weights]
    ends = torch.tensor(sizes).cumsum(0)
    given = operands_of_rows(RunOperands(of(x, "rowwise"), [of(right, "rowwise") for right in rights], groups))
    wanted, starts = theirs.torch_to_blocked_2d_M_groups(scales_in(x, "rowwise"), ends)
    used = int(starts[-1])
    assert used == sum(-(-size // 128) * 128 for size in sizes)
    assert torch.equal(given.left_scales.view(torch.uint8)[:used], wanted[:used])
    apart = [theirs.to_blocked(scale).flatten() for scale in scales_in(x, "rowwise").split(sizes) if len(scale)]
    assert torch.equal(wanted[:used].flatten(), torch.cat(apart))
    of_weights = torch.stack([scales_in(right, "rowwise") for right in rights])
    assert torch.equal(given.right_scales.view(torch.uint8), theirs.torch_to_blocked_per_group_3d(of_weights))
    assert torch.equal(given.left.view(torch.uint8), x.plane("rowwise").data)
    assert torch.equal(given.right.view(torch.uint8)[0].t(), rights[0].plane("rowwise").data)
    assert given.ends.tolist() == ends.tolist()


@pytest.mark.row("R10")
@pytest.mark.parametrize("sizes", GROUPS, ids=str)
def test_scales_over_the_rows_of_groups_lie_as_torchao_writes_them(sizes: tuple[int, ...]) -> None:
    theirs = pytest.importorskip("torchao.prototype.moe_training.kernels.mxfp8.quant")
    (x, groups), (dy, _) = in_groups(sizes, 256), in_groups(sizes, 144)
    given = operands_over_rows(RunOperands(of(dy, "columnwise"), [of(x, "columnwise")], groups))
    blocks = (torch.tensor(sizes) + 127) // 128 * 4
    for storage, scales in ((dy, given.left_scales), (x, given.right_scales)):
        wanted, starts = theirs.torch_to_blocked_2d_K_groups(scales_in(storage, "columnwise"), blocks.cumsum(0))
        used = int(starts[-1]) * len(wanted)
        assert used == int(blocks.sum()) * len(wanted)
        assert torch.equal(scales.view(torch.uint8).flatten()[:used], wanted.flatten()[:used])
    assert torch.equal(given.left.view(torch.uint8).t(), dy.plane("columnwise").data)
    assert torch.equal(given.right.view(torch.uint8), x.plane("columnwise").data)
    assert given.ends.tolist() == (blocks * 32).cumsum(0).tolist()
    assert given.filled.tolist() == [size > 0 for size in sizes]


def test_the_meta_implementation_of_torch_takes_groups() -> None:
    """That of the first version of the operator; before 2.15 torch has none of the second, which ``scaled_grouped_mm`` calls."""
    (x, groups), (dy, _) = in_groups(GROUPS[0], 256), in_groups(GROUPS[0], 384)
    rights = [of(MXFP8Quantizer().quantize(torch.randn(160, 256)), "rowwise") for _ in GROUPS[0]]
    of_rows = operands_of_rows(RunOperands(of(x, "rowwise"), rights, groups))
    over_rows = operands_over_rows(RunOperands(of(dy, "columnwise"), [of(x, "columnwise")], groups))
    for given, shape in ((of_rows, (264, 160)), (over_rows, (6, 384, 256))):
        tensors = (given.left, given.right, given.left_scales, given.right_scales, given.ends)
        result = torch._scaled_grouped_mm(*(each.to("meta") for each in tensors), out_dtype=torch.bfloat16)
        assert (result.shape, result.dtype) == (shape, torch.bfloat16)


@pytest.mark.row("R10")
@pytest.mark.parametrize("usage", ["rowwise", "columnwise"])
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize(("lines", "length"), SIZES)
def test_fp8_blocks_have_their_scale_in_each_block_of_32(kind: str, lines: int, length: int, usage: str) -> None:
    """Beside torch's cast to E8M0 and torchao's tiles; codes are those of the plane, in its own memory."""
    to_blocked = pytest.importorskip("torchao.prototype.mx_formats.utils").to_blocked
    plane = stored(kind, lines, length, usage, swizzled=False)
    handed = handed_over(plane)
    rows = plane.layout.block[0]
    of_lines = torch.cat([row.expand(rows, -1) for row in load_scale(plane.scale, plane.layout)])[:lines]
    of_blocks = torch.stack([of_lines] * 4, -1).flatten(1)[:, : length // 32]
    assert of_blocks.unique().numel() > 1 or length < 128
    wanted = to_blocked(of_blocks.to(torch.float8_e8m0fnu).view(torch.uint8)).flatten()
    assert torch.equal(handed.scales[0].view(torch.uint8), wanted)
    assert (handed.scaling, handed.swizzle) == ([ScalingType.BlockWise1x32], [SwizzleType.SWIZZLE_32_4_4])
    assert handed.codes.data_ptr() == plane.data.data_ptr()


def test_block_scales_that_no_quantizer_made_are_seen_and_zeros_stay_zeros() -> None:
    """A plane whose format claims powers of two, with other scales in it: NaN, and no other number."""
    plane = stored("block 1d", 2, 256, "rowwise", swizzled=False)
    scale = plane.scale.clone()
    scale[:2, :2] = torch.tensor([[0.0, 2.0**-127], [3.0, 2.0**-128]])
    handed = handed_over(plane._replace(scale=scale)).scales[0]
    codes = unswizzle(handed.view(torch.uint8), (128, 8))[:2, ::4]
    assert codes.tolist() == [[0, 255], [0, 255]]


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_the_meta_implementation_of_torch_takes_them(kind: str) -> None:
    a, b = (handed_over(stored(kind, n, 96, "columnwise", swizzled=False), is_right=right) for n, right in ((32, 0), (64, 1)))
    meta = [(each.codes.to("meta"), [scale.to("meta") for scale in each.scales]) for each in (a, b)]
    (left, left_scales), (right, right_scales) = meta
    result = F.scaled_mm(
        left,
        right.t(),
        left_scales,
        a.scaling,
        right_scales,
        b.scaling,
        a.swizzle,
        b.swizzle,
        output_dtype=torch.bfloat16,
    )
    assert (result.shape, result.dtype) == ((32, 64), torch.bfloat16)


def test_nvfp4_has_two_levels_of_scales() -> None:
    plane = stored("nv", 32, 64, "rowwise", swizzled=True)
    handed = handed_over(plane, is_right=True)
    assert handed.scaling == [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    assert handed.swizzle == [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
    assert torch.equal(handed.scales[1], plane.amax / (6 * 448))
    assert handed.scales[0].data_ptr() == plane.scale.data_ptr()


@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(), NVFP4BlockScaling()], ids=["mxfp8", "nvfp4"])
def test_casts_write_scales_in_the_order_that_the_device_reads(recipe: opfuse.Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it has such a product. Results have the same bits; what is saved for the backward pass lies in that order."""
    x = torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True)
    results, kept = [], []
    for machine in (Machine((9, 0), (13, 0)), BLACKWELL):
        torch.manual_seed(0)
        model = ops.Sequential(ops.Linear(64, 128), ops.GELU(), ops.Linear(128, 64)).bfloat16()
        monkeypatch.setattr("opfuse.compiler.lower.machine", lambda arch, machine=machine: machine)
        saved: list[torch.Tensor] = []
        with opfuse.autocast(recipe=recipe), saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            y = model(x)
        y.sum().backward()
        results.append([y.detach(), x.grad, *[p.grad for p in model.parameters()]])
        kept.append([t for t in saved if t.dtype is torch.uint8])
        x.grad = None
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert [t.shape for t in kept[0]] == [t.shape for t in kept[1]]
    assert not all(torch.equal(*pair) for pair in zip(*kept, strict=True))
