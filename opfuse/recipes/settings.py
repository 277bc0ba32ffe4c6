"""Fields of a recipe: what each may hold, where its default comes from, and the errors that say so."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, NamedTuple, TypeVar, cast

from opfuse.errors import RecipeError, describe, nearest

T = TypeVar("T")


class UnknownFieldError(RecipeError, TypeError):
    """A recipe was given a keyword that is not one of its fields."""


@dataclass(frozen=True)
class Domain:
    """What a field may hold.

    ``read`` returns the normal form of a value or raises ValueError; ``text`` turns the text of an environment variable into
    such a value; ``renamed`` maps values of older interfaces to what they are called now. ``names`` are texts among the values
    that ``wanted`` does not list.
    """

    wanted: str
    read: Callable[[Any], Any]
    text: Mapping[str, object] | None = None
    renamed: Mapping[str, object] | None = None
    names: Collection[str] = ()


@dataclass(frozen=True, eq=False)
class Setting:
    """Default of a recipe field: its value, its domain, and the environment variables that may stand in for the value."""

    value: object
    domain: Domain
    environment: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return repr(self.value)


class Resolved(NamedTuple):
    """A field's value and where it came from: ``default``, ``argument``, ``environment NAME``, or a place in a file."""

    value: object
    source: str


def setting(value: T, domain: Domain, *environment: str) -> T:
    """Declare a recipe field; typed as its value, so that ``field: bool = setting(False, BOOLEAN)`` reads as it should."""
    return cast(T, Setting(value, domain, environment))


def _typed(kind: type, value: object) -> object:
    if type(value) is not kind:
        raise ValueError
    return value


def _number(value: object) -> float:
    if type(value) not in (int, float) or not 0 <= cast(float, value) < math.inf:
        raise ValueError
    return float(cast(float, value))


def _one_of(choices: tuple[object, ...], value: object) -> object:
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError
    return value


def _at_least(lowest: int, value: object) -> object:
    if cast(int, _typed(int, value)) < lowest:
        raise ValueError
    return value


BOOLEAN = Domain("True or False", functools.partial(_typed, bool), text={"0": False, "1": True})
INTEGER = Domain("an integer", functools.partial(_typed, int))
NON_NEGATIVE = Domain("a finite number >= 0", _number)


def at_least(lowest: int) -> Domain:
    """Integers from ``lowest`` up."""
    return Domain(f"an integer >= {lowest}", functools.partial(_at_least, lowest))


def one_of(*choices: object, renamed: Mapping[str, object] | None = None) -> Domain:
    """Exactly these values, compared with their types (``True`` is not 1). ``none`` in an environment variable is None."""
    text = {"none": None, **{choice: choice for choice in choices if isinstance(choice, str)}}
    return Domain(f"one of {', '.join(map(repr, choices))}", functools.partial(_one_of, choices), text, renamed)


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


def _read(where: str, domain: Domain, value: object) -> object:
    try:
        return domain.read(value)
    except ValueError:
        renamed = domain.renamed or {}
        known = isinstance(value, str) and value in renamed
        listed = f" ({', '.join(domain.names)})" if domain.names else ""
        cure = f"write {renamed[cast(str, value)]!r}, its present name" if known else f"pass {domain.wanted}{listed}"
        got = f"{value!r}{nearest(value, domain.names) if isinstance(value, str) else ''}"
        raise RecipeError(describe(where, wanted=domain.wanted, got=got, cure=cure)) from None


def environment_value(rule: Setting) -> tuple[str, str] | None:
    """The first of the setting's variables that is set and not empty, with its text."""
    return next(((name, text) for name in rule.environment if (text := os.environ.get(name, "").strip())), None)


def resolve(where: str, value: object, declared: tuple[object, Setting | None]) -> Resolved:
    """Value and source of one field: argument > environment > default. ``where`` names recipe and field in errors."""
    default, rule = declared
    if rule is None:
        return Resolved(value, "argument" if default is MISSING or value is not default else "default")
    if value is not default:
        return Resolved(_read(where, rule.domain, value), "argument")
    if value is not rule:
        return Resolved(_read(where, rule.domain, value), "default")
    if (found := environment_value(rule)) is None:
        return Resolved(rule.value, "default")
    name, text = found
    value = (rule.domain.text or {}).get(text, text)
    return Resolved(_read(f"{where} (environment {name})", rule.domain, value), f"environment {name}")
