"""What a CUDA graph could not repeat is refused by the op that would do it, before anything of it is done."""

from __future__ import annotations

import pytest
import torch

import opfuse
from opfuse import ops, recipes
from opfuse.errors import UnsupportedError
from tests.compiler.harness import randn
from tests.ops.test_op_errors import raised

pytestmark = [pytest.mark.cpu, pytest.mark.row("R12")]
CURRENT = recipes.Float8CurrentScaling()


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch):
    """What is called runs as while a CUDA graph is captured."""

    def run(call, *args, recipe=None):
        with monkeypatch.context() as patch, opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            for name in ("is_initialized", "is_current_stream_capturing"):
                patch.setattr(torch.cuda, name, lambda: True)
            return call(*args)

    return run


def test_splits_that_the_host_reads_are_refused_and_a_list_is_a_constant(captured):
    """A tensor of the CPU may hold other numbers at the next replay, which a graph would not see."""
    experts = ops.GroupedLinear(2, 64, 64, dtype=torch.bfloat16)
    pipeline = ops.Sequential(ops.Linear(64, 64, dtype=torch.bfloat16), experts, ops.GELU())
    x, splits = randn(64, 64), torch.tensor([32, 32])
    for model in (experts, pipeline):
        for recipe in (None, CURRENT):
            with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
                want = model(x, splits)
            for _ in range(3):
                with raised(UnsupportedError, RuntimeError, "GroupedLinear.* graph capture", "a tensor on the CPU"):
                    captured(model, x, splits, recipe=recipe)
                assert torch.equal(captured(model, x, [32, 32], recipe=recipe), want)


def test_states_of_delayed_scaling_do_not_change_in_a_graph(captured):
    """A replay would convert them again each time."""
    layer, x = ops.Linear(64, 64, dtype=torch.bfloat16), randn(32, 64)
    delayed, longer, other = (
        recipes.DelayedScaling(amax_history_len=length, margin=margin) for length, margin in ((4, 0), (8, 0), (4, 1))
    )

    def step(recipe):
        with opfuse.autocast(recipe=recipe):
            y = layer(x)
        y.sum().backward()

    for recipe in (longer, other, delayed):
        step(recipe)
    captured(step, delayed)
    before = layer.state_dict()
    for recipe in (longer, other):
        with raised(UnsupportedError, RuntimeError, "Linear.* graph capture", "converted to another recipe"):
            captured(step, recipe)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_looks_and_offload_stay_outside(captured):
    model, x = ops.Sequential(ops.Linear(64, 64)), torch.randn(4, 64)
    model(x)
    with opfuse.watch(model, every=1), raised(UnsupportedError, RuntimeError, "values of a call", "a look"):
        captured(model, x)
    with raised(UnsupportedError, RuntimeError, "offloaded", "copies to the host"):
        captured(opfuse.offloaded(model).__enter__)
    assert model(x).shape == x.shape
