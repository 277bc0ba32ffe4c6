"""Rows that fill the last block of a format, for calls with any number of tokens.

The last row is repeated. Rows of zeros would be divided by their own size in a norm without eps, and become NaN in the sums of
its gradients; a row that stands there already changes no largest value, so no scale either.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from opfuse.convert.fits import fits
from opfuse.core.operation import BasicOperation
from opfuse.ops.linear import BasicLinear
from opfuse.recipes import Recipe

UNITS = (1, 16, 32, 128)
"""Formats need a number of rows that is a multiple of one of these."""


def spare_rows(ops: Sequence[BasicOperation], recipe: Recipe, rows: int, *, trains: bool) -> int:
    """How many rows to add so that each product among ``ops`` can cast its operands; 0 if no number helps."""
    products = [op for op in ops if isinstance(op, BasicLinear)]
    whole = (-(-rows // unit) * unit for unit in UNITS)
    return next((count for count in whole if all(fits(op, recipe, count, trains=trains) for op in products)), rows) - rows


def padded(x: torch.Tensor, spare: int) -> torch.Tensor:
    """``x`` of shape (..., n) as (rows + spare, n), its last row repeated at the end. It has at least one row."""
    flat = x.reshape(-1, x.shape[-1])
    return torch.cat((flat, flat[-1:].expand(spare, -1)))
