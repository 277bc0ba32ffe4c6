"""Normalisations against a copy of the same matrix in the same process: ``python -m benchmarks.norms [--peers]``."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from benchmarks.bandwidth import BF16, BLOCKS, FP8, MX, Make, Peer, Shape, Table, command, random
from benchmarks.encodings import Encode, blocks, current, delayed, mx, row_scaled
from benchmarks.timing import Call
from opfuse.formats import E4M3, ROWWISE, USAGES, Usage
from opfuse.kernels.norms.cast import norm_cast
from opfuse.kernels.norms.norm import norm_backward, norm_forward
from opfuse.numerics.norm import Norm, NormKind


def norm(kind: NormKind, shape: Shape) -> Norm:
    if kind == "l2_normalization":
        return Norm(kind)
    return Norm(kind, random(shape[1]), random(shape[1]) if kind == "layer_norm" else None)


def forward(kind: NormKind) -> Make:
    def make(shape: Shape) -> Call:
        x, value = random(*shape), norm(kind, shape)
        return lambda: norm_forward(x, value)

    return make


def backward(kind: NormKind, *, adds: bool = False) -> Make:
    def make(shape: Shape) -> Call:
        x, dy, value = random(*shape), random(*shape), norm(kind, shape)
        _, statistics = norm_forward(x, value)
        options = {"extra": random(*shape)} if adds else {}
        return lambda: norm_backward(dy, x, value, statistics, **options)

    return make


def cast(encoding: Encode, *usages: Usage, kind: NormKind = "rms_norm") -> Make:
    def make(shape: Shape) -> Call:
        x, value, encode = random(*shape), norm(kind, shape), encoding(shape, usages)
        return lambda: norm_cast(x, value, encode)

    return make


# Under a current scale the norm's result decides its scale: what it is made from is read twice, as in a cast alone.
NORMS: Table = {
    "RMSNorm": (2 * BF16, forward("rms_norm")),
    "LayerNorm": (2 * BF16, forward("layer_norm")),
    "L2 norm": (2 * BF16, forward("l2_normalization")),
    "RMSNorm, delayed, row": (BF16 + FP8, cast(delayed, ROWWISE)),
    "LayerNorm, delayed, row": (BF16 + FP8, cast(delayed, ROWWISE, kind="layer_norm")),
    "RMSNorm, row-scaled, row": (BF16 + FP8, cast(row_scaled, ROWWISE)),
    "RMSNorm, 1x128, row": (BF16 + BLOCKS, cast(blocks, ROWWISE)),
    "RMSNorm, MXFP8, row": (BF16 + MX, cast(mx, ROWWISE)),
    "RMSNorm, current, row": (2 * BF16 + FP8, cast(current, ROWWISE)),
    "RMSNorm, delayed, row + col": (BF16 + 2 * FP8, cast(delayed, *USAGES)),
    "RMSNorm, 1x128, row + col": (BF16 + 2 * BLOCKS, cast(blocks, *USAGES)),
    "RMSNorm, MXFP8, row + col": (BF16 + 2 * MX, cast(mx, *USAGES)),
    "RMSNorm, current, row + col": (2 * BF16 + 2 * FP8, cast(current, *USAGES)),
    "d RMSNorm": (3 * BF16, backward("rms_norm")),
    "d RMSNorm + d extra": (4 * BF16, backward("rms_norm", adds=True)),
    "d LayerNorm": (3 * BF16, backward("layer_norm")),
    "d L2 norm": (3 * BF16, backward("l2_normalization")),
}


def eager_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-5)


def eager_cast(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes, and the amax."""
    y = eager_norm(x, weight)
    return (y.float() * scale).clamp(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn), y.abs().amax()


PEERS: Mapping[str, Peer] = {
    "RMSNorm": Peer(eager_norm, lambda s: (random(*s), random(s[1]))),
    "RMSNorm, delayed, row": Peer(eager_cast, lambda s: (random(*s), random(s[1]), torch.full((1,), 3.7, device="cuda"))),
}

if __name__ == "__main__":
    command(__doc__, NORMS, PEERS)
