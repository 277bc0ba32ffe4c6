"""docs/questions.md and docs/symptoms.md are true: each case is planted, asked, and prints what the page has."""

from __future__ import annotations

import re

import pytest
import torch

from docs import questions

PAGES = {document: document.read_text(encoding="utf-8") for document in questions.DOCUMENTS}
QUESTIONS = {document: questions.questions(page) for document, page in PAGES.items()}
CASES = [
    pytest.param(
        page,
        question,
        id=f"{document.stem}: {question.title}",
        # It starts three interpreters; tests/distributed compares ranks, too.
        marks=pytest.mark.slow if question.ask.startswith("torchrun ") else (),
    )
    for document, page in PAGES.items()
    for question in QUESTIONS[document]
]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the pages speak of a machine without a GPU")


@pytest.mark.usefixtures("few_samples")
@pytest.mark.parametrize(("page", "question"), CASES)
def test_the_answer_is_what_the_page_says(page: str, question: questions.Question) -> None:
    printed = questions.answer(question, questions.prelude(page))
    assert printed == question.answer or questions.agrees(question.answer, printed), "run `python -m docs.questions`"


def test_every_question_of_the_page_is_asked() -> None:
    titles = re.findall(r"^### (.+)$", PAGES[questions.DOCUMENT], re.MULTILINE)
    assert titles == [f"{number}. {question.title}" for number, question in enumerate(QUESTIONS[questions.DOCUMENT], 1)]
    assert all(question.answer for found in QUESTIONS.values() for question in found)


def test_every_block_of_the_symptoms_is_asked_and_every_symptom_has_one() -> None:
    page, asked = PAGES[questions.SYMPTOMS], QUESTIONS[questions.SYMPTOMS]
    blocks = re.findall(r"^ *```(?:py|console)$", page, re.MULTILINE)
    assert len(blocks) == 1 + sum(1 + bool(question.plant) for question in asked)
    assert list(dict.fromkeys(question.title for question in asked)) == re.findall(r"^## (.+)$", page, re.MULTILINE)


@pytest.mark.parametrize(
    ("shown", "same"), [("a\n…\nd", True), ("…\nc\nd", True), ("a\nd", False), ("…\nx", False), ("b\n…", False)]
)
def test_lines_that_are_left_out_may_be_any_and_others_none(shown: str, same: bool) -> None:
    assert questions.agrees(shown, "a\nb\nc\nd") == same
