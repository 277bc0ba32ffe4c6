"""Activation checkpointing that recomputes under the recipe of the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any

import torch.utils.checkpoint

from opfuse.compiler.fuser import recorded_plans
from opfuse.errors import UnsupportedError, describe
from opfuse.recipes.delayed import Snapshot


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """``function(*args)``, whose activations are computed again in the backward pass instead of being kept.

    Like ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``, and with its other keywords (``preserve_rng_state``
    ...). The recomputation runs in the regions of the forward pass: the recipe, its amax group and the active rules, although
    ``autocast`` is over by then and the engine may use another thread; delayed scaling casts with the scales of the forward pass
    and counts no amax twice. So it computes the same bits.

    torch's own ``checkpoint`` recomputes without the recipe where the backward pass runs outside the region. Its
    non-reentrant kind then raises ``CheckpointError`` (another number of saved tensors); in its reentrant kind a pipeline raises
    UnsupportedError. ``use_reentrant=True`` is refused with UnsupportedError.
    """
    if use_reentrant:
        cure = "leave use_reentrant out; the non-reentrant kind does all that the reentrant one does"
        raise UnsupportedError(describe("opfuse.checkpoint", wanted="use_reentrant=False", got=use_reentrant, cure=cure))
    return torch.utils.checkpoint.checkpoint(_Recomputable(function), *args, use_reentrant=False, **kwargs)


class _Recomputable:
    """Runs a function, and again in the context variables of its first run."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.snapshot = Snapshot.current()
        self.context: Context | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.context is None:
            self.context = copy_context()
            with self.snapshot.recording():
                return self.function(*args, **kwargs)
        # A context can be entered once at a time: recomputations of one graph may run in several threads.
        return self.context.copy().run(self._again, *args, **kwargs)

    def _again(self, *args: Any, **kwargs: Any) -> Any:
        # Recorders of the forward pass have had their plans.
        with self.snapshot.replaying(), recorded_plans():
            return self.function(*args, **kwargs)
