"""What launch functions share: C names of dtypes, alignment, variants from keywords."""

from __future__ import annotations

import functools
import struct

import torch

from opfuse.kernels.engine.compiling import Variant

C_TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}
VECTOR = 16
"""Bytes that a thread loads or stores at once; also the number of rows whose one-byte codes it stores along a column."""
PACK = 8
"""Neighbouring elements that a thread handles at a time."""
_BYTES = "PARAMETER_BYTES"
WIDEST = 1 << 31
"""Matrices of several rows must have fewer columns: kernels compute distances between rows from 32-bit numbers."""


def on_bytes(x: torch.Tensor, multiple: int) -> bool:
    """Whether ``x`` starts on a multiple of so many bytes."""
    return x.data_ptr() % multiple == 0


@functools.cache
def variant_of(source: str, parameters: struct.Struct, *, entry: str | None = None, **defines: str | int) -> Variant:
    """The variant of a source whose kernels take ``parameters``; a bool is 0 or 1.

    entry: the one kernel that is compiled, of a source that has each of them under ``#if ENTRY_name``.
    """
    values = {_BYTES: parameters.size, **defines, **({} if entry is None else {f"ENTRY_{entry}": 1})}
    return Variant(source, tuple(f"{name}={int(v) if isinstance(v, bool) else v}" for name, v in values.items()))


def parameter_bytes(variant: Variant) -> int:
    """The size of the parameter of the variant's kernels, in bytes; the driver reads all of them at a launch."""
    return next(int(value) for name, _, value in (define.partition("=") for define in variant.defines) if name == _BYTES)


def is_joined(variant: Variant) -> bool:
    """Whether the variant is compiled to run several launches as one."""
    return any(define.startswith("JOINED=") for define in variant.defines)
