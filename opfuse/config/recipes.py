"""The recipe section, derived from the recipe classes: their fields, defaults and domains."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, cast

from pydantic import AfterValidator, Field, ValidationInfo, create_model

from opfuse.config.document import Document
from opfuse.config.fields import field_type
from opfuse.config.models import FileSection
from opfuse.recipes import RECIPES, Recipe, recipe_of
from opfuse.recipes.settings import Setting, settings_of

NO_RECIPE = "none"


def _field(name: str, default: Any, rule: Setting) -> tuple[Any, Any]:
    """Type and default of one field; a field whose default lies outside its domain must be written."""
    value = default.value if isinstance(default, Setting) else default
    written = value.name if isinstance(value, enum.Enum) else value if value in rule.domain else ...
    return field_type(name, rule.domain), written


def _model(kind: str, cls: type[Recipe]) -> type[FileSection]:
    settings = {name: _field(name, default, rule) for name, (default, rule) in settings_of(cls).items() if rule is not None}
    return create_model(cls.__name__, __base__=FileSection, __doc__=cls.__doc__, kind=(Literal[kind], ...), **settings)  # type: ignore


class HighPrecision(FileSection):
    """No recipe: nothing is quantized."""

    kind: Literal["none"]


MODELS: Mapping[str, type[FileSection]] = {
    **{kind: _model(kind, cls) for kind, cls in RECIPES.items()},
    NO_RECIPE: HighPrecision,
}
"""The model of a recipe section by its kind."""


def recipe_at(section: Any, document: Document, *place: str) -> Recipe | None:
    """The recipe that ``section`` describes, whose fields know where they were written. RecipeError if they do not agree."""
    if section.kind == NO_RECIPE:
        return None
    given = {name: getattr(section, name) for name in section.model_fields_set - {"kind"}}
    return recipe_of(section.kind, given, {name: document.source((*place, name)) for name in given})


def _to_recipe(section: Any, info: ValidationInfo) -> Recipe | None:
    return recipe_at(section, cast(Document, info.context), "recipe")


if TYPE_CHECKING:
    RecipeSection = Recipe | None
else:
    RecipeSection = Annotated[Union[tuple(MODELS.values())], Field(discriminator="kind"), AfterValidator(_to_recipe)]  # noqa: UP007
"""A recipe section; validates to a Recipe, or None for kind ``none``."""
