"""The public names: what they return is short in a terminal, and what they cannot take is refused with a cure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import opfuse
from opfuse import ops, recipes

FP8 = recipes.Float8CurrentScaling()


def pipeline() -> ops.Sequential:
    return ops.Sequential(*(op for _ in range(6) for op in (ops.Linear(8, 8), ops.GELU())))


def model() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(6)))


RETURNED: dict[str, Callable[[], Any]] = {
    "active_rules": opfuse.active_rules,
    "fusion": lambda: opfuse.active_rules().rules[0],
    "explain": lambda: opfuse.explain(pipeline(), torch.randn(8, 8)),
    "saved": lambda: opfuse.saved(pipeline(), torch.randn(8, 8)),
    "host_times": lambda: opfuse.host_times(pipeline(), torch.randn(8, 8)),
    "advise": lambda: opfuse.advise(model()),
    "fuse_": lambda: opfuse.fuse_(model(), FP8),
    "load": lambda: opfuse.load("quickstart"),
}


@pytest.mark.parametrize("name", RETURNED)
def test_what_a_terminal_shows_is_short(name: str) -> None:
    """What a call found is told by ``print``, and not by each attribute of each object inside."""
    with opfuse.autocast(recipe=FP8):
        shown = repr(RETURNED[name]())
    assert len(shown) < 700
    assert shown.startswith(type(RETURNED[name]()).__name__ + "(")
