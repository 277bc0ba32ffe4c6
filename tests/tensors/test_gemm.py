"""R5: quantized products against fp64 products of the same values, and against unquantized ones; which operands may meet."""

from __future__ import annotations

import math

import pytest
import torch

import opfuse
from opfuse import ops, recipes
from opfuse.errors import GemmError, MissingPlaneError, ShapeError
from opfuse.formats import E4M3 as E4M3_ELEMENT
from opfuse.formats import fp8_block
from opfuse.numerics.sums import balanced
from opfuse.recipes import QuantizerRole, Recipe
from opfuse.tensors.gemm import GEMMS, clash, gemm, gemm_of_groups
from opfuse.tensors.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8RowQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from opfuse.tensors.storage import QuantizedStorage
from tests.compiler.harness import generator_of
from tests.tensors.quantized_samples import Blocks64

pytestmark = pytest.mark.cpu  # emulated sums; tests/gpu has those of a device

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
RECIPES: dict[str, Recipe] = {
    "fp8_current": recipes.Float8CurrentScaling(),
    "fp8_current pow2": recipes.Float8CurrentScaling(use_power_2_scales=True),
    "fp8_block": recipes.Float8BlockScaling(),
    "fp8_block 1d": recipes.Float8BlockScaling(w_block_scaling_dim=1),
    "fp8_block 2d input": recipes.Float8BlockScaling(w_block_scaling_dim=1, x_block_scaling_dim=2, use_f32_scales=True),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "mxfp8 2d": recipes.MXFP8BlockScaling(enable_2d_quantization=True),
    "nvfp4": recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nvfp4 plain": recipes.NVFP4BlockScaling(disable_rht=True, disable_2d_quantization=True, disable_stochastic_rounding=True),
    "nvfp4 4over6": recipes.NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all", disable_stochastic_rounding=True),
}
M, N, K = 160, 96, 320
SIZES = {"input": (M, K), "weight": (N, K), "grad_output": (M, N)}


def values(role: str, *, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Normal values with rows and columns of different sizes, so that blocks differ in scale."""
    rows, columns = SIZES[role]
    generator = generator_of(len(role))
    spread = torch.exp2(torch.randint(-3, 4, (rows, 1), generator=generator)) * torch.exp2(
        torch.randint(-3, 4, (columns,), generator=generator)
    )
    return (torch.randn(rows, columns, generator=generator) * spread).to(dtype)


def quantized(recipe: Recipe, role: str) -> QuantizedStorage:
    return recipe.quantizer(QuantizerRole(tensor_type=role)).quantize(values(role))


def product(name: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return {"fprop": lambda: left @ right.t(), "dgrad": lambda: left @ right, "wgrad": lambda: left.t() @ right}[name]()


def excess(name: str, got: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> float:
    """The worst error over that of an fp32 sum: two sqrt(terms) units of rounding of the sum of magnitudes."""
    terms = left.shape[0] if name == "wgrad" else left.shape[1]
    bound = (2 * math.sqrt(terms) + 4) * 2.0**-24 * product(name, left.abs(), right.abs())
    return float(((got.double() - product(name, left, right)).abs() / bound.clamp_min(2.0**-100)).max())


@pytest.mark.parametrize("name", GEMMS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_r5_products_err_as_fp32_sums(recipe, name):
    what = GEMMS[name]
    left, right = (quantized(RECIPES[recipe], role) for role in (what.left, what.right))
    got = gemm(name, left, right, dtype=BF16, out_dtype=torch.float32)
    exact = [
        operand.dequantize(torch.float32, plane).double()
        for operand, plane in ((left, what.left_plane), (right, what.right_plane))
    ]
    assert got.dtype == torch.float32
    assert 0 < excess(name, got, *exact) < 1
    rounded = gemm(name, left, right, dtype=BF16)
    assert torch.equal(rounded, got.to(BF16))


@pytest.mark.parametrize("name", GEMMS)
def test_r5_the_bound_tells_planes_apart(name):
    """The other plane of a 1D format holds other values: reading it would show."""
    what = GEMMS[name]
    left, right = (quantized(RECIPES["mxfp8"], role) for role in (what.left, what.right))
    got = gemm(name, left, right, dtype=torch.float32)
    other = {"rowwise": "columnwise", "columnwise": "rowwise"}
    wrong = left.dequantize(torch.float32, other[what.left_plane]).double()
    assert excess(name, got, wrong, right.dequantize(torch.float32, what.right_plane).double()) > 2


def test_r5_row_scaled_activations():
    recipe = recipes.NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True)
    left, right = quantized(recipe, "input"), quantized(recipe, "weight")
    got = gemm("fprop", left, right, dtype=torch.float32)
    assert excess("fprop", got, left.dequantize(torch.float32).double(), right.dequantize(torch.float32).double()) < 1


def test_r5_e5m2_gradients():
    gradient = Float8CurrentScalingQuantizer(E5M2).quantize(values("grad_output"))
    weight = quantized(RECIPES["fp8_current"], "weight")
    got = gemm("dgrad", gradient, weight, dtype=torch.float32)
    assert excess("dgrad", got, gradient.dequantize(torch.float32).double(), weight.dequantize(torch.float32).double()) < 1


FAR_APART = {
    "fp8_current": Float8CurrentScalingQuantizer(E4M3),
    "fp8_row": Float8RowQuantizer(E4M3),
    "nvfp4": NVFP4Quantizer(),
    "nvfp4 by rows": NVFP4Quantizer(row_scaled_nvfp4=True),
}


@pytest.mark.parametrize(("left_size", "right_size"), [(1e35, 1e-20), (1e-20, 1e35), (1e-36, 1e12), (1e16, 1e16), (1e30, 1e-36)])
@pytest.mark.parametrize("name", FAR_APART)
def test_r5_operands_whose_sizes_are_far_apart(name, left_size, right_size):
    """A sum of codes times one scale alone overflows, or vanishes: 1e5 times 1e33 in the first of these."""
    x, weight = (values(role, dtype=torch.float32) * size for role, size in (("input", left_size), ("weight", right_size)))
    left, right = (FAR_APART[name].quantize(tensor) for tensor in (x, weight))
    got = gemm("fprop", left, right, dtype=torch.float32)
    exact = left.dequantize(torch.float32).double(), right.dequantize(torch.float32).double()
    assert exact[0].isfinite().all()
    assert got.isfinite().all()
    assert 0 < excess("fprop", got, *exact) < 1


def test_a_row_of_zeros_stays_so_beside_the_largest_values():
    x, weight = values("input", dtype=torch.float32), values("weight", dtype=torch.float32) * 1e30
    x[0], x[1:] = 0, x[1:] * 1e30
    got = gemm("fprop", *(Float8CurrentScalingQuantizer(E4M3).quantize(t) for t in (x, weight)), dtype=torch.float32)
    assert not got[0].any()
    assert got[1:].isinf().all()


def test_r5_shared_powers_of_two_keep_the_bits():
    """Where a sum times each factor alone is a normal number, the definition is just that, left factor first."""
    generator = generator_of(5)

    def numbers(shape: tuple[int, ...], least: int, most: int) -> torch.Tensor:
        powers = torch.randint(least, most, shape, generator=generator)
        return torch.randn(shape, generator=generator) * torch.exp2(powers.float())

    sums, left, right = numbers((400, 300), -18, 30), numbers((400, 1), -40, 40), numbers((1, 300), -40, 40)
    one, other = balanced(left.abs(), right.abs())
    assert torch.equal(sums * one * other, sums * left.abs() * right.abs())
    assert float((one.log2().round() - other.log2().round()).abs().max()) <= 2


@pytest.mark.row("B14")
@pytest.mark.parametrize("quantizer", [MXFP8Quantizer(), NVFP4Quantizer()], ids=lambda q: type(q).__name__)
@pytest.mark.parametrize("name", GEMMS)
def test_b14_swizzled_scales_change_nothing(name, quantizer):
    swizzled = type(quantizer)(optimize_for_gemm=True)
    what = GEMMS[name]
    compact, tiled = ([q.quantize(values(role)) for role in (what.left, what.right)] for q in (quantizer, swizzled))
    assert all(operand.rowwise.swizzled for operand in tiled)
    assert torch.equal(gemm(name, *compact, dtype=BF16), gemm(name, *tiled, dtype=BF16))


@pytest.mark.parametrize("shape", [(1, 64), (0, 64), (3, 5, 64), (2, 2, 2, 64), (64,)])
def test_leading_dimensions_are_kept(shape):
    x, weight = torch.randn(shape, dtype=BF16), torch.randn(48, 64, dtype=BF16)
    quantizer = MXFP8Quantizer(columnwise=False)
    y = gemm("fprop", quantizer.quantize(x), quantizer.quantize(weight), dtype=BF16)
    assert y.shape == (*shape[:-1], 48)
    assert y.shape == gemm("fprop", x, weight, dtype=BF16).shape


@pytest.mark.parametrize("block_dim", [1, 2])
@pytest.mark.parametrize("k", [1, 127, 129, 300])
def test_r5_partial_blocks(k, block_dim):
    x, weight = torch.randn(70, k, dtype=BF16), torch.randn(131, k, dtype=BF16)
    left = Float8BlockQuantizer(E4M3, block_scaling_dim=1).quantize(x)
    right = Float8BlockQuantizer(E4M3, block_scaling_dim=block_dim).quantize(weight)
    got = gemm("fprop", left, right, dtype=torch.float32)
    assert excess("fprop", got, left.dequantize(torch.float32).double(), right.dequantize(torch.float32).double()) < 1


# -- against unquantized products ---------------------------------------------------------------------------------------------


def sqnr(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Signal to quantization noise, dB."""
    return 20 * math.log10(float(exact.double().norm() / (got.double() - exact.double()).norm()))


SQNR = {"fp8_current": (25, 24), "fp8_block": (25, 24), "mxfp8": (25, 24), "delayed": (25, 24), "nvfp4": (15, 13)}
"""Least dB of the output, and of the gradients."""


@pytest.mark.parametrize("name", SQNR)
def test_r5_sqnr_of_a_linear(name):
    torch.manual_seed(0)
    model = ops.Sequential(ops.Linear(512, 256, bias=False)).to(BF16)
    x, dy = torch.randn(256, 512, dtype=BF16), torch.randn(256, 256, dtype=BF16)

    def step(recipe: Recipe | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        leaf = x.clone().requires_grad_()
        model.zero_grad()
        with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(leaf)
        y.backward(dy)
        return y.detach(), leaf.grad, model[0].weight.grad

    weight = model[0].weight.detach().float()
    exact = x.float() @ weight.t(), dy.float() @ weight, dy.float().t() @ x.float()
    recipe = recipes.RECIPES[name]()
    for _ in range(2 if name == "delayed" else 1):  # the first step of delayed scaling only measures
        got = step(recipe)
    measured = [sqnr(a, b) for a, b in zip(got, exact)]
    assert measured[0] >= SQNR[name][0]
    assert min(measured[1:]) >= SQNR[name][1]
    assert max(measured) < 40
    assert min(sqnr(a, b) for a, b in zip(step(None), exact)) > 48


# -- which operands meet ------------------------------------------------------------------------------------------------------

QUANTIZERS = {
    "tensor": Float8CurrentScalingQuantizer(E4M3),
    "block": Float8BlockQuantizer(E4M3, block_scaling_dim=1),
    "mx": MXFP8Quantizer(),
    "nv": NVFP4Quantizer(),
}


@pytest.mark.row("H11")
@pytest.mark.parametrize("left", QUANTIZERS)
@pytest.mark.parametrize("right", QUANTIZERS)
@pytest.mark.parametrize("name", GEMMS)
def test_h11_two_formats_of_one_family_only(name, left, right):
    what = GEMMS[name]
    operands = QUANTIZERS[left].quantize(values(what.left)), QUANTIZERS[right].quantize(values(what.right))
    if left == right:
        gemm(name, *operands, dtype=BF16)
        return
    with pytest.raises(GemmError) as caught:
        gemm(name, *operands, dtype=BF16)
    for text in (f"{name} of {what.left} and {what.right}", *(str(operand.format) for operand in operands), "IdentityQuantizer"):
        assert text in str(caught.value)


def test_two_operands_in_tiles_do_not_meet():
    tiles = Float8BlockQuantizer(E4M3, block_scaling_dim=2)
    with pytest.raises(GemmError, match="at most one operand with 128x128 blocks"):
        gemm("fprop", tiles.quantize(values("input")), tiles.quantize(values("weight")), dtype=BF16)


@pytest.mark.parametrize("name", GEMMS)
def test_blocks_of_other_lengths_do_not_meet(name):
    """In the plane that the product reads: a line is along the sum."""
    usual, short = fp8_block(E4M3_ELEMENT, 1), Blocks64().formats[0]
    for left, right in ((usual, short), (short, usual), (short, fp8_block(E4M3_ELEMENT, 2))):
        assert "wants blocks of one length" in str(clash(name, left, right))
    for one in (usual, short):
        assert clash(name, one, one) is None
    quantizers = Float8BlockQuantizer(E4M3, block_scaling_dim=1), Blocks64()
    left, right = (made.quantize(values(role)) for made, role in zip(quantizers, (GEMMS[name].left, GEMMS[name].right)))
    with pytest.raises(GemmError, match=f"{name} of .*: wants blocks of one length, got .* columnwise|rowwise blocks64"):
        gemm(name, left, right, dtype=BF16)


def test_a_rotated_and_a_plain_operand_do_not_meet():
    rotated, unrotated = NVFP4Quantizer(with_rht=True, with_post_rht_amax=True), NVFP4Quantizer()
    dy, x = rotated.quantize(values("grad_output")), values("input")
    with pytest.raises(GemmError, match=r"columnwise nvfp4 \(rotated\), input columnwise nvfp4\."):
        gemm("wgrad", dy, unrotated.quantize(x), dtype=BF16)
    gemm("wgrad", dy, rotated.quantize(x), dtype=BF16)
    gemm("fprop", rotated.quantize(x), unrotated.quantize(values("weight")), dtype=BF16)  # rowwise data is never rotated


ROW_SCALED = NVFP4Quantizer(row_scaled_nvfp4=True)


@pytest.mark.row("X06")
@pytest.mark.parametrize("quantizers", [(ROW_SCALED, NVFP4Quantizer()), (NVFP4Quantizer(), ROW_SCALED)], ids=["left", "right"])
@pytest.mark.parametrize("name", GEMMS)
def test_x06_row_scaled_formats_meet_others_in_fprop_only(name, quantizers):
    what = GEMMS[name]
    left, right = (q.quantize(values(role)) for q, role in zip(quantizers, (what.left, what.right)))
    if name == "fprop":
        gemm(name, left, right, dtype=BF16)
        return
    told = rf"{name} of {what.left} and {what.right}: wants .*without an amax for each row.*nvfp4 \(row-scaled\).*HybridQuantizer"
    with pytest.raises(GemmError, match=told):
        gemm(name, left, right, dtype=BF16)
    exact = left.dequantize(torch.float32, what.left_plane), right.dequantize(torch.float32, what.right_plane)
    assert torch.equal(gemm(name, left, right, dtype=torch.float32, mixed=True), product(name, *exact))
    plain = IdentityQuantizer().quantize(values(what.right))
    gemm(name, left, plain, dtype=BF16)  # a product in high precision


@pytest.mark.row("H09")
@pytest.mark.parametrize("name", GEMMS)
def test_h09_only_the_planes_of_the_table_are_read(name):
    what = GEMMS[name]

    def operand(role: str, plane: str) -> QuantizedStorage:
        return MXFP8Quantizer(rowwise=plane == "rowwise", columnwise=plane == "columnwise").quantize(values(role))

    gemm(name, operand(what.left, what.left_plane), operand(what.right, what.right_plane), dtype=BF16)
    other = {"rowwise": "columnwise", "columnwise": "rowwise"}
    with pytest.raises(MissingPlaneError, match="was asked for"):
        gemm(name, operand(what.left, other[what.left_plane]), operand(what.right, what.right_plane), dtype=BF16)


@pytest.mark.parametrize("name", GEMMS)
@pytest.mark.parametrize("quantized_first", [True, False])
def test_a_high_precision_operand_makes_the_product_one(name, quantized_first):
    what = GEMMS[name]
    left, right = values(what.left), values(what.right)
    storage = MXFP8Quantizer().quantize(left if quantized_first else right)
    plane = what.left_plane if quantized_first else what.right_plane
    dequantized = storage.dequantize(BF16, plane)
    operands = (storage, right) if quantized_first else (left, storage)
    plain = (dequantized, right) if quantized_first else (left, dequantized)
    assert torch.equal(gemm(name, *operands, dtype=BF16), product(name, *plain))
    wide = gemm(name, *operands, dtype=BF16, out_dtype=torch.float32)
    assert torch.equal(wide, product(name, *(tensor.float() for tensor in plain)))


@pytest.mark.row("H07")
def test_h07_an_identity_plane_is_high_precision():
    hybrid = HybridQuantizer(MXFP8Quantizer(), IdentityQuantizer())
    x, dy = values("input"), values("grad_output")
    assert torch.equal(gemm("wgrad", IdentityQuantizer().quantize(dy), hybrid.quantize(x), dtype=BF16), dy.t() @ x)


def test_torch_autocast_has_no_say():
    x, weight = values("input", dtype=torch.float32), values("weight", dtype=torch.float32)
    with torch.autocast("cpu", BF16):
        inside = gemm("fprop", x, weight, dtype=torch.float32)
    assert torch.equal(inside, gemm("fprop", x, weight, dtype=torch.float32))


@pytest.mark.parametrize("name", GEMMS)
def test_shapes_that_do_not_fit(name):
    shapes = {"fprop": ((8, 32), (4, 64)), "dgrad": ((8, 32), (64, 4)), "wgrad": ((8, 32), (16, 64))}[name]
    left, right = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ShapeError) as caught:
        gemm(name, left, right, dtype=torch.float32)
    for text in (f"{name} of {GEMMS[name].left}", str(shapes[0]), str(shapes[1]), "equal summed dimensions"):
        assert text in str(caught.value)


@pytest.mark.parametrize(
    "quantizer", [MXFP8Quantizer(), Float8CurrentScalingQuantizer(E4M3), Float8BlockQuantizer(E4M3, block_scaling_dim=1)], ids=str
)
@pytest.mark.parametrize("name", GEMMS)
def test_shapes_of_a_group_that_do_not_fit(name, quantizer):
    shapes = {
        "fprop": ((32, 64), (96, 64), (96, 32)),
        "dgrad": ((32, 64), (64, 96), (32, 96)),
        "wgrad": ((32, 64), (32, 96), (64, 96)),
    }
    left, right, other = (quantizer.quantize(torch.zeros(shape)) for shape in shapes[name])
    lines = [64 if name == "wgrad" else 32] * 2
    gemm_of_groups(name, [left, left], [right, right], lines, out_dtype=BF16)
    with pytest.raises(ShapeError, match="equal summed dimensions"):
        gemm_of_groups(name, [left, left], [right, other], lines, out_dtype=BF16)
