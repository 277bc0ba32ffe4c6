"""Amaxes over processes: each state is reduced over the group of its forward, and as bits, so that no NaN is lost."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from opfuse import ops
from opfuse.recipes import DelayedScaling, autocast
from opfuse.recipes.amaxes import NAMES
from tests.processes import printed

PROGRAM = """
import sys, torch, torch.distributed as dist
from opfuse import ops
from opfuse.recipes import DelayedScaling, autocast
from opfuse.tensors.quantizers.ranks import reduce_amax

rank = int(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
alone = [dist.new_group([0]), dist.new_group([1])][rank]
recipe = DelayedScaling(amax_history_len=2)

class Caster(ops.BasicOperation):  # casts its gradient by a quantizer of its own
    def num_quantizers(self, mode):
        return 1
    def op_forward(self, ctx, input_, **_):
        ctx.grad_quantizer = self.get_quantizer("backward", 0)
        return input_ * 1
    def op_backward(self, ctx, grad_output):
        return ctx.grad_quantizer.quantize(grad_output).dequantize(), ()

def gradient_amax(op, group):
    x = torch.ones(16, 16, requires_grad=True)
    with autocast(recipe=recipe, amax_reduction_group=group):
        y = ops.Sequential(op)(x)
    y.backward(torch.full_like(y, 2.0 * (1 + rank)))  # outside: the group is that of the forward
    return 57344.0 / op.quantizer_states.to_dict()["grad_output/scale"].item()

found = [gradient_amax(op(), group) for op in (lambda: ops.BasicLinear(16, 16), Caster) for group in (alone, None)]
nan = float("nan")
for mine in ((nan, 3.0), (3.0, nan), (nan, float("inf"))):
    found.append(reduce_amax(torch.tensor([mine[rank]]), None).item())
print(*found)
dist.destroy_process_group()
"""


def test_gradients_are_reduced_over_the_group_of_their_forward_and_no_nan_is_lost(tmp_path):
    found = [out.split() for out in printed(PROGRAM, tmp_path)]
    assert found[0] == ["2.0", "4.0", "2.0", "4.0", *["nan"] * 3]
    assert found[1] == ["4.0", "4.0", "4.0", "4.0", *["nan"] * 3]


@pytest.fixture
def _beside_another_rank(monkeypatch):
    with beside_another_rank(monkeypatch):
        yield


@contextlib.contextmanager
def beside_another_rank(monkeypatch):
    """A group whose other rank casts tensors of the same names, each with 8 as its largest element."""

    def largest(words, **_):
        amaxes = words.view(torch.float32)[2 * (2 + NAMES) :]
        amaxes[amaxes > 0] = 8.0

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "all_reduce", largest)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("_beside_another_rank")
@pytest.mark.parametrize(("shared", "amax"), [(True, 8.0), (False, 2.0)])
def test_a_scale_follows_the_largest_element_on_any_rank_that_shares_it(shared, amax):
    op, recipe = ops.BasicLinear(16, 16), DelayedScaling(amax_history_len=2, reduce_amax=shared)
    with autocast(recipe=recipe):
        y = op(torch.full((16, 16), 2.0))
    y.backward(torch.full_like(y, 2.0))
    state = op.quantizer_states.to_dict()
    assert (state["input/scale"].item(), state["grad_output/scale"].item()) == (448.0 / amax, 57344.0 / amax)


def test_updates_that_are_bound_ask_ranks_while_there_are_any(monkeypatch):
    """Steps repeat what was bound for a plan, and whether there are ranks is in its key."""
    op, recipe = ops.BasicLinear(16, 16), DelayedScaling(amax_history_len=1)

    def steps():
        for _ in range(6):
            with autocast(recipe=recipe):
                y = op(torch.full((16, 16), 2.0))
            y.backward(torch.full_like(y, 2.0))
        state = op.quantizer_states.to_dict()
        return 448.0 / state["input/scale"].item(), 57344.0 / state["grad_output/scale"].item()

    assert steps() == (2.0, 2.0)
    for _ in range(2):
        with beside_another_rank(monkeypatch):
            assert steps() == (8.0, 8.0)
        assert steps() == (2.0, 2.0)
