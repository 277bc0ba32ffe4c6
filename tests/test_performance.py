"""What was measured on a GPU is recorded in one form, and docs/performance.md is that record."""

from __future__ import annotations

import json

import pytest

from benchmarks import grouped, record
from docs import performance

RECORD = json.loads(performance.RECORD.read_text(encoding="utf-8"))
FIGURES = {(figure["script"], figure["name"], figure["unit"]): figure for figure in RECORD["results"]}


def test_the_page_is_the_record() -> None:
    assert performance.DOCUMENT.read_text(encoding="utf-8") == performance.document(RECORD), "run `python -m docs.performance`"


def test_a_record_says_what_of_which_code_and_machine() -> None:
    assert RECORD.keys() == {"date", "versions", "kernels_digest", "script", "results"}
    assert {"device", "opfuse", "torch", "cupy"} <= RECORD["versions"].keys()
    assert len(RECORD["kernels_digest"]) == 64
    for figure in RECORD["results"]:
        assert figure.keys() == {"name", "value", "unit", "limit", "met", "script"}
        assert (figure["limit"] is None) == (figure["met"] is None)


def test_every_script_was_run_and_every_limit_measured() -> None:
    assert {script for script, *_ in FIGURES} == set(record.SCRIPTS)
    measured = {(name, unit) for _, name, unit in FIGURES}
    assert {(name + performance.LARGE, "% of copy") for name in record.LEAST} <= measured
    assert {(name + performance.SMALL, "us") for name in record.MOST} <= measured


@pytest.mark.row("D10")
def test_d10_the_shapes_of_mixtures_of_experts_are_in_the_record_under_every_override() -> None:
    names = {name for script, name, _ in FIGURES if script == "grouped"}
    for groups in grouped.GROUPS:
        for rows in grouped.ROWS:
            for override in grouped.OVERRIDES:
                for what in grouped.PRODUCTS:
                    assert f"{groups} x {rows // groups} rows, fp8_block, {override}, {what}" in names
