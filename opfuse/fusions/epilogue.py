"""Forward rules: what makes a tensor, elementwise ops that follow it, and the cast for the next product, in one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from opfuse.compiler.rules import fusion, is_, maybe, one, one_of, run
from opfuse.core.context import Context, Value
from opfuse.events import ProductChosen, emit, listeners
from opfuse.kernels.products.chained import OF_EXPERTS
from opfuse.numerics.pointwise import compute_dtype
from opfuse.ops.grouped_linear import GroupedLinear
from opfuse.ops.linear import BasicLinear
from opfuse.ops.pointwise import run_chain, write_in_place

UNGATED = "products of experts: the one launch of a product and its chain is made of one group"
"""Why ungated chains behind products of experts are launches of their own, beside :data:`OF_EXPERTS`."""


def _produce(x: Value, producer: Context, chain: Sequence[Context]) -> Any:
    """What the producer makes; of a matrix product that a chain follows, the chain decides how."""
    wide = producer.env.rounding == "single" and bool(chain)
    make = producer.op.pending if chain and isinstance(producer.op, BasicLinear) else producer.op.produce
    result = make(producer, x, out_dtype=compute_dtype(x.dtype) if wide else None)
    if chain and isinstance(producer.op, GroupedLinear) and ProductChosen in listeners():
        math = [ctx.op.math for ctx in chain]
        apart = OF_EXPERTS if any(each.is_gated for each in math) else UNGATED
        emit(ProductChosen(result.shape, tuple(each.name for each in math), apart))
    return result


def epilogue(x: Value, *, producer: Context, chain: Sequence[Context], quantize: Context | None) -> Any:
    """GEMM or norm, any run of elementwise ops, and the cast; saved state as the unfused ops leave it.

    Under ``rounding="single"`` the producer hands its sums over unrounded, and the chain's end is the only rounding.
    """
    made = None if quantize is None else quantize.op.by(*quantize.extras)
    if made is not None and not chain and "norm" in producer.op.traits:
        return producer.op.produce_cast(producer, x, made)
    result = _produce(x, producer, chain)
    if chain:
        return run_chain(result, chain, made, dtype=producer.dtype_of(x), rounding=producer.env.rounding)
    return result if made is None else made(result)


def elementwise(x: torch.Tensor, *, chain: Sequence[Context], quantize: Context | None) -> Any:
    """Elementwise ops without a producer, and the cast of their result, in one kernel; saved state as the unfused ops leave it.

    Also what a declared rule may emit as ``chain``.
    """
    made = None if quantize is None else quantize.op.by(*quantize.extras)
    result = run_chain(x, chain, made, dtype=chain[0].dtype_of(x), rounding=chain[0].env.rounding)
    chain[0].input_dtype = x.dtype
    return result


def epilogue_groups(x: Value, *, producer: Context | None, chain: Sequence[Context], quantize: Context) -> Any:
    """Elementwise ops and the cast of each group of their rows, in one kernel, behind what makes their input, if it is an op."""
    if producer is None:
        return elementwise(cast(torch.Tensor, x), chain=chain, quantize=quantize)
    return epilogue(x, producer=producer, chain=chain, quantize=quantize)


def linear_add(x: Value, *, basic_linear: Context, bias: Context | None, add: Context) -> torch.Tensor:
    """y = x W^T (+ b), added into the extra tensor in place."""
    chain = [ctx for ctx in (bias, add) if ctx is not None]
    return write_in_place(add, epilogue(x, producer=basic_linear, chain=chain, quantize=None))


def linear_scale_add(x: Value, *, basic_linear: Context, scale: Context, add: Context) -> torch.Tensor:
    """y = c x W^T, added into the extra tensor in place."""
    return write_in_place(add, epilogue(x, producer=basic_linear, chain=[scale, add], quantize=None))


LINEAR_SCALE_ADD = fusion(
    "linear_scale_add",
    {"basic_linear": "basic_linear", "scale": "constant_scale", "add": "add_extra_input"},
    when=(is_("add.in_place", True),),
    forward=linear_scale_add,
)

LINEAR_ADD = fusion(
    "linear_add",
    {"basic_linear": "basic_linear", "bias": maybe("bias"), "add": "add_extra_input"},
    when=(is_("add.in_place", True),),
    forward=linear_add,
)

EPILOGUE_GROUPS = fusion(
    "epilogue_groups",
    {"producer": maybe("producer"), "chain": run("elementwise", low=1), "quantize": "quantize_groups"},
    when=(one_of("quantize.ragged.inputs.family", "block"),),
    forward=epilogue_groups,
)

EPILOGUE = fusion(
    "epilogue",
    {"producer": one("producer"), "chain": run("elementwise"), "quantize": maybe("builtin_cast")},
    forward=epilogue,
)

ELEMENTWISE = fusion(
    "elementwise",
    {"chain": run("elementwise", low=1), "quantize": maybe("builtin_cast")},
    forward=elementwise,
)
