"""benchmarks/memory.py: what is saved is what the formats say, to the byte."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

import opfuse
from benchmarks import memory
from benchmarks.memory import MIB, PIPELINES, Sizes
from docs import performance
from opfuse import recipes

SIZES = Sizes(96, 160, 288)
"""Fills neither blocks of 128 nor tiles of scales."""

STACKED = SIZES._replace(hidden=128)


COUNT = len(PIPELINES) * (14 + 2 * 5)
"""Rows: every recipe under every override, and every one under both values of ``keep``."""


@pytest.fixture(scope="module")
def rows() -> list[memory.Row]:
    return list(memory.measure(SIZES, "cpu"))


@pytest.fixture(scope="module")
def stacks() -> list[memory.Stack]:
    return list(memory.stacks(STACKED, "cpu", 2))


@pytest.mark.row("B35")
def test_b35_layers_save_less_the_more_is_made_anew(stacks: list[memory.Stack]) -> None:
    """Each layer as much as the first, whose input is the caller's; torch's layers in bf16 most."""
    torchs, *others = stacks
    for whole, recomputed, quantized in zip(*[iter(others)] * 3, strict=True):
        assert [whole.keep, recomputed.keep, quantized.keep] == [None, "recompute", "quantized"]
        assert torchs.saved > whole.saved > recomputed.saved > quantized.saved
        inputs = [2 * STACKED.ffn, STACKED.hidden, STACKED.hidden] * 2  # of activations and norms
        codes = sum(memory.plane_bytes("fp8_block", STACKED.tokens, each, rowwise=True, weight=False) for each in inputs)
        plain = 2 * STACKED.tokens * (sum(inputs) - STACKED.hidden)  # the first norm's input is the caller's in any case
        assert recomputed.saved - quantized.saved == pytest.approx(plain - codes, rel=0.01)


@pytest.mark.row("B31", "B35")
def test_b31_b35_every_pipeline_recipe_and_override_saves_what_the_formula_says(rows: list[memory.Row]) -> None:
    assert len(rows) == COUNT
    assert [row.name for row in rows if row.saved != row.formula] == []
    assert all(100 * row.of_bf16 <= row.most for row in rows if row.most is not None)
    plain = [row for row in rows if row.kind == "none" or (row.override == "high_precision" and row.pipeline == "A")]
    assert {row.of_bf16 for row in plain} == {1.0}


@pytest.mark.row("B31")
def test_b31_the_inspector_counts_the_same() -> None:
    model = PIPELINES["B"].fused(SIZES).bfloat16()
    x = torch.randn(SIZES.tokens, SIZES.hidden, dtype=torch.bfloat16, requires_grad=True)
    for *_, recipe in memory.kept_settings():
        with memory.active(recipe):
            assert opfuse.saved(model, x).totals.own == memory.saved_bytes(model, x, recipe)


def test_records_have_a_limit_that_is_met(
    rows: list[memory.Row], stacks: list[memory.Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = [stack._replace(peak=stack.saved + MIB) for stack in stacks]
    monkeypatch.setattr(memory, "measure", lambda sizes, device: iter(rows))
    monkeypatch.setattr(memory, "stacks", lambda sizes, device: iter(measured))
    records = list(memory.records(SIZES, "cpu"))
    assert all(record.keys() == {"name", "value", "unit", "limit", "met"} for record in records)
    assert len({(record["name"], record["unit"]) for record in records}) == len(records)
    saved = [record for record in records if record["unit"] == "MiB" and "decoder" not in record["name"]]
    assert all(record["met"] for record in saved)
    assert saved[0]["value"] * MIB == 2 * 2 * SIZES.tokens * SIZES.ffn
    peaks = [record for record in records if record["name"].endswith("peak") and record["unit"] == "% of bf16"]
    assert [record["limit"] for record in peaks] == [None] + [None, *memory.MOST_OF_LAYERS.values()] * 2
    page = performance.memory({"results": [{**record, "script": "memory"} for record in records]})
    assert f"{peaks[-1]['value']:.1f} ({memory.MOST_OF_LAYERS['quantized']:.1f})" in page.splitlines()[-1].replace("*", "")


def test_the_table_marks_what_is_not_the_formula(
    rows: list[memory.Row],
    stacks: list[memory.Stack],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(memory, "measure", lambda sizes, device: iter(rows))
    monkeypatch.setattr(memory, "stacks", lambda sizes, device: iter(stacks))
    monkeypatch.setattr(sys, "argv", ["memory.py", *(f"--{name}={value}" for name, value in SIZES._asdict().items())])
    memory.main()
    right = capsys.readouterr().out
    monkeypatch.setattr(memory, "measure", lambda sizes, device: (replace(row, saved=1) for row in rows))
    memory.main()
    wrong = capsys.readouterr().out
    assert "NOT" not in right
    assert all(stack.name in right for stack in stacks)
    assert wrong.count("NOT THE FORMULA") == COUNT


def peak_of(step: Callable[[], object]) -> int:
    """The most bytes that a step allocates at a time."""
    gc.collect()  # garbage of other tests that is freed inside would count as less
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.parametrize("recipe", [None, recipes.MXFP8BlockScaling(), recipes.NVFP4BlockScaling()], ids=str)
def test_steps_that_are_recorded_take_no_more_memory_than_the_first(recipe: recipes.Recipe | None) -> None:
    """The second step records forward passes and the third backward passes; from the fourth on both are repeated."""
    model, x = PIPELINES["A"].fused(SIZES).bfloat16(), torch.randn(SIZES.tokens, SIZES.hidden).bfloat16()

    def step() -> None:
        with memory.active(recipe):
            model(x).sum().backward()

    first, *recorded, repeated = [peak_of(step) for _ in range(4)]
    assert max(recorded) <= 1.02 * first
    assert repeated <= first
