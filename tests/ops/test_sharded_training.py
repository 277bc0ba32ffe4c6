"""Pipelines of ops under DDP and FSDP2 in two processes that see different data: the bits of one process that sees both.

Two gradients have one sum, so nothing may differ: parameters after each step, and after a checkpoint in between.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import opfuse
from opfuse import ops, recipes
from tests.compiler.harness import randn, same, to
from tests.convert.blocks import GatedMLP
from tests.processes import run_ranks

RECIPES: dict[str, Callable[[], recipes.Recipe | None]] = {
    "none": lambda: None,
    "mxfp8": recipes.MXFP8BlockScaling,
    "fp8_block, dequantized": lambda: recipes.Float8BlockScaling(backward_override="dequantized"),
}
RANKS, STEPS = 2, 3


def model() -> nn.Module:
    torch.manual_seed(0)
    made = ops.Sequential(ops.RMSNorm(128), ops.Linear(128, 256), ops.GELU(), ops.Linear(256, 128))
    return to(made, torch.float32)  # type: ignore[return-value]


def converted() -> nn.Module:
    """A model of torch; gate and up are read as one matrix, which no rank may put together from shards."""
    torch.manual_seed(0)
    made = to(nn.Sequential(nn.RMSNorm(128), GatedMLP(128, 256, bias=True)), torch.float32)
    opfuse.fuse_(made)  # type: ignore[arg-type]
    return made  # type: ignore[return-value]


def data(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and gradient of the output, of its own for each rank."""
    return tuple(randn(128, 128, seed=10 * step + rank + 5 * part, dtype=torch.float32) for part in (0, 1))  # type: ignore[return-value]


def backward(module: nn.Module, recipe: recipes.Recipe | None, step: int, rank: int) -> None:
    x, dy = data(step, rank)
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x)
    y.backward(dy)


def alone(build: Callable[[], nn.Module], recipe: recipes.Recipe | None) -> list[dict[str, torch.Tensor]]:
    """Parameters after each step of one process that averages the gradients of both ranks' data."""
    made, found = build(), []
    optimizer = torch.optim.SGD(made.parameters(), lr=0.01)
    for step in range(STEPS):
        grads = []
        for rank in range(RANKS):
            optimizer.zero_grad()
            backward(made, recipe, step, rank)
            grads.append([p.grad for p in made.parameters()])
        for parameter, first, second in zip(made.parameters(), *grads):
            assert not same(first, second)
            parameter.grad = (first + second) / RANKS
        optimizer.step()
        found.append({name: p.detach().clone() for name, p in made.named_parameters()})
    return found


def whole(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters as one process has them."""
    named = ((name.removeprefix("module."), p.detach()) for name, p in module.named_parameters())
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).clone() for name, p in named}


def ddp(made: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(made)


def fsdp(made: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(made, mesh=init_device_mesh("cpu", (RANKS,)))


def train(
    build: Callable[[], nn.Module],
    make: Callable[[nn.Module], nn.Module],
    recipe: recipes.Recipe | None,
    rank: int,
    folder: Path | None = None,
) -> None:
    module = make(build())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for step, want in enumerate(alone(build, recipe)):
        if step == 2 and folder is not None:
            module = resumed(module, lambda: make(build()), folder)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        optimizer.zero_grad()
        backward(module, recipe, step, rank)
        optimizer.step()
        got = whole(module)
        assert got.keys() == want.keys()
        assert [name for name in want if not same(got[name], want[name])] == [], (build.__name__, make.__name__, recipe, step)


def resumed(module: nn.Module, make: Callable[[], nn.Module], folder: Path) -> nn.Module:
    """Another module, with what a distributed checkpoint of this one says."""
    import torch.distributed.checkpoint as dcp

    dcp.save(module.state_dict(), checkpoint_id=folder)
    fresh = make()
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    state = fresh.state_dict()
    dcp.load(state, checkpoint_id=folder)
    fresh.load_state_dict(state)
    return fresh


def worker(rank: int, folder: str, names: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, init_method=f"file://{folder}/store")
    for number, name in enumerate(names):
        recipe = RECIPES[name]()
        train(model, ddp, recipe, rank)
        train(model, fsdp, recipe, rank, Path(folder) / str(number))
        train(converted, fsdp, recipe, rank)
    gc.collect()  # modules hold the group through their mesh
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.cpu
@pytest.mark.row("R17")
@pytest.mark.parametrize("names", [("mxfp8",), pytest.param(tuple(RECIPES), marks=pytest.mark.slow)], ids=["one recipe", "all"])
def test_r17_pipelines_under_ddp_and_fsdp2_on_different_data_equal_one_process(names, tmp_path):
    run_ranks(worker, str(tmp_path), names, ranks=RANKS)
