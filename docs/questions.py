"""Writes docs/questions.md: questions, each with its planted case, the one command or call, and what that says: ``python -m docs.questions``.

A test asks each again and compares. What a run decides by itself is told the same every time: keys by their order, milliseconds and
versions by their names.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import torch

from docs.questions_asked import QUESTIONS, Question
from docs.questions_cases import PRELUDE
from opfuse.cli.app import main
from opfuse.errors import OpfuseError
from opfuse.runtime import trace

DOCUMENT = Path(__file__).resolve().parent / "questions.md"

TEXT = """# Questions

Debugging questions, each with code that plants the problem, the one command or call that answers it, and its output. `python -m docs.questions`
writes this page from real runs, and a test compares. Each answer takes less than a second after imports (`python -m docs.questions_timed`).
All cases begin with

```py
{prelude}```

`KEY1` and `N` stand for keys and numbers that differ from run to run.
"""

PLAIN = (
    (re.compile(r"\b\d+(\.\d+)? ms\b"), "N ms"),
    (re.compile(r"\+\d+(\.\d+)? ms"), "+N ms"),
    (re.compile(r" 0x[0-9a-f]+"), " 0x…"),
    (re.compile(r"\b\d+\.\d{6,}"), "N.N"),
    (re.compile(r", [+-]\d\.\d\de[+-]\d\d"), ", N"),
    (re.compile(r"gradients [\d.]+% off"), "gradients N% off"),
    (re.compile(r"[\d.]+% of elements, by [\d.e+-]+"), "N% of elements, by N"),
    (re.compile(r"rank(\d+)-\d+\.jsonl"), r"rank\1-PID.jsonl"),
    (re.compile(r"plan \d+ of the process"), "plan N of the process"),
    (re.compile(r"\b\d+\.\d MiB"), "N MiB"),
    (re.compile(r"(?<=  )\d+\.\d +0\.0\b"), "N     N"),
    (re.compile(r" +\d+\.\d  (?=first plan|env\.)"), "  N  "),
)
"""What differs from run to run, and how it is written."""


class Answer(NamedTuple):
    """What was printed, and how long asking took, in seconds."""

    text: str
    seconds: float


def ask(question: Question) -> Answer:
    """Plant the case in a directory of its own, ask, and put everything back."""
    with _elsewhere() as place:
        torch.manual_seed(0)
        space: dict[str, Any] = {}
        exec(compile(PRELUDE, "prelude.py", "exec"), space)
        planted, asked = io.StringIO(), io.StringIO()
        with redirect_stdout(planted), redirect_stderr(planted), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(question.plant, "train.py", "exec"), space)
        start = time.perf_counter()
        with redirect_stdout(asked), redirect_stderr(asked), _told_warnings(asked):
            _ask(question.ask, space)
        seconds = time.perf_counter() - start
    return Answer(_plain(asked.getvalue(), place), seconds)


def _ask(text: str, space: dict[str, Any]) -> None:
    if text.startswith("opfuse "):
        main(shlex.split(os.path.expandvars(text))[1:])
        return
    try:
        exec(compile(text, "ask.py", "exec"), space)
    except OpfuseError as error:
        print(f"{type(error).__name__}: {error}")


@contextmanager
def _elsewhere() -> Iterator[Path]:
    """An empty directory, with a cache of kernels of its own; variables, arguments and the writer of traces as before afterwards."""
    before, variables, arguments, number = os.getcwd(), dict(os.environ), list(sys.argv), torch.random.get_rng_state()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        os.environ |= {"OPFUSE_CACHE_DIR": os.path.join(directory, "kept"), "COLUMNS": "400"}
        sys.argv = ["train.py"]
        trace._writer.cache_clear()
        try:
            yield Path(directory)
        finally:
            os.chdir(before)
            os.environ.clear()
            os.environ |= variables
            sys.argv = arguments
            torch.random.set_rng_state(number)
            trace._writer.cache_clear()


@contextmanager
def _told_warnings(to: io.StringIO) -> Iterator[None]:
    def tell(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        to.write(f"{category.__name__}: {message}\n")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = tell  # type: ignore[assignment]
        yield


def _plain(text: str, place: Path) -> str:
    """The same text for the same answer."""
    text = text.replace(f"{place}{os.sep}", "").replace(str(place), ".")
    for pattern, plain in PLAIN:
        text = pattern.sub(plain, text)
    for number, digits in enumerate(dict.fromkeys(re.findall(r"\b[0-9a-f]{16}\b", text)), 1):
        text = text.replace(digits, f"KEY{number}")
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def document(answers: dict[str, str]) -> str:
    """The page, with the answer to each question by its title."""
    pages = [TEXT.format(prelude=PRELUDE)]
    about = None
    for number, question in enumerate(QUESTIONS, 1):
        if question.about != about:
            about = question.about
            pages.append(f"## {about}\n")
        language = "console" if question.ask.startswith("opfuse ") else "py"
        prompt = "$ " if language == "console" else ""
        pages.append(f"### {number}. {question.title}\n")
        if question.plant:
            pages.append(f"```py\n{question.plant.strip()}\n```\n")
        pages.append(f"```{language}\n{prompt}{question.ask.strip()}\n```\n")
        pages.append(f"```text\n{answers[question.title]}\n```\n")
    return "\n".join(pages)


def written() -> dict[str, str]:
    """The answers that the page has now, by title."""
    text = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.exists() else ""
    found = re.findall(r"^### \d+\. (.+?)\n.*?```text\n(.*?)\n?```\n", text, re.MULTILINE | re.DOTALL)
    return dict(found)


if __name__ == "__main__":
    asked = {question.title: ask(question) for question in QUESTIONS}
    DOCUMENT.write_text(document({title: answer.text for title, answer in asked.items()}), encoding="utf-8")
    for title, answer in sorted(asked.items(), key=lambda pair: -pair[1].seconds)[:5]:
        print(f"{answer.seconds:6.2f} s  {title}")
