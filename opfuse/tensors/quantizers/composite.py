"""Quantizers made of others, or of nothing: high precision as a format, and a format for each direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch

from opfuse.errors import QuantizerError, QuantizerTypeError, describe
from opfuse.formats import COLUMNWISE, IDENTITY, ROWWISE, NumberFormat
from opfuse.kernels.casts.encoding import Encoding, WithOriginal
from opfuse.tensors.quantizers.base import Quantizer, require
from opfuse.tensors.quantizers.ranks import AmaxRanks
from opfuse.tensors.storage import Plane

ColumnwiseSource = Literal["original", "rowwise_dequantized"]


@dataclass(frozen=True, repr=False)
class IdentityQuantizer(Quantizer):
    """Keeps what it is given: the planes hold the caller's tensor itself, or its cast to ``dtype``.

    An update writes into that tensor.
    """

    dtype: torch.dtype | None = field(default=None, kw_only=True)

    @property
    def formats(self) -> tuple[NumberFormat, NumberFormat]:
        return IDENTITY, IDENTITY

    def _planes(self, x: torch.Tensor) -> list[Plane]:
        kept = x if self.dtype is None else x.to(self.dtype)
        return [Plane(layout.usage, layout.format, layout.shape, kept) for layout in self._layouts(x.shape)]

    def _empty_planes(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None) -> list[Plane]:
        return self._planes(torch.zeros(tuple(shape), dtype=dtype, device=device))

    @property
    def input_dtypes(self) -> tuple[torch.dtype, ...] | None:
        """Any dtype can be kept."""
        return None


class QuantizerRequest:
    """What a factory answers in place of a quantizer that needs state which the op keeps. It is no quantizer."""


@dataclass(frozen=True, repr=False)
class HybridQuantizer(Quantizer):
    """One quantizer for each direction; the result is one storage whose planes have different formats.

    Each sub-quantizer is held as a copy that makes its direction only. A direction is cast only if this quantizer asks for it.
    ``columnwise_source`` is what the columnwise plane is the cast of: the "original" values, or "rowwise_dequantized", what the
    rowwise plane holds (it is then made, and dropped if not asked for).
    """

    rowwise_quantizer: Quantizer
    columnwise_quantizer: Quantizer
    columnwise_source: ColumnwiseSource = field(default="original", kw_only=True)

    def __post_init__(self) -> None:
        for name in ("rowwise_quantizer", "columnwise_quantizer"):
            sub = getattr(self, name)
            if not isinstance(sub, Quantizer):
                where, got, cure = f"HybridQuantizer {name}", type(sub).__name__, "pass an instance of one"
                if isinstance(sub, QuantizerRequest):  # its state is that of a whole tensor, not of a direction
                    cure = "return the request itself for the role, or pass a Float8CurrentScalingQuantizer"
                raise QuantizerTypeError(describe(where, wanted="a Quantizer", got=got, cure=cure))
        if self.rowwise_quantizer is self.columnwise_quantizer:
            wanted, got = "two quantizers", "the same object twice"
            raise QuantizerError(describe("HybridQuantizer", wanted=wanted, got=got, cure="pass a copy() for one direction"))
        require(self.columnwise_source, ("original", "rowwise_dequantized"), "HybridQuantizer columnwise_source")
        self._pin("rowwise_quantizer", rowwise=True, columnwise=False)
        self._pin("columnwise_quantizer", rowwise=False, columnwise=True)

    def _pin(self, name: str, *, rowwise: bool, columnwise: bool) -> None:
        sub: Quantizer = getattr(self, name)
        optimize = sub.optimize_for_gemm or self.optimize_for_gemm
        pinned = replace(sub, rowwise=rowwise, columnwise=columnwise, optimize_for_gemm=optimize)
        object.__setattr__(self, name, pinned)

    @cached_property
    def formats(self) -> tuple[NumberFormat, NumberFormat]:
        return self.rowwise_quantizer.formats[0], self.columnwise_quantizer.formats[1]

    def reducing(self, group: AmaxRanks) -> Quantizer | None:
        rowwise, columnwise = (sub.reducing(group) for sub in (self.rowwise_quantizer, self.columnwise_quantizer))
        if rowwise is None or columnwise is None:
            return None
        return replace(self, rowwise_quantizer=rowwise, columnwise_quantizer=columnwise)

    def on_one_rank(self) -> Quantizer:
        rowwise, columnwise = self.rowwise_quantizer.on_one_rank(), self.columnwise_quantizer.on_one_rank()
        return replace(self, rowwise_quantizer=rowwise, columnwise_quantizer=columnwise)

    @property
    def row_local(self) -> bool:
        return self.rowwise_quantizer.row_local

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        return self.rowwise_quantizer.state + self.columnwise_quantizer.state

    def encoding(self, shape: Sequence[int], dtype: torch.dtype) -> Encoding | None:
        """The encoding of a rowwise cast beside the tensor itself, both of which the kernel has; None for other pairs."""
        if not self.keeps_original or type(self).quantize is not Quantizer.quantize:
            return None
        self._check(shape, dtype)
        rowwise = self.rowwise_quantizer.encoding(shape, dtype)
        if rowwise is None:
            return None
        return WithOriginal((*rowwise.layouts, *self.columnwise_quantizer._layouts(shape)), rowwise)

    @cached_property
    def keeps_original(self) -> bool:
        """Whether the planes asked for are a rowwise cast and, columnwise, the tensor as it is."""
        columnwise = self.columnwise_quantizer
        kept = type(columnwise) is IdentityQuantizer and columnwise.dtype is None and self.columnwise_source == "original"
        return kept and bool(self.rowwise and self.columnwise)

    def _planes(self, x: torch.Tensor) -> list[Plane]:
        planes = []
        chained = self.columnwise and self.columnwise_source == "rowwise_dequantized"
        rowwise = self.rowwise_quantizer.quantize(x) if self.rowwise or chained else None
        if rowwise is not None and self.rowwise:
            planes.append(rowwise.plane(ROWWISE))
        if self.columnwise:
            source = rowwise.dequantize(x.dtype) if rowwise is not None and chained else x
            planes.append(self.columnwise_quantizer.quantize(source).plane(COLUMNWISE))
        return planes

    def _empty_planes(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None) -> list[Plane]:
        subs = {ROWWISE: self.rowwise_quantizer, COLUMNWISE: self.columnwise_quantizer}
        return [subs[usage].make_empty(shape, dtype=dtype, device=device).plane(usage) for usage in self.usages]

    @cached_property
    def input_dtypes(self) -> tuple[torch.dtype, ...] | None:
        """The dtypes that every direction asked for takes."""
        subs = ((self.rowwise_quantizer, self.rowwise), (self.columnwise_quantizer, self.columnwise))
        accepted = [sub.input_dtypes for sub, wanted in subs if wanted and sub.input_dtypes is not None]
        return tuple(dtype for dtype in accepted[0] if all(dtype in dtypes for dtypes in accepted)) if accepted else None
