"""Scale rules against their golden vectors and closed forms."""

import math

import pytest
import torch

from opfuse.formats import E2M1, E4M3, E5M2
from opfuse.numerics.scalars import FLT_MAX, encode, pack_e2m1
from opfuse.numerics.scales import (
    amax,
    are_pow2,
    decode_scale,
    divide,
    e8m0_from_amax,
    e8m0_of_pow2,
    nvfp4_block_scale,
    nvfp4_global_scale,
    nvfp4_multiplier,
    scale_from_amax,
)

INF, NAN = math.inf, math.nan


def f32(*values):
    return torch.tensor(values, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_amax_is_exact_and_keeps_nonfinite(dtype):
    x = (torch.randn(6, 4, 5) * 100).to(dtype)
    assert torch.equal(amax(x), x.float().abs().max())
    assert torch.equal(amax(x, 1), x.float().abs().amax(1))
    assert torch.equal(amax(x, (0, 2)), x.float().abs().amax((0, 2)))
    assert torch.equal(amax(x.transpose(0, 2)), amax(x))
    x[0, 0, 0], x[1, 0, 0] = -INF, NAN
    largest = amax(x, (1, 2))
    assert largest[0] == INF
    assert largest[1].isnan()
    assert amax(x).isnan()
    assert largest[2:].isfinite().all()


def test_r10_amax_of_nothing_is_zero():
    assert amax(torch.empty(0, 4)).item() == 0
    assert amax(torch.empty(3, 0), 1).tolist() == [0, 0, 0]
    assert amax(torch.empty(0, 4), 1).shape == (0,)


def test_amax_of_subnormals():
    assert amax(f32(1e-45, -3e-45)).view(torch.int32).item() == 2


def test_scale_golden():
    largest = f32(1, 3, 448, 1e-38, 0, INF, NAN)
    assert scale_from_amax(largest, 448.0).tolist() == f32(448, 149.33333, 1, FLT_MAX, 1, 1, 1).tolist()
    assert scale_from_amax(largest, 448.0, pow2=True).tolist() == f32(256, 128, 1, 1.7014118e38, 1, 1, 1).tolist()


def test_scale_order_of_eps_guard_division_overflow_pow2():
    assert scale_from_amax(f32(0, 1e-3, 2), 448.0, eps=1.0).tolist() == [448, 448, 224]
    bf16_max = torch.finfo(torch.bfloat16).max
    assert scale_from_amax(f32(1e-38), 448.0, inf_value=bf16_max).item() == bf16_max
    assert scale_from_amax(f32(1e-38), 448.0, inf_value=bf16_max, pow2=True).item() == 2.0**127
    assert scale_from_amax(f32(NAN), 448.0, eps=1.0).item() == 1
    assert scale_from_amax(f32(1e-45), 57344.0).item() == torch.tensor(FLT_MAX).item()


def test_scale_divides_with_one_rounding():
    """A reciprocal and a product would round twice: amax 1.75 * 2^k must give exactly 2^(8 - k)."""
    largest = 1.75 * torch.exp2(torch.arange(-100, 100).float())
    assert torch.equal(scale_from_amax(largest, 448.0), torch.exp2(8 - torch.arange(-100, 100).float()))
    x = torch.rand(10_000) * 100
    assert torch.equal(divide(x, 6.0).double(), (x.double() / 6).float().double())
    assert torch.equal(scale_from_amax(x + 1, 448.0), (448 / (x + 1).double()).float())


def test_r18_decode_scale_shows_nonfinite():
    largest = f32(1, 0, INF, NAN)
    scale = scale_from_amax(largest, 448.0)
    shown = decode_scale(scale, largest)
    assert shown[:2].tolist() == [f32(1 / 448).item(), 1]
    assert shown[2:].isnan().all()


def test_e8m0_golden_and_nonfinite():
    largest = f32(0, 1, 3.5, 3.5000002, 447.9, 448, 449, 1e-30, 448 * 2**-127, 1e-44, 3e38, INF, NAN)
    assert e8m0_from_amax(largest, E4M3).tolist() == [0, 119, 120, 121, 127, 127, 128, 19, 0, 0, 247, 255, 255]


def test_e8m0_closed_form_for_every_bf16_amax():
    """From the bits b: max(((b + 0x1f) >> 7) - 8, 0), and 255 from 0x7f80 on."""
    b = torch.arange(0x8000, dtype=torch.int32)
    largest = (b << 16).view(torch.float32)
    expected = torch.where(b >= 0x7F80, 255, (((b + 0x1F) >> 7) - 8).clamp(min=0))
    assert torch.equal(e8m0_from_amax(largest, E4M3).int(), expected)


def test_e8m0_of_powers_of_two_golden():
    """All that a quantizer makes is exact, the subnormal 2^-127 too; what is no such power is NaN, and zero stands in padding."""
    scales = f32(2.0**-127, 2.0**-126, 1, 2.0**127, 0, NAN, 3, -1, INF, 2.0**-128, 1e-45, 1.5 * 2.0**-127)
    assert e8m0_of_pow2(scales).tolist() == [0, 1, 127, 254, 0, 255, 255, 255, 255, 255, 255, 255]
    assert are_pow2(scales[:6])
    assert not any(are_pow2(scale) for scale in scales[6:])
    amaxes = torch.cat((torch.logspace(-44, 38, 500, dtype=torch.float64).float(), f32(1e-45, 3.4e38, 0, INF, NAN)))
    for largest in (E4M3.max, E5M2.max):
        decoded = decode_scale(scale_from_amax(amaxes, largest, pow2=True), amaxes)
        assert are_pow2(decoded)
        finite = amaxes.isfinite()
        assert torch.equal(torch.exp2(e8m0_of_pow2(decoded[finite]).double() - 127).float(), decoded[finite])


@pytest.mark.parametrize(("element", "top"), [(E4M3, 8), (E5M2, 15)])
def test_e8m0_floor_is_the_ocp_rule(element, top):
    exponents = torch.arange(-126, 128)
    for mantissa in (1.0, 1.25, 1.9999):
        codes = e8m0_from_amax(mantissa * torch.exp2(exponents.float()), element, "floor")
        assert codes.tolist() == [max(e - top + 127, 0) for e in exponents.tolist()]
    assert e8m0_from_amax(f32(0, 1e-45, INF, NAN), element, "floor").tolist() == [0, 0, 255, 255]


@pytest.mark.parametrize("element", [E4M3, E5M2])
def test_e8m0_ceil_never_saturates(element):
    largest = torch.rand(10_000) * torch.exp2(torch.randint(-100, 100, (10_000,)).float())
    decoded = torch.exp2(e8m0_from_amax(largest, element).double() - 127)
    # fl32(1/max) may round down: at most half an ulp above the maximum, which still rounds to it
    assert (largest.double() / decoded <= element.max * (1 + 2**-23)).all()


def test_nvfp4_golden_block():
    x = (torch.arange(16) * 0.1 - 0.7).float()
    level = nvfp4_global_scale(f32(2.5), 448)
    byte = nvfp4_block_scale(amax(x).reshape(1), level)
    inverse = nvfp4_multiplier(byte, level)
    codes = encode(x * inverse, E2M1)
    assert level.item() == pytest.approx(1075.2)
    assert byte.item() == 0x71
    assert inverse.item() == pytest.approx(7.466666, rel=1e-6)
    assert codes.tolist() == [15, 14, 14, 13, 12, 11, 9, 0, 1, 3, 4, 5, 6, 6, 7, 7]
    assert pack_e2m1(codes).tolist() == [239, 222, 188, 9, 49, 84, 102, 119]


def test_nvfp4_global_scale_is_one_where_the_quotient_is_no_positive_number():
    assert nvfp4_global_scale(f32(0, 1e-37, INF, NAN, 2688), 448).tolist() == [1, 1, 1, 1, 1]
    assert nvfp4_global_scale(f32(1, 1), 256).tolist() == [1536, 1536]


def test_nvfp4_multiplier_is_finite_for_a_zero_scale_and_nan_for_a_nan_scale():
    inverse = nvfp4_multiplier(torch.tensor([0, 0x7F], dtype=torch.uint8), f32(1.0))
    assert inverse[0].item() == f32(FLT_MAX).item()
    assert inverse[1].isnan()
    assert nvfp4_block_scale(f32(INF, NAN, 6), f32(1.0)).tolist() == [0x7F, 0x7F, 0x38]
