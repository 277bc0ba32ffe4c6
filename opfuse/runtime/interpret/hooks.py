"""Hooks that ops override, for calls and for changes of the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opfuse.core.operation import BasicOperation
from opfuse.recipes import Recipe


class OpHooks:
    """The ops of a pipeline that override ``pre_fuser_forward`` or ``reset_recipe_state``; other ops cost a call nothing."""

    def __init__(self, ops: Sequence[BasicOperation]) -> None:
        numbered = tuple(enumerate(ops))
        self.of_calls = tuple((i, op) for i, op in numbered if _overrides(op, "pre_fuser_forward"))
        self.of_recipes = tuple(op for _, op in numbered if _overrides(op, "reset_recipe_state"))
        self.recipe: Any = _NONE_YET

    def call_under(self, recipe: Recipe | None) -> None:
        """Call ``reset_recipe_state`` if ``recipe`` is not that of the last call."""
        if recipe is not self.recipe and recipe != self.recipe:
            self.recipe = recipe
            for op in self.of_recipes:
                op.reset_recipe_state(recipe=recipe)


_NONE_YET = object()


def _overrides(op: BasicOperation, method: str) -> bool:
    return getattr(type(op), method) is not getattr(BasicOperation, method)
