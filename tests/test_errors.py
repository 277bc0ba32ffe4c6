"""The text of an error: its parts can be read, whatever is written in them."""

from __future__ import annotations

import ast
import pickle
import re
from itertools import pairwise
from pathlib import Path

import pytest

import opfuse
from opfuse.errors import ShapeError, describe, differing, listed, notice, number_of, problem_of, with_article

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


def test_one_thing_is_told_in_the_singular():
    nouns = {"plan": "plans", "miss": "misses", "amax": "amaxes", "matrix": "matrices"}
    counts = [[number_of(count, noun) for count in (0, 1, 2)] for noun in nouns]
    assert counts == [[f"0 {several}", f"1 {noun}", f"2 {several}"] for noun, several in nouns.items()]
    told = [differing(count, total, "scale") for count, total in ((1, 1), (1, 2), (2, 2))]
    assert told == ["1 of 1 scale differs", "1 of 2 scales differs", "2 of 2 scales differ"]


NOUNS = "plan hit misse row column group cast byte key value losse step token element feature channel module op operand program"
PLURAL = re.compile(rf" (?:extra )?(?:{'|'.join(NOUNS.split())})s\b")
SEVERAL = {
    # more than one where they are told of
    *("{len(of)} ops", "{len(steps)} steps", "{len(self.rows)} rows", "{wanted[1]} features"),
    # of formats and tiles
    *("{unit} rows", "{row_unit(storage)} rows", "{multiple} rows", "{rows_of(env.device)} rows", "{there} rows"),
    "{tile_rows(parameter.device.type, parameter.shape[-1])} rows",
    # of whole tensors, in a column; and a verb
    *("{totals.bytes} bytes", "{value.untyped_storage().nbytes()} bytes", "{recipe.backward_override} casts"),
}
"""Counts that are never 1, or stand in a table."""


def counted_in_the_plural(source: str) -> set[str]:
    """``{len(rows)} rows`` in f-strings of a module, of what is no constant."""
    strings = (node.values for node in ast.walk(ast.parse(source)) if isinstance(node, ast.JoinedStr))
    pairs = (
        (ast.unparse(one.value), two.value)
        for parts in strings
        for one, two in pairwise(parts)
        if isinstance(one, ast.FormattedValue)
    )
    return {f"{{{count}}}{found[0]}" for count, text in pairs if not count.isupper() and (found := PLURAL.match(str(text)))}


def test_no_message_counts_in_the_plural_what_may_be_one():
    """Kernels and their definitions aside, whose code a record of measurements names."""
    package = Path(opfuse.__file__).parent
    modules = [path for path in package.rglob("*.py") if path.relative_to(package).parts[0] not in ("kernels", "numerics")]
    assert counted_in_the_plural("f'{n} rows, {MOST} ops, {number_of(n, noun)} of rows'") == {"{n} rows"}
    found = set[str]().union(*(counted_in_the_plural(path.read_text(encoding="utf-8")) for path in modules))
    assert found <= SEVERAL, found - SEVERAL


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
