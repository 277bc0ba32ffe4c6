"""From amax to scales: the fp32 rule, E8M0 codes, and the two levels of NVFP4.

A non-finite element must be visible in what is decoded. So amax is a maximum over integers, which keeps inf and NaN, and each
rule turns a non-finite amax into a NaN decode scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from opfuse.formats import E2M1, E4M3, ROWWISE, Element, mxfp8
from opfuse.numerics.layouts import Layout, layout_of, load_scale, store_scale
from opfuse.numerics.scalars import (
    E8M0_NAN,
    FLT_MAX,
    MANTISSA,
    bits,
    decode,
    decode_e8m0,
    encode,
    encode_e8m0,
    exponent_of_max,
    fl32,
    is_nonfinite,
    magnitude_bits,
)

ScaleRounding = Literal["ceil", "floor"]

E4M3_NAN = 0x7F
_SIXTH = fl32(1 / E2M1.max)


def amax(x: torch.Tensor, dim: int | Sequence[int] | None = None) -> torch.Tensor:
    """fp32 maximum of ``|x|`` over ``dim`` (None: all), exact, with inf and NaN propagated; 0 over nothing.

    The maximum is taken over the magnitude bits as integers: the same on every device, in any order.
    """
    dims = tuple(range(x.dim())) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    magnitude = magnitude_bits(x.to(torch.float32))
    if any(x.shape[d] == 0 for d in dims):
        return magnitude.sum(dim=dims, dtype=torch.float32)
    return magnitude.amax(dim=dims).view(torch.float32)


def divide(x: torch.Tensor, value: float) -> torch.Tensor:
    """``x / value`` with one rounding: torch may multiply by a rounded reciprocal when the divisor is a Python number."""
    return x / torch.full_like(x, value)


def reciprocal(x: torch.Tensor) -> torch.Tensor:
    """1 / x, correctly rounded."""
    return torch.ones_like(x) / x


def scale_from_amax(
    amax: torch.Tensor, fp8_max: float, *, eps: float = 0.0, pow2: bool = False, inf_value: float = FLT_MAX
) -> torch.Tensor:
    """Encode scale fp32 fp8_max / max(amax, eps), correctly rounded.

    1 where amax is 0, inf or NaN; ``inf_value`` where the quotient overflows; with ``pow2`` rounded down to a power of two.
    """
    amax = amax.clamp(min=eps)
    scale = torch.full_like(amax, fp8_max) / amax
    scale = scale.masked_fill_(scale == torch.inf, inf_value).masked_fill_(is_nonfinite(amax) | (amax == 0), 1.0)
    return (bits(scale) & ~MANTISSA).view(torch.float32) if pow2 else scale


def decode_scale(scale: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """fp32 1 / scale, NaN where amax is not finite: there the encode scale is 1 and must not hide it."""
    return reciprocal(scale).masked_fill_(is_nonfinite(amax), torch.nan)


def e8m0_from_amax(amax: torch.Tensor, element: Element, rounding: ScaleRounding = "ceil") -> torch.Tensor:
    """uint8 E8M0 code of the decode scale of a block; 255 where amax is not finite.

    "ceil": the smallest power of two not below amax * fl32(1 / max), so that no value saturates. "floor": the exponent of
    amax less that of the element's maximum, at least 0 (OCP Microscaling 1.0, section 6.3); values near amax may saturate.
    """
    if rounding == "ceil":
        code = encode_e8m0(amax * fl32(1 / element.max))
    else:
        code = ((magnitude_bits(amax) >> 23) - exponent_of_max(element)).clamp_(min=0).to(torch.uint8)
    return code.masked_fill_(is_nonfinite(amax), E8M0_NAN)


def e8m0_of_pow2(scale: torch.Tensor) -> torch.Tensor:
    """uint8 E8M0 codes of fp32 decode scales that are powers of two, 2^-127 to 2^127; of all others 255, as of NaN.

    Zero becomes 2^-127: it stands in padding and in planes of zeros alone, over codes of zero.
    """
    code = encode_e8m0(scale)
    return code.masked_fill((bits(decode_e8m0(code)) != bits(scale)) & (magnitude_bits(scale) != 0), E8M0_NAN)


def are_pow2(scale: torch.Tensor) -> bool:
    """Whether :func:`e8m0_of_pow2` keeps the values of fp32 scales, NaN with them; the host reads the answer."""
    return bool(((e8m0_of_pow2(scale) != E8M0_NAN) | scale.isnan()).all())


def mx_layout(blocks: Layout) -> Layout:
    """Where MXFP8 keeps the lines of a plane of FP8 blocks, scales in swizzled order."""
    return layout_of(mxfp8(blocks.element), ROWWISE, blocks.lines, swizzled=True)


def scales_of_blocks(scale: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The fp32 scales of a plane of FP8 blocks as uint8 E8M0 scales of MXFP8 in swizzled order, with zero padding.

    The scale of 128 elements is that of their four blocks of 32, and that of a 128x128 block that of each of its lines. That is
    exact as far as :func:`e8m0_of_pow2` is.
    """
    made = mx_layout(layout)
    lines, blocks = made.blocks
    codes = e8m0_of_pow2(load_scale(scale, layout)).repeat_interleave(layout.block[0], 0)[:lines]
    return store_scale(codes.repeat_interleave(layout.block[1] // made.block[1], 1)[:, :blocks], made)


def nvfp4_global_scale(amax: torch.Tensor, encode_max: int) -> torch.Tensor:
    """First level of NVFP4, fp32: (encode_max * 6) / amax.

    1 where that is not a positive finite number: amax 0, inf or NaN, or below what the format can hold.
    """
    scale = torch.full_like(amax, encode_max * E2M1.max) / amax
    return scale.masked_fill_(is_nonfinite(scale) | (scale == 0), 1.0)


def nvfp4_block_scale(block_amax: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """Second level of NVFP4: the E4M3 byte of block_amax * (global_scale * fl32(1/6)); 0x7f where block_amax is not finite.

    The shapes must broadcast.
    """
    code = encode(block_amax * (global_scale * _SIXTH), E4M3)
    return code.masked_fill_(is_nonfinite(block_amax), E4M3_NAN)


def nvfp4_multiplier(block_scale: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """fp32 min(1 / (float(block_scale) * (1 / global_scale)), FLT_MAX), what a value is multiplied by before the E2M1 cast.

    NaN for a NaN block scale, which casts every element of the block to the largest code.
    """
    decoded = decode(block_scale, E4M3) * reciprocal(global_scale)
    return reciprocal(decoded).clamp(max=FLT_MAX)
