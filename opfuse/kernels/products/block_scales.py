"""Scales of FP8 blocks as products of MXFP8 read them, in one launch: their bytes are those of numerics/scales.py."""

from __future__ import annotations

import torch

from opfuse.kernels.engine.launch import Grid
from opfuse.kernels.engine.parameters import parameter_of
from opfuse.kernels.engine.registry import BITWISE, Launcher, kernel
from opfuse.kernels.engine.variants import variant_of
from opfuse.numerics.layouts import Layout, ceil_div
from opfuse.numerics.scales import mx_layout
from opfuse.numerics.scales import scales_of_blocks as definition

_PARAMETERS = parameter_of("block_scales.cu")
_THREADS, _SCALES = 256, 4


@kernel("block_scales.cu", reference=definition, tolerance=BITWISE)
def scales_of_blocks(launch: Launcher, scale: torch.Tensor, layout: Layout) -> torch.Tensor:
    """For scales as a plane stores them."""
    made = mx_layout(layout)
    out = torch.empty(made.scale_shape, dtype=torch.uint8, device=scale.device)
    if not out.numel():
        return out
    scale, square = scale.contiguous(), not layout.scale_across
    variant = variant_of("block_scales.cu", _PARAMETERS.layout, SQUARE=square)
    fields = _PARAMETERS(
        scale=scale.data_ptr(),
        out=out.data_ptr(),
        lines=made.lines[0],
        quads=made.tiled_shape[1] // _SCALES,
        blocks=made.blocks[1],
        pitch=scale.shape[1],
    )
    grid = Grid(ceil_div(out.numel() // _SCALES, _THREADS), _THREADS)
    launch(variant, "block_scales", grid, _PARAMETERS.layout, *fields, device=scale.get_device())
    return out
