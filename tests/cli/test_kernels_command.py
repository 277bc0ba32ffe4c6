"""``opfuse kernels`` from the command line."""

from __future__ import annotations

import json
import re

import pytest

from opfuse.cli import kernels, main
from opfuse.errors import UnsupportedError
from opfuse.kernels.launch import SOURCES


def test_every_kernel_is_listed_with_what_the_compiler_made_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["kernels"]
    assert {row["source"] for row in rows} == {path.name for path in SOURCES.glob("*.cu")}
    for row in rows:
        assert 0 < row["registers"] <= 255
        assert row["spills"] == 0
        assert row["tolerance"] == "bitwise"
        assert row["variants"] > 1
        assert row["cases"] > row["variants"] / 2


def test_digest_is_the_last_line_and_needs_no_compiler(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise UnsupportedError("no compiler")

    monkeypatch.setattr(kernels, "compile_text", missing)
    assert main(["kernels", "--digest"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert re.fullmatch("[0-9a-f]{64}", lines[-1])
    assert any(line.startswith("cast_current") and line.rstrip().endswith("-") for line in lines)
    assert printed.err == "no compiler\n"


def test_digest_follows_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    before = kernels.sources_digest()
    assert kernels.sources_digest() == before
    monkeypatch.setattr("opfuse.kernels.registry.SOURCES", SOURCES.parent / "cuda" / "cuda")
    assert kernels.sources_digest() != before


def test_an_architecture_that_is_not_known_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--arch", "sm_1"]) == 1
    assert "sm_1" in capsys.readouterr().err
