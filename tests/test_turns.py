"""What every run takes of many combinations has every value of each parameter, and each about as often."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from tests.turns import few, in_turn

AXES = (range(3), "abcd", (True, False))


def taken(size: int) -> list[tuple]:
    made = [*itertools.product(*AXES)]
    chosen = few([{*enumerate(each)} for each in made], size)
    return [made[number] for number in sorted(chosen)]


def test_every_value_is_in_one_and_each_about_as_often():
    assert len(taken(1)) == 4
    assert all(max(counts.values()) - min(counts.values()) <= 1 for counts in map(Counter, zip(*taken(1))))
    assert [{*values} for values in zip(*taken(1))] == [{*axis} for axis in AXES]


def test_every_pair_is_in_one():
    for one, other in itertools.combinations(range(3), 2):
        assert {(each[one], each[other]) for each in taken(2)} == {*itertools.product(AXES[one], AXES[other])}
    assert len(taken(2)) < len([*itertools.product(*AXES)])
    assert len(taken(3)) == len([*itertools.product(*AXES)])


@pytest.mark.few
@pytest.mark.parametrize(("letter", "first"), [("a", True), ("b", False), ("c", False)])
@pytest.mark.parametrize("digit", ["1", "2"])
def test_of_a_marked_test_three_combinations_run(letter, first, digit, request):
    """What is given together is one value, and what is left has the marker ``slow``."""
    of_this = [item for item in request.session.items if item.originalname == request.node.originalname]
    assert len(of_this) in (1, 3)  # a worker has those that are not slow


def test_one_of_so_many_runs_every_time():
    marked = [each.marks for each in in_turn("abc", "xyz", of=3)]
    assert marked.count(()) == 3
    assert len(marked) == 9
