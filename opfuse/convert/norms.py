"""Norms that no pipeline begins with, such as the one before attention: each runs as one op.

Models write an RMS norm as several sums, casts and products, seven in transformers, each a kernel over the whole tensor. In a
graph of torch.compile the norm stays as it is: the compiler makes one kernel of it and of the sum before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from opfuse.convert.chain import arguments_of
from opfuse.convert.converted import Converted
from opfuse.convert.leaves import norm_of, obstacle
from opfuse.convert.parts import PipelineRun
from opfuse.recipes import Recipe

NARROW = 1024
"""Columns below which a norm is left alone: norms of attention heads were not measured."""


class LoneNorm(Converted):
    """The forward of a norm: one op for tensors of its weight's dtype; the original forward for others, or after a change."""

    def compute(self, x: torch.Tensor, arguments: Sequence[torch.Tensor]) -> Any:
        weight: Any = self.module._parameters["weight"]
        plain = type(x) is torch.Tensor and type(weight) is nn.Parameter and self.settings[""].hold(self.module)
        if plain and x.dtype == weight.dtype and not torch.is_autocast_enabled(x.device.type):
            return super().compute(x, arguments)
        return self.plain(x)

    def check_members(self) -> None:
        """Nothing to check: after a change the module's own forward computes."""

    def get_ready(self) -> None:
        """Nothing to make: in a graph the norm is no op."""

    def _followed(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self.plain(*args, **kwargs)


def lone_norm(module: nn.Module, path: str, recipe: Recipe | None) -> tuple[LoneNorm, str] | None:
    """The new forward of a norm, and the name of its op; None for a module that is none, or that stays as it is."""
    op = norm_of(module)
    weight: Any = module._parameters.get("weight")
    if op is None or weight.numel() < NARROW or obstacle(module, called=True) is not None:
        return None
    run = PipelineRun([op], ["norm"], path=path)
    return LoneNorm(module, path, arguments=arguments_of(module)[:1], parts=(run,), members={}, recipe=recipe), type(op).__name__


def why_kept(module: nn.Module, untraced: str) -> tuple[str, str, str]:
    """What a module would have to be for an op, what it is, and the cure, which may be empty. untraced: why it is not known what
    reads its result.
    """
    kind, hindered = type(module).__name__, obstacle(module, called=True)
    if norm_of(module) is None:
        return "a norm that opfuse has", f"{kind}, seen as neither LayerNorm with weight and bias nor RMSNorm", ""
    if hindered is not None:
        return "a plain norm", *hindered
    read = f"that nobody is known to read alone: {untraced}" if untraced else "that no converted module reads alone"
    wanted = f"a norm of {NARROW} columns, or one that a converted module reads alone"
    return wanted, f"one of {module._parameters['weight'].numel()} columns {read}", ""  # type: ignore[union-attr]
