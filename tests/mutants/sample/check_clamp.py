"""Weak tests of ``clamp``: they never look at a bound itself."""

import pytest

from tests.mutants.sample.clamp import clamp


@pytest.mark.parametrize(("value", "clamped"), [(-5, 0), (4, 4), (12, 8)])
def test_values(value, clamped):
    assert clamp(value) == clamped


def test_bounds_that_cross():
    with pytest.raises(ValueError, match="low above high"):
        clamp(0, 5, 2)


def test_that_fails_without_any_mutant():
    assert clamp(1) == 2
