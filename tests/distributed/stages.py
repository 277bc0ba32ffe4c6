"""Parts of a model, or of an optimizer, on several ranks: stages of a pipeline, and ZeRO."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from opfuse import autocast, ops, recipes
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


TASKS: list[Task] = [(check_stages, "mxfp8"), (check_stages, "delayed"), (check_zero, "mxfp8")]
