"""Rows of zeros that fill the last block of a format, for calls with any number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from opfuse.core.operation import BasicOperation
from opfuse.errors import ShapeError
from opfuse.ops.linear import BasicLinear
from opfuse.recipes import Recipe

UNITS = (1, 16, 32, 128)
"""Formats need a number of rows that is a multiple of one of these."""


def spare_rows(ops: Sequence[BasicOperation], recipe: Recipe, rows: int, *, trains: bool) -> int:
    """How many rows to add so that each product among ``ops`` can cast its operands; 0 if no number helps."""
    products = [op for op in ops if isinstance(op, BasicLinear)]
    whole = (-(-rows // unit) * unit for unit in UNITS)
    return next((count for count in whole if all(_fits(op, recipe, count, trains) for op in products)), rows) - rows


def _fits(op: BasicLinear, recipe: Recipe, rows: int, trains: bool) -> bool:
    for role, columns in (("input", op.in_features), ("grad_output", op.out_features)):
        made, _ = op.make_quantizer(role, recipe)
        backward = ("dgrad", "wgrad") if trains else ()
        quantizer = op.narrow_quantizer(made, role, recipe.backward_override, backward)
        try:
            if quantizer is not None and (trains or role == "input"):
                quantizer.check((rows, columns))
        except ShapeError:
            return False
    return True


def padded(x: torch.Tensor, spare: int) -> torch.Tensor:
    """``x`` of shape (..., n) as (rows + spare, n), with zeros at its end."""
    return F.pad(x.reshape(-1, x.shape[-1]), (0, 0, 0, spare))
