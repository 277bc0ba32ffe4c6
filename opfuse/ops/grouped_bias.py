"""The biases of groups of rows: each is added to its rows, times a scale for each row. Computed in fp32 (fp64 for fp64)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from opfuse.kernels.chains.chain import backward_chain
from opfuse.numerics import activations, pointwise
from opfuse.numerics.chain import Stage
from opfuse.tensors.groups import Sizes, offsets


def add_biases(y: torch.Tensor, biases: Sequence[torch.Tensor], scales: torch.Tensor | None, sizes: Sizes) -> None:
    """Add to each row of ``y`` (M, N) the bias (N,) of its group, times its scale; rounded once."""
    wide = pointwise.compute_dtype(y.dtype)
    factors = None if scales is None else scales.reshape(-1, 1).to(wide)
    for (start, end), bias in zip(offsets(sizes), biases):
        term = bias.to(wide)
        y[start:end] = y[start:end].to(wide) + (term if factors is None else factors[start:end] * term)


def bias_gradients(
    dy: torch.Tensor, biases: Sequence[torch.Tensor], scales: torch.Tensor | None, sizes: Sizes
) -> list[torch.Tensor]:
    """The gradient (N,) of each group's bias, in its dtype: the sum of its rows of ``dy`` (..., N), times their scales.

    It is the backward pass of the op Bias over the rows of the group: sums have one order, whoever makes them.
    """
    rows = dy.reshape(-1, dy.shape[-1])
    if scales is not None:
        wide = pointwise.compute_dtype(dy.dtype)
        rows = rows.to(wide) * scales.reshape(-1, 1).to(wide)
    return [
        backward_chain(piece, [Stage(activations.BIAS, {"bias": bias})], {})[1][0]["bias"]
        for piece, bias in zip(rows.split(sizes), biases)
    ]


def scale_gradient(dy: torch.Tensor, biases: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """The gradient (M,) of the scales: for each row the product of ``dy`` (..., N) and its group's bias."""
    wide = pointwise.compute_dtype(dy.dtype)
    pieces = dy.reshape(-1, dy.shape[-1]).split(sizes)
    return torch.cat([(piece.to(wide) * bias.to(wide)).sum(1) for piece, bias in zip(pieces, biases)])
