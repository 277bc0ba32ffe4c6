"""Activation checkpointing that recomputes in the context of the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any

import torch.utils.checkpoint

from opfuse.errors import UnsupportedError, describe


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """``function(*args)``, whose activations are computed again in the backward pass instead of being kept.

    Like ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``, and with its other keywords (``preserve_rng_state``
    ...). Pipelines recompute under either as in the forward pass: with its recipe, amax group and rules, although ``autocast`` is
    over by then and the engine may use another thread; delayed scaling casts with the scales of the forward pass and counts no
    amax twice. So they compute the same bits. Here the whole function also finds the context variables of the forward pass,
    ``opfuse.recipes.current_recipe()`` among them. ``use_reentrant=True`` is refused with UnsupportedError.
    """
    if use_reentrant:
        cure = "leave use_reentrant out; the non-reentrant kind does all that the reentrant one does"
        raise UnsupportedError(describe("opfuse.checkpoint", wanted="use_reentrant=False", got=use_reentrant, cure=cure))
    return torch.utils.checkpoint.checkpoint(_Recomputable(function), *args, use_reentrant=False, **kwargs)


class _Recomputable:
    """Runs a function, and again in the context variables of its first run."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.context: Context | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.context is None:
            self.context = copy_context()
            return self.function(*args, **kwargs)
        # A context can be entered once at a time: recomputations of one graph may run in several threads.
        return self.context.copy().run(self.function, *args, **kwargs)
