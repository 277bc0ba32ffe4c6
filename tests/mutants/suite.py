"""Runs tests of this repository in forked children of one process that has imported what they need, but nothing of opfuse.

A child imports opfuse by itself, so that a mutated module is what every other module sees; that takes a second or two, where a
fresh interpreter takes five. What a child found comes back as JSON in a file. Its processor time is limited rather than its wall
time, so that a busy machine fails no test. What it writes is dropped, unless the variable ``MUTANTS_LOG`` names a file.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
WARM = (
    *("torch", "torch.utils.checkpoint", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.testing"),
    *("pytest", "hypothesis", "hypothesis.strategies", "numpy", "networkx", "pydantic", "ruamel.yaml", "typer", "typer.testing"),
    *("rich.console", "platformdirs", "gfloat", "ml_dtypes"),
)
MEMORY = 12 << 30
"""Bytes that a child may hold: a mutated loop that appends for ever ends here."""
WALL = 8
"""A child may take this many times its processor time, plus a minute, before it counts as hanging."""
TICK = 0.02


@functools.cache
def warm() -> None:
    """Import what tests import, once, so that forked children share it."""
    for name in WARM:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


@dataclass
class Job:
    """What a child does: ``work`` gives something JSON can write. ``seconds``: processor time that it may take."""

    name: Any
    work: Callable[[], Any]
    seconds: float


@dataclass
class Child:
    """A job that runs, and where its answer will stand."""

    job: Job
    pid: int
    answer: Path
    started: float = field(default_factory=time.monotonic)

    @property
    def late(self) -> bool:
        return time.monotonic() - self.started > WALL * self.job.seconds + 60


def each(jobs: Iterator[Job], workers: int) -> Iterator[tuple[Job, Any]]:
    """Jobs and their answers as they end, ``workers`` at a time; the answer is None where a child was stopped or died."""
    running: list[Child] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            waiting, number = True, 0
            while waiting or running:
                while waiting and len(running) < workers:
                    if (job := next(jobs, None)) is None:
                        waiting = False
                        break
                    number += 1
                    warm()
                    running.append(_start(job, Path(folder) / str(number)))
                for child in [child for child in running if _ended(child)]:
                    running.remove(child)
                    text = child.answer.read_text() if child.answer.exists() else "null"
                    yield child.job, json.loads(text)
                time.sleep(TICK)
        finally:
            for child in running:
                _stop(child)


def _start(job: Job, answer: Path) -> Child:
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return Child(job, pid, answer)
    code = 1
    try:
        os.setsid()
        quiet = os.open(os.environ.get("MUTANTS_LOG", os.devnull), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        limit = int(time.process_time() + job.seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        found = json.dumps(job.work())
        answer.with_suffix(".part").write_text(found)
        answer.with_suffix(".part").replace(answer)
        code = 0
    finally:
        os._exit(code)


def _ended(child: Child) -> bool:
    if child.late:
        _stop(child)
        return True
    return os.waitpid(child.pid, os.WNOHANG)[0] != 0


def _stop(child: Child) -> None:
    """End a child and the processes that its tests started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child.pid, 0)


def files() -> list[Path]:
    """Test files that can reach the mutated packages without a GPU."""
    folders = {TESTS / "gpu", TESTS / "kernels", TESTS / "numerics", TESTS / "mutants"}
    return [path for path in sorted(TESTS.rglob("test_*.py")) if not folders.intersection(path.parents)]


class Chosen:
    """A plugin of pytest: only these tests, in this order; remembers what became of each and how long it took."""

    def __init__(self, order: Sequence[str] | None = None, limits: Mapping[str, float] | None = None):
        """limits: seconds of processor time that each test may take before its process ends."""
        self.limits = limits or {}
        self.order = None if order is None else {name: place for place, name in enumerate(order)}
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []
        self.passed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.order is not None:
            items[:] = sorted((item for item in items if item.nodeid in self.order), key=lambda item: self.order[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        signal.setitimer(signal.ITIMER_PROF, self.limits.get(nodeid, 0.0))

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.passed and report.when == "call":
            self.passed.append(report.nodeid)


def run(paths: Sequence[Path | str], plugin: Chosen, *options: str) -> int:
    """pytest's exit status over these files, in this process."""
    import hypothesis
    import pytest

    os.chdir(ROOT)
    hypothesis.settings.register_profile("mutants", deadline=None, derandomize=True, database=None)
    arguments = ["-p", "no:cacheprovider", "-p", "no:xdist", "-q", "--tb=line", "--rootdir", str(ROOT), *options]
    arguments += ["--hypothesis-profile", "mutants"]  # conftest.py has loaded that of the suite by then
    return int(pytest.main([*arguments, *map(str, paths)], plugins=[plugin]))


IMPORTED = ""
"""Stands for a test among those that ran a line, if it ran while modules were imported."""


@dataclass(frozen=True)
class Coverage:
    """``lines[file][line]``: tests that ran the line, or ``IMPORTED``. ``seconds``: what each test takes."""

    lines: Mapping[str, Mapping[int, frozenset[str]]]
    seconds: Mapping[str, float]

    def tests(self, file: str, span: Sequence[int] | None) -> list[str]:
        """Tests that ran one of these lines of ``file``, or any line for None, and for what is run by imports alone: of each
        test its fastest case first."""
        ran = self.lines.get(file, {})
        found = frozenset().union(*(ran.get(line, frozenset()) for line in (ran if span is None else span)))
        if found == {IMPORTED}:
            found = frozenset().union(*ran.values())
        found -= {IMPORTED}
        fastest: list[str] = []
        others: list[str] = []
        seen: set[str] = set()
        for test in sorted(found, key=lambda name: (self.seconds[name], name)):
            function = test.split("[", 1)[0]
            (others if function in seen else fastest).append(test)
            seen.add(function)
        return fastest + others


def measured(path: Path, files: Sequence[str]) -> dict[str, Any]:
    """Of the tests of one file that pass: seconds, and the lines of ``files`` that each ran. RuntimeError for a file that pytest
    cannot read."""
    os.environ["COVERAGE_CORE"] = "ctrace"
    import coverage

    measuring = coverage.Coverage(data_file=None, include=[str(ROOT / file) for file in files], config_file=False)

    class Contexts(Chosen):
        def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
            measuring.switch_context(nodeid)

        def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
            measuring.switch_context(IMPORTED)

    plugin = Contexts()
    measuring.start()
    code = run([path], plugin)
    measuring.stop()
    if code not in (0, 1, 5):  # passed, failed, no tests: else the file could not be read
        raise RuntimeError(f"pytest ended with {code}")
    data, passed = measuring.get_data(), set(plugin.passed) - set(plugin.failed)
    found: dict[str, dict[str, list[int]]] = {test: {} for test in (IMPORTED, *passed)}
    for file in data.measured_files():
        name = str(Path(file).relative_to(ROOT))
        for line, contexts in data.contexts_by_lineno(file).items():
            for test in found.keys() & contexts:
                found[test].setdefault(name, []).append(line)
    return {"seconds": {test: plugin.seconds[test] for test in passed}, "lines": found, "failed": plugin.failed}
