"""The three products of a grouped linear layer: those of a linear layer, for each group of rows with a weight of its own.

Quantized groups, and high-precision ones whose sizes the host knows, are multiplied one after another, each as large as its rows.
Where only a device knows the sizes, torch's grouped product takes them all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, cast

import torch

from opfuse.kernels import gemm_grouped
from opfuse.tensors.gemm import Operand, gemm
from opfuse.tensors.grouped import Sizes, groups_of
from opfuse.tensors.storage import QuantizedStorage

Weights = torch.Tensor | Sequence[Operand]
"""The weight (N, K) of each group; plain ones may be one tensor (G, N, K)."""


class Groups(NamedTuple):
    """Rows of each group: numbers, or None and an integer tensor (G,) that only the device knows."""

    sizes: Sizes | None
    splits: torch.Tensor | None = None


def takes_device_splits(x: Operand, weights: Weights, splits: torch.Tensor) -> bool:
    """Whether the products of ``x`` and ``weights`` can be made without the host knowing the sizes."""
    matrices = [weights] if isinstance(weights, torch.Tensor) else list(weights)
    plain = [w for w in matrices if isinstance(w, torch.Tensor)]
    return isinstance(x, torch.Tensor) and len(plain) == len(matrices) and gemm_grouped.takes(x, plain, splits)


def grouped_rows(name: str, left: Operand, weights: Weights, groups: Groups, **options: Any) -> torch.Tensor:
    """fprop or dgrad: rows (..., N) or (..., K) of ``left`` times the weight of their group. options: those of ``gemm``."""
    if groups.sizes is None:
        stacked = weights if isinstance(weights, torch.Tensor) else torch.stack(cast(list[torch.Tensor], weights))
        rows = _on_device(name, left, stacked, groups)
        rows = rows.to(options.get("out_dtype") or rows.dtype)
    else:
        rows = torch.cat([gemm(name, piece, w, **options) for piece, w in zip(_split(left, groups.sizes), weights)])
    return rows.reshape(*left.shape[:-1], rows.shape[-1])


def grouped_wgrad(
    dy: Operand, x: Operand, groups: Groups, *, wanted: Collection[int], dtype: torch.dtype, **options: Any
) -> torch.Tensor | list[torch.Tensor | None]:
    """dW (N, K) of each group, None for groups that are not ``wanted``; of all as one (G, N, K) where the device knows the sizes.

    That of a group without rows is exactly zero.
    """
    if groups.sizes is None:
        return _on_device("wgrad", dy, x, groups)
    grads: list[torch.Tensor | None] = []
    for i, (left, right, size) in enumerate(zip(_split(dy, groups.sizes), _split(x, groups.sizes), groups.sizes)):
        if i not in wanted:
            grads.append(None)
        elif size:
            grads.append(gemm("wgrad", left, right, dtype=dtype, **options))
        else:
            grads.append(torch.zeros(dy.shape[-1], x.shape[-1], dtype=dtype, device=dy.device))
    return grads


def _split(operand: Operand, sizes: Sizes) -> Sequence[Operand]:
    if isinstance(operand, QuantizedStorage):
        return groups_of(operand, sizes)
    return operand.reshape(-1, operand.shape[-1]).split(sizes)


def _on_device(name: str, left: Operand, right: Operand, groups: Groups) -> torch.Tensor:
    left, right, splits = cast(tuple[torch.Tensor, torch.Tensor, torch.Tensor], (left, right, groups.splits))
    right = right if right.ndim == 3 else right.reshape(-1, right.shape[-1])
    return gemm_grouped.multiply(name, left.reshape(-1, left.shape[-1]), right, splits)
