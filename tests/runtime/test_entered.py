"""How many functions and files of the library a call enters, as somebody does who reads or steps through it."""

from __future__ import annotations

import cProfile
import gc
import os
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

import opfuse
from opfuse import ops, recipes

pytestmark = pytest.mark.cpu
ROOT = os.path.dirname(opfuse.__file__)
INLINED = ("<listcomp>", "<dictcomp>", "<setcomp>")
"""What Python calls as functions before 3.12, and no longer: so figures are the same on all."""

LIMITS = {
    "first call": (400, 61),
    "second call, which records": (312, 53),
    "repeated call": (34, 13),
    "backward pass that records": (282, 49),
    "repeated backward pass": (15, 6),
}


class Entered(NamedTuple):
    functions: int
    files: int


def entered(call: Callable[[], object]) -> Entered:
    was = gc.isenabled()
    gc.disable()  # what is dead enters functions that forget it, at the next search for it
    try:
        with cProfile.Profile() as profile:
            call()
    finally:
        if was:
            gc.enable()
    codes = [entry.code for entry in profile.getstats() if not isinstance(entry.code, str)]
    ours = [code for code in codes if code.co_filename.startswith(ROOT) and code.co_name not in INLINED]
    return Entered(len(ours), len({code.co_filename for code in ours}))


def steps(count: int) -> tuple[list[Entered], list[Entered]]:
    """Of the forward and the backward passes of a new model."""
    model = ops.Sequential(ops.Linear(64, 64), ops.GELU(), ops.Linear(64, 64)).bfloat16()
    forward, backward, results = [], [], []
    for _ in range(count):
        x = torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True)
        with opfuse.autocast(recipe=recipes.Float8CurrentScaling()):
            forward.append(entered(lambda x=x: results.append(model(x))))
        y = results.pop()
        backward.append(entered(lambda y=y: y.backward(y.detach())))
    return forward, backward


def test_what_a_call_enters():
    """Once a model of the kind was recorded: imports, and what the process keeps, are no part of it."""
    steps(3)
    with torch.autograd.set_multithreading_enabled(False):
        forward, backward = steps(5)
    found = dict(zip(LIMITS, (forward[0], forward[1], forward[-1], backward[2], backward[-1]), strict=True))
    print(found)  # noqa: T201 - with pytest -s
    for what, (functions, files) in LIMITS.items():
        assert found[what] <= (functions, files), what
        assert found[what].files <= files, what
