"""The block of docs/howto.md for Weights & Biases runs, with a stand-in for wandb, and logs no step that W&B would ignore."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

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


def test_the_run_of_the_page_has_the_casts_and_the_losses_in_the_order_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = ModuleType("wandb")
    monkeypatch.setattr(wandb, "init", Run, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (block,) = re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)
    space: dict[str, Any] = {}
    exec(compile(block, "docs/howto.md", "exec"), space)
    run = space["run"]
    assert run.steps == sorted(run.steps)
    assert set(run.steps) == set(range(1, 31))
    assert {"loss", "0/input/amax", "2/weight/sqnr"} <= run.names
