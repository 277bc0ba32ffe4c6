"""One call of a normalisation kernel: its tensors, what the kernel is compiled for, and how many threads share a row."""

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
from opfuse.kernels.engine.variants import C_TYPES, VECTOR, addresses, on_bytes
from opfuse.numerics.norm import EIGHT, THREADS, Norm, NormKind, Statistics, team

_NORM = parameter_of("norm.cuh", "Norm")

_KINDS = {"rms_norm": "RMS_NORM", "layer_norm": "LAYER_NORM", "l2_normalization": "L2_NORM"}


class NormVariant(NamedTuple):
    """What a kernel is compiled for in a call, beside the dtypes of the tensors that it makes.

    x, weight: dtypes of the input and of the parameters; fp32 without parameters. is_aligned: the number of columns is a multiple
    of eight, and every eight of every tensor starts at an address from which a vector can be loaded.
    """

    kind: NormKind
    zero_centered: bool
    x: torch.dtype
    weight: torch.dtype
    columns: int
    is_aligned: bool

    @property
    def packs(self) -> int:
        """How many eights of columns each thread has."""
        return rows.packs(self.columns)

    def held(self, *dtypes: torch.dtype) -> int:
        """How many eights of tensors of these dtypes a thread holds in registers: all of its own, or 0 if they are too many."""
        return rows.held(self.columns, self._widest(*dtypes))

    def resident(self, *dtypes: torch.dtype, twice: bool = False) -> int:
        """How many blocks of a forward kernel share a multiprocessor, as far as its registers allow.

        dtypes: of the tensors that it makes. twice: whether it computes each value twice, which takes more registers where there
        is a mean as well.
        """
        if not self._is_light(*dtypes):
            return 1
        many = self.kind == "layer_norm" and (self.zero_centered or twice or team(self.columns) < THREADS)
        wide = self._is_wide(*dtypes)
        return 4 - (many or wide) - (many and wide and twice)

    def resident_backward(self, *dtypes: torch.dtype) -> int:
        """How many blocks of a backward kernel share a multiprocessor."""
        return 2 if self._is_light(*dtypes) and not (self.kind == "layer_norm" and self._is_wide(*dtypes)) else 1

    def defines(self, held: int) -> dict[str, str | int]:
        """The macros with which norm.cuh is compiled."""
        return {
            "IN": C_TYPES[self.x],
            "WEIGHT": C_TYPES[self.weight],
            "KIND": _KINDS[self.kind],
            "ZERO_CENTERED": self.zero_centered,
            **rows.defines(self.columns, held, is_aligned=self.is_aligned),
        }

    def _is_light(self, *dtypes: torch.dtype) -> bool:
        """Whether the values of a thread take so few registers that several blocks can share a multiprocessor."""
        return self._bytes(*dtypes) <= rows.MOST_BYTES // 2 and self.is_aligned

    def _is_wide(self, *dtypes: torch.dtype) -> bool:
        """Whether the parameters take many registers, too."""
        return self.weight.itemsize > 2 and self.kind != "l2_normalization" and self._bytes(*dtypes) > rows.MOST_BYTES // 4

    def _bytes(self, *dtypes: torch.dtype) -> int:
        return self.packs * self._widest(*dtypes)

    def _widest(self, *dtypes: torch.dtype) -> int:
        return max(dtype.itemsize for dtype in (self.x, *dtypes))


class NormCall(NamedTuple):
    """A normalisation of a contiguous matrix with contiguous parameters; statistics are read, or memory to store them in."""

    x: Tensor
    norm: Norm
    statistics: Statistics
    rows: int
    columns: int

    @property
    def grid(self) -> Grid:
        """Enough blocks for all rows."""
        return rows.grid(self.rows, self.columns)

    def form(self, *tensors: Tensor) -> NormVariant:
        """What the kernel is compiled for if it reads or makes ``tensors`` as well."""
        norm, aligned = self.norm, self.columns % EIGHT == 0
        for each in (self.x, norm.weight, norm.bias, *tensors):
            aligned = aligned and (each is None or on_bytes(each, min(VECTOR, EIGHT * each.element_size())))
        weight = torch.float32 if norm.weight is None else norm.weight.dtype
        return NormVariant(norm.kind, norm.zero_centered_gamma, self.x.dtype, weight, self.columns, aligned)

    def without_bias(self) -> NormCall:
        """The call without the address of beta: no gradient reads it, and a recorder could not tell where it comes from."""
        return self._replace(norm=replace(self.norm, bias=None))

    def fields(self) -> tuple[int | float, ...]:
        """The fields of the struct Norm in norm.cuh."""
        norm, size = self.norm, {"rows": self.rows, "columns": self.columns, "packs": rows.packs(self.columns)}
        tensors = {"x": self.x, "weight": norm.weight, "bias": norm.bias, **self.statistics._asdict()}
        return _NORM(**addresses(tensors), **size, size=float(self.columns), eps=norm.eps)


def call_of(
    x: Tensor, norm: Norm, statistics: Statistics | None, dtypes: Sequence[torch.dtype], *others: Tensor
) -> NormCall | None:
    """The call of a kernel that makes tensors of ``dtypes`` and also reads ``others``; None if no kernel can take it.

    statistics: None for new memory, which the kernel fills. ShapeError if shapes do not fit.
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
