"""Memory for the planes of a cast that runs inside another kernel, and the fields by which that kernel finds them.

There is one function for each encoding. The kernel declares the fields that it takes in a struct: ``Encode`` if it casts tiles,
``Target`` if it casts rows. A function returns the fields of both, and the struct picks its own by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from opfuse.formats import USAGES
from opfuse.kernels.casts.block import new_blocks
from opfuse.kernels.casts.encoding import (
    Blocks,
    BlocksOfGroups,
    Current,
    EncodedArrays,
    Encoding,
    Microscaled,
    RecordingScale,
    RowScaled,
)
from opfuse.kernels.casts.groups import tiles_of
from opfuse.kernels.casts.tensor import new_mx
from opfuse.kernels.engine.variants import addresses, new_planes
from opfuse.numerics.layouts import check_number

Room = tuple[list[EncodedArrays], dict[str, Any]]
"""The planes of an encoding, uninitialized and in the order of its layouts, and the fields that kernels choose from."""


def room_for(encode: Encoding, x: Tensor, dtype: torch.dtype) -> Room:
    """Memory on the device of ``x`` for the cast of a matrix whose values were rounded to ``dtype``."""
    return _ROOMS[type(encode)](encode, x, dtype)


def _tensor(encode: RecordingScale | Current, x: Tensor, dtype: torch.dtype) -> Room:
    data = {layout.usage: torch.empty(layout.data_shape, dtype=torch.uint8, device=x.device) for layout in encode.layouts}
    decode_scale = torch.empty(1, dtype=torch.float32, device=x.device)
    rows, columns = encode.layouts[0].shape
    fields: dict[str, Any] = {
        **addresses(data, USAGES),
        "rows": rows,
        "columns": columns,
        "decode_scale": decode_scale.data_ptr(),
    }
    fields["amax"] = check_number(encode.amax, x.device, where="amax of a cast")
    if isinstance(encode, RecordingScale):
        fields |= {"scale": check_number(encode.scale, x.device, where="scale of a cast"), "eps": 0.0, "pow2": 0}
    else:
        fields |= {"scale": 0, "eps": encode.eps, "pow2": encode.pow2}
    return [(each, decode_scale) for each in data.values()], fields


def _rows(encode: RowScaled, x: Tensor, dtype: torch.dtype) -> Room:
    planes, fields = new_planes(encode.layouts, x.device)
    return [*planes], {**fields, "eps": encode.eps}


def _blocks(encode: Blocks, x: Tensor, dtype: torch.dtype) -> Room:
    planes, fields = new_blocks(encode.layouts, dtype, x.device, eps=encode.eps)
    return [*planes], fields


def _blocks_of_groups(encode: BlocksOfGroups, x: Tensor, dtype: torch.dtype) -> Room:
    planes, fields = new_blocks(encode.layouts, dtype, x.device, eps=encode.eps)
    groups = encode.groups
    return [*planes], {**fields, "rows": groups.rows, "tiles": tiles_of(groups), "down": groups.tiles}


def _microscaled(encode: Microscaled, x: Tensor, dtype: torch.dtype) -> Room:
    planes, fields = new_mx(encode.layouts, x.device, encode.rounding)
    return [*planes], fields


_ROOMS: Mapping[type, Callable[[Any, Tensor, torch.dtype], Room]] = {
    RecordingScale: _tensor,
    Current: _tensor,
    RowScaled: _rows,
    Blocks: _blocks,
    BlocksOfGroups: _blocks_of_groups,
    Microscaled: _microscaled,
}
