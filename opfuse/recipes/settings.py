"""Fields of a recipe: what each may hold, and where its default comes from."""

from __future__ import annotations

import functools
from dataclasses import MISSING, dataclass, fields
from typing import NamedTuple, TypeVar, cast

from opfuse.domains import Domain
from opfuse.environment import variable
from opfuse.errors import RecipeError
from opfuse.sources import DEFAULT, caller

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Setting:
    """Default of a recipe field: its value, its domain, and the environment variables that may stand in for the value."""

    value: object
    domain: Domain
    environment: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return repr(self.value)


class Resolved(NamedTuple):
    """A field's value and where it came from: ``default``, ``environment NAME``, or a line of code or of a file."""

    value: object
    source: str


def setting(value: T, domain: Domain, *environment: str) -> T:
    """Declare a recipe field; typed as its value, so that ``field: bool = setting(False, BOOLEAN)`` reads as it should."""
    return cast(T, Setting(value, domain, environment))


@functools.cache
def settings_of(cls: type) -> dict[str, tuple[object, Setting | None]]:
    """Per field of a recipe class: the default as the constructor passes it, and the nearest Setting that governs it.

    A subclass may redeclare a field with a plain default; the domain of the parent's Setting still applies.
    """
    found: dict[str, tuple[object, Setting | None]] = {}
    for field in fields(cls):
        declared = (vars(base).get("__dataclass_fields__", {}).get(field.name) for base in cls.__mro__)
        rules = (f.default for f in declared if f is not None)
        found[field.name] = field.default, next((rule for rule in rules if isinstance(rule, Setting)), None)
    return found


def environment_value(rule: Setting) -> tuple[str, str] | None:
    """The first of the setting's variables that is set and not empty, with its text."""
    return next(((name, text) for name in rule.environment if (text := variable(name))), None)


def resolve(where: str, value: object, declared: tuple[object, Setting | None]) -> Resolved:
    """Value and source of one field: argument > environment > default. ``where`` names recipe and field in errors."""
    default, rule = declared
    if rule is None:
        return Resolved(value, caller() if default is MISSING or value is not default else DEFAULT)
    if value is not default:
        return Resolved(rule.domain.checked(where, value, RecipeError), caller())
    if value is not rule:
        return Resolved(rule.domain.checked(where, value, RecipeError), DEFAULT)
    if (found := environment_value(rule)) is None:
        return Resolved(rule.value, DEFAULT)
    name, text = found
    value = (rule.domain.text or {}).get(text, text)
    return Resolved(rule.domain.checked(f"{where} (environment {name})", value, RecipeError), f"environment {name}")
