"""Every promise of docs/acceptance.md has a test that fails without it, and the document says which."""

from __future__ import annotations

import re

import pytest

from docs import acceptance

pytest_plugins = ["pytester"]
NAMED = re.compile(r"(?<![a-z0-9])([buhdx]\d\d)(?=_)")
"""Rows in the name of a test: ``test_b06_b22_...``."""


def every_test() -> list[tuple[str, str, tuple[str, ...]]]:
    """File, name and rows of every test."""
    paths = sorted(acceptance.TESTS.rglob("test_*.py"))
    return [(path.name, *test) for path in paths for test in acceptance.marked(path.read_text(encoding="utf-8"))]


def test_every_row_has_a_test() -> None:
    assert sorted(acceptance.ROWS.keys() - acceptance.proofs().keys() - acceptance.COMMANDS.keys() - acceptance.LATER) == []


def test_tests_name_known_rows_once_and_in_their_marker() -> None:
    for file, name, rows in every_test():
        assert set(rows) <= acceptance.ROWS.keys(), (file, name)
        assert len(set(rows)) == len(rows), (file, name)
        assert {row.upper() for row in NAMED.findall(name)} <= set(rows), (file, name)


def test_the_document_is_what_the_tests_say() -> None:
    assert acceptance.DOCUMENT.read_text(encoding="utf-8") == acceptance.document(), "run `python docs/acceptance.py`"


def test_a_marker_is_found_where_it_stands() -> None:
    source = "@pytest.mark.slow\n@pytest.mark.row('B01', 'X02')\ndef test_a(): ...\nclass T:\n  def test_b(self): ...\n"
    assert acceptance.marked(source) == [("test_a", ("B01", "X02")), ("test_b", ())]


def test_the_option_runs_the_tests_of_a_row(pytester: pytest.Pytester) -> None:
    pytester.makeconftest((acceptance.TESTS / "conftest.py").read_text(encoding="utf-8"))
    rows = {"one": ["B01"], "both": ["B01", "B02"], "other": ["B02"]}
    bodies = [f"@pytest.mark.row(*{rows[name]})\ndef test_{name}(): pass" for name in rows]
    pytester.makepyfile("\n".join(["import pytest", *bodies, "def test_none(): pass"]))
    for options, passed in ((["--row", "b01"], 2), (["--row", "B01", "--row", "B02"], 3), ([], 4), (["--row", "B03"], 0)):
        pytester.runpytest_inprocess("-p", "no:cacheprovider", *options).assert_outcomes(passed=passed, deselected=4 - passed)


def test_the_option_makes_tensors_on_a_device(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the option in a process of its own, since the default device is one of the process."""
    monkeypatch.setenv("PYTHONPATH", str(acceptance.TESTS.parent))
    pytester.makeconftest((acceptance.TESTS / "conftest.py").read_text(encoding="utf-8"))
    body = "import pytest, torch\nMADE = torch.ones(2)\n"
    body += "def test_made():\n    assert MADE.device == torch.nn.Linear(2, 2).weight.device == torch.get_default_device()\n"
    body += "@pytest.mark.cpu\ndef test_cpu():\n    assert MADE.device.type == 'cpu'\n"
    pytester.makepyfile(body)
    pytester.runpytest_subprocess("--device", "meta").assert_outcomes(passed=1, deselected=1)
    pytester.runpytest_inprocess().assert_outcomes(passed=2)
