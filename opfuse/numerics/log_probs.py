"""Log-probabilities of tokens, whose bits do not depend on the batch, for sampling and for training alike."""

from __future__ import annotations

import torch

from opfuse.errors import DtypeError, ShapeError, describe

ALIGNED = 8
"""Columns of a row: on a GPU torch sums rows of another multiple in an order that depends on where each row begins."""


def log_probs(logits: torch.Tensor, tokens: torch.Tensor, *, temperature: float = 1.0) -> torch.Tensor:
    """The log-probability of each of ``tokens`` (...), int64, under ``logits`` (..., words) over ``temperature``: fp32 (...).

    torch's log-softmax in fp32 (fp64 of fp64 logits), of rows that all begin on one alignment, so that a row has the same bits
    in any batch. Differentiable for the logits. ShapeError if the leading sizes differ, DtypeError for logits without fractions
    and for tokens that are no int64.
    """
    if logits.shape[:-1] != tokens.shape or not logits.dim():
        got, cure = f"{tuple(logits.shape)} and {tuple(tokens.shape)}", "pass logits[:, :-1] and tokens[:, 1:]"
        raise ShapeError(describe("log_probs", wanted="logits (..., words) and tokens (...)", got=got, cure=cure))
    if not logits.is_floating_point() or tokens.dtype != torch.int64:
        got, cure = f"{logits.dtype} and {tokens.dtype}", "pass the model's logits, and tokens.long()"
        raise DtypeError(describe("log_probs", wanted="logits of a floating type and int64 tokens", got=got, cure=cure))
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1:
        x = x / temperature
    if x.is_cuda and x.shape[-1] % ALIGNED:
        x = torch.nn.functional.pad(x, (0, -x.shape[-1] % ALIGNED), value=float("-inf"))
    return x.contiguous().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
