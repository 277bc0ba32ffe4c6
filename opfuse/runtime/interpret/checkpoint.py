"""torch's checkpoint in its non-reentrant kind, which torch advises, under a short name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from opfuse.errors import PipelineError, describe


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """``torch.utils.checkpoint.checkpoint(function, *args, ...)``, non-reentrant by default.

    It is only a short name: under any checkpoint of torch, pipelines recompute with the recipe, amax group and rules of the
    forward pass, although ``autocast`` is over by then. Delayed scaling casts with the scales of the forward pass and counts no
    amax twice, so the bits are the same (``recompute.py``). PipelineError for what cannot be called.
    """
    if not callable(function):
        cure = "pass the module or function, and then its arguments"
        raise PipelineError(describe("checkpoint", wanted="a module or a function", got=type(function).__name__, cure=cure))
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)
