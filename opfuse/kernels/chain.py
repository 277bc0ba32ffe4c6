"""Chains of elementwise ops as the library calls them: one kernel for a CUDA tensor, whose results are those of epilogue.py.

A kernel is compiled for the structure of a chain: its ops, dtypes, and what is stored. Shapes and constants are its parameters.
What a kernel cannot take goes to the torch definition, which runs it or says what is wrong: other dtypes than fp32, bf16, fp16
(bytes for masks), above all fp64; operands that are missing or misshapen; tensors without dimensions.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from opfuse.kernels import chain_cases, epilogue
from opfuse.kernels.chain_code import ChainCode, StageCode
from opfuse.kernels.epilogue import Rounding, Stage
from opfuse.kernels.launch import Grid, Variant
from opfuse.kernels.layouts import ceil_div
from opfuse.kernels.registry import Launcher, Tolerance, kernel

C_TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "u8"}

_DENSE = (Tensor, torch.nn.Parameter)
_THREADS = 256
_FLAT_COLUMNS = 2048  # of a matrix whose shape does not matter
_SUMMED_LANES = 32  # what one warp adds up
_SUM_STEPS = 16  # rows that a thread adds up
_VECTOR = 8  # elements
_ADDERS = 32  # sums of a block that adds up parts

Tensors = list[dict[str, Tensor]]
"""Tensors of each stage, by name."""


class Program(NamedTuple):
    """A compiled structure: the variant, and how the one parameter of its kernels is packed."""

    variant: Variant
    layout: struct.Struct


class Cut(NamedTuple):
    """How a matrix of results is cut into blocks; as in chain.cuh."""

    rows: int
    columns: int
    log_across: int
    tiles_across: int
    steps: int

    @property
    def pieces(self) -> int:
        """Pieces of rows."""
        return ceil_div(self.rows, (_THREADS >> self.log_across) * self.steps)

    @property
    def grid(self) -> Grid:
        return Grid(self.pieces * self.tiles_across, _THREADS)


@kernel("chain_forward.cu", reference=epilogue.forward_chain, tolerance=Tolerance(ulp=1), cases=chain_cases.FORWARD)
def forward_chain(
    launch: Launcher,
    x: Tensor,
    stages: Sequence[Stage],
    *,
    rounding: Rounding = "per_op",
    dtype: torch.dtype | None = None,
    keep: Collection[int] = (),
) -> tuple[Tensor, dict[int, Tensor]]:
    """One read of ``x`` and of each operand."""
    dtype = dtype or x.dtype
    shapes = _shapes(x, stages)
    operands = _operands(stages, shapes[1:], lambda stage: stage.math.operands)
    if operands is None or not _runs(dtype, x, *_flat(operands)):
        return epilogue.forward_chain(x, stages, rounding=rounding, dtype=dtype, keep=keep)
    x = x.contiguous()
    kept = {i: torch.empty(shapes[i], dtype=dtype, device=x.device) for i in sorted(keep) if i or x.dtype != dtype}
    y = torch.empty(shapes[-1], dtype=dtype, device=x.device)
    code = ChainCode(
        tuple(_stage_code(s, operands[i], saved=kept.get(i)) for i, s in enumerate(stages)), *_flow(x.dtype, dtype, rounding)
    )
    tensors = [x, *_flat(operands), y, *kept.values()]
    cut = _cut(code, y)
    program = _program("chain_forward.cu", code, len(tensors), _on_vectors(code, cut.columns, tensors))
    fields = (*(t.data_ptr() for t in tensors), *cut, *_constants(stages))
    launch(program.variant, "chain_forward", cut.grid, program.layout, *fields, device=x.get_device())
    return y, {i: kept.get(i, x) for i in keep}


@kernel("chain_backward.cu", reference=epilogue.backward_chain, tolerance=Tolerance(ulp=1), cases=chain_cases.BACKWARD)
def backward_chain(
    launch: Launcher,
    dy: Tensor,
    stages: Sequence[Stage],
    saved_inputs: Mapping[int, Tensor],
    *,
    rounding: Rounding = "per_op",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensors]:
    """One read of ``dy``, of what was saved and of each operand; operand gradients are summed in two passes of fixed order."""
    dtype = dtype or dy.dtype
    shapes = _gradient_shapes(dy, stages)
    operands = _operands(stages, shapes[1:], lambda stage: stage.math.backward_reads & set(stage.math.operands))
    saved = _saved(stages, shapes, saved_inputs)
    if operands is None or saved is None or not _runs(dtype, dy, *_flat(operands), *saved.values()):
        return epilogue.backward_chain(dy, stages, saved_inputs, rounding=rounding, dtype=dtype)
    dy = dy.contiguous()
    same = _first_same(stages) if dy.dtype == dtype else len(shapes)
    dx = dy if same == 0 else torch.empty(shapes[0], dtype=dtype, device=dy.device)
    grads = [_new_grads(s, dy, shapes[i + 1], dtype, same=same <= i + 1) for i, s in enumerate(stages)]
    made = [{name: grad for name, grad in of_stage.items() if grad is not dy} for of_stage in grads]
    if dx is dy and not any(made):
        return dx, grads
    code = ChainCode(
        tuple(_stage_code(s, operands[i], made[i], saved.get(i)) for i, s in enumerate(stages)),
        *_flow(dy.dtype, dtype, rounding),
        stores=dx is not dy,
    )
    tensors = [dy, *saved.values(), *_flat(operands), dx, *_flat(made)]
    _queue_backward(launch, code, tensors, _constants(stages))
    return dx, grads


def _queue_backward(launch: Launcher, code: ChainCode, tensors: Sequence[Tensor], constants: Sequence[float]) -> None:
    """The gradients, then what adds up partial sums."""
    dy = tensors[0]
    cut = _cut(code, dy)
    sums = {
        "row_sums": (cut.pieces, len(code.row_sums) * cut.columns),
        "column_sums": (cut.tiles_across, len(code.column_sums) * cut.rows),
    }
    parts = [torch.empty(size, dtype=torch.float32, device=dy.device) if size[1] else None for size in sums.values()]
    program = _program("chain_backward.cu", code, len(tensors), _on_vectors(code, cut.columns, tensors))
    addresses = (*(t.data_ptr() for t in tensors), *(0 if t is None else t.data_ptr() for t in parts))
    grids = {"chain_backward": cut.grid}
    grids |= {entry: Grid(ceil_div(size, _ADDERS), _THREADS) for entry, (_, size) in sums.items() if size}
    for entry, grid in grids.items():
        launch(program.variant, entry, grid, program.layout, *addresses, cut.pieces, *cut, *constants, device=dy.get_device())


# -- structure -----------------------------------------------------------------------------------------------------------------


@functools.cache
def _program(source: str, code: ChainCode, tensors: int, vectors: bool) -> Program:
    """The variant for a structure, whose text is written once."""
    forward = source == "chain_forward.cu"
    pointers = f"{tensors}P" if forward else f"{tensors + 2}Pq"
    layout = struct.Struct(f"{pointers}qqIII0q{len(code.constants)}f0q")
    text = code.forward() if forward else code.backward()
    return Program(Variant(source, (f"PARAMETER_BYTES={layout.size}", f"ALIGNED={int(vectors)}"), text), layout)


def _stage_code(
    stage: Stage, operands: Mapping[str, Tensor], grads: Mapping[str, Tensor] = {}, saved: Tensor | None = None
) -> StageCode:
    operand_types, grad_types = (tuple((name, C_TYPES[t.dtype]) for name, t in given.items()) for given in (operands, grads))
    return StageCode(
        stage.math, operand_types, grad_types, None if saved is None else C_TYPES[saved.dtype], stage.interleave or 0
    )


def _flow(source: torch.dtype, io: torch.dtype, rounding: Rounding) -> tuple[str, str, str]:
    """C types of what comes in, of results, and of what flows between two ops."""
    return C_TYPES[source], C_TYPES[io], C_TYPES[epilogue.boundary_dtype(rounding, io, torch.float32)]


def _cut(code: ChainCode, result: Tensor) -> Cut:
    """Wide pieces of few rows; where rows or columns are added up, taller ones of at most 32 packs."""
    sums = bool(code.row_sums or code.column_sums)
    columns = result.shape[-1]
    if code.is_flat and result.numel() % _VECTOR == 0:
        columns = math.gcd(result.numel(), _FLAT_COLUMNS)
    packs = ceil_div(columns, _VECTOR)
    log_across = min(_SUMMED_LANES if sums else _THREADS, packs).bit_length() - 1
    steps = _SUM_STEPS if sums else code.packs
    return Cut(result.numel() // columns, columns, log_across, ceil_div(packs, 1 << log_across), steps)


def _on_vectors(code: ChainCode, columns: int, tensors: Iterable[Tensor]) -> bool:
    """Whether every pack of eight starts where a vector can, and is whole."""
    groups = all(stage.interleave % _VECTOR == 0 for stage in code.stages)
    return groups and columns % _VECTOR == 0 and all(t.data_ptr() % min(16, _VECTOR * t.element_size()) == 0 for t in tensors)


def _constants(stages: Sequence[Stage]) -> list[float]:
    return [stage.constants[name] for stage in stages for name in stage.math.constants]


def _flat(tensors: Tensors) -> list[Tensor]:
    return [t for of_stage in tensors for t in of_stage.values()]


# -- what a call gives ---------------------------------------------------------------------------------------------------------


def _runs(dtype: torch.dtype, *tensors: Tensor) -> bool:
    """Whether kernels know these tensors."""
    device = tensors[0].device
    return dtype in C_TYPES and all(t.dtype in C_TYPES and t.device == device and type(t) in _DENSE for t in tensors)


def _shapes(x: Tensor, stages: Sequence[Stage]) -> list[torch.Size]:
    """Of x and of each stage's result; none if there are none."""
    shapes = [x.shape] if x.dim() and stages else []
    for stage in stages if shapes else ():
        if stage.math.is_gated and shapes[-1][-1] % (2 * (stage.interleave or 1)):
            return []
        shapes.append(torch.Size((*shapes[-1][:-1], shapes[-1][-1] // 2)) if stage.math.is_gated else shapes[-1])
    return shapes


def _gradient_shapes(dy: Tensor, stages: Sequence[Stage]) -> list[torch.Size]:
    """Of the gradients of each stage's input, and of dy; none if there are none."""
    shapes = [dy.shape] if dy.dim() and stages else []
    for stage in reversed(stages) if shapes else ():
        if stage.math.is_gated and shapes[0][-1] % (stage.interleave or 1):
            return []
        shapes.insert(0, torch.Size((*shapes[0][:-1], 2 * shapes[0][-1])) if stage.math.is_gated else shapes[0])
    return shapes


def _operands(stages: Sequence[Stage], shapes: Sequence[torch.Size], names: Callable[[Stage], Collection[str]]) -> Tensors | None:
    """The operands that are read, in the order of their declaration; None if one is missing or has another shape."""
    if not shapes:
        return None
    found: Tensors = []
    for stage, shape in zip(stages, shapes):
        read = names(stage)
        given = {name: stage.operands.get(name) for name in stage.math.operands if name in read}
        wanted = {name: epilogue.operand_shape(stage.math.operands[name], shape) for name in given}
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
        made[name] = dy if through else torch.empty(epilogue.operand_shape(kind, shape), dtype=of_operand, device=dy.device)
    return made
