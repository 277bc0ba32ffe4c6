"""Small calls of casts, on which kernels are compared with their definitions on a device that this project has not recorded.

Matrices have zeros, outliers, the largest and the least magnitudes, parts of tiles, and NaN and infinities or none.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from opfuse.formats import E4M3, E5M2, MXFP4, NVFP4, ROWWISE, USAGES, Element, NumberFormat, fp8_block, fp8_row, fp8_tensor, mxfp8
from opfuse.kernels.engine.registry import Arguments, Case
from opfuse.numerics import casts as definition
from opfuse.numerics.delayed import UpdateRule
from opfuse.numerics.group_casts import group_amaxes, group_line_amaxes
from opfuse.numerics.hadamard import SIGNS
from opfuse.numerics.layouts import Layout
from opfuse.numerics.row_groups import RowGroups, row_groups

Trials = Callable[[], Mapping[str, Case]]
MakeCall = Callable[..., Arguments]
"""Makes the arguments of a call of a matrix on the CPU, and of what varies with it."""

SHAPE, ODD = (160, 288), (67, 75)
"""Whole blocks of every format, but no whole tiles; and what no vectors fit."""

SIZES = (100, 0, 28, 32)
"""Rows of groups of a matrix of :data:`SHAPE`."""


class Draw(NamedTuple):
    """A matrix, and the element that it is cast to. nonfinite: whether it has NaN and infinities."""

    dtype: torch.dtype = torch.bfloat16
    element: Element = E4M3
    nonfinite: bool = False
    shape: tuple[int, int] = SHAPE

    def matrix(self) -> torch.Tensor:
        """On the CPU, the same at each call."""
        random, (rows, columns) = torch.Generator().manual_seed(11), self.shape
        reach = 12 if self.dtype == torch.float16 else 60
        magnitudes = torch.randint(-reach, reach, (rows, -(-columns // 16)), generator=random).double().exp2()
        x = torch.randn(rows, columns, generator=random, dtype=torch.float64).clamp(-3.9, 3.9)
        x *= magnitudes.repeat_interleave(16, 1)[:, :columns]
        x[:33, :17] = 0
        x[40, 70], x[-1, -1], x[50, 3] = 3e4, torch.finfo(self.dtype).max, torch.finfo(self.dtype).smallest_normal / 4
        if self.nonfinite:
            x[3, 5:8], x[-2, 7], x[41, 70] = torch.nan, torch.inf, -torch.inf
        return x.to(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}, {self.element.name}, {self.shape}{', nonfinite' * self.nonfinite}".removeprefix("torch.")


DRAWS = (Draw(), Draw(nonfinite=True), Draw(torch.float32, E5M2), Draw(torch.float16, E5M2, nonfinite=True))
ANY_SHAPE = (*DRAWS, Draw(shape=ODD))


def calls(make: MakeCall, draws: Sequence[Draw] = ANY_SHAPE, varied: Sequence[Any] = ((),)) -> Trials:
    """A call of each draw with one of ``varied``, further arguments of ``make``, in turn; each of these at least once."""
    turns = zip(range(max(len(draws), len(varied))), itertools.cycle(draws), itertools.cycle(varied))
    each = {f"{draw} {more or ''}".strip(): functools.partial(_call, make, draw, more) for _, draw, more in turns}
    return lambda: each


def _call(make: MakeCall, draw: Draw, more: Sequence[Any], device: torch.device) -> Arguments:
    made = make(draw, draw.matrix(), *more)
    return Arguments(moved(made.args, device), moved(made.kwargs, device))


def moved(value: Any, device: torch.device) -> Any:
    """Nested tuples, lists and dicts with their tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if isinstance(value, RowGroups):
        return value._replace(table=value.table.to(device))
    if isinstance(value, dict):
        return {name: moved(each, device) for name, each in value.items()}
    return type(value)(moved(each, device) for each in value) if type(value) in (tuple, list) else value


def layouts(fmt: NumberFormat, shape: tuple[int, int], *, swizzled: bool = False) -> list[Layout]:
    """Those of both planes."""
    return [Layout(fmt, usage, shape, swizzled) for usage in USAGES]


def _groups() -> RowGroups:
    return RowGroups(row_groups(torch.tensor(SIZES), sum(SIZES)), sum(SIZES), len(SIZES))


def _in_groups(fmt: NumberFormat, groups: RowGroups) -> list[Layout]:
    shapes = {usage: (groups.rows if usage == ROWWISE else groups.padded_rows, SHAPE[1]) for usage in USAGES}
    return [Layout(fmt, usage, shapes[usage]) for usage in USAGES]


# -- one scale for a tensor, or a line -------------------------------------------------------------------------------------------


def _current(draw: Draw, x: torch.Tensor) -> Arguments:
    return Arguments((x, definition.tensor_amax(x.where(x.isfinite(), 0)), layouts(fp8_tensor(draw.element), draw.shape)))


def _recording(draw: Draw, x: torch.Tensor) -> Arguments:
    return Arguments((x, torch.full((1,), 3.7), torch.full((1,), 2.0**-20), layouts(fp8_tensor(draw.element), draw.shape)))


def _row(draw: Draw, x: torch.Tensor, pow2: bool) -> Arguments:
    return Arguments((x, layouts(fp8_row(draw.element), draw.shape)), {"pow2": pow2})


def _lines(draw: Draw, x: torch.Tensor) -> Arguments:
    amaxes = [amax * 0.7 for amax in definition.line_amaxes(x, USAGES)]
    return Arguments((x, amaxes, layouts(fp8_row(draw.element), draw.shape)))


AMAX = calls(lambda draw, x: Arguments((x,)))
LINE_AMAXES = calls(lambda draw, x: Arguments((x, USAGES)))
CURRENT, RECORDING, LINES = map(calls, (_current, _recording, _lines))
ROW = calls(_row, varied=((False,), (True,)))

# -- blocks ----------------------------------------------------------------------------------------------------------------------


def _block(draw: Draw, x: torch.Tensor, dims: int, pow2: bool) -> Arguments:
    return Arguments((x, layouts(fp8_block(draw.element, dims), draw.shape)), {"pow2": pow2})


def _mx(draw: Draw, x: torch.Tensor, rows: int, swizzled: bool) -> Arguments:
    return Arguments((x, layouts(mxfp8(draw.element), draw.shape, swizzled=swizzled)), {"rows": rows})


def _nv(draw: Draw, x: torch.Tensor, rows: int, swizzled: bool) -> Arguments:
    planes = layouts(NVFP4, draw.shape, swizzled=swizzled)
    amax = definition.amaxes_nv(x.where(x.isfinite(), 0), planes)[:1]
    return Arguments((x, amax * len(planes), planes), {"rows": rows})


def _nv_amaxes(draw: Draw, x: torch.Tensor, per_row: bool) -> Arguments:
    return Arguments((x, layouts(NVFP4.replace(per_row=per_row), draw.shape)))


def _rotated(draw: Draw, x: torch.Tensor) -> Arguments:
    row, column = layouts(NVFP4, draw.shape)
    return Arguments((x, [row, column.replace(format=NVFP4.replace(rht=SIGNS))]))


def _rotated_cast(draw: Draw, x: torch.Tensor) -> Arguments:
    (_, planes), _ = _rotated(draw, x)
    amaxes = definition.amaxes_nv(x.where(x.isfinite(), 0), planes)
    return Arguments((x, amaxes, planes), {"seed": torch.tensor([0x123456789])})


BLOCK = calls(_block, varied=((1, True), (2, True), (1, False), (2, False)))
MX = calls(_mx, DRAWS, ((1, False), (1, True), (32, False)))


def amaxes_nv() -> Mapping[str, Case]:
    """Of a tensor, of rows, and of rotated values."""
    return {**calls(_nv_amaxes, DRAWS, ((False,), (True,)))(), **_named_rotated(_rotated)}


def cast_nv() -> Mapping[str, Case]:
    """By lines, by squares, and of rotated values with random bits."""
    return {**calls(_nv, DRAWS, ((1, False), (16, True)))(), **_named_rotated(_rotated_cast)}


def _named_rotated(make: MakeCall) -> Mapping[str, Case]:
    """Only bf16 is rotated."""
    return {f"{name} rotated": case for name, case in calls(make, DRAWS[:2])().items()}


# -- groups ----------------------------------------------------------------------------------------------------------------------


def _group_amaxes(draw: Draw, x: torch.Tensor) -> Arguments:
    return Arguments((x, _groups()))


def _group_line_amaxes(draw: Draw, x: torch.Tensor) -> Arguments:
    return Arguments((x, _groups(), USAGES))


def _block_groups(draw: Draw, x: torch.Tensor) -> Arguments:
    return Arguments((x, groups := _groups(), _in_groups(fp8_block(draw.element, 1), groups)))


def _row_groups_cast(draw: Draw, x: torch.Tensor) -> Arguments:
    return Arguments((x, groups := _groups(), _in_groups(fp8_row(draw.element), groups)))


def _lines_groups(draw: Draw, x: torch.Tensor) -> Arguments:
    amaxes = group_line_amaxes(x, groups := _groups(), USAGES)
    return Arguments((x, groups, amaxes, _in_groups(fp8_row(draw.element), groups)))


def _current_groups(draw: Draw, x: torch.Tensor) -> Arguments:
    amaxes = group_amaxes(x, groups := _groups())
    return Arguments((x, groups, amaxes, _in_groups(fp8_tensor(draw.element), groups)))


def _recording_groups(draw: Draw, x: torch.Tensor) -> Arguments:
    groups = _groups()
    states = [(torch.full((1,), 2.0**i), torch.full((1,), 0.5 * (i % 2))) for i in range(groups.number)]
    return Arguments((x, groups, states, _in_groups(fp8_tensor(draw.element), groups)))


GROUP_AMAXES, GROUP_LINE_AMAXES, BLOCK_GROUPS, ROW_GROUPS, LINES_GROUPS, CURRENT_GROUPS, RECORDING_GROUPS = (
    calls(make, DRAWS)
    for make in (
        _group_amaxes,
        _group_line_amaxes,
        _block_groups,
        _row_groups_cast,
        _lines_groups,
        _current_groups,
        _recording_groups,
    )
)


def tables() -> Mapping[str, Case]:
    """Of groups with rows and without. Sizes that leave the matrix would stop the device."""
    sizes = {"groups": SIZES, "one group": (0, sum(SIZES), 0)}
    return {
        f"{name} {dtype}": functools.partial(_table, each, dtype)
        for (name, each), dtype in itertools.product(sizes.items(), (torch.int32, torch.int64))
    }


def _table(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Arguments:
    return Arguments((torch.tensor(sizes, dtype=dtype).to(device), sum(SIZES)))


# -- planes ----------------------------------------------------------------------------------------------------------------------

_STORED = tuple(make(element) for make in (fp8_tensor, fp8_row, mxfp8) for element in (E4M3, E5M2))
_STORED += tuple(fp8_block(element, dims) for dims, element in ((1, E4M3), (2, E5M2)))


def _plane(fmt: NumberFormat, usage: str, *, swizzled: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Layout]:
    """Random bytes, of which every one is a code."""
    layout, random = layouts(fmt, SHAPE, swizzled=swizzled)[usage != ROWWISE], torch.Generator().manual_seed(5)
    data = torch.randint(0, 256, layout.data_shape, generator=random, dtype=torch.uint8)
    scale = torch.randint(-60, 60, layout.scale_shape, generator=random).double().exp2().float() * 1.3
    if layout.tiled:
        scale = torch.randint(0, 256, layout.scale_shape, generator=random, dtype=torch.uint8)
    amax = None if layout.amax_shape is None else 1 + 100 * torch.rand(layout.amax_shape, generator=random)
    return data, scale, amax, layout


def _decoded(fmt: NumberFormat, usage: str, swizzled: bool, dtype: torch.dtype, device: torch.device) -> Arguments:
    *arrays, layout = _plane(fmt, usage, swizzled=swizzled)
    return Arguments(tuple(moved(arrays, device)), {"layout": layout, "dtype": dtype})


def _all_decoded(formats: Sequence[NumberFormat]) -> Mapping[str, Case]:
    """Of each format both planes, to one dtype in turn; scales in tiles in turn, where a format has them."""
    dtypes = itertools.cycle((torch.bfloat16, torch.float32, torch.bfloat16, torch.float16))
    tiled = itertools.cycle((False, True, True, False))
    made: dict[str, Case] = {}
    for (fmt, usage), dtype, swizzled in zip(itertools.product(formats, USAGES), dtypes, tiled):
        is_swizzled = swizzled and fmt.family in ("mx", "nv")
        made[f"{fmt} {usage} to {dtype}"] = functools.partial(_decoded, fmt, usage, is_swizzled, dtype)
    return made


def decoded() -> Mapping[str, Case]:
    """Planes of all formats of FP8, of NVFP4, rotated ones too, and of MXFP4."""
    rotated = functools.partial(_decoded, NVFP4.replace(rht=SIGNS), USAGES[1], False, torch.bfloat16)
    return {**_all_decoded(_STORED), **_all_decoded((NVFP4, NVFP4.replace(per_row=True), MXFP4)), "rotated": rotated}


def decoded_groups() -> Mapping[str, Case]:
    """Several planes in a launch."""
    return {f"{fmt} {usage}": functools.partial(_several, fmt, usage) for fmt, usage in zip(_STORED[4:], itertools.cycle(USAGES))}


def _several(fmt: NumberFormat, usage: str, device: torch.device) -> Arguments:
    *arrays, layout = _plane(fmt, usage, swizzled=False)
    return Arguments(([(*moved(arrays, device), layout) for _ in range(3)],), {"dtype": torch.bfloat16})


def _bytes(shape: tuple[int, int], device: torch.device) -> Arguments:
    random = torch.Generator().manual_seed(7)
    return Arguments((torch.randint(0, 256, shape, generator=random, dtype=torch.uint8).to(device),))


def turned() -> Mapping[str, Case]:
    """Bytes of a matrix."""
    return {str(shape): functools.partial(_bytes, shape) for shape in (SHAPE, ODD, (256, 128))}


# -- delayed scaling, and figures ------------------------------------------------------------------------------------------------


def updates() -> Mapping[str, Case]:
    """Of states with every kind of amax."""
    return {algorithm: functools.partial(_update, algorithm) for algorithm in ("max", "most_recent")}


def _update(algorithm: Any, device: torch.device) -> Arguments:
    hard = (0.0, torch.inf, torch.nan, 1e-45, 1e-38, 3.4e38, 448.0, 1.0)
    histories = [torch.tensor([amax, 0.5, 2.0]) for amax in hard]
    scales = [torch.full((1,), 3.0) for _ in hard]
    counts = [torch.ones(1, dtype=torch.int32) for _ in hard]
    rules = [UpdateRule((448.0, 57344.0)[i % 2], i % 3, algorithm) for i in range(len(hard))]
    return Arguments((*moved((histories, scales, counts), device), rules))


def _figures(draw: Draw, x: torch.Tensor) -> Arguments:
    q = x.float() * 1.01
    return Arguments((x, q.where(x.abs() > 1e-3, 0), torch.full((1,), 2.0**-9)), {"reach": 464.0})


FIGURES = calls(_figures)
