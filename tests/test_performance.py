"""What was measured on a GPU is recorded in one form, and docs/performance.md is that record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import calls, chained, compiling, distributed, experts, grouped, host, products, record, stamp
from docs import performance
from opfuse.kernels.engine.bindings import SOURCES

FILES = (performance.RECORD, performance.RANKS, performance.H100)
RECORD, RANKS, H100 = (json.loads(file.read_text(encoding="utf-8")) for file in FILES)
FIGURES = {(figure["script"], figure["name"], figure["unit"]): figure for figure in RECORD["results"]}


MOMENT = {"date", "kernels_digest", "package_digest"}


def test_the_page_is_the_record() -> None:
    page = performance.DOCUMENT.read_text(encoding="utf-8")
    today = performance.digest_of(page)
    assert len(today) == performance.SHOWN
    runs = performance.pretraining.record()
    assert page == performance.document(RECORD, RANKS, H100, today, runs=runs), "run `python -m docs.performance`"


def test_a_record_says_what_of_which_code_and_machine() -> None:
    assert RECORD.keys() == {"versions", "script", "tests", "measured", "results"}
    assert RECORD["measured"].keys() == {script for script, *_ in FIGURES}
    assert RANKS.keys() == RECORD.keys() - {"measured"} | MOMENT | {"ranks"}
    assert RECORD["tests"].keys() == MOMENT | {"passed", "failed", "skipped"}
    assert {"nccl", "torchao"} <= RANKS["versions"].keys()
    for found in (RECORD, RANKS):
        assert {"device", "opfuse", "torch", "cupy"} <= found["versions"].keys()
        assert found["tests"]["passed"] > 0
        assert found["tests"]["failed"] == 0
        for figure in found["results"]:
            assert figure.keys() == {"name", "value", "unit", "limit", "met", "script"}
            assert (figure["limit"] is None) == (figure["met"] is None)
    for moment in (RANKS, RECORD["tests"], *RECORD["measured"].values()):
        assert {len(moment[digest]) for digest in MOMENT - {"date"}} == {64}


def test_the_record_of_several_gpus_has_every_variant_and_meets_its_limits() -> None:
    """A peer that the machine lacks is left out, as the versions say."""
    mixtures = {f"{shape.label}, {name}" for shape in (experts.QWEN, experts.MIXTRAL) for name in experts.VARIANTS}
    there = {name for name in distributed.VARIANTS if "torchao" not in name or RANKS["versions"]["torchao"] != "none"}
    assert {figure["name"] for figure in RANKS["results"]} == there | mixtures
    assert all(figure["met"] is not False for figure in RANKS["results"])


def test_the_registers_of_every_kernel_are_in_the_record() -> None:
    named = {name.split(", ")[0] for script, name, _ in FIGURES if script == "registers"}
    sources = {path.name for path in SOURCES.glob("*.cu")}
    assert named == sources


def test_every_script_was_run_and_every_limit_measured() -> None:
    assert {script for script, *_ in FIGURES} == set(record.SCRIPTS)
    measured = {(name, unit) for _, name, unit in FIGURES}
    assert {(name + performance.LARGE, "% of copy") for name in record.LEAST} <= measured
    assert {(name + performance.SMALL, "us") for name in record.MOST} <= measured
    limits = {(name, unit): figure["limit"] for (_, name, unit), figure in FIGURES.items()}
    wanted = dict(_limits_of_the_host())
    assert {key: limits.get(key) for key in wanted} == wanted


def _limits_of_the_host() -> Iterator[tuple[tuple[str, str], float]]:
    """Name and unit of each figure, and its limit."""
    small, large = f"host, A {calls.SMALL}x{calls.SMALL}", calls.DECODER
    layers = f"host, decoder of {calls.LAYERS} layers {large.tokens}x{large.hidden}"
    for what, most in calls.MOST_HOST.items():
        for name, limit in most.items():
            yield (f"{small}, {name}, {what}", f"x {calls.EAGER}"), limit
            yield (f"{small}, {name}, {what}", "Python calls"), calls.MOST_CALLS[what]
    for name, limit in calls.MOST_WALL.items():
        yield (f"{layers}, {name}, step, wall", f"x {calls.EAGER}"), limit
    for cache, limit in compiling.MOST_FIRST.items():
        for kind in compiling.KINDS:
            yield (f"first training step, {cache}, B {compiling.SIZE}x{compiling.SIZE}, {kind}", "ms"), limit


def test_the_time_of_plans_is_recorded_with_its_limit() -> None:
    """On a CPU; what a program of them takes grows with its ops, too, and has no limit."""
    measured = json.loads((performance.RECORD.parent / "host_cpu.json").read_text(encoding="utf-8"))
    for row, size in zip(measured["planning"], host.SIZES, strict=True):
        limit = host.MOST_PLANNING.get(size)
        assert (row["limit"], row["met"]) == (limit, limit and row["ms"] <= limit)


@pytest.mark.row("D10")
def test_d10_the_shapes_of_mixtures_of_experts_are_in_the_record_under_every_override() -> None:
    names = {name for script, name, _ in FIGURES if script == "grouped"}
    for groups in grouped.GROUPS:
        for rows in grouped.ROWS:
            for override in grouped.OVERRIDES:
                for what in grouped.PRODUCTS:
                    assert f"{groups} x {rows // groups} rows, fp8_block, {override}, {what}" in names


def test_the_page_has_the_own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [
        {"kind": kind, "problem": "8x16x32", "own": 990.0, "library": 1000.0, "ratio": 0.99, "least": 0.98}
        for kind in products.KINDS
    ]
    one = [{"chain": name, "problem": "8x16x32", "one": 1.0, "ratio": 1.1, "least": 1.05} for name in chained.CHAINS]
    cool = {"problem": "8x16x32", "state": "cool", "ratio": 1.01, "least": 1.0}
    own, launch = {**cool, "kind": next(iter(products.KINDS)), "own": 1490.0}, {**cool, "chain": chained.LIMITED, "one": 0.9}
    monkeypatch.setattr(products, "measure", lambda _: iter(plain))
    experts = {"kind": products.FORWARD, "problem": "4 experts of 16", "rows": 16, "own": 101.0, "ratio": 2.0, "peer": 0.98}
    beside = {"kind": products.FORWARD, "problem": "8x16x32", "state": " alone", "ratio": 0.975}
    monkeypatch.setattr(products, "in_states", lambda _: iter([own]))
    monkeypatch.setattr(products, "of_experts", lambda _: iter([experts]))
    monkeypatch.setattr(products, "beside_peer", lambda _: iter([beside]))
    monkeypatch.setattr(chained, "in_states", lambda _: iter([launch]))
    monkeypatch.setattr(chained, "measure", lambda _: iter(one))
    scripts = {"products": products.records, "chained": chained.records}
    made = [{**figure, "script": script} for script, records in scripts.items() for figure in records()]
    assert {figure["met"] for figure in made} == {None, True}
    (_, text), (_, together) = performance.sections({"results": made, "measured": dict.fromkeys(scripts, stamp.moment())}, "")
    assert "990 TFLOP/s; 0.99 (0.98) x cuBLASLt" in text
    assert "0.99 (0.92) x cuBLASLt 1x128 by 128x128" in text
    assert "1490 TFLOP/s cool; 1.01 (1.00) x cuBLASLt cool" in text
    assert "101 (100) TFLOP/s; 2.00 x torch bf16; 0.98 (0.97) x DeepGEMM" in text
    assert "0.97 (0.97) x DeepGEMM alone" in text
    assert "1.10 (1.05) x apart; 1 us cool; 1.01 (1.00) x apart cool" in together


REPORT = '<testsuites><testsuite tests="{0}" failures="{1}" errors="{2}" skipped="{3}"/></testsuites>'


def test_a_record_counts_the_tests_of_all_reports(tmp_path: Path) -> None:
    reports = [tmp_path / "fast.xml", tmp_path / "slow.xml"]
    for report, numbers in zip(reports, [(100, 1, 2, 4), (10, 0, 0, 0)]):
        report.write_text(REPORT.format(*numbers))
    assert record.counts(reports) == {"passed": 103, "failed": 3, "skipped": 4}


def test_a_script_that_runs_again_leaves_the_others_their_figures_and_their_code(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = {"name": "copy", "value": 1.0, "unit": "us", "limit": None, "met": None}
    old, new = ({"date": date, "kernels_digest": "", "package_digest": ""} for date in ("2026-01-01", "2026-01-02"))
    whole = {"results": [{**figure, "script": each} for each in ("casts", "norms")], "measured": {"casts": old, "norms": old}}
    monkeypatch.setattr(record, "moment", lambda: new)
    record.add(whole, "casts", [{**figure, "value": 2.0}])
    assert [(each["script"], each["value"]) for each in whole["results"]] == [("casts", 2.0), ("norms", 1.0)]
    assert whole["measured"] == {"casts": new, "norms": old}


def test_figures_of_another_machine_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "versions", lambda: {"device": "this"})
    file = tmp_path / "device.json"
    assert record.earlier(file) == {}
    for device in ("this", "another"):
        file.write_text(json.dumps({"versions": {"device": device}}))
        assert bool(record.earlier(file)) == (device == "this")


@pytest.mark.parametrize("gpu", [False, True])
def test_registers_are_recorded_without_a_gpu_as_well(gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler says, for the machine of the file; with a GPU for this one."""
    file = tmp_path / "device.json"
    file.write_text(json.dumps({"versions": {"device": "another"}}))
    monkeypatch.setattr(record, "versions", lambda: {"device": "this"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert bool(record.earlier(file, ["registers"])) == (not gpu)
    assert not record.earlier(file, ["registers", "casts"])


def test_the_digest_of_the_package_sees_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels" / "__pycache__").mkdir(parents=True)
    names = ("__init__.py", "py.typed", "kernels/a.cu", "config.json")
    for name in names:
        (tmp_path / name).write_text("x")
    monkeypatch.setattr(stamp.opfuse, "__file__", str(tmp_path / "__init__.py"))
    before = stamp.package_digest()
    (tmp_path / "kernels" / "__pycache__" / "a.pyc").write_text("x")
    assert stamp.package_digest() == before
    for name in names:
        (tmp_path / name).write_text("y")
        assert stamp.package_digest() != before
        (tmp_path / name).write_text("x")
    (tmp_path / "py.typed").rename(tmp_path / "py.type")
    assert stamp.package_digest() != before


def test_the_page_says_which_code_and_what_became_of_its_tests() -> None:
    moment = {"date": "2026-01-02", "kernels_digest": "a" * 64, "package_digest": "b" * 64}
    for today, sources in (("aaa", "these"), ("ccc", "earlier")):
        told = f"On 2026-01-02: kernels aaaaaaaaaaaa, of {sources} sources; package bbbbbbbbbbbb"
        assert performance.code(moment, today) == told
    assert performance.counted({"passed": 7, "failed": 0, "skipped": 1, **moment}) == "7 passed, 0 failed, 1 skipped"
