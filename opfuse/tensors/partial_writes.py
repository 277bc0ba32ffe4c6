"""Rows that are written into a quantized tensor piece by piece: torch.distributed.checkpoint loads shards into a whole weight so.

A piece takes quantized rows of its layout, byte for byte. Where all rows share a scale or an amax, and the tensor has another,
pieces wait until all rows have come: until then the tensor has no values, and reading it raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.autograd.graph import increment_version

from opfuse.errors import QuantizedTensorError, describe
from opfuse.tensors.planes import map_tensors
from opfuse.tensors.quantized import Quantized
from opfuse.tensors.rows import paste_rows, shared_by_rows
from opfuse.tensors.shards import unsure
from opfuse.tensors.storage import QuantizedStorage

_CURE = "write all rows, with pieces of one tensor"


class RowSpan(NamedTuple):
    """Where a piece lies: entries [start, stop) of the first dimension of ``whole``."""

    whole: Quantized
    start: int
    stop: int


def paste(span: RowSpan, rows: QuantizedStorage) -> QuantizedStorage:
    """Write ``rows``, quantized in the layout of the piece; returns a copy on the device of the whole, which the piece holds.

    QuantizedTensorError if pieces of several scales make the whole.
    """
    whole, device = span.whole, span.whole.device
    rows = map_tensors(rows, lambda plane: plane.to(device, copy=True))  # what is read from a file is on the CPU
    whole.check_writable("copy_ of rows", casting=False)
    if not whole.partial_rows and _alike(whole.held, rows):
        _write(whole, {span.start: (span.stop, rows)})
        return rows
    kept = {start: piece for start, piece in whole.partial_rows.items() if piece[0] <= span.start or start >= span.stop}
    kept[span.start] = (span.stop, rows)
    if sum(stop - start for start, (stop, _) in kept.items()) < whole.shape[0]:
        whole.partial_rows = kept
        return rows
    whole.partial_rows = {}
    if not all(_alike(rows, piece) for _, piece in kept.values()):
        wanted, got = "pieces of one tensor", "pieces whose rows share different scales, or amaxes"
        cure = "save shards after their first forward pass, from when they share them; or load values"
        raise QuantizedTensorError(describe(f"rows of {whole!r}", wanted=wanted, got=got, cure=cure))
    _write(whole, kept)
    return rows


def _write(whole: Quantized, pieces: Mapping[int, tuple[int, QuantizedStorage]]) -> None:
    for start, (_, piece) in pieces.items():
        paste_rows(whole.held, start, piece)
    whole.ranks = unsure(whole.ranks)
    increment_version([tensor for tensor in (whole, *whole.held.tensors()) if not tensor.is_inference()])


def check_whole(tensor: Quantized) -> None:
    """QuantizedTensorError while rows are missing."""
    if tensor.partial_rows:
        got = ", ".join(f"{start} to {stop}" for start, (stop, _) in sorted(tensor.partial_rows.items()))
        raise QuantizedTensorError(describe(f"reading {tensor!r}", wanted="all rows", got=f"rows {got} only", cure=_CURE))


def _alike(one: QuantizedStorage, other: QuantizedStorage) -> bool:
    pairs = zip(shared_by_rows(one), shared_by_rows(other), strict=True)
    return all(torch.equal(a.reshape(-1).view(torch.int32), b.reshape(-1).view(torch.int32)) for a, b in pairs)
