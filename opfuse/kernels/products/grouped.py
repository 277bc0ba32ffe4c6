"""Products of groups of rows in one launch, by torch's grouped product: the ends of the groups stay on the device.

    fprop   y_i = x_i W_i^T       x (M, K), W (G, N, K)
    dgrad   dx_i = dy_i W_i       dy (M, N)
    wgrad   dW_i = dy_i^T x_i     (G, N, K)

Operands and results are bf16, sums fp32. Nothing waits for the device, and a CUDA graph can capture it.

For sizes that the host knows it is used where it is faster: always for gradients, whose bits may then differ from those of each
group alone; for outputs where groups are so small that the host, queueing one product after the other, would decide
(:data:`FASTER`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F

from opfuse.kernels.engine.launch import arch_of as _arch
from opfuse.kernels.engine.launch import as_on_gpu
from opfuse.kernels.engine.variants import on_bytes
from opfuse.torch_private.operations import assert_on_device

SINCE = (9, 0)
"""The least compute capability with a kernel of its own; below it torch would read the ends and loop."""

ALIGNMENT = 16
"""Bytes on which rows start."""

FASTER: Mapping[str, float] = {"fprop": 1 << 33, "dgrad": math.inf, "wgrad": math.inf}
"""Up to how many operations of a group with rows, on average, one launch is faster than one for each group on an H200.

fprop is not where a group keeps the device longer than the host takes to queue it. By benchmarks/grouped.py: with 3.2e9 for a
group a step group by group took 3 times as long, with 6.0e10 a forward pass took as long, with more less.
"""

STACKED = 512
"""For how many rows a product takes as long as the copy of a weight that lies alone, to those of other groups."""

_STALE = (10, 0)
"""From here on the product of a group without rows is not written to the weight gradient."""

PRODUCTS: Mapping[str, Callable[..., torch.Tensor]] = {
    "fprop": lambda x, w, ends: F.grouped_mm(x, w.transpose(1, 2), offs=ends),
    "dgrad": lambda dy, w, ends: F.grouped_mm(dy, w, offs=ends),
    "wgrad": lambda dy, x, ends: F.grouped_mm(dy.t(), x, offs=ends),
}


def takes(rows: Sequence[torch.Tensor], weights: Sequence[torch.Tensor] = ()) -> bool:
    """Whether these operands can be multiplied so: matrices of rows, and weights (..., N, K) of any product."""
    operands = (*rows, *weights)
    if not all(t.dtype == torch.bfloat16 and as_on_gpu(t) for t in operands):
        return False
    widths = (*(t.shape[-1] for t in rows), *(size for w in weights for size in w.shape[-2:]))
    return takes_widths(widths, torch.bfloat16, operands[0].get_device())


def takes_widths(widths: Sequence[int], dtype: torch.dtype, device: int) -> bool:
    """Whether a CUDA device multiplies operands with rows of so many elements of ``dtype`` so."""
    whole = all(width * dtype.itemsize % ALIGNMENT == 0 for width in widths)
    return dtype == torch.bfloat16 and whole and _arch(device) >= SINCE


def is_faster(name: str, sizes: Sequence[int], weight: torch.Tensor, *, apart: bool) -> bool:
    """Whether products of groups of so many rows with a ``weight`` (N, K) for each save time in one launch. apart: each is a
    tensor of its own.
    """
    rows = sum(sizes) + apart * STACKED * len(sizes)
    return 2.0 * rows * weight.numel() <= FASTER[name] * sum(map(bool, sizes))


def ends_of(splits: torch.Tensor, rows: int) -> torch.Tensor:
    """int32 (G,): where each group of ``splits`` rows ends. The device stops with an assertion if they do not add up."""
    ends = splits.cumsum(0, dtype=torch.int32)
    assert_on_device(ends[-1] == rows, "split sizes add up to the rows of the input")
    return ends


def multiply(name: str, left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The product ``name`` of two operands that :func:`takes` holds for, copied where they are strided or misaligned.

    A group without rows has a weight gradient of zeros.
    """
    if not len(left):
        shape = (len(ends), left.shape[1], right.shape[1]) if name == "wgrad" else (0, right.shape[1 if name == "fprop" else 2])
        return left.new_zeros(shape)
    result = PRODUCTS[name](_in_place(left), _in_place(right), ends)
    if name == "wgrad" and _arch(left.get_device()) >= _STALE:
        empty = ends == torch.cat((ends.new_zeros(1), ends[:-1]))
        result.masked_fill_(empty.reshape(-1, 1, 1), 0)
    return result


def _in_place(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a contiguous copy on 16 bytes."""
    x = x.contiguous()
    return x if on_bytes(x, ALIGNMENT) else x.clone()
