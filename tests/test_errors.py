"""The text of an error: its parts can be read, whatever is written in them."""

from __future__ import annotations

import pickle

import pytest

from opfuse.errors import ShapeError, describe, listed, notice, problem_of, with_article

pytestmark = pytest.mark.cpu
TOLD = describe("Linear input", wanted="4 columns", got="5. Cure: none is known", cure="pass 4.")


def test_an_error_says_what_is_wrong_and_then_the_cure():
    assert TOLD == "Linear input: wants 4 columns, got 5. Cure: none is known. Cure: pass 4."
    assert (TOLD.wanted, TOLD.got) == ("4 columns", "5. Cure: none is known")


def test_a_notice_says_what_happened_and_then_the_cure():
    told = notice("mlp", got="a hook was added", cure="remove it")
    assert told == "mlp: a hook was added. Cure: remove it."
    assert (told.problem, told.wanted, told.got, told.cure) == ("mlp: a hook was added", "", "a hook was added", "remove it")


def test_names_have_the_article_that_they_are_spoken_with():
    assert [with_article(name) for name in ("Linear", "LSTM", "ReLU", "RMSNorm", "T5Block")] == [
        "a Linear",
        "an LSTM",
        "a ReLU",
        "an RMSNorm",
        "a T5Block",
    ]
    assert [with_article(name) for name in ("Identity", "int", "UNet", "UniSpeech", "OneFormer", "Unfold")] == [
        "an Identity",
        "an int",
        "a UNet",
        "a UniSpeech",
        "a OneFormer",
        "an Unfold",
    ]


def test_names_are_listed_as_they_are_spoken():
    assert [listed(names) for names in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and b", "a, b and c"]


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
