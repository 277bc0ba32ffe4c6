"""Native products by family of formats and device: what each takes, and how it is given the arrays of a plane.

A row of :data:`BACKENDS` is one family on a range of compute capabilities, by torch's ``scaled_mm``, or for groups of sizes that
only the device knows by ``scaled_grouped_mm``. Its rules are those of the library and of torch on that range, which torch's CPU
product does not enforce. They come from

- cuBLAS documentation, "cublasLtMatmul", tables of FP8 and FP4 data types and "Narrow precision data types usage";
- torch's aten/src/ATen/native/cuda/ScaledBlas.cpp (which product it calls on which device, and its checks) and RowwiseScaledMM.cu
  (per row outside of 9.x: a CUTLASS kernel, whose right operand is E4M3);
- its GroupedBlas.cpp, of torch 2.11 to 2.15 alike: groups of MXFP8 by a kernel of MSLK, on 10.x alone, E4M3 twice, to bf16.

Rows that ``recorded`` marks were tested and timed by this project on such a device. All others are certified on their first use
(certificate.py), since no such device was at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch.nn.functional import ScalingType, SwizzleType

from opfuse.formats import E2M1, E4M3, E5M2
from opfuse.kernels.engine.certificates import RECORDED
from opfuse.kernels.engine.variants import on_bytes
from opfuse.kernels.products.block_scales import scales_of_blocks
from opfuse.kernels.products.stored import Stored
from opfuse.numerics.layouts import Layout, relayout_scale

Version = tuple[int, int]

ON_CPU = "the CPU has no product of this format"


class Machine(NamedTuple):
    """A device's compute capability and the CUDA version of its torch."""

    arch: Version
    cuda: Version


class Rule(NamedTuple):
    """What a product asks of its operands' layouts: ``wanted`` of what ``got`` reads from them."""

    what: str
    wanted: str
    got: Callable[[Layout, Layout], Any]
    holds: Callable[[Any], bool]

    def miss(self, left: Layout, right: Layout) -> str:
        """What is wrong, or an empty string."""
        got = self.got(left, right)
        return "" if self.holds(got) else f"{self.what}: wants {self.wanted}, got {got}"


class LibraryOperand(NamedTuple):
    """An operand as ``torch.nn.functional.scaled_mm`` takes it.

    codes: (lines, length), the summed dimension contiguous; of E2M1 two in an element. scales, scaling, swizzle: one entry for
    each level of scales.
    """

    codes: torch.Tensor
    scales: list[torch.Tensor]
    scaling: list[ScalingType]
    swizzle: list[SwizzleType]


AsOperand = Callable[[Stored, bool], LibraryOperand]
"""The arrays of a plane as the library reads them, on the left or, if True, on the right: its own memory, but for what must move.

Copied are fp32 scales that do not start on 16 bytes, codes that are stored with lines as columns (columnwise MXFP8), and byte
scales that a cast left compact. Scales of FP8 blocks are written anew for a product that reads those of MXFP8.
"""


class Backend(NamedTuple):
    """A native product of one family: devices from ``since`` up to, not including, ``below``, from the CUDA version ``cuda`` on.

    operand: how the library takes a plane; None for a kernel of the package's own. outputs: dtypes of a result, to which sums are
    rounded once. fast: whether sums can stay in the matrix unit, in fewer bits than fp32.
    """

    name: str
    since: Version
    below: Version
    rules: tuple[Rule, ...]
    cuda: Version
    operand: AsOperand | None = None
    outputs: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    fast: bool = False
    recorded: bool = False


# -- rules -----------------------------------------------------------------------------------------------------------------------


def _elements(left: Layout, right: Layout) -> tuple[str, ...]:
    return left.element.name, right.element.name


def _multiple(what: str, of: int, got: Callable[[Layout, Layout], int]) -> Rule:
    return Rule(what, f"a positive multiple of {of}", got, lambda n: n > 0 and n % of == 0)


_LINES = (
    Rule("left lines", "at least 1", lambda left, _: left.lines[0], lambda n: n > 0),
    _multiple("right lines", 16, lambda _, right: right.lines[0]),
)
SHAPES = (*_LINES, _multiple("length of the sum", 16, lambda left, _: left.lines[1]))
_LENGTH_32 = _multiple("length of the sum", 32, lambda left, _: left.lines[1])
ONE_E5M2 = Rule("elements", "at most one e5m2", _elements, lambda names: names != (E5M2.name,) * 2)
_RIGHT_E4M3 = Rule("elements", "e4m3 on the right", _elements, lambda names: names[1] == E4M3.name)
ALL_E4M3 = Rule("elements", "e4m3 twice", _elements, lambda names: names == (E4M3.name,) * 2)
_UNPADDED_SCALES = Rule(
    "left lines with scales of their own",
    "a multiple of 4",
    lambda left, _: left.lines[0] if left.scale_across else 0,
    lambda n: n % 4 == 0,
)
_MX = (*_LINES, _LENGTH_32, ONE_E5M2)
_WHOLE_TILES = _multiple("length of the sum", 128, lambda left, _: left.lines[1])
"""Whole tiles of scales: where the next group's begin after others, torch does not say."""
_POWERS_OF_TWO = Rule(
    "block scales",
    "powers of two on both sides",
    lambda left, right: " and ".join("powers of two" if layout.format.pow2 else "any fp32" for layout in (left, right)),
    lambda got: "any" not in got,
)
_ONE_AMAX = Rule(
    "global amaxes",
    "one for each operand",
    lambda left, right: "one for each row" if left.format.per_row or right.format.per_row else "one for each operand",
    lambda got: got != "one for each row",
)

# -- operands --------------------------------------------------------------------------------------------------------------------


def _fp8(plane: Stored) -> torch.Tensor:
    data = plane.data.t().contiguous() if plane.layout.across else plane.data
    return data.view(plane.layout.element.dtype)


def _fp32_scales(plane: Stored) -> torch.Tensor:
    return plane.scale if on_bytes(plane.scale, 16) else plane.scale.clone()


def _tiled_scales(plane: Stored, dtype: torch.dtype) -> torch.Tensor:
    swizzled = plane.scale if plane.layout.swizzled else relayout_scale(plane.scale, plane.layout, swizzled=True)
    return swizzled.reshape(-1).view(dtype)


def _tensor(plane: Stored, is_right: bool) -> LibraryOperand:
    return LibraryOperand(_fp8(plane), [_fp32_scales(plane)], [ScalingType.TensorWise], [])


def _row(plane: Stored, is_right: bool) -> LibraryOperand:
    """Scales are a column on the left and a row on the right."""
    scale = _fp32_scales(plane)
    return LibraryOperand(_fp8(plane), [scale[None, :] if is_right else scale[:, None]], [ScalingType.RowWise], [])


def _block(plane: Stored, is_right: bool) -> LibraryOperand:
    """Stored scales transposed: (lines, blocks) for 1x128, (padded blocks, blocks of lines) for 128x128."""
    scaling = ScalingType.BlockWise1x128 if plane.layout.block[0] == 1 else ScalingType.BlockWise128x128
    return LibraryOperand(_fp8(plane), [_fp32_scales(plane).t()], [scaling], [])


def mx_operand(plane: Stored, is_right: bool) -> LibraryOperand:
    """An MXFP8 plane: E8M0 scales of 32 codes, in tiles."""
    scales = _tiled_scales(plane, torch.float8_e8m0fnu)
    return LibraryOperand(_fp8(plane), [scales], [ScalingType.BlockWise1x32], [SwizzleType.SWIZZLE_32_4_4])


def _mx_of_blocks(plane: Stored, is_right: bool) -> LibraryOperand:
    """FP8 blocks as MXFP8, which is exact where scales are powers of two; others become NaN."""
    scales = scales_of_blocks(plane.scale, plane.layout).reshape(-1).view(torch.float8_e8m0fnu)
    return LibraryOperand(_fp8(plane), [scales], [ScalingType.BlockWise1x32], [SwizzleType.SWIZZLE_32_4_4])


def _nv(plane: Stored, is_right: bool) -> LibraryOperand:
    """The global amax over the one whose factor is 1 is the second level of scales."""
    amax = cast(torch.Tensor, plane.amax)  # which every NVFP4 plane has
    codes = plane.data.view(torch.float4_e2m1fn_x2)
    scales = [_tiled_scales(plane, torch.float8_e4m3fn), amax / (E2M1.max * plane.layout.format.encode_max)]
    scaling = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    return LibraryOperand(codes, scales, scaling, [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE])


# -- the table -------------------------------------------------------------------------------------------------------------------

_ADA: Any = {"since": (8, 9), "below": (9, 0), "cuda": (12, 1), "fast": True}
_HOPPER: Any = {"since": RECORDED[0], "below": RECORDED[1], "recorded": True}
_BLACKWELL: Any = {"since": (10, 0), "below": (13, 0), "cuda": (12, 8)}
"""10.x, 11.x and 12.x: sums are in fp32 there, so none is fast."""

MX_GROUPS = "mx in groups"
_TENSOR = "scaled_mm, per tensor"
_ROW = "scaled_mm, per row"

BACKENDS: Mapping[str, tuple[Backend, ...]] = {
    "tensor": (
        Backend(_TENSOR, **_ADA, operand=_tensor, rules=(*SHAPES, ONE_E5M2)),
        Backend(_TENSOR, **_HOPPER, operand=_tensor, cuda=(0, 0), fast=True, rules=(*SHAPES, ONE_E5M2)),
        Backend(_TENSOR, **_BLACKWELL, operand=_tensor, rules=(*SHAPES, ONE_E5M2)),
    ),
    "row": (
        Backend(_ROW, **_ADA, operand=_row, rules=(*SHAPES, _RIGHT_E4M3)),
        Backend(_ROW, **_HOPPER, operand=_row, cuda=(12, 9), fast=True, rules=(*SHAPES, ONE_E5M2)),
        Backend(_ROW, **_BLACKWELL, operand=_row, rules=(*SHAPES, _RIGHT_E4M3)),
    ),
    "block": (
        Backend(
            "scaled_mm, 1x128 and 128x128 blocks of E4M3",
            **_HOPPER,
            operand=_block,
            cuda=(12, 9),
            rules=(*SHAPES, ALL_E4M3, _UNPADDED_SCALES),
        ),
        # ScaledBlas.cpp refuses fp32 scales of blocks outside of 9.x.
        Backend("scaled_mm, FP8 blocks as MXFP8", **_BLACKWELL, operand=_mx_of_blocks, rules=(_POWERS_OF_TWO, *_MX)),
    ),
    "mx": (Backend("scaled_mm, MXFP8", **_BLACKWELL, operand=mx_operand, rules=_MX),),
    "nv": (Backend("scaled_mm, NVFP4", **_BLACKWELL, operand=_nv, rules=(*_LINES, _LENGTH_32, _ONE_AMAX)),),
    MX_GROUPS: (
        Backend(
            "scaled_grouped_mm, MXFP8 in groups",
            since=(10, 0),
            below=(11, 0),
            cuda=(12, 8),
            operand=mx_operand,
            outputs=(torch.bfloat16,),
            rules=(*_LINES, _WHOLE_TILES, ALL_E4M3),
        ),
    ),
}
"""Native products of the library, by family of formats, and of groups whose sizes only the device knows; others are emulated."""


def backend_of(rows: tuple[Backend, ...], machine: Machine) -> Backend | str:
    """The row for a machine; else what the machine lacks."""
    if machine.arch == (0, 0):
        return ON_CPU
    for row in rows:
        if row.since <= machine.arch < row.below:
            return row if machine.cuda >= row.cuda else f"CUDA: wants >= {dotted(row.cuda)}, got {dotted(machine.cuda)}"
    return f"compute capability: wants {_ranges(rows)}, got {dotted(machine.arch)}"


def reads_tiled_scales(family: str, machine: Machine) -> bool:
    """Whether a machine has a product that reads the byte scales of a family in 128x4 tiles."""
    return family in ("mx", "nv") and isinstance(backend_of(BACKENDS[family], machine), Backend)


def _ranges(rows: tuple[Backend, ...]) -> str:
    """The compute capabilities of rows, ranges that meet as one."""
    ranges: list[list[Version]] = []
    for since, below in sorted((row.since, row.below) for row in rows):
        if ranges and ranges[-1][1] == since:
            ranges[-1][1] = below
        else:
            ranges.append([since, below])
    return " or ".join(f">= {dotted(since)} and < {dotted(below)}" for since, below in ranges)


def dotted(version: Version) -> str:
    """``9.0`` of (9, 0)."""
    return f"{version[0]}.{version[1]}"
