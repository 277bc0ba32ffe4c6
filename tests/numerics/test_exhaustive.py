"""Every bf16 and fp16 value, and patterns over all of fp32, through the package's scalar rules and two independent oracles."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from opfuse import formats
from opfuse.numerics import philox, scalars, scales
from tests.oracles import gfloat_oracle, inputs, integer, third
from tests.oracles.rules import CASES, MAX, SOURCED, amax_arrangements, check_equal
from tests.turns import in_turn

ELEMENTS = tuple(formats.ELEMENTS)
SIXTEEN_BITS = ("bf16", "fp16")


def floats(bits: np.ndarray | int) -> torch.Tensor:
    """fp32 tensor of the given bits."""
    return torch.from_numpy(np.array(bits, np.uint32, ndmin=1).view(np.int32)).view(torch.float32)


def bits_of(x: torch.Tensor) -> np.ndarray:
    """The bits of an fp32 tensor."""
    return x.contiguous().view(torch.int32).numpy().view(np.uint32)


def value(bits: int) -> float:
    """The number with these fp32 bits."""
    return float(floats(bits)[0])


# The package's torch reference, with the functions of an oracle.
package = SimpleNamespace(
    encode=lambda x, name: scalars.encode(floats(x), formats.ELEMENTS[name]).numpy(),
    encode_e2m1_stochastic=lambda x, r: scalars.encode_e2m1_stochastic(floats(x), torch.tensor(r)).numpy(),
    decode=lambda codes, name: bits_of(scalars.decode(torch.from_numpy(codes), formats.ELEMENTS[name])),
    encode_e8m0=lambda v: scalars.encode_e8m0(floats(v)).numpy(),
    decode_e8m0=lambda codes: bits_of(scalars.decode_e8m0(torch.from_numpy(codes))),
    e8m0_multiplier=lambda codes: bits_of(scalars.e8m0_multiplier(torch.from_numpy(codes))),
    multiply=lambda a, b: bits_of(floats(a) * floats(b)),
    scale_from_amax=lambda amax, largest, eps=0, pow2=False, inf_value=integer.LARGEST: bits_of(
        scales.scale_from_amax(floats(amax), value(largest), eps=value(eps), pow2=pow2, inf_value=value(inf_value))
    ),
    decode_scale=lambda scale, amax: bits_of(scales.decode_scale(floats(scale), floats(amax))),
    e8m0_from_amax=lambda amax, name, rounding="ceil": scales.e8m0_from_amax(
        floats(amax), formats.ELEMENTS[name], rounding=rounding
    ).numpy(),
    nvfp4_global_scale=lambda amax, encode_max: bits_of(scales.nvfp4_global_scale(floats(amax), encode_max)),
    nvfp4_block_scale=lambda amax, scale: scales.nvfp4_block_scale(floats(amax), floats(scale)).numpy(),
    nvfp4_multiplier=lambda code, scale: bits_of(scales.nvfp4_multiplier(torch.from_numpy(code), floats(scale))),
)


def check_casts(x: np.ndarray, element: str) -> None:
    """Package == integer oracle == gfloat == ml_dtypes (in its range) on the codes of ``x``."""
    want = integer.encode(x, element)
    check_equal(package.encode(x, element), want, x)
    check_equal(gfloat_oracle.encode(x, element), want, x)
    inside = third.in_range(x, element)
    check_equal(third.encode(x[inside], element), want[inside], x[inside])


@pytest.mark.parametrize("source", SIXTEEN_BITS)
@pytest.mark.parametrize("element", ELEMENTS)
def test_r1_r3_every_16_bit_input_encodes_as_the_oracles_say(element, source):
    check_casts(inputs.ALL[source](), element)


@pytest.mark.few
@pytest.mark.parametrize("low", inputs.LOW_12_BITS)
@pytest.mark.parametrize("element", ELEMENTS)
def test_r2_r3_fp32_patterns_encode_as_the_oracles_say(element, low):
    check_casts(inputs.fp32_patterns(low), element)


@pytest.mark.parametrize("element", ELEMENTS)
def test_r2_r3_fp32_edges_encode_as_the_oracles_say(element):
    check_casts(inputs.fp32_edges(), element)


@pytest.mark.parametrize("element", ELEMENTS)
def test_r1_r3_every_code_decodes_as_the_oracles_say(element):
    codes = np.arange(1 << formats.ELEMENTS[element].bits, dtype=np.uint8)
    want = integer.decode(codes, element)
    check_equal(
        (package.decode(codes, element), gfloat_oracle.decode(codes, element), third.decode(codes, element)), (want,) * 3, codes
    )


@pytest.mark.few
@pytest.mark.parametrize("name", SIXTEEN_BITS)
@pytest.mark.parametrize("low", inputs.LOW_12_BITS)
def test_r3_oracles_agree_on_the_rounding_to_16_bits(name, low):
    x = inputs.fp32_patterns(low)[:: 1 << 2]
    x = np.concatenate([x, inputs.fp32_edges()])
    want = integer.encode(x, name)
    check_equal(gfloat_oracle.encode(x, name), want, x)
    number = third.in_range(x, name)
    check_equal(third.encode(x[number], name), want[number], x[number])


@pytest.mark.parametrize(("name", "source"), in_turn(SOURCED, of=2))
def test_r1_r3_every_scale_rule_casts_every_16_bit_input_as_the_oracles_say(name, source):
    x = inputs.ALL[source]()
    for amax in amax_arrangements(x):
        want = CASES[name].run(integer, x, amax)
        check_equal(CASES[name].run(package, x, amax), want, x, amax)
        check_equal(CASES[name].run(gfloat_oracle, x, amax), want, x, amax)


@pytest.mark.slow
@pytest.mark.parametrize("low", inputs.LOW_12_BITS)
@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith("fp16")])
def test_r2_every_scale_rule_casts_all_fp32_patterns_as_the_oracle_says(name, low):
    x = inputs.fp32_patterns(low)
    amax = np.random.default_rng(low).permutation(x) & np.uint32(integer.MAGNITUDE)
    check_equal(CASES[name].run(package, x, amax), CASES[name].run(integer, x, amax), x, amax)


@pytest.mark.few
@pytest.mark.parametrize("low", inputs.LOW_12_BITS[::2])
@pytest.mark.parametrize("name", ["tensor_e4m3", "tensor_e5m2_pow2", "mx_e4m3_ceil", "mx_e5m2_floor", "nvfp4_448"])
def test_r2_r3_scale_rules_cast_fp32_patterns_as_the_oracles_say(name, low):
    x = np.concatenate([inputs.fp32_patterns(low)[:: 1 << 4], inputs.fp32_edges()])
    amax = np.random.default_rng(low).permutation(x) & np.uint32(integer.MAGNITUDE)
    want = CASES[name].run(integer, x, amax)
    check_equal(CASES[name].run(package, x, amax), want, x, amax)
    check_equal(CASES[name].run(gfloat_oracle, x, amax), want, x, amax)


@pytest.mark.parametrize("source", SIXTEEN_BITS)
def test_r1_r3_stochastic_e2m1_of_every_16_bit_input(source):
    x = inputs.ALL[source]()
    for byte in (0, 1, 63, 127, 128, 129, 254, 255):
        want = integer.encode_e2m1_stochastic(x, byte)
        check_equal(package.encode_e2m1_stochastic(x, byte), want, x)
        check_equal(gfloat_oracle.encode_e2m1_stochastic(x, byte), want, x)


def test_r2_r3_e8m0_codes_of_fp32_patterns():
    for low in inputs.LOW_12_BITS:
        v = inputs.fp32_patterns(low)[: 2**19]
        want = integer.encode_e8m0(v)
        check_equal((package.encode_e8m0(v), gfloat_oracle.encode_e8m0(v)), (want, want), v)


def test_r1_r3_every_e8m0_code_decodes_and_multiplies_as_the_oracles_say():
    codes = np.arange(256, dtype=np.uint8)
    for name in ("decode_e8m0", "e8m0_multiplier"):
        want = getattr(integer, name)(codes)
        check_equal((getattr(package, name)(codes), getattr(gfloat_oracle, name)(codes)), (want, want), codes)


def test_r3_the_oracles_arithmetic_is_ieee():
    """Product and quotient of the integer oracle, gfloat's and the machine's: 2^20 random pairs of bits and the edges."""
    rng = np.random.default_rng(3)
    edges = inputs.fp32_edges()
    a = np.concatenate([rng.integers(0, 2**32, 2**20, dtype=np.uint32), edges, edges])
    b = np.concatenate([rng.integers(0, 2**32, 2**20, dtype=np.uint32), rng.permutation(edges), edges])
    with np.errstate(all="ignore"):
        product, quotient = a.view(np.float32) * b.view(np.float32), a.view(np.float32) / b.view(np.float32)
    machine = product.view(np.uint32), quotient.view(np.uint32)
    for oracle in (integer, gfloat_oracle):
        check_equal((oracle.multiply(a, b), oracle.divide(a, b)), machine, a, b)


def test_the_comparison_finds_one_changed_bit():
    x = inputs.all_bf16()
    codes = integer.encode(x, "e4m3")
    codes[12345] ^= 1
    with pytest.raises(AssertionError, match=r"1 of 65536 differ, first \[12345\]"):
        check_equal(codes, integer.encode(x, "e4m3"), x)


def test_amax_is_the_largest_magnitude_and_keeps_inf_and_nan():
    for source in SIXTEEN_BITS:
        x = np.random.default_rng(5).permutation(inputs.ALL[source]()).reshape(512, 128)
        want = (x & np.uint32(integer.MAGNITUDE)).max(axis=1)
        check_equal(bits_of(scales.amax(floats(x), 1)), want)
        assert np.isnan(bits_of(scales.amax(floats(x))).view(np.float32))


def test_e8m0_code_from_bf16_bits_is_the_rule_for_all_32640_finite_amax():
    """numerics 3.15."""
    b = np.arange(0x7F80, dtype=np.int64)
    code = np.maximum((b + 0x1F >> 7) - 8, 0).astype(np.uint8)
    amax = b.astype(np.uint32) << np.uint32(16)
    infinite = np.arange(0x7F80, 0x8000, dtype=np.uint32) << np.uint32(16)
    assert code.size == 32640
    for implementation in (package, integer, gfloat_oracle):
        check_equal(implementation.e8m0_from_amax(amax, "e4m3"), code, amax)
        assert (implementation.e8m0_from_amax(infinite, "e4m3") == 255).all()


IMPLEMENTATIONS = pytest.mark.parametrize("by", [package, integer, gfloat_oracle], ids=["package", "integer", "gfloat"])
INF, NAN = float("inf"), float("nan")


def fp32(*values: float) -> np.ndarray:
    """The bits of values rounded to fp32."""
    return np.array(values, np.float32).view(np.uint32)


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("element", "given", "code"),
    [
        ("e4m3", 464.0, 0x7E),
        ("e4m3", 464.00003, 0x7E),
        ("e4m3", -1e30, 0xFE),
        ("e4m3", INF, 0x7E),
        ("e4m3", -INF, 0xFE),
        ("e4m3", NAN, 0x7F),
        ("e4m3", -NAN, 0x7F),
        ("e4m3", -0.0, 0x80),
        ("e5m2", 61440.0, 0x7B),
        ("e5m2", 1e30, 0x7B),
        ("e5m2", INF, 0x7B),
        ("e5m2", -INF, 0xFB),
        ("e5m2", NAN, 0x7F),
        ("e2m1", INF, 0x7),
        ("e2m1", -INF, 0xF),
        ("e2m1", NAN, 0x7),
        ("e2m1", -0.0, 0x8),
        ("e2m1", -0.25, 0x8),
        ("e4m3", 448.0, 0x7E),
        ("e4m3", 480.0, 0x7E),
        ("e4m3", 2.0**-9, 0x01),
        ("e4m3", 2.0**-10, 0x00),
        ("e4m3", 1.5 * 2.0**-10, 0x01),
        ("e4m3", 0.1, 0x1D),
        ("e4m3", -0.1, 0x9D),
        ("e5m2", 57344.0, 0x7B),
        ("e5m2", 2.0**-16, 0x01),
        ("e5m2", 2.0**-17, 0x00),
        ("e5m2", 0.1, 0x2E),
    ],
)
def test_appendix_a_and_golden_codes(by, element, given, code):
    assert by.encode(fp32(given), element)[0] == code


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("given", "value", "block"),
    [
        (0.0, 0, 0),
        (1e-44, 0, 0),
        (448 * 2.0**-127, 9, 0),
        (1e-30, 28, 19),
        (1.0, 127, 119),
        (1.1, 128, 119),
        (3.5, 129, 120),
        (3.5000002, 129, 121),
        (447.9, 136, 127),
        (448.0, 136, 127),
        (449.0, 136, 128),
        (3e38, 254, 247),
        (INF, 254, 255),
        (NAN, 255, 255),
    ],
)
def test_appendix_a_and_golden_e8m0(by, given, value, block):
    """The rounded-up code of a value, and that of a block with this amax: an infinite block is NaN (numerics 3.13)."""
    assert by.encode_e8m0(fp32(given))[0] == value
    assert by.e8m0_from_amax(fp32(given), "e4m3")[0] == block


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("amax", "scale", "pow2"),
    [(1.0, 448.0, 256.0), (3.0, 149.33333, 128.0), (448.0, 1.0, 1.0), (1e-38, 3.4028234663852886e38, 1.7014118e38)]
    + [(0.0, 1.0, 1.0), (INF, 1.0, 1.0), (NAN, 1.0, 1.0)],
)
def test_appendix_a_and_golden_fp32_scales(by, amax, scale, pow2):
    assert by.scale_from_amax(fp32(amax), MAX["e4m3"])[0] == fp32(scale)[0]
    assert by.scale_from_amax(fp32(amax), MAX["e4m3"], pow2=True)[0] == fp32(pow2)[0]


@IMPLEMENTATIONS
def test_appendix_a_eps_comes_first_and_an_overflow_becomes_the_largest_input(by):
    for amax in (0.0, 1e-6, 0.5):
        assert by.scale_from_amax(fp32(amax), MAX["e4m3"], eps=fp32(0.5)[0])[0] == fp32(896.0)[0]
    for largest in inputs.LARGEST.values():
        assert by.scale_from_amax(fp32(1e-38), MAX["e4m3"], inf_value=largest)[0] == largest


@IMPLEMENTATIONS
def test_golden_nvfp4_block(by):
    """numerics 3.9."""
    x = (np.arange(16) * 0.1 - 0.7).astype(np.float32).view(np.uint32)
    global_scale = by.nvfp4_global_scale(fp32(2.5), 448)
    block_scale = by.nvfp4_block_scale((x & np.uint32(integer.MAGNITUDE)).max(keepdims=True), global_scale)
    multiplier = by.nvfp4_multiplier(block_scale, global_scale)
    assert global_scale == fp32(1075.2)
    assert block_scale == [0x71]
    assert multiplier == fp32(7.466666)
    codes = by.encode(by.multiply(x, multiplier), "e2m1")
    assert codes.tolist() == [15, 14, 14, 13, 12, 11, 9, 0, 1, 3, 4, 5, 6, 6, 7, 7]


KNOWN_PHILOX = [
    # counter, key, words: the published answers of Random123
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_PHILOX)
def test_philox_gives_the_published_words(counter, key, words):
    assert integer.philox4x32(counter, key) == words
    got = philox.philox(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
    assert tuple(int(word) for word in got) == words


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 0x0123456789ABCDEF, 2**64 - 5])
def test_random_bytes_are_a_function_of_seed_stream_and_element(seed):
    signed = torch.tensor([seed - 2**64 if seed >= 2**63 else seed])
    for stream in (0, 1):
        want = [byte for block in range(7) for byte in integer.random_bytes(seed, stream, block)][:100]
        assert philox.random_bytes(signed, 100, stream).tolist() == want
