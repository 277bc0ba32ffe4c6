"""What launch functions share: C names of dtypes, alignment, variants from keywords, addresses, memory for planes."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from opfuse.formats import COLUMNWISE, ROWWISE
from opfuse.kernels.engine.compiling import Variant
from opfuse.numerics.layouts import SCALE_DTYPES, Layout

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


def addresses(tensors: Mapping[Any, torch.Tensor | None], names: Iterable[str] = ()) -> dict[str, int]:
    """The addresses of tensors by name, for these names if any are given; 0 for None, and for one that there is not."""
    return {name: 0 if (tensor := tensors.get(name)) is None else tensor.data_ptr() for name in names or tensors}


def new_plane(layout: Layout, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the data, uint8, and the scales of a plane. Padding of one-byte scales is 0, since kernels do not write it."""
    new = torch.zeros if layout.tiled and layout.tiled_shape != layout.blocks else torch.empty
    data = torch.empty(layout.data_shape, dtype=torch.uint8, device=device)
    return data, new(layout.scale_shape, dtype=SCALE_DTYPES[layout.format.scale], device=device)


_SCALES = {ROWWISE: "row_scale", COLUMNWISE: "column_scale"}


def new_planes(
    layouts: Sequence[Layout], device: torch.device
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], dict[str, int | float]]:
    """:func:`new_plane` of each, and a kernel's fields: addresses of data by usage, of scales, and the matrix's shape."""
    planes = {layout.usage: new_plane(layout, device) for layout in layouts}
    data, scales = ({usage: plane[i] for usage, plane in planes.items()} for i in range(2))
    rows, columns = layouts[0].shape
    fields = {**addresses(data, _SCALES), **{_SCALES[usage]: at for usage, at in addresses(scales, _SCALES).items()}}
    return [*planes.values()], {**fields, "rows": rows, "columns": columns}


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
