"""Fields of a recipe: what each may hold, and where its default comes from."""

from __future__ import annotations

import functools
from dataclasses import MISSING, dataclass, fields
from typing import NamedTuple, TypeVar, cast

from opfuse.domains import Domain
from opfuse.environment import variable
from opfuse.errors import RecipeError, describe, nearest
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
    return Resolved(_from_text(where, rule.domain, *found), f"environment {found[0]}")


def _from_text(where: str, domain: Domain, name: str, text: str) -> object:
    """The value that the text of a variable stands for. RecipeError, in the words of a shell, for a text that is none of them."""
    texts, renamed = domain.text or {}, domain.renamed or {}
    value = texts.get(text, text)
    if value in domain:
        return domain.read(value)
    now = next((each for each, meant in texts.items() if text in renamed and meant == renamed[text]), None)
    given = f"{text!r}{nearest(text, texts)}" if now is None else f"{text!r}, which is called {now} now"
    cure = f"set {name}={now or '|'.join(texts)}, or unset it"
    raise RecipeError(describe(f"{where} (environment {name})", wanted=f"one of {', '.join(texts)}", got=given, cure=cure))


def misread(cls: type) -> dict[str, RecipeError]:
    """The variables that stand in for fields of a recipe class and say nothing that these may hold, with the error of each."""
    found = dict[str, RecipeError]()
    for field, (_, rule) in settings_of(cls).items():
        if rule is not None and (said := environment_value(rule)) is not None:
            try:
                _from_text(f"{cls.__name__}.{field}", rule.domain, *said)
            except RecipeError as error:
                found[said[0]] = error
    return found
