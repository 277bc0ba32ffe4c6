"""Cases of casts of a matrix: hard values, every 16-bit input, edges of tiles, addresses without vectors.

Values are drawn on the CPU, so they are the same for every device.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from opfuse.formats import COLUMNWISE, E4M3, E5M2, ROWWISE, Element, NumberFormat, Usage, fp8_block, fp8_row, fp8_tensor, mxfp8
from opfuse.kernels.casts import block, row, tensor
from opfuse.kernels.engine.registry import Arguments, Case, CaseTable
from opfuse.numerics.casts import line_amaxes, tensor_amax
from opfuse.numerics.layouts import Layout, ceil_div

Matrix = Callable[[torch.Generator, torch.dtype], torch.Tensor]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes of what casts and chains read and products return, by their names in cases."""
_ELEMENTS = (E4M3, E5M2)
_PLANES: tuple[tuple[Usage, ...], ...] = ((ROWWISE,), (COLUMNWISE,), (ROWWISE, COLUMNWISE))


def hard(rows: int, columns: int, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Random values with a magnitude for each 16 x 16 tile, from deep in the subnormals to the largest; some tiles are 0."""
    reach = 12 if dtype == torch.float16 else 120
    tiles = (ceil_div(rows, 16), ceil_div(columns, 16))
    magnitude = torch.exp2(torch.randint(-reach - 25, reach, tiles, generator=generator).double())
    magnitude[torch.rand(tiles, generator=generator) < 0.1] = 0
    magnitude = magnitude.repeat_interleave(16, 0).repeat_interleave(16, 1)[:rows, :columns]
    return (torch.randn(rows, columns, generator=generator).double().clamp(-3.9, 3.9) * magnitude).to(dtype)


def _hard(rows: int, columns: int) -> Matrix:
    return lambda generator, dtype: hard(rows, columns, generator, dtype)


def _nonfinite(generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """A NaN and both infinities among finite values."""
    x = torch.randn(272, 200, generator=generator).to(dtype)
    x[3, 70], x[140, 8], x[271, 199] = torch.nan, torch.inf, -torch.inf
    return x


def _every_pattern(generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Every 16-bit value, in rows whose largest magnitudes differ; in fp32, all patterns of the high 16 bits."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).reshape(256, 256).t()
    if dtype == torch.float32:
        return (patterns << 16 | torch.randint(0, 1 << 16, (256, 256), generator=generator, dtype=torch.int32)).view(dtype)
    return patterns.to(torch.int16).view(dtype)


def _misaligned(generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Contiguous, one element behind an address from which vectors can be loaded."""
    return hard(1, 272 * 224 + 1, generator, dtype).flatten()[1:].view(272, 224)


def _transposed(generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Contiguous in its columns."""
    return hard(200, 272, generator, dtype).t()


MATRIX_KINDS: dict[str, Matrix] = {
    "whole tiles": _hard(512, 256),
    "parts of tiles": _hard(272, 200),
    "parts of blocks of tiles": _hard(160, 1120),
    "odd": _hard(259, 67),
    "a row": _hard(1, 4099),
    "a column": _hard(4099, 1),
    "every pattern": _every_pattern,
    "nonfinite": _nonfinite,
    "misaligned": _misaligned,
    "transposed": _transposed,
    "empty": _hard(0, 32),
}
_SHARED_ROWS = ((9, 768), (9, 1024), (6, 1032), (7, 2056), (5, 3001), (5, 4096))
"""Shapes of matrices whose rows 32, 64 or 128 threads share, and of which the last block has fewer rows than it could."""
_ROW_KINDS = MATRIX_KINDS | {
    "rows of one word each": _hard(70, 8),
    **{f"{rows} rows of {columns}": _hard(rows, columns) for rows, columns in _SHARED_ROWS},
    "rows of whole blocks": _hard(5, 8192),
    "rows that are just held": _hard(3, 16376),
    "odd rows that are just held": _hard(3, 16379),
    "rows that are not held": _hard(3, 33000),
}
"""With rows of each length that kernels treat in a way of its own."""


def _place(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of ``x`` on a device, with the same offset and strides in a storage of its own."""
    storage = torch.empty(x.untyped_storage().nbytes() // x.element_size(), dtype=x.dtype, device=device)
    placed = storage.as_strided(x.shape, x.stride(), x.storage_offset())
    return placed.copy_(x)


class _CastArguments(NamedTuple):
    """The arguments that calls of casts share."""

    kind: str
    dtype: torch.dtype
    element: Element
    usages: tuple[Usage, ...]

    def matrix(self, device: torch.device) -> torch.Tensor:
        return matrix(self.kind, _ROW_KINDS[self.kind], self.dtype, device)

    def layouts(self, x: torch.Tensor, fmt: Callable[[Element], NumberFormat], *, swizzled: bool = False) -> list[Layout]:
        return [Layout(fmt(self.element), usage, (x.shape[0], x.shape[1]), swizzled) for usage in self.usages]


def matrix(kind: str, make: Matrix, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The matrix that ``make`` draws for this kind and dtype, the same on every device."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{kind} {dtype}".encode()))
    return _place(make(generator, dtype), device)


def _tensor(kind: str, dtype: torch.dtype, device: torch.device) -> Arguments:
    return Arguments((matrix(kind, MATRIX_KINDS[kind], dtype, device),))


def _current(given: _CastArguments, rule: tuple[float, bool], device: torch.device) -> Arguments:
    """A call with the amax of the finite values, so that other values meet a scale; "nonfinite" has the amax of all."""
    x, (eps, pow2) = given.matrix(device), rule
    amax = tensor_amax(x if given.kind == "nonfinite" else x.where(x.isfinite(), 0))
    return Arguments((x, amax, given.layouts(x, fp8_tensor)), {"eps": eps, "pow2": pow2})


def _recording(given: _CastArguments, scale: float, device: torch.device) -> Arguments:
    """A call whose recorded amax already exceeds that of some matrices."""
    x = given.matrix(device)
    numbers = (torch.full((1,), value, dtype=torch.float32, device=device) for value in (scale, 2.0**-20))
    return Arguments((x, *numbers, given.layouts(x, fp8_tensor)))


def _mx(given: _CastArguments, rule: tuple[int, str, bool], device: torch.device) -> Arguments:
    x, (rows, rounding, swizzled) = given.matrix(device), rule
    return Arguments((x, given.layouts(x, mxfp8, swizzled=swizzled)), {"rows": rows, "rounding": rounding})


def _block(given: _CastArguments, rule: tuple[int, float, bool], device: torch.device) -> Arguments:
    x, (dims, eps, pow2) = given.matrix(device), rule
    return Arguments((x, given.layouts(x, lambda element: fp8_block(element, dims))), {"eps": eps, "pow2": pow2})


def _row(given: _CastArguments, rule: tuple[float, bool], device: torch.device) -> Arguments:
    x, (eps, pow2) = given.matrix(device), rule
    return Arguments((x, given.layouts(x, fp8_row)), {"eps": eps, "pow2": pow2})


def _known_lines(given: _CastArguments, rule: tuple[float, bool], device: torch.device) -> Arguments:
    """A call with amaxes below those of the lines, so that values saturate."""
    x, (eps, pow2) = given.matrix(device), rule
    amaxes = [amax * 0.7 for amax in line_amaxes(x, given.usages)]
    return Arguments((x, amaxes, given.layouts(x, fp8_row)), {"eps": eps, "pow2": pow2})


def _lines(kind: str, dtype: torch.dtype, usages: Sequence[Usage], device: torch.device) -> Arguments:
    return Arguments((matrix(kind, MATRIX_KINDS[kind], dtype, device), usages))


def _combined(
    case: Callable[..., Arguments], last: Sequence[object], *, full: Sequence[str] = (), kinds: Iterable[str] = MATRIX_KINDS
) -> dict[str, Case]:
    """Every kind of matrix, dtype, element and choice of planes, each with one of the ``last`` arguments in turn.

    full: kinds of matrices that meet all of them.
    """
    made: dict[str, Case] = {}
    turn = itertools.cycle(last)
    for kind, dtype, element, usages in itertools.product(kinds, DTYPES, _ELEMENTS, _PLANES):
        combination = _CastArguments(kind, DTYPES[dtype], element, usages)
        for argument in last if kind in full else (next(turn),):
            name = f"{kind}, {dtype}, {element.name}, {'+'.join(usages)}, {argument}"
            made[name] = functools.partial(case, combination, argument)
    return made


# How many rules there are shares no factor with the numbers of kinds and dtypes, so each meets all combinations of these in turn.
_RULES = ((0.0, False), (0.0, True), (0.25, True), (0.25, False), (0.0, False), (1e-30, True), (0.0, True))
_SCALES = (3.7, 2.0**-40, 2.0**60, 1.0, 2.0**-126, 1e30, 0.3)
_MX_RULES = (
    (1, "ceil", False),
    (1, "ceil", True),
    (32, "ceil", False),
    (32, "floor", True),
    (1, "floor", True),
)
_BLOCK_RULES = (
    (1, 0.0, True),
    (2, 0.0, True),
    (1, 0.0, False),
    (2, 0.25, False),
    (1, 0.25, True),
)

CASES: CaseTable = {
    tensor.tensor_amax: {
        f"{kind}, {name}": functools.partial(_tensor, kind, dtype) for kind in MATRIX_KINDS for name, dtype in DTYPES.items()
    },
    tensor.cast_current: _combined(_current, _RULES),
    tensor.cast_recording: _combined(_recording, _SCALES),
    tensor.cast_mx: _combined(_mx, _MX_RULES, full=("parts of blocks of tiles", "misaligned")),
    block.cast_block: _combined(_block, _BLOCK_RULES, full=("parts of tiles", "misaligned", "nonfinite")),
    row.line_amaxes: {
        f"{kind}, {dtype}, {'+'.join(usages)}": functools.partial(_lines, kind, DTYPES[dtype], usages)
        for kind, dtype, usages in itertools.product(MATRIX_KINDS, DTYPES, _PLANES)
    },
    row.cast_row: _combined(_row, _RULES, full=("misaligned", "nonfinite"), kinds=_ROW_KINDS),
    row.cast_lines: _combined(_known_lines, _RULES),
}
