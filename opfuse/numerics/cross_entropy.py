"""The cross-entropy of rows of logits, and its gradient for them, in their memory.

In fp32 (fp64 of fp64 logits), of plain torch ops that wait for no device. Every operation on fp32 is correctly rounded and every
sum has one order, so that kernels give the same bits. What a row has depends on itself alone.

A row is read from its start in tiles. In a tile each of 512 threads has two eights of neighbouring columns, 4096 apart. With m
the largest logit that it has met, a thread keeps m and the sum of exp(l - m), and multiplies that sum by exp(m - m') where a tile
raises m to m'. What a tile adds is summed by halves: the second eight to the first, then in it. At the end sums are multiplied by
exp(m - M), M the largest logit of the row, and added by halves: what groups of 32 threads have, then threads of a group. (The
online softmax of Milakov and Gimelshein, 2018, https://arxiv.org/abs/1805.02867.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from opfuse.numerics.exponential import exponential, hyperbolic_tangent
from opfuse.numerics.layouts import ceil_div
from opfuse.numerics.norm import EIGHT, LANES, by_halves, power_of_two_above

THREADS, EIGHTS = 512, 2
TILE = THREADS * EIGHTS * EIGHT
"""Threads that share a row, how many eights of a tile each has, and the columns of a tile."""

AT_ONCE = 1 << 21
"""Numbers that an op has: a CPU takes several times as long where its results are so large that each is new memory."""

INFINITY = float("inf")


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


def counted(targets: Tensor, how: CrossEntropy) -> Tensor:
    """How many targets are not ignored, an int64 scalar: what the mean divides by, as torch's does."""
    return (targets != how.ignore_index).sum()


class RowLosses(NamedTuple):
    """losses: (M,), in the dtype of the logits. gradient: of the sum of the losses, (M, V), in the place that :func:`room_in`
    gives it; None if nobody asked for it.
    """

    losses: Tensor
    gradient: Tensor | None


def row_losses(
    logits: Tensor,
    targets: Tensor,
    how: CrossEntropy,
    *,
    gradient: torch.dtype | None = None,
    scales: Tensor | None = None,
) -> RowLosses:
    """The loss of each row of ``logits`` (M, V), fp32 or fp64, with ``targets`` (M,), int64.

    gradient: the dtype to which the gradient is rounded, at most as wide as the logits, in whose memory it is then written; None:
    none is computed, and the logits stay. scales: (M,), what each loss is multiplied by in the sum whose gradient it is. A target
    that is neither ignored nor in 0 ... V - 1 makes the loss and the gradient of its row NaN, on every device: to raise an error,
    as torch does on a CPU, the host would have to wait for the device.
    """
    words = logits.shape[1]
    room = None if gradient is None else room_in(logits, gradient)
    size = max(AT_ONCE // min(words, TILE), 1)
    parts = [slice(start, start + size) for start in range(0, max(len(logits), 1), size)]
    losses = [
        _losses_of(logits[at], targets[at], how, None if room is None else room[at], None if scales is None else scales[at])
        for at in parts
    ]
    return RowLosses(losses[0] if len(losses) == 1 else torch.cat(losses), room)


def _losses_of(logits: Tensor, targets: Tensor, how: CrossEntropy, room: Tensor | None, scales: Tensor | None) -> Tensor:
    """The losses of some rows, whose gradients are written to ``room``."""
    words = logits.shape[1]
    ignored = (targets == how.ignore_index).unsqueeze(1)
    index = targets.unsqueeze(1)
    outside = ~ignored & ((index < 0) | (index >= words))
    index = index.where(~(ignored | outside), 0)
    top, log_sum, total = _sums(logits, how)
    losses = log_sum - (_capped(logits.gather(1, index), how)[0] - top)
    if how.label_smoothing:
        of_mean = log_sum - (total * (1 / words) - top)
        losses = losses * (1 - how.label_smoothing) + of_mean * how.label_smoothing
    whole = top + log_sum
    if how.z_loss:
        losses = losses + whole.square() * how.z_loss
    losses = losses.masked_fill(outside, float("nan")).masked_fill_(ignored, 0.0).squeeze(1)
    if room is None:
        return losses
    factors = torch.ones_like(top) if scales is None else scales.unsqueeze(1)
    factors = factors.masked_fill(outside, float("nan")).masked_fill_(ignored, 0.0)
    for start in reversed(range(0, words, TILE)):  # what is written lies behind what is yet to be read
        values, tangent = _capped(logits[:, start : start + TILE], how)
        made = exponential((values - top) - log_sum)
        if how.z_loss:
            made.mul_(whole * (2 * how.z_loss) + 1)
        if how.label_smoothing:
            made.sub_(how.label_smoothing / words)
        at = (index - start).clamp(0, made.shape[1] - 1)
        share = (index == at + start).to(made.dtype) * (1 - how.label_smoothing)
        made.scatter_(1, at, made.gather(1, at).sub_(share))
        if tangent is not None:
            made.mul_(1 - tangent * tangent)
        room[:, start : start + TILE].copy_(made.mul_(factors))
    return losses


def room_in(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Where the gradient of ``logits`` (M, V) goes, (M, V) of ``dtype``: at the end of the memory of each row.

    All of it for a dtype as wide as theirs, the second half for one of half the width. A kernel reads a row a second time from
    its end, of which a GPU's cache still has most; and of a gradient that is written in that order, each part lies behind what is
    yet to be read.
    """
    return logits.view(dtype)[:, -logits.shape[1] :]


def _sums(logits: Tensor, how: CrossEntropy) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logit M of each row, log(sum(exp(l - M))), and the sum of the logits if labels are smoothed, else 0; (M, 1)."""
    threads = min(power_of_two_above(ceil_div(logits.shape[1], EIGHT)), THREADS)
    top = logits.new_full((len(logits), threads), -INFINITY)
    sums, totals = torch.zeros_like(top), torch.zeros_like(top)
    for tile in logits.split(TILE, 1):
        values, _ = _capped(tile, how)
        mine = _eights(values, threads, missing=-INFINITY)
        higher = torch.maximum(top, mine.amax((1, 3)))
        base = higher.masked_fill(higher == -INFINITY, 0.0)  # of which nothing is subtracted where all are minus infinity
        sums = sums * exponential(top - base) + _in_thread(exponential(mine - base[:, None, :, None]))
        top = higher
        if how.label_smoothing:
            totals = totals + _in_thread(_eights(values, threads, missing=0.0))
    most = top.amax(1, keepdim=True)
    whole = _over_threads(sums * exponential(top - most))
    return most, whole.double().log().to(whole.dtype), _over_threads(totals)  # of fp32, libraries may be off in the last place


def _capped(logits: Tensor, how: CrossEntropy) -> tuple[Tensor, Tensor | None]:
    """The logits under a softcap, and the tanh in them, None without one."""
    if how.softcap is None:
        return logits, None
    tangent = hyperbolic_tangent(logits * (1 / how.softcap))
    return tangent * how.softcap, tangent


def _eights(tile: Tensor, threads: int, missing: float) -> Tensor:
    """The columns of a tile by thread, (M, eights of a thread, threads, 8), with ``missing`` in place of what is not there."""
    count = ceil_div(tile.shape[1], threads * EIGHT)
    return F.pad(tile, (0, count * threads * EIGHT - tile.shape[1]), value=missing).view(len(tile), count, threads, EIGHT)


def _in_thread(values: Tensor) -> Tensor:
    return by_halves(by_halves(values, 1), 2)


def _over_threads(values: Tensor) -> Tensor:
    """Sums over (M, threads), (M, 1)."""
    lanes = min(values.shape[1], LANES)
    return by_halves(by_halves(values.unflatten(1, (-1, lanes)), 1), 1).unsqueeze(1)
