"""What quantizing each layer alone costs, and the policy that follows from it."""

import json

import pytest
import torch
from torch import nn

import opfuse
from opfuse.cli import main
from opfuse.errors import ConversionError
from opfuse.recipes import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling

FP8 = Float8CurrentScaling()


def model():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32))
    made.requires_grad_()
    return made


def loss(module):
    return module(torch.randn(32, 32, generator=torch.Generator().manual_seed(1))).square().mean()


def test_layers_are_ranked_by_what_quantizing_each_alone_costs():
    made = model()
    before = [p.clone() for p in made.parameters()]
    costs = opfuse.layer_costs(made, FP8, loss)
    assert {layer.path for layer in costs.layers} == {"0", "2", "4"}
    found = [layer.sqnr for layer in costs.layers]
    assert 5 < min(found) < max(found) < 60
    assert found == sorted(found)
    assert costs.loss == pytest.approx(float(loss(made).detach()))
    assert all(torch.equal(p, was) for p, was in zip(made.parameters(), before))
    assert not any("forward" in vars(module) for module in made.modules())

    twin = model()
    twin.load_state_dict(made.state_dict())
    opfuse.fuse_(twin[int(costs.layers[0].path)], FP8)
    assert costs.layers[0].loss == pytest.approx(float(loss(twin).detach()) - costs.loss)


def test_buffers_stay_as_they_were():
    """The running means of a norm, which each call in training moves."""
    made = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32))
    before = {name: value.clone() for name, value in made.state_dict().items()}
    opfuse.layer_costs(made, FP8, loss)
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())


def test_delayed_scales_are_those_of_a_call_before():
    """The first has a scale of 1, under which small gradients are lost."""

    def small(module):
        return loss(module) * 1e-6

    found = [
        {layer.path: layer.sqnr for layer in opfuse.layer_costs(model(), each, small).layers} for each in (FP8, DelayedScaling())
    ]
    assert found[0] == pytest.approx(found[1], abs=3)


def test_the_policy_is_read_by_fuse(tmp_path):
    costs = opfuse.layer_costs(model(), FP8, loss)
    worst = costs.layers[0].path
    file = tmp_path / "layers.yaml"
    file.write_text(costs.to_yaml(1))
    assert costs.policy(1) == {worst: None}
    report = opfuse.fuse_(nn.ModuleList(model()), **opfuse.load_policy(file))
    assert worst not in report.fused
    assert len(report.fused) == 2
    file.write_text(costs.to_yaml(0))
    assert opfuse.load_policy(file)["policy"] == {}


def test_what_cannot_be_ranked_is_refused():
    with pytest.raises(ConversionError, match="wants layers that fuse_ converts, got none"):
        opfuse.layer_costs(nn.Tanh(), FP8, loss)
    made = model()
    opfuse.fuse_(made, FP8)
    with pytest.raises(ConversionError, match="wants a model that is not converted"):
        opfuse.layer_costs(made, FP8, loss)


def test_a_layer_that_a_recipe_cannot_take_is_listed_with_the_reason():
    made = nn.Sequential(nn.Linear(32, 40), nn.Linear(40, 32))
    costs = opfuse.layer_costs(nn.Sequential(*made, nn.Linear(32, 32)), MXFP8BlockScaling(), loss)
    assert [layer.path for layer in costs.layers] == ["2", "0", "1"]
    assert "sizes divisible by 32" in costs.layers[1].refused
    assert costs.policy(3) == {"2": None}


def test_the_command_ranks_a_model_of_transformers(tmp_path, capsys):
    transformers = pytest.importorskip("transformers", reason="of the extra `test`")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    made.save_pretrained(tmp_path / "model")
    options = ["--device", "cpu", "--out", str(tmp_path / "out")]
    assert main(["study", "layers", str(tmp_path / "model"), "--plain", "3", *options]) == 0
    told = capsys.readouterr().out
    assert told.count(" dB  loss ") == 14
    policy = opfuse.load_policy(tmp_path / "out" / "layers.yaml")
    assert list(policy["policy"]) == [line.split()[0] for line in told.splitlines()[:3]]
    assert len(opfuse.fuse_(made, **policy).of("kept")) >= 3
    assert main(["study", "layers", str(tmp_path / "model" / "config.json"), "--json", *options]) == 0
    assert len(json.loads(capsys.readouterr().out)["layers"]) == 14
