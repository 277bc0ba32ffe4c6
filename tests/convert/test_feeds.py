"""A norm whose result one converted module alone reads becomes the first op of its pipeline."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import opfuse
from opfuse.convert.feeds import feeds
from opfuse.convert.probe import rms_norm_of
from opfuse.errors import ConversionError
from opfuse.recipes import DelayedScaling
from opfuse.runtime.fuser import listed_plans
from tests.convert.blocks import GatedMLP, Layer
from tests.convert.test_fuse import FP8, called, converted_exactly


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


READ = {
    parallel: {},
    sometimes: {},
    twice: {},
    shared: {},
    keyword: {"norm": "mlp", "other": "linear"},
}


@pytest.mark.parametrize("forward", READ, ids=lambda each: each.__name__)
def test_who_reads_a_norm_alone(forward):
    made = layer(forward)
    assert feeds(made) == READ[forward]
    found = {entry.path: entry.became for entry in opfuse.fuse_(made, FP8).of("joined")}
    assert found == {norm: f"in {reader}" for norm, reader in READ[forward].items()}


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


def test_a_result_that_goes_astray_is_refused():
    model, x = Layer(), torch.randn(32, 32)
    opfuse.fuse_(model, FP8)
    hook = model.mlp.register_forward_pre_hook(lambda module, args: (args[0] + 0,))
    with pytest.raises(ConversionError, match="mlp input: wants the very result of the norm before it"):
        model(x)
    hook.remove()
    model(x)
    model.second(x)  # and its result is forgotten
    model.mlp(x)


class Scaled(nn.Module):
    """As RMS norms of models are written."""

    def __init__(self, width, *, centered=False):
        super().__init__()
        self.weight, self.variance_epsilon, self.centered = nn.Parameter(torch.ones(width)), 1e-6, centered

    def forward(self, hidden):
        wide = hidden.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (1 + self.weight if self.centered else self.weight) * wide.to(hidden.dtype)


class Other(Scaled):
    def forward(self, hidden):
        return self.weight * hidden / hidden.abs().mean(-1, keepdim=True)


def test_rms_norms_are_known_by_their_values():
    assert rms_norm_of(Scaled(32)) == (1e-6, False)
    assert rms_norm_of(Scaled(32, centered=True)) == (1e-6, True)
    assert rms_norm_of(Scaled(32).to(device="meta", dtype=torch.bfloat16)) == (1e-6, False)
    assert rms_norm_of(Other(32)) is None
    assert rms_norm_of(nn.LayerNorm(32)) is None
    assert rms_norm_of(nn.PReLU(32)) is None
