"""What a call hands to the library on compute capability 10.0 and 12.0, beside torchao's layouts and torch's own checks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import ScalingType, SwizzleType

import opfuse
from opfuse import ops
from opfuse.kernels.products.backends import Machine, library_operand
from opfuse.kernels.products.stored import Stored
from opfuse.numerics.layouts import load_scale
from opfuse.recipes import MXFP8BlockScaling, NVFP4BlockScaling
from opfuse.tensors.quantizers import MXFP8Quantizer, NVFP4Quantizer

SIZES = [(1, 32), (5, 96), (128, 256), (130, 160), (300, 1056)]
QUANTIZERS = {"mx": MXFP8Quantizer, "nv": NVFP4Quantizer}
BLACKWELL = Machine((10, 0), (13, 0))


def stored(kind: str, lines: int, length: int, usage: str, *, swizzled: bool) -> Stored:
    shape = (lines, length) if usage == "rowwise" else (length, lines)
    x = torch.randn(shape, dtype=torch.bfloat16) * torch.logspace(-3, 3, shape[1])
    directions = {"rowwise": usage == "rowwise", "columnwise": usage == "columnwise"}
    plane = QUANTIZERS[kind](optimize_for_gemm=swizzled, **directions).quantize(x.bfloat16()).plane(usage)
    return Stored(plane.data, plane.scale, plane.amax, plane.layout)


@pytest.mark.row("R10")
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("usage", ["rowwise", "columnwise"])
@pytest.mark.parametrize("kind", QUANTIZERS)
@pytest.mark.parametrize(("lines", "length"), SIZES)
def test_scales_lie_as_torchao_writes_them(kind: str, lines: int, length: int, usage: str, swizzled: bool) -> None:
    to_blocked = pytest.importorskip("torchao.prototype.mx_formats.utils").to_blocked
    plane = stored(kind, lines, length, usage, swizzled=swizzled)
    handed = library_operand(plane, is_right=False)
    assert torch.equal(handed.scales[0].view(torch.uint8), to_blocked(load_scale(plane.scale, plane.layout)).flatten())
    assert handed.codes.is_contiguous()
    assert len(handed.codes) == lines


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_the_meta_implementation_of_torch_takes_them(kind: str) -> None:
    a, b = (library_operand(stored(kind, n, 96, "columnwise", swizzled=False), is_right=right) for n, right in ((32, 0), (64, 1)))
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
    handed = library_operand(plane, is_right=True)
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
