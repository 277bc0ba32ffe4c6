"""``opfuse kernels`` from the command line."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from opfuse.cli import kernels, main
from opfuse.kernels.engine import compiling
from opfuse.kernels.engine.bindings import SOURCES
from opfuse.kernels.engine.compiling import Variant, assemble
from opfuse.kernels.engine.cubins import ENVIRONMENT, FACTS, CubinCache, location
from tests.kernels.catalogue import CASES
from tests.processes import ran


def test_every_kernel_is_listed_with_its_definition(tmp_path: Path) -> None:
    """In a process that has imported the command alone, as a shell has."""
    program = 'import runpy; runpy.run_module("opfuse", run_name="__main__")'
    done = ran(program, "kernels", "--json", env={**os.environ, ENVIRONMENT: str(tmp_path)})
    rows = {row["kernel"]: row for row in json.loads(done.stdout)["kernels"]}
    assert [*rows] == [kernel.name for kernel in CASES]
    assert all((SOURCES / row["source"]).is_file() for row in rows.values())
    amax = {"source": "amax.cu", "definition": "opfuse.numerics.casts.tensor_amax", "tolerance": "bitwise"}
    assert rows["tensor_amax"] == {"kernel": "tensor_amax", **amax, "compiled": 0, "registers": None, "spills": None}


def test_the_table_says_what_this_machine_has_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The largest of the variants that are intact and of these sources."""
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path))
    cache, text = CubinCache(location()), assemble(Variant("amax.cu", ("IN=float",)))
    for key, registers in (("a", 40), ("b", 56), ("c", 255)):
        cache.store(key * 64, key.encode())
        cache.store(key * 64, json.dumps({"amax": {"registers": registers, "spills": 8, "shared": 0}}).encode(), FACTS)
        cache.store_source(key * 64, text if key != "c" else text.replace("larger", "smaller", 1))
    assert main(["kernels"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == [*kernels.COLUMNS]
    assert [row.split()[0] for row in rows] == [kernel.name for kernel in CASES]
    assert [row.split()[4:] for row in rows if row.startswith("tensor_amax ")] == [["2", "56", "8"]]


def test_a_cache_of_somebody_else_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path))
    location().mkdir(mode=0o700)
    location().chmod(0o777)
    assert main(["kernels"]) == 0
    printed = capsys.readouterr()
    assert "wants a directory of mode 0700" in printed.err
    assert len(printed.out.splitlines()) == 1 + len(CASES)


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
