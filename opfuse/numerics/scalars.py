"""Conversions of single values: fp32 to the codes of an element, E8M0 scales, two E2M1 codes a byte.

Rules are written on the bits, so that they hold on each device and torch version. FP8 codes of finite values within range are
torch's own, which rounds them to nearest even everywhere; its overflow differs between versions and is not used, and nor is
the sign of its NaN.
"""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F

from opfuse.formats import E2M1, E4M3, Element

MAGNITUDE = 0x7FFFFFFF
MANTISSA = 0x007FFFFF
INF_BITS = 0x7F800000
FLT_MAX = float(np.finfo(np.float32).max)

E8M0_NAN = 255
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SUBNORMAL_HALF = 0x00400000  # 2^-127, half of the smallest normal fp32


def fl32(value: float) -> float:
    """``value`` rounded to fp32, as a Python float."""
    return float(np.float32(value))


def bits(x: torch.Tensor) -> torch.Tensor:
    """The int32 bits of an fp32 tensor (a view)."""
    return x.view(torch.int32)


def magnitude_bits(x: torch.Tensor) -> torch.Tensor:
    """The int32 bits of ``|x|`` for an fp32 tensor; they order as the magnitudes do, with inf and then NaN on top."""
    return bits(x) & MAGNITUDE


def is_nonfinite(x: torch.Tensor) -> torch.Tensor:
    """Whether an fp32 is inf or NaN; torch.isfinite takes four passes."""
    return magnitude_bits(x) >= INF_BITS


def encode(x: torch.Tensor, element: Element) -> torch.Tensor:
    """fp32 values to one ``element`` code per uint8, rounded to nearest even and saturated to ``element.max``.

    The sign of zero is kept; inf saturates; NaN becomes ``nan_code`` without a sign, or the largest positive code of an
    element that has no NaN. 4-bit codes are not packed: see :func:`pack_e2m1`.
    """
    if element.nan_code is not None:
        code = x.clamp(-element.max, element.max).to(element.dtype).view(torch.uint8)
        # Only NaN has all bits but the sign. It loses the sign by arithmetic of bytes: masks take torch longer than the rest.
        return code.bitwise_and_((0xFE - (code & 0x7F)).bitwise_or_(0x7F))
    magnitude = magnitude_bits(x)
    code = _round_magnitude(magnitude, element).clamp_(max=element.max_code)
    code |= (bits(x) >> (32 - element.bits)) & (1 << (element.bits - 1))
    return code.masked_fill_(magnitude > INF_BITS, element.max_code).to(torch.uint8)


def _round_magnitude(magnitude: torch.Tensor, element: Element) -> torch.Tensor:
    """Codes of magnitudes given as fp32 bits, rounded to nearest even, without an upper limit."""
    shift = 23 - element.mantissa_bits
    odd = (magnitude >> shift) & 1
    normal = (magnitude + ((1 << (shift - 1)) - 1) + odd >> shift) - ((127 - element.bias) << element.mantissa_bits)
    # Below the smallest normal value the codes are equally spaced. Adding the power of two whose last place is one code
    # makes the fp32 addition itself round to nearest even, and leaves the code in the low bits of the sum.
    aligner = 2.0 ** (23 + 1 - element.bias - element.mantissa_bits)
    aligned = magnitude.view(torch.float32) + aligner
    subnormal = bits(aligned) & MANTISSA
    smallest_normal = (128 - element.bias) << 23
    return torch.where(magnitude < smallest_normal, subnormal, normal)


def encode_nonfinite(x: torch.Tensor, element: Element) -> torch.Tensor:
    """FP8 codes that show a non-finite fp32 ``x`` as it is: ±inf where the element has it, NaN otherwise.

    Finite ``x`` give NaN too: choose with ``torch.isfinite``.
    """
    inf_code = element.max_code + 1
    if inf_code == element.nan_code:
        return torch.full_like(x, inf_code, dtype=torch.uint8)
    infinity = (torch.signbit(x).to(torch.uint8) << 7) | inf_code
    return infinity.masked_fill(~torch.isinf(x), cast(int, element.nan_code))


def encode_e2m1_stochastic(x: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """fp32 values to E2M1 codes, one per uint8, rounded up with a probability that is their distance in 256ths of a step.

    ``random`` holds integers 0…255. |x| + random/256 * step(|x|), in fp32, is cut to the grid, with step 0.5 below 2, 1
    below 4 and 2 above. Saturates at 6, keeps the sign also of what becomes zero; NaN becomes +6.
    """
    magnitude = x.abs()
    step = torch.full_like(magnitude, 0.5).masked_fill_(magnitude >= 2, 1.0).masked_fill_(magnitude >= 4, 2.0)
    lifted = magnitude + random.to(torch.float32) * (1 / 256) * step
    code = torch.zeros_like(x, dtype=torch.uint8)
    for value in _E2M1_VALUES[1:]:
        code += lifted >= value
    code |= torch.signbit(x).to(torch.uint8) << 3
    return code.masked_fill_(torch.isnan(x), E2M1.max_code)


def decode(codes: torch.Tensor, element: Element) -> torch.Tensor:
    """uint8 codes, one per byte, to their exact fp32 values."""
    if codes.device.type not in LOOKED_UP:
        return _convert(codes, element)
    values = _convert(torch.arange(256, dtype=torch.uint8, device=codes.device), element)
    return values.index_select(0, codes.to(torch.int32).flatten()).view(codes.shape)


LOOKED_UP = ("cpu",)
"""Kinds of devices on which all codes are converted and looked up: a CPU converts E4M3 one by one at a third of the speed."""


def _convert(codes: torch.Tensor, element: Element) -> torch.Tensor:
    """As :func:`decode`, one by one."""
    if element.bits == 8:
        return codes.view(element.dtype).to(torch.float32)
    # E2M1 bits spread over the fields of E4M3 name the same number, 2^6 times smaller, subnormal values included.
    spread = ((codes & 0x8) << 4) | ((codes & 0x7) << 2)
    return _convert(spread, E4M3) * 2.0 ** (E4M3.bias - element.bias)


def encode_e8m0(v: torch.Tensor) -> torch.Tensor:
    """The E8M0 code of the smallest power of two that is not below the fp32 ``v`` >= 0.

    inf becomes 254 and NaN 255; zero, and all up to 2^-127, becomes 0. The largest code for a finite value is 254.
    """
    magnitude = magnitude_bits(v)
    # The sum carries into the exponent if any bit of the mantissa is set.
    code = F.threshold(magnitude, _SUBNORMAL_HALF, 0).clamp_(max=254 << 23).add_(MANTISSA) >> 23
    return code.masked_fill_(magnitude > INF_BITS, E8M0_NAN).to(torch.uint8)


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """fp32 2^(code - 127); code 0 is the subnormal 2^-127 and 255 is NaN."""
    return codes.view(torch.float8_e8m0fnu).to(torch.float32)


def e8m0_multiplier(codes: torch.Tensor) -> torch.Tensor:
    """fp32 2^(127 - code), what a quantize multiplies by; code 254 is the subnormal 2^-127 and 255 is NaN."""
    return decode_e8m0(254 - codes)  # in bytes, where 254 - 255 is 255 again


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes (..., n) to bytes (..., n / 2), n even; the low nibble is the even index."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Bytes (..., n) to 4-bit codes (..., 2 n), one per byte."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def exponent_of_max(element: Element) -> int:
    """The exponent of the largest finite value: 8 for E4M3, 15 for E5M2, 2 for E2M1."""
    return math.frexp(element.max)[1] - 1
