"""One call of a chain: its structure, the tensors that it reads and writes, and how its results are cut into tiles."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from opfuse.kernels.chains.structure import ChainCode, StageCode
from opfuse.kernels.engine import variants
from opfuse.kernels.engine.launch import Grid
from opfuse.kernels.engine.parameters import parameter_of
from opfuse.kernels.engine.registry import is_dense
from opfuse.kernels.engine.variants import PACK, VECTOR, WIDEST
from opfuse.numerics.chain import Rounding, Stage, boundary_dtype, operand_shape
from opfuse.numerics.layouts import ceil_div

C_TYPES = {**variants.C_TYPES, torch.uint8: "u8"}
THREADS = 256
_FLAT_COLUMNS = 2048  # of a matrix whose shape does not matter

Tensors = list[dict[str, Tensor]]
"""Tensors of each stage, by name."""


class Tiling(NamedTuple):
    """How a matrix of results is cut into tiles, each for a block of threads; as in chain.cuh.

    A tile has ``groups`` times 2^log_across packs of eight columns; the block's other threads lie below each other, ``steps``
    rows each. down: how many tiles lie below each other, if groups of rows begin on tiles; else 0.
    """

    rows: int
    columns: int
    log_across: int
    groups: int
    steps: int
    threads: int = THREADS
    down: int = 0

    @property
    def tiles_down(self) -> int:
        """How many tiles lie below each other."""
        return self.down or ceil_div(self.rows, (self.threads >> self.log_across) // self.groups * self.steps)

    @property
    def tiles_across(self) -> int:
        """How many tiles lie side by side."""
        return ceil_div(self.columns, (PACK << self.log_across) * self.groups)

    @property
    def grid(self) -> Grid:
        """A block of threads for each tile."""
        return Grid(self.tiles_down * self.tiles_across, self.threads)

    @property
    def fields(self) -> tuple[int | float, ...]:
        """The fields of the struct Cut in chain.cuh."""
        across, (multiplier, shift) = self.tiles_across, divisor(self.tiles_across)
        own = {
            "rows": self.rows,
            "columns": self.columns,
            "log_across": self.log_across,
            "groups": self.groups,
            "steps": self.steps,
        }
        return _CUT(**own, tiles_across=across, multiplier=multiplier, shift=shift)


_CUT = parameter_of("chain.cuh", "Cut")


@functools.lru_cache(maxsize=4096)
def divisor(number: int) -> tuple[int, int]:
    """(multiplier, shift): n * multiplier >> shift is n // number for every n below 2^31 (Granlund and Montgomery, 1994)."""
    shift = (number - 1).bit_length() + 31
    return ceil_div(1 << shift, number), shift


@dataclass(frozen=True, eq=False)
class ChainCall:
    """One call of a chain.

    tensors: those whose addresses are the first fields of the kernel's parameter, in order.
    shape: of the chain's result.
    dtype: of results. result: y or dx; None if it is not stored.
    kept: inputs of stages, of a forward call. grads: gradients of operands, of a backward call.
    """

    code: ChainCode
    tensors: list[Tensor]
    shape: torch.Size
    constants: list[float]
    dtype: torch.dtype
    result: Tensor | None
    kept: dict[int, Tensor]
    grads: Tensors

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self.tensors[0].device

    @property
    def is_nothing(self) -> bool:
        """Whether every result is an input."""
        return self.result is self.tensors[0] and not any(stage.grads or stage.saved for stage in self.code.stages)

    def cut(self) -> Tiling:
        """The tiling of a chain without casts: wide tiles of few rows."""
        size, columns = self.shape.numel(), self.shape[-1]
        if self.code.is_flat and size % PACK == 0:
            columns = math.gcd(size, _FLAT_COLUMNS)
        lanes = min(THREADS, ceil_div(columns, PACK))
        return Tiling(size // columns, columns, lanes.bit_length() - 1, 1, self.code.packs)

    def is_aligned(self, columns: int) -> bool:
        """Whether every pack of eight of ``columns`` results starts at an address of a vector, and is whole."""
        return columns % PACK == 0 and self._on_vectors

    @cached_property
    def _on_vectors(self) -> bool:
        return self.code.on_vectors and all(
            t.data_ptr() % (PACK if t.dtype is torch.uint8 else VECTOR) == 0 for t in self.tensors
        )


def forward_call(
    x: Tensor,
    stages: Sequence[Stage],
    rounding: Rounding,
    dtype: torch.dtype | None,
    keep: Collection[int],
    *,
    stores: bool = True,
) -> ChainCall | None:
    """The call of ``numerics.chain.forward_chain``; None if a kernel cannot take it. An ``x`` that is kept is kept as it came."""
    dtype = dtype or x.dtype
    made = {i for i in keep if i or x.dtype != dtype}
    call = _forward_call(x, stages, (x.dtype, dtype, rounding), made, shape=x.shape, stores=stores)
    return call and replace(call, kept={i: call.kept.get(i, x) for i in keep})


def product_call(
    left: Tensor,
    stages: Sequence[Stage],
    *,
    shape: torch.Size,
    dtype: torch.dtype,
    keep: Collection[int],
    stores: bool,
) -> ChainCall | None:
    """The call of a chain over a product of ``shape`` that its kernel makes, in ``left``'s place; None if no kernel can take it.

    The product is rounded to ``dtype``, and so is what each op makes of it.
    """
    return _forward_call(left, stages, (dtype, dtype, "per_op"), keep, shape=shape, stores=stores)


def _forward_call(
    x: Tensor,
    stages: Sequence[Stage],
    flow: tuple[torch.dtype, torch.dtype, Rounding],
    keep: Collection[int],
    *,
    shape: torch.Size,
    stores: bool,
) -> ChainCall | None:
    """A call over values of ``shape`` that a kernel reads from ``x``, or makes from it. flow: the arguments of :func:`_flow`."""
    _, dtype, _ = flow
    shapes = _result_shapes(shape, stages)
    operands = _operands(stages, shapes[1:], lambda stage: stage.math.operands)
    if operands is None or not _runs(dtype, x, *_flat(operands)) or _is_wide(stages, shapes):
        return None
    x = x.contiguous()
    kept = {i: torch.empty(shapes[i], dtype=dtype, device=x.device) for i in sorted(keep)}
    y = torch.empty(shapes[-1], dtype=dtype, device=x.device) if stores else None
    codes = tuple(_stage_code(s, operands[i], saved=kept.get(i)) for i, s in enumerate(stages))
    code = ChainCode("forward", codes, *_flow(*flow), stores=stores).interned
    return ChainCall(code, [x, *_flat(operands), *_one(y), *kept.values()], shapes[-1], _constants(stages), dtype, y, kept, [])


def backward_call(
    dy: Tensor,
    stages: Sequence[Stage],
    saved_inputs: Mapping[int, Tensor],
    rounding: Rounding,
    dtype: torch.dtype | None,
    *,
    casts: bool = False,
    stores: bool = True,
) -> ChainCall | None:
    """The call of ``numerics.chain.backward_chain``; None if a kernel cannot take it. ``casts``: dx is needed, stored or not."""
    dtype = dtype or dy.dtype
    shapes = _gradient_shapes(dy, stages)
    operands = _operands(stages, shapes[1:], lambda stage: stage.math.backward_reads & set(stage.math.operands))
    saved = _saved(stages, shapes, saved_inputs)
    if operands is None or saved is None or not _runs(dtype, dy, *_flat(operands), *saved.values()) or _is_wide(stages, shapes):
        return None
    dy = dy.contiguous()
    same = _first_same(stages) if dy.dtype == dtype else len(shapes)
    dx = (dy if same == 0 else torch.empty(shapes[0], dtype=dtype, device=dy.device)) if stores else None
    grads = [_new_grads(s, dy, shapes[i + 1], dtype, same=same <= i + 1) for i, s in enumerate(stages)]
    made = [{name: grad for name, grad in of_stage.items() if grad is not dy} for of_stage in grads]
    codes = tuple(_stage_code(s, operands[i], made[i], saved.get(i)) for i, s in enumerate(stages))
    new = None if dx is dy else dx
    code = ChainCode("backward", codes, *_flow(dy.dtype, dtype, rounding), stores=new is not None, casts=casts).interned
    tensors = [dy, *saved.values(), *_flat(operands), *_one(new), *_flat(made)]
    return ChainCall(code, tensors, dy.shape, _constants(stages), dtype, dx, {}, grads)


# -- structure ---------------------------------------------------------------------------------------------------------------


def _stage_code(
    stage: Stage, operands: Mapping[str, Tensor], grads: Mapping[str, Tensor] = {}, saved: Tensor | None = None
) -> StageCode:
    operand_types, grad_types = (tuple((name, C_TYPES[t.dtype]) for name, t in given.items()) for given in (operands, grads))
    return StageCode(
        stage.math, operand_types, grad_types, None if saved is None else C_TYPES[saved.dtype], stage.interleave or 0
    )


@functools.cache
def _flow(source: torch.dtype, io: torch.dtype, rounding: Rounding) -> tuple[str, str, str]:
    """C types of what comes in, of results, and of what flows between two ops."""
    return C_TYPES[source], C_TYPES[io], C_TYPES[boundary_dtype(rounding, io, torch.float32)]


def _constants(stages: Sequence[Stage]) -> list[float]:
    return [stage.constants[name] for stage in stages for name in stage.math.constants]


def _one(tensor: Tensor | None) -> list[Tensor]:
    return [] if tensor is None else [tensor]


def _flat(tensors: Tensors) -> list[Tensor]:
    return [t for of_stage in tensors for t in of_stage.values()]


# -- what a call gives ---------------------------------------------------------------------------------------------------------


def _runs(dtype: torch.dtype, *tensors: Tensor) -> bool:
    """Whether kernels can read these tensors."""
    device = tensors[0].device
    return dtype in C_TYPES and all(t.dtype in C_TYPES and t.device == device and is_dense(t) for t in tensors)


def _is_wide(stages: Sequence[Stage], shapes: Sequence[torch.Size]) -> bool:
    """Whether rows are too long for a kernel that has to know where they end."""
    if all(shape[-1] < WIDEST for shape in shapes):
        return False
    return any(stage.math.is_gated or {"row", "column"} & {*stage.math.operands.values()} for stage in stages)


def _result_shapes(shape: torch.Size, stages: Sequence[Stage]) -> list[torch.Size]:
    """The shapes of x and of each stage's result; nothing if the chain cannot have them."""
    shapes = [shape] if shape and stages else []
    for stage in stages if shapes else ():
        if stage.math.is_gated and shapes[-1][-1] % (2 * (stage.interleave or 1)):
            return []
        shapes.append(stage.math.result_shape(shapes[-1]))
    return shapes


def _gradient_shapes(dy: Tensor, stages: Sequence[Stage]) -> list[torch.Size]:
    """The shapes of the gradients of each stage's input, and of dy; nothing if the chain cannot have them."""
    shapes = [dy.shape] if dy.dim() and stages else []
    for stage in reversed(stages) if shapes else ():
        if stage.math.is_gated and shapes[0][-1] % (stage.interleave or 1):
            return []
        shapes.insert(0, stage.math.input_shape(shapes[0]))
    return shapes


def _operands(stages: Sequence[Stage], shapes: Sequence[torch.Size], names: Callable[[Stage], Collection[str]]) -> Tensors | None:
    """The operands that are read, in the order of their declaration; None if one is missing or has another shape."""
    if not shapes:
        return None
    found: Tensors = []
    for stage, shape in zip(stages, shapes):
        read = names(stage)
        given = {name: stage.operands.get(name) for name in stage.math.operands if name in read}
        wanted = {name: operand_shape(stage.math.operands[name], shape) for name in given}
        if any(t is None or t.shape != wanted[name] for name, t in given.items()):
            return None
        found.append({name: t.contiguous() for name, t in given.items() if t is not None})
    return found


def _saved(stages: Sequence[Stage], shapes: Sequence[torch.Size], given: Mapping[int, Tensor]) -> dict[int, Tensor] | None:
    """The saved inputs that are read; None if one is missing or has another shape."""
    read = [i for i, stage in enumerate(stages) if stage.math.needs_input]
    fits = bool(shapes) and all(i in given and given[i].shape == shapes[i] for i in read)
    return {i: given[i].contiguous() for i in read} if fits else None


def _first_same(stages: Sequence[Stage]) -> int:
    """The first stage from which on every op hands its gradient on as it is."""
    first = len(stages)
    while first and stages[first - 1].math.backward == ("dy",):
        first -= 1
    return first


def _new_grads(stage: Stage, dy: Tensor, shape: torch.Size, dtype: torch.dtype, *, same: bool) -> dict[str, Tensor]:
    """Memory for a stage's operand gradients; dy itself for a tensor that was added, where dy is the ``same``."""
    made = {}
    for name in stage.math.operand_backward:
        kind, given = stage.math.operands[name], stage.operands.get(name)
        of_operand = dtype if given is None else given.dtype
        through = same and kind == "full" and stage.math.operand_backward[name] == "dy" and of_operand == dy.dtype
        made[name] = dy if through else torch.empty(operand_shape(kind, shape), dtype=of_operand, device=dy.device)
    return made
