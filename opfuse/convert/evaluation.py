"""Hooks of a converted model that has it compute in high precision in evaluation; :func:`opfuse.unfuse_` removes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from torch import nn

from opfuse.recipes.autocast import autocast
from opfuse.torch_private.modules import HOOKS


class EvaluationRegion:
    """A region around the forwards of a module in which nothing is cast, while the module is in evaluation mode."""

    def __init__(self, model: nn.Module) -> None:
        self.entered: list[ExitStack] = []
        self.hooks = (
            model.register_forward_pre_hook(self.enter),
            model.register_forward_hook(self.leave, always_call=True),
        )

    def enter(self, module: nn.Module, *_: object) -> None:
        region = ExitStack()
        if not module.training:
            region.enter_context(autocast(enabled=False))
        self.entered.append(region)

    def leave(self, *_: object) -> None:
        if self.entered:
            self.entered.pop().close()

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()


def evaluation_regions(model: nn.Module) -> Iterator[EvaluationRegion]:
    """The regions around ``model`` and modules in it."""
    for module in model.modules():
        for hook in [*vars(module)[HOOKS[0]].values()]:
            region = getattr(hook, "__self__", None)
            if isinstance(region, EvaluationRegion):
                yield region
