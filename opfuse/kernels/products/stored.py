"""An operand of a product as it is stored."""

from __future__ import annotations

from typing import NamedTuple

import torch

from opfuse.kernels.engine.variants import on_bytes
from opfuse.numerics.layouts import Layout


class Stored(NamedTuple):
    """The arrays of a plane, and where its bytes lie in them."""

    data: torch.Tensor
    scale: torch.Tensor
    amax: torch.Tensor | None
    layout: Layout

    @property
    def in_place(self) -> bool:
        """Whether the arrays are what the layout says, contiguous, on 16 bytes (a scale for all or for each row: on any)."""
        arrays = (self.data, self.layout.data_shape, 16), (self.scale, self.layout.scale_shape, 16 if self.scale.ndim > 1 else 4)
        return all(x.shape == shape and x.is_contiguous() and on_bytes(x, start) for x, shape, start in arrays)

    @property
    def has_scales_of_groups(self) -> bool:
        """Whether groups of its rows (row_groups.py) have scales of their own: those of each, one after the other."""
        return self.scale.ndim > len(self.layout.scale_shape)

    def to(self, device: torch.device | str) -> Stored:
        """The same plane on another device."""
        amax = None if self.amax is None else self.amax.to(device)
        return self._replace(data=self.data.to(device), scale=self.scale.to(device), amax=amax)

    def moved_in_place(self) -> Stored:
        """Itself, or a copy whose arrays lie as :attr:`in_place` wants them."""
        if self.in_place:
            return self
        return self._replace(data=self.data.clone().contiguous(), scale=self.scale.clone().contiguous())
