"""Fusion rules as values: a pattern over the lowered pipeline, guards over what is in the key, and implementations.

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

import inspect
import keyword
import operator
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, NoReturn

from opfuse.compiler.graph import BACKWARD, FORWARD, Node
from opfuse.domains import BOOLEAN, keywords
from opfuse.errors import FusionError, KeyValueError, describe, nearest
from opfuse.keys import digest
from opfuse.sources import caller

# -- patterns --------------------------------------------------------------------------------------------------------------------

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


# -- guards ----------------------------------------------------------------------------------------------------------------------


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


ABSENT: Any = _Absent()
"""What a guard reads where its path leads to nothing."""


def _same(got: Any, want: Any) -> bool:
    """Equal, and of one type: True is not 1. A shape is a tuple like any other."""
    if isinstance(got, tuple) and isinstance(want, tuple):
        return len(got) == len(want) and all(map(_same, got, want))
    return type(got) is type(want) and bool(got == want)


def _in_order(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], bool]:
    """Whether the value read and the wanted one ``compare`` so; not if they are not of one order."""

    def passes(got: Any, want: Any) -> bool:
        try:
            return bool(compare(got, want))
        except TypeError:
            return False

    return passes


def _multiple_of(got: Any, want: Any) -> bool:
    return type(got) is int and got % want == 0


def _has_identity(want: Any) -> bool:
    try:
        digest(want)
    except KeyValueError:
        return False
    return True


class GuardWord(NamedTuple):
    """A word of guards. passes: whether a value that was read passes, given the value wanted. text: how files and explanations
    write both. takes, wanted: which values can be wanted, and in words. end: which end of a range the value wanted is; a word
    with one needs values that have an order. integers: it is asked of integers alone.
    """

    passes: Callable[[Any, Any], bool]
    text: str
    takes: Callable[[Any], bool] = _has_identity
    wanted: str = "a value with an identity"
    end: Literal["lower", "upper"] | None = None
    integers: bool = False


TESTS: dict[str, GuardWord] = {
    "is": GuardWord(_same, "{!r}"),
    "is_not": GuardWord(lambda got, want: not _same(got, want), "not {!r}"),
    "one_of": GuardWord(
        lambda got, want: any(_same(got, each) for each in want),
        "one of {!r}",
        lambda want: isinstance(want, tuple) and _has_identity(want),
        "a tuple of values with an identity",
    ),
    "at_least": GuardWord(_in_order(operator.ge), ">= {!r}", end="lower"),
    "above": GuardWord(_in_order(operator.gt), "> {!r}", end="lower"),
    "at_most": GuardWord(_in_order(operator.le), "<= {!r}", end="upper"),
    "below": GuardWord(_in_order(operator.lt), "< {!r}", end="upper"),
    "multiple_of": GuardWord(
        _multiple_of, "multiple of {!r}", lambda want: type(want) is int and want >= 1, "an integer of at least 1", integers=True
    ),
}
"""Guard words, shared by Python and YAML."""


@dataclass(frozen=True)
class Guard:
    """A condition as data: the dotted path it reads, a word of :data:`TESTS`, the value wanted.

    Paths start at a pattern name (``basic_linear.in_features``, ``basic_linear.weight.dtype``) or at ``env``
    (``env.recipe.kind``). They lead through compared fields only: anything else of an object is not in the key, and so is absent
    to a guard. FusionError for a value wanted that has no identity (a list is taken for a tuple), and for one the word cannot
    take.
    """

    reads: str
    test: str
    want: Any

    def __post_init__(self) -> None:
        if isinstance(self.want, list):
            object.__setattr__(self, "want", tuple(self.want))
        if self.test not in TESTS:
            got = f"{self.test!r}{nearest(str(self.test), TESTS)}"
            raise FusionError(describe(f"guard on {self.reads!r}", wanted=f"a test of {tuple(TESTS)}", got=got, cure="name one"))
        if not isinstance(self.reads, str) or not all(self.reads.split(".")):
            cure = "write env.arch, or a name of the pattern and what is read of it"
            raise FusionError(describe("guard", wanted="a dotted path", got=repr(self.reads), cure=cure))
        word = TESTS[self.test]
        if not word.takes(self.want):
            where = f"guard {self.test}({self.reads!r})"
            raise FusionError(describe(where, wanted=word.wanted, got=repr(self.want), cure="pass a value that the test can use"))

    @property
    def wanted_text(self) -> str:
        """What it wants, in words."""
        if self.want is None and self.test == "is_not":
            return "a recipe" if self.reads == "env.recipe" else "a value"
        return TESTS[self.test].text.format(self.want)

    def ok(self, got: Any) -> bool:
        """Whether ``got`` passes. An absent value never does."""
        return got is not ABSENT and TESTS[self.test].passes(got, self.want)


def is_(reads: str, want: Any) -> Guard:
    """Equal to ``want``, and of its type."""
    return Guard(reads, "is", want)


def is_not(reads: str, want: Any) -> Guard:
    """Anything but ``want``."""
    return Guard(reads, "is_not", want)


def one_of(reads: str, *want: Any) -> Guard:
    """Equal to one of ``want``."""
    return Guard(reads, "one_of", want)


def at_least(reads: str, floor: Any) -> Guard:
    """Not below ``floor``."""
    return Guard(reads, "at_least", floor)


def above(reads: str, floor: Any) -> Guard:
    """More than ``floor``."""
    return Guard(reads, "above", floor)


def at_most(reads: str, ceiling: Any) -> Guard:
    """Not above ``ceiling``."""
    return Guard(reads, "at_most", ceiling)


def below(reads: str, ceiling: Any) -> Guard:
    """Less than ``ceiling``."""
    return Guard(reads, "below", ceiling)


def multiple_of(reads: str, divisor: int) -> Guard:
    """An integer that ``divisor`` divides."""
    return Guard(reads, "multiple_of", divisor)


def contradiction(guards: Iterable[Guard]) -> str | None:
    """A path at which no value passes all ``guards``, as far as finitely many values are asked for; None if there is none."""
    by_path: dict[str, list[Guard]] = {}
    for guard in guards:
        by_path.setdefault(guard.reads, []).append(guard)
    for path, asked in by_path.items():
        candidates = [value for guard in asked if guard.test in _FINITE for value in _FINITE[guard.test](guard.want)]
        if candidates and not any(all(guard.ok(value) for guard in asked) for value in candidates):
            return path
        lows, highs = ([guard for guard in asked if TESTS[guard.test].end == end] for end in ("lower", "upper"))
        if any(_apart(low, high) for low in lows for high in highs):
            return path
    return None


def _apart(low: Guard, high: Guard) -> bool:
    """Whether no value can lie above the one end and below the other."""
    return not (low.want < high.want or (low.ok(high.want) and high.ok(low.want)))


_FINITE: dict[str, Callable[[Any], tuple[Any, ...]]] = {"is": lambda want: (want,), "one_of": tuple}


# -- rules -----------------------------------------------------------------------------------------------------------------------

JOINT = "joint"
"""The direction of a rule that runs in both passes."""

PASSES: Mapping[str, tuple[str, ...]] = {JOINT: (FORWARD, BACKWARD), FORWARD: (FORWARD,), BACKWARD: (BACKWARD,)}
"""The passes that a rule of each direction runs in; directions in the order in which they claim."""


@dataclass(frozen=True)
class Fusion:
    """A rule: where it matches, when it may, what runs instead.

    pattern: names to kinds, traits or terms, in forward order in both directions; the names are the keyword parameters of the
    implementations. forward: ``(x, **bindings) -> y``. backward: ``(dy, **bindings) -> dx``, leaving parameter and extra
    gradients in the contexts. A binding is a Context, None (an absent ``maybe``) or a tuple (a ``run``). Both
    implementations make a joint rule, whose saved state is its own affair; a rule with one of them must leave, or read,
    the saved state of the unfused ops. extra_outputs: ``forward`` leaves those of its ops in the contexts, too
    (``set_extra_outputs``); without that, a pattern takes no op that has any.

    A pattern that can only ever match one node gives one op another implementation. Any other takes two nodes at least: a
    producer alone is no chain, whatever could follow it. Words and paths are looked up when the rule enters a
    :class:`~opfuse.compiler.registry.RuleSet`; FusionError here for all that is wrong by itself.

    extends: names of the rules of which it matches a part. source: where it was written.
    """

    name: str
    pattern: tuple[Term, ...]
    when: tuple[Guard, ...] = ()
    forward: Callable[..., Any] | None = None
    backward: Callable[..., Any] | None = None
    priority: int = 0
    extra_outputs: bool = False
    extends: tuple[str, ...] = field(default=(), compare=False)
    doc: str = field(default="", compare=False)
    source: str = field(default_factory=caller, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise FusionError(describe("fusion", wanted="a name", got=repr(self.name), cure="pass a text"))
        self._check_pattern()
        implementations = [function for function in (self.forward, self.backward) if function is not None]
        if not implementations:
            self._refuse("forward=, backward= or both", "neither", "pass an implementation")
        for implementation in implementations:
            self._check_implementation(implementation)
        self._check_guards()
        BOOLEAN.checked(f"fusion {self.name!r} extra_outputs", self.extra_outputs, FusionError)
        if type(self.priority) is not int:
            self._refuse("an integer as its priority", repr(self.priority), "leave it out, or pass 1")
        digest(self, f"fusion {self.name!r}")

    def _refuse(self, wanted: str, got: object, cure: str, *, at: str = "") -> NoReturn:
        raise FusionError(describe(f"fusion {self.name!r}{at}", wanted=wanted, got=got, cure=cure))

    def _check_pattern(self) -> None:
        if not isinstance(self.pattern, tuple) or not all(isinstance(term, Term) for term in self.pattern):
            self._refuse("a tuple of terms", repr(self.pattern), "use fusion(), which makes one of a dictionary")
        names = [term.name for term in self.pattern]
        if len(set(names)) < len(names) or not all(map(is_name, names)):
            self._refuse("a name of its own for each place, which a parameter can have", names, "rename the places; env is taken")
        if not any(term.low for term in self.pattern):
            got = printed(self.pattern) or "an empty pattern"
            self._refuse(
                "a pattern with a node that must be there", got, "name an op, as in {'act': 'gelu'}, or use run(..., low=1)"
            )

    def _check_implementation(self, implementation: Callable[..., Any]) -> None:
        wanted = tuple(term.name for term in self.pattern)
        try:
            parameters = inspect.signature(implementation).parameters.items()
        except (TypeError, ValueError):  # no callable, or one of C that does not tell
            self._refuse("functions as implementations", repr(implementation), "pass a function")
        got = tuple(name for name, p in parameters if p.kind is p.KEYWORD_ONLY)
        if got != wanted:
            cure = f"write def f(x, *, {', '.join(wanted)}), or name the places as in 'linear=basic_linear'"
            self._refuse(f"keyword-only parameters {wanted}", got, cure)

    def _check_guards(self) -> None:
        if not isinstance(self.when, tuple) or not all(isinstance(guard, Guard) for guard in self.when):
            words = ", ".join(f"{word}_" if word == "is" else word for word in TESTS)
            cure = f"write when=(is_('env.device', 'cuda'),), with a function of opfuse.compiler.rules: {words}"
            self._refuse("a tuple of guards as when", repr(self.when), cure)
        roots = ("env", *(term.name for term in self.pattern))
        for guard in self.when:
            if (root := guard.reads.split(".")[0]) not in roots:
                got = f"{root!r}{nearest(root, roots)}"
                self._refuse("env or a name of the pattern", got, f"begin with one of {roots}", at=f" guard {guard.reads!r}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {printed(self.pattern)!r}, {self.direction})"

    @cached_property
    def single(self) -> bool:
        """Whether the pattern can only ever match one node."""
        return is_single(self.pattern)

    @cached_property
    def direction(self) -> str:
        """forward, backward or joint: follows from which implementations exist."""
        if self.forward is not None and self.backward is not None:
            return JOINT
        return FORWARD if self.forward is not None else BACKWARD

    def narrowed(self, *guards: Guard) -> Fusion:
        """A copy of the rule with more guards; guards are only ever added."""
        return replace(self, when=self.when + guards)


def fusion(name: str, pattern: object, **fields: Any) -> Fusion:
    """A :class:`Fusion` whose pattern is written in any way that :func:`terms_of` reads.

    ``"basic_linear bias? act=gelu|silu"``, a list of such places, or a dictionary from names to places. doc: by default what
    the implementation says of itself.
    """
    known = keywords(Fusion) or ()
    if unknown := [field for field in fields if field not in known]:
        got = f"{unknown[0]!r}{nearest(unknown[0], known)}"
        raise FusionError(describe(f"fusion {name!r}", wanted=f"fields of {sorted(known)}", got=got, cure="mend the name"))
    implementation = next((each for name in ("forward", "backward") if (each := fields.get(name)) is not None), None)
    doc = (implementation.__doc__ or "") if inspect.isfunction(implementation) else ""
    return Fusion(name, terms_of(pattern, f"fusion {name!r}"), **{"doc": doc, **fields})
