"""Copies of converted modules, and forwards that somebody binds, compute with the parameters and attributes that they have."""

from __future__ import annotations

import copy
import pickle
import warnings
from types import MethodType

import pytest
import torch
from torch import nn

import opfuse
from opfuse.errors import OpfuseWarning
from tests.convert.blocks import Attention, GatedMLP
from tests.convert.test_changed import replica, shallow
from tests.convert.test_fuse import EXACT, FP8
from tests.turns import in_turn

SHALLOW = "this is a shallow copy of a converted module; it runs in high precision"


class Factor(nn.Module):
    """Reads an attribute, and has a block inside of it."""

    def __init__(self):
        super().__init__()
        self.factor, self.inner = 2.0, GatedMLP()

    def forward(self, x):
        return self.factor * self.inner(x)


def bare(block):
    """A shallow copy as it is."""
    return copy.copy(block)


COPIES = {"copy": bare, "copy with other parameters": shallow, "deepcopy": copy.deepcopy}


def results(module, call, x):
    """The result of ``call(module, x)`` and the gradients of ``x`` and of the module's parameters."""
    x = x.clone().requires_grad_()
    y = call(module, x)
    y.square().sum().backward()
    found = [y.detach(), x.grad, *[p.grad for p in module.parameters()]]
    module.zero_grad()
    return found


def agree(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


KINDS = {"block": GatedMLP, "model": Factor, "linear": lambda: nn.Linear(32, 32)}
CALLS = {"call": lambda module, x: module(x), "forward": lambda module, x: module.forward(x)}


@pytest.fixture
def anew():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.few(apart=True)
@pytest.mark.filterwarnings("ignore:.*shallow copy:opfuse.errors.OpfuseWarning")
@pytest.mark.parametrize(("kind", "copied", "how"), in_turn(KINDS, COPIES, CALLS, of=2))
def test_a_compiled_copy_has_the_results_of_the_plain_copy(anew, kind, copied, how):
    """Also of the original behind it, whose graph another one is where the copy has other parameters."""
    copied, call = COPIES[copied], CALLS[how]
    x, plain = torch.randn(4, 32), KINDS[kind]()
    model = copy.deepcopy(plain)
    opfuse.fuse_(model, EXACT)
    compiled = torch.compile(call, backend="aot_eager")
    for one, other in ((model, plain), (copied(model), copied(plain)), (model, plain)):
        agree(results(one, compiled, x), results(other, call, x))


@pytest.mark.parametrize("make", [GatedMLP, Attention, lambda: nn.Linear(32, 64)])
def test_the_forward_of_a_shallow_copy_is_its_own(make):
    """It reads what the copy has: parameters, submodules and the mode."""
    x, model = torch.randn(2, 16, 32), make()
    wanted = shallow(model)(x)
    opfuse.fuse_(model, FP8)
    before = model(x)
    with pytest.warns(OpfuseWarning, match=SHALLOW):
        other = shallow(model)
    assert torch.equal(other.forward(x), wanted)
    assert torch.equal(other(x), wanted)
    assert torch.equal(model.forward(x), before)


def test_what_moves_and_saves_a_shallow_copy_is_its_own():
    model = nn.Linear(32, 32)
    opfuse.fuse_(model, FP8)
    with pytest.warns(OpfuseWarning, match=SHALLOW):
        other = shallow(model)
    other.double()
    assert (model.weight.dtype, other.weight.dtype) == (torch.float32, torch.float64)
    assert torch.equal(other.state_dict()["weight"].float(), 2 * model.weight)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_a_deep_copy_stays_converted_and_tells_nothing(again):
    x, model = torch.randn(2, 32), GatedMLP()
    opfuse.fuse_(model, FP8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = again(model)
        assert torch.equal(other(x), model(x))
    assert vars(other).keys() == vars(model).keys()
    opfuse.unfuse_(other)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_forward_that_is_bound_anew_reads_the_module_that_it_is_bound_to():
    x, model = torch.randn(2, 32), nn.Linear(32, 32)
    others = [nn.Linear(32, 32), Doubled(32, 32), replica(model)]
    wanted = [nn.Linear.forward(other, x) for other in others]
    opfuse.fuse_(model, FP8)
    others[-1] = replica(model)
    under_recipe = model(x)
    with pytest.warns(OpfuseWarning, match=SHALLOW):
        found = [MethodType(model.forward.__func__, other)(x) for other in others]
    assert all(map(torch.equal, found, wanted))
    assert torch.equal(MethodType(model.forward.__func__, model)(x), under_recipe)


def test_the_owner_of_a_forward_has_what_the_module_has():
    model = Factor()
    opfuse.fuse_(model, FP8)
    owner = model.inner.forward.__self__
    assert owner.down_proj is model.inner.down_proj
    assert [*owner.parameters()] == [*model.inner.parameters()]
    assert owner.training
    with pytest.raises(AttributeError, match="'GatedMLP' object has no attribute 'gat_proj'"):
        owner.gat_proj  # noqa: B018
