"""Keys of a section that are read by the domains of the classes they stand for: the same ranges, in the words of YAML."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

from opfuse.config.findings import Problem, Refused, shown, similar
from opfuse.domains import Domain

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
        help = f"write {shown(renamed[value])}, its present name" if value in renamed else similar(value, domain.names)
    return Problem("bad-value", f"{name} wants {wanted}, got {shown(value)}", help)


def _reader(name: str, domain: Domain) -> Callable[[Any], Any]:
    return lambda value: read(name, domain, value)


def field_type(name: str, domain: Domain) -> Any:
    """The type of the key ``name`` for pydantic: read by ``domain``, and told to editors by its schema."""
    return Annotated[Any, BeforeValidator(_reader(name, domain)), WithJsonSchema(dict(domain.schema))]
