"""Combinations of what a test varies, of which every run takes some, in turn, and ``-m slow`` the others."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
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
