"""Sums of products of codes, times the two fp32 factors that they leave out.

The factors of a result multiply its sum one after the other, left first, each product rounded to 24 bits whatever its exponent:
a result overflows or vanishes where it must, never because a sum times one factor does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Factors(NamedTuple):
    """The two fp32 factors of a result, each one number for all lines or one for each, divided by its unit; both None: 1."""

    left: torch.Tensor | None
    right: torch.Tensor | None
    left_unit: float = 1.0
    right_unit: float = 1.0


def scaled_sums(
    sums: Sequence[torch.Tensor],
    factors: Sequence[Factors],
    *,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
    overwrites: bool = False,
) -> torch.Tensor:
    """fp32 sums (lines, columns) times their left factors, times their right ones, rounded once: of several, one below the other.

    out: a contiguous matrix of ``dtype`` to write the result into. overwrites: whether the sums may be, which saves a second
    result in fp32.
    """
    made = [_scaled(each, of, overwrites=overwrites).to(dtype) for each, of in zip(sums, factors, strict=True)]
    if out is None:
        return made[0] if len(made) == 1 else torch.cat(made)
    return torch.cat(made, out=out)


def _scaled(sums: torch.Tensor, factors: Factors, *, overwrites: bool) -> torch.Tensor:
    left, right, left_unit, right_unit = factors
    if left is None or right is None:
        return sums
    # full_like: torch divides by a Python number through its reciprocal on some devices.
    left = left if left_unit == 1 else left / torch.full_like(left, left_unit)
    right = right if right_unit == 1 else right / torch.full_like(right, right_unit)
    for factor in balanced(left.reshape(-1, 1), right.reshape(1, -1)):
        sums = sums.mul_(factor) if overwrites else sums * factor
    return sums


def balanced(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two fp32 factors with the powers of two in them shared evenly; those of lines are broadcast against each other.

    A sum times the first, then times the second, has the bits that it has with the given factors, as long as those keep to the
    normal fp32 range. With these it leaves the range only where the result does: sums of codes lie between 2^-32 and 2^46.
    """
    (left, left_power), (right, right_power) = torch.frexp(left), torch.frexp(right)
    both = left_power + right_power
    half = both >> 1
    return left * _clamped_power_of_two(half), right * _clamped_power_of_two(both - half)


def _clamped_power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """fp32 2^exponent for any int32 exponent, clamped to the normal range: factors that lie beyond it give 0 or inf anyway."""
    return ((exponent.clamp(-126, 127) + 127) << 23).view(torch.float32)
