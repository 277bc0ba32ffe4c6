"""What a call of a normalisation comes to: its tensors, what its kernel is compiled for, the threads that share a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from opfuse.kernels.engine import rows
from opfuse.kernels.engine.launch import Grid
from opfuse.kernels.engine.parameters import parameter_of
from opfuse.kernels.engine.registry import is_dense
from opfuse.kernels.engine.variants import C_TYPES, VECTOR, on_bytes
from opfuse.numerics.norm import EIGHT, THREADS, Norm, NormKind, Statistics, team

_NORM = parameter_of("norm.cuh", "Norm")

_KINDS = {"rms_norm": "RMS_NORM", "layer_norm": "LAYER_NORM", "l2_normalization": "L2_NORM"}


class NormVariant(NamedTuple):
    """What the variant of a kernel depends on in a call, beside the tensors that the kernel makes.

    weight: the type of the parameters, fp32 where there are none. is_aligned: every eight of columns of every tensor starts where
    a vector can, and is whole.
    """

    kind: NormKind
    zero_centered: bool
    x: torch.dtype
    weight: torch.dtype
    columns: int
    is_aligned: bool

    @property
    def packs(self) -> int:
        """Eights of columns that a thread has."""
        return rows.packs(self.columns)

    def held(self, *dtypes: torch.dtype) -> int:
        """The eights of tensors of these types that a thread can hold in registers, 0 if they are too many."""
        return rows.held(self.columns, self._widest(*dtypes))

    def resident(self, *dtypes: torch.dtype, twice: bool = False) -> int:
        """Blocks of a forward kernel of these types that share a multiprocessor, as its registers allow.

        twice: whether the kernel makes each value twice, which takes more of them where there is a mean as well.
        """
        if not self._is_light(*dtypes):
            return 1
        many = self.kind == "layer_norm" and (self.zero_centered or twice or team(self.columns) < THREADS)
        wide = self._is_wide(*dtypes)
        return 4 - (many or wide) - (many and wide and twice)

    def resident_backward(self, *dtypes: torch.dtype) -> int:
        """The same of a backward kernel."""
        return 2 if self._is_light(*dtypes) and not (self.kind == "layer_norm" and self._is_wide(*dtypes)) else 1

    def defines(self, held: int) -> dict[str, str | int]:
        """What Norm in norm.cuh is compiled with."""
        return {
            "IN": C_TYPES[self.x],
            "WEIGHT": C_TYPES[self.weight],
            "KIND": _KINDS[self.kind],
            "ZERO_CENTERED": self.zero_centered,
            **rows.defines(self.columns, held, is_aligned=self.is_aligned),
        }

    def _is_light(self, *dtypes: torch.dtype) -> bool:
        """Whether a thread has so few registers' worth of values that several blocks can share a multiprocessor."""
        return self._bytes(*dtypes) <= rows.MOST_BYTES // 2 and self.is_aligned

    def _is_wide(self, *dtypes: torch.dtype) -> bool:
        """Whether parameters take many registers, too."""
        return self.weight.itemsize > 2 and self.kind != "l2_normalization" and self._bytes(*dtypes) > rows.MOST_BYTES // 4

    def _bytes(self, *dtypes: torch.dtype) -> int:
        return self.packs * self._widest(*dtypes)

    def _widest(self, *dtypes: torch.dtype) -> int:
        return max(dtype.itemsize for dtype in (self.x, *dtypes))


class NormCall(NamedTuple):
    """A normalisation of a contiguous matrix, with contiguous parameters, and its statistics, given or to be stored."""

    x: Tensor
    norm: Norm
    statistics: Statistics
    rows: int
    columns: int

    @property
    def grid(self) -> Grid:
        """Blocks for all rows."""
        return rows.grid(self.rows, self.columns)

    def form(self, *tensors: Tensor) -> NormVariant:
        """With these other tensors."""
        norm, aligned = self.norm, self.columns % EIGHT == 0
        for each in (self.x, norm.weight, norm.bias, *tensors):
            aligned = aligned and (each is None or on_bytes(each, min(VECTOR, EIGHT * each.element_size())))
        weight = torch.float32 if norm.weight is None else norm.weight.dtype
        return NormVariant(norm.kind, norm.zero_centered_gamma, self.x.dtype, weight, self.columns, aligned)

    def without_bias(self) -> NormCall:
        """Without the address of beta, which no gradient reads: a tape could not say where it comes from."""
        return self._replace(norm=replace(self.norm, bias=None))

    def fields(self) -> tuple[int | float, ...]:
        """Those of Norm in norm.cuh."""
        norm, size = self.norm, {"rows": self.rows, "columns": self.columns, "packs": rows.packs(self.columns)}
        tensors = addresses(x=self.x, weight=norm.weight, bias=norm.bias, rstd=self.statistics.rstd, mean=self.statistics.mean)
        return _NORM(**tensors, **size, size=float(self.columns), eps=norm.eps)


def addresses(**tensors: Tensor | None) -> dict[str, int]:
    """Of tensors by name; 0 for those that are not there."""
    return {name: 0 if t is None else t.data_ptr() for name, t in tensors.items()}


def call_of(
    x: Tensor, norm: Norm, statistics: Statistics | None, dtypes: Sequence[torch.dtype], *others: Tensor
) -> NormCall | None:
    """The call of a kernel that makes ``dtypes`` and reads ``others``, too; None if a kernel cannot take it.

    Without statistics there is new memory for them. ShapeError if shapes do not fit.
    """
    height, columns = norm.matrix(x)
    weight, bias = norm.weight, norm.bias
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        return None
    for t in (x, weight, bias, *others):
        if t is not None and not (t.dtype in C_TYPES and t.device == x.device and is_dense(t)):
            return None
    for dtype in dtypes:
        if dtype not in C_TYPES:
            return None
    if statistics is None:
        rstd = torch.empty(norm.leading(x), dtype=torch.float32, device=x.device)
        mean = torch.empty(rstd.shape, dtype=torch.float32, device=x.device) if norm.is_centered else None
        statistics = Statistics(rstd, mean)
    if not all(t is None or t.is_contiguous() for t in (weight, bias, *statistics)):
        weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
        norm, statistics = replace(norm, weight=weight, bias=bias), statistics.each(Tensor.contiguous)
    return NormCall(x.contiguous(), norm, statistics, height, columns)
