"""Every kernel of the library, with the calls that compare its launch with its definition. Tests and the command line read it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from opfuse.kernels.cases import chain_casts, chained, chains, delayed, figures, matrices, norms, nvfp4, planes, products
from opfuse.kernels.casts.block import cast_block
from opfuse.kernels.casts.delayed import delayed_update
from opfuse.kernels.casts.dequantize import dequantize, dequantize_nv
from opfuse.kernels.casts.figures import cast_figures
from opfuse.kernels.casts.nvfp4 import amaxes_nv, cast_nv
from opfuse.kernels.casts.row import cast_lines, cast_row, line_amaxes
from opfuse.kernels.casts.tensor import cast_current, cast_mx, cast_recording, tensor_amax
from opfuse.kernels.casts.transpose import transposed
from opfuse.kernels.chains.cast import backward_chain_cast, forward_chain_cast
from opfuse.kernels.chains.chain import backward_chain, backward_chain_amax, forward_chain, forward_chain_amax
from opfuse.kernels.engine.registry import Arguments, Case, Kernel
from opfuse.kernels.norms.cast import norm_cast
from opfuse.kernels.norms.norm import norm_backward, norm_forward
from opfuse.kernels.products.chained import product_chain
from opfuse.kernels.products.hopper import grouped_product

_TABLE: dict[Kernel[..., Any], Mapping[str, Case]] = {
    tensor_amax: matrices.MATRICES,
    cast_current: matrices.CURRENT,
    cast_recording: matrices.RECORDING,
    cast_mx: matrices.MX,
    cast_block: matrices.BLOCK,
    line_amaxes: matrices.LINES,
    cast_row: matrices.ROW,
    cast_lines: matrices.KNOWN_LINES,
    amaxes_nv: nvfp4.AMAXES,
    cast_nv: nvfp4.CASTS,
    dequantize: planes.PLANES,
    dequantize_nv: planes.NVFP4_PLANES,
    transposed: planes.TRANSPOSED,
    delayed_update: delayed.CASES,
    cast_figures: figures.CASES,
    forward_chain: chains.FORWARD,
    backward_chain: chains.BACKWARD,
    forward_chain_amax: chains.FORWARD_AMAX,
    backward_chain_amax: chains.BACKWARD_AMAX,
    forward_chain_cast: chain_casts.FORWARD,
    backward_chain_cast: chain_casts.BACKWARD,
    norm_forward: norms.FORWARD,
    norm_backward: norms.BACKWARD,
    norm_cast: norms.CAST,
    grouped_product: products.PRODUCTS,
    product_chain: chained.CHAINED,
}


def _drawn(case: Case, device: torch.device) -> Arguments:
    """The arguments of a case, whose values are drawn on the CPU whatever torch's default device is."""
    with torch.device("cpu"):
        return case(device)


CASES: Mapping[Kernel[..., Any], Mapping[str, Case]] = {
    made: {name: functools.partial(_drawn, case) for name, case in cases.items()}
    for made, cases in sorted(_TABLE.items(), key=lambda entry: entry[0].name)
}
"""Calls that reach every branch of a kernel and every variant that is ever compiled, by kernel and name."""
