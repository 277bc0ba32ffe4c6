"""Base classes for your own quantizers, as TransformerEngine has them: plain, mutable classes."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any, Self

import torch


class QuantizedTensorStorage:
    """The result of your own quantizer: it has ``dequantize()``, or ``data``, ``scale``, ``data_t`` and ``scale_t``."""


class PlainQuantizer(ABC):
    """``opfuse.te.Quantizer``. Derive from it, and return it from a factory: ``CustomRecipe(qfactory=lambda role: Mine())``.

    Products multiply what is dequantized (:class:`opfuse.tensors.quantizers.ForeignQuantizer` says how it is read).
    """

    def __init__(self, *, rowwise: bool = True, columnwise: bool = True) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise
        self.internal = self.optimize_for_gemm = False

    @abstractmethod
    def quantize(self, tensor: torch.Tensor, **options: Any) -> Any:
        """The cast of a matrix (rows, columns)."""

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Choose the planes to make; None leaves one as it is."""
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def copy(self) -> Self:
        """Another object with the same settings."""
        return copy.copy(self)

    def __call__(self, tensor: torch.Tensor) -> Any:
        return self.quantize(tensor)
