"""Keywords of TransformerEngine that opfuse lacks: accepted at their defaults, refused at other values, with the cure.

A module of opfuse.te has the classes of opfuse's own module; those that need it have a constructor that accepts such keywords.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from opfuse.errors import UnsupportedError, describe

Keywords = Mapping[str, tuple[object, str]]
"""By keyword: its default, the only value that it may have, and the cure for any other."""


def without(where: str, extra: Keywords, given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` without the keywords ``extra``. UnsupportedError, which speaks of ``where``, for one at another value."""
    for keyword in extra.keys() & given.keys():
        default, cure = extra[keyword]
        value = getattr(given[keyword], "name", given[keyword])  # of an enum
        if value is not default and value != default:
            got = repr(given[keyword])
            raise UnsupportedError(describe(where, wanted=f"{keyword}={default!r}", got=got, cure=cure))
    return {keyword: value for keyword, value in given.items() if keyword not in extra}


def names_over(base: ModuleType, adapted: Mapping[str, Any]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a module that has the names of ``base``, of which ``adapted`` are its own."""

    def get(name: str) -> Any:
        return adapted[name] if name in adapted else getattr(base, name)

    return get, lambda: sorted({*dir(base), *adapted})
