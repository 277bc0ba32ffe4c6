"""The blocks of docs/howto.md run: that for Weights & Biases with a stand-in for wandb, that for a report with its commands."""

from __future__ import annotations

import json
import operator
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from opfuse.cli.app import main

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "howto.md").read_text(encoding="utf-8")


class Run:
    """What the page and :func:`opfuse.watch` need of a run."""

    def __init__(self, **settings: Any) -> None:
        self.steps: list[int] = []
        self.names: set[str] = set()

    def log(self, values: dict[str, float], step: int) -> None:
        self.steps.append(step)
        self.names |= values.keys()

    def finish(self) -> None:
        """Nothing is open."""


def executed(having: str) -> dict[str, Any]:
    """The names that the block with these words makes."""
    (block,) = (block for block in re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL) if having in block)
    space: dict[str, Any] = {}
    exec(compile(block, "docs/howto.md", "exec"), space)
    return space


def test_the_run_of_the_page_has_the_casts_and_the_losses_in_the_order_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = ModuleType("wandb")
    monkeypatch.setattr(wandb, "init", Run, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run = executed("import wandb")["run"]
    assert run.steps == sorted(run.steps)
    assert set(run.steps) == set(range(1, 31))
    assert {"loss", "0/input/amax", "2/weight/sqnr"} <= run.names


def test_a_run_that_goes_on_from_its_checkpoint_has_the_bits_of_one_that_did_not_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    executed("prepare_delayed(")
    assert capsys.readouterr().out == "True True\n"


@pytest.mark.slow
def test_memory_is_estimated_as_the_page_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="of the extra `test`")
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    others = {"num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "vocab_size": 128256}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **others}))
    (command,) = re.findall(r"^opfuse (memory .*)$", PAGE, re.MULTILINE)
    (output,) = re.findall(r"```text\n(recipe .*?)```", PAGE, re.DOTALL)
    assert main([str(tmp_path / "config.json") if part.endswith(".json") else part for part in command.split()]) == 0
    assert capsys.readouterr().out == output


def test_memory_of_a_model_on_the_meta_device_is_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    """tests/train/test_memory.py has the command, on a model that is small."""
    pytest.importorskip("transformers", reason="of the extra `test`")
    found = executed("opfuse.memory(")["found"]
    assert found.place in capsys.readouterr().out


def test_moments_in_8_bits_go_on_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Uncompiled, since torchao's step compiles long."""
    pytest.importorskip("torchao", reason="of the extra `test`")
    monkeypatch.chdir(tmp_path)
    with torch.compiler.set_stance("force_eager"):
        executed("AdamW8bit(")
    assert capsys.readouterr().out == "True\nTrue\n"


def test_bytes_of_an_element_are_those_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the two matrices of the page's example: weight, master and moments."""
    pytest.importorskip("torchao", reason="of the extra `test`")
    monkeypatch.chdir(tmp_path)
    with torch.compiler.set_stance("force_eager"):
        start, train = operator.itemgetter("start", "train")(executed("AdamW8bit("))
        for stored, beside in ((False, 2 + 2.03), (True, 1 + 2 + 2.03)):
            model, optimizer = start(stored)
            train(model, optimizer, range(1))
            matrix = model[0].weight
            state = optimizer.state_dict()["state"][0]
            held = [*(matrix.record.tensors() if stored else [matrix])]
            held += [state["master"]] if stored else []
            held += [part for name in ("exp_avg", "exp_avg_sq") for part in (state[name].codes, state[name].scale)]
            assert sum(each.nbytes for each in held) / matrix.numel() == pytest.approx(beside, abs=0.01)


def test_a_run_is_recorded_and_the_commands_make_pages_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    executed("watch.log(")
    lines = re.findall(r"^opfuse ((?:report|cache) .*runs/mine.*)$", PAGE, re.MULTILINE)
    assert [main(line.split()) for line in lines] == [0, 0, 0]
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "mine.html", "mine.perfetto.json"}
    assert "Learning rate" in (tmp_path / "mine.html").read_text(encoding="utf-8")
