"""Cases of the NVFP4 cast and its global amaxes: matrices and options."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from opfuse.formats import COLUMNWISE, NVFP4, ROWWISE, NumberFormat, Usage
from opfuse.kernels.casts import nvfp4 as launches
from opfuse.kernels.engine.registry import Arguments, Case, CaseTable
from opfuse.numerics import casts as definition
from opfuse.numerics.hadamard import NO_SIGNS, SIGNS
from opfuse.numerics.layouts import Layout, ceil_div
from tests.kernels.cases.matrices import DTYPES, MATRIX_KINDS, hard, matrix

_PLANES: tuple[tuple[Usage, ...], ...] = ((ROWWISE,), (COLUMNWISE,), (ROWWISE, COLUMNWISE))


def within(rows: int, columns: int, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Tiles of 16 x 16 whose magnitudes block scales can span under one global scale, a few smaller; some values lie on ties."""
    tiles = (ceil_div(rows, 16), ceil_div(columns, 16))
    magnitude = torch.exp2(torch.randint(-18, 3, tiles, generator=generator).double())
    magnitude[torch.rand(tiles, generator=generator) < 0.05] = 0
    magnitude = magnitude.repeat_interleave(16, 0).repeat_interleave(16, 1)[:rows, :columns]
    x = torch.randn(rows, columns, generator=generator).double()
    x = torch.where(torch.rand(rows, columns, generator=generator) < 0.3, (x * 8).round() / 8, x)
    return (x * magnitude).to(dtype)


@dataclass(frozen=True)
class _MatrixKind:
    """Matrices of one shape; ``make`` draws one from a generator, in a dtype."""

    rows: int
    columns: int
    make: Callable[[int, int, torch.Generator, torch.dtype], torch.Tensor] = within

    def __call__(self, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
        return self.make(self.rows, self.columns, generator, dtype)


def _subnormal(rows: int, columns: int, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Values about the least normal one of ``dtype``."""
    return (within(rows, columns, generator, torch.float64) * (4 * torch.finfo(dtype).smallest_normal)).to(dtype)


def _misaligned(rows: int, columns: int, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Contiguous, one element behind an address from which vectors can be loaded."""
    return within(1, rows * columns + 1, generator, dtype).flatten()[1:].view(rows, columns)


def _transposed(rows: int, columns: int, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Contiguous in its columns."""
    return within(columns, rows, generator, dtype).t()


def _known(kind: str) -> Callable[[int, int, torch.Generator, torch.dtype], torch.Tensor]:
    return lambda rows, columns, generator, dtype: MATRIX_KINDS[kind](generator, dtype)


_KINDS = {
    "whole tiles": _MatrixKind(512, 256),
    "parts of tiles": _MatrixKind(272, 208),
    "half blocks": _MatrixKind(144, 200),
    "even": _MatrixKind(262, 70),
    "two rows": _MatrixKind(2, 4114),
    "two columns": _MatrixKind(4114, 2),
    "short lines": _MatrixKind(16, 2064),
    "huge and tiny": _MatrixKind(272, 208, hard),
    "subnormal": _MatrixKind(144, 96, _subnormal),
    "every pattern": _MatrixKind(256, 256, _known("every pattern")),
    "nonfinite": _MatrixKind(272, 200, _known("nonfinite")),
    "misaligned": _MatrixKind(272, 224, _misaligned),
    "transposed": _MatrixKind(272, 208, _transposed),
    "empty": _MatrixKind(0, 32),
}
_ALL_OPTIONS = ("parts of tiles", "even", "misaligned", "every pattern")


class _Options(NamedTuple):
    """The options of an NVFP4 cast. least: a factor below 1 on the global amax, under which some blocks exceed its range."""

    rows: int = 1
    stochastic: bool = False
    error: definition.ErrorMode | None = None
    signs: tuple[int, ...] = ()
    per_row: bool = False
    swizzled: bool = False
    least: float = 1.0

    def formats(self) -> dict[Usage, NumberFormat]:
        row = NVFP4.replace(per_row=self.per_row, encode_max=256 if self.error else NVFP4.encode_max)
        return {ROWWISE: row, COLUMNWISE: row.replace(rht=self.signs)}

    def fits(self, rows: int, dtype: torch.dtype, usages: Sequence[Usage]) -> bool:
        """Whether there are such planes: rotated ones only of bf16, and of whole blocks."""
        return not (COLUMNWISE in usages and self.signs) or (dtype == torch.bfloat16 and rows % 16 == 0)

    def __str__(self) -> str:
        told = {
            "16x16": self.rows > 1,
            "stochastic": self.stochastic,
            f"four or six by {self.error}": self.error,
            "rotated": self.signs == SIGNS,
            "rotated without signs": self.signs == NO_SIGNS,
            "by line": self.per_row,
            "swizzled": self.swizzled,
            f"amax times {self.least:g}": self.least != 1,
        }
        return " ".join(name for name, on in told.items() if on) or "plain"


_OPTIONS = (
    _Options(),
    _Options(swizzled=True, least=2.0**-9),
    _Options(rows=16),
    _Options(signs=SIGNS),
    _Options(signs=SIGNS, swizzled=True, least=2.0**-60),
    _Options(signs=NO_SIGNS),
    _Options(signs=SIGNS, stochastic=True),
    _Options(signs=NO_SIGNS, stochastic=True, swizzled=True),
    _Options(stochastic=True, least=0.3),
    _Options(rows=16, stochastic=True, swizzled=True),
    _Options(error="MAE"),
    _Options(error="MSE", swizzled=True, least=2.0**-40),
    _Options(rows=16, error="MSE"),
    _Options(rows=16, error="MAE", swizzled=True),
    _Options(per_row=True),
    _Options(per_row=True, swizzled=True, error="MSE"),
    _Options(least=2.0**-100, rows=16, swizzled=True),
)


@functools.cache
def _here(kind: str, dtype: torch.dtype) -> torch.Tensor:
    return matrix(kind, _KINDS[kind], dtype, torch.device("cpu"))


class _MatrixArguments(NamedTuple):
    """The arguments of a function of a matrix and layouts."""

    kind: str
    dtype: torch.dtype
    usages: tuple[Usage, ...]
    options: _Options

    def matrix(self, device: torch.device) -> torch.Tensor:
        here = _here(self.kind, self.dtype)
        return here if device.type == "cpu" else matrix(self.kind, _KINDS[self.kind], self.dtype, device)

    def layouts(self, x: torch.Tensor) -> list[Layout]:
        formats = self.options.formats()
        return [Layout(formats[usage], usage, (x.shape[0], x.shape[1]), self.options.swizzled) for usage in self.usages]


def _cast(given: _MatrixArguments, device: torch.device) -> Arguments:
    """A call with the amax of the finite values, so that other values meet a scale; "nonfinite" has the amax of all."""
    x, options, here = given.matrix(device), given.options, _here(given.kind, given.dtype)
    layouts = given.layouts(x)
    measured = definition.amaxes_nv(here if given.kind == "nonfinite" else here.where(here.isfinite(), 0), layouts)
    amaxes = [(amax * options.least).to(device) for amax in measured]
    if not (options.signs or options.per_row):
        amaxes = amaxes[:1] * len(layouts)
    seed = torch.tensor([0x123456789ABCDEF0 - len(given.kind)], device=device) if options.stochastic else None
    return Arguments((x, amaxes, layouts), {"rows": options.rows, "seed": seed, "error": options.error})


def _amaxes(given: _MatrixArguments, device: torch.device) -> Arguments:
    x = given.matrix(device)
    return Arguments((x, given.layouts(x)))


def _combined(case: Callable[[_MatrixArguments, torch.device], Arguments], options: Sequence[_Options]) -> dict[str, Case]:
    """Every kind of matrix, dtype and choice of planes with the next options that fit; some kinds with all options."""
    made: dict[str, Case] = {}
    turn = itertools.cycle(options)
    for kind, (name, dtype), usages in itertools.product(_KINDS, DTYPES.items(), _PLANES):
        fitting = [each for each in options if each.fits(_KINDS[kind].rows, dtype, usages)]
        if kind not in _ALL_OPTIONS:
            fitting = [next(each for each in turn if each in fitting)]
        for each in fitting:
            combination = _MatrixArguments(kind, dtype, usages, each)
            made[f"{kind}, {name}, {'+'.join(usages)}, {each}"] = functools.partial(case, combination)
    return made


CASES: CaseTable = {
    launches.amaxes_nv: _combined(_amaxes, (_Options(), _Options(signs=SIGNS), _Options(signs=NO_SIGNS), _Options(per_row=True))),
    launches.cast_nv: _combined(_cast, _OPTIONS),
}
