"""Chains whose result is cast in the same kernel, forward and backward: a chain's run, then a cast of what it made.

A kernel stores the result itself only if it is asked to. What a kernel cannot take runs as two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opfuse.formats import COLUMNWISE, ROWWISE
from opfuse.kernels import chain_cast_cases
from opfuse.kernels.cast_block import BLOCKS, new_blocks
from opfuse.kernels.chain import backward_chain, forward_chain, run
from opfuse.kernels.chain_call import THREADS, Call, Cut, Tensors, backward_call, forward_call
from opfuse.kernels.encoding import Blocks, Encoded, Encoding, Recording
from opfuse.kernels.epilogue import Rounding, Stage
from opfuse.kernels.layouts import ceil_div
from opfuse.kernels.registry import Launcher, Tolerance, kernel

_TILE = (128, 64)
_BLOCK = (128, 128)


def forward_then_cast(
    x: Tensor,
    stages: Sequence[Stage],
    encode: Encoding,
    *,
    rounding: Rounding = "per_op",
    dtype: torch.dtype | None = None,
    keep: Collection[int] = (),
    stores: bool = False,
) -> tuple[list[Encoded], Tensor | None, dict[int, Tensor]]:
    """The codes of :func:`forward_chain`'s result, the result if it ``stores`` it, and what is kept."""
    y, kept = forward_chain(x, stages, rounding=rounding, dtype=dtype, keep=keep)
    return encode(y), y if stores else None, kept


def backward_then_cast(
    dy: Tensor,
    stages: Sequence[Stage],
    saved_inputs: Mapping[int, Tensor],
    encode: Encoding,
    *,
    rounding: Rounding = "per_op",
    dtype: torch.dtype | None = None,
    stores: bool = False,
) -> tuple[list[Encoded], Tensor | None, Tensors]:
    """The codes of :func:`backward_chain`'s dx, dx if it ``stores`` it, and the operand gradients of each stage."""
    dx, grads = backward_chain(dy, stages, saved_inputs, rounding=rounding, dtype=dtype)
    return encode(dx), dx if stores else None, grads


def forward_chain_encoded(
    x: Tensor, stages: Sequence[Stage], encode: Encoding, **options: Any
) -> tuple[list[Encoded], dict[int, Tensor]]:
    """The cast of :func:`forward_chain`'s result, and what is kept: one kernel where there is one for the encoding."""
    encoded, _, kept = FORWARD.get(type(encode), forward_then_cast)(x, stages, encode, **options)
    return encoded, kept


def backward_chain_encoded(
    dy: Tensor, stages: Sequence[Stage], saved_inputs: Mapping[int, Tensor], encode: Encoding, **options: Any
) -> tuple[list[Encoded], Tensors]:
    """The cast of :func:`backward_chain`'s dx, and operand gradients: one kernel where there is one for the encoding."""
    encoded, _, grads = BACKWARD.get(type(encode), backward_then_cast)(dy, stages, saved_inputs, encode, **options)
    return encoded, grads


@kernel("chain_tensor.cu", reference=forward_then_cast, tolerance=Tolerance(ulp=1), cases=chain_cast_cases.FORWARD)
def forward_chain_cast(
    launch: Launcher,
    x: Tensor,
    stages: Sequence[Stage],
    encode: Recording,
    *,
    rounding: Rounding = "per_op",
    dtype: torch.dtype | None = None,
    keep: Collection[int] = (),
    stores: bool = False,
) -> tuple[list[Encoded], Tensor | None, dict[int, Tensor]]:
    """One read of ``x`` and of each operand."""
    call = forward_call(x, stages, rounding, dtype, keep, stores=stores)
    if call is None:
        return forward_then_cast(x, stages, encode, rounding=rounding, dtype=dtype, keep=keep, stores=stores)
    return _run_cast(launch, call, encode), call.result, call.kept


@kernel("chain_tensor.cu", reference=backward_then_cast, tolerance=Tolerance(ulp=4), cases=chain_cast_cases.BACKWARD)
def backward_chain_cast(
    launch: Launcher,
    dy: Tensor,
    stages: Sequence[Stage],
    saved_inputs: Mapping[int, Tensor],
    encode: Recording,
    *,
    rounding: Rounding = "per_op",
    dtype: torch.dtype | None = None,
    stores: bool = False,
) -> tuple[list[Encoded], Tensor | None, Tensors]:
    """One read of ``dy``, of what was saved and of each operand."""
    call = backward_call(dy, stages, saved_inputs, rounding, dtype, casts=True, stores=stores)
    if call is None or not _fits(call):
        return backward_then_cast(dy, stages, saved_inputs, encode, rounding=rounding, dtype=dtype, stores=stores)
    return _run_cast(launch, call, encode), call.result, call.grads


def forward_then_blocks(
    x: Tensor,
    stages: Sequence[Stage],
    encode: Blocks,
    *,
    rounding: Rounding = "per_op",
    dtype: torch.dtype | None = None,
    keep: Collection[int] = (),
    stores: bool = False,
) -> tuple[list[Encoded], Tensor | None, dict[int, Tensor]]:
    """Data and scales of the planes of :func:`forward_chain`'s result, the result if it ``stores`` it, and what is kept."""
    y, kept = forward_chain(x, stages, rounding=rounding, dtype=dtype, keep=keep)
    return encode(y), y if stores else None, kept


@kernel("chain_block.cu", reference=forward_then_blocks, tolerance=Tolerance(ulp=1), cases=chain_cast_cases.BLOCKS)
def forward_chain_blocks(
    launch: Launcher,
    x: Tensor,
    stages: Sequence[Stage],
    encode: Blocks,
    *,
    rounding: Rounding = "per_op",
    dtype: torch.dtype | None = None,
    keep: Collection[int] = (),
    stores: bool = False,
) -> tuple[list[Encoded], Tensor | None, dict[int, Tensor]]:
    """One read of ``x`` and of each operand."""
    call = forward_call(x, stages, rounding, dtype, keep, stores=stores)
    if call is None or len({layout.format for layout in encode.layouts}) > 1:
        return forward_then_blocks(x, stages, encode, rounding=rounding, dtype=dtype, keep=keep, stores=stores)
    planes, fields = new_blocks(encode.layouts, dtype or x.dtype, call.device, eps=encode.eps, pow2=encode.pow2)
    cut = _tiles(call, _BLOCK)
    resident, ahead = _block_residency(call)
    defines = (
        f"OUT={encode.layouts[0].element.name.upper()}",
        f"SQUARE={int(encode.layouts[0].block[0] != 1)}",
        f"RESIDENT={resident}",
        f"AHEAD={ahead}",
    )
    run(launch, "chain_block", call, cut, defines=defines, extra=BLOCKS, fields=fields)
    return [*planes], call.result, call.kept


def _tiles(call: Call, tile: tuple[int, int]) -> Cut:
    """The result in tiles of ``tile`` rows and columns."""
    columns, across = call.shape[-1], tile[1] // 8
    return Cut(
        call.shape.numel() // columns, columns, across.bit_length() - 1, ceil_div(columns, tile[1]), tile[0] * across // THREADS
    )


def _fits(call: Call) -> bool:
    """Whether the columns of a tile lie together in every strand of dx, of which a kernel has room for two."""
    return call.code.depths[0] <= 1 and all(stage.interleave % _TILE[1] == 0 for stage in call.code.stages)


def _run_cast(launch: Launcher, call: Call, encode: Recording) -> list[Encoded]:
    data = {layout.usage: torch.empty(layout.data_shape, dtype=torch.uint8, device=call.device) for layout in encode.layouts}
    decode_scale = torch.empty(1, dtype=torch.float32, device=call.device)
    cut = _tiles(call, _TILE)
    blocks, ahead = _residency(call)
    defines = (f"OUT={encode.layouts[0].element.name.upper()}", f"BLOCKS={blocks}", f"AHEAD={ahead}")
    planes = [data[usage].data_ptr() if usage in data else 0 for usage in (ROWWISE, COLUMNWISE)]
    scaling = (encode.scale.data_ptr(), encode.amax.data_ptr(), decode_scale.data_ptr())
    run(launch, "chain_tensor", call, cut, defines=defines, extra="5P", fields=(*planes, *scaling))
    return [(data[layout.usage], decode_scale) for layout in encode.layouts]


# Blocks that share a multiprocessor, as many as leave threads their registers, and rows that a thread loads ahead: measured on an
# H200. By direction, whether the chain is gated, and whether gradients of operands are added up.
_RESIDENCY = {
    ("forward", False, False): (4, 2),
    ("forward", True, False): (4, 1),
    ("backward", False, False): (4, 2),
    ("backward", False, True): (4, 2),
    ("backward", True, False): (4, 1),
    ("backward", True, True): (3, 2),
}
_MANY_REGISTERS = (2, 1)


def _residency(call: Call) -> tuple[int, int]:
    code = call.code
    if not call.is_aligned(call.shape[-1]) or "float" in (code.io, code.between) or code.depths[0] > 1 or code.column_sums:
        return _MANY_REGISTERS
    gated = code.depths[0] > 0
    blocks, ahead = _RESIDENCY[code.direction, gated, bool(code.row_sums)]
    stored = code.stores or (code.direction == "forward" and code.saved)
    return (blocks - 1, 1) if code.source == "float" or (gated and stored) else (blocks, ahead)


def _block_residency(call: Call) -> tuple[int, int]:
    code = call.code
    if not call.is_aligned(call.shape[-1]) or "float" in (code.io, code.between) or code.depths[0] > 1:
        return 1, 1
    if code.source == "float":
        return (1, 1) if code.depths[0] else (2, 1)
    if code.stores or code.saved:
        return (1, 1) if code.depths[0] else (3, 2)
    return (3, 2) if code.depths[0] or any(code.of_kind("column")) else (4, 2)


FORWARD: Mapping[type, Callable[..., tuple[list[Encoded], Tensor | None, dict[int, Tensor]]]] = {
    Recording: forward_chain_cast,
    Blocks: forward_chain_blocks,
}
"""The kernels of casts that a chain takes over, by the type of the encoding."""

BACKWARD: Mapping[type, Callable[..., tuple[list[Encoded], Tensor | None, Tensors]]] = {Recording: backward_chain_cast}
"""The same for dx."""
