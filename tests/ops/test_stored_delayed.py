"""Weights stored under delayed scaling: the scales that writes to them cast with, and when these move."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.errors import ShapeError
from opfuse.recipes import DelayedScaling, DelayedScalingState, Float8CurrentScaling, Snapshot
from opfuse.tensors.quantizers import Float8Quantizer, GroupedQuantizer

BF16 = torch.bfloat16
RECIPE = DelayedScaling(amax_history_len=2)
GROUPS = 2
RATE = 1.0
FORMS = {
    "linear": lambda: ops.Linear(64, 32, bias=False, dtype=BF16),
    "grouped": lambda: ops.GroupedLinear(GROUPS, 64, 32, bias=False, dtype=BF16),
    "grouped single": lambda: ops.GroupedLinear(GROUPS, 64, 32, bias=False, single_grouped_weight=True, dtype=BF16),
}
every_form = pytest.mark.parametrize("form", FORMS)


def stored(form: str, recipe: DelayedScaling = RECIPE) -> torch.nn.Module:
    torch.manual_seed(0)
    with opfuse.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        return FORMS[form]()


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    grouped = isinstance(layer, ops.GroupedLinear)
    return layer(x, torch.full((GROUPS,), len(x) // GROUPS)) if grouped else layer(x)


def data() -> torch.Tensor:
    return torch.randn(32, 64, dtype=BF16, requires_grad=True)


def step(layer: torch.nn.Module, recipe: DelayedScaling = RECIPE) -> None:
    with opfuse.autocast(recipe=recipe):
        y = call(layer, data())
    y.float().square().mean().backward()


def write(layer: torch.nn.Module, values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for weight, value in zip(layer.parameters(), values, strict=True):
            weight.copy_(value)


def states(layer: torch.nn.Module) -> list[DelayedScalingState]:
    """Those of the weights, in order of the groups."""
    op = layer.basic_ops[0]
    found = [op.quantizer_states.find(slot) for name in op.parameter_names for slot in op.state_slots(name)]
    assert all(isinstance(state, DelayedScalingState) for state in found)
    return found


def scales(layer: torch.nn.Module) -> list[float]:
    return [state.scale.item() for state in states(layer)]


def initial(weight: opfuse.QuantizedTensor) -> torch.Tensor:
    """Its values before the first cast, which are kept on the CPU."""
    return weight.get_high_precision_init_val().to(weight.device)


def matrices(values: list[torch.Tensor]) -> list[torch.Tensor]:
    return [matrix for value in values for matrix in value.view(-1, *value.shape[-2:])]


def wanted(values: list[torch.Tensor]) -> list[float]:
    """The scale of each matrix' own amax."""
    return [(torch.tensor(448.0) / matrix.float().abs().max()).item() for matrix in matrices(values)]


def errors(layer: torch.nn.Module, values: list[torch.Tensor]) -> list[float]:
    """Relative errors of what the weights hold; rounding to E4M3 alone makes about 0.026."""
    held = matrices([weight.detach().dequantize() for weight in layer.parameters()])
    return [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(held, matrices(values))]


def linked(layer: torch.nn.Module) -> bool:
    """Whether the weights are written with the states of the op."""
    quantizers = [weight.quantizer for weight in layer.parameters()]
    members = [m for q in quantizers for m in (q.quantizers if isinstance(q, GroupedQuantizer) else (q,))]
    pairs = list(zip(members, states(layer), strict=True))
    return all(m.scale.data_ptr() == s.scale.data_ptr() and m.amax.data_ptr() == s.amax_history.data_ptr() for m, s in pairs)


@pytest.mark.row("U12")
@every_form
def test_u12_the_first_scale_is_of_the_initial_values(form):
    layer = stored(form)
    values = [initial(weight) for weight in layer.parameters()]
    assert scales(layer) == wanted(values)
    assert all(error < 0.03 for error in errors(layer, values))
    assert [state.amax.item() for state in states(layer)] == [m.abs().max().item() for m in matrices(values)]


@pytest.mark.row("U12")
@every_form
@pytest.mark.parametrize("factor", [1e-3, 1e5])
def test_u12_the_scale_follows_what_is_written(form, factor):
    """A write casts with the scale before it, whose own amax the next training pass turns into the scale of the next write."""
    layer = stored(form, DelayedScaling())
    values = [factor * initial(weight) for weight in layer.parameters()]
    for _ in range(3):  # the history forgets the initial values
        write(layer, values)
        step(layer)
    assert scales(layer) == wanted(values)
    write(layer, values)
    assert all(error < 0.03 for error in errors(layer, values))


@pytest.mark.row("U12")
@every_form
def test_u12_an_optimizer_keeps_weights_at_fp8_accuracy(form):
    layer = stored(form)
    exact = [weight.detach().dequantize().float() for weight in layer.parameters()]
    optimizer = torch.optim.SGD(layer.parameters(), lr=RATE)
    seen = []
    for _ in range(5):
        optimizer.zero_grad()
        step(layer)
        exact = [w.detach().dequantize().float() - RATE * w.grad.float() for w in layer.parameters()]
        optimizer.step()
        seen.append(scales(layer))
        assert all(error < 0.03 for error in errors(layer, exact))
    assert len({tuple(each) for each in seen}) > 1
    assert 1.0 not in seen[-1]


@every_form
def test_only_a_training_pass_moves_the_scale_and_a_failed_one_does_not(form):
    layer = stored(form)
    before = layer.basic_ops[0].quantizer_states.to_dict()
    with torch.no_grad(), opfuse.autocast(recipe=RECIPE):
        call(layer, data())
    with opfuse.autocast(recipe=RECIPE), torch.no_grad():
        call(layer, data())
    with pytest.raises(ShapeError), opfuse.autocast(recipe=RECIPE):
        call(layer, call(layer, data()))
    after = layer.basic_ops[0].quantizer_states.to_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("form", ["linear", "grouped single"])
def test_a_checkpointed_layer_updates_its_scale_once(form):
    found = []
    for checkpointed in (True, False):
        layer = stored(form)
        for _ in range(2):
            write(layer, [2 * weight.detach().dequantize() for weight in layer.parameters()])
            torch.manual_seed(1)
            x = data()
            with opfuse.autocast(recipe=RECIPE):
                y = opfuse.checkpoint(call, layer, x) if checkpointed else call(layer, x)
            y.float().square().mean().backward()
            assert linked(layer)
        found.append(layer.basic_ops[0].quantizer_states.to_dict())
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], tensor) for name, tensor in found[1].items())


@every_form
def test_what_only_looks_at_a_layer_leaves_its_weights_where_they_are(form):
    layer = stored(form)
    longer = RECIPE.replace(amax_history_len=9)
    with opfuse.autocast(recipe=longer), Snapshot().replaying(), layer.basic_ops[0].quantizer_states.kept():
        call(layer, data())
    assert linked(layer)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "history": lambda layer: step(layer, RECIPE.replace(amax_history_len=9)) or layer,
}


def saved(layer: torch.nn.Module, *, assign: bool) -> torch.nn.Module:
    """What another layer loads from a file."""
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = stored("linear" if isinstance(layer, ops.Linear) else "grouped single")
    write(other, [100 * weight.detach().dequantize() for weight in other.parameters()])
    other.load_state_dict(torch.load(file), assign=assign)
    return other


COPIES["load"] = lambda layer: saved(layer, assign=False)
COPIES["load, assign"] = lambda layer: saved(layer, assign=True)


@pytest.mark.parametrize("form", ["linear", "grouped single"])
@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_goes_on_as_the_weight_would_have(form, kind):
    layer = stored(form)
    write(layer, [2 * weight.detach().dequantize() for weight in layer.parameters()])
    made = COPIES[kind](layer)
    recipe = RECIPE.replace(amax_history_len=9) if kind == "history" else RECIPE
    pair = [made] if made is layer else [made, layer]
    for each in pair:
        torch.manual_seed(1)
        step(each, recipe)
        assert linked(each)
        write(each, [1.5 * weight.detach().dequantize() for weight in each.parameters()])
        step(each, recipe)
    kept = [each.basic_ops[0].quantizer_states.to_dict() for each in pair]
    for name in (name for name in kept[0] if name.startswith("weight") or ":weight" in name):
        assert torch.equal(kept[0][name], kept[-1][name]), name
    assert all(torch.equal(a.dequantize(), b.dequantize()) for a, b in zip(pair[0].parameters(), pair[-1].parameters()))


@every_form
def test_states_and_quantizers_of_weights_move_together(form):
    layer = stored(form)
    step(layer)
    layer.to("meta")
    assert all(state.scale.is_meta for state in states(layer))
    quantizers = [weight.quantizer for weight in layer.parameters()]
    members = [m for q in quantizers for m in (q.quantizers if isinstance(q, GroupedQuantizer) else (q,))]
    assert all(m.scale is s.scale and m.amax.is_meta for m, s in zip(members, states(layer), strict=True))


def test_how_a_weight_scales_is_asked_of_the_weight_and_not_of_the_plan():
    """A plan is of formats, which current and delayed scaling share: either weight may take the other's place in it."""
    recipe = Float8CurrentScaling()
    with opfuse.quantized_model_init(recipe=recipe):
        current = FORMS["linear"]().weight
    layer = stored("linear")
    model = ops.Sequential(layer)
    delayed = layer.weight
    for weight in (current, delayed, current):
        layer.weight = weight
        before = scales(layer)
        write(layer, [torch.randn(32, 64, dtype=BF16)])
        with opfuse.autocast(recipe=RECIPE):
            model(data())
        assert (scales(layer) != before) is (weight is delayed)
        assert isinstance(weight.quantizer, Float8Quantizer) is (weight is delayed)
    assert model.cache_info().plans == 1
