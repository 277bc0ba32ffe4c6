"""What kernels ask of their callers before they write: planes of the matrix that is cast, numbers that are what they are read as.

A kernel finds its addresses from layouts and reads numbers as fp32, whatever is there. So a wrong layout would be an address
outside of a plane, and a wrong dtype another number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from opfuse.errors import QuantizerError, describe
from opfuse.kernels.layouts import Layout


def check_planes(shape: Sequence[int], layouts: Sequence[Layout], *, where: str) -> None:
    """QuantizerError unless ``layouts`` are planes of the matrix that a tensor (..., columns) of ``shape`` is.

    There is one plane or two, of one format and one order of scales, each for another usage. ``where`` names the cast.
    """
    matrix = (math.prod(shape[:-1]), shape[-1]) if len(shape) else ()
    if not layouts:
        raise _refused(where, "one plane or two", "none", "name the planes to make")
    first, usages = layouts[0], {layout.usage for layout in layouts}
    for layout in layouts:
        if layout.shape != matrix:
            raise _refused(where, f"planes of {matrix}", f"a layout of {layout.shape}", "make it for the tensor's shape")
        if layout.format != first.format or layout.swizzled != first.swizzled:
            got = " and ".join(f"{each.format}{' swizzled' * each.swizzled}" for each in (first, layout))
            raise _refused(where, "planes of one format and one order of scales", got, "cast once for each")
    if len(usages) != len(layouts):
        raise _refused(where, "one plane for each usage", [layout.usage for layout in layouts], "ask for each plane once")


def check_number(value: torch.Tensor, device: torch.device, *, where: str) -> int:
    """The address of one fp32 number on ``device``; QuantizerError for anything else, which a kernel would misread."""
    if value.dtype != torch.float32 or value.numel() != 1 or value.device != device:
        got, cure = f"{value.dtype} {tuple(value.shape)} on {value.device}", f"make it with torch.ones(1, device={str(device)!r})"
        raise _refused(where, f"fp32 (1,) on {device}", got, cure)
    return value.data_ptr()


def _refused(where: str, wanted: object, got: object, cure: str) -> QuantizerError:
    return QuantizerError(describe(where, wanted=wanted, got=got, cure=cure))
