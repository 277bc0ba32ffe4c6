"""Casts and dequantize against a copy of the same matrix in the same process: ``python -m benchmarks.casts [--peers]``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from benchmarks.bandwidth import BF16, BLOCKS, FP8, MX, MX4, NV, Make, Peer, Shape, Table, command, random
from benchmarks.timing import Call
from opfuse.formats import COLUMNWISE, E4M3, MXFP4, NVFP4, ROWWISE, NumberFormat, Usage, fp8_block, fp8_row, fp8_tensor, mxfp8
from opfuse.kernels.casts import tensor as cast
from opfuse.kernels.casts.block import cast_block
from opfuse.kernels.casts.dequantize import dequantize
from opfuse.kernels.casts.nvfp4 import amaxes_nv, cast_nv
from opfuse.kernels.casts.row import cast_row
from opfuse.kernels.casts.tensor import transposed
from opfuse.numerics import casts as definition
from opfuse.numerics.hadamard import SIGNS
from opfuse.numerics.layouts import Layout

ROW: tuple[Usage, ...] = (ROWWISE,)
COL: tuple[Usage, ...] = (COLUMNWISE,)
BOTH: tuple[Usage, ...] = (ROWWISE, COLUMNWISE)


def layouts_of(fmt: NumberFormat, shape: Shape, usages: Sequence[Usage], *, swizzled: bool = False) -> list[Layout]:
    return [Layout(fmt, usage, shape, swizzled) for usage in usages]


def measured_amax(shape: Shape) -> Call:
    x = random(*shape)
    return lambda: cast.tensor_amax(x)


def delayed(usages: Sequence[Usage]) -> Make:
    def make(shape: Shape) -> Call:
        x, scale, amax = random(*shape), torch.full((1,), 3.7, device="cuda"), torch.zeros(1, device="cuda")
        layouts = layouts_of(fp8_tensor(E4M3), shape, usages)
        return lambda: cast.cast_recording(x, scale, amax, layouts)

    return make


def current(usages: Sequence[Usage]) -> Make:
    def make(shape: Shape) -> Call:
        x, layouts = random(*shape), layouts_of(fp8_tensor(E4M3), shape, usages)
        return lambda: cast.cast_current(x, cast.tensor_amax(x), layouts)

    return make


def mx(usages: Sequence[Usage], *, swizzled: bool = False) -> Make:
    def make(shape: Shape) -> Call:
        x, layouts = random(*shape), layouts_of(mxfp8(E4M3), shape, usages, swizzled=swizzled)
        return lambda: cast.cast_mx(x, layouts)

    return make


def block(dims: int, usages: Sequence[Usage]) -> Make:
    def make(shape: Shape) -> Call:
        x, layouts = random(*shape), layouts_of(fp8_block(E4M3, dims), shape, usages)
        return lambda: cast_block(x, layouts)

    return make


def row_scaled(usages: Sequence[Usage]) -> Make:
    def make(shape: Shape) -> Call:
        x, layouts = random(*shape), layouts_of(fp8_row(E4M3), shape, usages)
        return lambda: cast_row(x, layouts)

    return make


def nv(usages: Sequence[Usage], *, rotated: bool = False, rows: int = 1, seed: int | None = None, measured: bool = False) -> Make:
    """The cast alone, under amaxes that are known; ``measured``: with the pass that finds them."""

    def make(shape: Shape) -> Call:
        x = random(*shape)
        formats = {ROWWISE: NVFP4, COLUMNWISE: NVFP4.replace(rht=SIGNS if rotated else ())}
        layouts = [Layout(formats[usage], usage, shape) for usage in usages]
        amaxes = amaxes_nv(x, layouts)
        random_bits = None if seed is None else torch.tensor([seed], device="cuda")
        return lambda: cast_nv(x, amaxes_nv(x, layouts) if measured else amaxes, layouts, rows=rows, seed=random_bits)

    return make


def plane(layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes with modest scales."""
    data = torch.randint(0, 256, layout.data_shape, dtype=torch.uint8, device="cuda")
    if layout.tiled:
        return data, torch.randint(64, 120, layout.scale_shape, dtype=torch.uint8, device="cuda")
    return data, torch.rand(layout.scale_shape, device="cuda")


def decoded(fmt: NumberFormat, usage: Usage = ROWWISE, *, swizzled: bool = False) -> Make:
    """Dequantize to bf16."""

    def make(shape: Shape) -> Call:
        layout = Layout(fmt, usage, shape, swizzled)
        data, scale = plane(layout)
        amax = None if layout.amax_shape is None else definition.tensor_amax(random(*shape))
        return lambda: dequantize(data, scale, amax, layout=layout, dtype=torch.bfloat16)

    return make


def codes(shape: Shape) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")


def turned(shape: Shape) -> Call:
    x = codes(shape)
    return lambda: transposed(x)


# "Known amax": the pass over the matrix that finds the amaxes is left out; "measured": it is in. "stochastic" is random rounding.
CASTS: Table = {
    "amax": (BF16, measured_amax),
    "delayed, row": (BF16 + FP8, delayed(ROW)),
    "delayed, row + col": (BF16 + 2 * FP8, delayed(BOTH)),
    "delayed, col": (BF16 + FP8, delayed(COL)),
    "current, row": (2 * BF16 + FP8, current(ROW)),
    "current, row + col": (2 * BF16 + 2 * FP8, current(BOTH)),
    "MXFP8, row": (BF16 + MX, mx(ROW)),
    "MXFP8, row swizzled": (BF16 + MX, mx(ROW, swizzled=True)),
    "MXFP8, col": (BF16 + MX, mx(COL)),
    "MXFP8, row + col": (BF16 + 2 * MX, mx(BOTH)),
    "MXFP8, both swizzled": (BF16 + 2 * MX, mx(BOTH, swizzled=True)),
    "1x128, row": (BF16 + BLOCKS, block(1, ROW)),
    "1x128, col": (BF16 + BLOCKS, block(1, COL)),
    "1x128, row + col": (BF16 + 2 * BLOCKS, block(1, BOTH)),
    "128x128, row": (BF16 + FP8, block(2, ROW)),
    "128x128, col": (BF16 + FP8, block(2, COL)),
    "128x128, row + col": (BF16 + 2 * FP8, block(2, BOTH)),
    "row-scaled, row": (BF16 + FP8, row_scaled(ROW)),
    "row-scaled, col": (2 * BF16 + FP8, row_scaled(COL)),
    "row-scaled, row + col": (2 * BF16 + 2 * FP8, row_scaled(BOTH)),
    "decode, row": (BF16 + FP8, decoded(fp8_tensor(E4M3))),
    "decode, col": (BF16 + FP8, decoded(fp8_tensor(E4M3), COLUMNWISE)),
    "decode 1x128, row": (BF16 + BLOCKS, decoded(fp8_block(E4M3, 1))),
    "decode 1x128, col": (BF16 + BLOCKS, decoded(fp8_block(E4M3, 1), COLUMNWISE)),
    "decode 128x128, row": (BF16 + FP8, decoded(fp8_block(E4M3, 2))),
    "decode 128x128, col": (BF16 + FP8, decoded(fp8_block(E4M3, 2), COLUMNWISE)),
    "decode row-scaled, row": (BF16 + FP8, decoded(fp8_row(E4M3))),
    "decode row-scaled, col": (BF16 + FP8, decoded(fp8_row(E4M3), COLUMNWISE)),
    "decode MXFP8, row": (BF16 + MX, decoded(mxfp8(E4M3))),
    "decode MXFP8, col": (BF16 + MX, decoded(mxfp8(E4M3), COLUMNWISE)),
    "decode MX swz, row": (BF16 + MX, decoded(mxfp8(E4M3), swizzled=True)),
    "decode MX swz, col": (BF16 + MX, decoded(mxfp8(E4M3), COLUMNWISE, swizzled=True)),
    "transpose of codes": (2 * FP8, turned),
    "NVFP4, row, known amax": (BF16 + NV, nv(ROW)),
    "NVFP4, row, measured": (2 * BF16 + NV, nv(ROW, measured=True)),
    "NVFP4, row stochastic, known amax": (BF16 + NV, nv(ROW, seed=1)),
    "NVFP4, col, known amax": (BF16 + NV, nv(COL)),
    "NVFP4, row + col, known amax": (BF16 + 2 * NV, nv(BOTH)),
    "NVFP4, row + rotated, known amax": (BF16 + 2 * NV, nv(BOTH, rotated=True)),
    "NVFP4, row + rotated, measured": (2 * BF16 + 2 * NV, nv(BOTH, rotated=True, measured=True)),
    "NVFP4, row + rotated stochastic, known amax": (BF16 + 2 * NV, nv(BOTH, rotated=True, seed=1)),
    "NVFP4 16x16, both, known amax": (BF16 + 2 * NV, nv(BOTH, rows=16)),
    "decode NVFP4, row": (BF16 + NV, decoded(NVFP4)),
    "decode NVFP4, col": (BF16 + NV, decoded(NVFP4, COLUMNWISE)),
    "decode MXFP4, row": (BF16 + MX4, decoded(MXFP4)),
    "decode MXFP4, col": (BF16 + MX4, decoded(MXFP4, COLUMNWISE)),
    "decode NVFP4, rotated": (BF16 + NV, decoded(NVFP4.replace(rht=SIGNS), COLUMNWISE)),
}

# -- peers ---------------------------------------------------------------------------------------------------------------------

Tensors = tuple[torch.Tensor, ...]


def codes_of(y: torch.Tensor) -> torch.Tensor:
    """fp32 values in E4M3; what is too large becomes the largest."""
    return y.clamp(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn)


def torch_current(x: torch.Tensor) -> Tensors:
    scale = E4M3.max / x.abs().amax().float()
    return codes_of(x.float() * scale), scale.reciprocal()


def torch_delayed(x: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor) -> Tensors:
    return codes_of(x.float() * scale), torch.maximum(amax, x.abs().amax().float())


def torch_rows(x: torch.Tensor) -> Tensors:
    scale = E4M3.max / x.abs().amax(-1, keepdim=True).float()
    return codes_of(x.float() * scale), scale.reciprocal().squeeze(-1)


def torch_blocks(x: torch.Tensor) -> Tensors:
    """Scales are powers of two, as by default in the recipe."""
    blocks = x.float().unflatten(1, (-1, 128))
    scale = torch.exp2(torch.floor(torch.log2(E4M3.max / blocks.abs().amax(-1, keepdim=True))))
    return codes_of(blocks * scale).flatten(1), scale.reciprocal().squeeze(-1)


def torch_mx(x: torch.Tensor) -> Tensors:
    blocks = x.float().unflatten(1, (-1, 32))
    exponent = torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True) / E4M3.max)).clamp(-127, 127)
    return codes_of(blocks * torch.exp2(-exponent)).flatten(1), (exponent + 127).to(torch.uint8).squeeze(-1)


def torch_decode(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (codes.view(torch.float8_e4m3fn).float() * scale).to(torch.bfloat16)


def torch_decode_mx(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    factor = torch.exp2(scale.float() - 127).unsqueeze(-1)
    return (codes.view(torch.float8_e4m3fn).float().unflatten(1, (-1, 32)) * factor).flatten(1).to(torch.bfloat16)


def _matrix(shape: Shape) -> Tensors:
    return (random(*shape),)


def _recording(shape: Shape) -> Tensors:
    return random(*shape), torch.full((1,), 3.7, device="cuda"), torch.zeros(1, device="cuda")


PEERS: Mapping[str, Peer] = {
    "current, row": Peer(torch_current, _matrix),
    "delayed, row": Peer(torch_delayed, _recording),
    "row-scaled, row": Peer(torch_rows, _matrix),
    "1x128, row": Peer(torch_blocks, _matrix),
    "MXFP8, row": Peer(torch_mx, _matrix),
    "decode, row": Peer(torch_decode, lambda shape: plane(Layout(fp8_tensor(E4M3), ROWWISE, shape))),
    "transpose of codes": Peer(lambda x: (x.t().contiguous(),), lambda shape: (codes(shape),)),
    "decode MXFP8, row": Peer(torch_decode_mx, lambda shape: plane(Layout(mxfp8(E4M3), ROWWISE, shape))),
}

if __name__ == "__main__":
    command(__doc__, CASTS, PEERS)
