"""Asks the questions of docs/questions.md and docs/symptoms.md again, and rewrites their answers: ``python -m docs.questions``.

The pages are their own source: a question is code that plants the case if it needs any, the one command or call that is asked,
and what that prints. A test asks each again and compares. What differs from run to run is written the same way: keys by their
order, milliseconds and versions by their names. A line that is ``…`` stands for any lines that are left out.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import torch

from opfuse.cli.app import main
from opfuse.errors import OpfuseError
from opfuse.runtime.plans import trace

DOCUMENT, SYMPTOMS = (Path(__file__).resolve().parent / f"{name}.md" for name in ("questions", "symptoms"))
DOCUMENTS = (DOCUMENT, SYMPTOMS)

_BODY = r"(?:(?!```).*\n)*"
_QUESTION = re.compile(
    rf"^(?:### \d+\. (?P<title>.+)\n\n)?(?:```py\n(?P<plant>{_BODY})```\n\n)?"
    rf"```(?:py|console)\n(?:\$ )?(?P<ask>{_BODY})```\n\n```text\n(?P<answer>{_BODY})```$",
    re.MULTILINE,
)

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
    (re.compile(r"^ *(\S.*?) +\d+\.\d\d% +[\d.]+[mu]?s .*", re.MULTILINE), r"\1  N"),
)
"""What differs from run to run, and how it is written."""


class Question(NamedTuple):
    """plant: code that makes the case. ask: a command line of opfuse or torchrun, else code. answer: what the page says."""

    title: str
    plant: str
    ask: str
    answer: str


def prelude(page: str) -> str:
    """The code with which all cases begin: the first of the page."""
    found = re.search(rf"^```py\n({_BODY})```$", page, re.MULTILINE)
    return found[1] if found else ""


def questions(page: str) -> list[Question]:
    """Those of the page, in its order."""
    return [_question(match) for match in _QUESTION.finditer(page)]


def _question(match: re.Match[str]) -> Question:
    """It has the title of its own, or of the chapter that it stands in."""
    title = match["title"] or re.findall(r"^## (.+)$", match.string[: match.start()], re.MULTILINE)[-1]
    return Question(title, match["plant"] or "", match["ask"].strip(), match["answer"].rstrip("\n"))


def agrees(shown: str, printed: str) -> bool:
    """Whether a page shows what is printed, but for lines that it leaves out."""
    lines = (r"(?:.*\n)*" if line == LEFT_OUT else rf"{re.escape(line)}\n" for line in shown.splitlines())
    return re.fullmatch("".join(lines), f"{printed}\n") is not None


LEFT_OUT = "…"


def answer(question: Question, prelude: str) -> str:
    """Plant the case in a directory of its own, ask, and put everything back. Returns what is printed."""
    with _elsewhere() as place:
        torch.manual_seed(0)
        space: dict[str, Any] = {}
        exec(compile(prelude, "prelude.py", "exec"), space)
        planted, asked = io.StringIO(), io.StringIO()
        with redirect_stdout(planted), redirect_stderr(planted), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(question.plant, "train.py", "exec"), space)
        with redirect_stdout(asked), redirect_stderr(asked), _told_warnings(asked):
            _ask(question.ask, space)
    return _plain(asked.getvalue(), place)


def _ask(text: str, space: dict[str, Any]) -> None:
    if text.startswith("opfuse "):
        main(shlex.split(os.path.expandvars(text))[1:])
        return
    if text.startswith("torchrun "):
        command = [sys.executable, "-m", "torch.distributed.run", *shlex.split(text)[1:]]
        found = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        print(subprocess.run(command, capture_output=True, text=True, check=True, env=found).stdout)
        return
    try:
        exec(compile(text, "ask.py", "exec"), space)
    except OpfuseError as error:
        print(f"{type(error).__name__}: {error}")


@contextmanager
def _elsewhere() -> Iterator[Path]:
    """An empty directory, with a cache of kernels of its own; afterwards variables, arguments and traces are as before."""
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


def renewed(page: str) -> str:
    """The page with new answers; one that still agrees keeps the lines that it shows."""

    def asked(match: re.Match[str]) -> str:
        before, question = page[match.start() : match.start("answer")], _question(match)
        printed = answer(question, prelude(page))
        return f"{before}{question.answer if agrees(question.answer, printed) else printed}\n```"

    return _QUESTION.sub(asked, page)


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(renewed(document.read_text(encoding="utf-8")), encoding="utf-8")
