"""The language of patterns: places of nodes in a row, as Python, configuration files and explanations write them.

A pattern is a row of places, ``basic_linear bias? act=gelu|silu elementwise* quantize?``. A place is one or more words, any of
which matches, followed by a count. A name may stand before them; otherwise the place is named after its words::

    place = [name "="] word {"|" word} ["?" | "*" | "+" | "{2}" | "{2,}" | "{2,5}"]

Places are separated by blanks or commas, with or without brackets around all. A list has one place in each item; a dictionary, or
an item of a list that is one, names places by its keys. :func:`printed` writes what :func:`terms_of` reads. Words are not checked
here, but by ``vocabulary.py`` when a rule enters a rule set.

A place gives nodes back that a later one needs, as in a regular expression. What cannot match from a node on is remembered, so
the time of a match is a product of places and nodes.
"""

from __future__ import annotations

import keyword
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from opfuse.compiler.graph import Node
from opfuse.errors import FusionError, describe

_WORD = r"[^\s,;:|?*+{}()\[\]=]+"
_COUNT = r"[?*+]|\{(?P<low>\d{1,4})(?P<to>,(?P<high>\d{1,4}|None)?)?\}"
_PLACE = re.compile(rf"(?:(?P<name>{_WORD})=)?(?P<words>{_WORD}(?:\|{_WORD})*)(?P<count>{_COUNT})?")
_BETWEEN = re.compile(r"\s*,\s*(?![^{}]*\})|\s+")

_COUNTS: Mapping[str, tuple[int, int | None]] = {"": (1, 1), "?": (0, 1), "*": (0, None), "+": (1, None)}
"""How many nodes, from least to most, the sign after a place stands for."""

_EXAMPLE = "write 'basic_linear bias? act=gelu|silu elementwise* quantize?'"


@dataclass(frozen=True)
class Term:
    """One place of a pattern: nodes of these kinds or traits, between ``low`` and ``high`` of them (None: any number)."""

    name: str
    words: tuple[str, ...]
    low: int = 1
    high: int | None = 1

    def __post_init__(self) -> None:
        words = self.words if isinstance(self.words, tuple) else ()
        worded = words and all(isinstance(word, str) and re.fullmatch(_WORD, word) for word in words)
        counted = type(self.low) is int and self.low >= 0 and (self.high is None or _counts(self.high, self.low))
        if not (worded and counted):
            wanted, cure = (
                "at least one word, and a number of nodes",
                "write 'gelu', ('gelu', 'relu'), maybe('bias') or run('gelu')",
            )
            got = f"{self.words!r} from {self.low!r} to {self.high!r}"
            raise FusionError(describe(f"pattern place {self.name!r}", wanted=wanted, got=got, cure=cure))

    def __str__(self) -> str:
        most = "" if self.high is None else self.high
        exact = f"{{{self.low}}}" if self.low == self.high else f"{{{self.low},{most}}}"
        count = next((sign for sign, bounds in _COUNTS.items() if bounds == (self.low, self.high)), exact)
        return "|".join(self.words) + count

    def accepts(self, node: Node) -> bool:
        """Whether ``node`` can stand here."""
        return not node.words.isdisjoint(self.words)


def _counts(high: object, low: int) -> bool:
    return type(high) is int and high >= max(low, 1)


def one(*words: str) -> Term:
    """Exactly one node of any of these kinds or traits."""
    return Term("", words)


def maybe(*words: str) -> Term:
    """At most one node."""
    return Term("", words, low=0)


def run(*words: str, low: int = 0) -> Term:
    """As many consecutive nodes as match."""
    return Term("", words, low=low, high=None)


# -- text --------------------------------------------------------------------------------------------------------------------


def place(text: str, where: str = "pattern") -> Term:
    """The place that ``text`` writes, without a name if it writes none. FusionError if it is no place."""
    found = _PLACE.fullmatch(text.strip())
    if found is None:
        raise FusionError(
            describe(where, wanted="a place such as act=gelu|silu, bias? or relu{2,}", got=reprlib.repr(text), cure=_EXAMPLE)
        )
    words = tuple(found["words"].split("|"))
    return Term(found["name"] or "", words, *_count(found))


def _count(found: re.Match[str]) -> tuple[int, int | None]:
    if found["low"] is None:
        return _COUNTS[found["count"] or ""]
    low, high = int(found["low"]), found["high"]
    if found["to"] is None:
        return low, low
    return low, None if high in (None, "None") else int(high)


def terms_of(pattern: object, where: str = "pattern") -> tuple[Term, ...]:
    """The places of a pattern in any spelling, each with a name. FusionError for what is no pattern."""
    if isinstance(pattern, str):
        return named(place(part, where) for part in split(pattern))
    if isinstance(pattern, Mapping):
        return named(_captured(name, what, where) for name, what in pattern.items())
    if not isinstance(pattern, Sequence):
        raise FusionError(describe(where, wanted="a pattern", got=reprlib.repr(pattern), cure=_EXAMPLE))
    return named(_item(item, where) for item in pattern)


def split(text: str) -> list[str]:
    """The places that a text has behind each other, in brackets or without."""
    text = text.strip()
    inner = (text[1:-1] if text.startswith("[") and text.endswith("]") else text).strip()
    return _BETWEEN.split(inner) if inner else []


def _item(item: object, where: str) -> Term:
    if isinstance(item, Mapping) and len(item) == 1:
        ((name, what),) = item.items()
        return _captured(name, what, where)
    if isinstance(item, Term):
        return item
    if not isinstance(item, str):
        raise FusionError(describe(where, wanted="places, as text", got=reprlib.repr(item), cure=_EXAMPLE))
    return place(item, where)


def _captured(name: object, what: object, where: str) -> Term:
    """The place that a dictionary calls ``name``: text, a tuple of words or a term."""
    if isinstance(what, Term):
        found = what
    elif isinstance(what, str) and what:
        found = place(what, where)
    else:
        found = Term(str(name), tuple(what) if isinstance(what, (tuple, list)) else (what,))  # type: ignore[arg-type]
    return replace(found, name=name)  # type: ignore[arg-type]  # which Fusion checks


def named(terms: Iterable[Term]) -> tuple[Term, ...]:
    """``terms`` with a name each: its own or, numbered from the second time on, its words (``bias``, ``gelu``, ``bias_2``)."""
    result: list[Term] = []
    taken: list[str] = []
    for term in terms:
        default = default_name(term.words, taken)
        taken.append(_stem(term.words))
        result.append(term if term.name else replace(term, name=default))
    return tuple(result)


def default_name(words: Sequence[str], before: Sequence[str]) -> str:
    """What a place is called that has no name: its words. before: those of the places before it."""
    stem = _stem(words)
    count = before.count(stem) + 1
    return stem if count == 1 else f"{stem}_{count}"


def _stem(words: Sequence[str]) -> str:
    stem = re.sub(r"\W", "_", "_or_".join(words))
    return stem if is_name(stem) else f"_{stem}"


def is_name(name: object) -> bool:
    """Whether a place can be called so: a parameter can, and guards mean nothing else by it."""
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name) and name != "env"


def is_single(pattern: Iterable[Term]) -> bool:
    """Whether a pattern can only ever match one node."""
    return sum(term.high or 2 for term in pattern) == 1


def printed(pattern: Sequence[Term]) -> str:
    """The text of a pattern, which :func:`terms_of` reads as the same one."""
    taken: list[str] = []
    places: list[str] = []
    for term in pattern:
        default = default_name(term.words, taken)
        taken.append(_stem(term.words))
        places.append(str(term) if term.name in ("", default) else f"{term.name}={term}")
    return " ".join(places)
