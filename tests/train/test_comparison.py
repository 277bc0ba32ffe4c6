"""Whole configurations: the comparison is fair, repeatable, and says what it found."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from opfuse.config import Config, load
from opfuse.errors import ConfigError, UnsupportedError
from opfuse.train import Comparison, TrainStep, compare, to_dict, usable, write_plot, write_report
from opfuse.train.report import smoothed

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


loaded = functools.cache(load)
"""To load a file rehearses each of its ops."""


def small(path: Path) -> Config:
    """The configuration in batches of 32."""
    config = loaded(path)
    return replace(config, train=config.train.model_copy(update={"batch_size": 32}))


@pytest.fixture(scope="module")
def quickstart() -> Comparison:
    return compare(loaded(QUICKSTART), steps=20)


def test_twenty_steps_of_the_quickstart(quickstart: Comparison) -> None:
    found = to_dict(quickstart)
    assert (found["steps"], found["recipe"], found["dtype"], found["backend"]) == (20, "mxfp8", "bfloat16", "emulated")
    assert found["backend_reason"]
    for prefix in ("", "baseline_"):
        assert found[f"{prefix}loss_first"] == pytest.approx(math.log(256), abs=0.5)
        assert found[f"{prefix}loss_last"] < found[f"{prefix}loss_first"] - 1.5
        assert found[f"{prefix}validation_loss"] < found["data"]["unigram_entropy"]
        assert found[f"{prefix}loss_last_bits"] == pytest.approx(found[f"{prefix}loss_last"] / math.log(2))
    assert abs(found["validation_difference"]) < 0.02
    assert found["validation_difference"] == pytest.approx(found["validation_loss"] / found["baseline_validation_loss"] - 1)
    assert found["loss_last"] == pytest.approx(sum(quickstart.run.losses[-5:]) / 5)
    assert found["seconds"] == found["run_seconds"] + found["baseline_run_seconds"]
    assert {count["direction"] for count in found["fusion_counts"]} == {"forward", "backward"}
    assert sum(count["count"] for count in found["fusion_counts"]) == len(found["fusions"])
    assert {"epilogue"} <= set(found["fusions"])
    assert found["plan_cache"]["misses"] == 2


@pytest.mark.usefixtures("few_samples")
def test_the_runs_differ_by_the_recipe_alone() -> None:
    """The baseline is the same model on the same samples: its losses are those of the configuration without a recipe."""
    config = small(QUICKSTART)
    both, alone = compare(config, steps=4), compare(replace(config, recipe=None), steps=4)
    assert both.baseline is not None
    assert alone.run.losses == both.baseline.losses
    assert alone.run.validation == both.baseline.validation
    assert alone.run.losses[0] != both.run.losses[0]
    assert alone.run.losses[0] == pytest.approx(both.run.losses[0], rel=0.01)


@pytest.mark.usefixtures("few_samples")
def test_losses_follow_the_seed() -> None:
    """Under NVFP4, which draws its rounding as well."""
    config = small(QUICKSTART.with_name("nvfp4.yaml"))

    def curves(seed: int) -> tuple[Any, ...]:
        torch.randn(3)  # what the caller drew before does not matter
        result = compare(config, steps=1, seed=seed)
        assert result.baseline is not None
        return result.run.losses, result.run.validation, result.baseline.losses

    assert curves(7) == curves(7) != curves(8)


@pytest.mark.usefixtures("few_samples")
def test_steps_are_told_as_they_happen() -> None:
    told: list[tuple[str, TrainStep]] = []
    config = small(QUICKSTART)
    result = compare(config, steps=2, on_step=lambda label, step: told.append((label, step)))
    assert [(label, step.number, step.total) for label, step in told] == [
        ("mxfp8", 1, 2),
        ("mxfp8", 2, 2),
        ("bfloat16", 1, 2),
        ("bfloat16", 2, 2),
    ]
    assert [step.loss for _, step in told[:2]] == list(result.run.losses)
    assert [step.validation for _, step in told[:2]] == [None, result.run.validation[-1][1]]


def test_what_cannot_run_is_refused() -> None:
    config = small(QUICKSTART)
    with pytest.raises(ConfigError, match="wants data to train on"):
        compare(replace(config, data=None))
    with pytest.raises(ConfigError, match=r"train\.steps: wants .*greater than or equal to 1, got 0"):
        compare(config, steps=0)
    with pytest.raises(UnsupportedError, match="'nowhere'"):
        compare(config, device="nowhere")


def test_the_report_holds_every_loss(quickstart: Comparison, tmp_path: Path) -> None:
    path = write_report(quickstart, tmp_path / "a" / "b")
    found = json.loads(path.read_text())
    assert {name: found[name] for name in to_dict(quickstart)} == to_dict(quickstart)
    assert [curve["label"] for curve in found["curves"]] == ["mxfp8", "bfloat16, no recipe"]
    assert found["curves"][0]["losses"] == list(quickstart.run.losses)
    assert found["curves"][1]["validation"] == [[step, loss] for step, loss in quickstart.baseline.validation]  # type: ignore[union-attr]


def test_the_plot_is_drawn(quickstart: Comparison, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot is an extra of the package")
    path = write_plot(quickstart, tmp_path / "plots")
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_without_matplotlib_there_is_no_plot(quickstart: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opfuse.train.files.find_spec", lambda name: None)
    assert write_plot(quickstart, tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_smoothing_is_a_weighted_mean() -> None:
    assert smoothed([2.0] * 5) == pytest.approx([2.0] * 5)
    assert smoothed([1.0, 2.0]) == pytest.approx([1.0, (0.9 * 1.0 + 2.0) / 1.9])


@pytest.mark.slow
def test_the_quickstart_learns_as_well_as_in_high_precision() -> None:
    result = compare(load(QUICKSTART))
    found = to_dict(result)
    assert abs(found["loss_difference"]) < 0.02
    assert abs(found["validation_difference"]) < 0.02
    assert found["validation_loss"] < 1.9  # after 150 steps
    assert found["plan_cache"]["misses"] == 2


def test_auto_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    is_here = torch.cuda.is_available()
    assert usable("auto").type == ("cuda" if is_here else "cpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: not is_here)
    if is_here:
        assert usable("auto") == torch.device("cpu")
    else:
        with pytest.raises(UnsupportedError, match="got 'cuda'"):
            usable("auto")
