"""The recipes by kind."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from opfuse.errors import RecipeError, describe, nearest
from opfuse.recipes.builtin import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from opfuse.recipes.custom import CustomRecipe
from opfuse.recipes.recipe import Recipe

RECIPES: Mapping[str, type[Recipe]] = MappingProxyType(
    {
        cls.kind: cls
        for cls in (DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling, CustomRecipe)
    }
)
"""The recipes of this package by kind."""


def recipe_of(kind: str, values: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> Recipe:
    """The recipe of a configuration: its short name, the fields it sets, and where each was written."""
    if kind not in RECIPES:
        cure = f"use one of {', '.join(RECIPES)}"
        raise RecipeError(describe("recipe", wanted="a kind of recipe", got=f"{kind!r}{nearest(kind, RECIPES)}", cure=cure))
    return RECIPES[kind](**values).with_sources(sources or {})
