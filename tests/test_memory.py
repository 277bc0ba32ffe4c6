"""benchmarks/memory.py: what is saved is what the formats say, to the byte."""

from __future__ import annotations

import sys

import pytest
import torch

import opfuse
from benchmarks import memory
from benchmarks.memory import MIB, PIPELINES, Sizes

SIZES = Sizes(96, 160, 288)
"""Fills neither blocks of 128 nor tiles of scales."""


@pytest.mark.row("B31")
def test_b31_every_pipeline_recipe_and_override_saves_what_the_formula_says() -> None:
    rows = list(memory.measure(SIZES, "cpu"))
    assert len(rows) == len(PIPELINES) * 14
    assert [row.name for row in rows if row.saved != row.formula] == []
    assert {row.of_bf16 for row in rows if row.override == "high_precision" or row.kind == "none"} == {1.0}


@pytest.mark.row("B31")
def test_b31_the_inspector_counts_the_same() -> None:
    model = PIPELINES["B"].fused(SIZES).bfloat16()
    x = torch.randn(SIZES.tokens, SIZES.hidden, dtype=torch.bfloat16, requires_grad=True)
    for _, _, recipe in memory.settings():
        with memory.active(recipe):
            assert opfuse.saved(model, x).totals.own == memory.saved_bytes(model, x, recipe)


def test_records_have_a_limit_that_is_met() -> None:
    records = list(memory.records(SIZES, "cpu"))
    saved = [record for record in records if record["unit"] == "MiB"]
    assert all(record.keys() == {"name", "value", "unit", "limit", "met"} for record in records)
    assert all(record["met"] for record in saved)
    assert saved[0]["value"] * MIB == 2 * 2 * SIZES.tokens * SIZES.ffn
    assert len({(record["name"], record["unit"]) for record in records}) == len(records)


def test_the_table_marks_what_is_not_the_formula(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["memory.py", *(f"--{name}={value}" for name, value in SIZES._asdict().items())])
    memory.main()
    right = capsys.readouterr().out
    monkeypatch.setattr(memory, "saved_bytes", lambda model, x, recipe: 1)
    memory.main()
    wrong = capsys.readouterr().out
    assert "NOT" not in right
    assert wrong.count("NOT THE FORMULA") == len(PIPELINES) * 14
