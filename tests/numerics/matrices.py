"""Matrices that are hard to quantize, shared by the tests of the casts."""

import numpy as np
import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def hard(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal values under a magnitude for each 16x16 tile, from deep in the subnormals to the largest; some 0, some on ties."""
    reach = 120 if dtype != torch.float16 else 12
    tiles = (-(-rows // 16), -(-cols // 16))
    magnitude = torch.exp2(torch.randint(-reach - 25, reach, tiles).double())
    magnitude[torch.rand(tiles) < 0.1] = 0
    grid = torch.rand(tiles) < 0.2
    x = torch.randn(rows, cols).double().clamp(-3.9, 3.9)
    x = torch.where(_spread(grid, x), (x * 4).round() / 4, x)
    return (x * _spread(magnitude, x)).to(dtype)


def within(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Tile magnitudes that the E4M3 block scales of one global scale span, and a few below; tiles with and without a tail."""
    tiles = (-(-rows // 16), -(-cols // 16))
    magnitude, power = torch.exp2(torch.randint(-14, 3, tiles).double()), torch.rand(tiles).double() + 0.1
    x = torch.randn(rows, cols).double()
    return (x.sign() * x.abs() ** _spread(power, x) * _spread(magnitude, x)).to(dtype)


def _spread(tiles: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return tiles.repeat_interleave(16, 0).repeat_interleave(16, 1)[: like.shape[0], : like.shape[1]]


def lines(x: torch.Tensor, usage: str) -> np.ndarray:
    """The lines of a plane of ``x`` as fp32 NumPy rows."""
    return np.ascontiguousarray((x.t() if usage == "columnwise" else x).float().cpu().numpy())


def same(got: torch.Tensor, expected: np.ndarray) -> bool:
    """Equal in shape and every value; NaN equals NaN, and -0 differs from 0."""
    got, expected = got.cpu().numpy(), np.ascontiguousarray(expected)
    assert got.shape == expected.shape
    return np.array_equal(got, expected, equal_nan=got.dtype == np.float32) and np.array_equal(
        np.signbit(got), np.signbit(expected)
    )
