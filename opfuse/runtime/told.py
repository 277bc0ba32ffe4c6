"""Ops with hooks for calls and for changes of the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opfuse.core.operation import BasicOperation
from opfuse.recipes import Recipe


class Told:
    """The ops that override ``pre_fuser_forward`` or ``reset_recipe_state``, which are called; other ops cost a call nothing."""

    def __init__(self, ops: Sequence[BasicOperation]) -> None:
        numbered = tuple(enumerate(ops))
        self.call_listeners = tuple((i, op) for i, op in numbered if _overrides(op, "pre_fuser_forward"))
        self.recipe_listeners = tuple(op for _, op in numbered if _overrides(op, "reset_recipe_state"))
        self.recipe: Any = _NONE_YET

    def of_recipe(self, recipe: Recipe | None) -> None:
        """Call ``reset_recipe_state`` if ``recipe`` is not that of the last call."""
        if recipe is not self.recipe and recipe != self.recipe:
            self.recipe = recipe
            for op in self.recipe_listeners:
                op.reset_recipe_state(recipe=recipe)


_NONE_YET = object()


def _overrides(op: BasicOperation, method: str) -> bool:
    return getattr(type(op), method) is not getattr(BasicOperation, method)
