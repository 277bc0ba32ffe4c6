"""A converted model is asked as one of opfuse.ops is: layers that are alike are told once, under the names of its modules."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import opfuse
from opfuse.recipes import MXFP8BlockScaling
from tests.convert.blocks import Model

RECIPE = MXFP8BlockScaling()


class Answering(nn.Module):
    """Returns a dictionary, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def forward(self, words: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.model(words)}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    made = Answering()
    opfuse.fuse_(made, RECIPE)
    return made


WORDS = torch.arange(64).view(2, 32) % 48
MLP, QKV = r"model\.layers\.\*\.mlp", r"model\.layers\.\*\.attention\.q\+k\+v"


def test_explain_tells_layers_once_and_all_on_request(model: nn.Module) -> None:
    found = opfuse.explain(model, WORDS)
    brief, full = str(found), found.details()
    assert len(re.findall(rf"^{MLP} ×2: \d+ basic ops", brief, re.MULTILINE)) == 1
    assert len(re.findall(rf"^{QKV} ×2: 2 basic ops", brief, re.MULTILINE)) == 1
    assert len(brief.splitlines()) < 45
    assert not {"absent", "shadowed"} & set(brief.split())
    assert {"absent", "shadowed"} <= set(full.split())
    assert sum(len(plan.outcomes) for plan in found.plans) == 2 * full.count("  forward   ") + 2 * full.count("  backward  ")


def test_saved_names_the_recipe_and_compares(model: nn.Module) -> None:
    found = opfuse.saved(model, WORDS)
    assert found.recipe == repr(RECIPE)
    assert found.by_override["None"] == found.by_keep["None"] == found.totals
    assert found.by_override["high_precision"] != found.totals
    assert found.baseline.own > 0
    assert found.baseline == opfuse.saved(model, WORDS).baseline
    lines = str(found).splitlines()
    (swiglu,) = (line for line in lines if "swiglu" in line)
    assert re.match(rf"  {MLP} \d+:swiglu ×2 +x +plain", swiglu)


def test_watch_names_modules(model: nn.Module) -> None:
    with opfuse.watch(model, every=1, alarms={}) as watch:
        model(WORDS)["logits"].sum().backward()
    casts = {(cast["op"], cast["tensor"]) for cast in watch.records}
    for layer in range(2):
        path = f"model.layers.{layer}"
        for op in ("attention.q+k+v", "attention.o", "mlp.gate_proj+up_proj", "mlp.down_proj"):
            assert {(f"{path}.{op}", role) for role in ("input", "weight", "grad_output")} <= casts
    assert all(op.startswith("model.layers.") for op, _ in casts)


def test_host_times_are_those_of_layers(model: nn.Module) -> None:
    text = str(opfuse.host_times(model, WORDS, calls=1))
    assert len(re.findall(rf"swiglu.*in {MLP} ×2$", text, re.MULTILINE)) == 2
