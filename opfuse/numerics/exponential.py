"""Exponential and tanh in operations that every device rounds alike, so that kernels give the same bits.

2^t is 2^n (1 + q(f)), with n the whole number next to t, f = t - n, and q a polynomial that was fitted to 2^f - 1 over -1/2 ...
1/2, where it is off by 2^-29 of 2^f at most. The functions of libraries differ from each other in the last bit. fp64, of which
no kernel computes anything, takes torch's.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG2_E = 1.4426950408889634
COEFFICIENTS = (1.53533621e-04, 1.33988746e-03, 9.61843736e-03, 5.55033247e-02, 2.40226479e-01, 6.93147203e-01)
"""Of q, those of f^6 ... f."""

WHOLE = 12583039.0
"""1.5 * 2^23 + 127: added to t, it leaves n + 127 in the low bits of the sum, the exponent of 2^n."""

LEAST = -126.0
"""A power of two with a smaller exponent is 0."""


def exponential(x: Tensor) -> Tensor:
    """exp(x) of x <= 0, within (1.2 + |x|) 2^-23 of itself; 0 below 2^-126. NaN of NaN; of x > 0, anything."""
    if x.dtype == torch.float64:
        return torch.exp(x)
    t = x * LOG2_E
    q, scale = _power(t)
    return q.add_(1).mul_(scale).masked_fill_(t < LEAST, 0.0)


def hyperbolic_tangent(x: Tensor) -> Tensor:
    """tanh(x), within 2.5 * 2^-23 of itself: -e / (e + 2) with e = exp(-2 |x|) - 1, in which nothing cancels where x is small."""
    if x.dtype == torch.float64:
        return torch.tanh(x)
    t = x.abs().mul_(-2 * LOG2_E)
    q, scale = _power(t)
    less_one = (scale * q).add_(scale - 1).masked_fill_(t < LEAST, -1.0)
    return (-less_one).div_(less_one + 2).copysign_(x)


def _power(t: Tensor) -> tuple[Tensor, Tensor]:
    """q(f) and 2^n of fp32 t <= 0; where that is below -126, the second is anything."""
    shifted = t + WHOLE
    f = t - (shifted - WHOLE)
    first, *others = COEFFICIENTS
    q = f * first
    for coefficient in others:
        q.add_(coefficient).mul_(f)
    return q, (shifted.view(torch.int32) << 23).view(torch.float32)
