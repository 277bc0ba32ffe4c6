"""The cross-entropy of rows of logits, and its gradient for them.

In fp32 (fp64 of fp64 logits), of plain torch ops that wait for no device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class CrossEntropy(NamedTuple):
    """What the loss of a row of V logits l with target t is, with L = log(sum(exp(l))):

        (1 - s) (L - l_t) + s (L - mean(l)) + z L^2

    ignore_index: rows with this target have loss 0 and gradient 0. label_smoothing: s, by which the target is mixed with the
    uniform distribution (Szegedy et al., Rethinking the Inception Architecture for Computer Vision, 2015, section 7, as
    ``torch.nn.functional.cross_entropy`` has it). z_loss: z, which keeps L near 0 (Chowdhery et al., PaLM, 2022, section 5: z =
    1e-4). softcap: c, where l = c tanh(logits / c) is taken first (Gemma Team, Gemma 2, 2024, section 2); None: the logits
    themselves.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None


def counted(targets: torch.Tensor, how: CrossEntropy) -> torch.Tensor:
    """How many targets are not ignored, an int64 scalar: what the mean divides by, as torch's does."""
    return (targets != how.ignore_index).sum()


class RowLosses(NamedTuple):
    """losses: (M,), in the dtype of the logits. gradient: of the sum of the losses, (M, V); None if nobody asked for it."""

    losses: torch.Tensor
    gradient: torch.Tensor | None


def row_losses(
    logits: torch.Tensor,
    targets: torch.Tensor,
    how: CrossEntropy,
    *,
    gradient: torch.dtype | None = None,
    scales: torch.Tensor | None = None,
) -> RowLosses:
    """The loss of each row of ``logits`` (M, V), fp32 or fp64, with ``targets`` (M,), int64. ``logits`` may be overwritten.

    gradient: the dtype to which the gradient is rounded; None: none is computed. scales: (M,), what each loss is multiplied by in
    the sum whose gradient it is. A target that is neither ignored nor in 0 ... V - 1 makes the loss and the gradient of its row
    NaN, on every device: to raise an error, as torch does on a CPU, the host would have to wait for the device.

    A GPU takes as long as memory does, so each op over (M, V) counts: with no option they are three.
    """
    words = logits.shape[-1]
    ignored = targets == how.ignore_index
    outside = ~ignored & ((targets < 0) | (targets >= words))
    index = targets.where(~(ignored | outside), 0).unsqueeze(1)
    slope = None
    if how.softcap is not None:
        logits.div_(how.softcap).tanh_()
        slope = 1 - logits.square() if gradient is not None else None
        logits.mul_(how.softcap)
    log_shares = torch.log_softmax(logits, -1)
    losses = -log_shares.gather(1, index).squeeze(1)
    if how.label_smoothing:
        losses = losses.mul_(1 - how.label_smoothing).sub_(log_shares.mean(-1), alpha=how.label_smoothing)
    log_sum = None
    if how.z_loss:
        log_sum = logits.amax(-1) - log_shares.amax(-1)  # L, of the largest logit, since that of a target may be -inf
        losses = losses.add_(log_sum.square(), alpha=how.z_loss)
    losses = losses.masked_fill(outside, float("nan")).masked_fill_(ignored, 0.0)
    if gradient is None:
        return RowLosses(losses, None)
    made = log_shares.exp_()
    if log_sum is not None:
        made.mul_((1 + 2 * how.z_loss * log_sum).unsqueeze(1))
    if how.label_smoothing:
        made.sub_(how.label_smoothing / words)
    made.scatter_(1, index, made.gather(1, index).sub_(1 - how.label_smoothing))
    if slope is not None:
        made.mul_(slope)
    factors = torch.ones_like(losses) if scales is None else scales
    factors = factors.masked_fill(outside, float("nan")).masked_fill_(ignored, 0.0).unsqueeze(1)
    return RowLosses(losses, torch.mul(made, factors, out=torch.empty_like(made, dtype=gradient)))
