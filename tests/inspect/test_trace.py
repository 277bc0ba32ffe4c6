"""Traces: what is written down is read back, compared over ranks, and refused where it is something else."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import opfuse
from opfuse import ops, recipes
from opfuse.cli.app import main
from opfuse.errors import OpfuseWarning, OutputError, TraceError
from opfuse.inspect.trace import differences, find, odd_ranks, read
from opfuse.runtime.plans import trace
from opfuse.runtime.plans.misses import SAME
from opfuse.tensors.quantizers import MXFP8Quantizer

Run = Callable[[str], tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """A command line; its exit code and what it printed."""

    def run(line: str) -> tuple[int, str]:
        capsys.readouterr()
        code = main(line.split())
        return code, capsys.readouterr().out

    return run


@pytest.fixture
def fresh() -> Iterator[None]:
    """Each directory gets a new writer."""
    trace._writer.cache_clear()
    yield
    trace._writer.cache_clear()


def mlp() -> ops.Sequential:
    return ops.Sequential(ops.Linear(32, 32), ops.GELU())


def call(model: ops.Sequential, *, rows: int = 32, **fields: object) -> None:
    with opfuse.autocast(recipe=recipes.MXFP8BlockScaling(**fields)):  # type: ignore[arg-type]
        model(torch.randn(rows, 32))


def written(directory: Path, monkeypatch: pytest.MonkeyPatch, rank: int = 0, ranks: int = 1, **fields: object) -> None:
    """A process that made two plans, as rank ``rank`` of ``ranks``."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("OPFUSE_TRACE", str(directory))
    trace._writer.cache_clear()
    model = mlp()
    call(model)
    call(model, **{"rounding": "single", **fields})
    call(model)
    writer = trace._writer(str(directory), trace.os.getpid())
    writer.end()
    writer.path.rename(directory / f"rank{rank}.jsonl")
    monkeypatch.delenv("OPFUSE_TRACE")


@pytest.mark.usefixtures("fresh")
def test_a_trace_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    written(tmp_path, monkeypatch)
    (found,) = read(tmp_path)
    first, second = found.plans
    assert (first.nearest, second.nearest) == (None, first.key)
    assert [each.path for each in second.differences] == ["env.recipe.rounding"]
    assert [each.path for each in differences(first, second)] == ["env.recipe.rounding"]
    assert str(second.differences[0]) == str(differences(first, second)[0]) == second.why
    assert "was: default, now: " in second.why
    assert {"epilogue"} <= {each["rule"] for each in second.outcomes if each["status"] == "fused"}
    assert second.plan is not None
    assert second.plan["nodes"][-1].endswith("gelu")
    assert found.counts is not None
    assert [(row.plans, row.hits, row.misses) for row in found.counts.pipelines] == [(2, 1, 2)]
    assert found.process.settings["deterministic_algorithms"] is False
    code, text = run(f"cache ls --trace {tmp_path}")
    assert code == 0
    assert f"{second.key}  0" in text
    assert "2 plans alive, 1 hit, 2 misses" in text
    code, text = run(f"cache show {second.key[:6]} --trace {tmp_path}")
    assert "env.recipe.rounding" in text
    assert "'single'" in text
    code, text = run(f"cache diff {first.key} {second.key} {tmp_path}")
    assert f"{first.key} -> {second.key}: 1 of " in text
    code, text = run(f"cache why {tmp_path} --json")
    assert [plan["nearest"] for plan in json.loads(text)["plans"]] == [None, first.key]
    for line in (f"cache ls --trace {tmp_path} --json", f"cache show {first.key} --trace {tmp_path} --json"):
        json.loads(run(line)[1])


@pytest.mark.usefixtures("fresh")
def test_the_rank_that_disagrees_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    for rank in range(3):
        written(tmp_path, monkeypatch, rank, 3, **({"scale_rule": "ocp_floor"} if rank == 1 else {}))
    traces = read(tmp_path)
    (odd,) = odd_ranks(traces)
    assert (odd.rank, odd.occurrence, [each.path for each in odd.differences]) == (1, 2, ["env.recipe.scale_rule"])
    code, text = run(f"cache why {tmp_path}")
    assert code == 1
    assert "rank 1 disagrees in plan 2 of ops 0..1: env.recipe.scale_rule: 'te' -> 'ocp_floor'" in text
    assert odd_ranks([trace for trace in traces if trace.process.rank != 1]) == []
    fewer = [replace(trace, plans=trace.plans[: 1 + (trace.process.rank == 2)]) for trace in traces]
    (odd,) = odd_ranks(fewer)
    text = "rank 2 disagrees in plan 2 of ops 0..1: most ranks made no such plan: env.recipe.rounding: 'per_op' -> 'single'"
    assert str(odd).startswith(text)
    (odd,) = odd_ranks([replace(trace, plans=trace.plans[: 2 - (trace.process.rank == 2)]) for trace in traces[::2]])
    assert str(odd) == "rank 2 disagrees in plan 2 of ops 0..1: it made no such plan"


def test_keys_have_the_same_digits_on_every_device_of_a_type() -> None:
    leaf = [trace.Leaf("inputs.x.device", torch.device("cuda", 3), None)]
    other = [trace.Leaf("inputs.x.device", torch.device("cuda", 0), "train.py:1")]
    assert trace.key_id(iter(leaf)) == trace.key_id(iter(other))
    assert trace.key_id(iter(leaf)) != trace.key_id(iter([trace.Leaf("inputs.x.device", torch.device("cpu"), None)]))


@pytest.mark.usefixtures("own_pipelines")
def test_dump_writes_what_is_alive(tmp_path: Path) -> None:
    model = mlp()
    call(model)
    own = model.runs()[0]
    (found,) = read(opfuse.dump(tmp_path / "deep" / "dump.jsonl"))
    assert [plan.pipeline for plan in found.plans if plan.handle == own.handle] == ["ops 0..1"]
    with pytest.raises(OutputError, match=r"x: wants a file to write"):
        opfuse.dump(tmp_path / "deep" / "dump.jsonl" / "x")


def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, run: Run) -> None:
    def refused(text: str, match: str) -> None:
        path = tmp_path / "bad.jsonl"
        path.write_text(text)
        with pytest.raises(TraceError, match=match):
            read(path)

    good = json.dumps(trace.process())
    refused("", "a process in the first line, got an empty file")
    refused(f"{good}\n{{}}\n", r"bad\.jsonl:2: wants a line of format version 1")
    refused(f"{good}\nnothing\n", r"bad\.jsonl:2: .*Expecting value")
    refused(f"{good}\n{'[' * 100_000}{']' * 100_000}\n", r"bad\.jsonl:2: .*nested too deeply")
    refused(good.replace('"version": 1', '"version": 2') + "\n", r"bad\.jsonl:1: .*process\.version")
    (tmp_path / "bad.jsonl").write_text(f'{good}\n{{"record": "pl')  # cut while it was written
    assert read(tmp_path)[0].counts is None
    with pytest.raises(TraceError, match=r"no .*jsonl file"):
        read(Path(__file__).parent)
    with pytest.raises(TraceError, match="a trace"):
        read(tmp_path / "absent.jsonl")
    with pytest.raises(TraceError, match="the first digits of one key"):
        find(read(tmp_path), "abc")
    assert run(f"cache ls --trace {tmp_path}/absent.jsonl")[0] == 1


def test_a_directory_that_cannot_be_written_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OPFUSE_TRACE", str(tmp_path / "file"))
    model = mlp()
    with pytest.warns(OpfuseWarning, match="trace .*wants a file to write"):
        call(model)
    call(model, rounding="single")  # where warnings are errors


# -- misses that repeat --------------------------------------------------------------------------------------------------------


def under(model: ops.Sequential, recipe: recipes.Recipe) -> None:
    with opfuse.autocast(recipe=recipe):
        model(torch.randn(32, 32))


@pytest.mark.cpu
def test_misses_that_differ_in_one_value_alone_are_told_once() -> None:
    model = mlp()
    made = [recipes.CustomRecipe(qfactory=lambda role, i=i: MXFP8Quantizer()) for i in range(SAME + 3)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for recipe in made:
            under(model, recipe)
    (text,) = [str(each.message) for each in told]
    assert f"{SAME} misses in a row that differ in env.recipe.qfactory alone" in text
    assert "make the recipe once" in text


def test_a_cache_that_is_too_small_names_what_flips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opfuse.runtime.fuser.PLANS", 2)
    model = mlp()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for rows in (1, 2, 4) * 3:
            model(torch.randn(rows, 32))
    (text,) = [str(each.message) for each in told]
    assert "more than 2 in turn" in text
    assert "what flips is env.rows_class" in text
    assert str(model.cache_info().last_miss).startswith("planned before, and dropped; env.rows_class")


def test_plans_that_come_back_are_no_thrash() -> None:
    model = mlp()
    for _ in range(30):
        for rows in (1, 2, 4, 8, 16, 32, 64, 128):
            model(torch.randn(rows, 32))
