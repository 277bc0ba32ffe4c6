"""Cases of dequantize: planes of random bytes in every format, usage and scale layout.

Every byte is a code, so random bytes hold NaN, infinities and subnormal values. So do the scales; their padding is random, too.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from typing import NamedTuple

import torch

from opfuse.formats import (
    COLUMNWISE,
    E4M3,
    E5M2,
    MXFP4,
    NVFP4,
    USAGES,
    NumberFormat,
    Usage,
    fp8_block,
    fp8_row,
    fp8_tensor,
    mxfp8,
)
from opfuse.kernels.casts.dequantize import dequantize, dequantize_groups
from opfuse.kernels.casts.tensor import transposed
from opfuse.kernels.engine.registry import Arguments, Case, CaseTable
from opfuse.kernels.products.block_scales import scales_of_blocks
from opfuse.numerics.hadamard import NO_SIGNS, SIGNS, SIZE
from opfuse.numerics.layouts import Layout
from tests.kernels.cases.matrices import DTYPES

_FORMATS: dict[str, NumberFormat] = {
    **{f"tensor {element.name}": fp8_tensor(element) for element in (E4M3, E5M2)},
    **{f"row {element.name}": fp8_row(element) for element in (E4M3, E5M2)},
    **{f"block {dims}D {element.name}": fp8_block(element, dims) for dims in (1, 2) for element in (E4M3, E5M2)},
    **{f"MX {element.name}": mxfp8(element) for element in (E4M3, E5M2)},
}
_FP4_FORMATS: dict[str, NumberFormat] = {
    "NVFP4": NVFP4,
    "NVFP4 by row": NVFP4.replace(per_row=True),
    "NVFP4 four or six": NVFP4.replace(encode_max=256),
    "NVFP4 rotated": NVFP4.replace(rht=SIGNS),
    "NVFP4 rotated without signs": NVFP4.replace(rht=NO_SIGNS),
    "MXFP4": MXFP4,
}
_LINES = {
    "whole tiles": (256, 512),
    "parts of tiles": (200, 400),
    "odd": (67, 259),
    "a line": (1, 4112),
    "short lines": (2081, 16),
    "misaligned": (72, 272),
    "empty": (0, 32),
}
"""(Number of lines, their length). A 4-bit line of odd length is made one element shorter, to end with a whole byte."""


class _PlaneArguments(NamedTuple):
    """The arguments of a call of dequantize."""

    format: NumberFormat
    usage: Usage
    swizzled: bool
    kind: str
    dtype: torch.dtype

    @property
    def layout(self) -> Layout:
        lines, length = _LINES[self.kind]
        if self.format.element is not None and self.format.element.bits == 4:
            length -= length % 2
        rows, columns = (lines, length) if self.usage == USAGES[0] else (length, lines)
        return Layout(self.format, self.usage, (rows, columns), self.swizzled)

    def __call__(self, device: torch.device) -> Arguments:
        layout, generator = self.layout, torch.Generator().manual_seed(zlib.crc32(f"{self.format} {self.kind}".encode()))
        data = torch.randint(0, 256, layout.data_shape, generator=generator, dtype=torch.uint8)
        scale = _random_scales(layout.scale_shape, generator)
        if layout.tiled:
            scale = torch.randint(0, 256, layout.scale_shape, generator=generator, dtype=torch.uint8)
        amax = None
        if layout.amax_shape is not None:
            amax = torch.randn(layout.amax_shape, generator=generator, dtype=torch.float32).abs_() * 100
        arrays = (
            _placed(data, device, past=self.kind == "misaligned"),
            scale.to(device),
            None if amax is None else amax.to(device),
        )
        return Arguments(arrays, {"layout": layout, "dtype": self.dtype})


def _random_scales(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """fp32 scales: about half are random bits, the others so modest that results are finite."""
    patterns = torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32).view(torch.float32)
    modest = torch.exp2(torch.randn(shape, generator=generator) * 6)
    return torch.where(torch.rand(shape, generator=generator) < 0.5, patterns, modest)


def _placed(x: torch.Tensor, device: torch.device, *, past: bool) -> torch.Tensor:
    """``x`` on a device, at an address from which vectors can be loaded, or, if ``past``, one element behind it."""
    return torch.empty(x.numel() + past, dtype=x.dtype, device=device)[int(past) :].view(x.shape).copy_(x)


def _planes(formats: dict[str, NumberFormat]) -> dict[str, Case]:
    """Each format with every usage, scale layout, kind of lines and output; rotated planes are columnwise and of whole blocks."""
    made: dict[str, Case] = {}
    for (name, fmt), usage, swizzled, kind in itertools.product(formats.items(), USAGES, (False, True), _LINES):
        rotates = usage == COLUMNWISE and _LINES[kind][1] % SIZE == 0
        if (swizzled and fmt.family not in ("mx", "nv")) or (fmt.rht and not rotates):
            continue
        for output, dtype in DTYPES.items():
            plane = _PlaneArguments(fmt, usage, swizzled, kind, dtype)
            made[f"{name}, {usage}, {'swizzled' if swizzled else 'compact'}, {kind}, {output}"] = plane.__call__
    return made


def _transposed(kind: str) -> Case:
    """A matrix of random bytes."""

    def case(device: torch.device) -> Arguments:
        shape, generator = _LINES[kind], torch.Generator().manual_seed(zlib.crc32(kind.encode()))
        x = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        return Arguments((_placed(x, device, past=kind == "misaligned"),))

    return case


def _groups(fmt: NumberFormat, usage: Usage, swizzled: bool, dtype: torch.dtype, device: torch.device) -> Arguments:
    """More planes of one width than a launch takes, without global amaxes; one has no rows, a few have no whole tiles."""
    made, generator = [], torch.Generator().manual_seed(zlib.crc32(f"{fmt} {usage}".encode()))
    for rows in (256, 32, 0, 96, 160, 32, 16, 64, 48, 128, 32):
        layout = Layout(fmt.replace(rht=()), usage, (rows, 208), swizzled)
        arrays = (torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8) for shape in _shapes(layout))
        made.append((*(each.to(device) for each in arrays), None, layout))
    return Arguments((made,), {"dtype": dtype})


def _shapes(layout: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return layout.data_shape, layout.scale_shape


def _block_scales(fmt: NumberFormat, usage: Usage, kind: str, device: torch.device) -> Arguments:
    """Random bits and powers of two, of all exponents; the padding is random, too."""
    layout = _PlaneArguments(fmt, usage, swizzled=False, kind=kind, dtype=torch.float32).layout
    generator = torch.Generator().manual_seed(zlib.crc32(f"{fmt} {kind}".encode()))
    scale = _random_scales(layout.scale_shape, generator)
    powers = torch.randint(-149, 128, layout.scale_shape, generator=generator).double().exp2().float()
    powers = torch.where(torch.rand(powers.shape, generator=generator) < 0.05, 0.0, powers)
    scale = torch.where(torch.rand(powers.shape, generator=generator) < 0.2, scale, powers)
    return Arguments((scale.to(device), layout))


CASES: CaseTable = {
    dequantize: {**_planes(_FORMATS), **_planes(_FP4_FORMATS)},
    dequantize_groups: {
        f"{name}, {usage}, {'swizzled' if swizzled else 'compact'}, {output}": functools.partial(
            _groups, fmt, usage, swizzled, dtype
        )
        for (name, fmt), usage, swizzled in itertools.product({"MX": mxfp8(E4M3), "NVFP4": NVFP4}.items(), USAGES, (False, True))
        for output, dtype in DTYPES.items()
    },
    transposed: {kind: _transposed(kind) for kind in _LINES},
    scales_of_blocks: {
        f"{name}, {usage}, {kind}": functools.partial(_block_scales, fmt, usage, kind)
        for name, fmt in _FORMATS.items()
        if fmt.family == "block" and fmt.element == E4M3
        for usage in USAGES
        for kind in _LINES
    },
}
