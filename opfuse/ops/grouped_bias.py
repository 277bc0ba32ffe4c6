"""The biases of groups of rows: each is added to its rows, times a scale for each row. Computed in fp32 (fp64 for fp64).

All groups are one op, whether the host knows their sizes or not. A sum over the rows of a group wants their number on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from opfuse.kernels.chains.chain import backward_chain
from opfuse.numerics import activations, pointwise
from opfuse.numerics.chain import Stage
from opfuse.tensors.gemm_grouped import Groups
from opfuse.tensors.groups import Sizes

Biases = torch.Tensor | Sequence[torch.Tensor]
"""The biases of all groups: one tensor (G, N), or a tensor (N,) for each group."""


def biases_of(names: Sequence[str], held: Callable[[str], torch.Tensor]) -> Biases:
    """The biases, which ``held`` reads by name: one parameter ``bias`` for all groups, or one parameter for each group."""
    biases = [held(name) for name in names]
    return biases[0] if names == ("bias",) else biases


def add_biases(y: torch.Tensor, biases: Biases, scales: torch.Tensor | None, groups: Groups) -> None:
    """Add to each row of ``y`` (M, N) the bias of its group, times its scale; rounded once."""
    wide = pointwise.compute_dtype(y.dtype)
    rows = _of_rows(biases, groups, y.shape[0], wide)
    y.add_(rows if scales is None else scales.reshape(-1, 1).to(wide) * rows.to(wide))  # torch adds in the wider dtype


def bias_gradients(
    dy: torch.Tensor, held: Sequence[torch.Tensor], scales: torch.Tensor | None, sizes: Sizes
) -> list[torch.Tensor]:
    """The gradient of each parameter of ``held``: of each group the sum (N,) of its rows of ``dy`` (..., N), times their scales.

    It is the backward pass of the op Bias over the rows of the group: sums have one order, whoever makes them. held: a parameter
    (N,) for each group, or one (G, N), of which only the dtype is read; the program of a backward pass, which is given no
    parameter, could not take a part of one.
    """
    rows = dy.reshape(-1, dy.shape[-1])
    if scales is not None:
        wide = pointwise.compute_dtype(dy.dtype)
        rows = rows.to(wide) * scales.reshape(-1, 1).to(wide)
    sums = [
        backward_chain(piece, [Stage(activations.BIAS, {"bias": bias})], {})[1][0]["bias"]
        for piece, bias in zip(rows.split(sizes), itertools.cycle(held))
    ]
    return [torch.stack(sums)] if held[0].ndim > 1 else sums


def scale_gradient(dy: torch.Tensor, biases: Biases, groups: Groups) -> torch.Tensor:
    """The gradient (M,) of the scales: for each row the product of ``dy`` (..., N) and its group's bias."""
    wide = pointwise.compute_dtype(dy.dtype)
    rows = dy.reshape(-1, dy.shape[-1]).to(wide)
    return (rows * _of_rows(biases, groups, rows.shape[0], wide).to(wide)).sum(1)


def _of_rows(biases: Biases, groups: Groups, rows: int, wide: torch.dtype) -> torch.Tensor:
    """(rows, N): the bias of each row's group, not in more bytes than ``wide`` has.

    Nothing is copied from the host, whose sizes a CUDA graph may have for constants.
    """
    table = biases if isinstance(biases, torch.Tensor) else torch.stack(list(biases))
    table = table.to(wide) if table.dtype.itemsize > wide.itemsize else table
    if groups.sizes is not None:
        return torch.cat([bias.expand(size, -1) for bias, size in zip(table.unbind(), groups.sizes)])
    ends = groups.ends(table.device, rows)
    index = torch.searchsorted(ends, torch.arange(rows, dtype=ends.dtype, device=ends.device), right=True)
    return table.index_select(0, index)
