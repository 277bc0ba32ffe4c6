"""How long docs/questions.md takes to answer: ``python -m docs.questions_timed [WORDS]``, all or those with these words.

Each question is asked in a process that has imported torch and nothing else: a command where nothing of opfuse is loaded yet, as from
a shell, a call where its case was planted. Seconds of the processor tell more than the clock where others compute, too.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from docs.questions_asked import QUESTIONS, Question
from docs.questions_cases import PRELUDE

VARIABLES = "variables.json"


class Took(NamedTuple):
    """Seconds of the processor to import what answers, and to answer; and of the clock to answer."""

    imports: float
    answer: float
    clock: float


def timed(question: Question) -> Took:
    """How long it takes."""
    with tempfile.TemporaryDirectory() as place:
        if not question.ask.startswith("opfuse "):
            return Took(*_forked(_called, question, place))
        _forked(_plant, question, place)
        return Took(*_forked(_commanded, question, place))


def _forked(function: Callable[[Question], Any], question: Question, place: str) -> Any:
    """What ``function`` returns in a copy of this process, quietly."""
    ours, theirs = mp.Pipe(duplex=False)

    def run(answer: Connection) -> None:
        os.chdir(place)
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            answer.send(function(question))

    process = mp.get_context("fork").Process(target=run, args=(theirs,))
    process.start()
    theirs.close()
    found = ours.recv()
    process.join()
    return found


def _plant(question: Question) -> None:
    _planted(question)


def _planted(question: Question) -> dict[str, Any]:
    os.environ["OPFUSE_CACHE_DIR"] = "kept"
    sys.argv = ["train.py"]
    torch.manual_seed(0)
    space: dict[str, Any] = {}
    exec(PRELUDE + question.plant, space)
    Path(VARIABLES).write_text(json.dumps(dict(os.environ)))
    return space


def _called(question: Question) -> Took:
    space = _planted(question)
    return _clocked(lambda: exec(question.ask, space))


def _commanded(question: Question) -> Took:
    os.environ |= json.loads(Path(VARIABLES).read_text())
    command, *rest = shlex.split(os.path.expandvars(question.ask))[1:]
    start = time.process_time()
    import_module(f"opfuse.cli.{command}")
    torch.empty(1, device="meta") + 1  # imports sympy, as does whatever has torch compute shapes alone
    if "--localize" in rest:
        import_module("torch._dynamo")  # by the optimizers of torch, as in any training
    imports = time.process_time() - start
    main = import_module("opfuse.cli.app").main
    return _clocked(lambda: main([command, *rest]))._replace(imports=imports)


def _clocked(ask: Callable[[], object]) -> Took:
    start, clock = time.process_time(), time.perf_counter()
    with suppress(Exception):  # the answer to some questions
        ask()
    return Took(0.0, time.process_time() - start, time.perf_counter() - clock)


def main(words: str) -> None:
    """Print the seconds of each question with these words in its title, the slowest first."""
    print("imports  answer   clock")
    asked = [question for question in QUESTIONS if words in question.title]
    for took, title in sorted(((timed(question), question.title) for question in asked), key=lambda pair: -pair[0].answer):
        print(f"{took.imports:5.2f} s {took.answer:5.2f} s {took.clock:5.2f} s  {title}")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
