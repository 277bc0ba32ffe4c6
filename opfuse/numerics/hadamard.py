"""The signed 16-point Hadamard rotation that spreads outliers before an NVFP4 columnwise cast.

R = diag(signs) H / 4 with the Sylvester matrix H[i, j] = (-1)^popcount(i & j). H is symmetric and H H = 16 I, so R is
orthogonal: both operands of a product may be rotated, and a rotated plane can be turned back.
"""

from __future__ import annotations

import torch

SIZE = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The fixed random signs of the field's reference implementation."""
NO_SIGNS = (1,) * SIZE


def rotate(x: torch.Tensor, signs: tuple[int, ...]) -> torch.Tensor:
    """``x`` (..., n) bf16 with each 16 consecutive elements multiplied by R from the right, rounded to bf16 once.

    The 16 terms are added in fp32 in the order of :func:`_hadamard`, which every backend keeps: 64 additions, where a matrix
    unit, whose order is its own, would differ where fp32 addition is not exact.
    """
    chunks = _chunks(x.to(torch.float32))
    return (_hadamard(chunks * _vector(signs, x.device)) * 0.25).flatten(-2).to(x.dtype)


def unrotate(x: torch.Tensor, signs: tuple[int, ...]) -> torch.Tensor:
    """``x`` (..., n) fp32 with the rotation undone, in fp32: each 16 elements times R transposed."""
    return (_hadamard(_chunks(x)) * 0.25 * _vector(signs, x.device)).flatten(-2)


def sign_mask(signs: tuple[int, ...]) -> int:
    """The signs as bits, the first in the lowest: 1 for a negative sign."""
    return sum(1 << i for i, sign in enumerate(signs) if sign < 0)


def _chunks(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(*x.shape[:-1], x.shape[-1] // SIZE, SIZE)


def _hadamard(chunks: torch.Tensor) -> torch.Tensor:
    """(..., 16) fp32 times H: butterfly stages of distance 1, 2, 4 and 8, each (a, b) -> (a + b, a - b)."""
    for distance in (1, 2, 4, 8):
        a, b = chunks.reshape(*chunks.shape[:-1], SIZE // (2 * distance), 2, distance).unbind(-2)
        chunks = torch.stack((a + b, a - b), dim=-2).flatten(-3)
    return chunks


def _vector(signs: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The signs as fp32, from an integer mask: no copy from the host, which a captured graph could not hold."""
    return (1 - 2 * ((sign_mask(signs) >> torch.arange(SIZE, device=device)) & 1)).to(torch.float32)
