"""Delayed scaling where something changes: the recipe in mid-training, a loss that overflows, a forward pass that fails."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.errors import OpfuseWarning
from opfuse.recipes import DelayedScaling, Format
from tests.compiler.harness import differences

HYBRID = DelayedScaling(amax_history_len=4)
E4M3 = HYBRID.replace(fp8_format=Format.E4M3)


def layer() -> ops.Linear:
    torch.manual_seed(0)
    return ops.Linear(64, 32, bias=False)


def step(model: ops.Linear, recipe: DelayedScaling, *, factor: float = 1.0, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the input, and what it is exactly."""
    torch.manual_seed(seed)
    x, dy = torch.randn(32, 64, requires_grad=True), 1e-3 * torch.randn(32, 32)
    with opfuse.autocast(recipe=recipe):
        y = model(x)
    y.backward(factor * dy)
    return x.grad, factor * dy @ model.weight.detach()


def error(pair: tuple[torch.Tensor, torch.Tensor]) -> float:
    got, wanted = pair
    return ((got - wanted).norm() / wanted.norm()).item()


def tensors(model: ops.Linear) -> dict[str, torch.Tensor]:
    return {
        f"{i} {name}": tensor.clone()
        for i, state in enumerate(model.quantizer_states)
        for name, tensor in (("scale", state.scale), ("history", state.amax_history))
    }


@pytest.mark.row("U10")
@pytest.mark.parametrize(("before", "after"), [(HYBRID, E4M3), (E4M3, HYBRID)])
def test_u10_a_change_of_format_converts_the_scale_of_gradients(before, after):
    """E4M3 under the scale of E5M2 saturates: the error was 0.98; E5M2 rounds to 3 bits."""
    model, other = layer(), layer()
    for seed in range(3):
        step(model, before, seed=seed)
        step(other, after, seed=seed)
    assert error(step(model, after)) < 0.06
    step(other, after)
    assert differences(tensors(model), tensors(other)) == []


@pytest.mark.row("U10")
def test_u10_a_change_of_margin_converts_every_scale():
    """Also where the next amax is 0, which keeps the scale that there is."""
    model, recent = layer(), HYBRID.replace(margin=3, amax_compute_algo="most_recent")
    step(model, recent)
    before = model.quantizer_states.to_dict()["grad_output/scale"].item()
    step(model, recent.replace(margin=-2), factor=0.0)
    assert model.quantizer_states.to_dict()["grad_output/scale"].item() == 32 * before


@pytest.mark.row("U10")
@pytest.mark.parametrize("change", [{"amax_history_len": 2}, {"margin": 5}, {"fp8_format": Format.E4M3, "amax_history_len": 9}])
def test_u10_validation_under_another_recipe_changes_no_training(change):
    model = layer()
    for seed in range(3):
        step(model, HYBRID, seed=seed)
    before, held = tensors(model), [(state.scale, state.amax_history) for state in model.quantizer_states]
    with torch.no_grad(), opfuse.autocast(recipe=HYBRID.replace(**change)):
        model(100 * torch.randn(32, 64))
    assert differences(tensors(model), before) == []
    assert all(s.scale is scale and s.amax_history is history for s, (scale, history) in zip(model.quantizer_states, held))


def test_validation_under_another_margin_casts_with_its_scale():
    model, wide = layer(), HYBRID.replace(margin=4)
    x = torch.randn(32, 64)
    other = copy.deepcopy(model)
    step(model, HYBRID)
    step(other, wide)
    with torch.no_grad(), opfuse.autocast(recipe=wide):
        assert torch.equal(model(x), other(x))


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_loss_that_overflows_costs_one_step_and_is_told(bad):
    """It stayed in the history, and froze the scale for as long as that is: 1 024 steps by default."""
    model, other, recipe = layer(), layer(), DelayedScaling()
    for seed in range(3):
        step(model, recipe, seed=seed)
        step(other, recipe, seed=seed)
    before = tensors(model)["2 scale"].item()
    step(model, recipe, factor=bad)
    assert tensors(model)["2 scale"].item() == before
    for seed in range(20):
        step(model, recipe, factor=1e-3, seed=seed)
        step(other, recipe, factor=1e-3, seed=seed)
    assert tensors(model)["2 scale"].item() == tensors(other)["2 scale"].item() == before
    short = HYBRID
    for seed in range(5):
        step(model, short, factor=1e-3, seed=seed)
    assert 500 * before < tensors(model)["2 scale"].item() < 2000 * before
    assert tensors(model)["2 history"].isfinite().all()
    with pytest.warns(OpfuseWarning, match=r"Linear.* grad_output: 1 amax was infinite or NaN"):
        model.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.state_dict()
    step(model, short, factor=bad)
    with pytest.warns(OpfuseWarning, match="0 grad_output: 1 amax "), opfuse.autocast(recipe=short):
        opfuse.explain(ops.Sequential(model), torch.randn(32, 64))


def test_a_forward_pass_that_fails_leaves_no_amax():
    model, wanted = layer(), layer()
    step(model, HYBRID)
    step(wanted, HYBRID)

    @opfuse.autocast(recipe=HYBRID)
    def fail():
        model(1e3 * torch.randn(32, 64))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert differences(tensors(model), tensors(wanted)) == []
    step(model, HYBRID)
    step(wanted, HYBRID)
    assert differences(tensors(model), tensors(wanted)) == []
