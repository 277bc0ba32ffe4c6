"""What a callable computes, found by its values: an activation is known by what it does, whatever class or library it is of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from opfuse.numerics.activations import ACTIVATIONS

GRID = torch.linspace(-12, 12, 2049, dtype=torch.float64, device="cpu")
"""Where activations are compared: the forms of GELU differ by 5e-4 there, rounding in fp32 by 1e-6."""

CLOSE = 4e-6


def activation_of(function: Callable[[torch.Tensor], Any]) -> str | None:
    """The name in ACTIVATIONS of what ``function`` computes on fp64 values; None where it is none of them."""
    try:
        with torch.no_grad():
            y = function(GRID.clone())
    except Exception:  # whatever a stranger's code raises, it is no activation
        return None
    if not isinstance(y, torch.Tensor) or y.shape != GRID.shape or not y.is_floating_point():
        return None
    close = (name for name, math in ACTIVATIONS.items() if (y - math.value(GRID)).abs().max() < CLOSE)
    return next(close, None)


def activation_of_module(module: nn.Module) -> str | None:
    """Of a module without parameters, buffers and submodules; hooks do not run, and what its forward keeps is taken back."""
    if any(True for part in (module.parameters(), module.buffers(), module.children()) for _ in part):
        return None
    before = dict(vars(module))
    try:
        return activation_of(module.forward)
    finally:
        vars(module).clear()
        vars(module).update(before)
