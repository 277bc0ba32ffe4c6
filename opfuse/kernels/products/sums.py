"""Sums times the factors that they leave out, as the library calls them: one launch, with the result of numerics/sums.py.

Products of experts that are emulated are made eight at a time: a launch decodes each side, torch multiplies each group, a
launch scales and rounds all sums. More at once would hold more weights in bf16, and save little.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from opfuse.kernels.engine.joining import together
from opfuse.kernels.engine.launch import Grid
from opfuse.kernels.engine.parameters import parameter_of
from opfuse.kernels.engine.registry import BITWISE, Launcher, kernel
from opfuse.kernels.engine.variants import C_TYPES, PACK, VECTOR, addresses, on_bytes, variant_of
from opfuse.numerics.layouts import ceil_div
from opfuse.numerics.sums import Factors
from opfuse.numerics.sums import scaled_sums as definition

_PARAMETERS = parameter_of("scaled_sums.cu")
_THREADS, _WARP, _ROWS = 256, 32, 2


@kernel("scaled_sums.cu", reference=definition, tolerance=BITWISE)
def scaled_sums(
    launch: Launcher,
    sums: Sequence[torch.Tensor],
    factors: Sequence[Factors],
    *,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
    overwrites: bool = False,
) -> torch.Tensor:
    """Reads the sums once, with one launch for up to ``JOINED``. They are overwritten only if they are the result."""
    if dtype not in C_TYPES:
        return definition(sums, factors, dtype=dtype, out=out, overwrites=overwrites)
    sums = [each.contiguous() for each in sums]
    if out is None:
        out = _room(sums, factors, dtype, overwrites=overwrites)
    with together(launch) as each:
        for one, of, result in zip(sums, factors, out.split([len(one) for one in sums]), strict=True):
            if one.numel() and not (of.left is None and result.data_ptr() == one.data_ptr()):
                _scale(each, one, of, result)
    return out


def _room(sums: Sequence[torch.Tensor], factors: Sequence[Factors], dtype: torch.dtype, *, overwrites: bool) -> torch.Tensor:
    """For the result: the sums themselves, if they may be it."""
    first, *others = sums
    if not others and dtype == first.dtype and (overwrites or factors[0].left is None):
        return first
    return torch.empty(sum(map(len, sums)), first.shape[1], dtype=dtype, device=first.device)


def _scale(launch: Launcher, sums: torch.Tensor, factors: Factors, out: torch.Tensor) -> None:
    sides = {
        name: None if each is None else each.contiguous() for name, each in (("left", factors.left), ("right", factors.right))
    }
    (rows, columns), lines = sums.shape, {name: each is not None and each.numel() > 1 for name, each in sides.items()}
    variant = variant_of(
        "scaled_sums.cu",
        _PARAMETERS.layout,
        OUT=C_TYPES[out.dtype],
        LEFT_LINES=lines["left"],
        RIGHT_LINES=lines["right"],
        ALIGNED=columns % PACK == 0 and all(on_bytes(each, VECTOR) for each in (sums, out)),
    )
    fields = _PARAMETERS(
        **addresses({"sums": sums, "out": out, **sides}),
        rows=rows,
        columns=columns,
        left_unit=factors.left_unit,
        right_unit=factors.right_unit,
    )
    warps = ceil_div(rows, _ROWS) * ceil_div(columns, _WARP * PACK)
    grid = Grid(ceil_div(warps, _THREADS // _WARP), _THREADS)
    launch(variant, "scaled_sums", grid, _PARAMETERS.layout, *fields, device=sums.get_device())
