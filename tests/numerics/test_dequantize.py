"""Bytes back to values: the formulas in fp64 and fp32, edge blocks, poisoned padding, swizzled scales, extreme scales."""

import numpy as np
import pytest
import torch

from opfuse.formats import COLUMNWISE, E4M3, E5M2, NVFP4, ROWWISE, USAGES, fp8_block, fp8_row, fp8_tensor, mxfp8
from opfuse.numerics.casts import amax_nv, cast_block, cast_mx, cast_nv, cast_row, cast_tensor
from opfuse.numerics.dequantize import dequantize
from opfuse.numerics.hadamard import NO_SIGNS, SIGNS, rotate, unrotate
from opfuse.numerics.layouts import Layout, load_data, relayout_scale, store_data, store_scale
from tests.numerics.matrices import DTYPES, hard, lines, within
from tests.oracles import casts

MX_SHAPES = [(0, 128), (0, 256), (1, 16), (16, 48), (65, 96), (128, 128), (256, 256), (993, 512), (768, 1024)]
NV_SHAPES = [
    (0, 128),
    (0, 256),
    (32, 32),
    (32, 64),
    (64, 96),
    (128, 128),
    (128, 256),
    (256, 256),
    (256, 512),
    (512, 1024),
    (992, 512),
    (768, 1024),
]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_usage = pytest.mark.parametrize("usage", USAGES)
each_layout = pytest.mark.parametrize("swizzled", [False, True], ids=["compact", "swizzled"])


def turn(values: np.ndarray, usage: str) -> np.ndarray:
    return values.T if usage == COLUMNWISE else values


def rounded(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """fp64 or fp32 values rounded once: torch converts fp64 to bf16 through fp32, but these are exact in fp32."""
    assert np.array_equal(values, values.astype(np.float32).astype(values.dtype), equal_nan=True)
    return torch.from_numpy(np.ascontiguousarray(values.astype(np.float32))).to(dtype)


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    assert got.is_contiguous()
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@each_dtype
@each_usage
@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda e: e.name)
def test_tensor_scaled(dtype, usage, element):
    codes = torch.randint(0, element.max_code + 1, (33, 50), dtype=torch.uint8)
    layout = Layout(fp8_tensor(element), usage, (33, 50))
    scale = torch.rand(1)
    data = codes.t().contiguous() if usage == COLUMNWISE else codes
    expected = casts.decode(codes.numpy(), element.name).astype(np.float32) * scale.numpy()
    same(dequantize(data, scale, None, layout=layout, dtype=dtype), rounded(expected, dtype))


@each_dtype
@each_usage
@pytest.mark.parametrize("shape", [(130, 200), (1, 5), (0, 128)])
def test_row_scaled(dtype, usage, shape):
    layout = Layout(fp8_row(E5M2), usage, shape)
    x = hard(*shape, torch.float32)
    ((data, scale),) = cast_row(x, [layout])
    expected = casts.decode(data.numpy(), "e5m2").astype(np.float32) * scale.numpy()[:, None]
    same(dequantize(data, scale, None, layout=layout, dtype=dtype), rounded(turn(expected, usage), dtype))


@each_dtype
@each_usage
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("shape", [(128, 256), (130, 200), (1, 5), (0, 128)])
def test_block_scaled(dtype, usage, dims, shape):
    layout = Layout(fp8_block(E4M3, dims), usage, shape)
    x = hard(*shape, torch.float32)
    ((data, scale),) = cast_block(x, [layout], pow2=False)
    codes, scales = casts.block(lines(x, usage), "e4m3", 1 if dims == 1 else 128, pow2=False)
    spread = scales.repeat(1 if dims == 1 else 128, 0).repeat(128, 1)[: codes.shape[0], : codes.shape[1]]
    expected = turn(casts.decode(codes, "e4m3").astype(np.float32) * spread, usage)
    same(dequantize(data, scale, None, layout=layout, dtype=dtype), rounded(expected, dtype))


@pytest.mark.few
@pytest.mark.row("D01", "D03", "D05")
@each_dtype
@each_usage
@each_layout
@pytest.mark.parametrize("shape", MX_SHAPES, ids=str)
def test_d01_d03_d05_mxfp8_with_edge_blocks(dtype, usage, swizzled, shape):
    """Any bytes under scales from 2^-60 to 2^60: the result is the fp64 product, rounded once to the output."""
    layout = Layout(mxfp8(E4M3), usage, shape, swizzled)
    codes = torch.randint(0, 256, layout.lines, dtype=torch.uint8)
    scales = torch.randint(67, 188, layout.blocks, dtype=torch.uint8)
    exact = (
        casts.decode(codes.numpy(), "e4m3") * np.exp2(scales.numpy().astype(np.float64) - 127).repeat(32, 1)[:, : layout.lines[1]]
    )
    got = dequantize(store_data(codes, layout), store_scale(scales, layout), None, layout=layout, dtype=dtype)
    assert got.shape == shape
    same(got, rounded(turn(exact, usage), dtype))


@pytest.mark.row("D07")
@each_dtype
@each_usage
def test_d07_mxfp8_extreme_scales(dtype, usage):
    shape = (128, 32) if usage == ROWWISE else (32, 128)
    layout = Layout(mxfp8(E4M3), usage, shape)
    codes = torch.arange(32, dtype=torch.uint8).mul(4).expand(128, 32)
    scales = torch.tensor([0, 1, 2, 3, 246, 247, 254, 255], dtype=torch.uint8).repeat(16)[:, None]
    got = dequantize(store_data(codes, layout), store_scale(scales, layout), None, layout=layout, dtype=dtype)
    values = casts.decode(codes.numpy(), "e4m3")
    exact = np.where(scales == 255, np.nan, values * np.exp2(scales.numpy().astype(np.float64) - 127))
    exact = np.where(np.abs(exact) >= 2.0**128, np.copysign(np.inf, exact), exact)
    same(got, rounded(turn(exact, usage), dtype))
    if dtype == torch.float32:
        first = got[0] if usage == ROWWISE else got[:, 0]
        assert first[14].item() == 1.0 * 2**-127, "code 0 is a subnormal scale, not zero"


def test_largest_finite_bf16_comes_back_as_inf():
    """Its scale has code 247 and its element 256: 2^128. Finite in, inf out, and documented so."""
    x = torch.full((1, 32), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    layout = Layout(mxfp8(E4M3), ROWWISE, (1, 32))
    ((data, scale),) = cast_mx(x, [layout])
    assert dequantize(data, scale, None, layout=layout, dtype=torch.bfloat16).isinf().all()


def nv_exact(codes: np.ndarray, scales: np.ndarray, amaxes: np.ndarray, encode_max: int) -> np.ndarray:
    """(q * block scale) * (amax * fl32(1 / 6E)) in fp32, in this order."""
    blocks = casts.decode(scales, "e4m3").astype(np.float32).repeat(16, 1)
    return (casts.decode(codes, "e2m1").astype(np.float32) * blocks) * (amaxes * np.float32(1 / (6 * encode_max)))


@pytest.mark.few
@pytest.mark.row("D02", "D03", "D05")
@each_dtype
@each_usage
@each_layout
@pytest.mark.parametrize("shape", NV_SHAPES, ids=str)
def test_d02_d03_d05_g11_nvfp4(dtype, usage, swizzled, shape):
    layout = Layout(NVFP4, usage, shape, swizzled)
    codes = torch.randint(0, 16, layout.lines, dtype=torch.uint8)
    scales = torch.randint(0, 0x7F, layout.blocks, dtype=torch.uint8)
    amax = torch.rand(1) * 100
    got = dequantize(store_data(codes, layout), store_scale(scales, layout), amax, layout=layout, dtype=dtype)
    same(got, rounded(turn(nv_exact(codes.numpy(), scales.numpy(), amax.numpy(), 448), usage), dtype))


@each_usage
@pytest.mark.parametrize("encode_max", [448, 256])
def test_nvfp4_row_scaled(usage, encode_max):
    fmt = NVFP4.replace(per_row=True, encode_max=encode_max)
    layout = Layout(fmt, usage, (32, 48))
    x = within(32, 48, torch.float32)
    amax = amax_nv(x, layout)
    ((data, scale),) = cast_nv(x, [amax], [layout])
    codes, scales = casts.nv(lines(x, usage), amax.numpy(), encode_max=encode_max)
    expected = nv_exact(codes, scales, amax.numpy()[:, None], encode_max)
    same(dequantize(data, scale, amax, layout=layout, dtype=torch.float32), rounded(turn(expected, usage), torch.float32))


@each_dtype
@pytest.mark.parametrize("signs", [SIGNS, NO_SIGNS], ids=["signs", "no signs"])
def test_g11_rotated_nvfp4_columns_are_turned_back(dtype, signs):
    """Trap 12: the plane approximates x^T only after the rotation is undone, which is done in fp32 before the output rounding."""
    x = within(64, 48, torch.bfloat16)
    layout = Layout(NVFP4.replace(rht=signs), COLUMNWISE, (64, 48))
    amax = amax_nv(x, layout)
    ((data, scale),) = cast_nv(x, [amax], [layout])
    got = dequantize(data, scale, amax, layout=layout, dtype=dtype)
    rotated = dequantize(data, scale, amax, layout=layout.replace(format=NVFP4), dtype=torch.float32)
    assert torch.equal(got, unrotate(rotated.t(), signs).t().to(dtype))
    error = (got.float() - x.float()).norm() / x.float().norm()
    assert error < 0.15
    rotated_error = (rotated - rotate(x.t(), signs).t().float()).norm() / x.float().norm()
    assert rotated_error.item() == pytest.approx(error.item(), rel=0.1)


@pytest.mark.row("D06")
@each_usage
@pytest.mark.parametrize("fmt", [mxfp8(E4M3), NVFP4], ids=str)
def test_d06_r8_padding_of_scales_is_never_read(usage, fmt):
    """64x64 has 64x2 or 64x4 scales in arrays padded to 128x4 tiles."""
    x = within(64, 64, torch.bfloat16)
    layout = Layout(fmt, usage, (64, 64))
    amax = None if fmt is not NVFP4 else amax_nv(x, layout)
    ((data, scale),) = cast_mx(x, [layout]) if amax is None else cast_nv(x, [amax], [layout])
    expected = dequantize(data, scale, amax, layout=layout, dtype=torch.float32)
    mark = store_scale(torch.ones(layout.blocks, dtype=torch.uint8), layout)
    for poison in (torch.full_like(scale, 0xFF), torch.randint(0, 256, scale.shape, dtype=torch.uint8)):
        poisoned = torch.where(mark == 1, scale, poison)
        assert not torch.equal(poisoned, scale)
        same(dequantize(data, poisoned, amax, layout=layout, dtype=torch.float32), expected)
        swizzled = layout.replace(swizzled=True)
        tiles = relayout_scale(poisoned, layout, swizzled=True)
        same(dequantize(data, tiles, amax, layout=swizzled, dtype=torch.float32), expected)
        mark_tiles = relayout_scale(mark, layout, swizzled=True)
        poisoned_tiles = torch.where(mark_tiles == 1, tiles, poison.reshape(tiles.shape))
        same(dequantize(data, poisoned_tiles, amax, layout=swizzled, dtype=torch.float32), expected)


@each_usage
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_r18_nonfinite_input_is_visible_in_every_format(usage, bad):
    x = torch.randn(64, 64)
    x[3, 40] = bad
    for fmt in (fp8_row(E4M3), fp8_block(E4M3, 1), fp8_block(E4M3, 2), mxfp8(E4M3), mxfp8(E5M2)):
        layout = Layout(fmt, usage, (64, 64))
        ((data, scale),) = {"row": cast_row, "block": cast_block, "mx": cast_mx}[fmt.family](x, [layout])
        got = dequantize(data, scale, None, layout=layout, dtype=torch.float32)
        assert got[3, 40].isnan()
        per_block = {(1, 0): 64, (1, 128): 64, (128, 128): 64 * 64, (1, 32): 32}[fmt.block]
        assert got.isnan().sum() == per_block
    layout = Layout(NVFP4, usage, (64, 64))
    amax = amax_nv(x, layout)
    ((data, scale),) = cast_nv(x, [amax], [layout])
    got = dequantize(data, scale, amax, layout=layout, dtype=torch.float32)
    assert not got.isfinite().any()
    assert got[3, 40].isnan()


@each_usage
def test_mxfp8_round_trip_error_is_half_a_step(usage):
    x = torch.randn(96, 96)
    layout = Layout(mxfp8(E4M3), usage, (96, 96))
    ((data, scale),) = cast_mx(x, [layout])
    got = dequantize(data, scale, None, layout=layout, dtype=torch.float32)
    step = torch.maximum(x.abs() * 2**-4, x.abs().max() * 2**-16)
    assert ((got - x).abs() <= step).all()
    assert torch.equal(load_data(data, layout), data.t() if usage == COLUMNWISE else data)


def test_tensor_scaled_round_trip_through_both_planes():
    x = torch.randn(48, 80).bfloat16()
    layouts = [Layout(fp8_tensor(E4M3), usage, (48, 80)) for usage in USAGES]
    row, column = cast_tensor(x, torch.tensor([64.0]), layouts)
    scale_inv = torch.tensor([1 / 64])
    a = dequantize(row, scale_inv, None, layout=layouts[0], dtype=torch.bfloat16)
    b = dequantize(column, scale_inv, None, layout=layouts[1], dtype=torch.bfloat16)
    assert torch.equal(a, b)
    assert torch.allclose(a.float(), x.float(), rtol=2**-4, atol=2**-15)
