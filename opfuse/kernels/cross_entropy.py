"""The cross-entropy of rows of logits, and its gradient: a kernel with the bits of numerics/cross_entropy.py."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from opfuse.kernels.engine.launch import Grid
from opfuse.kernels.engine.parameters import parameter_of
from opfuse.kernels.engine.registry import BITWISE, Arguments, Case, Launcher, kernel
from opfuse.kernels.engine.variants import C_TYPES, PACK, VECTOR, addresses, on_bytes, variant_of
from opfuse.numerics import cross_entropy as definition
from opfuse.numerics.cross_entropy import THREADS, TILE, CrossEntropy, RowLosses

_PARAMETERS = parameter_of("cross_entropy.cu")

_TRIALS: Mapping[str, tuple[CrossEntropy, torch.dtype | None, int]] = {
    "plain": (CrossEntropy(), torch.bfloat16, 1000),
    "losses alone": (CrossEntropy(), None, TILE + 8),
    "all options": (CrossEntropy(label_smoothing=0.1, z_loss=1e-3, softcap=3.0), torch.float16, TILE + 1000),
    "fp32, unaligned": (CrossEntropy(z_loss=1e-3), torch.float32, 2 * TILE + 33),
}


def _trial(how: CrossEntropy, gradient: torch.dtype | None, words: int, device: torch.device) -> Arguments:
    random = torch.Generator().manual_seed(words)
    logits = 4 * torch.randn(5, words, generator=random)
    targets = torch.tensor([0, words - 1, how.ignore_index, words // 2, 7])
    logits[1, 3] = -float("inf")
    if gradient == torch.bfloat16:
        logits[3, 0] = torch.nan
    return Arguments((logits.to(device), targets.to(device), how), {"gradient": gradient})


def _trials() -> Mapping[str, Case]:
    return {name: functools.partial(_trial, *drawn) for name, drawn in _TRIALS.items()}


@kernel("cross_entropy.cu", reference=definition.row_losses, tolerance=BITWISE, trials=_trials)
def row_losses(
    launch: Launcher,
    logits: torch.Tensor,
    targets: torch.Tensor,
    how: CrossEntropy,
    *,
    gradient: torch.dtype | None = None,
    scales: torch.Tensor | None = None,
) -> RowLosses:
    """Reads the logits twice, the second time from L2 as far as they are there, and writes the gradient once.

    What the kernel does not take (fp64, no rows, logits with gaps between rows) takes the torch definition.
    """
    if not _takes(logits, targets, gradient, scales):
        return definition.row_losses(logits, targets, how, gradient=gradient, scales=scales)
    rows, words = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    variant = variant_of(
        "cross_entropy.cu",
        _PARAMETERS.layout,
        OUT=C_TYPES[gradient or torch.float32],
        GRADIENT=gradient is not None,
        SMOOTHED=how.label_smoothing > 0,
        PENALIZED=how.z_loss > 0,
        CAPPED=how.softcap is not None,
        RESIDENT=2,
        ALIGNED=words % PACK == 0 and on_bytes(logits, VECTOR),
    )
    scales = None if scales is None else scales.contiguous()
    cap = how.softcap or 1.0
    fields = _PARAMETERS(
        **addresses({"logits": logits, "targets": targets.contiguous(), "scales": scales, "losses": losses}),
        columns=words,
        ignore_index=how.ignore_index,
        per_column=1 / words,
        kept=1 - how.label_smoothing,
        spread=how.label_smoothing,
        each=how.label_smoothing / words,
        z=how.z_loss,
        twice_z=2 * how.z_loss,
        cap=cap,
        per_cap=1 / cap,
    )
    launch(variant, "row_losses", Grid(rows, THREADS), _PARAMETERS.layout, *fields, device=logits.get_device())
    return RowLosses(losses, None if gradient is None else definition.room_in(logits, gradient))


def _takes(logits: torch.Tensor, targets: torch.Tensor, gradient: torch.dtype | None, scales: torch.Tensor | None) -> bool:
    if logits.dtype != torch.float32 or not logits.numel() or not logits.is_contiguous() or targets.dtype != torch.int64:
        return False
    return (gradient is None or gradient in C_TYPES) and (scales is None or scales.dtype == torch.float32)
