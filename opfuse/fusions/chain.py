"""A run of elementwise ops without a producer, forward; also what a declared rule may emit as ``chain``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from opfuse.compiler.rules import fusion, maybe, run
from opfuse.core.context import Context
from opfuse.ops.chains import run_chain


def elementwise(x: torch.Tensor, *, chain: Sequence[Context], quantize: Context | None) -> Any:
    """Elementwise ops and the cast of their result, in one kernel; saved state as the unfused ops leave it."""
    cast = None if quantize is None else quantize.op.by(*quantize.extras)
    made = run_chain(x, chain, cast, dtype=chain[0].dtype_of(x), rounding=chain[0].env.rounding)
    chain[0].input_dtype = x.dtype
    return made


ELEMENTWISE = fusion(
    "elementwise",
    {"chain": run("elementwise", low=1), "quantize": maybe("builtin_cast")},
    forward=elementwise,
)
