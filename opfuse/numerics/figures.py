"""Figures of what a cast did to a tensor, added over its elements: what ``opfuse.watch`` shows while a model trains."""

from __future__ import annotations

import torch

from opfuse.numerics.scalars import bits

EXPONENTS = 256
"""How many biased exponents fp32 has."""

COUNTS = ("nonfinite", "nonzero", "flushed", "saturated")
"""The first counts; behind them come the counts of elements by the biased exponent of their scale."""


def cast_figures(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, *, reach: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers, fp64 (3,): the largest finite ``|x|``, the sums of x^2 and of (x - q)^2; and counts, int64 (4 + 256,).

    The counts: nonfinite elements; finite ones that are not 0; of these, those that became 0, and those larger than ``reach``
    times their scale; then all elements by the biased exponent of their scale. Sums leave out nonfinite x and q.

    Args:
        x: fp32, bf16 or fp16 of any shape.
        q: fp32, what x became, decoded; as many elements.
        scale: fp32, the decode scale of each element, or one of all.
        reach: the largest multiple of a scale that rounds to a finite code.
    """
    given, made = x.reshape(-1).to(torch.float32), q.reshape(-1)
    finite = given.isfinite()
    kept, both = torch.where(finite, given, 0), finite & made.isfinite()
    signal, lost = (torch.where(both, each, 0).double().square().sum() for each in (given, given - made))
    largest = kept.abs().amax().double() if kept.numel() else signal
    scales = scale.reshape(-1).expand(given.shape)
    counted = (~finite, kept != 0, (kept != 0) & (made == 0), kept.abs() > scales * reach)
    exponents = torch.bincount(bits(scales) >> 23 & 255, minlength=EXPONENTS)
    return torch.stack((largest, signal, lost)), torch.cat((torch.stack([each.sum() for each in counted]), exponents))
