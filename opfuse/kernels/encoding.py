"""Casts as values: what a kernel that makes a tensor may do with it in place of storing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from opfuse.kernels import quantize
from opfuse.kernels.cast import cast_recording
from opfuse.kernels.cast_block import cast_block
from opfuse.kernels.layouts import Layout

Encoded = tuple[list[Tensor], Tensor]
"""Data of the planes and their decode scale."""


@dataclass(frozen=True, eq=False)
class Recording:
    """A per-tensor cast under a given scale that raises ``amax``, as :func:`quantize.cast_recording`.

    scale, amax: fp32 (1,). layouts: planes of the matrix that a result (..., columns) is.
    """

    scale: Tensor
    amax: Tensor
    layouts: Sequence[Layout]

    def __call__(self, x: Tensor) -> Encoded:
        """Of a tensor that exists."""
        return cast_recording(x.reshape(-1, x.shape[-1]), self.scale, self.amax, self.layouts)


@dataclass(frozen=True, eq=False)
class Blocks:
    """A cast to fp32-scaled blocks of 128, as :func:`quantize.cast_block`. layouts: planes of one format."""

    layouts: Sequence[Layout]
    eps: float = 0.0
    pow2: bool = True

    def __call__(self, x: Tensor) -> list[quantize.Encoded]:
        """Of a tensor that exists."""
        return cast_block(x.reshape(-1, x.shape[-1]), self.layouts, eps=self.eps, pow2=self.pow2)
