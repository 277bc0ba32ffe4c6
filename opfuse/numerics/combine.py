"""Rows of tokens put together: what stands behind the experts of a mixture, in both passes.

``places`` (tokens, top_k), int64, says where the rows of each token lie. A place below 0, ``~p``, is that of row p, which adds
nothing: a router writes so for an expert that is elsewhere.
"""

from __future__ import annotations

import torch

from opfuse.numerics.norm import row_sums
from opfuse.numerics.pointwise import compute_dtype


def combine_rows(
    rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None = None, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """y (tokens, columns) in ``dtype`` (None: that of ``rows``): y[t] = sum over k of weights[t, k] rows[places[t, k]].

    rows: (n, columns). weights: (tokens, top_k) of any float dtype; None: 1. Products and sums are in fp32 (fp64 of fp64), in the
    order of k from 0 on, and rounded once.
    """
    wide = compute_dtype(rows.dtype)
    total = torch.zeros(places.shape[0], rows.shape[1], dtype=wide, device=rows.device)
    for k in range(places.shape[1]):
        row, counts = _read(places[:, k])
        part = rows.index_select(0, row).to(wide)
        if weights is not None:
            part = part * weights[:, k, None].to(wide)
        total = total + part.where(counts, 0)
    return total.to(dtype or rows.dtype)


def combine_rows_backward(
    dy: torch.Tensor,
    places: torch.Tensor,
    weights: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of :func:`combine_rows`, if each row stands in ``places`` once: of ``rows``, in ``dtype`` (None: that
    of ``dy``), and of ``weights``, in their dtype; None without ``rows``, which only the second reads.

    d_rows[places[t, k]] = weights[t, k] dy[t], rounded once. d_weights[t, k] = <rows[places[t, k]], dy[t]>, in the order of
    :func:`~opfuse.numerics.norm.row_sums`. A row that adds nothing has gradients of 0.
    """
    wide = compute_dtype(dy.dtype)
    d_rows = torch.empty(places.numel(), dy.shape[1], dtype=dtype or dy.dtype, device=dy.device)
    d_weights = None if rows is None or weights is None else torch.empty(places.shape, dtype=weights.dtype, device=dy.device)
    grad = dy.to(wide)
    for k in range(places.shape[1]):
        row, counts = _read(places[:, k])
        part = grad if weights is None else grad * weights[:, k, None].to(wide)
        d_rows.index_copy_(0, row, part.where(counts, 0).to(d_rows.dtype))
        if d_weights is not None and rows is not None:
            dots = row_sums(rows.index_select(0, row).to(wide) * grad)
            d_weights[:, k] = dots.where(counts, 0).squeeze(1).to(d_weights.dtype)
    return d_rows, d_weights


def _read(places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows at places (tokens,), and whether each adds anything, (tokens, 1)."""
    return places.where(places >= 0, ~places), (places >= 0).unsqueeze(1)
