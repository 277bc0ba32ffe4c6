"""The recipe section, derived from the recipe classes: their fields, defaults and domains."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_origin, get_type_hints

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationInfo, WithJsonSchema, create_model

from opfuse.config.findings import Problem, Refused, shown, similar
from opfuse.config.models import Section
from opfuse.recipes import RECIPES, Recipe, recipe_of
from opfuse.recipes.settings import Domain, Setting, settings_of

NO_RECIPE = "none"

_YAML_WORDS = {"None": "null", "True": "true", "False": "false", "Format.": ""}


def read(name: str, domain: Domain, value: Any) -> Any:
    """The normal form of ``value``; Refused in the words of YAML if it lies outside ``domain``."""
    try:
        return domain.read(value)
    except ValueError:
        raise Refused(_outside(name, domain, value)) from None


def _outside(name: str, domain: Domain, value: Any) -> Problem:
    wanted = re.sub(r"\b(None|True|False|Format\.)", lambda found: _YAML_WORDS[found[0]], domain.wanted)
    help = ""
    if isinstance(value, str):
        renamed = domain.renamed or {}
        help = f"write {shown(renamed[value])}, its present name" if value in renamed else similar(value, domain.text or {})
    return Problem("bad-value", f"{name} wants {wanted}, got {shown(value)}", help)


def _reader(name: str, domain: Domain) -> Callable[[Any], Any]:
    return lambda value: read(name, domain, value)


def _setting_schema(hint: Any, domain: Domain) -> dict[str, Any]:
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [name for name in hint.__members__ if _can_read(domain, name)]}
    if get_origin(hint) is Callable:
        return {"enum": list(domain.text or ())}
    return TypeAdapter(hint).json_schema()


def _can_read(domain: Domain, value: Any) -> bool:
    try:
        domain.read(value)
    except ValueError:
        return False
    return True


def _field(cls: type[Recipe], name: str, default: Any, rule: Setting) -> tuple[Any, Any]:
    """Type and default of one field; a field whose default lies outside its domain must be written."""
    value = default.value if isinstance(default, Setting) else default
    schema = _setting_schema(get_type_hints(cls)[name], rule.domain)
    written = value.name if isinstance(value, enum.Enum) else value if _can_read(rule.domain, value) else ...
    return Annotated[Any, BeforeValidator(_reader(name, rule.domain)), WithJsonSchema(schema)], written


def _model(kind: str, cls: type[Recipe]) -> type[Section]:
    settings = {name: _field(cls, name, default, rule) for name, (default, rule) in settings_of(cls).items() if rule is not None}
    return create_model(cls.__name__, __base__=Section, __doc__=cls.__doc__, kind=(Literal[kind], ...), **settings)  # type: ignore


class HighPrecision(Section):
    """No recipe: nothing is quantized."""

    kind: Literal["none"]


MODELS: Mapping[str, type[Section]] = {
    **{kind: _model(kind, cls) for kind, cls in RECIPES.items()},
    NO_RECIPE: HighPrecision,
}
"""The model of a recipe section by its kind."""


def to_recipe(section: Any, info: ValidationInfo) -> Recipe | None:
    """The recipe that ``section`` describes, whose fields know where they were written. RecipeError if they do not agree."""
    if section.kind == NO_RECIPE:
        return None
    given = {name: getattr(section, name) for name in section.model_fields_set - {"kind"}}
    document = info.context
    sources = {name: document.source(("recipe", name)) for name in given} if document is not None else {}
    return recipe_of(section.kind, given, sources)


if TYPE_CHECKING:
    RecipeSection = Recipe | None
else:
    RecipeSection = Annotated[Union[tuple(MODELS.values())], Field(discriminator="kind"), AfterValidator(to_recipe)]  # noqa: UP007
"""A recipe section; validates to a Recipe, or None for kind ``none``."""
