"""What a cast did to a tensor: how much saturated, how much became zero, how far the values are from what they were."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from opfuse.core.context import Value
from opfuse.formats import Element
from opfuse.tensors.storage import Plane, QuantizedStorage
from opfuse.tensors.tensor import QuantizedTensor

BINS = 16
"""Powers of two of which a histogram of scales tells, the most frequent ones."""


@dataclass(frozen=True)
class CastFigures:
    """One cast, of ``elements`` elements.

    amax: the largest magnitude that is finite. nonfinite: share of elements that are not. saturated: share of those that were
    larger than the format holds under their scale, by more than it rounds. flushed: share of those not zero that became zero.
    sqnr: 10 log10(sum x^2 / sum (x - q)^2) in dB; None where nothing was lost, or where the format rotates. scales: share of
    elements by the power of two of their decode scale.
    """

    format: str
    elements: int
    amax: float
    nonfinite: float
    saturated: float | None
    flushed: float | None
    sqnr: float | None
    scales: dict[int, float]

    def record(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def figures(given: Value, made: QuantizedStorage) -> CastFigures | None:
    """What the cast of ``given`` to ``made`` did, found on the device of the tensors; None where ``made`` keeps ``given`` itself.

    Read from the rowwise plane, or from the columnwise one where that is all there is.
    """
    plane = next((p for p in (made.rowwise, made.columnwise) if p is not None and p.format.element is not None), None)
    if plane is None or not plane.data.numel():
        return None
    x = _plain(given).detach().to(torch.float32).reshape(-1)
    finite = x.isfinite()
    kept = torch.where(finite, x, 0)
    top = _filled(plane)
    sums = [kept.abs().max(), 1 - finite.float().mean()]
    if not plane.format.rht:
        q = made.dequantize(torch.float32, plane.usage).reshape(-1)
        most = top.reshape(-1)[: x.numel()] if top.numel() >= x.numel() else top.reshape(-1)
        lost = torch.where(finite, x - q, 0)
        zero = ((q == 0) & (kept != 0)).float().sum() / (kept != 0).float().sum().clamp(min=1)
        cut = (kept.abs() > most * _rounds_down(_element(plane))).float().mean()
        sums += [cut, zero, kept.double().square().sum(), lost.double().square().sum()]
    amax, nonfinite, *more = torch.stack([each.double() for each in sums]).tolist()
    saturated, flushed, signal, loss = more or [None] * 4
    sqnr = 10 * math.log10(signal / loss) if signal and loss else None
    return CastFigures(str(plane.format), x.numel(), amax, nonfinite, saturated, flushed, sqnr, _scales(plane, top))


def _plain(value: Value) -> torch.Tensor:
    if isinstance(value, QuantizedTensor):
        return value.detach().dequantize()
    return value.dequantize() if isinstance(value, QuantizedStorage) else value


def _element(plane: Plane) -> Element:
    if (element := plane.format.element) is None:
        raise TypeError("a plane without an element is no cast")
    return element


def _filled(plane: Plane) -> torch.Tensor:
    """The largest value that each element could have under its scale."""
    code = _element(plane).max_code
    byte = code | code << 4 if _element(plane).bits == 4 else code
    data = torch.full_like(plane.data.view(torch.uint8), byte).view(plane.data.dtype)
    return replace(plane, data=data).dequantize(torch.float32)


def _rounds_down(element: Element) -> float:
    """How far above the largest value a number may lie that rounds to it: half a step there."""
    step = 2.0 ** (math.floor(math.log2(element.max)) - element.mantissa_bits)
    return 1 + step / 2 / element.max


def _scales(plane: Plane, top: torch.Tensor) -> dict[int, float]:
    powers, counts = torch.unique(torch.frexp(top.flatten() / _element(plane).max)[1], return_counts=True)
    found = sorted(zip((powers - 1).tolist(), counts.tolist()), key=lambda pair: -pair[1])[:BINS]
    return {power: count / top.numel() for power, count in sorted(found)}
