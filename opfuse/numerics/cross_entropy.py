"""The cross-entropy of rows of logits, and its gradient for them, computed in the memory of the logits.

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


def row_losses(
    logits: torch.Tensor, targets: torch.Tensor, how: CrossEntropy, *, gradient: bool, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """The loss (M,) of each row of ``logits`` (M, V), fp32 or fp64, with ``targets`` (M,), int64. ``logits`` is overwritten.

    gradient: leave there the gradient of the sum of the losses, each times its scale of ``scales`` (M,). A target that is neither
    ignored nor in 0 ... V - 1 makes the loss and the gradient of its row NaN, on every device: to raise an error, as torch does
    on a CPU, the host would have to wait for the device.
    """
    words = logits.shape[-1]
    ignored = targets == how.ignore_index
    outside = ~ignored & ((targets < 0) | (targets >= words))
    index = targets.where(~(ignored | outside), 0).unsqueeze(1)
    slope = None
    if how.softcap is not None:
        logits.div_(how.softcap).tanh_()
        slope = 1 - logits.square() if gradient else None
        logits.mul_(how.softcap)
    # Relative to the largest logit of a row, as torch's log-softmax is, so that no exponential overflows.
    largest = logits.amax(-1, keepdim=True)
    chosen = logits.sub_(largest).gather(1, index).squeeze(1)
    mean = logits.mean(-1) if how.label_smoothing else None
    total = logits.exp_().sum(-1)
    log_total = total.log()
    losses = log_total - chosen
    if mean is not None:
        losses = losses.mul_(1 - how.label_smoothing).add_(log_total - mean, alpha=how.label_smoothing)
    log_sum = log_total + largest.squeeze(1)  # L itself
    if how.z_loss:
        losses = losses.add_(log_sum.square(), alpha=how.z_loss)
    if gradient:
        weights = 1 + 2 * how.z_loss * log_sum if how.z_loss else torch.ones_like(log_sum)
        logits.mul_((weights / total).masked_fill(outside, float("nan")).unsqueeze(1))
        if how.label_smoothing:
            logits.sub_(how.label_smoothing / words)
        logits.scatter_(1, index, logits.gather(1, index).sub_(1 - how.label_smoothing))
        if slope is not None:
            logits.mul_(slope)
        if scales is not None:
            logits.mul_(scales.unsqueeze(1))
        logits.masked_fill_(ignored.unsqueeze(1), 0.0)
    return losses.masked_fill(outside, float("nan")).masked_fill_(ignored, 0.0)
