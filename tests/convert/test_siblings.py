"""Query, key and value of one tensor are one product, of which each module hands out its columns."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import opfuse
from opfuse import ops
from opfuse.convert.converted import converted
from opfuse.errors import OpfuseWarning
from opfuse.recipes import DelayedScaling, MXFP8BlockScaling
from tests.convert.blocks import Attention
from tests.convert.test_fuse import EXACT, FP8, called, converted_exactly
from tests.plans import plans_used


class Heads(Attention):
    """As in transformers: the shape of the heads is made of that of the input."""

    def forward(self, x, mask=None, cache=None, **options):
        heads = (*x.shape[:-1], -1, 8)
        q, k, v = (one(x).view(heads).transpose(1, 2) for one in (self.q, self.k, self.v))
        if cache is not None:
            k, v = cache.update(k, v)
        y = nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)
        return self.o(y.reshape(*x.shape))


class Cross(Attention):
    """Queries of one tensor, keys and values of another."""

    def forward(self, x, other, mask=None):
        return self.o(nn.functional.scaled_dot_product_attention(self.q(x), self.k(other), self.v(other), mask))


class Written(Attention):
    """Queries of a tensor as it was, keys and values of what is left of it."""

    def forward(self, x, mask=None):
        q = self.q(x)
        x.add_(1)
        return self.o(nn.functional.scaled_dot_product_attention(q, self.k(x), self.v(x), mask))


class Twice(Attention):
    """Queries that are keys as well."""

    def forward(self, x, mask=None):
        return self.o(nn.functional.scaled_dot_product_attention(self.q(x), self.q(x), self.k(x), mask))


class Fixed(Attention):
    """Queries that get no gradient."""

    def forward(self, x, mask=None):
        with torch.no_grad():
            q = self.q(x)
        return self.o(nn.functional.scaled_dot_product_attention(q, self.k(x), self.v(x), mask))


def joined(report):
    return {entry.path: entry.became for entry in report.of("joined")}


def test_which_modules_read_one_tensor():
    assert joined(opfuse.fuse_(Heads(), FP8)) == joined(opfuse.fuse_(Attention(), FP8)) == {"k": "in q", "v": "in q"}
    for one in (Cross, Written, Fixed):
        assert joined(opfuse.fuse_(one(), FP8)) == {"v": "in k"}
    assert joined(opfuse.fuse_(Twice(), FP8)) == {}
    report = opfuse.fuse_(Heads(), FP8, policy={"k": MXFP8BlockScaling()})
    assert joined(report) == {"v": "in q"}
    assert report["k"].recipe == "MXFP8BlockScaling"
    assert report.share == 1
    assert joined(opfuse.fuse_(Heads(), FP8, filter_fn=lambda module, path: isinstance(module, nn.Linear))) == {}


@pytest.mark.parametrize("make", [Heads, Attention])
def test_columns_of_one_product_are_what_the_products_were(make):
    model, x = make().double(), [torch.randn(2, 16, 32, dtype=torch.float64)]
    converted_exactly(model, lambda: called(model, x))


def test_the_product_is_the_one_that_one_would_write():
    model, x = Attention(), torch.randn(2, 16, 32)
    own = ops.Linear(32, 96)
    with torch.no_grad():
        own.weight.copy_(torch.cat([model.q.weight, model.k.weight, model.v.weight]))
        own.bias.copy_(torch.cat([model.q.bias, model.k.bias, model.v.bias]))
    with opfuse.autocast(recipe=FP8):
        wanted = own(x).split(32, -1)
    opfuse.fuse_(model, FP8)
    with plans_used() as plans:
        found = [one(x) for one in (model.q, model.k, model.v)]
    assert len(plans) == 1
    assert all(map(torch.equal, found, wanted))
    assert all(part.is_contiguous() for part in found)  # nothing says what its forward does with them


def test_who_is_called_out_of_turn_computes_by_itself():
    model, x = Attention(), torch.randn(2, 16, 32)
    opfuse.fuse_(model, FP8)
    with plans_used() as plans:
        alone = model.k(x)
        model.q(x)
        with torch.no_grad():
            model.v(x)  # in another mode
        x.mul_(2)
        changed = model.v(x)
        model.q(x)
        x.data = x / 2  # which counts no write
        again = model.k(x)
    assert len(plans) == 6
    assert torch.equal(again, alone)
    x.data = 2 * x
    assert torch.equal(changed, model.v(x))
    assert torch.equal(alone, model.k(x / 2))


def test_columns_of_former_weights_are_not_handed_out():
    model, x = Attention(), torch.randn(2, 16, 32)
    opfuse.fuse_(model, FP8)
    model.q(x)
    with torch.no_grad():
        model.k.weight.mul_(2)
    model.v.weight = nn.Parameter(3 * model.v.weight.detach())
    found = [model.k(x), model.v(x)]
    assert all(map(torch.equal, found, [model.k(x.clone()), model.v(x.clone())]))
    for write in (lambda: model.k.bias.fill_(100), lambda: setattr(model.k.weight, "data", torch.zeros(32, 32))):
        model.q(x)
        with torch.no_grad():
            write()
        assert torch.equal(model.k(x), model.k(x.clone()))
    model.q(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.k(x).dtype is torch.bfloat16
    parametrizations.weight_norm(model.k)
    with pytest.warns(OpfuseWarning, match=r"k: wants what it was when fuse_ ran, {'parameters': .*'weight'.*'bias'"):
        found = model.q(x), model.k(x)
    for one, other in zip(found, [model.q(x), nn.functional.linear(x, model.k.weight, model.k.bias)]):
        torch.testing.assert_close(one, other, equal_nan=True, rtol=0, atol=0)


def test_columns_of_another_recipe_are_not_handed_out():
    model, x = Attention(), torch.randn(2, 16, 32)
    opfuse.fuse_(model)
    with opfuse.autocast(recipe=FP8):
        model.q(x)
    with opfuse.autocast(recipe=EXACT):
        assert torch.equal(model.k(x), model.k(x.clone()))


def test_columns_are_written_as_tensors_of_their_own():
    """In place on a view of the query: what a plain model does, and key and value keep what they save for their backward pass."""

    class Scaling(Heads):
        def forward(self, x, mask=None):
            q, k, v = (one(x).view(*x.shape[:-1], 4, 8).transpose(1, 2) for one in (self.q, self.k, self.v))
            k = k * k
            q.mul_(0.5)
            return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))

    model, x = Scaling().double(), [torch.randn(2, 16, 32, dtype=torch.float64)]
    report = converted_exactly(model, lambda: called(model, x))
    assert joined(report) == {"k": "in q", "v": "in q"}


def test_a_module_whose_result_no_loss_depends_on_gets_no_gradient():
    """An optimizer with weight decay would shrink its weights over zeros."""
    model, x = Attention(), torch.randn(2, 16, 32)
    opfuse.fuse_(model, FP8)
    for pack in (False, True):
        opfuse.fuse_(model, FP8, pack=pack)
        q, _, v = model.q(x), model.k(x), model.v(x)
        (q * v).sum().backward()
        assert {name for name, p in model.named_parameters() if p.grad is None} == {"k.weight", "k.bias", "o.weight", "o.bias"}
        model.zero_grad()


class Adapter(nn.Module):
    """As peft wraps a layer."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer, self.lora_A, self.lora_B = layer, nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def test_layers_with_adapters_stay_joined_and_adapters_stay_in_high_precision():
    model = Heads()
    for name in ("q", "k", "v"):
        setattr(model, name, Adapter(getattr(model, name)))
    report = opfuse.fuse_(model, FP8)
    assert joined(report) == {"k.base_layer": "in base_layer", "v.base_layer": "in base_layer"}
    assert report["q.lora_A"].got == "a low-rank adapter, which stays in high precision"


def test_nothing_is_kept_longer_than_the_tensor():
    model, x = Attention(), torch.randn(2, 16, 32)
    opfuse.fuse_(model, FP8)
    shared = converted(model.q).shared
    model(x)
    assert shared.waiting == {}
    model.q(x)
    (waiting,) = shared.waiting.values()
    assert len(waiting.left) == 2
    del x
    gc.collect()
    assert shared.waiting == {}


@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=2), None], ids=["delayed", "ambient"])
def test_checkpoints_and_copies_share_anew(recipe):
    plain = Heads()
    models = [plain, copy.deepcopy(plain)]
    opfuse.fuse_(plain, recipe)
    models.append(copy.deepcopy(plain))
    opfuse.fuse_(models[1], recipe)
    runs = (lambda m, x: m(x), lambda m, x: checkpoint(m, x, use_reentrant=False), lambda m, x: m(x))
    found = []
    for model, run in zip(models, runs):
        for scale in (1.0, 3.0):
            x = (scale * torch.linspace(-1, 1, 1024).view(2, 16, 32)).requires_grad_()
            with opfuse.autocast(recipe=recipe or FP8):
                y = run(model, x)
            y.square().sum().backward()
            found.append([y.detach(), x.grad, *[p.grad.clone() for p in model.parameters()]])
            model.zero_grad()
    for others in (found[2:4], found[4:]):
        for one, other in zip(found[:2], others):
            assert all(map(torch.equal, one, other))
