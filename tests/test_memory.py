"""benchmarks/memory.py: what is saved is what the formats say, to the byte."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

import opfuse
from benchmarks import memory
from benchmarks.memory import MIB, PIPELINES, Sizes

SIZES = Sizes(96, 160, 288)
"""Fills neither blocks of 128 nor tiles of scales."""


COUNT = len(PIPELINES) * (14 + 2 * 5)
"""Rows: every recipe under every override, and every one under both values of ``keep``."""


@pytest.fixture(scope="module")
def rows() -> list[memory.Row]:
    return list(memory.measure(SIZES, "cpu"))


@pytest.mark.row("B31", "B35")
def test_b31_b35_every_pipeline_recipe_and_override_saves_what_the_formula_says(rows: list[memory.Row]) -> None:
    assert len(rows) == COUNT
    assert [row.name for row in rows if row.saved != row.formula] == []
    assert all(100 * row.of_bf16 <= row.most for row in rows if row.most is not None)
    assert {row.of_bf16 for row in rows if row.override == "high_precision" or row.kind == "none"} == {1.0}


@pytest.mark.row("B31")
def test_b31_the_inspector_counts_the_same() -> None:
    model = PIPELINES["B"].fused(SIZES).bfloat16()
    x = torch.randn(SIZES.tokens, SIZES.hidden, dtype=torch.bfloat16, requires_grad=True)
    for *_, recipe in memory.kept_settings():
        with memory.active(recipe):
            assert opfuse.saved(model, x).totals.own == memory.saved_bytes(model, x, recipe)


def test_records_have_a_limit_that_is_met(rows: list[memory.Row], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "measure", lambda sizes, device: iter(rows))
    records = list(memory.records(SIZES, "cpu"))
    saved = [record for record in records if record["unit"] == "MiB"]
    assert all(record.keys() == {"name", "value", "unit", "limit", "met"} for record in records)
    assert all(record["met"] for record in saved)
    assert saved[0]["value"] * MIB == 2 * 2 * SIZES.tokens * SIZES.ffn
    assert len({(record["name"], record["unit"]) for record in records}) == len(records)


def test_the_table_marks_what_is_not_the_formula(
    rows: list[memory.Row], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "measure", lambda sizes, device: iter(rows))
    monkeypatch.setattr(sys, "argv", ["memory.py", *(f"--{name}={value}" for name, value in SIZES._asdict().items())])
    memory.main()
    right = capsys.readouterr().out
    monkeypatch.setattr(memory, "measure", lambda sizes, device: (replace(row, saved=1) for row in rows))
    memory.main()
    wrong = capsys.readouterr().out
    assert "NOT" not in right
    assert wrong.count("NOT THE FORMULA") == COUNT
