"""The definition of dequantization: from the stored bytes of a plane to an (M, K) matrix.

The layout says all that is needed; there is no quantizer. Arithmetic is fp32, rounded to nearest even, then one conversion to
the output dtype, where overflow gives inf. Data may have any shape, with partial blocks at the edges, and padding any values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from opfuse.formats import E2M1, E4M3
from opfuse.numerics.hadamard import unrotate
from opfuse.numerics.layouts import Layout, from_tiles, lines_of, load_scale, load_values, to_tiles
from opfuse.numerics.scalars import decode, decode_e8m0, fl32


def dequantize(
    data: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor | None, *, layout: Layout, dtype: torch.dtype
) -> torch.Tensor:
    """The (M, K) matrix in ``dtype``, contiguous, of a plane stored in ``layout``.

    amax: read by NVFP4 only; None: values are codes times block scales, without the first level.
    """
    q = load_values(data, layout)
    lines = _FAMILIES[layout.format.family](q, scale, amax, layout)
    return lines_of(lines, layout.usage).to(dtype).contiguous()


StoredPlane = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Layout]
"""Data, scale, amax, and layout of a plane."""


def dequantize_groups(planes: Sequence[StoredPlane], *, dtype: torch.dtype) -> torch.Tensor:
    """The matrices of planes of one width, one below the other."""
    return torch.cat([dequantize(data, scale, amax, layout=layout, dtype=dtype) for data, scale, amax, layout in planes])


def _tensor(q: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor | None, layout: Layout) -> torch.Tensor:
    """q * scale."""
    return q * scale


def _row(q: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor | None, layout: Layout) -> torch.Tensor:
    """q * scale of its line."""
    return q * load_scale(scale, layout)


def _block(q: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor | None, layout: Layout) -> torch.Tensor:
    """q * scale of its block."""
    return _by_block(q, load_scale(scale, layout), layout)


def _mx(q: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor | None, layout: Layout) -> torch.Tensor:
    """q * 2^(code - 127): exact, unless it overflows."""
    return _by_block(q, decode_e8m0(load_scale(scale, layout)), layout)


def _nv(q: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor | None, layout: Layout) -> torch.Tensor:
    """(q * block scale) * (amax * fl32(1 / (6 encode_max))), in this order; then rotated back if the data was rotated."""
    values = _by_block(q, decode(load_scale(scale, layout), E4M3), layout)
    if amax is not None:
        values = values * (amax.reshape(-1, 1) * fl32(1 / (E2M1.max * layout.format.encode_max)))
    return unrotate(values, layout.format.rht) if layout.format.rht else values


def _by_block(q: torch.Tensor, scale: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Each line element, in place, times the scale of its block."""
    return from_tiles(to_tiles(q, layout.block).mul_(scale[:, None, :, None]), q.shape)


_FAMILIES: dict[str, Callable[..., torch.Tensor]] = {"tensor": _tensor, "row": _row, "block": _block, "mx": _mx, "nv": _nv}
