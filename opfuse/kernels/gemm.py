"""Products of two quantized planes, emulated: the torch definition that every native back end approximates.

Both operands come with the summed dimension along their lines; the result is lines of the left by lines of the right, in
fp32. What a block scale multiplies enters the product as one operand value (exact in bf16 for E8M0 and E4M3 scales); fp32
scales and global amaxes multiply the sums. On a GPU the operands are bf16 and the sums fp32; the values are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from opfuse.formats import E2M1, E4M3
from opfuse.kernels.layouts import Layout, from_tiles, load_data, load_scale, to_tiles
from opfuse.kernels.scalars import decode, decode_e8m0

BLOCK = 128
"""Summed elements between two promotions of a block-scaled product to its scaled fp32 sum."""


@dataclass(frozen=True, eq=False)
class Operand:
    """Lines to multiply, fp32 (lines, length); ``factor`` multiplies the result's lines, ``blocks`` each 128 of the length."""

    values: torch.Tensor
    factor: torch.Tensor | None = None
    blocks: torch.Tensor | None = None


def operand(data: torch.Tensor, scale: torch.Tensor | None, amax: torch.Tensor | None, *, layout: Layout) -> Operand:
    """A stored plane as an operand."""
    return _OPERANDS[layout.format.family](decode(load_data(data, layout), layout.element), scale, amax, layout)


def multiply(left: Operand, right: Operand) -> torch.Tensor:
    """left times right transposed, fp32 (left lines, right lines)."""
    if left.blocks is not None and right.blocks is not None:
        return _multiply_blocks(left.values, left.blocks, right.values, right.blocks)
    result = left.values @ right.values.t()
    if left.factor is not None:
        result = result * left.factor
    return result if right.factor is None else result * right.factor.t()


def _multiply_blocks(a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
    result = a.new_zeros(len(a), len(b))
    for i in range(a_scale.shape[1]):  # none where nothing is summed
        part = slice(i * BLOCK, (i + 1) * BLOCK)
        result += (a[:, part] @ b[:, part].t()) * (a_scale[:, i, None] * b_scale[None, :, i])
    return result


def _tensor(q: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor | None, layout: Layout) -> Operand:
    return Operand(q, factor=scale.reshape(1, 1))


def _block(q: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor | None, layout: Layout) -> Operand:
    rows = layout.block[0]
    return Operand(q, blocks=load_scale(scale, layout).repeat_interleave(rows, 0)[: len(q)])


def _mx(q: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor | None, layout: Layout) -> Operand:
    return Operand(_scaled(q, decode_e8m0(load_scale(scale, layout)), layout))


def _nv(q: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor, layout: Layout) -> Operand:
    values = _scaled(q, decode(load_scale(scale, layout), E4M3), layout)
    # full_like: torch divides by a Python number through its reciprocal on some devices.
    return Operand(values, factor=(amax / torch.full_like(amax, E2M1.max * layout.format.encode_max)).reshape(-1, 1))


def _scaled(q: torch.Tensor, scale: torch.Tensor, layout: Layout) -> torch.Tensor:
    return from_tiles(to_tiles(q, layout.block) * scale[:, None, :, None], q.shape)


_OPERANDS: dict[str, Callable[..., Operand]] = {"tensor": _tensor, "block": _block, "mx": _mx, "nv": _nv}
