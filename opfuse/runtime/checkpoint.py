"""The kind of torch's checkpoint that torch advises, under a short name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """``torch.utils.checkpoint.checkpoint(function, *args, ...)``, non-reentrant where nothing else is said.

    Nothing of it is opfuse's: pipelines recompute under any checkpoint of torch as in the forward pass, with its recipe, amax
    group and rules, although ``autocast`` is over by then. Delayed scaling casts with the scales of the forward pass and counts
    no amax twice. So they compute the same bits (``recompute.py``).
    """
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)
