"""``opfuse run`` from the command line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from opfuse.cli import main
from opfuse.cli.progress import bars, lines
from opfuse.train import TrainStep, usable
from tests.processes import ran

pytestmark = pytest.mark.usefixtures("few_samples", "undrawn")

ROOT = Path(__file__).resolve().parents[2]

TINY = """
version: 1
recipe: {kind: fp8_current}
pipeline: {dtype: float32, ops: [{op: linear, in_features: 32, out_features: 256}]}
data: {kind: pydoc_topics, context: 2, embedding: 16}
train: {batch_size: 32, steps: 6, %s}
"""

PROGRAM = """
import runpy
from opfuse.train import comparison
comparison.EVALUATION_SAMPLES = 64
runpy.run_module("opfuse", run_name="__main__")
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY % "seed: 1")
    return path


def test_the_command_prints_one_json_object(tiny: Path, tmp_path: Path) -> None:
    """As ``python -m opfuse``, with few samples. How well the quickstart trains is tested where configurations are compared."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = ran(PROGRAM, "run", tiny, "--json", "--device", "cpu", cwd=tmp_path, env=environment)
    found = json.loads(done.stdout)
    losses = {"loss_first", "loss_last", "validation_loss"}
    assert losses | {f"baseline_{name}" for name in losses} <= set(found)
    assert {"fusions", "plan_cache", "backend", "recipe", "seconds", "steps"} <= set(found)
    assert set(found["plan_cache"]) >= {"plans", "hits", "misses", "last_miss"}
    assert (found["steps"], found["recipe"], found["backend"]) == (6, "fp8_current", "emulated")
    report = json.loads((tmp_path / "runs" / "tiny" / "report.json").read_text())
    assert {name: report[name] for name in found} == found
    assert "step 6/6" in done.stderr
    assert done.stderr.startswith("trains on cpu\n")


def test_the_device_is_auto_and_told(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["run"], ["study", "keep"]):
        assert main([*command, str(tiny), "--steps", "1", "--out", str(tmp_path)]) == 0
        assert capsys.readouterr().err.startswith(f"trains on {usable('auto')}")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["device"] == str(usable("auto"))


def test_text_has_both_losses_fusions_and_cache_figures(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(tiny), "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    rows = [line.split() for line in printed.splitlines()]
    validation = next(row for row in rows if row[:2] == ["validation", "loss"])
    assert validation[2:4] == [f"{report['validation_loss']:.4f}", f"{report['baseline_validation_loss']:.4f}"]
    assert ["nats", "per", "byte", "fp8_current", "float32", "difference"] in rows
    assert "plans    2 alive, 6 hits, 2 misses" in printed
    assert f"backend  emulated: {report['backend_reason']}" in printed
    for fusion in report["fusion_counts"]:
        assert f"{fusion['rule']} ×{fusion['count']}" in printed


def test_seed_steps_and_out(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def report(*options: str) -> dict[str, object]:
        assert main(["run", str(tiny), "--json", "--out", str(tmp_path / "x"), "--force", *options]) == 0
        return json.loads(capsys.readouterr().out)

    assert report()["loss_last"] == report("--seed", "1")["loss_last"] != report("--seed", "2")["loss_last"]
    assert report("--steps", "2")["steps"] == 2


def test_a_loss_that_is_not_finite_is_one_message_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "wild.yaml"
    path.write_text(TINY % "optimizer: sgd, learning_rate: 1.0e+38")
    assert main(["run", str(path), "--out", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "wants a finite number" in captured.err.splitlines()[-1]
    assert not (tmp_path / "report.json").exists()


@pytest.mark.parametrize(("options", "code"), [(["--steps", "0"], 2), (["--seed", "-1"], 2), (["--device", "nowhere"], 3)])
def test_exit_codes(options: list[str], code: int, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(tiny), "--out", str(tmp_path), *options]) == code
    assert capsys.readouterr().out == ""


def test_a_missing_matplotlib_is_one_line(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opfuse.train.files.find_spec", lambda name: None)
    assert main(["run", str(tiny), "--json", "--out", str(tmp_path / "x")]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["name"] == "tiny"
    assert [line for line in captured.err.splitlines() if "plot" in line] == [
        "no plot: matplotlib is not installed (pip install matplotlib)"
    ]


def test_progress_is_ten_lines_a_run_or_bars_and_never_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with lines() as on_step:
        for number in range(1, 301):
            on_step("mxfp8", TrainStep(number, 300, 5.0 - number / 100, None if number < 150 else 2.5))
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 10
    assert printed.err.splitlines()[-1].split() == ["mxfp8", "step", "300/300", "loss", "2.000", "validation", "2.500"]
    with bars() as on_step:
        on_step("mxfp8", TrainStep(300, 300, 2.0, 2.5))
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "300/300 loss 2.000  validation 2.500" in printed.err
