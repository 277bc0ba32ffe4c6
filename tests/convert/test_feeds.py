"""A norm whose result one converted module alone reads becomes the first op of its pipeline."""

from __future__ import annotations

import copy
import functools
import operator
import warnings
from functools import partial
from types import MethodType

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import opfuse
from opfuse.convert.feeds import feeds
from opfuse.convert.probe import rms_norm_of
from opfuse.errors import ConversionError, OpfuseWarning
from opfuse.recipes import DelayedScaling
from opfuse.runtime.fuser import listed_plans
from tests.convert.blocks import GatedMLP, Layer
from tests.convert.test_fuse import EXACT, FP8, called, converted_exactly


def layer(forward):
    """A layer with two norms, an MLP and another module, and the given forward."""
    made = type("Made", (nn.Module,), {"forward": forward})()
    made.norm, made.other, made.mlp, made.linear = nn.RMSNorm(32), nn.LayerNorm(32), GatedMLP(), nn.Linear(32, 32)
    return made


def parallel(self, x, mask=None):
    y = self.norm(x)
    return self.linear(y) + self.mlp(y)


def sometimes(self, x, skip=None):
    y = self.norm(x)
    z = self.mlp(y)
    return z if skip is None else y + z


def twice(self, x, mask=None):
    return self.mlp(self.norm(self.mlp(self.norm(x))))


def shared(self, x, mask=None):
    return self.mlp(self.norm(x)) + self.linear(self.norm(x))


def keyword(self, x, mask=None, **rest):
    return x + self.mlp(x=self.norm(x)) + self.linear(self.other(x))


def stored(self, x, mask=None):
    self.normed = self.norm(x)
    self.all = [self.other(x)]
    return self.mlp(self.normed) + self.linear(self.all[0])


def without_gradients(self, x, mask=None):
    with torch.no_grad():
        y = self.norm(x)
    return self.mlp(y)


READ = {
    parallel: {},
    sometimes: {},
    twice: {},
    shared: {},
    keyword: {"norm": "mlp", "other": "linear"},
    stored: {},
    without_gradients: {},
}


@pytest.mark.parametrize("forward", READ, ids=lambda each: each.__name__)
def test_who_reads_a_norm_alone(forward):
    made = layer(forward)
    assert feeds(made) == READ[forward]
    found = {entry.path: entry.became for entry in opfuse.fuse_(made, FP8).of("joined")}
    assert found == {norm: f"in {reader}" for norm, reader in READ[forward].items()}


WRITES = {
    "a method": lambda self, x: x.mul_(2),
    "of a view": lambda self, x: x.view(-1).zero_(),
    "a function": lambda self, x: torch.relu_(x),
    "an operator": lambda self, x: operator.iadd(x, 1),
    "a flag": lambda self, x: nn.functional.relu(x, inplace=True),
    "out": lambda self, x: torch.add(x, 1, out=x),
    "an item": lambda self, x: operator.setitem(x, 0, 1),
    "a module": lambda self, x: self.act(x),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_norm_whose_input_is_written_before_its_result_is_read_stays(write):
    def written(self, x, mask=None):
        y = self.norm(x)
        WRITES[write](self, x)
        return self.mlp(y)

    def before(self, x, mask=None):
        WRITES[write](self, x)
        return self.mlp(self.norm(x))

    for forward, found in ((written, {}), (before, {"norm": "mlp"} if write != "an item" else {})):
        made = layer(forward)
        made.act = nn.ReLU(inplace=True)
        assert feeds(made) == found


def test_the_norm_is_computed_in_the_pipeline_of_its_reader():
    model, x = Layer().double(), [torch.randn(4, 8, 32, dtype=torch.float64)]
    report = converted_exactly(model, lambda: called(model, x))
    assert report.fused["mlp"] == "RMSNorm → Linear×2 → SwiGLU → Linear"


def test_the_norm_and_the_cast_are_one():
    model, x = Layer(), torch.randn(32, 32)
    opfuse.fuse_(model, FP8)
    with listed_plans() as plans:
        model(x)
    fused = [outcome.ops for outcome in plans[-1].outcomes if outcome.status == "fused"]
    assert any(names[0].endswith("rms_norm") and "quantize" in names[-1] for names in fused), fused
    model.second.register_forward_pre_hook(lambda module, args: None)
    with warnings.catch_warnings(action="error"):
        model(x)
    model.second.register_forward_hook(lambda module, args, result: None)
    with pytest.warns(OpfuseWarning, match="second hooks: wants none that read the result, .* see its input"):
        model(x)
    with warnings.catch_warnings(action="error"):
        model(x)
    with listed_plans() as plans:
        model.mlp(x)  # called by itself it gets what is normalised already
    assert not any("rms_norm" in name for plan in plans for outcome in plan.outcomes for name in outcome.ops)


@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=2), None], ids=["delayed", "ambient"])
def test_a_checkpoint_around_both_repeats_both(recipe):
    models = [Layer(), Layer()]
    models[1].load_state_dict(models[0].state_dict())
    found = []
    for model, run in zip(models, (lambda m, x: m(x), lambda m, x: checkpoint(m, x, use_reentrant=False))):
        opfuse.fuse_(model, recipe)
        for scale in (1.0, 3.0):
            x = (scale * torch.linspace(-1, 1, 1024).view(32, 32)).requires_grad_()
            with opfuse.autocast(recipe=recipe or FP8):
                y = run(model, x)
            y.square().sum().backward()
            found.append([y.detach(), x.grad, *[p.grad.clone() for p in model.parameters()]])
            model.zero_grad()
    for plain, again in zip(found[:2], found[2:]):
        assert all(map(torch.equal, plain, again))


def test_a_copy_awaits_its_own_norm():
    model, x = Layer(), torch.randn(32, 32)
    opfuse.fuse_(model, FP8)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.second.weight.zero_()
    assert not torch.equal(twin(x), model(x))
    assert torch.equal(twin(x), twin(x))


def interrupted(model, x):
    """What the norm hands to the MLP in a call that ends there by an error."""
    got = []

    def stop(module, args):
        got.extend(args)
        raise InterruptedError

    hook = model.mlp.register_forward_pre_hook(stop)
    with pytest.raises(InterruptedError):
        model(x)
    hook.remove()
    return got.pop()


def test_a_result_that_goes_astray_is_refused():
    model, x = Layer(), torch.randn(32, 32)
    opfuse.fuse_(model, FP8)
    hook = model.mlp.register_forward_pre_hook(lambda module, args: (args[0] + 0,))
    with pytest.raises(ConversionError, match="mlp input: wants the very result of the norm before it"):
        model(x)
    hook.remove()
    model(x)
    interrupted(model, x)  # the norm's result is gone: x may be made of it, as far as one can tell
    with pytest.raises(ConversionError, match="got another tensor, made of that or not"):
        model.mlp(x)
    model.mlp(x)
    for write in (lambda result: result.mul_(2), lambda result: model.second.weight.mul_(2)):
        result = interrupted(model, x)
        with torch.no_grad():
            write(result)
        with pytest.raises(ConversionError, match="got it after a write to that norm or to its input"):
            model.mlp(result)


def begins_with_a_norm(model, x):
    """Whether a pipeline of the call does."""
    with listed_plans() as plans:
        model(x)
    return any(plan.ops[0].startswith("RMSNorm") and len(plan.ops) > 1 for plan in plans)


def test_a_norm_that_other_code_calls_computes_itself():
    """As a loop of one's own that reads the result for something else. The layer, with hooks or not, still runs both as one."""
    model, x = Layer(), torch.randn(32, 32)
    nn.init.uniform_(model.second.weight, 1, 2)
    other = copy.deepcopy(model)
    opfuse.fuse_(model, EXACT)
    for hooks in (False, True):
        if hooks:
            for each in (model, model.second):
                each.register_forward_pre_hook(lambda module, args: args)
        for _ in range(3):
            assert torch.allclose(model.second(x), other.second(x), atol=1e-6)
            assert torch.allclose(model.mlp(model.second(x)), other.mlp(other.second(x)), atol=1e-5)
        assert begins_with_a_norm(model, x)


class Wrapped(Layer):
    """As FSDP2 makes a class of a layer of transformers, whose classes wrap their forward."""

    @functools.wraps(Layer.forward)
    def forward(self, *args, **kwargs):
        return Layer.forward(self, *args, **kwargs)


def test_a_class_that_wraps_the_forward_of_the_layer_joins_the_norm():
    model, x = Layer(), torch.randn(32, 32)
    opfuse.fuse_(model, FP8)
    model.__class__ = Wrapped
    assert begins_with_a_norm(model, x)


class Halving(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x / 2)


def wrapped(model):
    model.mlp = Halving(model.mlp)


def checkpointed(model):
    model.mlp = checkpoint_wrapper(model.mlp)


def forward_of_ones_own(model):
    model.mlp.forward = partial(GatedMLP.forward, model.mlp)


MOVES = {
    "given back": lambda model: opfuse.unfuse_(model.mlp),
    "converted by itself": lambda model: opfuse.fuse_(model.mlp, EXACT),
    "replaced": lambda model: setattr(model, "mlp", GatedMLP()),
    "wrapped": wrapped,
    "wrapped by a checkpoint": checkpointed,
    "with a forward of one's own": forward_of_ones_own,
}


@pytest.mark.parametrize("move", MOVES)
def test_a_norm_whose_reader_is_no_more_computes_itself(move):
    torch.manual_seed(0)
    model, x = Layer(), [5 * torch.randn(4, 32)]
    nn.init.uniform_(model.second.weight, 1, 2)
    opfuse.fuse_(model, EXACT)
    model(*x)
    MOVES[move](model)
    got = called(model, x)
    if move == "with a forward of one's own":
        del model.mlp.forward
    with opfuse.autocast(enabled=False):
        for one, other in zip(got, called(model, x)):
            torch.testing.assert_close(one, other)


def test_a_norm_that_is_read_in_one_mode_alone_stays():
    def doubled(self, x, mask=None):
        y = self.norm(x)
        return x + self.mlp(y if self.training else 2 * y)

    def flagged(self, x, mask=None):
        y = self.norm(x)
        y = y if self.linear.bias is None else 2 * y
        return x + self.mlp(y)

    assert feeds(layer(doubled)) == {}
    made, x = layer(flagged), torch.randn(4, 32)
    bias, made.linear.bias = made.linear.bias, None
    assert opfuse.fuse_(made, EXACT)["norm"].became == "in mlp"
    made(x)
    made.linear.bias = bias
    with pytest.raises(ConversionError, match="mlp input: wants the very result of the norm before it"):
        made(x)


def twice_read(self, x, mask=None):
    y = self.norm(x)
    return x + self.mlp(y) + y if self.both else x + self.mlp(y)


def read_in_sum(self, x, mask=None):
    y = self.norm(x)
    return x + self.mlp(y) + y


CHANGES = {
    "a flag": lambda model: setattr(model, "both", True),
    "a forward": lambda model: setattr(model, "forward", MethodType(read_in_sum, model)),
    "that of the class": lambda model: setattr(type(model), "forward", read_in_sum),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_norm_is_computed_where_the_module_around_it_came_to_read_it_as_well(change):
    model, x = layer(twice_read), torch.randn(4, 32)
    model.both = False
    assert opfuse.fuse_(model, EXACT)["norm"].became == "in mlp"
    before = model(x)
    for each in (copy.deepcopy(model), model):
        CHANGES[change](each)
        torch.testing.assert_close(each(x), before + F.rms_norm(x, (32,), model.norm.weight))


class Scaled(nn.Module):
    """As RMS norms of models are written."""

    def __init__(self, width, *, centered=False):
        super().__init__()
        self.weight, self.variance_epsilon, self.centered = nn.Parameter(torch.ones(width)), 1e-6, centered

    def forward(self, hidden):
        wide = hidden.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (1 + self.weight if self.centered else self.weight) * wide.to(hidden.dtype)


class Dropping(Scaled):
    def forward(self, hidden):
        return F.dropout(super().forward(hidden), 0.5, self.training)


class Other(Scaled):
    def forward(self, hidden):
        return self.weight * hidden / hidden.abs().mean(-1, keepdim=True)


class Frozen(Scaled):
    """The values of an RMS norm; its gradient takes the magnitude for a constant."""

    def forward(self, hidden):
        return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True).detach() + self.variance_epsilon)


def test_rms_norms_are_known_by_their_values_and_gradients():
    assert rms_norm_of(Scaled(32)) == (1e-6, False)
    assert rms_norm_of(Scaled(32, centered=True)) == (1e-6, True)
    assert rms_norm_of(Scaled(32).to(device="meta", dtype=torch.bfloat16)) == (1e-6, False)
    assert rms_norm_of(Other(32)) is None
    assert rms_norm_of(Dropping(32).eval()) is None
    assert rms_norm_of(Scaled(1)) == (1e-6, False)
    assert rms_norm_of(Frozen(32)) is None
    assert rms_norm_of(nn.LayerNorm(32)) is None
    assert rms_norm_of(nn.PReLU(32)) is None


def test_a_norm_and_a_reader_on_either_side_of_the_end_of_a_region():
    """The reader has no recipe any more, and what it is handed was not normed."""
    model, x = Layer(), torch.randn(32, 32)
    opfuse.fuse_(model)
    with torch.no_grad():
        model.second.weight.fill_(3.0)
        want = model.mlp(model.second(x))
        with opfuse.autocast(recipe=FP8):
            handed = model.second(x)
        torch.testing.assert_close(model.mlp(handed), want)
        assert torch.equal(model.mlp(model.second(x)), want)
