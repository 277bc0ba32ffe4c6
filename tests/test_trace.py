"""The page that follows one call says what the code does: a changed plan, value or kernel text shows here."""

from docs import trace


def test_the_page_is_what_the_code_does():
    assert trace.document() == trace.DOCUMENT.read_text(encoding="utf-8"), "run `python -m docs.trace`"
