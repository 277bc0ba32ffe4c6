"""Where an op stands in the model that runs it, for ranks that share its amaxes: equal names do not make one layer.

A module does not know what holds it, so this is read from the calls around: the modules that are being called, from the outermost
one to the pipeline, and what runs stages of a pipeline over ranks. Nothing a plan computes depends on it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from torch import nn

from opfuse.torch_private.stack import owners


class Standing(NamedTuple):
    """path: of the module that runs, from the outermost one. stage: ``stage 1 of 2`` if several ranks have parts of the model.

    behind: whether the input of its pipeline wants a gradient, as it does behind other layers.
    """

    path: str = ""
    stage: str = ""
    behind: bool = False

    def of(self, name: str) -> Standing:
        """That of what the module calls ``name``."""
        return self._replace(path=".".join(filter(None, (self.path, name))))

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.path, self.stage, "with a gradient for the input" if self.behind else "")))


def standing_here(*, behind: bool) -> Standing:
    """The position, in its model, of the innermost module that is being called."""
    running = [*owners()][::-1]
    modules = [owner for owner in running if isinstance(owner, nn.Module)]
    steps = (_name_in(outer, inner) for outer, inner in pairwise(modules) if inner is not outer)
    return Standing(".".join(filter(None, steps)), next(filter(None, map(_stage, running)), ""), behind)


def _name_in(outer: nn.Module, inner: nn.Module) -> str:
    return next((name for name, module in outer.named_modules() if module is inner), type(inner).__name__)


def _stage(owner: object) -> str:
    """What a stage of torch.distributed.pipelining, and of others that use its names, says of itself."""
    held = getattr(owner, "__dict__", {})
    index, stages = held.get("stage_index"), held.get("num_stages", 1)
    return f"stage {index} of {stages}" if index is not None and stages != 1 else ""
