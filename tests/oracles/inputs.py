"""The inputs of the exhaustive tests, as the bits of fp32 values (uint32)."""

from __future__ import annotations

from functools import cache

import numpy as np

LOW_12_BITS = (0x000, 0x001, 0x7FF, 0x800, 0x801, 0xFFF)


@cache
def all_bf16() -> np.ndarray:
    """Every bf16 value, NaNs included."""
    return np.arange(2**16, dtype=np.uint32) << np.uint32(16)


@cache
def all_fp16() -> np.ndarray:
    """Every fp16 value, NaNs included."""
    with np.errstate(invalid="ignore"):
        return np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)


ALL = {"bf16": all_bf16, "fp16": all_fp16}
LARGEST = {"bf16": 0x7F7F0000, "fp16": 0x477FE000, "fp32": 0x7F7FFFFF}


def fp32_patterns(low: int) -> np.ndarray:
    """Every sign, exponent and upper 11 bits of the mantissa (2^20 patterns), followed by the 12 bits ``low``."""
    return np.arange(2**20, dtype=np.uint32) << np.uint32(12) | np.uint32(low)


@cache
def fp32_edges() -> np.ndarray:
    """±0, inf, NaNs; subnormals of one, two or all low bits, and 2^16 over their range; the neighbours of powers of two."""
    ones = np.uint32(1) << np.arange(24, dtype=np.uint32)
    subnormals = np.concatenate([ones, ones - 1, ones | 1, np.arange(0, 2**23, 127, dtype=np.uint32)])
    powers = np.arange(1, 256, dtype=np.uint32) << np.uint32(23)
    special = np.array([0, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF], np.uint32)
    magnitude = np.concatenate([special, subnormals, powers, powers - 1, powers + 1])
    return np.concatenate([magnitude, magnitude | np.uint32(1 << 31)])
