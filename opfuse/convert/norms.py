"""Norms that no pipeline begins with, such as the one before attention: each runs as one op.

Models write an RMS norm as several sums, casts and products, seven in transformers, each a kernel over the whole tensor. In a
graph of torch.compile the norm stays as it is: the compiler makes one kernel of it and of the sum before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from opfuse.convert.converted import Converted
from opfuse.convert.guards import Proven
from opfuse.convert.leaves import NORM_DTYPES, norm_of, obstacle
from opfuse.convert.pipeline import PipelineRun
from opfuse.convert.record import required_arguments
from opfuse.recipes import Recipe

NARROW = 1024
"""Columns below which a norm is left alone: norms of attention heads were not measured."""


class LoneNorm(Converted):
    """The forward of a norm: one op for tensors of its weight's dtype; the original forward for others, or after a change."""

    def _is_proven(self, given: Sequence[Any]) -> bool:
        (x,), (weight, *_) = given, [p for p in self._parameters() if p is not None]
        plain = type(x) is torch.Tensor and type(weight) is nn.Parameter and x.dtype in NORM_DTYPES
        return plain and x.dim() > 0 and x.dtype == weight.dtype and not torch.is_autocast_enabled(x.device.type)

    def _followed(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return type(self.module).forward(self.module, *args, **kwargs)


def lone_norm(module: nn.Module, path: str, recipe: Recipe | None) -> tuple[LoneNorm, str] | None:
    """The new forward of a norm, and the name of its op; None for a module that is none, or that stays as it is."""
    if _columns(module) < NARROW or obstacle(module, called=True) is not None or (leaf := norm_of(module)) is None:
        return None
    run = PipelineRun([leaf.op], ["norm"], made=[] if leaf.made is None else [leaf.made], path=path)
    arguments = required_arguments(module)
    norm = LoneNorm(module, path, arguments=arguments, run=run, members={}, recipe=recipe, proven=Proven())
    return norm, type(leaf.op).__name__


def why_kept(module: nn.Module) -> tuple[str, str, str]:
    """What a module would have to be for an op, what it is, and the cure, which may be empty."""
    if _columns(module) < NARROW:
        return f"a norm of {NARROW} columns or more", f"vectors of {_columns(module)}", ""
    if (hindered := obstacle(module, called=True)) is not None:
        return "a plain norm", *hindered
    return "a norm that opfuse has", f"a {type(module).__name__}, whose forward is no LayerNorm or RMSNorm", ""


def _columns(module: nn.Module) -> int:
    return next(p.numel() for p in module._parameters.values() if p is not None)
