"""``opfuse kernels`` from the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from opfuse.cli import kernels, main
from opfuse.errors import UnsupportedError
from opfuse.kernels.engine import compiling
from opfuse.kernels.engine.bindings import SOURCES
from opfuse.kernels.engine.cubins import ENVIRONMENT

SHOWN = ("tensor_amax", "line_amaxes")
"""Kernels of few variants: the compiler is asked for all of them in tests/kernels."""


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And a cache of compiled kernels that is empty."""
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path))
    monkeypatch.setattr(kernels, "CASES", {kernel: cases for kernel, cases in kernels.CASES.items() if kernel.name in SHOWN})


@pytest.mark.usefixtures("few")
def test_kernels_are_listed_with_what_the_compiler_made_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["kernels"]
    assert {row["kernel"] for row in rows} == set(SHOWN)
    for row in rows:
        assert (SOURCES / row["source"]).is_file()
        assert 0 < row["registers"] <= 255
        assert row["spills"] == 0
        assert row["tolerance"] == "bitwise"
        assert row["variants"] > 1


@pytest.mark.usefixtures("few")
def test_the_second_listing_compiles_and_tries_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["kernels", "--json"]) == 0
    first = capsys.readouterr().out
    monkeypatch.setattr(compiling, "compile_text", None)
    with monkeypatch.context() as listing:
        listing.setattr(kernels.Kernel, "launches", None)
        assert main(["kernels", "--json"]) == 0
        assert capsys.readouterr().out == first
    one = next(iter(kernels.CASES))
    monkeypatch.setattr(kernels, "CASES", {one: kernels.CASES[one]})
    assert main(["kernels", "--json"]) == 0  # other rows, of variants that are known
    rows = json.loads(capsys.readouterr().out)["kernels"]
    assert rows == [row for row in json.loads(first)["kernels"] if row["kernel"] == one.name]


@pytest.mark.usefixtures("few")
def test_without_a_compiler_the_rest_is_still_listed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise UnsupportedError("no compiler")

    monkeypatch.setattr(compiling, "nvrtc", missing)
    assert main(["kernels"]) == 0
    printed = capsys.readouterr()
    assert any(line.startswith("tensor_amax") and line.rstrip().endswith("-") for line in printed.out.splitlines())
    told = printed.err.splitlines()
    assert told[0] == "no compiler"
    assert told[1:3] == ["kernels whose cases were run 1/2", "kernels whose cases were run 2/2"]
    assert told[-1].startswith("variants found or compiled ")


def test_digest_is_the_last_line_and_compiles_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "compile_text", None)
    assert main(["kernels", "--digest"]) == 0
    assert re.fullmatch("[0-9a-f]{64}", capsys.readouterr().out.splitlines()[-1])


def test_digest_follows_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    before = kernels.sources_digest()
    assert kernels.sources_digest() == before
    monkeypatch.setattr("opfuse.kernels.engine.sources.SOURCES", SOURCES.parent / "cuda" / "cuda")
    assert kernels.sources_digest() != before


@pytest.mark.usefixtures("few")
def test_an_architecture_that_is_not_known_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--arch", "sm_1"]) == 1
    assert "sm_1" in capsys.readouterr().err
