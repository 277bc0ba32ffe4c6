"""Quantizers: what each setting does to the bytes, directions, checks, updates in place, randomness, reduction of amax."""

import math
import os
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing as mp

from opfuse.errors import DtypeError, MissingPlaneError, QuantizerError, ShapeError
from opfuse.formats import COLUMNWISE, E4M3, E5M2, IDENTITY, NVFP4, ROWWISE, USAGES, mxfp8
from opfuse.numerics.hadamard import NO_SIGNS, SIGNS, rotate
from opfuse.tensors.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8RowQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from opfuse.tensors.quantizers.base import SharedAmax
from tests.numerics.matrices import DTYPES, hard, lines, same, within
from tests.oracles import casts
from tests.processes import run_ranks
from tests.tensors.quantized_samples import Blocks64

FP8 = torch.float8_e4m3fn
ROTATED = {"with_rht": True, "with_post_rht_amax": True}


def delayed(scale=2.5, dtype=FP8, **options):
    state = {"dtype": torch.float32}
    return Float8Quantizer(torch.tensor([scale], **state), torch.zeros(1, **state), dtype, **options)


QUANTIZERS = {
    "delayed": delayed,
    "delayed e5m2": lambda **options: delayed(dtype=torch.float8_e5m2, **options),
    "current": lambda **options: Float8CurrentScalingQuantizer(FP8, **options),
    "current e5m2 pow2": lambda **options: Float8CurrentScalingQuantizer(
        torch.float8_e5m2, force_pow_2_scales=True, amax_epsilon=1e-4, **options
    ),
    "block 1d": lambda **options: Float8BlockQuantizer(FP8, block_scaling_dim=1, **options),
    "block 2d": lambda **options: Float8BlockQuantizer(FP8, **options),
    "mxfp8": MXFP8Quantizer,
    "mxfp8 2d": lambda **options: MXFP8Quantizer(with_2d_quantization=True, **options),
    "mxfp8 e5m2 floor": lambda **options: MXFP8Quantizer(torch.float8_e5m2, scale_rule="ocp_floor", **options),
    "nvfp4": NVFP4Quantizer,
    "nvfp4 2d": lambda **options: NVFP4Quantizer(with_2d_quantization=True, **options),
    "nvfp4 rotated": lambda **options: NVFP4Quantizer(**ROTATED, **options),
    "nvfp4 row scaled": lambda **options: NVFP4Quantizer(row_scaled_nvfp4=True, **options),
    "nvfp4 4over6": lambda **options: NVFP4Quantizer(nvfp4_use_4over6=True, **options),
    "nvfp4 4over6 2d": lambda **options: NVFP4Quantizer(
        nvfp4_use_4over6=True, nvfp4_4over6_err_mode="MSE", with_2d_quantization=True, **options
    ),
    "identity": IdentityQuantizer,
    "hybrid": lambda **options: HybridQuantizer(MXFP8Quantizer(), NVFP4Quantizer(), **options),
    "hybrid chained": lambda **options: HybridQuantizer(
        Float8BlockQuantizer(FP8), MXFP8Quantizer(), columnwise_source="rowwise_dequantized", **options
    ),
}
ERROR = {"nv": 0.16, "identity": 0.0}
each = pytest.mark.parametrize("make", QUANTIZERS.values(), ids=QUANTIZERS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_usage = pytest.mark.parametrize("usage", USAGES)


def bf16(*shape):
    return torch.randn(shape).bfloat16()


def equal(a, b):
    """Same planes of the same formats, bit for bit."""
    assert a.usages == b.usages
    assert a.shape == b.shape
    for usage in a.usages:
        assert a.plane(usage).layout == b.plane(usage).layout
        for s, t in zip(a.plane(usage).tensors(), b.plane(usage).tensors(), strict=True):
            torch.testing.assert_close(s, t, rtol=0, atol=0, equal_nan=True)
    return True


# --- every quantizer ------------------------------------------------------------------------------------------------------


@each
def test_planes_approximate_the_input_in_its_shape(make):
    x = bf16(2, 48, 64).reshape(3, 32, 64)
    storage = make().quantize(x)
    assert storage.shape == x.shape
    assert storage.dtype == x.dtype
    assert storage.usages == USAGES
    for usage, fmt in zip(USAGES, make().formats):
        plane = storage.plane(usage)
        assert plane.format == fmt
        assert plane.shape == (96, 64)
        back = storage.dequantize(usage=usage)
        assert back.shape == x.shape
        assert back.dtype == x.dtype
        bound = ERROR.get(fmt.family, 0.04 if fmt.element is E4M3 else 0.07)
        assert (back - x).float().norm() <= bound * x.float().norm()


@pytest.mark.row("H03")
@each
@each_usage
def test_h03_a_direction_alone_has_the_bytes_it_has_beside_the_other(make, usage):
    x = bf16(64, 96)
    both, alone = make().quantize(x), make().wanting(rowwise=usage == ROWWISE, columnwise=usage == COLUMNWISE).quantize(x)
    assert alone.usages == (usage,)
    equal(both.only(usage, why="compared"), alone)


@pytest.mark.few
@pytest.mark.row("B15")
@each
@each_dtype
def test_optimize_for_gemm_swizzles_scales_and_keeps_values(make, dtype):
    quantizer = make()
    if dtype != torch.bfloat16 and any(fmt.rht for fmt in quantizer.formats):
        with pytest.raises(DtypeError, match="bfloat16"):
            quantizer.quantize(within(64, 96, dtype))
        return
    x = within(64, 96, dtype)
    compact, swizzled = make().quantize(x), make(optimize_for_gemm=True).quantize(x)
    for usage in USAGES:
        a, b = compact.plane(usage), swizzled.plane(usage)
        assert b.swizzled == (a.format.family in ("mx", "nv"))
        assert torch.equal(a.data, b.data)
        for out in DTYPES:
            torch.testing.assert_close(a.dequantize(out), b.dequantize(out), rtol=0, atol=0)
        assert torch.equal(b.with_swizzle(swizzled=False).dequantize(dtype), a.dequantize(dtype))


@pytest.mark.row("B15")
def test_b15_a_format_without_known_tiles_stays_compact():
    x = bf16(64, 192)
    compact, asked = Blocks64().quantize(x), Blocks64(optimize_for_gemm=True).quantize(x)
    equal(asked, compact)
    assert [asked.plane(usage).swizzled for usage in USAGES] == [False, False]
    assert asked.rowwise.with_swizzle(swizzled=True) is asked.rowwise
    assert asked.rowwise.scale.shape == (3, 64)
    assert (asked.dequantize(torch.float32) - x.float()).abs().max() < 0.05 * x.abs().max()


@each
def test_r10_noncontiguous_and_parameter_inputs(make):
    x = bf16(96, 64)
    want = make().quantize(x)
    strided = torch.empty(96, 128).bfloat16()[:, ::2].copy_(x)
    for other in (x.t().contiguous().t(), strided):
        assert not other.is_contiguous()
        if IDENTITY in make().formats:
            assert make().quantize(other).plane(ROWWISE).data is other
        else:
            equal(make().quantize(other), want)
    parameter = torch.nn.Parameter(x.clone())
    storage = make().quantize(parameter)
    if IDENTITY not in make().formats:
        equal(storage, want)
        assert not any(tensor.requires_grad for tensor in storage.tensors())


@pytest.mark.few(apart=True)
@pytest.mark.row("D04")
@each
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (0, 0)])
def test_d04_empty(make, shape):
    x = torch.empty(shape).bfloat16()
    storage = make().quantize(x)
    for usage in USAGES:
        assert storage.dequantize(torch.float32, usage).shape == shape
    equal(make().update_quantized(x, make().make_empty(shape, dtype=torch.bfloat16)), storage)


@each
def test_make_empty_is_zero_and_an_update_fills_it(make):
    x = bf16(3, 32, 64)
    for options in ({}, {"optimize_for_gemm": True}, {"columnwise": False}, {"rowwise": False}):
        empty = make(**options).make_empty(x.shape, dtype=x.dtype)
        assert all(not tensor.any() for tensor in empty.tensors())
        assert not empty.dequantize(torch.float32).any()
        equal(make(**options).update_quantized(x, empty), make(**options).quantize(x))


@pytest.mark.row("U12", "H17")
@each
def test_h17_u12_update_rewrites_every_plane_in_place(make):
    x, y = bf16(32, 64), 3 * bf16(32, 64)
    quantizer = make()
    storage = quantizer.quantize(x.clone())
    pointers, versions = [t.data_ptr() for t in storage.tensors()], [t._version for t in storage.tensors()]
    assert quantizer.wanting(columnwise=False).update_quantized(y, storage) is storage
    equal(storage, make().quantize(y))
    assert [t.data_ptr() for t in storage.tensors()] == pointers
    assert all(t._version > version for t, version in zip(storage.tensors(), versions))


@pytest.mark.row("H17")
@each
def test_h17_noop_flag_leaves_bytes_and_state(make):
    x, y = bf16(32, 64), 3 * bf16(32, 64)
    quantizer = make()
    storage = quantizer.quantize(x.clone())
    state = [tensor.clone() for tensor in quantizer.state]
    quantizer.update_quantized(y, storage, noop_flag=torch.ones(1))
    equal(storage, make().quantize(x))
    assert all(torch.equal(a, b) for a, b in zip(quantizer.state, state))
    quantizer.update_quantized(y, storage, noop_flag=torch.zeros(1))
    equal(storage, make().quantize(y))
    assert all(b < a for a, b in zip(quantizer.state, state))


@each
def test_update_refuses_another_shape_or_format(make):
    storage = make().quantize(bf16(32, 64))
    with pytest.raises(ShapeError, match=r"update_quantized: wants \(32, 64\), got \(64, 32\)"):
        make().update_quantized(bf16(64, 32), storage)
    other = Float8BlockQuantizer(torch.float8_e5m2)
    with pytest.raises(QuantizerError, match="update with the quantizer that made the storage"):
        other.update_quantized(bf16(32, 64), storage)


def test_update_keeps_the_layout_of_the_storage():
    x = bf16(64, 64)
    storage = MXFP8Quantizer(optimize_for_gemm=True).quantize(torch.zeros(64, 64))
    MXFP8Quantizer().update_quantized(x, storage)
    equal(storage, MXFP8Quantizer(optimize_for_gemm=True).quantize(x))


@each
def test_settings_are_values(make):
    assert make() == make()
    assert hash(make()) == hash(make())
    copy = make().copy()
    assert copy == make()
    assert copy is not make()
    assert make(columnwise=False) != make()
    assert make(columnwise=False).wanting(columnwise=True) == make()
    assert make().wanting(rowwise=False) == make(rowwise=False)
    assert make().wanting() == make()
    assert make(rowwise=False).usages == (COLUMNWISE,)
    assert repr(make(rowwise=False)).startswith(f"{type(make()).__name__}(rowwise=False")
    with pytest.raises(AttributeError):
        make().rowwise = False


@each
def test_pickled_settings_are_equal(make):
    copy = pickle.loads(pickle.dumps(make(columnwise=False)))
    assert copy == make(columnwise=False)
    equal(copy.quantize(torch.ones(32, 32).bfloat16()), make(columnwise=False).quantize(torch.ones(32, 32).bfloat16()))


def test_a_process_group_is_not_pickled():
    quantizer = NVFP4Quantizer(with_amax_reduction=True, amax_reduction_group=lambda: "cannot be pickled")
    assert quantizer.copy().amax_reduction_group is quantizer.amax_reduction_group
    copy = pickle.loads(pickle.dumps(quantizer))
    assert copy == quantizer
    assert copy.amax_reduction_group is None


@each
def test_the_default_dtype_does_not_matter(make):
    x = bf16(32, 64)
    want, values = make().quantize(x), make().quantize(x).dequantize()
    torch.set_default_dtype(torch.float64)
    try:
        equal(make().quantize(x), want)
        assert torch.equal(make().quantize(x).dequantize(), values)
    finally:
        torch.set_default_dtype(torch.float32)


@each
def test_refuses_what_it_cannot_take(make):
    quantizer = make()
    assert quantizer.is_quantizable(bf16(32, 64))
    assert not quantizer.is_quantizable(torch.tensor(1.0).bfloat16())
    with pytest.raises(ShapeError, match="at least one dimension"):
        quantizer.quantize(torch.tensor(1.0).bfloat16())
    with pytest.raises(QuantizerError, match="wants a direction"):
        make(rowwise=False, columnwise=False).quantize(bf16(32, 64))
    if quantizer.formats != (IDENTITY, IDENTITY):
        for dtype in (torch.float64, torch.int32):
            assert not quantizer.is_quantizable(torch.zeros(32, 64, dtype=dtype))
            with pytest.raises(DtypeError, match=f"got {dtype}"):
                quantizer.quantize(torch.zeros(32, 64, dtype=dtype))


TURNING = [
    name
    for name, make in QUANTIZERS.items()
    if not isinstance(make(), (HybridQuantizer, IdentityQuantizer)) and name not in ("nvfp4 rotated", "nvfp4 4over6 2d")
]
"""Quantizers whose planes hold the same values; the error sums of a 4over6 tile run along the rows of the matrix."""


@pytest.mark.parametrize("name", TURNING)
@pytest.mark.parametrize("shape", [(128, 128), (96, 256)])
def test_columnwise_is_the_rowwise_plane_of_the_transpose(name, shape):
    quantizer = QUANTIZERS[name]()
    x = within(*shape, torch.bfloat16)
    column, row = quantizer.quantize(x).plane(COLUMNWISE), quantizer.quantize(x.t()).plane(ROWWISE)
    if column.format.family == "mx":
        assert torch.equal(column.data, row.data.t())
        assert torch.equal(column.scale, row.scale.t())
    else:
        for a, b in zip(column.tensors(), row.tensors(), strict=True):
            assert torch.equal(a, b)


# --- divisibility ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("quantizer", "multiple"), [(MXFP8Quantizer(), 32), (NVFP4Quantizer(), 16)])
def test_divisibility_is_a_rule_of_each_plane(quantizer, multiple):
    ragged_rows, ragged_cols = bf16(multiple + 1, multiple), bf16(multiple, multiple + 8)
    row, column = quantizer.wanting(columnwise=False), quantizer.wanting(rowwise=False)
    assert row.quantize(ragged_rows).dequantize().shape == ragged_rows.shape
    assert column.quantize(ragged_cols).dequantize().shape == ragged_cols.shape
    assert not column.is_quantizable(ragged_rows)
    assert not row.is_quantizable(ragged_cols)
    with pytest.raises(
        ShapeError, match=f"last dimension divisible by {multiple} for rowwise {quantizer.formats[0]} data"
    ) as info:
        row.quantize(ragged_cols)
    assert f"got {multiple + 8} of shape ({multiple}, {multiple + 8})" in str(info.value)
    assert f"pad it to {2 * multiple}" in str(info.value)
    with pytest.raises(ShapeError, match=f"product of the leading dimensions divisible by {multiple} for columnwise"):
        column.quantize(ragged_rows)
    with pytest.raises(ShapeError, match=r"^fc1 weight: wants"):
        quantizer.check(ragged_rows.shape, where="fc1 weight")


@pytest.mark.parametrize("rows", [1, 17, 31])
@pytest.mark.parametrize(
    "quantizer", [MXFP8Quantizer(with_2d_quantization=True), NVFP4Quantizer(with_2d_quantization=True)], ids=repr
)
def test_tiles_at_the_edge_are_partial_in_the_dimension_that_is_not_blocked(quantizer, rows):
    x = bf16(rows, 64)
    whole = torch.zeros(-(-rows // 32) * 32, 64).bfloat16()
    whole[:rows] = x
    row = quantizer.wanting(columnwise=False)
    assert torch.equal(row.quantize(x).dequantize(), row.quantize(whole).dequantize()[:rows])
    column = quantizer.wanting(rowwise=False)
    assert torch.equal(column.quantize(x.t()).dequantize(), column.quantize(whole.t()).dequantize()[:, :rows])


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (129, 257)])
@pytest.mark.parametrize("make", [delayed, QUANTIZERS["current"], QUANTIZERS["block 1d"], QUANTIZERS["block 2d"]])
def test_formats_without_a_multiple_take_any_shape(make, shape):
    x = torch.randn(shape)
    storage = make().quantize(x)
    for usage in USAGES:
        assert (storage.dequantize(usage=usage) - x).norm() <= 0.04 * x.norm()
    vector = make().quantize(x[0])
    assert vector.dequantize().shape == x[0].shape
    assert vector.matrix_shape == (1, shape[1])


# --- delayed and current scaling ------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda e: e.name)
def test_delayed_scaling_casts_with_the_given_scale_and_records_amax(dtype, element):
    x = hard(40, 24, dtype)
    quantizer = delayed(0.37, element.dtype)
    storage = quantizer.quantize(x)
    codes = casts.encode(lines(x, ROWWISE) * np.float32(0.37), element.name)
    assert same(storage.rowwise.data, codes)
    assert same(storage.columnwise.data, codes.T)
    assert storage.rowwise.scale.item() == np.float32(1) / np.float32(0.37)
    assert storage.rowwise.scale is storage.columnwise.scale
    assert quantizer.amax.item() == x.float().abs().max()
    quantizer.quantize(x / 2)
    assert quantizer.amax.item() == x.float().abs().max()
    for out in DTYPES:
        values = casts.decode(codes, element.name).astype(np.float32) * storage.rowwise.scale.cpu().numpy()
        assert torch.equal(storage.dequantize(out), torch.from_numpy(values).to(x.device, out))


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda e: e.name)
def test_r18_delayed_scaling(element):
    x = torch.randn(16, 16)
    x[0, 0], x[1, 1] = math.inf, math.nan
    quantizer = delayed(dtype=element.dtype)
    back = quantizer.quantize(x).dequantize()
    assert back[1, 1].isnan()
    assert back[0, 0].isnan() if element is E4M3 else back[0, 0] == math.inf
    assert back.isfinite().sum() == 16 * 16 - 2
    assert quantizer.amax.isnan()


@each_dtype
@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda e: e.name)
@pytest.mark.parametrize("options", [{}, {"force_pow_2_scales": True}, {"amax_epsilon": 1e38}], ids=str)
def test_current_scaling_formula(dtype, element, options):
    x = hard(40, 24, dtype)
    storage = Float8CurrentScalingQuantizer(element.dtype, **options).quantize(x)
    values = lines(x, ROWWISE)
    eps, pow2 = options.get("amax_epsilon", 0.0), options.get("force_pow_2_scales", False)
    scale = casts.fp32_scale(np.abs(values).max(), element.max, eps, pow2, casts.FLT_MAX)
    codes = casts.encode(values * scale, element.name)
    assert same(storage.rowwise.data, codes)
    assert same(storage.columnwise.data, codes.T)
    assert same(storage.rowwise.scale, np.array([np.float32(1) / scale]))
    for out in DTYPES:
        expected = casts.decode(codes, element.name).astype(np.float32) * (np.float32(1) / scale)
        assert torch.equal(storage.dequantize(out, COLUMNWISE), torch.from_numpy(expected).to(x.device, out))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2])
def test_r18_current_scaling_has_a_nan_scale(bad, dtype):
    x = torch.randn(8, 8)
    x[2, 3] = bad
    storage = Float8CurrentScalingQuantizer(dtype).quantize(x)
    assert storage.rowwise.scale.isnan()
    assert storage.dequantize().isnan().all()


@pytest.mark.parametrize("x", [torch.zeros(4, 4), torch.empty(0, 4)], ids=["zero", "empty"])
def test_current_scaling_of_nothing_has_scale_one(x):
    assert Float8CurrentScalingQuantizer(FP8).quantize(x).rowwise.scale.item() == 1


# --- options of the block formats -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pow2", [True, False])
@each_usage
def test_row_options_reach_the_cast(pow2, usage):
    x = hard(130, 200, torch.bfloat16)
    plane = Float8RowQuantizer(torch.float8_e5m2, force_pow_2_scales=pow2, amax_epsilon=1e-3).quantize(x).plane(usage)
    codes, scales = casts.row(lines(x, usage), "e5m2", eps=1e-3, pow2=pow2)
    assert same(plane.data, codes)
    assert same(plane.scale, scales)


@pytest.mark.parametrize("pow2", [True, False])
@pytest.mark.parametrize("dims", [1, 2])
@each_usage
def test_block_options_reach_the_cast(pow2, dims, usage):
    x = hard(130, 200, torch.bfloat16)
    quantizer = Float8BlockQuantizer(FP8, force_pow_2_scales=pow2, block_scaling_dim=dims, amax_epsilon=1e-3)
    plane = quantizer.quantize(x).plane(usage)
    inf_value = torch.finfo(torch.bfloat16).max
    codes, scales = casts.block(lines(x, usage), "e4m3", 1 if dims == 1 else 128, eps=1e-3, pow2=pow2, inf_value=inf_value)
    assert same(plane.data, codes)
    assert same(plane.scale, casts.store_blocks(scales, dims=dims))


RULE_OF = {"ceil": "te", "floor": "ocp_floor"}


@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("rounding", ["ceil", "floor"])
@each_usage
def test_g20_mxfp8_options_reach_the_cast(rows, rounding, usage):
    x = hard(64, 96, torch.bfloat16)
    quantizer = MXFP8Quantizer(with_2d_quantization=rows == 32, scale_rule=RULE_OF[rounding], optimize_for_gemm=True)
    plane = quantizer.quantize(x).plane(usage)
    codes, scales = casts.mx(lines(x, usage), "e4m3", rows, rounding)
    assert same(plane.data, codes.T if usage == COLUMNWISE else codes)
    assert same(plane.scale, casts.store_tiled(scales, across=usage == COLUMNWISE, swizzled=True))


@pytest.mark.few
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize(("mode", "encode_max"), [("MAE", 256), ("MSE", 256), ("MAE", 448)])
def test_nvfp4_4over6_options_reach_the_cast(rows, mode, encode_max):
    x = within(32, 48, torch.bfloat16)
    options = {} if encode_max == 256 else {"nvfp4_e4m3_max": encode_max}
    quantizer = NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_4over6_err_mode=mode, with_2d_quantization=rows == 16, **options)
    plane = quantizer.quantize(x).plane(ROWWISE)
    values = lines(x, ROWWISE)
    codes, scales = casts.nv_four_over_six(values, np.full(32, np.abs(values).max()), rows, mode, encode_max)
    assert same(plane.data, casts.pack(codes))
    assert same(plane.scale, casts.store_tiled(scales, across=False, swizzled=False))
    assert plane.format.encode_max == encode_max


def test_nvfp4_4over6_errs_less():
    x = within(64, 64, torch.float32)
    six = NVFP4Quantizer().quantize(x).dequantize()
    best = NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_4over6_err_mode="MSE").quantize(x).dequantize()
    assert (best - x).norm() < (six - x).norm()


@pytest.mark.parametrize("signs", [True, False])
def test_nvfp4_rotation_is_on_the_columnwise_plane_only(signs):
    x = bf16(64, 48)
    x[3, 5] = 50.0
    plain, rotated = NVFP4Quantizer().quantize(x), NVFP4Quantizer(**ROTATED, with_random_sign_mask=signs).quantize(x)
    equal(plain.only(ROWWISE, why=""), rotated.only(ROWWISE, why=""))
    column = rotated.plane(COLUMNWISE)
    assert column.format.rht == (SIGNS if signs else NO_SIGNS)
    values = rotate(x.t(), column.format.rht).float()
    assert column.amax.item() == values.abs().max() < plain.plane(COLUMNWISE).amax.item() == 50
    codes, scales = casts.nv(values.cpu().numpy(), np.full(48, column.amax.item(), np.float32))
    assert same(column.data, casts.pack(codes))
    assert same(column.scale, casts.store_tiled(scales, across=False, swizzled=False))
    assert (column.dequantize(torch.float32) - x.float()).norm() < 0.2 * x.float().norm()


def test_nvfp4_row_scaled_keeps_small_rows():
    x = torch.randn(32, 48) * torch.logspace(-20, 20, 32)[:, None]
    back = NVFP4Quantizer(row_scaled_nvfp4=True).quantize(x).dequantize()
    assert ((back - x).double().norm(dim=1) < 0.2 * x.double().norm(dim=1)).all()
    assert (NVFP4Quantizer().quantize(x).dequantize()[0] == 0).all()


@pytest.mark.parametrize(
    "options",
    [
        {"row_scaled_nvfp4": True, **ROTATED},
        {"row_scaled_nvfp4": True, "with_2d_quantization": True},
        {"row_scaled_nvfp4": True, "stochastic_rounding": True},
        {"row_scaled_nvfp4": True, "with_amax_reduction": True},
        {"nvfp4_use_4over6": True, **ROTATED},
        {"nvfp4_use_4over6": True, "stochastic_rounding": True},
        {"with_2d_quantization": True, **ROTATED},
        {"with_rht": True},
        {"nvfp4_4over6_err_mode": "RMS"},
        {"fp4_dtype": "e3m0"},
    ],
    ids=str,
)
def test_nvfp4_options_that_contradict_each_other(options):
    with pytest.raises(QuantizerError, match="wants"):
        NVFP4Quantizer(**options)


def test_nvfp4_rotation_wants_bf16_for_the_columnwise_plane_only():
    quantizer = NVFP4Quantizer(**ROTATED)
    assert not quantizer.is_quantizable(torch.zeros(16, 16))
    assert quantizer.wanting(columnwise=False).is_quantizable(torch.zeros(16, 16))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Float8CurrentScalingQuantizer(torch.float16),
        lambda: Float8BlockQuantizer(torch.uint8),
        lambda: Float8BlockQuantizer(FP8, block_scaling_dim=3),
        lambda: MXFP8Quantizer(scale_rule="even"),
        lambda: delayed(dtype=torch.bfloat16),
    ],
)
def test_bad_settings_name_what_is_wanted(make):
    with pytest.raises(QuantizerError, match="wants one of"):
        make()


# --- stochastic rounding --------------------------------------------------------------------------------------------------


def test_stochastic_rounding_does_not_see_the_default_dtype():
    x = bf16(32, 64)
    quantizer = NVFP4Quantizer(stochastic_rounding=True, **ROTATED)
    torch.manual_seed(5)
    want = quantizer.quantize(x)
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(5)
        equal(quantizer.quantize(x), want)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.row("U08")
def test_u08_stochastic_rounding_changes_bytes_but_not_the_format():
    x = bf16(32, 64)
    quantizer = NVFP4Quantizer(stochastic_rounding=True)
    a, b = quantizer.quantize(x), NVFP4Quantizer().quantize(x)
    assert quantizer.formats == NVFP4Quantizer().formats
    for usage in USAGES:
        assert torch.equal(a.plane(usage).scale, b.plane(usage).scale)
        assert not torch.equal(a.plane(usage).data, b.plane(usage).data)


@pytest.mark.row("U08")
@each_usage
def test_u08_what_was_rounded_stochastically_dequantizes_by_the_format_alone(usage):
    x = bf16(32, 64)
    stochastic, nearest = (NVFP4Quantizer(stochastic_rounding=flag).quantize(x).plane(usage) for flag in (True, False))
    got, wanted = stochastic.dequantize(torch.float32), nearest.dequantize(torch.float32)
    assert not torch.equal(got, wanted)
    assert torch.equal(replace(stochastic, data=nearest.data).dequantize(torch.float32), wanted)
    ones = torch.full_like(stochastic.data, 0x22)
    unit = replace(stochastic, data=ones).dequantize(torch.float32)
    codes = got / unit
    assert ((codes.abs() - codes.abs().mul(2).round() / 2).abs() < 1e-5).all()
    near = (x.float() / unit).clamp(-6, 6)
    step = torch.where(near.abs() < 2, 0.5, torch.where(near.abs() < 4, 1.0, 2.0))
    assert ((codes - near).abs() < step + 1e-5).all()


@pytest.mark.row("U08")
def test_u08_delayed_and_current_scaling_dequantize_alike():
    x = bf16(32, 64).clamp(-7, 7)
    x[0, 0] = 7
    current = Float8CurrentScalingQuantizer(FP8).quantize(x)
    later = delayed(448 / 7).quantize(x)
    assert torch.equal(later.rowwise.scale, current.rowwise.scale)
    assert torch.equal(later.rowwise.data, current.rowwise.data)
    assert torch.equal(later.dequantize(), current.dequantize())


@pytest.mark.row("H26")
def test_h26_stochastic_rounding_repeats_under_the_same_generator_state():
    x = bf16(32, 64)
    quantizer = NVFP4Quantizer(stochastic_rounding=True, **ROTATED)
    torch.manual_seed(5)
    first, second = quantizer.quantize(x), quantizer.quantize(x)
    torch.manual_seed(5)
    equal(quantizer.quantize(x), first)
    assert not torch.equal(first.rowwise.data, second.rowwise.data)
    torch.manual_seed(5)
    equal(quantizer.wanting(columnwise=False).quantize(x), first.only(ROWWISE, why=""))
    torch.manual_seed(5)
    equal(quantizer.wanting(rowwise=False).quantize(x), first.only(COLUMNWISE, why=""))


@pytest.mark.few
@pytest.mark.parametrize(
    ("value", "low", "high", "share"), [(0.3, 0.0, 0.5, 0.5977), (1.75, 1.5, 2.0, 0.5), (5.0, 4.0, 6.0, 0.5)]
)
@each_usage
def test_stochastic_rounding_statistics(value, low, high, share, usage):
    """A block with a 6 under amax 2688 has scale 1: the other values are rounded as they are."""
    x = torch.full((2048, 1024), value)
    x[:, ::16] = x[::16, :] = 6.0
    x[0, 0] = 2688.0
    storage = NVFP4Quantizer(stochastic_rounding=True).quantize(x)
    back = storage.dequantize(torch.float32, usage)[16:, 16:]
    rounded = back[x[16:, 16:] == value]
    assert set(rounded.unique().tolist()) == {low, high}
    share_high = (rounded == high).double().mean().item()
    deviation = math.sqrt(share * (1 - share) / len(rounded))
    assert abs(share_high - share) < 5 * deviation + 5e-5


def test_stochastic_rounding_means_are_the_values():
    """Whatever the value, the mean over many elements is it, to the 256th of a step that 8 bits resolve."""
    x = torch.linspace(-6, 6, 480).repeat(4096, 1)
    x[:, ::16] = 6.0
    x[0, 0] = 2688.0
    back = NVFP4Quantizer(stochastic_rounding=True, columnwise=False).quantize(x).dequantize()
    means, wanted = back[1:].double().mean(0), x[1].double()
    step = torch.where(wanted.abs() < 2, 0.5, torch.where(wanted.abs() < 4, 1.0, 2.0))
    assert ((means - wanted).abs() < step / 256 + 5 * step / 2 / math.sqrt(4095)).all()
    nearest = NVFP4Quantizer().quantize(x).dequantize()[1].double()
    assert ((nearest - wanted).abs() > step / 8).double().mean() > 0.3


# --- identity and hybrid --------------------------------------------------------------------------------------------------


@pytest.mark.row("H07")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_h07_identity_planes_are_the_tensor_itself(dtype):
    x = torch.randn(2, 3, 5, dtype=dtype).transpose(0, 1)
    storage = IdentityQuantizer().quantize(x)
    assert storage.rowwise.data is x
    assert storage.columnwise.data is x
    assert storage.dequantize() is x
    assert storage.dequantize(usage=COLUMNWISE) is x
    assert storage.rowwise.shape == (6, 5)
    assert storage.nbytes == x.nbytes
    assert storage.format == IDENTITY


@pytest.mark.row("H07")
def test_h07_identity_with_a_dtype_casts_once():
    x = torch.randn(4, 5)
    storage = IdentityQuantizer(dtype=torch.bfloat16).quantize(x)
    assert storage.rowwise.data is storage.columnwise.data
    assert torch.equal(storage.rowwise.data, x.bfloat16())
    assert storage.dequantize().dtype == torch.float32
    assert IdentityQuantizer(dtype=torch.float32).quantize(x).rowwise.data is x


@pytest.mark.row("H01", "H02")
def test_h01_h02_hybrid_has_a_format_for_each_direction():
    x = bf16(64, 96)
    storage = HybridQuantizer(MXFP8Quantizer(), NVFP4Quantizer(with_2d_quantization=True)).quantize(x)
    equal(storage.only(ROWWISE, why=""), MXFP8Quantizer(columnwise=False).quantize(x))
    equal(storage.only(COLUMNWISE, why=""), NVFP4Quantizer(with_2d_quantization=True, rowwise=False).quantize(x))
    assert [storage.plane(usage).format for usage in USAGES] == [mxfp8(E4M3), NVFP4]
    assert storage.format == mxfp8(E4M3)
    assert torch.equal(storage.dequantize(), MXFP8Quantizer().quantize(x).dequantize())


@pytest.mark.row("H12")
@pytest.mark.parametrize("name", [name for name in QUANTIZERS if "hybrid" not in name])
def test_h12_hybrid_of_equal_formats_is_the_plain_quantizer(name):
    x = bf16(64, 96)
    equal(HybridQuantizer(QUANTIZERS[name](), QUANTIZERS[name]()).quantize(x), QUANTIZERS[name]().quantize(x))


class Spy(Quantizer):
    """An identity quantizer that tells which directions it was asked for."""

    asked: list = []
    formats = (IDENTITY, IDENTITY)

    def _planes(self, x):
        Spy.asked.append(self.usages)
        return IdentityQuantizer(rowwise=self.rowwise, columnwise=self.columnwise)._planes(x)

    def _empty_planes(self, shape, dtype, device):
        return self._planes(torch.zeros(shape, dtype=dtype, device=device))


@pytest.mark.row("H03")
@pytest.mark.parametrize(
    ("wanted", "source", "asked"),
    [
        ({}, "original", [(ROWWISE,), (COLUMNWISE,)]),
        ({"columnwise": False}, "original", [(ROWWISE,)]),
        ({"rowwise": False}, "original", [(COLUMNWISE,)]),
        ({"columnwise": False}, "rowwise_dequantized", [(ROWWISE,)]),
        ({"rowwise": False}, "rowwise_dequantized", [(ROWWISE,), (COLUMNWISE,)]),
    ],
)
def test_h03_hybrid_casts_only_what_it_is_asked_for(wanted, source, asked):
    Spy.asked = []
    storage = HybridQuantizer(Spy(), Spy(), columnwise_source=source, **wanted).quantize(bf16(4, 4))
    assert Spy.asked == asked
    assert storage.usages == tuple(usage for usage in USAGES if wanted.get(usage, True))


@pytest.mark.row("H04")
def test_h04_hybrid_pins_its_quantizers_to_their_directions():
    row, column = MXFP8Quantizer(rowwise=False), NVFP4Quantizer()
    hybrid = HybridQuantizer(row, column, columnwise=False)
    assert hybrid.rowwise_quantizer.usages == (ROWWISE,)
    assert hybrid.columnwise_quantizer.usages == (COLUMNWISE,)
    assert column.usages == USAGES, "the caller's quantizer is left alone"
    assert hybrid.wanting(columnwise=True).columnwise_quantizer.usages == (COLUMNWISE,)


@pytest.mark.row("H05")
def test_h05_hybrid_errors():
    quantizer = MXFP8Quantizer()
    with pytest.raises(TypeError, match="HybridQuantizer columnwise_quantizer: wants a Quantizer, got str"):
        HybridQuantizer(quantizer, "mxfp8")
    with pytest.raises(TypeError, match="got NoneType"):
        HybridQuantizer(None, quantizer)
    with pytest.raises(TypeError, match="got ABCMeta"):
        HybridQuantizer(MXFP8Quantizer, quantizer)
    with pytest.raises(ValueError, match="the same object twice"):
        HybridQuantizer(quantizer, quantizer)
    with pytest.raises(ValueError, match="columnwise_source: wants one of original, rowwise_dequantized, got colwise"):
        HybridQuantizer(quantizer, quantizer.copy(), columnwise_source="colwise")


@pytest.mark.row("H06")
@pytest.mark.parametrize("column", [MXFP8Quantizer, NVFP4Quantizer, IdentityQuantizer, QUANTIZERS["block 1d"]])
@pytest.mark.parametrize("row", [MXFP8Quantizer, QUANTIZERS["current"], QUANTIZERS["block 2d"]])
def test_h06_columnwise_of_what_the_rowwise_plane_holds(row, column):
    x = bf16(2, 32, 96)
    storage = HybridQuantizer(row(), column(), columnwise_source="rowwise_dequantized").quantize(x)
    again = row(columnwise=False).quantize(x).dequantize()
    equal(storage.only(COLUMNWISE, why=""), column(rowwise=False).quantize(again))


@pytest.mark.row("H29")
def test_h29_dropping_planes_fails_before_anything_changes():
    storage = MXFP8Quantizer(columnwise=False).quantize(bf16(32, 32))
    with pytest.raises(MissingPlaneError, match="MXFP8Quantizer was asked for rowwise data only"):
        storage.only(COLUMNWISE, why="")
    assert storage.usages == (ROWWISE,)


# --- amax over a group ----------------------------------------------------------------------------------------------------


def _rank(rank, path, results):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    x = torch.full((16, 16), 1.0 + rank).bfloat16()
    current = Float8CurrentScalingQuantizer(FP8, with_amax_reduction=True).quantize(x)
    nv = NVFP4Quantizer(with_amax_reduction=True, **ROTATED).quantize(x)
    alone = Float8CurrentScalingQuantizer(FP8).quantize(x)
    nan = Float8CurrentScalingQuantizer(FP8, with_amax_reduction=True).quantize(x if rank else x * math.nan)
    results[rank] = [
        t.item() for t in (current.rowwise.scale, nv.rowwise.amax, nv.columnwise.amax, alone.rowwise.scale, nan.rowwise.scale)
    ]
    dist.destroy_process_group()


def test_r17_amax_is_reduced_over_the_group(tmp_path):
    with mp.Manager() as manager:
        results = manager.dict()
        run_ranks(_rank, str(tmp_path / "store"), results)
        first, second = results[0], results[1]
    assert first[:2] == second[:2] == [np.float32(1) / np.float32(224), 2.0]
    assert first[2] == second[2] == 4.0  # sixteen twos add up to at most 16 under the signs; over 4
    assert [first[3], second[3]] == [np.float32(1) / np.float32(448), np.float32(1) / np.float32(224)]
    assert math.isnan(first[4])
    assert math.isnan(second[4])


def test_amax_reduction_is_inert_without_a_process_group():
    x = bf16(16, 16)
    equal(
        Float8CurrentScalingQuantizer(FP8, with_amax_reduction=True).quantize(x), Float8CurrentScalingQuantizer(FP8).quantize(x)
    )


@pytest.mark.parametrize("name", ["current", "current e5m2 pow2", "nvfp4", "nvfp4 2d", "nvfp4 4over6"])
def test_casts_of_one_tensor_share_its_amax(name):
    """The second cast reads what the first has found, whatever it gets; the bits are those of casts on their own."""
    quantizer, x, shared = QUANTIZERS[name](), torch.randn(64, 64), SharedAmax()
    first = quantizer.wanting(columnwise=False).sharing(shared).quantize(x)
    assert torch.equal(shared.amax, x.abs().amax().reshape(1))
    columns = quantizer.wanting(rowwise=False).sharing(shared)
    for made, wanted in zip(
        (first.rowwise, columns.quantize(x).columnwise),
        (quantizer.quantize(x).rowwise, quantizer.quantize(x).columnwise),
        strict=True,
    ):
        assert all(map(torch.equal, made.tensors(), wanted.tensors()))
    encoding = columns.encoding(x.shape, x.dtype)
    assert all(map(torch.equal, encoding(x)[0], quantizer.wanting(rowwise=False).encoding(x.shape, x.dtype)(x)[0]))
    smaller = columns.quantize(x / 8).columnwise.tensors(), quantizer.quantize(x / 8).columnwise.tensors()
    assert not all(map(torch.equal, *smaller))


def test_amaxes_of_groups_are_kept_all_or_none():
    shared = SharedAmax()
    first, second = shared.apart(2)
    first.amax = torch.ones(1)
    assert shared.tensors() == []  # of which nobody could tell whose it is
    second.amax = torch.full((1,), 2.0)
    again = SharedAmax.of(shared.tensors())
    assert [each.amax.item() for each in again.apart(2)] == [1, 2]
    assert [each.amax.item() for each in SharedAmax.of([torch.tensor([1.0, 2.0])]).apart(2)] == [1, 2]  # found by one kernel


def test_an_amax_is_shared_only_where_all_scales_follow_from_it():
    for name in ("nvfp4 rotated", "nvfp4 row scaled", "mxfp8", "block 1d", "delayed"):
        assert QUANTIZERS[name]().sharing(SharedAmax()) is None
