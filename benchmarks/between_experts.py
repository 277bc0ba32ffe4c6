"""Between layers of experts: a scaled SwiGLU, or its derivative, and the cast of the result, in two launches and in one."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch

from benchmarks.timing import Call
from opfuse.kernels.chains.cast import backward_chain_encoded, forward_chain_encoded
from opfuse.kernels.chains.chain import backward_chain, forward_chain
from opfuse.numerics.activations import POINTWISE
from opfuse.numerics.chain import Stage
from opfuse.tensors.quantizers import Quantizer
from opfuse.tensors.ragged import EncodingInGroups, cast_in_groups, encoding_in_groups

BF16 = torch.bfloat16


class Between(NamedTuple):
    """Rows of all experts: the input (M, 2 N) and the gradient (M, N) of a scaled SwiGLU, and how many rows each expert has."""

    x: torch.Tensor
    dy: torch.Tensor
    stages: list[Stage]
    splits: torch.Tensor

    @classmethod
    def drawn(cls, rows: int, inner: int, splits: torch.Tensor) -> Between:
        """Random values where ``splits`` are."""
        x, dy = (torch.randn(rows, columns, device=splits.device, dtype=BF16) for columns in (2 * inner, inner))
        scale = torch.rand(rows, device=splits.device).to(BF16)
        return cls(x, dy, [Stage(POINTWISE["scaled_swiglu"], {"scale": scale})], splits)

    def encoding(self, quantizer: Quantizer, shape: torch.Size) -> EncodingInGroups:
        """The cast of a tensor of ``shape``, for the kernel that makes it."""
        return cast(EncodingInGroups, encoding_in_groups(quantizer, shape, BF16, self.splits, self.x.device))


def activations(rows: Between, quantizer: Quantizer) -> tuple[Call, Call]:
    """Both planes of the result: of one that is stored, and in the launch that computes it."""
    x, dy, stages, splits = rows

    def together() -> object:
        made = rows.encoding(quantizer, dy.shape)
        return made.storage(forward_chain_encoded(x, stages, made.encoding)[0])

    return lambda: cast_in_groups(quantizer, forward_chain(x, stages)[0], splits), together


def derivatives(rows: Between, quantizer: Quantizer) -> tuple[Call, Call]:
    """Both planes of the input's gradient, beside that of scales: of one that is stored, and in the launch that computes it."""
    x, dy, stages, splits = rows

    def together() -> object:
        made = rows.encoding(quantizer, x.shape)
        return made.storage(backward_chain_encoded(dy, stages, {0: x}, made.encoding)[0])

    return lambda: cast_in_groups(quantizer, backward_chain(dy, stages, {0: x})[0], splits), together


BETWEEN = {"activation and cast": activations, "derivative and cast": derivatives}
"""What is measured."""
