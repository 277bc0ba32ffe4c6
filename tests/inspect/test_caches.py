"""``opfuse.cache_info`` answers for any model with pipelines, in all and by path."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import opfuse
from opfuse import ops, recipes
from opfuse.errors import PipelineError

FP8 = recipes.Float8CurrentScaling()


class Around(nn.Module):
    """A list inside of a list with a module between, an op alone that is called twice, and one that is not called."""

    def __init__(self) -> None:
        super().__init__()
        inner = ops.Sequential(ops.Linear(32, 32), ops.GELU())
        self.list = ops.Sequential(ops.Linear(32, 32), nn.Tanh(), inner, ops.SiLU())
        self.op, self.idle = ops.RMSNorm(32), ops.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(self.op(self.list(x)))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


def test_a_list_counts_as_its_own_method_does() -> None:
    model = ops.Sequential(ops.Linear(32, 32), nn.Tanh(), ops.GELU())
    for _ in range(3):
        model(torch.randn(8, 32))
    found = opfuse.cache_info(model)
    assert found.total == found.by_path[""] == model.cache_info()
    assert found.total[:3] == (2, 4, 2)


def test_every_module_that_runs_pipelines_is_there_by_its_path() -> None:
    model = Around()
    assert {path: info[:3] for path, info in opfuse.cache_info(model).by_path.items()} == {
        "list": (0, 0, 0),
        "list.2": (0, 0, 0),
        "op": (0, 0, 0),
        "idle": (0, 0, 0),
    }
    model(torch.randn(8, 32))
    model(torch.randn(8, 32))
    with torch.no_grad():
        model(torch.randn(8, 32))
    found = opfuse.cache_info(model)
    counts = {path: info[:3] for path, info in found.by_path.items()}
    assert counts == {"list": (4, 2, 4), "list.2": (2, 1, 2), "op": (2, 4, 2), "idle": (0, 0, 0)}
    assert found.total[:3] == (8, 7, 8)
    assert found.total.programs == sum(info.programs for info in found.by_path.values())
    assert "env.grad" in str(found.total.last_miss)
    assert str(found).splitlines()[-1].startswith("total: 8 plans, 7 hits, 8 misses")


@pytest.mark.filterwarnings("ignore::opfuse.errors.OpfuseWarning")
def test_a_converted_model_and_the_module_around_it() -> None:
    model = nn.ModuleDict({"mlp": MLP(), "other": MLP()})
    opfuse.fuse_(model, FP8)
    assert opfuse.cache_info(model).total[:3] == (0, 0, 0)
    for _ in range(3):
        model["mlp"](torch.randn(32, 32))
    found = opfuse.cache_info(model)
    assert found.total[:3] == (1, 2, 1)
    assert found.by_path["mlp"] == found.total
    assert found.by_path["other"].misses == 0
    assert opfuse.cache_info(model["mlp"]).by_path[""] == found.total


@pytest.mark.parametrize("model", [nn.Linear(8, 8), nn.Sequential(nn.GELU()), None, 3])
def test_what_runs_no_ops_is_refused(model: object) -> None:
    with pytest.raises(PipelineError, match="cache_info: wants a module with ops of opfuse"):
        opfuse.cache_info(model)  # type: ignore[arg-type]
