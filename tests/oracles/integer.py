"""The number rules in integers and exact fractions alone: no floating-point operation happens in this file.

A rounding is a comparison. The value of every code is a Fraction; between two neighbours lies a midpoint; the magnitude bits of
an fp32 value order as the values do. So the code of a value is the number of midpoints it has passed, and a value on a midpoint
passes it if the upper code is even. Products and quotients are taken on the significands as integers and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise

import numpy as np

INF = 0x7F800000
NAN = 0x7FC00000
ONE = 0x3F800000
LARGEST = 0x7F7FFFFF
MAGNITUDE = 0x7FFFFFFF


@dataclass(frozen=True)
class Encoding:
    """``top`` is the code that large values saturate to; ``inf`` (if any) decodes to inf and codes above both to NaN."""

    bits: int
    mantissa_bits: int
    bias: int
    top: int
    nan: int
    inf: int | None = None

    def value(self, code: int) -> Fraction:
        """The number that the magnitude ``code`` would be if no code were special."""
        exponent, mantissa = divmod(code, 1 << self.mantissa_bits)
        significand = mantissa + ((1 << self.mantissa_bits) if exponent else 0)
        return Fraction(significand) * Fraction(2) ** (max(exponent, 1) - self.bias - self.mantissa_bits)


ENCODINGS = {
    "e4m3": Encoding(8, 3, 7, top=0x7E, nan=0x7F),
    "e5m2": Encoding(8, 2, 15, top=0x7B, nan=0x7F, inf=0x7C),
    "e2m1": Encoding(4, 1, 1, top=0x7, nan=0x7),
    "fp16": Encoding(16, 10, 15, top=0x7C00, nan=0x7FFF, inf=0x7C00),
    "bf16": Encoding(16, 7, 127, top=0x7F80, nan=0x7FFF, inf=0x7F80),
}


def fp32_bits(value: Fraction | int) -> int:
    """The bits of ``value`` >= 0 rounded to nearest even in fp32."""
    value = Fraction(value)
    if value == 0:
        return 0
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    exponent -= value < Fraction(2) ** exponent
    ulp = Fraction(2) ** max(exponent - 23, -149)
    return min((max(exponent, -126) + 126) * 2**23 + round(value / ulp), INF)


@cache
def passing_points(name: str) -> np.ndarray:
    """For each code from 1 up, the least magnitude bits that round to it or above."""
    encoding = ENCODINGS[name]
    values = [encoding.value(code) for code in range(encoding.top + 1)]
    return np.array([fp32_bits((a + b) / 2) + code % 2 for code, (a, b) in enumerate(pairwise(values), 1)], np.uint32)


def encode(bits: np.ndarray, name: str) -> np.ndarray:
    """Codes, rounded to nearest even; the sign of zero is kept, NaN has no sign."""
    encoding = ENCODINGS[name]
    magnitude = bits & np.uint32(MAGNITUDE)
    code = np.searchsorted(passing_points(name), magnitude, side="right")
    code |= (bits >> np.uint32(31)).astype(np.int64) << (encoding.bits - 1)
    return np.where(magnitude > INF, encoding.nan, code).astype(np.uint16 if encoding.bits > 8 else np.uint8)


def encode_e2m1_stochastic(bits: np.ndarray, random: int | np.ndarray) -> np.ndarray:
    """The E2M1 code at or below |x| + random / 256 * step, the sum rounded to fp32; step 1/2 below 2, 1 below 4, else 2."""
    magnitude = np.minimum(_magnitude(bits), fp32_bits(8))
    significand, exponent = _unpack(magnitude)
    # In units of 2^-54 the sum is an integer; what is smaller than a unit can only break a tie.
    units = np.where(exponent >= -54, significand << np.clip(exponent + 54, 0, 34), significand > 0)
    step = np.where(magnitude < fp32_bits(2), 1, np.where(magnitude < fp32_bits(4), 2, 4)) << 53
    raised = _round(units + random * (step >> 8), np.int64(-54))
    values = [fp32_bits(ENCODINGS["e2m1"].value(code)) for code in range(1, 8)]
    code = np.searchsorted(values, raised, side="right") | (bits >> np.uint32(31)).astype(np.int64) << 3
    return np.where(_magnitude(bits) > INF, 7, code).astype(np.uint8)


@cache
def _decoded(name: str) -> np.ndarray:
    encoding = ENCODINGS[name]
    special = dict.fromkeys(range(encoding.top + 1, 1 << (encoding.bits - 1)), NAN)
    special |= {} if encoding.inf is None else {encoding.inf: INF}
    positive = [special.get(code, fp32_bits(encoding.value(code))) for code in range(1 << (encoding.bits - 1))]
    return np.array(positive + [bits | 0x80000000 for bits in positive], np.uint32)


def decode(codes: np.ndarray, name: str) -> np.ndarray:
    """Exact values of codes."""
    return _decoded(name)[codes]


_POWERS = np.array([fp32_bits(Fraction(2) ** (code - 127)) for code in range(255)] + [NAN], np.uint32)


def encode_e8m0(bits: np.ndarray) -> np.ndarray:
    """The least code whose power of two is not below a value >= 0; 254 above all, 255 for NaN."""
    code = np.minimum(np.searchsorted(_POWERS[:255], bits, side="left"), 254)
    return np.where(bits > INF, 255, code).astype(np.uint8)


def decode_e8m0(codes: np.ndarray) -> np.ndarray:
    """2^(code - 127)."""
    return _POWERS[codes]


def e8m0_multiplier(codes: np.ndarray) -> np.ndarray:
    """2^(127 - code)."""
    return np.where(codes == 255, np.uint32(NAN), _POWERS[254 - np.minimum(codes, 254)])


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """fp32 product, rounded to nearest even, gradual underflow."""
    (ma, ea), (mb, eb) = _unpack(a), _unpack(b)
    return _finish(a, b, _round(ma * mb, ea + eb), infinite=(a, b), zero=(a, b))


def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """fp32 quotient, rounded to nearest even, gradual underflow."""
    (ma, ea), (mb, eb) = _unpack(a), _unpack(b)
    quotient, remainder = np.divmod(ma << 37, np.maximum(mb, 1))
    reciprocal = np.where(_magnitude(b) == 0, INF, np.where(_magnitude(b) == INF, 0, np.where(_magnitude(b) > INF, NAN, ONE)))
    return _finish(a, b, _round(quotient | (remainder > 0), ea - eb - 37), infinite=(a, reciprocal), zero=(a, reciprocal))


def _magnitude(bits: np.ndarray) -> np.ndarray:
    return np.asarray(bits, np.uint32).astype(np.int64) & MAGNITUDE


def _unpack(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(m, e) with |value| = m * 2^e and m of exactly 24 bits, or 0."""
    field, fraction = _magnitude(bits) >> 23, _magnitude(bits) & 0x7FFFFF
    significand = fraction + np.where(field > 0, 1 << 23, 0)
    missing = np.where(significand > 0, 24 - _bit_length(significand), 0)
    return significand << missing, np.maximum(field, 1) - 150 - missing


def _bit_length(m: np.ndarray) -> np.ndarray:
    length = (m > 0).astype(np.int64)
    for step in (32, 16, 8, 4, 2, 1):
        more = m >> step > 0
        m, length = np.where(more, m >> step, m), length + step * more
    return length


def _round(m: np.ndarray, e: np.ndarray) -> np.ndarray:
    """Magnitude bits of m * 2^e, 0 <= m < 2^62."""
    last = np.maximum(e + _bit_length(m) - 24, -149)
    down, up = np.clip(last - e, 0, 63), np.clip(e - last, 0, 24)
    kept, rest = m >> down, m & ((np.int64(1) << np.minimum(down, 62)) - 1)
    half = np.where(down > 0, np.int64(1) << np.maximum(down - 1, 0), 1)
    kept = (kept + ((rest > half) | ((rest == half) & (kept % 2 == 1)))) << up
    return np.where(m == 0, 0, np.minimum((last + 149 << 23) + kept, INF))


def _finish(a: np.ndarray, b: np.ndarray, magnitude: np.ndarray, *, infinite: tuple, zero: tuple) -> np.ndarray:
    """Put back the sign and what the significands do not carry: inf, NaN, and inf * 0."""
    has_inf = np.logical_or(*(_magnitude(x) == INF for x in infinite))
    has_zero = np.logical_or(*(_magnitude(x) == 0 for x in zero))
    nan = np.logical_or(*(_magnitude(x) > INF for x in infinite)) | (has_inf & has_zero)
    magnitude = np.where(has_inf, INF, np.where(has_zero, 0, magnitude))
    sign = (np.asarray(a, np.uint32) ^ np.asarray(b, np.uint32)) & np.uint32(1 << 31)
    return np.where(nan, NAN, magnitude.astype(np.uint32) | sign).astype(np.uint32)


def scale_from_amax(amax: np.ndarray, largest: int, *, eps: int = 0, pow2: bool = False, inf_value: int = LARGEST) -> np.ndarray:
    """Encode scale largest / max(amax, eps), 1 without a usable amax. ``largest``, ``eps`` and ``inf_value`` are bits too."""
    amax = np.maximum(amax, np.uint32(eps))
    scale = divide(np.uint32(largest), amax)
    scale = np.where((amax == 0) | (amax >= INF), ONE, np.where(scale == INF, inf_value, scale)).astype(np.uint32)
    return scale >> np.uint32(23) << np.uint32(23) if pow2 else scale


def decode_scale(scale: np.ndarray, amax: np.ndarray) -> np.ndarray:
    """1 / scale, NaN where amax is not finite."""
    return np.where(amax >= INF, NAN, divide(np.uint32(ONE), scale)).astype(np.uint32)


def e8m0_from_amax(amax: np.ndarray, name: str, rounding: str = "ceil") -> np.ndarray:
    """Code of a block: amax times the rounded reciprocal of the element's maximum, rounded up; or the difference of exponents."""
    encoding = ENCODINGS[name]
    largest = encoding.value(encoding.top)
    if rounding == "ceil":
        code = encode_e8m0(multiply(amax, np.uint32(fp32_bits(1 / largest))))
    else:
        exponent = (fp32_bits(largest) >> 23) - 127
        code = np.maximum((amax >> np.uint32(23)).astype(np.int64) - exponent, 0)
    return np.where(amax >= INF, 255, code).astype(np.uint8)


def nvfp4_global_scale(amax: np.ndarray, encode_max: int) -> np.ndarray:
    """encode_max * 6 / amax, 1 unless that is a positive finite number."""
    scale = divide(np.uint32(fp32_bits(encode_max * 6)), amax)
    return np.where((scale == 0) | (scale >= INF), ONE, scale).astype(np.uint32)


def nvfp4_block_scale(block_amax: np.ndarray, global_scale: np.ndarray) -> np.ndarray:
    """The E4M3 byte of block_amax * (global_scale * fl32(1/6)), NaN where block_amax is not finite."""
    scale = multiply(block_amax, multiply(global_scale, np.uint32(fp32_bits(Fraction(1, 6)))))
    return np.where(block_amax >= INF, 0x7F, encode(scale, "e4m3")).astype(np.uint8)


def nvfp4_multiplier(block_scale: np.ndarray, global_scale: np.ndarray) -> np.ndarray:
    """min(1 / (block_scale * (1 / global_scale)), largest fp32); NaN for a NaN byte."""
    decoded = multiply(decode(block_scale, "e4m3"), divide(np.uint32(ONE), global_scale))
    reciprocal = divide(np.uint32(ONE), decoded)
    return np.where(reciprocal == INF, np.uint32(LARGEST), reciprocal)


def random_bytes(seed: int, stream: int, block: int) -> list[int]:
    """The 16 bytes of Philox block ``block`` of a plane, little endian; the 64-bit seed is the key."""
    words = philox4x32((block % 2**32, block >> 32, stream, 0), (seed % 2**32, seed >> 32))
    return [byte for word in words for byte in word.to_bytes(4, "little")]


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3
