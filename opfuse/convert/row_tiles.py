"""A module that computes row by row, such as a norm or a router, called on tiles of a fixed number of rows.

torch chooses kernels, and with them the order of sums, by the number of rows; here it is asked for one number only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from opfuse.errors import ConversionError, describe
from opfuse.kernels.products.tiles import rows_of

FORWARD = "forward"

ELEMENTS = {"cpu": 1 << 12, "cuda": 1 << 22}
"""Of a tile of narrow rows, such as those of a norm of each head, of which there are many; a tile has no fewer rows than one of a
product.
"""


def tile_rows(device: str, width: int) -> int:
    """Rows of a tile on devices of this type."""
    return max(rows_of(device), ELEMENTS.get(device, ELEMENTS["cuda"]) // max(width, 1))


class RowTiles:
    """The forward of ``module``, of rows (..., width), in tiles of :func:`tile_rows` rows; the last row fills the last tile.

    keeps: whether results have the leading sizes of the input; a router's have all rows in one dimension.
    """

    def __init__(self, module: nn.Module, path: str, *, keeps: bool) -> None:
        self.module, self.path, self.keeps = module, path, keeps

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            got = f"{len(args) + len(kwargs)} more"
            cure = "call it with its rows alone, or use a model that does"
            raise ConversionError(describe(f"{self.path} of an invariant model", wanted="one argument", got=got, cure=cure))
        rows, whole = tile_rows(x.device.type, x.shape[-1]), x.reshape(-1, x.shape[-1])
        made = [self._tile(whole[start : start + rows], rows) for start in range(0, len(whole), rows)] or [self._own(whole)]
        if isinstance(made[0], torch.Tensor):
            return self._joined(made, x)
        return type(made[0])(self._joined(parts, x) for parts in zip(*made))

    def _own(self, x: torch.Tensor) -> Any:
        return type(self.module).forward(self.module, x)

    def _tile(self, piece: torch.Tensor, rows: int) -> Any:
        filled = torch.cat((piece, piece[-1:].expand(rows - len(piece), -1))) if len(piece) < rows else piece.clone()
        return self._own(filled)

    def _joined(self, parts: Any, x: torch.Tensor) -> torch.Tensor:
        count = x.numel() // (x.shape[-1] or 1)
        whole = (parts[0] if len(parts) == 1 else torch.cat(parts))[:count]
        return whole.view(*x.shape[:-1], *whole.shape[1:]) if self.keeps else whole

    def install(self) -> None:
        """Put it in the place of the module's forward."""
        vars(self.module)[FORWARD] = self


def remove_row_tiles(model: nn.Module) -> None:
    """Give modules of ``model`` that run in tiles their own forwards back."""
    for module in model.modules():
        if isinstance(vars(module).get(FORWARD), RowTiles):
            del vars(module)[FORWARD]


def row_tiles(module: nn.Module, path: str) -> RowTiles | None:
    """``module`` in tiles; None if it is not a function of one tensor that computes each row by itself.

    That is tried: the rows of a tile of random values, in another order and among others, must have the bits that they had.
    """
    parameter = next(iter(module.parameters(recurse=False)), None)
    if parameter is None or FORWARD in vars(module) or not parameter.is_floating_point():
        return None
    width = parameter.shape[-1]
    rows = tile_rows(parameter.device.type, width)
    draw = torch.Generator().manual_seed(0)
    x, other = (torch.randn(rows, width, generator=draw, device="cpu").to(parameter) for _ in range(2))
    order = torch.randperm(rows, generator=draw, device="cpu").to(parameter.device)
    first = torch.arange(rows, device=parameter.device).unsqueeze(-1) < rows // 2
    own = type(module).forward
    try:
        with torch.no_grad():
            whole, moved, mixed = (_outputs(own(module, each)) for each in (x, x[order], torch.where(first, x, other)))
            keeps = _outputs(own(module, x.unsqueeze(0)))[0].dim() > whole[0].dim()
    except Exception:  # of a stranger's forward, which wants something else
        return None
    half = rows // 2
    fits = all(
        len(a) == rows and torch.equal(a[order], b) and torch.equal(a[:half], c[:half]) for a, b, c in zip(whole, moved, mixed)
    )
    return RowTiles(module, path, keeps=keeps) if whole and fits else None


def _outputs(result: Any) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)
