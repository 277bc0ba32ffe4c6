"""What a call of a normalisation comes to: the tensors of its kernels, and the threads that share a row."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from opfuse.kernels.launch import Grid
from opfuse.kernels.layouts import ceil_div
from opfuse.kernels.norm import EIGHT, THREADS, Norm, Statistics, team
from opfuse.kernels.variants import C_TYPES, on_bytes

NORM = "PPPPPqqffI"
"""How Norm in norm.cuh is packed."""

_DENSE = (Tensor, torch.nn.Parameter)
_KINDS = {"rms_norm": "RMS_NORM", "layer_norm": "LAYER_NORM", "l2_normalization": "L2_NORM"}
_MOST_BYTES = 16  # 32 registers of one tensor
_VECTOR = 16  # bytes


@dataclass(frozen=True, eq=False)
class Call:
    """A normalisation of a contiguous matrix, with contiguous parameters, and its statistics, given or to be stored."""

    x: Tensor
    norm: Norm
    statistics: Statistics

    @property
    def parameters(self) -> list[Tensor]:
        """Weight and bias, as far as there are any."""
        return [t for t in (self.norm.weight, self.norm.bias) if t is not None]

    @functools.cached_property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.norm.matrix(self.x)

    @property
    def team(self) -> int:
        """Threads that share a row."""
        return team(self.matrix[1])

    @property
    def teams(self) -> int:
        """Rows of a block."""
        return THREADS // self.team

    @property
    def packs(self) -> int:
        """Eights of columns that a thread has."""
        return ceil_div(self.matrix[1], EIGHT * self.team)

    @property
    def grid(self) -> Grid:
        """Blocks for all rows."""
        return Grid(ceil_div(self.matrix[0], self.teams), THREADS)

    def held(self, *tensors: Tensor) -> int:
        """The eights of these tensors that a thread can hold in registers, 0 if they are too many."""
        return self.packs if self._bytes(self.packs, *tensors) <= _MOST_BYTES else 0

    def resident(self, held: int, *tensors: Tensor) -> int:
        """Blocks of a forward kernel of these tensors that share a multiprocessor, as its registers allow."""
        return 1 if not self._is_light(held, *tensors) else 3 if self.norm.is_centered or self._is_wide(held, *tensors) else 4

    def resident_backward(self, held: int, *tensors: Tensor) -> int:
        """The same of a backward kernel."""
        return 2 if self._is_light(held, *tensors) and not (self.norm.is_centered and self._is_wide(held, *tensors)) else 1

    def _is_light(self, held: int, *tensors: Tensor) -> bool:
        return 0 < self._bytes(held, *tensors) <= _MOST_BYTES // 2 and self.is_aligned(*tensors)

    def _is_wide(self, held: int, *tensors: Tensor) -> bool:
        """Whether fp32 parameters take many registers, too."""
        wide = any(t.element_size() > 2 for t in self.parameters)
        return wide and self._bytes(held, *tensors) > _MOST_BYTES // 4

    def _bytes(self, held: int, *tensors: Tensor) -> int:
        """Of neighbouring elements, one from each eight that a thread holds."""
        return held * max(t.element_size() for t in (self.x, *tensors))

    def is_aligned(self, *tensors: Tensor) -> bool:
        """Whether every eight of columns of these tensors and of its own starts where a vector can, and is whole."""
        each = (self.x, *self.parameters, *tensors)
        vectors = all(on_bytes(t, min(_VECTOR, EIGHT * t.element_size())) for t in each)
        return self.matrix[1] % EIGHT == 0 and vectors

    def defines(self, held: int, *tensors: Tensor) -> dict[str, str | int]:
        """What the variant of a kernel of these and other tensors is compiled with."""
        aligned = self.is_aligned(*tensors)
        return {
            "IN": C_TYPES[self.x.dtype],
            "WEIGHT": C_TYPES[torch.float32 if self.norm.weight is None else self.norm.weight.dtype],
            "KIND": _KINDS[self.norm.kind],
            "ZERO_CENTERED": self.norm.zero_centered_gamma,
            "TEAM": self.team,
            "PACKS": held,
            "ALIGNED": aligned,
            "WHOLE": aligned and held * EIGHT * self.team == self.matrix[1],
        }

    def fields(self) -> tuple[int | float, ...]:
        """Those of Norm in norm.cuh."""
        tensors = (self.x, self.norm.weight, self.norm.bias, *self.statistics)
        size = float(self.matrix[1])
        return (*(0 if t is None else t.data_ptr() for t in tensors), *self.matrix, size, self.norm.eps, self.packs)


def call_of(x: Tensor, norm: Norm, statistics: Statistics | None, dtypes: Sequence[torch.dtype], *others: Tensor) -> Call | None:
    """The call of a kernel that makes ``dtypes`` and reads ``others``, too; None if a kernel cannot take it.

    Without statistics there is new memory for them. ShapeError if shapes do not fit.
    """
    parameters = [t for t in (norm.weight, norm.bias) if t is not None]
    leading = norm.leading(x)
    known = all(t.dtype in C_TYPES and t.device == x.device and type(t) in _DENSE for t in (x, *parameters, *others))
    if not known or not set(dtypes) <= C_TYPES.keys() or len({t.dtype for t in parameters}) > 1:
        return None
    if statistics is None:
        rstd = torch.empty(leading, dtype=torch.float32, device=x.device)
        mean = torch.empty(leading, dtype=torch.float32, device=x.device) if norm.is_centered else None
        statistics = Statistics(rstd, mean)
    weight, bias = (None if t is None else t.contiguous() for t in (norm.weight, norm.bias))
    return Call(x.contiguous(), replace(norm, weight=weight, bias=bias), statistics.each(Tensor.contiguous))
