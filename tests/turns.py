"""Combinations of what a test varies, of which every run takes some, in turn, and ``-m slow`` the others."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def in_turn(*axes: Iterable[Any], of: int) -> list[Any]:
    """The product of ``axes`` as parameters, a tuple as several of them; one of ``of`` runs every time, the others with -m slow.

    With ``of`` as long as an axis, all combinations of the others run, each with one value of it; a value meets all of theirs.
    """
    made = []
    for places in itertools.product(*map(enumerate, axes)):
        values = [value for _, each in places for value in (each if isinstance(each, tuple) else (each,))]
        named = "-".join(str(getattr(value, "name", getattr(value, "__name__", value))) for value in values)
        marks = () if sum(place for place, _ in places) % of == 0 else pytest.mark.slow
        made.append(pytest.param(*values, marks=marks, id=named))
    return made


def leave_to_slow(items: Iterable[pytest.Item]) -> None:
    """Of each test with the marker ``few`` the combinations that hold no new value of any ``parametrize`` get the marker slow.

    With ``few(2)`` those that hold no new pair of values. What one ``parametrize`` gives together is one value; with
    ``few(apart=True)`` each of its names has values of its own.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for test in tests.values():
        how: pytest.Mark = test[0].get_closest_marker("few")  # type: ignore[assignment]
        chosen = few([_values(item, **how.kwargs) for item in test], *how.args)
        for number, item in enumerate(test):
            if number not in chosen:
                item.add_marker(pytest.mark.slow)


def few(combinations: Sequence[set[Any]], size: int = 1) -> set[int]:
    """The numbers of some, with every ``size`` values that any has in one of them, and each value in about as many.

    The one with most that is new comes next, of several the one whose values were taken least.
    """
    parts = [{*map(frozenset, itertools.combinations(each, min(size, len(each))))} for each in combinations]
    left, taken, chosen = set[Any]().union(*parts), Counter[Any](), set[int]()
    while left:
        best = max(
            range(len(parts)), key=lambda number: (len(left & parts[number]), -sum(taken[each] for each in combinations[number]))
        )
        left -= parts[best]
        taken.update(combinations[best])
        chosen.add(best)
    return chosen


def _values(item: pytest.Item, *, apart: bool = False) -> set[Any]:
    """What each ``parametrize`` of the test gives it, with its names."""
    params, found = dict(item.callspec.params), set()  # type: ignore[attr-defined]
    args = [] if apart else [mark.args[0] for mark in item.iter_markers("parametrize")]
    together = [[name.strip() for name in each.split(",")] if isinstance(each, str) else each for each in args]
    for names in (*together, *([name] for name in params.keys() - set(itertools.chain(*together)))):  # all others alone
        given = [(name, params[name]) for name in names]
        found.add(tuple((name, value if _is_hashable(value) else id(value)) for name, value in given))
    return found


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
