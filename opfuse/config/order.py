"""Entries of a file among each other: what they make of the rule set, in which order, and what they leave to each other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from opfuse.compiler.cover import Fits
from opfuse.compiler.graph import Node
from opfuse.compiler.registry import RuleSet, default_rules, extends
from opfuse.compiler.rules import PASSES, Fusion, Guard, Term
from opfuse.config.findings import Problem, Refused, shown, similar
from opfuse.fusions.declared import KINDS


@dataclass(frozen=True)
class RuleChange:
    """What an entry does to the rule set.

    rule: the one that is added, or put in place of its namesake; None: it is disabled. before, after: the rule that it shall
    claim next to. expect: how often each outcome shall be counted.
    """

    name: str
    rule: Fusion | None = None
    new: bool = False
    before: str | None = None
    after: str | None = None
    expect: Mapping[str, int] | None = None

    @property
    def anchor(self) -> tuple[str, str] | None:
        """The key and the name of the rule that it stands next to."""
        return next(((key, name) for key in ("before", "after") if (name := getattr(self, key)) is not None), None)


def changed(changes: Sequence[RuleChange]) -> RuleSet:
    """The rule set in force with ``changes``."""
    rules = default_rules()
    for change in changes:
        if change.rule is None:
            rules = rules.without(change.name)
        elif not change.new:
            rules = rules.replaced(change.rule)
    new = tuple(change.rule for change in changes if change.new and change.rule is not None)
    order = [*new, *rules.rules]
    moves = [(change.name, *change.anchor) for change in changes if change.anchor is not None]
    for _ in moves:  # as often as one can put another astray that went before
        before = list(order)
        for move in moves:
            _move(order, *move)
        if all(rule is other for rule, other in zip(order, before)):
            break
    return replace(rules, rules=tuple(order))


def _move(order: list[Fusion], name: str, key: str, anchor: str) -> None:
    """Put a rule right before or after another, among those of its priority."""
    rule = order.pop(_place(order, name))
    at = _place(order, anchor)
    priority = order[at].priority
    order.insert(at + (key == "after"), rule if rule.priority == priority else replace(rule, priority=priority))


def _place(order: Sequence[Fusion], name: str) -> int:
    return next(i for i, rule in enumerate(order) if rule.name == name)


def check_changes(changes: Sequence[RuleChange]) -> Sequence[RuleChange]:
    """Refused if entries speak of one rule, stand next to none, or leave nothing to a declared rule."""
    for check in (_twice, _astray):
        _refuse(check(changes, i) for i in range(len(changes)))
    rules = changed(changes)
    order = {direction: rules.of(direction) for direction in PASSES}
    for late in (_contrary, _shadowed):
        _refuse(late(change, i, order[change.rule.direction]) for i, change in enumerate(changes) if change.rule is not None)
    return changes


def _refuse(found: Iterable[Problem | None]) -> None:
    if problems := [problem for problem in found if problem is not None]:
        raise Refused(*problems)


def _twice(changes: Sequence[RuleChange], index: int) -> Problem | None:
    change = changes[index]
    if change.new and change.name in default_rules().names:
        help = f"choose another name, or write `use: {change.name}`"
        return Problem("duplicate-rule", f"there is a rule {change.name!r} already", help, (index, "name"))
    first = next(i for i, other in enumerate(changes) if other.name == change.name)
    if first == index:
        return None
    message = f"rule {change.name!r} has an entry already, number {first + 1}"
    return Problem("duplicate-rule", message, "make one entry of the two", (index,))


def _astray(changes: Sequence[RuleChange], index: int) -> Problem | None:
    change = changes[index]
    if change.anchor is None or change.rule is None:
        return None
    key, anchor = change.anchor
    known = {rule.name: rule for rule in default_rules().rules} | {other.name: other.rule for other in changes}
    others = {name: rule for name, rule in known.items() if rule is not None and name != change.name}
    if anchor not in others:
        message = f"there is no other rule {shown(anchor)} to claim {key}"
        return Problem("unknown-rule", message, similar(anchor, others), (index, key))
    if others[anchor].direction != change.rule.direction:
        message = f"{anchor!r} is a {others[anchor].direction} rule, {change.name!r} a {change.rule.direction} one"
        return Problem("bad-value", message, "they never ask for the same nodes in one pass: leave it out", (index, key))
    return None


def _contrary(change: RuleChange, index: int, order: Sequence[Fusion]) -> Problem | None:
    """The problem of an entry whose place in the order the other entries rule out."""
    if change.anchor is None:
        return None
    key, anchor = change.anchor
    if (_place(order, change.name) < _place(order, anchor)) == (key == "before"):
        return None
    message = f"{change.name!r} cannot claim {key} {anchor!r}: other entries say the contrary"
    return Problem("bad-value", message, "drop one of them", (index, key))


def _shadowed(change: RuleChange, index: int, order: Sequence[Fusion]) -> Problem | None:
    """The problem of a declared rule to which an earlier rule leaves nothing."""
    if not change.new:
        return None
    at = _place(order, change.name)
    by = next((other.name for other in order[:at] if extends(order[at], other) or _covers(other, order[at])), None)
    if by is None:
        return None
    message = f"rule {change.name!r} can never claim anything: {by!r} comes first and takes the same ops under no more guards"
    return Problem("shadowed-rule", message, "put the more particular rule first", (index, "name"))


# -- whether one rule leaves anything to a later one, found by trying it on what the later one could match -----------------------

MAX_SENTENCES = 100
MAX_NODES = 32
"""Beyond so many ways to match nothing is said: a rule may be shadowed by several others in ways that no one looks for."""

MORE = 2
"""How many nodes beyond the least stand for any number of them."""

Sentence = Sequence[tuple[str, Node]]
"""Nodes in a row that a pattern matches, each with the place that it stands at."""


def _covers(first: Fusion, later: Fusion) -> bool:
    """Whether ``first`` matches, under no more guards, inside of everything that ``later`` matches."""
    return first.direction == later.direction and all(_takes_part(first, later, spoken) for spoken in _sentences(later) or [()])


def _numbers(term: Term) -> range:
    most = term.low + MORE if term.high is None else min(term.high, term.low + MORE)
    return range(term.low, most + 1)


def _ways(term: Term) -> int:
    return sum(len(term.words) ** number for number in _numbers(term))


@lru_cache(maxsize=128)
def _sentences(rule: Fusion) -> Sequence[Sentence]:
    """What the pattern of a rule matches; nothing if that is too much."""
    if sum(_numbers(term)[-1] for term in rule.pattern) > MAX_NODES or math.prod(map(_ways, rule.pattern)) > MAX_SENTENCES:
        return ()
    return tuple(_spoken(rule))


def _spoken(rule: Fusion) -> Iterator[Sentence]:
    for words in product(*([way for n in _numbers(term) for way in product(term.words, repeat=n)] for term in rule.pattern)):
        spoken = [(term.name, word) for term, way in zip(rule.pattern, words) for word in way]
        if len(spoken) > 1 or rule.single:
            yield [(name, _node(i, word)) for i, (name, word) in enumerate(spoken)]


def _node(index: int, word: str) -> Node:
    """A node of which nothing is known but that ``word`` means it."""
    meant = [words for words in KINDS.values() if word in words]
    return Node(index, word, 0, None, frozenset({word}).union(frozenset.intersection(*meant) if meant else ()))


def _takes_part(first: Fusion, later: Fusion, sentence: Sentence) -> bool:
    fits = Fits(first, [node for _, node in sentence])
    for start in range(len(sentence)):
        if (found := fits.binding(start)) is not None:
            places = {term.name: [sentence[i][0] for i in there] for term, there in zip(first.pattern, found)}
            return all(set(_asked(guard, places)) <= set(later.when) for guard in first.when)
    return False


def _asked(guard: Guard, places: dict[str, list[str]]) -> Iterator[Guard]:
    """``guard`` in the names of the later rule: of every place where the nodes stand that it reads."""
    root, _, rest = guard.reads.partition(".")
    if root not in places:
        yield guard
    for place in places.get(root, ()):
        yield replace(guard, reads=f"{place}.{rest}")
