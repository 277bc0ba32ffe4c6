"""Conversions of single values against tables of the formats and against nearest values found in fp64."""

import numpy as np
import pytest
import torch

from opfuse.formats import E2M1, E4M3, E5M2, ELEMENTS
from opfuse.numerics.scalars import (
    decode,
    decode_e8m0,
    e8m0_multiplier,
    encode,
    encode_e2m1_stochastic,
    encode_e8m0,
    encode_nonfinite,
    fl32,
    pack_e2m1,
    unpack_e2m1,
)
from tests.oracles import casts

INF, NAN = float("inf"), float("nan")


def f32(*values):
    return torch.tensor(values, dtype=torch.float32)


def any_fp32(count):
    """fp32 values of random bits: all exponents, subnormals, inf, NaN."""
    special = f32(0.0, -0.0, INF, -INF, NAN, 1e-45, -1e-45)
    return torch.cat([torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32).view(torch.float32), special])


@pytest.mark.parametrize(
    ("element", "value", "code"),
    [
        (E4M3, 448.0, 0x7E),
        (E4M3, 464.0, 0x7E),
        (E4M3, 464.1, 0x7E),
        (E4M3, 480.0, 0x7E),
        (E4M3, INF, 0x7E),
        (E4M3, -INF, 0xFE),
        (E4M3, NAN, 0x7F),
        (E4M3, 2**-9, 0x01),
        (E4M3, 2**-10, 0x00),
        (E4M3, -(2**-10), 0x80),
        (E4M3, 1.5 * 2**-10, 0x01),
        (E4M3, 0.1, 0x1D),
        (E4M3, -0.1, 0x9D),
        (E4M3, -0.0, 0x80),
        (E5M2, 57344.0, 0x7B),
        (E5M2, 61440.0, 0x7B),
        (E5M2, INF, 0x7B),
        (E5M2, NAN, 0x7F),
        (E5M2, 2**-16, 0x01),
        (E5M2, 2**-17, 0x00),
        (E5M2, 0.1, 0x2E),
        (E2M1, -0.0, 0x8),
        (E2M1, INF, 0x7),
        (E2M1, NAN, 0x7),
    ],
)
def test_encode_golden_and_saturation(element, value, code):
    assert encode(f32(value), element).item() == code


def test_encode_e2m1_boundaries():
    ties = f32(0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
    assert decode(encode(ties, E2M1), E2M1).tolist() == [0, 1, 1, 2, 2, 4, 4]
    after = torch.nextafter(ties, torch.full_like(ties, 9))
    assert decode(encode(after, E2M1), E2M1).tolist() == [0.5, 1, 1.5, 2, 3, 4, 6]
    before = torch.nextafter(ties, torch.zeros_like(ties))
    assert decode(encode(before, E2M1), E2M1).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4]


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)
@pytest.mark.parametrize("spread", ["any bits", "near the range"])
def test_encode_is_the_nearest_value(element, spread):
    x = any_fp32(200_000)
    if spread == "near the range":
        x = torch.randn(200_000) * torch.exp2(torch.randint(-20, 18, (200_000,)).float())
    assert np.array_equal(encode(x, element).numpy(), casts.encode(x.numpy(), element.name))


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)
def test_decode_every_code(element):
    codes = torch.arange(1 << element.bits, dtype=torch.uint8)
    values = decode(codes, element)
    assert values.dtype == torch.float32
    finite = (codes & ((1 << element.bits - 1) - 1)) <= element.max_code
    expected = casts.decode(codes.numpy(), element.name)
    assert np.array_equal(values[finite].numpy(), expected[finite.numpy()])
    assert torch.equal(torch.signbit(values[finite]), codes[finite] >> (element.bits - 1) != 0)
    others = values[~finite]
    assert others.isnan().sum() + others.isinf().sum() == len(others)
    assert others.isinf().sum() == (2 if element is E5M2 else 0)
    assert torch.equal(encode(values[finite], element), codes[finite])


def test_r18_nonfinite_codes():
    x = f32(INF, -INF, NAN)
    assert encode_nonfinite(x, E4M3).tolist() == [0x7F] * 3
    assert encode_nonfinite(x, E5M2).tolist() == [0x7C, 0xFC, 0x7F]
    assert decode(encode_nonfinite(x, E5M2), E5M2)[:2].tolist() == [INF, -INF]


def test_encode_e8m0_golden_codes():
    amax = f32(0, 1, 3.5, 3.5000002, 447.9, 448, 449, 1e-30, 448 * 2**-127, 1e-44, 3e38, INF, NAN)
    codes = encode_e8m0(amax * fl32(1 / 448)).tolist()
    assert codes == [0, 119, 120, 121, 127, 127, 128, 19, 0, 0, 247, 254, 255]
    # Appendix A: up, not to nearest; and zero is code 0.
    assert encode_e8m0(f32(1.1, 1.0, 0.0, 2**-127, 2**-126, 1.5 * 2**-127, 3.4e38)).tolist() == [128, 127, 0, 0, 1, 1, 254]


def test_encode_e8m0_is_the_least_power_of_two_not_below():
    v = any_fp32(100_000).abs()
    v = v[v.isfinite()]
    code = encode_e8m0(v).to(torch.float64)
    wanted = torch.ceil(torch.log2(v.double())) + 127
    exact = (torch.exp2(wanted - 128) < v.double()) & (v.double() <= torch.exp2(wanted - 127))
    inside = exact & (wanted >= 0) & (wanted <= 254)
    assert inside.sum() > 90_000
    assert torch.equal(code[inside], wanted[inside])
    assert (code[wanted > 254] == 254).all()
    assert (code[wanted < 0] == 0).all()


@pytest.mark.row("D07")
def test_d07_e8m0_values_are_exact_powers_of_two():
    codes = torch.arange(256, dtype=torch.uint8)
    expected = torch.exp2(torch.arange(255, dtype=torch.float64) - 127)
    assert torch.equal(decode_e8m0(codes)[:255].double(), expected)
    assert torch.equal(e8m0_multiplier(codes)[:255].double(), 1 / expected)
    assert decode_e8m0(codes)[255].isnan()
    assert e8m0_multiplier(codes)[255].isnan()
    assert decode_e8m0(codes)[0].view(torch.int32).item() == 0x00400000


def test_pack_puts_the_even_index_low():
    codes = torch.tensor([[15, 14, 14, 13, 12, 11, 9, 0, 1, 3, 4, 5, 6, 6, 7, 7]], dtype=torch.uint8)
    packed = pack_e2m1(codes)
    assert packed.tolist() == [[239, 222, 188, 9, 49, 84, 102, 119]]
    assert torch.equal(unpack_e2m1(packed), codes)
    assert unpack_e2m1(pack_e2m1(codes[:0])).shape == (0, 16)


@pytest.mark.parametrize(
    ("value", "shares"),
    [
        (0.3, {0.0: 103, 0.5: 153}),
        (-0.3, {-0.0: 103, -0.5: 153}),
        (1.75, {1.5: 128, 2.0: 128}),
        (5.0, {4.0: 128, 6.0: 128}),
        (3.25, {3.0: 192, 4.0: 64}),
        (2.0, {2.0: 256}),
        (7.0, {6.0: 256}),
        (INF, {6.0: 256}),
        (-INF, {-6.0: 256}),
        (NAN, {6.0: 256}),
        (0.0, {0.0: 256}),
    ],
)
def test_stochastic_rounding_shares_of_the_256_random_bytes(value, shares):
    """All 256 bytes once: P(0.3 -> 0) = 103/256 = .4023, P(0.3 -> .5) = .5977."""
    rounded = decode(encode_e2m1_stochastic(torch.full((256,), value), torch.arange(256)), E2M1)
    assert {v: int((rounded == v).sum()) for v in shares} == shares
    assert torch.signbit(rounded).all() == (value < 0)
