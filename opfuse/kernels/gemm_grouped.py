"""Products of groups of rows in one launch, by torch's grouped product: the ends of the groups stay on the device.

    fprop   y_i = x_i W_i^T       x (M, K), W (G, N, K)
    dgrad   dx_i = dy_i W_i       dy (M, N)
    wgrad   dW_i = dy_i^T x_i     (G, N, K)

Operands and results are bf16, sums fp32. Nothing waits for the device, and a CUDA graph can capture it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F

from opfuse.kernels.variants import on_bytes

SINCE = (9, 0)
"""The least compute capability with a kernel of its own; below it torch would read the ends and loop."""

ALIGNMENT = 16
"""Bytes on which rows start."""

_STALE = (10, 0)
"""From here on the product of a group without rows is not written to the weight gradient."""

PRODUCTS: Mapping[str, Callable[..., torch.Tensor]] = {
    "fprop": lambda x, w, ends: F.grouped_mm(x, w.transpose(1, 2), offs=ends),
    "dgrad": lambda dy, w, ends: F.grouped_mm(dy, w, offs=ends),
    "wgrad": lambda dy, x, ends: F.grouped_mm(dy.t(), x, offs=ends),
}


def takes(x: torch.Tensor, weights: Sequence[torch.Tensor], splits: torch.Tensor) -> bool:
    """Whether the products of ``x`` and ``weights`` (..., N, K), as they lie, and of their gradients can be made so."""
    if not splits.is_cuda or _arch(splits.get_device()) < SINCE:
        return False
    sizes = x.shape[-1], *(size for w in weights for size in w.shape[-2:])
    aligned = all(size * torch.bfloat16.itemsize % ALIGNMENT == 0 for size in sizes)
    in_place = all(t.is_cuda and t.is_contiguous() and on_bytes(t, ALIGNMENT) for t in (x, *weights))
    return aligned and in_place and all(t.dtype == torch.bfloat16 for t in (x, *weights))


def multiply(name: str, left: torch.Tensor, right: torch.Tensor, splits: torch.Tensor) -> torch.Tensor:
    """The product ``name`` of two operands that :func:`takes` holds for, for groups of ``splits`` rows, which add up to M.

    A group without rows has a weight gradient of zeros. The device stops with an assertion if the sum is another.
    """
    ends = splits.cumsum(0, dtype=torch.int32)
    torch._assert_async(ends[-1] == len(left), "split sizes add up to the rows of the input")
    if not len(left):
        shape = (len(splits), left.shape[1], right.shape[1]) if name == "wgrad" else (0, right.shape[1 if name == "fprop" else 2])
        return left.new_zeros(shape)
    result = PRODUCTS[name](_in_place(left), _in_place(right), ends)
    if name == "wgrad" and _arch(left.get_device()) >= _STALE:
        result.masked_fill_((splits == 0).reshape(-1, 1, 1), 0)
    return result


def _in_place(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    return x if on_bytes(x, ALIGNMENT) else x.clone()


@functools.cache
def _arch(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
