"""Delayed scaling of converted modules: its states go with the model, and into its state dict once that was asked for."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import opfuse
from opfuse.errors import OpfuseWarning, QuantizerError, RecipeError
from opfuse.recipes import DelayedScaling, Float8CurrentScaling
from tests.convert.blocks import Model
from tests.convert.test_experts import EXPERTS, Mixture

RECIPE = DelayedScaling(amax_history_len=3)
WORDS = torch.arange(32).view(2, 16)


def made():
    torch.manual_seed(0)
    model = Model()
    opfuse.fuse_(model, RECIPE)
    return model


def step(model):
    """The loss of one step of gradient descent, whose size changes with each."""
    loss = model(WORDS).square().mean()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.3 * p.grad
            p.grad = None
    return loss.item()


@pytest.fixture(scope="module")
def trained():
    """A model after some steps, and its state dict, which has states."""
    model = made()
    names = [*model.state_dict()]
    for _ in range(3):
        step(model)
    assert [*model.state_dict()] == names  # nobody asked
    opfuse.prepare_delayed(model, RECIPE)
    return model, copy.deepcopy(model.state_dict())


def goes_on(model, trained):
    one, other = copy.deepcopy(trained[0]), model
    return [step(one), step(one)] == [step(other), step(other)]


def test_training_goes_on_bit_for_bit_with_the_states_and_not_without(trained):
    _, state = trained
    model = made()
    assert not model.load_state_dict(state).unexpected_keys
    assert model.state_dict().keys() == state.keys()
    assert goes_on(model, trained)
    anew = made()
    anew.load_state_dict(opfuse.plain_state_dict(state))
    assert not goes_on(anew, trained)


def test_keys_name_ops_and_roles_and_do_not_change_with_use(trained):
    names = [name for name in trained[1] if "delayed_scaling" in name]
    assert "layers.0.mlp.delayed_scaling.down_proj.input.scale" in names
    assert "layers.1.attention.q.delayed_scaling.shared.grad_output.amax_history" in names
    fresh = opfuse.prepare_delayed(made(), RECIPE).state_dict()
    assert {name: value.shape for name, value in fresh.items()} == {name: value.shape for name, value in trained[1].items()}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"])
def test_copies_have_states_of_their_own(copied, trained):
    again = copied(trained[0])
    assert goes_on(again, trained)
    assert not goes_on(again, trained)


def test_distributed_checkpoints_find_every_key(trained):
    model, state = trained
    assert get_model_state_dict(model).keys() == state.keys()
    other = opfuse.prepare_delayed(made(), RECIPE)
    set_model_state_dict(other, copy.deepcopy(state))
    assert goes_on(other, trained)


def by_its_dictionary(model, folder):
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)


def by_torch(model, folder):
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state)


def in_place(model, folder):
    dcp.load(model.state_dict(), checkpoint_id=folder)


@pytest.mark.parametrize("load", [by_its_dictionary, by_torch, in_place])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_states_that_a_checkpoint_has_and_the_model_did_not_ask_for_are_missed_aloud(load, trained, tmp_path):
    dcp.save(trained[1], checkpoint_id=tmp_path)
    model = made()
    load(model, tmp_path)
    with pytest.warns(OpfuseWarning, match=r"without the keys of states.*opfuse\.prepare_delayed\(model, recipe\) before"):
        model(WORDS)
    model.load_state_dict(model.state_dict())
    model(WORDS)


def test_explain_tells_of_amaxes_that_were_left_out():
    model = nn.Sequential(nn.Linear(64, 64))
    opfuse.fuse_(model, RECIPE)
    model(torch.full((32, 64), torch.inf)).sum().backward()
    with pytest.warns(OpfuseWarning, match=r"^0:input: 1 amax was infinite or NaN.* Cure: .*opfuse\.watch\(model, every=1\)"):
        opfuse.explain(model, torch.randn(32, 64))


def test_weights_that_no_checkpoint_filled_are_loaded_without_a_word(trained):
    model = made()
    model.state_dict()
    model.load_state_dict(opfuse.plain_state_dict(trained[1]))
    model(WORDS)


def test_the_model_given_back_has_its_own_methods(trained):
    model = copy.deepcopy(trained[0])
    plain = Model()
    plain.load_state_dict(opfuse.plain_state_dict(trained[1]))
    opfuse.unfuse_(model)
    assert model.state_dict().keys() == plain.state_dict().keys()
    names = {"forward", "delayed_scaling", "_apply", "_save_to_state_dict", "_load_from_state_dict"}
    assert not any(names & vars(module).keys() for module in model.modules())


def with_experts():
    torch.manual_seed(0)
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": Mixture()})})
    opfuse.fuse_(model, RECIPE)
    return model


def routed_step(model):
    """The result of a step in which every expert has tokens."""
    torch.manual_seed(1)
    x, chosen = torch.randn(3 * EXPERTS, 32), torch.arange(3 * EXPERTS).view(-1, 1) % EXPERTS
    y = model["mlp"]["experts"](x, chosen, torch.ones(len(x), 1))
    y.square().sum().backward()
    return y.detach()


def test_each_expert_goes_on_with_its_own_states():
    model = opfuse.prepare_delayed(with_experts(), RECIPE)
    for _ in range(2):
        routed_step(model)
    state = copy.deepcopy(model.state_dict())
    names = [name for name in state if name.endswith("input.scale")]
    assert "mlp.experts.delayed_scaling.up.[2]:input.scale" in names
    assert len(names) == 2 * EXPERTS
    assert get_model_state_dict(model).keys() == state.keys()
    other = with_experts()
    other.load_state_dict(state)
    assert torch.equal(routed_step(other), routed_step(model))


def test_states_move_with_the_model(trained):
    model = copy.deepcopy(trained[0]).to("meta")
    assert {value.device.type for value in model.state_dict().values()} == {"meta"}


def test_what_is_no_state_is_refused(trained):
    state = copy.deepcopy(trained[1])
    state["layers.0.mlp.delayed_scaling.down_proj.input.scale"].zero_()
    with pytest.raises(QuantizerError, match=r"layers\.0\.mlp\.delayed_scaling\.down_proj.*a finite scale above 0"):
        made().load_state_dict(state)
    with pytest.raises(RecipeError, match="none in a Model"):
        opfuse.prepare_delayed(made(), Float8CurrentScaling())
