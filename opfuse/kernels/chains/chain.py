"""Chains of elementwise ops: one kernel each, with the results of numerics/chain.py.

A kernel is compiled for the structure of a chain: its ops, dtypes, and what is stored. Shapes and constants are its parameters.
What a kernel cannot take goes to the torch definition, which runs it or says what is wrong: other dtypes than fp32, bf16, fp16
(bytes for masks), above all fp64; operands that are missing or misshapen; tensors without dimensions; too many sums.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from opfuse.kernels.casts.tensor import tensor_amax
from opfuse.kernels.chains import trials
from opfuse.kernels.chains.call import THREADS, ChainCall, Tensors, Tiling, backward_call, forward_call
from opfuse.kernels.chains.structure import ChainCode
from opfuse.kernels.chains.text import text_of
from opfuse.kernels.chains.tiles import plain_tile
from opfuse.kernels.engine.compiling import Variant
from opfuse.kernels.engine.launch import Grid
from opfuse.kernels.engine.parameters import CStruct, parameter_of
from opfuse.kernels.engine.registry import Launcher, Tolerance, kernel
from opfuse.numerics import chain as definition
from opfuse.numerics.chain import Rounding, Stage
from opfuse.numerics.layouts import ceil_div

_SUMMED_ROWS, _SUMMED_COLUMNS = 64, 64  # of one part of a sum
_ADDERS = 32  # sums of a block that adds up parts
_AMAX = parameter_of("encode.cuh", "Encode")


class ChainProgram(NamedTuple):
    """What a structure is compiled to: the variant, and the struct of its kernels' parameter, which has the chain in it."""

    variant: Variant
    parameter: CStruct
    chain: CStruct


@kernel("chain_forward.cu", reference=definition.forward_chain, tolerance=Tolerance(ulp=1), trials=trials.forward)
def forward_chain(
    launch: Launcher,
    x: Tensor,
    stages: Sequence[Stage],
    *,
    rounding: Rounding = "per_op",
    dtype: torch.dtype | None = None,
    keep: Collection[int] = (),
) -> tuple[Tensor, dict[int, Tensor]]:
    """Reads ``x`` and each operand once."""
    call = forward_call(x, stages, rounding, dtype, keep)
    if call is None or call.result is None:
        return definition.forward_chain(x, stages, rounding=rounding, dtype=dtype, keep=keep)
    _run_plain(launch, "chain_forward", call)
    return call.result, call.kept


@kernel("chain_backward.cu", reference=definition.backward_chain, tolerance=Tolerance(ulp=4), trials=trials.backward)
def backward_chain(
    launch: Launcher,
    dy: Tensor,
    stages: Sequence[Stage],
    saved_inputs: Mapping[int, Tensor],
    *,
    rounding: Rounding = "per_op",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensors]:
    """Reads ``dy``, saved tensors and operands once. Gradients of operands are summed in two steps, in a fixed order."""
    call = backward_call(dy, stages, saved_inputs, rounding, dtype, casts=True)
    if call is None or call.result is None or not _has_kernel(call):
        return definition.backward_chain(dy, stages, saved_inputs, rounding=rounding, dtype=dtype)
    if not call.is_nothing:
        _run_plain(launch, "chain_backward", call)
    return call.result, call.grads


def forward_then_amax(
    x: Tensor,
    stages: Sequence[Stage],
    *,
    rounding: Rounding = "per_op",
    dtype: torch.dtype | None = None,
    keep: Collection[int] = (),
    stores: bool = True,
) -> tuple[Tensor | None, dict[int, Tensor], Tensor]:
    """:func:`forward_chain`, its result if it is stored, and fp32 (1,) the largest magnitude of it."""
    y, kept = forward_chain(x, stages, rounding=rounding, dtype=dtype, keep=keep)
    return y if stores else None, kept, tensor_amax(y)


def backward_then_amax(
    dy: Tensor,
    stages: Sequence[Stage],
    saved_inputs: Mapping[int, Tensor],
    *,
    rounding: Rounding = "per_op",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensors, Tensor]:
    """:func:`backward_chain`, and fp32 (1,) the largest magnitude of dx."""
    dx, grads = backward_chain(dy, stages, saved_inputs, rounding=rounding, dtype=dtype)
    return dx, grads, tensor_amax(dx)


@kernel("chain_forward.cu", reference=forward_then_amax, tolerance=Tolerance(ulp=1), trials=trials.forward)
def forward_chain_amax(
    launch: Launcher,
    x: Tensor,
    stages: Sequence[Stage],
    *,
    rounding: Rounding = "per_op",
    dtype: torch.dtype | None = None,
    keep: Collection[int] = (),
    stores: bool = True,
) -> tuple[Tensor | None, dict[int, Tensor], Tensor]:
    """Finds the amax while it computes the result: nothing is read twice."""
    call = forward_call(x, stages, rounding, dtype, keep, stores=stores)
    if call is None:
        return forward_then_amax(x, stages, rounding=rounding, dtype=dtype, keep=keep, stores=stores)
    amax = torch.zeros(1, dtype=torch.float32, device=x.device)
    _run_plain(launch, "chain_forward", call, amax)
    return call.result, call.kept, amax


@kernel("chain_backward.cu", reference=backward_then_amax, tolerance=Tolerance(ulp=4), trials=trials.backward)
def backward_chain_amax(
    launch: Launcher,
    dy: Tensor,
    stages: Sequence[Stage],
    saved_inputs: Mapping[int, Tensor],
    *,
    rounding: Rounding = "per_op",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensors, Tensor]:
    """Finds the amax while it stores dx: nothing is read twice."""
    call = backward_call(dy, stages, saved_inputs, rounding, dtype, casts=True)
    if call is None or call.result is None or not _has_kernel(call):
        return backward_then_amax(dy, stages, saved_inputs, rounding=rounding, dtype=dtype)
    amax = torch.zeros(1, dtype=torch.float32, device=dy.device)
    _run_plain(launch, "chain_backward", call, amax)
    return call.result, call.grads, amax


def _has_kernel(call: ChainCall) -> bool:
    return not call.code.has_sums or plain_tile(call) is not None


def _run_plain(launch: Launcher, name: str, call: ChainCall, amax: Tensor | None = None) -> None:
    """A chain whose result is not cast; ``amax`` is raised to its largest magnitude. Sums are made in tiles."""
    fields = {"amax": 0 if amax is None else amax.data_ptr()}
    if call.code.has_sums and (tile := plain_tile(call)) is not None:
        defines = (*tile.defines, f"CAST={'NOTHING' if amax is None else 'AMAX'}")
        run(launch, "chain_tile", call, tile.cut(call), defines=defines, rest=fields, encode=_AMAX)
    else:
        run(launch, name, call, call.cut(), defines=(f"AMAX={int(amax is not None)}", "RESIDENT=0"), rest=fields)


def run(
    launch: Launcher,
    name: str,
    call: ChainCall,
    cut: Tiling,
    *,
    defines: tuple[str, ...],
    rest: Mapping[str, Any],
    encode: CStruct | None = None,
) -> None:
    """Queue kernel ``name`` of ``name``.cu for a call, then the kernels that add up its partial sums.

    rest: what follows the chain in the parameter. encode: Encode of the header for the cast, which takes what it has of ``rest``.
    """
    code, device = call.code, call.tensors[0].get_device()
    pieces, groups, sums = ceil_div(cut.rows, _SUMMED_ROWS), ceil_div(cut.columns, _SUMMED_COLUMNS), {}
    if code.has_sums:
        sums = {"row_sums": (pieces, len(code.row_sums) * cut.columns), "column_sums": (groups, len(code.column_sums) * cut.rows)}
    parts = [torch.empty(size, dtype=torch.float32, device=call.device) if size[1] else None for size in sums.values()]
    program = _program(name, code, (f"ALIGNED={int(call.is_aligned(cut.columns))}", *defines), encode)
    row_parts, column_parts = [0 if part is None else part.data_ptr() for part in parts] or (0, 0)
    summing = {"row_parts": row_parts, "column_parts": column_parts, "row_pieces": pieces, "column_pieces": groups}
    chain = chain_fields(program.chain, call, cut, summing)
    layout = program.parameter.layout
    packed = program.parameter(chain=chain, **(rest if encode is None else {"encode": encode.of(rest)}))
    launch(program.variant, name, cut.grid, layout, *packed, device=device)
    for entry, (_, size) in sums.items():
        if size:
            launch(program.variant, entry, Grid(ceil_div(size, _ADDERS), THREADS), layout, *packed, device=device)


_NO_SUMS = dict.fromkeys(("row_parts", "column_parts", "row_pieces", "column_pieces"), 0)


def chain_fields(chain: CStruct, call: ChainCall, cut: Tiling, summing: Mapping[str, int] = _NO_SUMS) -> tuple[int | float, ...]:
    """Those of ``chain``, the struct that a kernel's text declares for the structure of a call, over results that are cut so.

    summing: addresses of partial sums over rows and over columns, and how many parts of each there are.
    """
    names = (field for field, _ in chain.fields)
    return chain(
        **{name: tensor.data_ptr() for name, tensor in zip(names, call.tensors)},  # the first fields, in the order of the text
        **{f"c{i}_{constant}": value for (i, constant), value in zip(call.code.constants, call.constants, strict=True)},
        **summing,
        cut=cut.fields,
    )


@functools.cache
def _program(name: str, code: ChainCode, defines: tuple[str, ...], encode: CStruct | None) -> ChainProgram:
    """The variant for a structure, whose text is written once."""
    text, types = text_of(code), () if encode is None else (("Encode", encode),)
    parameter = parameter_of(f"{name}.cu", generated=text, types=types)
    chain = dict(parameter.fields)["chain"]
    variant = Variant(f"{name}.cu", (f"PARAMETER_BYTES={parameter.layout.size}", *defines), text)
    return ChainProgram(variant, parameter, cast(CStruct, chain))
