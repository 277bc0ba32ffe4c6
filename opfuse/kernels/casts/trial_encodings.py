"""The casts that trials of chains and norms end in (trials.py of both)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from opfuse.formats import USAGES, NumberFormat
from opfuse.kernels.casts.encoding import Blocks, Encoding, Microscaled, RecordingScale, RowScaled
from opfuse.numerics.layouts import Layout


def _recording(layouts: Sequence[Layout], device: torch.device) -> Encoding:
    scale, amax = (torch.full((1,), value).to(device) for value in (3.7, 2.0**-20))
    return RecordingScale(scale, amax, layouts)


_BY_FAMILY: Mapping[str, Callable[[Sequence[Layout], torch.device], Encoding]] = {
    "tensor": _recording,
    "row": lambda layouts, _: RowScaled(layouts),
    "block": lambda layouts, _: Blocks(layouts),
    "mx": lambda layouts, _: Microscaled(layouts),
}


def encoding_of(fmt: NumberFormat, shape: tuple[int, int], device: torch.device) -> Encoding:
    """The cast of a matrix to both planes of a format."""
    return _BY_FAMILY[fmt.family]([Layout(fmt, usage, shape) for usage in USAGES], device)
