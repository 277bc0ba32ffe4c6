"""TransformerEngine recipe objects, read by class name and fields; that package is neither imported nor needed."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from opfuse.errors import OpfuseWarning, RecipeError, closest, describe
from opfuse.recipes.kinds import RECIPES
from opfuse.recipes.recipe import Recipe

_CLASSES = {cls.__name__: cls for cls in RECIPES.values()}
_SPELLINGS = {"nvfp4_4over6": {"none": None}, "nvfp4_4over6_e4m3_use_256": {"none": None}}
"""Values that TransformerEngine writes differently."""

_DERIVED = {
    "fp4_quant_fwd_inp": {"random_hadamard_transform": "disable_rht"},
    "fp4_quant_fwd_weight": {"fp4_2d_quantization": "disable_2d_quantization"},
    "fp4_quant_bwd_grad": {"random_hadamard_transform": "disable_rht", "stochastic_rounding": "disable_stochastic_rounding"},
}
"""Attributes that its NVFP4 recipe computes: every flag is False but these, which are the negation of a field."""


def as_recipe(given: object) -> Recipe:
    """``given`` itself when it is a recipe, else the recipe of the same name and fields.

    One OpfuseWarning lists what has no counterpart here and is not at its default. RecipeError for anything else.
    """
    if isinstance(given, Recipe):
        return given
    name = type(given).__name__
    if isinstance(given, type) or name not in _CLASSES:
        raise RecipeError(describe("recipe", wanted="a recipe", got=repr(given), cure=_meant(given)))
    cls = _CLASSES[name]
    shared = [field.name for field in fields(cls) if hasattr(given, field.name)]
    mapped: dict[str, Any] = {field: spelled(field, getattr(given, field)) for field in shared}
    recipe = cls(**mapped).with_sources(dict.fromkeys(mapped, "TransformerEngine recipe"))
    if unmapped := list(_unmapped(given, recipe)):
        text = f"TransformerEngine {name}: ignored, as opfuse has no such setting: {', '.join(unmapped)}"
        warnings.warn(text, OpfuseWarning, stacklevel=4)
    return recipe


def _meant(given: object) -> str:
    """What to write for something that is no recipe: a class instead of an object, the name of a class, a kind."""
    classes = {name: name for name in _CLASSES} | {kind: cls.__name__ for kind, cls in RECIPES.items()}
    text = given if isinstance(given, str) else (given if isinstance(given, type) else type(given)).__name__
    if (found := closest(text, classes)) is not None:
        return f"write opfuse.recipes.{classes[found]}()"
    return f"pass an instance of one of {', '.join(_CLASSES)}"


def spelled(name: str, value: object) -> Any:
    """A value of TransformerEngine's as the field ``name`` takes it here."""
    if isinstance(value, enum.Enum):
        return value.name
    spellings = _SPELLINGS.get(name, {})
    return spellings.get(value, value) if isinstance(value, str) else value


def _unmapped(given: object, recipe: Recipe) -> Iterator[str]:
    """``name=value`` of what was set on ``given`` and has no counterpart; defaults change nothing and are passed over."""
    defaults = {field.name: field.default for field in fields(given)} if is_dataclass(given) else {}
    for name, value in vars(given).items():
        known = name.startswith("_") or hasattr(recipe, name) or value == defaults.get(name, MISSING)
        if not known and not _is_derived(name, value, recipe):
            yield f"{name}={value!r}"


def _is_derived(name: str, value: object, recipe: Recipe) -> bool:
    if name not in _DERIVED:
        return False
    flags = vars(value) if hasattr(value, "__dict__") else {}
    on = {flag for flag, setting in flags.items() if setting and not flag.startswith("_")}
    return on == {flag for flag, disabled in _DERIVED[name].items() if not getattr(recipe, disabled)}
