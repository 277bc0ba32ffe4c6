"""Delayed-scaling states in state dicts: which keys there are, what is taken over, and what is refused, all of it."""

from __future__ import annotations

import copy
import itertools
import operator
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

import opfuse
from opfuse import ops
from opfuse.errors import QuantizerError, RecipeError
from opfuse.recipes import CustomRecipe, DelayedScaling, DelayedScalingRequest, Float8CurrentScaling, Format
from opfuse.tensors.quantizers import Float8CurrentScalingQuantizer
from tests.compiler.harness import differences

RECIPE = DelayedScaling(amax_history_len=4)
STATE = "0.delayed_scaling."
OLD = "0._extra_state"


def model() -> ops.Sequential:
    return ops.Sequential(ops.Linear(32, 32), ops.GELU(), ops.Quantize(True, True), ops.BasicLinear(32, 32))


def grouped() -> ops.Sequential:
    return ops.Sequential(ops.GroupedLinear(2, 32, 32), ops.GELU())


def call(module: ops.Sequential, recipe: opfuse.Recipe | None = RECIPE) -> torch.Tensor:
    extras = (torch.tensor([16, 16]),) if isinstance(module[0], ops.GroupedLinear) else ()
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        return module(torch.randn(32, 32, requires_grad=True), *extras)


def train(module: ops.Sequential, recipe: opfuse.Recipe | None = RECIPE, steps: int = 2) -> ops.Sequential:
    for _ in range(steps):
        call(module, recipe).square().sum().backward()
    return module


def shapes(module: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in module.state_dict().items()}


def states_of(module: ops.Sequential) -> dict[str, torch.Tensor]:
    """The states of the first op, by the names that they have in the op."""
    return {name.removeprefix(STATE): value for name, value in module.state_dict().items() if name.startswith(STATE)}


def old(state: dict[str, torch.Tensor]) -> dict[str, object]:
    """A state dict as earlier versions wrote it: one dictionary an op, by 'role/field'."""
    found: dict[str, object] = {}
    for name, value in state.items():
        op, dot, rest = name.partition(".delayed_scaling.")
        if not dot:
            found[name] = value
        else:
            found.setdefault(f"{op}._extra_state", {})["/".join(rest.rsplit(".", 1))] = value
    return found


@pytest.mark.parametrize("make", [model, grouped])
def test_keys_and_shapes_depend_on_no_recipe_and_no_use_of_a_model_that_was_told(make):
    wanted = shapes(opfuse.prepare_delayed(make(), RECIPE))
    assert STATE + "input.scale" in wanted
    for recipe in (RECIPE, RECIPE.replace(amax_history_len=1024), Float8CurrentScaling(), None):
        assert shapes(train(opfuse.prepare_delayed(make()), recipe)) == wanted
    assert shapes(train(make())) == wanted


@pytest.mark.parametrize("make", [model, grouped])
def test_a_model_that_does_not_train_under_delayed_scaling_saves_its_parameters(make):
    for recipe in (Float8CurrentScaling(), None):
        assert shapes(train(make(), recipe)) == {name: value.shape for name, value in make().named_parameters()}
    validated = make()
    with torch.no_grad():
        call(validated)
    assert shapes(validated) == shapes(make())


def test_only_ops_that_a_recipe_delays_are_prepared():
    def delays_products(role):
        delayed = role.module_type == "linear" and role.tensor_type == "input"
        return DelayedScalingRequest() if delayed else Float8CurrentScalingQuantizer(torch.float8_e4m3fn)

    module = opfuse.prepare_delayed(model(), CustomRecipe(qfactory=delays_products))
    assert {name.split(".")[0] for name in module.state_dict() if "delayed_scaling" in name} == {"0", "3"}
    for recipe, bare in ((Float8CurrentScaling(), model()), (RECIPE, torch.nn.Linear(4, 4)), (RECIPE, ops.GELU())):
        with pytest.raises(RecipeError, match=r"prepare_delayed: wants ops to which .* got none in a"):
            opfuse.prepare_delayed(bare, recipe)


def test_what_was_told_travels_with_copies():
    told = opfuse.prepare_delayed(model())
    for other in (copy.deepcopy(told), pickle.loads(pickle.dumps(told))):
        assert shapes(other) == shapes(told)


def test_names_of_ops_may_hold_dots():
    trained = model()
    trained[0].name = "layers.0%2E"
    train(trained)
    name = "0.delayed_scaling.layers%2E0%252E:input.scale"
    scale = trained.state_dict()[name]
    assert scale != 1
    assert operator.attrgetter("delayed_scaling.layers%2E0%252E:input.scale")(trained[0]) == scale
    other = model()
    other[0].name = "layers.0%2E"
    other.load_state_dict(trained.state_dict())
    assert differences(other.state_dict(), trained.state_dict()) == []


@pytest.mark.row("R17")
@pytest.mark.parametrize("make", [model, grouped])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_restores_states_of_a_model_that_has_not_run(make, tmp_path):
    trained, fresh = train(make()), opfuse.prepare_delayed(make(), RECIPE)
    dcp.save({"model": trained.state_dict()}, checkpoint_id=tmp_path)
    held = {"model": fresh.state_dict()}
    dcp.load(held, checkpoint_id=tmp_path)
    fresh.load_state_dict(held["model"])
    assert differences(fresh.state_dict(), trained.state_dict()) == []
    assert fresh[0].delayed_scaling.input.made_for.tolist() == [448.0, 0.0, 4.0]
    outputs = []
    for each in (trained, fresh):
        torch.manual_seed(1)
        outputs.append(call(each))
    assert torch.equal(*outputs)


def test_a_model_that_was_not_used_is_restored_as_such():
    trained, fresh, unused = train(model()), model(), opfuse.prepare_delayed(model())
    assert not any(value.any() for name, value in unused.state_dict().items() if name.endswith("made_for"))
    fresh.load_state_dict(old(unused.state_dict()))
    assert not fresh[0].quantizer_states
    assert shapes(fresh) == shapes(model())
    fresh.load_state_dict(unused.state_dict())
    assert not fresh[0].quantizer_states
    assert shapes(fresh) == shapes(unused)
    trained.load_state_dict(unused.state_dict())
    for state in trained[0].quantizer_states:
        assert (state.scale.item(), state.amax_history.any().item(), state.rule) == (1.0, False, None)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["copy", "pickle"])
def test_a_copy_of_a_trained_model_has_states_of_its_own(copied):
    trained = train(model())
    other, before = copied(trained), copy.deepcopy(trained.state_dict())
    assert differences(other.state_dict(), before) == []
    train(other)
    assert differences(trained.state_dict(), before) == []
    assert differences(other.state_dict(), before)


def test_what_a_state_was_made_for_travels():
    trained, other = train(model(), RECIPE.replace(fp8_format=Format.E4M3, margin=2)), model()
    other.load_state_dict(trained.state_dict())
    assert other[0].delayed_scaling.grad_output.made_for.tolist() == [448.0, 2.0, 4.0]
    before = trained[0].delayed_scaling.grad_output.scale
    y = call(other)
    y.backward(torch.zeros_like(y))
    assert other[0].delayed_scaling.grad_output.made_for.tolist() == [57344.0, 0.0, 4.0]
    amax = trained[0].delayed_scaling.grad_output.amax_history.max()
    assert torch.equal(before, torch.full_like(before, 448.0) / amax / 4)


def test_states_without_what_they_were_made_for_load():
    """Files of earlier versions: histories of their own length, which may hold what was not finite."""
    trained, other = train(model()), model()
    saved = old(trained.state_dict())
    for value in saved.values():
        if isinstance(value, dict):
            for name in [name for name in value if name.endswith("made_for")]:
                del value[name]
                history = name.replace("made_for", "amax_history")
                value[history] = value[history][:4].clone()
                value[history][1] = torch.inf
    other.load_state_dict(saved)
    state = next(iter(other[0].quantizer_states))
    assert (len(state.amax_history), state.rule, state.amax_history[1].item()) == (4, None, 0.0)
    scales = [each[0].quantizer_states.to_dict()["input/scale"] for each in (trained, other)]
    assert torch.equal(*scales)


def test_one_entry_an_op_loads_as_earlier_versions_wrote_it():
    trained, other = train(model()), model()
    saved = old(trained.state_dict())
    assert saved.keys() == {*dict(model().named_parameters()), OLD, "2._extra_state", "3._extra_state"}
    other.load_state_dict(saved)
    assert differences(other.state_dict(), trained.state_dict()) == []


def test_a_model_on_the_meta_device_takes_the_values_over():
    trained = train(model())
    with torch.device("meta"):
        other = model()
    other.load_state_dict(trained.state_dict(), assign=True)
    assert differences(other.state_dict(), trained.state_dict()) == []


HUGE = torch.zeros(1).expand(2**33)
BAD = {
    "None": None,
    "text": "input/scale",
    "a field of None": {"input/scale": None},
    "a field of text": {"input/scale": "1"},
    "no field": {"weight": torch.ones(1)},
    "half a state": {"input/amax_history": ...},
    "NaN": {"input/scale": torch.tensor([torch.nan])},
    "negative": {"input/scale": torch.tensor([-1.0])},
    "zero": {"input/scale": torch.zeros(1)},
    "infinite": {"input/scale": torch.tensor([torch.inf])},
    "integers": {"input/scale": torch.ones(1, dtype=torch.int64)},
    "two scales": {"input/scale": torch.ones(2)},
    "no history": {"input/amax_history": torch.zeros(0)},
    "a matrix": {"input/amax_history": torch.zeros(2, 2)},
    "negative amaxes": {"input/amax_history": -torch.ones(4)},
    "32 GiB of nothing": {"input/amax_history": HUGE},
    "4 MiB of nothing": {"input/amax_history": HUGE[: 2**20]},
    "too long": {"input/amax_history": torch.zeros(2**20 + 1)},
    "no values": {"input/amax_history": torch.zeros(4, device="meta")},
    "another element": {"input/made_for": torch.tensor([240.0, 0.0, 4.0])},
    "half a margin": {"input/made_for": torch.tensor([448.0, 0.5, 4.0])},
    "a length that is not there": {"input/made_for": torch.tensor([448.0, 0.0, 1025.0])},
    "NaN as length": {"input/made_for": torch.tensor([448.0, 0.0, torch.nan])},
    "an unknown role": {"inputs/scale": torch.ones(1), "inputs/amax_history": torch.zeros(4)},
    "an unknown field": {"input/margin": torch.ones(1)},
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_state_is_refused_and_nothing_is_loaded(kind):
    """The roles before the bad one are in order: nothing of them is taken over either."""
    trained = train(model())
    bad = BAD[kind]
    files = [{OLD: bad}]
    if isinstance(bad, dict):
        whole = {name.replace(".", "/"): 2 * tensor for name, tensor in states_of(trained).items()}
        whole |= {name: tensor / 2 for name, tensor in whole.items() if name.endswith("made_for")}
        bad = {name: value for name, value in (whole | bad).items() if value is not ...}
        files = [{OLD: bad}, {STATE + name.replace("/", "."): value for name, value in bad.items()}]
    for each, file in itertools.product((trained, model()), files):
        before, number = copy.deepcopy(each.state_dict()), len(each[0].quantizer_states)
        with pytest.raises(QuantizerError, match=r"(_extra_state|delayed_scaling).*: wants .*[.?] Cure: "):
            each.load_state_dict(file, strict=False)
        assert differences(each.state_dict(), before) == []
        assert len(each[0].quantizer_states) == number


def test_an_unknown_role_is_told_with_the_nearest_one():
    with pytest.raises(QuantizerError, match="'inputs'; did you mean 'input'"):
        model().load_state_dict({OLD: BAD["an unknown role"]}, strict=False)
