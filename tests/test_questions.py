"""docs/questions.md tells the truth: each case is planted, asked, and says what the page has."""

from __future__ import annotations

import pytest
import torch

from docs import questions

PAGE = questions.written()
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the page tells of a machine without a GPU")


@pytest.mark.parametrize("question", questions.QUESTIONS, ids=lambda question: question.title)
def test_the_answer_is_what_the_page_says(question: questions.Question) -> None:
    answer = questions.ask(question).text
    for part in question.says:
        assert part in answer
    assert answer == PAGE.get(question.title), "run `python -m docs.questions`"


def test_the_page_has_all_questions_and_no_other() -> None:
    assert questions.document(PAGE) == questions.DOCUMENT.read_text(encoding="utf-8")
