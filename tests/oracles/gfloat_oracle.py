"""The number rules on gfloat's formats: fp64 arithmetic, exact or innocuously rounded, then gfloat's rounding into the format.

A product of two fp32 values is exact in fp64. A quotient is not, but 53 >= 2 * 24 + 2 bits make the second rounding innocuous
(Figueroa, "When is double rounding innocuous?", SIGNUM 1995), for a subnormal quotient too, as its midpoint has fewer bits.
"""

from __future__ import annotations

import numpy as np
from gfloat import RoundMode, decode_ndarray, encode_ndarray, round_ndarray
from gfloat.formats import (
    format_info_bfloat16,
    format_info_binary16,
    format_info_binary32,
    format_info_ocp_e2m1,
    format_info_ocp_e4m3,
    format_info_ocp_e5m2,
    format_info_ocp_e8m0,
)

FORMATS = {"e4m3": format_info_ocp_e4m3, "e5m2": format_info_ocp_e5m2, "e2m1": format_info_ocp_e2m1}
FORMATS |= {"fp16": format_info_binary16, "bf16": format_info_bfloat16}
LARGEST = format_info_binary32.max


def _fp64(bits: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return np.atleast_1d(np.asarray(bits, np.uint32)).view(np.float32).astype(np.float64)


def _bits(values: np.ndarray) -> np.ndarray:
    """fp64 to fp32 by gfloat, as bits."""
    with np.errstate(invalid="ignore", over="ignore"):
        return round_ndarray(format_info_binary32, np.asarray(values, np.float64)).astype(np.float32).view(np.uint32)


def _rounded(values: np.ndarray) -> np.ndarray:
    return _fp64(_bits(values))


def encode(bits: np.ndarray, name: str) -> np.ndarray:
    """Codes; saturating in 8 bits and fewer."""
    info, values = FORMATS[name], _fp64(bits)
    nan = np.isnan(values)
    rounded = round_ndarray(info, np.where(nan, 0.0, values), RoundMode.TiesToEven, sat=info.bits <= 8)
    canonical = (1 << (info.bits - 1)) - 1
    return np.where(nan, canonical, encode_ndarray(info, rounded)).astype(np.uint16 if info.bits > 8 else np.uint8)


def encode_e2m1_stochastic(bits: np.ndarray, random: int) -> np.ndarray:
    """The E2M1 code of |x| + random / 256 * step, the sum rounded to fp32 and then towards zero."""
    values = _fp64(bits)
    magnitude = np.where(np.isnan(values), 0.0, np.abs(values))
    raised = _rounded(magnitude + random / 256 * np.select([magnitude < 2, magnitude < 4], [0.5, 1.0], 2.0))
    code = round_ndarray(format_info_ocp_e2m1, raised, RoundMode.TowardZero, sat=True)
    code = encode_ndarray(format_info_ocp_e2m1, np.copysign(code, values))
    return np.where(np.isnan(values), 7, code).astype(np.uint8)


def decode(codes: np.ndarray, name: str) -> np.ndarray:
    """Values of codes."""
    return _bits(decode_ndarray(FORMATS[name], codes.astype(np.int64)))


def encode_e8m0(bits: np.ndarray) -> np.ndarray:
    """Round towards positive, saturating at both ends."""
    info = format_info_ocp_e8m0
    rounded = round_ndarray(info, np.maximum(_fp64(bits), info.smallest), RoundMode.TowardPositive, sat=True)
    return encode_ndarray(info, rounded).astype(np.uint8)


def decode_e8m0(codes: np.ndarray) -> np.ndarray:
    """Values of codes."""
    return _bits(decode_ndarray(format_info_ocp_e8m0, codes.astype(np.int64)))


def e8m0_multiplier(codes: np.ndarray) -> np.ndarray:
    """Reciprocals of the values of codes."""
    return _bits(1 / decode_ndarray(format_info_ocp_e8m0, codes.astype(np.int64)))


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """fp32 product."""
    with np.errstate(invalid="ignore"):
        return _bits(_fp64(a) * _fp64(b))


def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """fp32 quotient."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return _bits(_fp64(a) / _fp64(b))


def scale_from_amax(
    amax: np.ndarray, largest: int, *, eps: int = 0, pow2: bool = False, inf_value: int | None = None
) -> np.ndarray:
    """largest / max(amax, eps), 1 without a usable amax, a power of two not above it with ``pow2``."""
    safe = np.maximum(_fp64(amax), _fp64(eps))
    unusable = ~np.isfinite(safe) | (safe == 0)
    scale = _rounded(_fp64(largest) / np.where(unusable, 1.0, safe))
    scale = np.where(np.isinf(scale), LARGEST if inf_value is None else _fp64(inf_value), scale)
    scale = np.where(unusable, 1.0, scale)
    return _bits(round_ndarray(format_info_ocp_e8m0, scale, RoundMode.TowardZero, sat=True) if pow2 else scale)


def decode_scale(scale: np.ndarray, amax: np.ndarray) -> np.ndarray:
    """1 / scale, NaN where amax is not finite."""
    return _bits(np.where(np.isfinite(_fp64(amax)), 1 / _fp64(scale), np.nan))


def e8m0_from_amax(amax: np.ndarray, name: str, rounding: str = "ceil") -> np.ndarray:
    """Code of a block of amax >= 0; 255 where it is not finite."""
    info, values = FORMATS[name], _fp64(amax)
    if rounding == "ceil":
        code = encode_e8m0(_bits(values * _rounded(np.array([1 / info.max]))))
    else:
        smallest = format_info_ocp_e8m0.smallest
        power = round_ndarray(
            format_info_ocp_e8m0,
            np.maximum(np.where(np.isfinite(values), values, 1.0) * 2.0 ** -np.floor(np.log2(info.max)), smallest),
            RoundMode.TowardZero,
        )
        code = encode_ndarray(format_info_ocp_e8m0, power)
    return np.where(np.isfinite(values), code, 255).astype(np.uint8)


def nvfp4_global_scale(amax: np.ndarray, encode_max: int) -> np.ndarray:
    """encode_max * 6 / amax, 1 unless that is a positive finite number."""
    with np.errstate(divide="ignore"):
        scale = _rounded(encode_max * format_info_ocp_e2m1.max / _fp64(amax))
    return _bits(np.where(np.isfinite(scale) & (scale > 0), scale, 1.0))


def nvfp4_block_scale(block_amax: np.ndarray, global_scale: np.ndarray) -> np.ndarray:
    """The E4M3 byte of block_amax * (global_scale * fl32(1/6)), NaN where block_amax is not finite."""
    values = _fp64(block_amax)
    factor = _rounded(_fp64(global_scale) * _rounded(np.array([1 / 6])))
    return encode(_bits(np.where(np.isfinite(values), values * factor, np.nan)), "e4m3")


def nvfp4_multiplier(block_scale: np.ndarray, global_scale: np.ndarray) -> np.ndarray:
    """min(1 / (block_scale * (1 / global_scale)), largest fp32); NaN for a NaN byte."""
    decoded = _rounded(_fp64(decode(block_scale, "e4m3")) * _rounded(1 / _fp64(global_scale)))
    with np.errstate(divide="ignore"):
        return _bits(np.minimum(_rounded(1 / decoded), LARGEST))
