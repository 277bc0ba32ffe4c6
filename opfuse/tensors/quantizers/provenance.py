"""What is known of a quantizer's code: whether it is the library's, and whether it makes the same bytes again."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any


def is_library_code(what: Any) -> bool:
    """Whether a class or a function is the library's."""
    return str(getattr(what, "__module__", "")).startswith("opfuse.")


def is_library_quantizer(quantizer: Any) -> bool:
    """Whether all code of the quantizer is the library's; not if it reduces amaxes, which depends on the ranks at each call."""
    if not is_dataclass(quantizer):
        return True
    if getattr(quantizer, "with_amax_reduction", False) or getattr(quantizer, "runs_code_of_others", False):
        return False
    return is_library_code(type(quantizer)) and all(
        is_library_quantizer(getattr(quantizer, field.name)) for field in fields(quantizer)
    )


def reduces(quantizer: Any) -> bool:
    """Whether a cast takes the largest amax of several ranks."""
    if not is_dataclass(quantizer):
        return False
    return getattr(quantizer, "with_amax_reduction", False) or any(reduces(getattr(quantizer, f.name)) for f in fields(quantizer))


def casts_itself(quantizer: Any) -> bool:
    """Whether the library's own code casts, which a kernel may then do; for a quantizer made of others, of all of them."""
    if not is_dataclass(quantizer):
        return True
    cast = getattr(type(quantizer), "quantize", None)
    known = cast is None or (is_library_code(cast) and not getattr(quantizer, "runs_code_of_others", False))
    return known and all(casts_itself(getattr(quantizer, field.name)) for field in fields(quantizer))


def draws(quantizer: Any) -> bool:
    """Whether a cast draws random numbers, so that no two are equal."""
    if not is_dataclass(quantizer):
        return False
    return getattr(quantizer, "stochastic_rounding", False) or any(draws(getattr(quantizer, f.name)) for f in fields(quantizer))
