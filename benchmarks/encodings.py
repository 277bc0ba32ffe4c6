"""The casts that the benchmarks of chains and norms end in: for a shape and its planes, an encoding with scales of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch

from benchmarks.bandwidth import Shape
from opfuse.formats import E4M3, Usage, fp8_block, fp8_row, fp8_tensor, mxfp8
from opfuse.kernels.casts.encoding import Blocks, Encoding, Microscaled, RecordingScale, RowScaled
from opfuse.numerics.layouts import Layout
from opfuse.tensors.quantizers import Float8CurrentScalingQuantizer

Encode = Callable[[Shape, Sequence[Usage]], Encoding]


def delayed(shape: Shape, usages: Sequence[Usage]) -> Encoding:
    layouts = [Layout(fp8_tensor(E4M3), usage, shape) for usage in usages]
    return RecordingScale(torch.full((1,), 3.7, device="cuda"), torch.zeros(1, device="cuda"), layouts)


def current(shape: Shape, usages: Sequence[Usage]) -> Encoding:
    quantizer = Float8CurrentScalingQuantizer(torch.float8_e4m3fn, columnwise=len(usages) > 1)
    return cast(Encoding, quantizer.encoding(shape, torch.bfloat16))


def row_scaled(shape: Shape, usages: Sequence[Usage]) -> Encoding:
    return RowScaled([Layout(fp8_row(E4M3), usage, shape) for usage in usages])


def blocks(shape: Shape, usages: Sequence[Usage]) -> Encoding:
    return Blocks([Layout(fp8_block(E4M3, 1), usage, shape) for usage in usages])


def mx(shape: Shape, usages: Sequence[Usage]) -> Encoding:
    return Microscaled([Layout(mxfp8(E4M3), usage, shape) for usage in usages])


def mx_swizzled(shape: Shape, usages: Sequence[Usage]) -> Encoding:
    return Microscaled([Layout(mxfp8(E4M3), usage, shape, swizzled=True) for usage in usages])
