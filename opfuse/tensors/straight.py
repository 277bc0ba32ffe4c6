"""Changes of representation, whose gradient passes straight through; how ``repr`` tells of a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class _StraightThrough(torch.autograd.Function):
    """A change of representation: the gradient of the result is that of the argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, change: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        return change(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def straight_through(change: Callable[[Any], torch.Tensor], x: torch.Tensor) -> Any:
    """``change(x)``, whose gradient is that of ``x``."""
    recorded = torch.is_grad_enabled() and x.requires_grad
    return _StraightThrough.apply(x, change) if recorded else change(x)  # type: ignore[no-untyped-call]


def gradient_text(tensor: torch.Tensor) -> str:
    """How ``repr`` shows that ``tensor`` wants a gradient, as torch does; ``grad_fn=Invalid`` after a write made it ambiguous."""
    try:
        return "requires_grad=True" if tensor.grad_fn is None else f"grad_fn={tensor.grad_fn.name()}"
    except RuntimeError:
        return "grad_fn=Invalid"
