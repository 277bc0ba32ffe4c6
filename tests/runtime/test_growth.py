"""What planning, recording and repeating a pipeline take, beside its length: function calls, which are counted and not timed."""

from __future__ import annotations

import cProfile
import pstats

import pytest
import torch

import opfuse
from opfuse import ops, recipes
from opfuse.recipes import Recipe

CHAINS = {
    "elementwise": (lambda: ops.ConstantScale(1.01), ops.GELU, ops.ReLU, ops.SiLU),
    "extra inputs": (ops.AddExtraInput, ops.GELU),
    "norms": (lambda: ops.RMSNorm(32), ops.GELU),
    "products": (lambda: ops.Linear(32, 32), ops.GELU),
    "products without bias": (lambda: ops.Linear(32, 32, bias=False), lambda: ops.Dropout(0.1), ops.ReLU),
}

CASES = [
    *((chain, None) for chain in CHAINS if chain != "products"),
    ("products", "dequantized"),
    pytest.param("products", None, marks=pytest.mark.slow),
    pytest.param("products without bias", "dequantized", marks=pytest.mark.slow),
]
"""An override changes the steps of products alone; each kind of them runs every time under one."""

SHORT, TIMES = 10, 3


def _calls(length: int, chain: str, recipe: Recipe | None) -> list[int]:
    """Function calls of a step that plans, one that records and one that repeats."""
    kinds = CHAINS[chain]
    model = ops.Sequential(*(kinds[i % len(kinds)]() for i in range(length)))
    extras = [torch.ones(32, 32) for op in model for _ in range(op.num_extra_inputs)]
    x, counts = torch.randn(32, 32, requires_grad=True), []
    for _ in range(3):
        profile = cProfile.Profile()
        profile.enable()
        with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x, *extras)
        y.sum().backward()
        profile.disable()
        counts.append(pstats.Stats(profile).total_calls)
    return counts


@pytest.mark.cpu
@pytest.mark.parametrize(("chain", "override"), CASES)
def test_steps_take_calls_in_proportion_to_the_ops(chain, override):
    """No step's calls grow faster than the pipeline: in all three, three times the ops are three times the calls at most."""
    recipe = recipes.MXFP8BlockScaling(backward_override=override)
    _calls(6, chain, recipe)  # what the first pipeline of its kind imports and caches
    short, long = (_calls(length, chain, recipe) for length in (SHORT, TIMES * SHORT))
    for what, few, many in zip(("plans", "records", "repeats"), short, long):
        assert many <= 1.02 * TIMES * few, f"{what}: {few} calls for {SHORT} ops, {many} for {TIMES * SHORT}"
