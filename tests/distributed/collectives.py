"""Collectives in pipelines: what each rank gets, and the gradients, from the tensors of all ranks, which each can make."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.distributed as dist

import opfuse
from opfuse import ops, te
from opfuse.errors import ShapeError
from tests.distributed.running import Task

OPS = {op.__name__: op for op in (ops.AllReduce, ops.AllGather, ops.ReduceScatter)}


def tensors(ranks: int, rows: int, *, seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """One for each rank, small integers: no sum is rounded."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-8, 9, (rows, 64), generator=generator).to(dtype) for _ in range(ranks)]


def part(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    return whole.chunk(ranks)[rank]


def check_collectives(_: None, rank: int, ranks: int, device: str) -> list[str]:
    wrong: list[str] = []

    def expect(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        if not torch.equal(got.cpu(), want):
            wrong.append(name)

    for dtype in (torch.float32, torch.bfloat16):
        for name, op in OPS.items():
            for group in (None, dist.group.WORLD):
                xs, model = tensors(ranks, 64, seed=1, dtype=dtype), ops.Sequential(op(group))
                x = xs[rank].clone().to(device).requires_grad_()
                y = copy.deepcopy(model)(x)
                dys = tensors(ranks, y.shape[0], seed=2, dtype=dtype)
                y.backward(dys[0 if name == "AllReduce" else rank].to(device))
                outputs = {
                    "AllReduce": (sum(xs), dys[0]),
                    "AllGather": (torch.cat(xs), part(sum(dys), rank, ranks)),
                    "ReduceScatter": (part(sum(xs), rank, ranks), torch.cat(dys)),
                }
                expect(f"{name} {dtype}", y.detach(), outputs[name][0])
                expect(f"{name} {dtype} gradient", x.grad, outputs[name][1])
                expect(f"{name} leaves its input", x.detach(), xs[rank])

    # Sequence parallel around a linear layer, quantized: each rank multiplies what one rank would.
    torch.manual_seed(0)
    linear = ops.Linear(64, 64, bias=False).to(device)
    cut = ops.Sequential(te.ops.AllGather(), linear, te.ops.AllReduce(reduce_in_backward=True), te.ops.ReduceScatter())
    one = ops.Sequential(copy.deepcopy(linear))
    xs = tensors(ranks, 32, seed=3)
    for step in range(3):  # also when the linear layer is a program
        x, whole = xs[rank].clone().to(device).requires_grad_(), torch.cat(xs).to(device).requires_grad_()
        with opfuse.autocast(recipe=opfuse.recipes.MXFP8BlockScaling()):
            y, want = cut(x), one(whole)
        expect(f"pipeline, call {step}", y.detach(), part(want.detach() * ranks * ranks, rank, ranks).cpu())
        linear.weight.grad = None
        (y / ranks).sum().backward()
        if not all(bool(t.isfinite().all()) for t in (x.grad, linear.weight.grad)):
            wrong.append(f"gradients of the pipeline, call {step}")

    with pytest.raises(ShapeError, match=rf"ReduceScatter.*divisible by the {ranks} ranks, got \({ranks + 1}, 64\)"):
        ops.ReduceScatter()(torch.ones(ranks + 1, 64, device=device))
    return wrong


def check_compared(_: None, rank: int, ranks: int, device: str) -> list[str]:
    """Every rank is told which one planned otherwise, and in what; of ranks that agree, how many plans they made."""
    model, x = ops.Sequential(ops.Linear(64, 64)).to(device), torch.ones(32, 64, device=device)
    gc.collect()
    gc.disable()
    for _ in range(1 + rank):  # dropped by ranks of which one has a collector that ran, and pipelines that nobody holds
        dropped = ops.Sequential(ops.Linear(64, 64)).to(device)
        dropped(x)
        dropped.itself = [dropped]
    del dropped
    before = opfuse.compare_ranks()
    gc.enable()
    for field in ({}, {"rounding": "single" if rank == 1 else "per_op"}):
        with opfuse.autocast(recipe=opfuse.recipes.MXFP8BlockScaling(**field)):
            model(x)
    found = opfuse.compare_ranks()
    wrong = [] if before.agree else [f"a job that agrees: {before}"]
    says = "rank 1 disagrees in plan 2 of ops 0..0: most ranks made no such plan: env.recipe.rounding: 'per_op' -> 'single'"
    if len(found.odd) != 1 or not str(found).startswith(f"{says} (was: default, now: "):
        wrong.append(f"the rank that disagrees: {found}")
    if found.plans != tuple(number + (2 if i == 1 else 1) for i, number in enumerate(before.plans)):
        wrong.append(f"numbers of plans: {before.plans}, {found.plans}")
    return wrong


TASKS: list[Task] = [(check_collectives, None), (check_compared, None)]
