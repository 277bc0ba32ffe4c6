"""docs/questions.md is true: each case is planted, asked, and prints what the page has."""

from __future__ import annotations

import re

import pytest
import torch

from docs import questions

PAGE = questions.DOCUMENT.read_text(encoding="utf-8")
QUESTIONS = questions.questions(PAGE)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the page speaks of a machine without a GPU")


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.title)
def test_the_answer_is_what_the_page_says(question: questions.Question) -> None:
    assert questions.answer(question, questions.prelude(PAGE)) == question.answer, "run `python -m docs.questions`"


def test_every_question_of_the_page_is_asked() -> None:
    titles = re.findall(r"^### (.+)$", PAGE, re.MULTILINE)
    assert titles == [f"{number}. {question.title}" for number, question in enumerate(QUESTIONS, 1)]
    assert all(question.answer for question in QUESTIONS)
