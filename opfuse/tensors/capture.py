"""Refusing, during capture, what a CUDA graph cannot repeat: it would replay what the host read or made at that moment."""

from __future__ import annotations

import torch

from opfuse.errors import UnsupportedError, describe


def is_capturing() -> bool:
    """Whether what is queued now becomes a part of a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def check_capture(where: str, *, got: str, cure: str) -> None:
    """UnsupportedError while a CUDA graph is captured."""
    if is_capturing():
        wanted = "what a CUDA graph repeats with other values"
        raise UnsupportedError(describe(f"{where} during graph capture", wanted=wanted, got=got, cure=cure))
