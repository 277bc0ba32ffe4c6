"""Collectives over one rank; tests/distributed/collectives.py has those over several."""

from __future__ import annotations

import copy

import pytest
import torch

from opfuse import ops, te
from opfuse.errors import UnsupportedError


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
