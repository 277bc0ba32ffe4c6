"""Rows of zeros that fill the last block of a format, for calls with any number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

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
    """``x`` of shape (..., n) as (rows + spare, n), with zeros at its end."""
    return F.pad(x.reshape(-1, x.shape[-1]), (0, 0, 0, spare))
