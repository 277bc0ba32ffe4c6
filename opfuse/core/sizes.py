"""Sizes that an op or a format cannot take: which of the user's sizes it is, and what he can type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from opfuse.errors import ShapeError, describe
from opfuse.formats import COLUMNWISE, ROWWISE
from opfuse.numerics.layouts import Layout, round_up

_IN, _OUT, _ROWS = "in_features", "out_features", ""

_SIZES = {
    ("input", ROWWISE): _IN,
    ("input", COLUMNWISE): _ROWS,
    ("weight", ROWWISE): _IN,
    ("weight", COLUMNWISE): _OUT,
    ("grad_output", ROWWISE): _OUT,
    ("grad_output", COLUMNWISE): _ROWS,
}
"""Along which size the lines of an operand's plane run: a hyper-parameter of the op, or the rows of its input."""

_CURES = {
    _IN: "build the op with in_features={whole} and pad its input, torch.nn.functional.pad(x, (0, {spare}))",
    _OUT: "build the op with out_features={whole} and cut its result, y[..., :{size}]",
    _ROWS: "pad the rows, torch.nn.functional.pad(x.reshape(-1, x.shape[-1]), (0, 0, 0, {spare})), and cut the result, "
    "y[:{size}]",
}
_COLUMNS = "pad the last dimension, torch.nn.functional.pad(x, (0, {spare}))"
_OVERRIDE = ", or compute gradients in high precision, recipe.replace(backward_override='dequantized')"


def check_features(where: str, shape: Sequence[int], features: int) -> None:
    """ShapeError unless ``shape`` is (..., features): said before any format has its say."""
    if tuple(shape[-1:]) != (features,):
        other = f", or build the op with in_features={shape[-1]}" if shape and shape[-1] else ""
        wanted, cure = f"shape (..., {features})", f"pass {features} features, or have the op before it make so many{other}"
        raise ShapeError(describe(where, wanted=wanted, got=tuple(shape), cure=cure))


def cure_of(op: Any, tensor_type: str, *, overridable: bool) -> Callable[[Layout], str]:
    """The cure for a layout of the operand ``tensor_type`` of ``op`` whose lines are no whole blocks.

    overridable: whether a backward override would do without the planes that only a quantized backward pass reads.
    """

    def cure(layout: Layout) -> str:
        size = layout.lines[1]
        whole = round_up(size, layout.format.multiple)
        what = _SIZES.get((tensor_type, layout.usage), _IN)
        text = _CURES[what] if not what or hasattr(op.spec, what) else _COLUMNS
        spared = overridable and (layout.usage == COLUMNWISE or tensor_type == "grad_output")
        return text.format(whole=whole, spare=whole - size, size=size) + (_OVERRIDE if spared else "")

    return cure
