"""A profile of torch has the work of each pipeline under the pipeline's name, in both passes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import opfuse
from opfuse.recipes import Float8CurrentScaling


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) + x
        return x


NAMES = ["layers.0", "layers.0, backward", "layers.1", "layers.1, backward"]


@pytest.mark.few
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.cpu
def test_a_profile_names_each_pipeline_in_both_passes(compiled, steps):
    """In a first call, which is interpreted, in one that is recorded, and in one that repeats that."""
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(32, 64)
    opfuse.fuse_(model, Float8CurrentScaling())
    if compiled:
        for layer in model.layers:
            layer.compile(backend="aot_eager")
        model(x).sum().backward()
    for _ in range(steps):
        model(x).sum().backward()
    with torch.profiler.profile() as profile:
        model(x).sum().backward()
    assert sorted(event.name for event in profile.events() if event.name.startswith("layers.")) == NAMES
    kernels = {event.name: len(event.cpu_children) for event in profile.events() if event.name in NAMES}
    assert min(kernels.values()) > 0, kernels
