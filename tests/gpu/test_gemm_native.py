"""R5 on a device: native products against fp64 of the same quantized values, and against the emulated ones; what falls back."""

from __future__ import annotations

import math

import pytest
import torch

import opfuse
from opfuse import ops, recipes
from opfuse.kernels.products import emulated as emulation
from opfuse.kernels.products.native import Machine, Stored, refusal
from opfuse.recipes import availability
from opfuse.tensors.gemm import GEMMS, gemm
from opfuse.tensors.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8RowQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from opfuse.tensors.storage import QuantizedStorage

BF16, FP32, E4M3, E5M2 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2
ROTATED = {"with_rht": True, "with_post_rht_amax": True}
PAIRS = {
    "tensor": (Float8CurrentScalingQuantizer(E4M3), Float8CurrentScalingQuantizer(E4M3)),
    "tensor e5m2": (Float8CurrentScalingQuantizer(E5M2), Float8CurrentScalingQuantizer(E4M3)),
    "row": (Float8RowQuantizer(E4M3), Float8RowQuantizer(E4M3)),
    "row e5m2": (Float8RowQuantizer(E5M2), Float8RowQuantizer(E4M3)),
    "1x128 128x128": (Float8BlockQuantizer(E4M3, block_scaling_dim=1), Float8BlockQuantizer(E4M3, block_scaling_dim=2)),
    "1x128 1x128": (Float8BlockQuantizer(E4M3, block_scaling_dim=1), Float8BlockQuantizer(E4M3, block_scaling_dim=1)),
    "128x128 1x128": (Float8BlockQuantizer(E4M3, block_scaling_dim=2), Float8BlockQuantizer(E4M3, block_scaling_dim=1)),
    "block e5m2": (Float8BlockQuantizer(E5M2, block_scaling_dim=1), Float8BlockQuantizer(E4M3, block_scaling_dim=1)),
    "mx": (MXFP8Quantizer(E5M2), MXFP8Quantizer()),
    "mx for products": (MXFP8Quantizer(optimize_for_gemm=True), MXFP8Quantizer()),
    "nv": (NVFP4Quantizer(), NVFP4Quantizer(with_2d_quantization=True)),
    "nv rotated": (NVFP4Quantizer(**ROTATED), NVFP4Quantizer(**ROTATED)),
    "nv by row": (NVFP4Quantizer(row_scaled_nvfp4=True), NVFP4Quantizer()),
}
NATIVE = [name for name in PAIRS if name.startswith(("tensor", "row", "1x128", "128x128"))]
FAST = ("tensor", "row")
EMULATED = [name for name in PAIRS if name not in NATIVE]
UNMET = {("nv rotated", "dgrad"), ("nv by row", "dgrad"), ("nv by row", "wgrad")}
"""Rows and rotated columns do not meet, and row-scaled formats are for fprop."""
CASES = [(pair, name) for pair in PAIRS for name in GEMMS if (pair, name) not in UNMET]
hopper = pytest.mark.skipif(availability.device_arch() != (9, 0), reason="native products are of compute capability 9.0")


def operands(
    pair: str, name: str, sizes: tuple[int, int, int], device: torch.device
) -> tuple[QuantizedStorage, QuantizedStorage]:
    """Operands of a product whose result is (lines, lines) over ``sizes`` = (left lines, right lines, length)."""
    m, n, k = sizes
    shapes = {"fprop": ((m, k), (n, k)), "dgrad": ((m, k), (k, n)), "wgrad": ((k, m), (k, n))}[name]
    generator = torch.Generator(device).manual_seed(sum(sizes))
    left, right = (torch.randn(shape, generator=generator, device=device).to(BF16) for shape in shapes)
    planes = GEMMS[name].left_plane, GEMMS[name].right_plane
    first, second = (q.wanting(rowwise=p == "rowwise", columnwise=p == "columnwise") for q, p in zip(PAIRS[pair], planes))
    return first.quantize(left), second.quantize(right)


def stored(name: str, left: QuantizedStorage, right: QuantizedStorage) -> list[Stored]:
    planes = left.plane(GEMMS[name].left_plane), right.plane(GEMMS[name].right_plane)
    return [Stored(p.data, p.scale, p.amax, p.layout) for p in planes]


def emulated(name: str, left: QuantizedStorage, right: QuantizedStorage) -> torch.Tensor:
    both = stored(name, left, right)
    return emulation.multiply(*map(emulation.operand, both))


def exact(name: str, left: QuantizedStorage, right: QuantizedStorage) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 product of the dequantized values, and of their magnitudes."""
    what = GEMMS[name]
    a, b = left.dequantize(FP32, what.left_plane).double(), right.dequantize(FP32, what.right_plane).double()
    a, b = a.t() if name == "wgrad" else a, b.t() if name == "fprop" else b
    return a @ b, a.abs() @ b.abs()


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def why_not(name: str, pair: tuple[QuantizedStorage, QuantizedStorage]) -> str:
    major, minor, *_ = torch.version.cuda.split(".")
    return refusal(*stored(name, *pair), FP32, Machine(availability.device_arch(), (int(major), int(minor))))


SPLIT = 2**-12.5
"""Relative error of split sums in the norm; measured 2^-12.9 at every length."""


def bound(pair: str, name: str, length: int) -> float:
    fast = name == "fprop" and pair.startswith(FAST)
    return 2**-11.5 * math.sqrt(max(length / 128, 1)) if fast else SPLIT


@hopper
@pytest.mark.parametrize("sizes", [(256, 512, 128), (256, 512, 1024), (132, 144, 272), (64, 48, 384), (512, 256, 8192)], ids=str)
@pytest.mark.parametrize("name", GEMMS)
@pytest.mark.parametrize("pair", NATIVE)
def test_r5_native_products_err_as_their_sums(pair, name, sizes, device):
    both = operands(pair, name, sizes, device)
    assert why_not(name, both) == ""
    fast = name == "fprop"
    got = gemm(name, *both, dtype=BF16, out_dtype=FP32, fast=fast)
    wanted, magnitude = exact(name, *both)
    assert got.shape == wanted.shape
    assert 2**-16 < relative(got, wanted) < bound(pair, name, sizes[2])
    assert float(((got.double() - wanted).abs() / magnitude).max()) < 2**-10
    assert relative(got, emulated(name, *both)) < bound(pair, name, sizes[2])
    for dtype, unit in ((BF16, 2**-8), (torch.float16, 2**-11)):
        assert relative(gemm(name, *both, dtype=dtype, fast=fast), wanted) < bound(pair, name, sizes[2]) + unit / math.sqrt(3)


@hopper
@pytest.mark.parametrize("pair", FAST)
def test_r5_the_bound_tells_fast_from_split(pair, device):
    both = operands(pair, "fprop", (256, 512, 8192), device)
    wanted, _ = exact("fprop", *both)
    assert relative(gemm("fprop", *both, dtype=FP32, fast=True), wanted) > 4 * SPLIT
    assert relative(gemm("fprop", *both, dtype=FP32), wanted) < SPLIT


@pytest.mark.parametrize("sizes", [(160, 96, 320), (64, 512, 4096)], ids=str)
@pytest.mark.parametrize(("pair", "name"), [(pair, name) for pair, name in CASES if pair in EMULATED])
def test_r5_emulated_products_err_as_fp32_sums(pair, name, sizes, device):
    both = operands(pair, name, sizes, device)
    assert why_not(name, both)
    got = gemm(name, *both, dtype=FP32)
    wanted, magnitude = exact(name, *both)
    allowed = (2 * math.sqrt(sizes[2]) + 4) * 2.0**-24 * magnitude
    if pair != "nv rotated":  # dequantize turns back, which rounds; compared with the CPU alone
        assert float(((got.double() - wanted).abs() / allowed).max()) < 1
    here = gemm(name, *(each.with_tensors([t.cpu() for t in each.tensors()]) for each in both), dtype=FP32)
    assert float(((got.cpu() - here).double().abs() / allowed.cpu()).max()) < 2


FALLBACKS = {
    "length": ("tensor", "fprop", (64, 64, 72)),
    "right lines": ("tensor", "wgrad", (64, 72, 64)),
    "elements": ("block e5m2", "dgrad", (64, 64, 256)),
}


@pytest.mark.parametrize("case", FALLBACKS)
def test_r10_what_the_device_refuses_is_emulated(case, device):
    pair, name, sizes = FALLBACKS[case]
    both = operands(pair, name, sizes, device)
    assert why_not(name, both)
    got = gemm(name, *both, dtype=BF16)
    assert torch.equal(got, emulated(name, *both).to(BF16))
    assert relative(got, exact(name, *both)[0]) < 2**-8


@hopper
def test_r10_what_the_library_refuses_the_own_product_takes(device):
    """Lines with scales of their own, of any number; in fp32, which it does not store, the product is emulated."""
    both = operands("1x128 128x128", "fprop", (130, 64, 256), device)
    assert why_not("fprop", both)
    wanted, _ = exact("fprop", *both)
    assert torch.equal(gemm("fprop", *both, dtype=FP32), emulated("fprop", *both))
    whole = operands("1x128 128x128", "fprop", (132, 64, 256), device)
    got = gemm("fprop", *both, dtype=BF16)
    assert relative(got, wanted) < 2**-8
    assert got.shape == (130, 64)
    assert why_not("fprop", whole) == ""


@pytest.mark.parametrize("pair", ["tensor", "row", "1x128 128x128", "mx", "nv"])
@pytest.mark.parametrize("sizes", [(0, 64, 128), (64, 64, 0), (1, 64, 128)], ids=str)
def test_r10_empty_and_single_lines(pair, sizes, device):
    both = operands(pair, "fprop", sizes, device)
    got = gemm("fprop", *both, dtype=FP32)
    assert got.shape == sizes[:2]
    assert torch.allclose(got.double(), exact("fprop", *both)[0], rtol=2**-8, atol=0.05)


@hopper
def test_one_scale_may_lie_anywhere(device):
    left, right = operands("tensor", "fprop", (64, 64, 256), device)
    data, scale, *rest = left.tensors()
    moved = left.with_tensors([data, torch.cat([scale, scale])[1:], *rest])
    assert why_not("fprop", (moved, right)) == ""
    assert torch.equal(gemm("fprop", moved, right, dtype=BF16), gemm("fprop", left, right, dtype=BF16))


@hopper
def test_r18_nan_shows_in_its_line_alone(device):
    left, right = operands("tensor", "fprop", (64, 64, 256), device)
    left.rowwise.data[3, 5] = 0x7F
    got = gemm("fprop", left, right, dtype=BF16)
    assert got[3].isnan().all()
    assert got.isnan().sum() == 64


@pytest.mark.parametrize(("pair", "name"), CASES)
def test_r11_r12_no_sync_same_bits_and_the_same_in_a_graph(pair, name, device):
    both = operands(pair, name, (256, 256, 512), device)
    first = gemm(name, *both, dtype=BF16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = gemm(name, *both, dtype=BF16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gemm(name, *both, dtype=BF16)
    graph.replay()
    assert torch.equal(first, again)
    assert torch.equal(first, captured)


def test_u_bf16_products_keep_subnormal_operands(device):
    left, right = operands("mx", "fprop", (32, 32, 32), device)
    for each, code, scale in ((left, 0x3C, 0), (right, 0x38, 230)):  # 1 in E5M2 and in E4M3
        each.rowwise.data.fill_(code)
        each.rowwise.scale.fill_(scale)
    assert (gemm("fprop", left, right, dtype=FP32) == 32 * 2.0 ** (-127 + 103)).all()


LINEAR = {
    "fp8_current": recipes.Float8CurrentScaling(),
    "fp8_row_scaled": recipes.CustomRecipe(qfactory="fp8_row_scaled"),
    "fp8_block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
}


@pytest.mark.parametrize("kind", LINEAR)
def test_r5_a_linear_layer_on_the_device_and_on_the_cpu(kind, device):
    recipe = LINEAR[kind]
    torch.manual_seed(0)
    model = ops.Sequential(ops.Linear(512, 256)).to(BF16)
    x, dy = torch.randn(128, 512).to(BF16), torch.randn(128, 256).to(BF16)
    results = []
    for where in (torch.device("cpu"), device):
        here, leaf = model.to(where), x.detach().to(where, copy=True).requires_grad_()
        here.zero_grad()
        with opfuse.autocast(recipe=recipe):
            y = here(leaf)
        y.backward(dy.to(where))
        results.append([t.detach().cpu().clone() for t in (y, leaf.grad, here[0].weight.grad)])
    assert max(relative(there, here) for here, there in zip(*results)) < 2**-8


@hopper
def test_native_is_what_the_support_table_says():
    native = {kind for kind in recipes.RECIPES if availability.support(kind).status == "native"}
    assert native == {"delayed", "fp8_current", "fp8_block"}
