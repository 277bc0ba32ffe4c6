"""Collectives over one rank; tests/distributed/collectives.py has those over several."""

from __future__ import annotations

import copy

import pytest
import torch

import opfuse
from opfuse import ops, recipes, te
from opfuse.errors import UnsupportedError
from tests.fusions.test_bitwise import WIDTH, experts_over_ranks


@pytest.mark.parametrize("name", ["AllReduce", "AllGather", "ReduceScatter"])
def test_over_one_rank_each_is_a_copy(name):
    op = getattr(ops, name)()
    assert (op.process_group, op.process_group_size) == (None, 1)
    model, x = copy.deepcopy(ops.Sequential(op, ops.ReLU())), torch.randn(4, 8, requires_grad=True)
    dy = torch.randn(4, 8)
    y = model(x)
    y.backward(dy)
    assert torch.equal(y.detach(), x.detach().relu())
    assert torch.equal(x.grad, dy * (x.detach() > 0))
    z = op(x.detach())
    assert z.data_ptr() != x.data_ptr()
    assert torch.autograd.gradcheck(op, torch.randn(3, 5, dtype=torch.float64, requires_grad=True))
    assert issubclass(getattr(te.ops, name), getattr(ops, name))


def test_what_the_peer_s_keyword_does_not_do_is_refused():
    with pytest.raises(UnsupportedError, match="reduce_in_backward=True, got False"):
        te.ops.AllReduce(reduce_in_backward=False)


@pytest.mark.parametrize("kind", [ops.AllToAllDispatch, ops.AllToAllReturn])
def test_a_copy_has_channels_of_its_own(kind):
    op = kind(4)
    op.name = "experts"
    op.set_extra_input_channel(0, "splits")
    other = copy.deepcopy(op)
    assert (other.name, other.extra_input_channels) == (op.name, op.extra_input_channels)
    other.set_extra_input_channel(0, "more")
    assert op.extra_input_channels[0].name == "splits"


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        (recipes.Float8BlockScaling(), ("fp8_block_1d_e4m3 (power-of-two scales)",) * 2),
        (recipes.Float8CurrentScaling(), ("fp8_tensor_e4m3", "fp8_tensor_e5m2")),
        (recipes.DelayedScaling(), ("values, cast anew: scales are delayed, and kept where the experts are",) * 2),
        (
            recipes.MXFP8BlockScaling(backward_override="high_precision"),
            ("values, cast anew: backward_override='high_precision' reads",),
        ),
        (recipes.NVFP4BlockScaling(), ("values, cast anew: products of the backward pass read another format",)),
        (None, ()),
    ],
    ids=lambda each: "" if isinstance(each, tuple) else type(each).__name__,
)
def test_explain_says_what_travels_to_experts_on_other_ranks(recipe, told):
    x = torch.randn(16, WIDTH, requires_grad=True)
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        text = str(opfuse.explain(experts_over_ranks().bfloat16(), x.bfloat16()))
    assert ("rows of other ranks" in text) == bool(told)
    for op, how in zip(("1:all_to_all_dispatch input", "9:all_to_all_return grad_output"), told):
        assert f"{op}: {how}" in text


def test_values_travel_to_more_experts_than_kernels_take():
    x = torch.randn(16, WIDTH, requires_grad=True)
    with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()):
        text = str(opfuse.explain(experts_over_ranks(129), x))
    assert "values, cast anew: kernels take codes of at most 128 experts of a rank, got 129" in text
