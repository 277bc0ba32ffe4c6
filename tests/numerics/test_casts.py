"""Every cast, byte for byte, against the NumPy formulas of oracles/casts.py."""

import numpy as np
import pytest
import torch

from opfuse.formats import COLUMNWISE, E4M3, E5M2, NVFP4, ROWWISE, USAGES, fp8_block, fp8_row, fp8_tensor, mxfp8
from opfuse.numerics.casts import (
    amax_nv,
    cast_block,
    cast_delayed,
    cast_lines,
    cast_mx,
    cast_nv,
    cast_row,
    cast_tensor,
    line_amaxes,
)
from opfuse.numerics.hadamard import SIGNS, rotate
from opfuse.numerics.layouts import Layout, load_data
from opfuse.numerics.philox import STREAMS, random_bytes
from opfuse.numerics.scalars import encode_e2m1_stochastic
from opfuse.numerics.scales import nvfp4_multiplier
from tests.numerics.matrices import DTYPES, hard, lines, same, within
from tests.oracles import casts

F32 = np.float32
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_usage = pytest.mark.parametrize("usage", USAGES)
each_element = pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda e: e.name)


def planes(fmt, x, *, swizzled=False, usages=USAGES):
    return [Layout(fmt, usage, tuple(x.shape), swizzled) for usage in usages]


@each_dtype
@each_element
def test_tensor_cast_saturates_and_transposes(dtype, element):
    x = hard(37, 50, dtype)
    scale = torch.tensor([3.7])
    row, column = cast_tensor(x, scale, planes(fp8_tensor(element), x))
    assert same(row, casts.encode(lines(x, ROWWISE) * F32(3.7), element.name))
    assert torch.equal(column, row.t())
    assert column.is_contiguous()


@each_element
def test_r18_delayed_cast_shows_nonfinite_elements_only(element):
    x = torch.tensor([[1.0, float("inf"), -float("inf"), float("nan"), 1e30]])
    (row,) = cast_delayed(x, torch.tensor([1e20]), planes(fp8_tensor(element), x, usages=[ROWWISE]))
    nonfinite = [0x7F, 0x7F, 0x7F] if element is E4M3 else [0x7C, 0xFC, 0x7F]
    assert row.tolist() == [[element.max_code, *nonfinite, element.max_code]]
    (current,) = cast_tensor(x, torch.tensor([1e20]), planes(fp8_tensor(element), x, usages=[ROWWISE]))
    top = element.max_code
    assert current.tolist() == [[top, top, 0x80 | top, 0x7F, top]]


@pytest.mark.few
@pytest.mark.parametrize("shape", [(128, 256), (130, 200), (1, 5), (5, 1)])
@pytest.mark.parametrize(("eps", "pow2"), [(0.0, False), (1e-3, False), (1e-3, True)])
@each_dtype
@each_element
def test_row_cast(shape, eps, pow2, dtype, element):
    x = hard(*shape, dtype)
    layouts = planes(fp8_row(element), x)
    for layout, (data, scale) in zip(layouts, cast_row(x, layouts, eps=eps, pow2=pow2)):
        codes, scales = casts.row(lines(x, layout.usage), element.name, eps=eps, pow2=pow2)
        assert same(data, codes)
        assert same(scale, scales)
        assert (data.shape, scale.shape) == (layout.data_shape, layout.scale_shape)


def test_a_row_depends_on_no_other_row():
    x = hard(64, 96, torch.bfloat16)
    (layout,) = planes(fp8_row(E4M3), x, usages=[ROWWISE])
    ((data, scale),) = cast_row(x, [layout])
    ((alone, its),) = cast_row(x[7:8], [Layout(fp8_row(E4M3), ROWWISE, (1, 96))])
    assert torch.equal(data[7:8], alone)
    assert torch.equal(scale[7:8], its)


def test_lines_whose_amaxes_are_known_saturate_above_them():
    x = torch.tensor([[1.0, -4.0], [0.5, 8.0]])
    layouts = planes(fp8_row(E4M3), x)
    row, column = line_amaxes(x, USAGES)
    assert (row.tolist(), column.tolist()) == ([4.0, 8.0], [1.0, 8.0])
    (codes, scale), _ = cast_lines(x, [row / 2, column], layouts)
    assert codes.tolist()[0] == [E4M3.max_code - 8, 0x80 | E4M3.max_code]
    assert scale.tolist() == [torch.tensor(2 / 448).item(), torch.tensor(4 / 448).item()]


@pytest.mark.few
@pytest.mark.parametrize("shape", [(128, 256), (130, 200), (1, 5), (257, 130)])
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("pow2", [True, False], ids=["pow2", "fp32 scales"])
@each_dtype
def test_block_cast(shape, dims, pow2, dtype):
    x = hard(*shape, dtype)
    inf_value = torch.finfo(dtype).max
    for layout, (data, scale) in zip(
        planes(fp8_block(E4M3, dims), x), cast_block(x, planes(fp8_block(E4M3, dims), x), pow2=pow2)
    ):
        rows = 1 if dims == 1 else 128
        codes, scales = casts.block(lines(x, layout.usage), "e4m3", rows, pow2=pow2, inf_value=inf_value)
        assert same(data, codes)
        assert same(scale, casts.store_blocks(scales, dims=dims))
        assert data.shape == layout.data_shape


def test_block_cast_of_e5m2_with_epsilon():
    x = hard(64, 256, torch.float32)
    (layout,) = planes(fp8_block(E5M2, 1), x, usages=[ROWWISE])
    ((data, scale),) = cast_block(x, [layout], eps=1e-3, pow2=False)
    codes, scales = casts.block(lines(x, ROWWISE), "e5m2", 1, eps=1e-3, pow2=False)
    assert same(data, codes)
    assert same(scale, casts.store_blocks(scales, dims=1))


@pytest.mark.few
@pytest.mark.parametrize("swizzled", [False, True], ids=["compact", "swizzled"])
@pytest.mark.parametrize("rows", [1, 32], ids=["1x32", "32x32"])
@each_dtype
@each_element
def test_mx_cast(swizzled, rows, dtype, element):
    x = hard(160, 96, dtype)
    layouts = planes(mxfp8(element), x, swizzled=swizzled)
    for layout, (data, scale) in zip(layouts, cast_mx(x, layouts, rows=rows)):
        codes, scales = casts.mx(lines(x, layout.usage), element.name, rows)
        assert same(data, codes.T if layout.usage == COLUMNWISE else codes)
        assert same(scale, casts.store_tiled(scales, across=layout.usage == COLUMNWISE, swizzled=swizzled))
        assert data.is_contiguous()


@each_element
def test_g20_mx_cast_rounding_scales_down(element):
    x = hard(64, 64, torch.bfloat16)
    (layout,) = planes(mxfp8(element), x, usages=[ROWWISE])
    ((data, scale),) = cast_mx(x, [layout], rounding="floor")
    codes, scales = casts.mx(lines(x, ROWWISE), element.name, rounding="floor")
    assert same(data, codes)
    assert same(scale, casts.store_tiled(scales, across=False, swizzled=False))


def test_tile_casts_agree_between_planes():
    x = hard(64, 96, torch.bfloat16)
    row, column = cast_mx(x, planes(mxfp8(E4M3), x), rows=32)
    assert torch.equal(row[0], column[0])
    layouts = planes(NVFP4, x)
    for error in (None, "MAE", "MSE"):
        nv_row, nv_column = cast_nv(x, [amax_nv(x, layouts[0])] * 2, layouts, rows=16, error=error)
        assert torch.equal(load_data(nv_row[0], layouts[0]), load_data(nv_column[0], layouts[1]).t())


@pytest.mark.few
@pytest.mark.parametrize("swizzled", [False, True], ids=["compact", "swizzled"])
@pytest.mark.parametrize("rows", [1, 16], ids=["1x16", "16x16"])
@each_dtype
def test_nv_cast(swizzled, rows, dtype):
    x = within(48, 160, dtype)
    layouts = planes(NVFP4, x, swizzled=swizzled)
    amaxes = [amax_nv(x, layout) for layout in layouts]
    assert amaxes[0].item() == amaxes[1].item() == x.float().abs().max().item()
    for layout, (data, scale) in zip(layouts, cast_nv(x, amaxes, layouts, rows=rows)):
        values = lines(x, layout.usage)
        codes, scales = casts.nv(values, np.full(len(values), np.abs(values).max()), rows)
        assert same(data, casts.pack(codes))
        assert same(scale, casts.store_tiled(scales, across=False, swizzled=swizzled))


@each_usage
@pytest.mark.parametrize("error", [None, "MAE"])
def test_nv_row_scaled_cast(usage, error):
    fmt = NVFP4.replace(per_row=True, encode_max=256 if error else 448)
    x = within(32, 48, torch.bfloat16)
    (layout,) = planes(fmt, x, usages=[usage])
    amax = amax_nv(x, layout)
    values = lines(x, usage)
    assert same(amax, np.abs(values).max(1))
    ((data, scale),) = cast_nv(x, [amax], [layout], error=error)
    codes, scales = casts.nv_four_over_six(values, amax.numpy(), 1, error) if error else casts.nv(values, amax.numpy())
    assert same(data, casts.pack(codes))
    assert same(scale, casts.store_tiled(scales, across=False, swizzled=False))


@pytest.mark.few
@pytest.mark.parametrize("rows", [1, 16], ids=["1x16", "16x16"])
@pytest.mark.parametrize("mode", ["MAE", "MSE"])
@each_usage
def test_nv_four_over_six_cast(rows, mode, usage):
    x = within(64, 64, torch.bfloat16)
    (layout,) = planes(NVFP4.replace(encode_max=256), x, usages=[usage])
    amax = amax_nv(x, layout)
    ((data, scale),) = cast_nv(x, [amax], [layout], rows=rows, error=mode)
    turned = rows == 16 and usage == COLUMNWISE
    values = lines(x, ROWWISE if turned else usage)
    codes, scales = casts.nv_four_over_six(values, np.full(len(values), amax.item(), F32), rows, mode)
    if turned:
        codes, scales = codes.T, scales[::16].T.repeat(16, 0)
    assert same(data, casts.pack(codes))
    assert same(scale, casts.store_tiled(scales, across=False, swizzled=False))
    six = casts.nv(values, np.full(len(values), amax.item(), F32), rows, encode_max=256)[1]
    assert 0.05 < (scales != (six[::16].T.repeat(16, 0) if turned else six)).mean() < 0.95, "both choices must occur"


def test_nv_rotated_columns():
    x = within(64, 48, torch.bfloat16)
    fmt = NVFP4.replace(rht=SIGNS)
    (layout,) = planes(fmt, x, usages=[COLUMNWISE])
    amax = amax_nv(x, layout)
    rotated = rotate(x.t(), SIGNS)
    assert amax.item() == rotated.float().abs().max().item()
    ((data, scale),) = cast_nv(x, [amax], [layout])
    codes, scales = casts.nv(rotated.float().numpy(), np.full(48, amax.item(), F32))
    assert same(data, casts.pack(codes))
    assert same(scale, casts.store_tiled(scales, across=False, swizzled=False))


@each_usage
def test_g21_nv_stochastic_cast_uses_the_byte_of_each_element(usage):
    x = within(32, 48, torch.bfloat16)
    (layout,) = planes(NVFP4, x, usages=[usage])
    amax, seed = amax_nv(x, layout), torch.tensor([77])
    ((data, scale),) = cast_nv(x, [amax], [layout], seed=seed)
    ((nearest, nearest_scale),) = cast_nv(x, [amax], [layout])
    assert torch.equal(scale, nearest_scale)
    values = torch.from_numpy(lines(x, usage))
    bytes_ = random_bytes(seed, x.numel(), STREAMS[usage]).reshape(values.shape)
    global_scale = torch.tensor(casts.nv_global_scale(amax.numpy()[0], 448))
    inverse = nvfp4_multiplier(scale[: values.shape[0], : values.shape[1] // 16], global_scale)
    expected = encode_e2m1_stochastic(values * inverse.repeat_interleave(16, 1), bytes_)
    assert torch.equal(load_data(data, layout), expected)
    assert not torch.equal(data, nearest)


def test_stochastic_tile_planes_agree():
    x = within(32, 48, torch.bfloat16)
    layouts = planes(NVFP4, x)
    row, column = cast_nv(x, [amax_nv(x, layouts[0])] * 2, layouts, rows=16, seed=torch.tensor([5]))
    assert torch.equal(load_data(row[0], layouts[0]), load_data(column[0], layouts[1]).t())


def test_nv_tiny_tensor_becomes_zero_and_zero_stays_zero():
    for value in (0.0, 1e-38):
        x = torch.full((16, 16), value)
        (layout,) = planes(NVFP4, x, usages=[ROWWISE])
        ((_, scale),) = cast_nv(x, [amax_nv(x, layout)], [layout])
        assert not scale.any()


@each_usage
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_r18_a_block_with_a_nonfinite_element_has_a_nan_scale(usage, bad):
    x = torch.randn(256, 256)
    x[5, 7] = bad
    line, block = (5, 0) if usage == ROWWISE else (7, 0)
    for dims in (1, 2):
        (layout,) = planes(fp8_block(E4M3, dims), x, usages=[usage])
        ((_, scale),) = cast_block(x, [layout])
        where = (block, line) if dims == 1 else (0, 0)
        assert scale[where].isnan()
        assert scale.isnan().sum() == 1
    (layout,) = planes(fp8_row(E4M3), x, usages=[usage])
    ((_, scale),) = cast_row(x, [layout])
    assert scale.isnan().nonzero().flatten().tolist() == [line]
    (layout,) = planes(mxfp8(E4M3), x, usages=[usage])
    ((data, scale),) = cast_mx(x, [layout])
    assert scale[(line, block) if usage == ROWWISE else (block, line)] == 255
    assert (scale == 255).sum() == 1
    assert (data == 0x7F).sum() == 32
    (layout,) = planes(NVFP4, x, usages=[usage])
    amax = amax_nv(x, layout)
    ((data, scale),) = cast_nv(x, [amax], [layout])
    assert not amax.isfinite().any()
    assert scale[line, block] == 0x7F
    assert (scale == 0x7F).sum() == 1
    assert (load_data(data, layout)[line, :16] == 7).all()
