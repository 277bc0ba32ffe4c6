"""Small calls of norms, on which kernels are compared with their definitions on a device that this project has not recorded."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from opfuse.formats import E4M3, NumberFormat, fp8_block, fp8_row, fp8_tensor, mxfp8
from opfuse.kernels.casts.trials import ODD, Draw, moved
from opfuse.kernels.chains.trials import encoding_of
from opfuse.kernels.engine.registry import Arguments, Case
from opfuse.numerics.norm import Norm, NormKind, norm_forward

_WIDE = (96, 1056)
_CALLS: tuple[tuple[NormKind, Draw], ...] = (
    ("rms_norm", Draw()),
    ("rms_norm", Draw(nonfinite=True)),
    ("layer_norm", Draw(torch.float32)),
    ("layer_norm", Draw(torch.float16, nonfinite=True, shape=_WIDE)),
    ("rms_norm", Draw(shape=_WIDE)),
    ("l2_normalization", Draw()),
    ("layer_norm", Draw(shape=ODD)),
)
_CASTS: tuple[NumberFormat, ...] = (fp8_tensor(E4M3), fp8_row(E4M3), fp8_block(E4M3, 1), mxfp8(E4M3))


def _norm(kind: NormKind, draw: Draw) -> Norm:
    if kind == "l2_normalization":
        return Norm(kind, eps=1e-6)
    random = torch.Generator().manual_seed(13)
    weight, bias = (torch.randn(draw.shape[1], generator=random).to(draw.dtype) for _ in range(2))
    return Norm(kind, weight, bias if kind == "layer_norm" else None)


def _on(norm: Norm, device: torch.device) -> Norm:
    weight, bias = (None if each is None else each.to(device) for each in (norm.weight, norm.bias))
    return Norm(norm.kind, weight, bias, norm.eps)


def _forward(kind: NormKind, draw: Draw, device: torch.device) -> Arguments:
    return Arguments((draw.matrix().to(device), _on(_norm(kind, draw), device)))


def _backward(kind: NormKind, draw: Draw, device: torch.device) -> Arguments:
    x, norm = draw.matrix(), _norm(kind, draw)
    _, statistics = norm_forward(x, norm)
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(17)).to(x.dtype)
    return Arguments((*moved((dy, x), device), _on(norm, device), statistics.each(lambda each: each.to(device))))


def _cast(fmt: NumberFormat, kind: NormKind, draw: Draw, device: torch.device) -> Arguments:
    args, options = _forward(kind, draw, device)
    return Arguments((*args, encoding_of(fmt, draw.shape, device)), options)


def forward() -> Mapping[str, Case]:
    """Every kind, in every dtype."""
    return {f"{kind} {draw}": functools.partial(_forward, kind, draw) for kind, draw in _CALLS}


def backward() -> Mapping[str, Case]:
    """Gradients of the same calls."""
    return {f"{kind} {draw}": functools.partial(_backward, kind, draw) for kind, draw in _CALLS}


def cast() -> Mapping[str, Case]:
    """Every kind of cast in the kernel of the norm."""
    return {f"{kind} {draw} {fmt}": functools.partial(_cast, fmt, kind, draw) for (kind, draw), fmt in zip(_CALLS[:4], _CASTS)}
