"""Whether a recipe can cast the operands of a product, by their shapes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from opfuse.errors import Described, OpfuseError
from opfuse.ops.linear import BasicLinear
from opfuse.recipes import Recipe

ROWS = 128
"""A number of rows that every format takes, for checks before any call, which alone knows its rows."""


def fits(op: BasicLinear, recipe: Recipe, rows: int, *, trains: bool) -> bool:
    """Whether ``recipe`` can cast an input of ``op``, of ``rows`` rows, and, if it trains, the output's gradient."""
    shapes = {"input": (rows, op.in_features)}
    if trains:
        shapes["grad_output"] = (rows, op.out_features)
    return _refused(op, recipe, shapes, trains=trains) is None


def unfit(recipe: Recipe, columns: int, rows: int) -> tuple[str, str] | None:
    """What a recipe wants of a matrix (rows, columns) and of what it multiplies, and what these are; None: it can take them."""
    op = BasicLinear(columns, rows, device="meta", dtype=torch.float32)
    shapes = {"weight": (rows, columns), "input": (ROWS, columns), "grad_output": (ROWS, rows)}
    error = _refused(op, recipe, shapes, trains=True)
    if error is None:
        return None
    match error.args:
        case [Described() as text]:
            return text.wanted, text.got
    return "operands that its quantizers take", str(error)


def _refused(op: BasicLinear, recipe: Recipe, shapes: Mapping[str, tuple[int, int]], *, trains: bool) -> OpfuseError | None:
    """The error of the first operand, of ``shapes`` by role, that the recipe cannot cast; None: it can cast all of them."""
    for role, shape in shapes.items():
        made, _ = op.make_quantizer(role, recipe)
        quantizer = op.narrow_quantizer(made, role, recipe.backward_override, ("dgrad", "wgrad") if trains else ())
        if quantizer is None:
            continue
        try:
            quantizer.check(shape, (quantizer.input_dtypes or (torch.float32,))[0], where=role, cure=lambda _: "")
        except OpfuseError as error:
            return error
    return None
