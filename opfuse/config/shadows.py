"""Whether one rule leaves anything to a later one, found by trying it on what the later one could match."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product

from opfuse.compiler.cover import Fits
from opfuse.compiler.graph import Node
from opfuse.compiler.rules import Fusion, Guard, Term
from opfuse.fusions.declared import KINDS

MAX_SENTENCES = 100
MAX_NODES = 32
"""Beyond so many ways to match nothing is said: a rule may be shadowed by several others in ways that no one looks for."""

MORE = 2
"""How many nodes beyond the least stand for any number of them."""

Sentence = Sequence[tuple[str, Node]]
"""Nodes in a row that a pattern matches, each with the place that it stands at."""


def covers(first: Fusion, later: Fusion) -> bool:
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
