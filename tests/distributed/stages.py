"""Parts of a model, or of an optimizer, on several ranks: stages of a pipeline, and ZeRO."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from opfuse import autocast, ops, recipes
from opfuse.errors import RecipeError
from opfuse.recipes import quantized_model_init
from tests.distributed.running import Task
from tests.distributed.training import RECIPES, whole


def part(seed: int, device: str, *, stored: str = "none") -> ops.Sequential:
    torch.manual_seed(seed)
    with quantized_model_init(enabled=stored != "none", recipe=RECIPES[stored]()):
        options = {"device": device, "dtype": torch.bfloat16}
        return ops.Sequential(ops.RMSNorm(64, **options), ops.Linear(64, 64, **options), ops.GELU())


def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y.float() - target.float()).square().mean()


def check_stages(recipe: str, rank: int, ranks: int, device: str) -> list[str]:
    """torch's 1F1B over the ranks has the gradients of one process, bit for bit; a stage reduces amaxes over its own ranks."""
    parts = [part(i, device) for i in range(ranks)]
    own = [dist.new_group([i]) for i in range(ranks)][rank]
    micro = ranks + 1  # microbatches: torch asks for one for each stage, and one more comes when the pipeline is full
    x = torch.randn(32 * micro, 64, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    made = recipes.DelayedScaling(amax_history_len=2) if recipe == "delayed" else RECIPES[recipe]()
    stage, wrong = part(rank, device), []
    looks = {"input_args": x[:32].clone().requires_grad_(rank > 0), "output_args": x[:32].clone().requires_grad_()}
    schedule = Schedule1F1B(PipelineStage(stage, rank, ranks, torch.device(device), **looks), micro, loss_fn=loss)
    for step in range(2):
        with autocast(recipe=made, amax_reduction_group=own):
            schedule.step(*((x,) if rank == 0 else ()), **({"target": x} if rank == ranks - 1 else {}))
        with autocast(recipe=made, amax_reduction_group=own):
            for each in x.chunk(micro):
                loss(nn.Sequential(*parts)(each), each).backward()
        pairs = zip(stage.parameters(), parts[rank].parameters(), strict=True)
        if not all(torch.equal(mine.grad, its.grad / micro) for mine, its in pairs):
            wrong.append(f"gradients of step {step}")
        for each in (stage, *parts):
            each.zero_grad()
    return wrong


def check_stages_in_one_group(_: None, rank: int, ranks: int, device: str) -> list[str]:
    """torch's stages without a group of their own: every rank is refused before it waits for another."""
    stage, x = part(rank, device), torch.ones(32, 64, device=device, dtype=torch.bfloat16)
    looks = {"input_args": x.clone().requires_grad_(rank > 0), "output_args": x.clone().requires_grad_()}
    schedule = Schedule1F1B(PipelineStage(stage, rank, ranks, torch.device(device), **looks), ranks, loss_fn=loss)
    wanted = rf"ranks that have this layer, got torch's default group, in stage {rank} of {ranks}\. Cure: .*amax_reduction_group"
    with autocast(recipe=recipes.DelayedScaling()), pytest.raises(RuntimeError, match=f"Stage {rank}") as caught:
        schedule.step(*((x.repeat(ranks, 1),) if rank == 0 else ()), **({"target": x} if rank == ranks - 1 else {}))
    if rank + 1 < ranks:
        # What the next stage waits for, sent as torch's schedule receives it: NCCL has other channels for a single send.
        (sent,) = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, rank + 1)])
        sent.wait()
    cause = caught.value.__cause__
    return [] if isinstance(cause, RecipeError) and re.search(wanted, str(cause)) else [repr(cause)]


def by_hand(layer: ops.Sequential, x: torch.Tensor, rank: int) -> None:
    """The first stages of a pipeline that nobody but the user knows of."""
    with autocast(recipe=recipes.DelayedScaling()):
        y = layer(x.clone().requires_grad_(rank > 0))
    y.sum().backward()


class Numbered(nn.Module):
    """A stage that keeps the names of the whole model."""

    def __init__(self, layer: nn.Module, number: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): layer})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def check_layers_in_one_group(_: None, rank: int, ranks: int, device: str) -> list[str]:
    """Layers of one structure that are others on each rank: by their path in the model, or by what is before them."""
    x, wrong = torch.ones(32, 64, device=device, dtype=torch.bfloat16) * (1 + rank), []
    for name, model, told in (
        ("path", Numbered(part(0, device), rank), f"at layers.{rank}.1.0"),
        ("input", part(0, device), "at 1.0, with a gradient for the input" if rank else "at 1.0'"),
    ):
        with pytest.raises(RecipeError, match="ranks with the same layers, as those of one stage") as caught:
            by_hand(model, x, rank if name == "input" else 0)
        states = [state for op in model.modules() for state in getattr(op, "quantizer_states", ())]
        wrong += [] if told in str(caught.value) else [f"{name}: {caught.value}"]
        wrong += [] if states and all(state.scale.item() == 1 for state in states) else [f"{name}: scales were found together"]
    return wrong


def check_zero(recipe: str, rank: int, ranks: int, device: str) -> list[str]:
    """The optimizer of a parameter is on one rank, which sends the others what it wrote: bytes of weights that live quantized."""
    found = []
    for kind in (torch.optim.SGD, lambda p, lr: ZeroRedundancyOptimizer(p, torch.optim.SGD, lr=lr)):
        model = nn.parallel.DistributedDataParallel(part(0, device, stored=recipe))
        optimizer = kind(model.parameters(), lr=8.0)
        for step in range(2):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2 * step + rank)).to(device, torch.bfloat16)
            with autocast(recipe=RECIPES[recipe]()):
                y = model(x)
            loss(y, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(whole(model.parameters(), device))
    return [] if all(map(torch.equal, *found)) else ["other parameters"]


TASKS: list[Task] = [
    *((check_stages, recipe) for recipe in ("mxfp8", "delayed")),
    (check_stages_in_one_group, None),
    (check_layers_in_one_group, None),
    (check_zero, "mxfp8"),
]
