"""What a cast did to a tensor: how much saturated, how much became zero, how far the values are from what they were."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F

from opfuse.core.context import Value, plain, values_of
from opfuse.formats import Element
from opfuse.kernels.casts.figures import cast_figures
from opfuse.numerics.hadamard import rotate
from opfuse.tensors.groups import GroupedPlane
from opfuse.tensors.storage import Plane, QuantizedStorage

BINS = 16
"""The most powers of two in a histogram of scales, the most frequent ones."""

BIAS = 127
"""The bias of an fp32 exponent."""


@dataclass(frozen=True)
class CastFigures:
    """One cast of ``elements`` elements to a plane; where the format rotates, the elements are what the rotation makes.

    amax: the largest magnitude that is finite. nonfinite: share of elements that are not. saturated: share of those that were
    larger than the format holds under their scale, by more than it rounds. flushed: share of those not zero that became zero.
    sqnr: 10 log10(sum x^2 / sum (x - q)^2) in dB; None where nothing was lost. scales: share of elements by the power of two of
    their decode scale, -127 below all that fp32 holds in full, 128 for scales that are not finite.
    """

    format: str
    plane: str
    elements: int
    amax: float
    nonfinite: float
    saturated: float
    flushed: float
    sqnr: float | None
    scales: dict[int, float]

    def record(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class DeviceFigures(NamedTuple):
    """Figures of a cast to a plane, still on its device: the sums and counts of :func:`cast_figures`, one after another."""

    format: str
    plane: str
    figures: torch.Tensor

    def read(self) -> CastFigures:
        """The figures; waits for the device."""
        amax, signal, lost, nonfinite, nonzero, flushed, saturated, *exponents = self.figures.tolist()
        size = sum(exponents)
        sqnr = 10 * math.log10(signal / lost) if signal and lost else None
        shares = nonfinite / size, saturated / size, flushed / max(nonzero, 1)
        return CastFigures(self.format, self.plane, int(size), amax, *shares, sqnr, _scales(exponents, size))


def figures(given: Value, storage: QuantizedStorage) -> Iterator[DeviceFigures]:
    """Figures of the cast of ``given`` to ``storage``, on the device of the tensors; none if ``storage`` holds ``given`` itself.

    For the rowwise plane, or the columnwise one if it is the only one; also for a rotated columnwise plane, whose values are
    those that the rotation makes of ``given``.
    """
    planes = [plane for plane in (storage.rowwise, storage.columnwise) if plane is not None and plane.format.element is not None]
    for plane in planes[:1] + [plane for plane in planes[1:] if plane.format.rht]:
        if storage.shape.numel():
            yield _figures(values_of(plain(given)).detach().reshape(storage.matrix_shape), plane)


def _figures(x: torch.Tensor, plane: Plane) -> DeviceFigures:
    columns = [_summed(*part) for part in _parts(x, plane)]
    sums, counts = (torch.stack(parts) for parts in zip(*columns))
    whole = torch.cat((sums[:, :1].amax(0), sums[:, 1:].sum(0), counts.sum(0).double()))  # counts below 2^53 are exact
    return DeviceFigures(str(plane.format), plane.usage, whole)


def _parts(x: torch.Tensor, plane: Plane) -> Iterator[tuple[torch.Tensor, Plane]]:
    """What was cast apart, and its plane: the groups of a grouped one that have rows."""
    if isinstance(plane, GroupedPlane):
        yield from ((part, member) for part, member in zip(torch.split(x, list(plane.sizes)), plane.members) if len(part))
    else:
        yield x, plane


def _summed(x: torch.Tensor, plane: Plane) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`cast_figures` finds."""
    if plane.format.rht:  # of the rows that fill the last block, too, over which rotation spreads values
        x = rotate(F.pad(x, (0, 0, 0, plane.shape[0] - len(x))).mT, plane.format.rht).mT
        plane = replace(plane, format=plane.format.replace(rht=()))
    q, scale = (each[: len(x)] for each in (plane.dequantize(torch.float32), _scale(plane)))
    return cast_figures(x, q, scale, reach=_reach(cast(Element, plane.format.element)))


def _scale(plane: Plane) -> torch.Tensor:
    """The decode scale of each element, (M, K), or one of all: what codes of 1 are decoded to."""
    if plane.format.family == "tensor" and plane.scale is not None and plane.scale.numel() == 1:
        return plane.scale
    element = cast(Element, plane.format.element)
    one = element.bias << element.mantissa_bits
    byte = one | one << 4 if element.bits == 4 else one
    ones = torch.full_like(plane.data.view(torch.uint8), byte).view(plane.data.dtype)
    return replace(plane, data=ones).dequantize(torch.float32)


def _reach(element: Element) -> float:
    """The largest multiple of a scale that rounds to a finite code: half a step above the largest of these."""
    return element.max + 2.0 ** (math.floor(math.log2(element.max)) - element.mantissa_bits - 1)


def _scales(counted: list[float], size: float) -> dict[int, float]:
    found = sorted(((at - BIAS, count) for at, count in enumerate(counted) if count), key=lambda pair: -pair[1])[:BINS]
    return {power: count / size for power, count in sorted(found)}
