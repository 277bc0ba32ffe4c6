"""The biases of groups of rows: each is added to its rows, times a scale for each row. Computed in fp32 (fp64 for fp64)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from opfuse.kernels import pointwise
from opfuse.tensors.grouped import Sizes, offsets


def add_biases(y: torch.Tensor, biases: Sequence[torch.Tensor], scales: torch.Tensor | None, sizes: Sizes) -> None:
    """Add to each row of ``y`` (M, N) the bias (N,) of its group, times its scale; rounded once."""
    wide = pointwise.compute_dtype(y.dtype)
    factors = None if scales is None else scales.reshape(-1, 1).to(wide)
    for (start, end), bias in zip(offsets(sizes), biases):
        term = bias.to(wide)
        y[start:end] = y[start:end].to(wide) + (term if factors is None else factors[start:end] * term)


def split_rows(dy: torch.Tensor, sizes: Sizes) -> Sequence[torch.Tensor]:
    """The rows of each group of ``dy`` (..., N), in the dtype of sums."""
    wide = pointwise.compute_dtype(dy.dtype)
    return [piece.to(wide) for piece in dy.reshape(-1, dy.shape[-1]).split(sizes)]


def bias_sums(pieces: Sequence[torch.Tensor], scales: torch.Tensor | None, sizes: Sizes) -> list[torch.Tensor]:
    """The gradient (N,) of each group's bias: the sum of its rows of dy, times their scales."""
    if scales is not None:
        factors = scales.reshape(-1, 1).to(pieces[0].dtype).split(sizes)
        pieces = [piece * factor for piece, factor in zip(pieces, factors)]
    return [piece.sum(0) for piece in pieces]


def scale_gradient(pieces: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> torch.Tensor:
    """The gradient (M,) of the scales: for each row the product of dy and its group's bias."""
    return torch.cat([(piece * bias.to(piece.dtype)).sum(1) for piece, bias in zip(pieces, biases)])
