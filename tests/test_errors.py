"""The text of an error: its parts can be read, whatever is written in them."""

from __future__ import annotations

import pickle

import pytest

from opfuse.errors import ShapeError, describe, problem_of

pytestmark = pytest.mark.cpu
TOLD = describe("Linear input", wanted="4 columns", got="5. Cure: none is known", cure="pass 4.")


def test_an_error_says_what_is_wrong_and_then_the_cure():
    assert TOLD == "Linear input: wants 4 columns, got 5. Cure: none is known. Cure: pass 4."
    assert (TOLD.wanted, TOLD.got) == ("4 columns", "5. Cure: none is known")


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (ShapeError(TOLD), "Linear input: wants 4 columns, got 5. Cure: none is known"),
        (pickle.loads(pickle.dumps(ShapeError(TOLD))), "Linear input: wants 4 columns, got 5. Cure: none is known"),
        (ShapeError("no columns. Cure: pass 4."), "no columns. Cure: pass 4."),
        (ShapeError(), ""),
    ],
    ids=["described", "from another process", "a text of a user's own", "no text"],
)
def test_another_error_may_repeat_what_is_wrong_without_the_cure(error, problem):
    assert problem_of(error) == problem
