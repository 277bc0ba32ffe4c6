"""Meta tensors that stand for those of a GPU, so that a call without memory allocates what it would allocate there.

Inside of :func:`standing_for`, the launch of a kernel makes its results and what it needs beside them, and queues nothing; and
products are native, or in groups, where they are on such a device. Outside, definitions compute meta tensors as those of a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_stands_for: ContextVar[tuple[tuple[int, int], tuple[int, int]]] = ContextVar("opfuse_stands_for", default=((0, 0), (0, 0)))


@contextmanager
def standing_for(arch: tuple[int, int], cuda: tuple[int, int]) -> Iterator[None]:
    """Inside the block, meta tensors of this context stand for those of a GPU of this compute capability, under this CUDA."""
    reset = _stands_for.set((arch, cuda))
    try:
        yield
    finally:
        _stands_for.reset(reset)


stood_for = _stands_for.get
"""Compute capability and CUDA version of what meta tensors stand for; zeros where they stand for nothing."""


def stands_for_gpu() -> bool:
    """Whether meta tensors stand for those of a GPU."""
    return stood_for()[0] > (0, 0)


def as_on_gpu(x: torch.Tensor) -> bool:
    """Whether ``x`` is on a GPU, or stands for a tensor there."""
    return x.is_cuda or (x.is_meta and stands_for_gpu())


def arch_of(device: int) -> tuple[int, int]:
    """The compute capability of a CUDA device; of -1, that of meta tensors, what these stand for."""
    return torch.cuda.get_device_capability(device) if device >= 0 else stood_for()[0]
