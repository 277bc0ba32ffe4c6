"""ml_dtypes as a third opinion. It does not saturate, so it is asked only where nothing has to saturate."""

from __future__ import annotations

import ml_dtypes
import numpy as np

DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}
DTYPES |= {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}

# The magnitude bits from which a rule other than rounding speaks: saturation (464, 61440, 7) or NaN.
LIMIT = {"e4m3": 0x43E80000, "e5m2": 0x47700000, "e2m1": 0x40E00000, "fp16": 0x7F800001, "bf16": 0x7F800001}


def in_range(bits: np.ndarray, name: str) -> np.ndarray:
    """Where rounding alone decides."""
    return (bits & np.uint32(0x7FFFFFFF)) < LIMIT[name]


def encode(bits: np.ndarray, name: str) -> np.ndarray:
    """Codes."""
    with np.errstate(all="ignore"):
        codes = bits.view(np.float32).astype(DTYPES[name])
    return codes.view(np.uint16 if codes.itemsize == 2 else np.uint8)


def decode(codes: np.ndarray, name: str) -> np.ndarray:
    """Values of codes."""
    with np.errstate(all="ignore"):
        return codes.view(DTYPES[name]).astype(np.float32).view(np.uint32)
