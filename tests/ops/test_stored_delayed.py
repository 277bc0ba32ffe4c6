"""Weights that live quantized under delayed scaling: every write takes its scale from what it writes."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.recipes import CustomRecipe, DelayedScaling, QuantizerRole
from opfuse.recipes.custom import DelayedScalingRequest
from opfuse.tensors import QuantizedTensor

BF16 = torch.bfloat16
GROUPS = 2
ROUNDING = 0.03
"""Above the relative error of rounding to E4M3, about 0.026; clipping a value to half of it makes more."""


def delayed_requests(role: QuantizerRole) -> DelayedScalingRequest:
    return DelayedScalingRequest()


RECIPES = {
    "delayed": DelayedScaling(amax_history_len=2),
    "margin": DelayedScaling(margin=3),
    "custom": CustomRecipe(qfactory=delayed_requests),
}
FORMS = {
    "linear": lambda: ops.Linear(64, 32, bias=False, dtype=BF16),
    "grouped": lambda: ops.GroupedLinear(GROUPS, 64, 32, bias=False, dtype=BF16),
    "grouped single": lambda: ops.GroupedLinear(GROUPS, 64, 32, bias=False, single_grouped_weight=True, dtype=BF16),
}
every_form = pytest.mark.parametrize("form", FORMS)
every_recipe = pytest.mark.parametrize("kind", RECIPES)


def stored(form: str = "linear", kind: str = "delayed") -> torch.nn.Module:
    torch.manual_seed(0)
    with opfuse.quantized_model_init(recipe=RECIPES[kind], preserve_high_precision_init_val=True):
        return FORMS[form]()


def step(layer: torch.nn.Module, kind: str = "delayed") -> None:
    x = torch.randn(32, 64, dtype=BF16, requires_grad=True)
    splits = (torch.full((GROUPS,), len(x) // GROUPS),) if isinstance(layer, ops.GroupedLinear) else ()
    with opfuse.autocast(recipe=RECIPES[kind]):
        y = layer(x, *splits)
    y.float().square().mean().backward()


def held(layer: torch.nn.Module) -> list[torch.Tensor]:
    """The values of the weights, in fp32, a matrix each."""
    values = [weight.detach().dequantize(torch.float32) for weight in layer.parameters()]
    return [matrix for value in values for matrix in value.view(-1, *value.shape[-2:])]


def assert_rounded(layer: torch.nn.Module, wanted: list[torch.Tensor]) -> None:
    """The weights hold ``wanted`` but for rounding: to E4M3, and to bf16 what an optimizer computes on the way."""
    for got, want in zip(held(layer), wanted, strict=True):
        want = want.float()
        assert (got - want).norm() < ROUNDING * want.norm()
        assert got.abs().max().item() == pytest.approx(want.abs().max().item(), rel=0.01)


def loaded(weight: torch.Tensor, values: torch.Tensor, *, assign: bool) -> None:
    """By ``load_state_dict``, of plain values or, assigned, of a parameter that is stored in the same way."""
    module = torch.nn.Module()
    module.weight = weight
    if assign:
        other = copy.deepcopy(weight)
        other.copy_(values)
        module.load_state_dict({"weight": other}, assign=True)
        weight.data = module.weight.data
    else:
        module.load_state_dict({"weight": values})


WRITES = {
    "copy_": lambda weight, values: weight.copy_(values),
    "copy_ of fp32": lambda weight, values: weight.copy_(values.float()),
    "setitem": lambda weight, values: weight.__setitem__(slice(None), values),
    "data": lambda weight, values: setattr(weight, "data", values.clone()),
    "add_": lambda weight, values: weight.zero_().add_(values),
    "out": lambda weight, values: torch.mul(values, 1, out=weight),
    "foreach": lambda weight, values: torch._foreach_copy_([weight], [values]),
    "load_state_dict": lambda weight, values: loaded(weight, values, assign=False),
    "load_state_dict, assign": lambda weight, values: loaded(weight, values, assign=True),
}


@pytest.mark.row("U12")
@every_recipe
@every_form
def test_u12_the_first_scale_is_of_the_initial_values(form, kind):
    layer = stored(form, kind)
    preserved = [weight.get_high_precision_init_val().to(weight.device) for weight in layer.parameters()]
    assert_rounded(layer, [matrix for value in preserved for matrix in value.view(-1, *value.shape[-2:])])


@pytest.mark.few
@pytest.mark.row("U12")
@pytest.mark.parametrize("factor", [1e-4, 4.0, 1e5])
@pytest.mark.parametrize("write", WRITES)
@every_form
def test_u12_a_write_takes_its_scale_from_what_it_writes(form, write, factor):
    """Neither clipped to the amax of the initial values nor rounded as small beside it, group by group."""
    layer = stored(form)
    step(layer)
    wanted = [factor * (i + 1) * matrix for i, matrix in enumerate(held(layer))]
    parts = iter(wanted)
    for weight in layer.parameters():
        matrices = [next(parts) for _ in range(weight.numel() // (32 * 64))]
        with torch.no_grad():
            WRITES[write](weight, torch.stack(matrices).view(weight.shape).to(BF16))
    assert_rounded(layer, [matrix.to(BF16) for matrix in wanted])


@pytest.mark.row("U12")
@every_recipe
def test_u12_fill_and_draws_arrive(kind):
    layer = stored(kind=kind)
    with torch.no_grad():
        for value in (3.0, 1000.0, 1e-6, 0.0):
            layer.weight.fill_(value)
            assert layer.weight.dequantize(torch.float32).unique().tolist() == pytest.approx([value], rel=0.01)
        torch.manual_seed(1)
        torch.nn.init.normal_(layer.weight, std=0.7071)
        torch.manual_seed(1)
        assert_rounded(layer, [torch.nn.init.normal_(torch.empty(32, 64, dtype=BF16), std=0.7071)])


@pytest.mark.few
@pytest.mark.row("U12")
@every_recipe
@every_form
@pytest.mark.filterwarnings("ignore:a step on weights")
def test_u12_an_optimizer_keeps_weights_at_fp8_accuracy(form, kind):
    """Also where a step makes them ten times as large."""
    layer = stored(form, kind)
    for rate in (1.0, 1e3, 1e4, 1e-3):
        optimizer = torch.optim.SGD(layer.parameters(), lr=rate)
        optimizer.zero_grad()
        step(layer, kind)
        exact = [w.detach().dequantize() - rate * w.grad for w in layer.parameters()]
        optimizer.step()
        assert_rounded(layer, [matrix for value in exact for matrix in value.view(-1, 32, 64)])


@every_recipe
@every_form
def test_no_call_casts_a_stored_weight_or_keeps_a_state_for_it(form, kind):
    layer = stored(form, kind)
    before = [tensor.clone() for weight in layer.parameters() for tensor in weight.record.tensors()]
    step(layer, kind)
    after = [tensor for weight in layer.parameters() for tensor in weight.record.tensors()]
    assert all(map(torch.equal, before, after))
    assert not any("weight" in name for name in layer.basic_ops[0].quantizer_states.to_dict())


@every_form
@pytest.mark.filterwarnings("ignore:a step on weights")
def test_a_copy_goes_on_as_the_weight_would_have(form):
    layer = stored(form)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    copies = [copy.deepcopy(layer), stored(form), stored(form)]
    for other, assign in zip(copies[1:], (False, True)):
        file.seek(0)
        other.load_state_dict(torch.load(file), assign=assign)
    for each in (layer, *copies):
        torch.manual_seed(1)
        for _ in range(2):
            optimizer = torch.optim.SGD(each.parameters(), lr=100.0)
            optimizer.zero_grad()
            step(each)
            optimizer.step()
        assert all(isinstance(weight, QuantizedTensor) for weight in each.parameters())
        assert all(map(torch.equal, held(each), held(layer)))
