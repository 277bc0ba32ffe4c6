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
from opfuse.kernels.products.stored import Stored
from opfuse.numerics.layouts import load_scale
from opfuse.numerics.swizzle import unswizzle
from opfuse.recipes import MXFP8BlockScaling, NVFP4BlockScaling
from opfuse.tensors.quantizers import Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer

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
    x = torch.randn(shape, dtype=torch.bfloat16) * torch.logspace(-3, 3, shape[1])
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
        monkeypatch.setattr("opfuse.compiler.products.machine", lambda arch, machine=machine: machine)
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
