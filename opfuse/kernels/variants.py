"""What launches have in common: C names of dtypes, alignment, variants from keywords."""

from __future__ import annotations

import functools
import struct

import torch

from opfuse.kernels.launch import Variant

C_TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}


def on_bytes(x: torch.Tensor, multiple: int) -> bool:
    """Whether ``x`` starts on a multiple of so many bytes."""
    return x.data_ptr() % multiple == 0


@functools.cache
def variant_of(source: str, parameters: struct.Struct, **defines: str | int) -> Variant:
    """The variant of a source whose kernels take ``parameters``; a bool is 0 or 1."""
    values = {"PARAMETER_BYTES": parameters.size, **defines}
    return Variant(source, tuple(f"{name}={int(v) if isinstance(v, bool) else v}" for name, v in values.items()))
