"""``opfuse kernels`` from the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from opfuse.cli import kernels, main
from opfuse.kernels.engine import compiling
from opfuse.kernels.engine.bindings import SOURCES
from tests.kernels.catalogue import CASES


def test_every_kernel_is_listed_with_its_definition() -> None:
    """In a process that has imported the command alone, as a shell has."""
    command = [sys.executable, "-m", "opfuse", "kernels", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = {row["kernel"]: row for row in json.loads(done.stdout)["kernels"]}
    assert [*rows] == [kernel.name for kernel in CASES]
    assert all((SOURCES / row["source"]).is_file() for row in rows.values())
    amax = {"source": "amax.cu", "definition": "opfuse.numerics.casts.tensor_amax", "tolerance": "bitwise"}
    assert rows["tensor_amax"] == {"kernel": "tensor_amax", **amax}


def test_the_table_has_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == [*kernels.COLUMNS]
    assert [row.split()[0] for row in rows] == [kernel.name for kernel in CASES]


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
