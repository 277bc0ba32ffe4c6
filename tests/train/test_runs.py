"""Runs compared: what differs is told with its source, losses part at a step, and the first op whose values differ is found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from opfuse.cli.app import main
from opfuse.config import load
from opfuse.errors import TraceError
from opfuse.runtime.plans.written import unsealed
from opfuse.train import compare, write_report
from opfuse.train.data import pydoc_topics
from opfuse.train.localize import SeenValue, _difference, first_difference
from opfuse.train.runs import REPORT, differences, divergence, known_run

INF, NAN = float("inf"), float("nan")
CONFIG = """version: 1
recipe: {kind: mxfp8}
pipeline:
  ops:
    - {op: linear, in_features: 64, out_features: 64}
    - {op: gelu}
    - {op: linear, in_features: 64, out_features: 256}
data: {kind: text, path: text.txt, context: 4, embedding: 16}
train: {steps: 4, batch_size: 32, eval_every: 4}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of one file, and one with another override, which changes gradients and not the first loss."""
    place = tmp_path_factory.mktemp("runs")
    (place / "text.txt").write_bytes(pydoc_topics())  # its path counts from the file's folder, wherever a copy of the file is
    for name, text in (
        ("one", CONFIG),
        ("two", CONFIG),
        ("other", CONFIG.replace("mxfp8}", "mxfp8, backward_override: dequantized}")),
    ):
        (place / name).mkdir()
        for path in (place / f"{name}.yaml", place / name / "config.yaml"):
            path.write_text(text)
        write_report(compare(load(place / f"{name}.yaml")), place / name)
    return place


def test_equal_runs_are_equal(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (known_run(runs / name) for name in ("one", "two"))
    assert [each.name for each in differences(one, two)] == []
    assert divergence(one, two) is None
    assert len(one.losses) == 4
    assert main(["diff", str(runs / "one"), str(runs / "two"), "--localize"]) == 0
    text = capsys.readouterr().out
    assert "4 losses are equal bit for bit" in text
    assert "no value differs" in text


def test_the_seed_of_torch_is_none_of_a_run(runs: Path, tmp_path: Path) -> None:
    """It is another in each process, and a run has a generator of its own."""
    told = unsealed((runs / "two" / REPORT).read_text())
    told["process"]["settings"]["seed"] += 1
    (tmp_path / REPORT).write_text(json.dumps(told))
    assert differences(known_run(runs / "one"), known_run(tmp_path)) == []


def test_another_text_of_that_name_is_no_text_of_the_run(runs: Path, tmp_path: Path) -> None:
    """It counts from the folder in which the run was started, and another one may lie where it is asked about."""
    copy = shutil.copytree(runs, tmp_path / "runs")
    for name in ("one", "two"):
        told = unsealed((copy / name / REPORT).read_text())
        (copy / name / REPORT).write_text(json.dumps({**told, "config": str(copy / f"{name}.yaml")}))
    (copy / "text.txt").write_bytes(pydoc_topics()[::-1])
    with pytest.raises(TraceError, match="wants the text that the run had"):
        first_difference(copy / "one", copy / "two", 1)


def test_what_changed_is_told_and_localized(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(runs / "one"), str(runs / "other"), "--localize", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    names = {each["name"] for each in found["differences"]}
    assert {"recipe.backward_override", "plan 1.env.recipe.backward_override", "fusions.backward.backward_elementwise"} <= names
    assert found["divergence"]["step"] == 2
    assert (found["first_value"]["side"], found["first_value"]["name"]) == ("forward", "1:quantize[weight]")
    assert main(["diff", str(runs / "one"), str(runs / "other")]) == 1
    text = capsys.readouterr().out
    assert "recipe.backward_override: None -> 'dequantized'" in text
    assert f"(default -> {runs}/other.yaml:2:" in text
    assert "losses differ from step 2 on" in text


def test_what_a_command_called_is_not_told_as_given_on_its_command_line(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody gave `env.grad`: it is of the environment in which the command called the pipeline."""
    assert main(["run", str(runs / "one.yaml"), "--out", str(tmp_path / "whole"), "--device", "cpu"]) == 0
    told = unsealed((tmp_path / "whole" / REPORT).read_text())
    (tmp_path / REPORT).write_text(json.dumps({**told, "plans": told["plans"][:1]}))
    capsys.readouterr()
    assert main(["diff", str(tmp_path / "whole"), str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "plan 2.env.grad: False -> 'nothing' (a call by opfuse itself)" in text
    assert "command line" not in text


@pytest.mark.parametrize(
    ("old", "new", "largest"),
    [
        ([2.0, 1.0], [2.0, 1.5], 0.25),
        ([2.0, 1.0], [2.0, NAN], INF),
        ([2.0, NAN], [2.0, NAN], None),
        ([INF, 2.0], [INF, 1.0], 0.5),
        ([NAN, NAN], [1.0, NAN], INF),
    ],
    ids=["numbers", "NaN beside a number", "NaN on both sides", "infinity on both sides", "no number"],
)
def test_what_is_not_finite_hides_no_difference(old: list[float], new: list[float], largest: float | None) -> None:
    found = _difference(1, *(SeenValue("forward", "0:gelu", torch.tensor(values)) for values in (old, new)))
    assert (None if found is None else found.largest) == largest


def test_configurations_and_traces_are_compared_too(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(runs / "one.yaml"), str(runs / "other.yaml")]) == 1
    assert "recipe.backward_override: None -> 'dequantized' (default -> " in capsys.readouterr().out
    with pytest.raises(TraceError, match="a run"):
        known_run(Path(__file__).parent)
    (runs / "report.json").write_text("{}")
    with pytest.raises(TraceError, match="a report of opfuse run"):
        known_run(runs / "report.json")
    assert main(["diff", str(runs), str(runs / "one")]) == 1
