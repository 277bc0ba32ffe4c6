"""The mutation run itself: what it changes, and that it tells a mutant that tests notice from one that they don't."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import hunt
from tests.mutants.operators import mutants

SAMPLE = "tests/mutants/sample"
FATES = {
    ("return value + value", "return None"): "killed",
    ("value + value", "value - value"): "killed",
    ("4", "5"): "killed",
    ("low > high", "low >= high"): "survived",
    ("low > high", "low <= high"): "killed",
    ("raise ValueError('low above high')", "pass"): "killed",
    ("value < low", "value <= low"): "survived",
    ("value < low", "value >= low"): "killed",
    ("return low", "return None"): "killed",
    ("value > high", "value >= high"): "killed",
    ("value -= 1", "pass"): "killed",
    ("return value", "return None"): "killed",
    ("value > LIMIT", "value >= LIMIT"): "uncovered",
    ("return value > LIMIT", "return None"): "uncovered",
}
"""What becomes of mutants of the sample: change and outcome. Without its ``value -= 1`` a loop never ends."""


def test_every_operator_changes_what_it_says(tmp_path: Path) -> None:
    source = '''
"""Wording."""
@decorated(1)
def f(a: Literal[1], b=2):
    """Wording."""
    if a < b and not a:
        raise ValueError(describe("x", wanted=1, got=b + 1, cure="y"))
    g(a, b, 3)
    self.x = a
    return a + b
'''
    (tmp_path / "m.py").write_text(source)
    found = mutants(tmp_path, "m.py")
    assert [(m.operator, m.before, m.after) for m in found] == [
        ("constant", "2", "3"),
        ("constant", "2", "1"),
        ("and/or", "a < b and (not a)", "a < b or not a"),
        ("comparison", "a < b", "a <= b"),
        ("comparison", "a < b", "a >= b"),
        ("removed not", "not a", "a"),
        ("removed raise", "raise ValueError(describe('x', wanted=1, got=b + 1, cure='y'))", "pass"),
        ("removed statement", "g(a, b, 3)", "pass"),
        ("swapped arguments", "g(a, b, 3)", "g(b, a, 3)"),
        ("constant", "3", "4"),
        ("constant", "3", "2"),
        ("removed statement", "self.x = a", "pass"),
        ("return None", "return a + b", "return None"),
        ("arithmetic", "a + b", "a - b"),
    ]
    assert [m.span for m in found if m.operator == "constant"][:2] == [None, None]
    assert [m.span for m in found if m.operator == "and/or"] == [(6,)]
    for mutant in found:
        assert ast.unparse(mutant.source(tmp_path)) != ast.unparse(ast.parse(source))


def test_the_same_seed_chooses_the_same_mutants() -> None:
    assert hunt.chosen(3, 20) == hunt.chosen(3, 40)[:20] != hunt.chosen(4, 20)
    assert {mutant.file.split("/")[1] for mutant in hunt.chosen(0, 200)} == {"compiler", "core", "inspect", "recipes", "runtime"}


def told_by(folder: Path, tests: str, *options: str) -> str:
    """What a run over the sample tells, which fails, as too many survive."""
    given = ["--packages", f"{SAMPLE}/clamp.py", "--tests", f"{SAMPLE}/{tests}", "--cache", str(folder), *options]
    command = [sys.executable, "-m", "tests.mutants", *given, "--out", str(folder / "report.json")]
    done = subprocess.run(command, cwd=hunt.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    return done.stderr


def run(folder: Path, *options: str) -> tuple[dict, str]:
    """The report of a run over the sample, and what it told."""
    told = told_by(folder, "check_clamp.py", *options)
    return json.loads((folder / "report.json").read_text()), told


def test_a_run_kills_reports_survivors_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("coverage")
    report, told = run(tmp_path, "--count", "1000", "--least", "2")
    fates = {(v["mutant"]["before"], v["mutant"]["after"]): v["state"] for v in report["verdicts"]}
    assert {change: fates[change] for change in FATES if change in fates} == {c: s for c, s in FATES.items() if c in fates}
    assert len(FATES.keys() & fates.keys()) >= len(FATES) - 1
    assert report["survived"] == sum(state != "killed" for state in fates.values())
    assert "left out, as they fail: tests/mutants/sample/check_clamp.py::test_that_fails_without_any_mutant" in told
    endless = next(v for v in report["verdicts"] if v["mutant"]["before"] == "value -= 1")
    assert endless["by"] == "timeout or crash"
    page = (tmp_path / "report.md").read_text()
    assert "`value < low` | `value <= low` | survived" in page
    again, told = run(tmp_path, "--count", "1000", "--least", "2")
    assert again == report
    assert f"{len(fates)} known from earlier runs" in told
    assert re.search(r"\b\d+/\d+ ", told.split("known from earlier runs")[1]) is None


def test_tests_that_cannot_be_read_end_the_run_and_leave_no_verdict(tmp_path: Path) -> None:
    pytest.importorskip("coverage")
    told = told_by(tmp_path, "check_broken.py", "--count", "3")
    assert "check_broken.py broke off" in told
    assert f"nothing is known of {SAMPLE}/check_broken.py; MUTANTS_LOG=FILE" in told
    assert not (tmp_path / "verdicts.jsonl").exists()


def test_the_page_speaks_of_lines_that_are_there() -> None:
    """Each row of its tables names files of the package, each followed by what stands in it."""
    page = (hunt.ROOT / "docs" / "mutants.md").read_text()
    rows = [line.split(" | ")[0] for line in page.splitlines() if re.match(r"\| `[a-z_/]+\.py`", line)]
    named = [re.findall(r"`([^`]+)`", part) for row in rows for part in row.split(";")]
    gone = [
        (file, name)
        for file, *names in named
        for name in names
        if not re.search(rf"\b{name}\b", (hunt.ROOT / "opfuse" / file).read_text())
    ]
    assert len(named) > 40
    assert gone == []
