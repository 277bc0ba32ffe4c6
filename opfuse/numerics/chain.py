"""The torch definition of a fused chain of elementwise ops, forward and backward.

A chain of one stage is the op alone, so under ``rounding="per_op"`` a fused chain equals its ops run one by one bit for bit.
An input may come as the fp32 accumulator of a matrix product or in the I/O dtype; arithmetic is fp32 (fp64 for fp64 tensors).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from opfuse.errors import PipelineError, RecipeError, SavedTensorError, ShapeError, SpecError, describe
from opfuse.numerics.pointwise import OperandKind, Pointwise, compute_dtype

Rounding = Literal["per_op", "single"]
"""Where a chain rounds to the I/O dtype: at every boundary between two ops, or once at its end."""


@dataclass(frozen=True, eq=False)
class Stage:
    """One op of a chain: its math with operands, constants and, for a gated unit, the layout of its columns.

    operands: tensors by the names of ``math.operands``; on the way back those that no gradient reads may be missing.
    constants: values for exactly the names of ``math.constants``.
    interleave: None: the first half of the columns is ``a``, the second ``b``; g: they alternate in groups of g columns.

    SpecError if names do not match those of ``math`` or ``interleave`` does not apply.
    """

    math: Pointwise
    operands: Mapping[str, Tensor] = field(default_factory=dict)
    constants: Mapping[str, float] = field(default_factory=dict)
    interleave: int | None = None

    def __post_init__(self) -> None:
        where = f"stage {self.math.name}"
        if set(self.constants) != set(self.math.constants):
            wanted, got = f"constants {self.math.constants}", tuple(self.constants)
            raise SpecError(describe(where, wanted=wanted, got=got, cure="give each constant one value"))
        if not set(self.operands) <= set(self.math.operands):
            wanted, got = f"operands {tuple(self.math.operands)}", tuple(self.operands)
            raise SpecError(describe(where, wanted=wanted, got=got, cure="pass only declared operands"))
        if self.interleave is not None and not (self.math.is_gated and self.interleave > 0):
            wanted, cure = (
                "interleave > 0" if self.math.is_gated else "no interleave",
                "only a gated unit has halves to interleave",
            )
            raise SpecError(describe(where, wanted=wanted, got=self.interleave, cure=cure))


def forward_chain(
    x: Tensor,
    stages: Sequence[Stage],
    *,
    rounding: Rounding = "per_op",
    dtype: torch.dtype | None = None,
    keep: Collection[int] = (),
) -> tuple[Tensor, dict[int, Tensor]]:
    """y of shape (..., n) in ``dtype`` (None: that of x), and the inputs of the stages in ``keep``, by stage, in ``dtype``.

    x: (..., columns of the first stage), in ``dtype`` or a wider one. A kept tensor is the one that flowed, not a copy.
    ShapeError if an operand or an odd number of columns does not fit; PipelineError if an operand is missing.
    """
    dtype = dtype or x.dtype
    wide = compute_dtype(x.dtype, dtype)
    between = boundary_dtype(rounding, dtype, wide)
    kept = {}
    value = x.to(dtype) if rounding == "per_op" else x
    for i, stage in enumerate(stages):
        if i in keep:
            kept[i] = value.to(dtype)
        inputs = split_columns(stage, value.to(wide))
        operands = _operands(stage, inputs[0].shape, wide, stage.math.operands)
        value = stage.math.value(*inputs, **operands, **stage.constants).to(between)
    return value.to(dtype), kept


def backward_chain(
    dy: Tensor,
    stages: Sequence[Stage],
    saved_inputs: Mapping[int, Tensor],
    *,
    rounding: Rounding = "per_op",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """dx in ``dtype`` (None: that of dy), and for each stage the gradients of its operands by name.

    dy: (..., columns of the last stage), in ``dtype`` or a wider one.
    saved_inputs: what :func:`forward_chain` kept; SavedTensorError if it lacks a stage whose math reads its input. Operand
    gradients are summed in fp32, "row" over all leading dimensions and "column" over the last one, and cast once to the
    operand's dtype (to ``dtype`` where the operand itself was not passed).
    """
    dtype = dtype or dy.dtype
    wide = compute_dtype(dy.dtype, dtype)
    between = boundary_dtype(rounding, dtype, wide)
    operand_grads: list[dict[str, Tensor]] = [{} for _ in stages]
    grad = dy.to(dtype) if rounding == "per_op" else dy
    for i, stage in reversed(tuple(enumerate(stages))):
        op, incoming = stage.math, grad.to(wide)
        inputs = _saved(stage, saved_inputs.get(i), wide)
        read = _operands(stage, incoming.shape, wide, op.backward_reads.intersection(op.operands))
        operands = {name: read.get(name) for name in op.operands}
        if op.operand_grad is not None:
            unreduced = op.operand_grad(incoming, *inputs, **operands, **stage.constants)
            operand_grads[i] = {name: _reduced(stage, name, g, dtype) for name, g in unreduced.items()}
        grad = join_columns(stage, _input_grads(op, op.grad(incoming, *inputs, **operands, **stage.constants))).to(between)
    return grad.to(dtype), operand_grads


def _input_grads(math: Pointwise, grads: object) -> tuple[Tensor, ...]:
    """What ``math.grad`` returned; SpecError unless it is a tensor for each input."""
    if not isinstance(grads, (tuple, list)) or len(grads) != len(math.inputs):
        got = f"{len(grads)} of them" if isinstance(grads, (tuple, list)) else type(grads).__name__
        wanted, cure = f"a tuple of {len(math.inputs)}, one gradient for each of {math.inputs}", "return (dx,), or (da, db)"
        raise SpecError(describe(f"Pointwise {math.name!r} grad", wanted=wanted, got=got, cure=cure))
    return tuple(grads)


def boundary_dtype(rounding: Rounding, dtype: torch.dtype, wide: torch.dtype) -> torch.dtype:
    """The dtype that a value has between two ops whose arithmetic is ``wide``. RecipeError for an unknown rounding."""
    if rounding not in get_args(Rounding):
        wanted, cure = " or ".join(map(repr, get_args(Rounding))), "choose one in the recipe"
        raise RecipeError(describe("rounding", wanted=wanted, got=repr(rounding), cure=cure))
    return dtype if rounding == "per_op" else wide


def operand_shape(kind: OperandKind, shape: torch.Size) -> torch.Size:
    """The shape that an operand has beside a result of ``shape``."""
    return {"row": shape[-1:], "column": shape[:-1], "full": shape}[kind]


def split_columns(stage: Stage, x: Tensor) -> tuple[Tensor, ...]:
    """The inputs of a stage: x itself, or the halves (a, b) of its columns. ShapeError if they cannot be halved."""
    if not stage.math.is_gated:
        return (x,)
    columns = x.shape[-1] if x.dim() else 1
    group = stage.interleave or max(columns // 2, 1)
    if columns % (2 * group):
        wanted = f"a multiple of {2 * group} columns" if stage.interleave else "an even number of columns"
        cure = "have the op before it make so many, as its out_features: two inputs of this one lie side by side in them"
        raise ShapeError(describe(f"{stage.math.name} input", wanted=wanted, got=tuple(x.shape), cure=cure))
    halves = x.reshape(*x.shape[:-1], columns // (2 * group), 2, group)
    return tuple(half.flatten(-2) for half in halves.unbind(-2))


def join_columns(stage: Stage, parts: Sequence[Tensor]) -> Tensor:
    """Gradients of a stage's inputs in the layout of its input: the inverse of :func:`split_columns`."""
    if not stage.math.is_gated:
        return parts[0]
    columns = parts[0].shape[-1]
    groups = (columns // stage.interleave, stage.interleave) if stage.interleave else (1, columns)
    return torch.stack([part.reshape(*part.shape[:-1], *groups) for part in parts], dim=-2).flatten(-3)


def _operands(stage: Stage, shape: torch.Size, wide: torch.dtype, names: Collection[str]) -> dict[str, Tensor]:
    """The named operands in the compute dtype, shaped to broadcast against a result of ``shape``."""
    found = {}
    for name in names:
        kind, where = stage.math.operands[name], f"stage {stage.math.name} operand {name!r}"
        if (operand := stage.operands.get(name)) is None:
            cure = f"pass operands={{{name!r}: ...}}"
            raise PipelineError(describe(where, wanted=f"a {kind} tensor", got="nothing", cure=cure))
        wanted = operand_shape(kind, shape)
        if operand.shape != wanted:
            cure = f"a {kind} operand of a {tuple(shape)} result has this shape"
            raise ShapeError(describe(where, wanted=f"shape {tuple(wanted)}", got=tuple(operand.shape), cure=cure))
        found[name] = (operand.unsqueeze(-1) if kind == "column" else operand).to(wide)
    return found


def _saved(stage: Stage, saved: Tensor | None, wide: torch.dtype) -> tuple[Tensor | None, ...]:
    if not stage.math.needs_input:
        return (None,) * len(stage.math.inputs)
    if saved is None:
        cure = "keep the inputs of all stages whose math has needs_input"
        raise SavedTensorError(describe(f"stage {stage.math.name} backward", wanted="its saved input", got="nothing", cure=cure))
    return split_columns(stage, saved.to(wide))


def _reduced(stage: Stage, name: str, grad: Tensor, dtype: torch.dtype) -> Tensor:
    kind = stage.math.operands[name]
    if kind == "row":
        grad = grad.sum_to_size(grad.shape[-1:])
    elif kind == "column":
        grad = grad.sum(-1)
    operand = stage.operands.get(name)
    return grad.to(dtype if operand is None else operand.dtype)
