"""A SwiGLU block under tensor and sequence parallelism beside the same block on one rank.

Gradients of weights are bit for bit those of one rank: casts are alike, and no sum is divided. Results, and gradients of the
input and of the norm, are sums over ranks, which round once more.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import opfuse
from opfuse import ops
from opfuse.errors import OpfuseWarning, ShapeError
from opfuse.tensors import QuantizedTensor
from opfuse.tensors.masters import stored_in
from tests.distributed.running import Task
from tests.distributed.shards import same_on_all
from tests.distributed.training import RECIPES, Case, optimizer_of, region_of

BOUNDS = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-6}
"""Of sums of two terms that were rounded apart, relative to the largest value."""


DEVICE_BOUND = 2.0**-4
"""On a GPU, where a product of other sizes may take another kernel, which sums in another order: a cast behind it may flip."""


AFTER = 2.0**-3
"""After a step of AdamW, which divides by the size of a gradient: the rounding of a small one may become a whole step."""


class Block(NamedTuple):
    """sequence: whether each rank has a part of the tokens."""

    recipe: str
    stored: bool = False
    sequence: bool = True

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.recipe == "nvfp4" else torch.float32  # its rotation takes bf16


def build(block: Block, ranks: int, device: str, *, glu: int | None = 32) -> ops.Sequential:
    torch.manual_seed(0)
    hidden, dtype = 128 * max(ranks, 2), block.dtype
    with opfuse.quantized_model_init(enabled=block.stored, recipe=RECIPES[block.recipe]()):
        linears = ops.Linear(128, 2 * hidden, dtype=dtype), ops.Linear(hidden, 128, dtype=dtype)
    return ops.Sequential(ops.RMSNorm(128, dtype=dtype), linears[0], ops.SwiGLU(glu_interleave_size=glu), linears[1]).to(device)


def check_parallel(block: Block, rank: int, ranks: int, device: str) -> list[str]:
    wrong: list[str] = []
    one, many = build(block, ranks, device), build(block, ranks, device)
    style = opfuse.TensorParallel(sequence_dim=1 if block.sequence else None)
    parallelize_module(many, init_device_mesh(device, (ranks,)), style)
    optimizers = [optimizer_of(Case(block.recipe, stored=block.stored), model.parameters()) for model in (one, many)]

    def own(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(ranks, 1)[rank] if block.sequence else x

    def compare(name: str, got: torch.Tensor, want: torch.Tensor, *, exact: bool = False) -> None:
        distance = ((got - want).abs().max() / want.abs().max()).item()
        bound = DEVICE_BOUND if device != "cpu" else 0.0 if exact else BOUNDS[block.dtype]
        if not distance <= bound:
            wrong.append(f"{name}: {distance:.2g}")

    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x, dy = (torch.randn(2, 32 * ranks, 128, generator=generator).to(device, block.dtype) for _ in range(2))
        whole, part = x.clone().requires_grad_(), own(x).clone().requires_grad_()
        for model, given, grad in ((one, whole, dy), (many, part, own(dy))):
            with region_of(block.recipe):
                y = model(given)
            y.backward(grad)
            results = y.detach() if model is many else own(y.detach())
            if model is one:
                want = results
        compare(f"result {step}", results, want)
        compare(f"gradient of the input {step}", part.grad, own(whole.grad))
        for (name, mine), its in zip(many.named_parameters(), one.parameters(), strict=True):
            compare(
                f"gradient of {name} {step}", mine.grad.full_tensor(), its.grad, exact=not name.startswith("0.") and step == 0
            )
        if step == 0:
            wrong += check_fault(many, part.detach(), block)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if list(many.state_dict()) != list(one.state_dict()):
        wrong.append("other names")
    return wrong


def check_sharded(block: Block, rank: int, ranks: int, device: str) -> list[str]:
    """FSDP2 along another dimension of the mesh: two parts of the batch, one rank's the first or the second.

    With two ranks each has all features: then it does what one rank does, bit for bit.
    """
    wrong: list[str] = []
    mesh = init_device_mesh(device, (2, ranks // 2), mesh_dim_names=("batch", "features"))
    one, many = build(block, ranks // 2, device), build(block, ranks // 2, device)
    parallelize_module(many, mesh["features"], opfuse.TensorParallel())
    fully_shard(many, mesh=mesh["batch"])
    optimizers = [optimizer_of(Case(block.recipe, stored=block.stored), model.parameters()) for model in (one, many)]
    own = mesh["batch"].get_local_rank()
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x, dy = (torch.randn(2, 32, 128, generator=generator).to(device, block.dtype) for _ in range(2))
        with region_of(block.recipe):
            results = [one(part) for part in x]
        torch.autograd.backward(results, list(dy))
        for parameter in one.parameters():
            parameter.grad /= 2  # the mean over the batch, which FSDP2 makes
        with warnings.catch_warnings(record=True) as told, region_of(block.recipe):
            warnings.simplefilter("always", OpfuseWarning)
            y = many(x[own])
        y.backward(dy[own])
        many.reshard()
        held = [stored_in(many[i].weight).detach() for i in (1, 3)]
        plain = block.stored and not all(isinstance(each, QuantizedTensor) for each in held)
        said = any("lives quantized, as it was made" in str(each.message) for each in told)
        if said != (plain and step == 0):
            wrong.append("told of a weight that is quantized" if said else "not told of a plain weight")
        pairs = {f"result {step}": (y.detach(), results[own].detach())}
        for (name, mine), its in zip(many.named_parameters(), one.parameters(), strict=True):
            pairs[f"gradient of {name} {step}"] = mine.grad.full_tensor(), its.grad
        bound = 0.0 if ranks == 2 else AFTER if step else DEVICE_BOUND if device != "cpu" else BOUNDS[block.dtype]
        distances = {name: ((got - want).abs().max() / want.abs().max()).item() for name, (got, want) in pairs.items()}
        wrong += [f"{name}: {distance:.2g}" for name, distance in distances.items() if not distance <= bound]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    scales = [each.record.rowwise.scale for each in held if block.stored and block.recipe == "current"]
    alike = [same_on_all(scale) for scale in scales]
    return wrong + ([] if all(alike) else ["scales differ"])


def check_fault(model: ops.Sequential, x: torch.Tensor, block: Block) -> list[str]:
    """A call that raises leaves parameters, and all later calls, as they were."""
    parameters = list(model.parameters())
    with pytest.raises(ShapeError), region_of(block.recipe):
        model(x[..., :64])
    same = all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    return [] if same and all(isinstance(p, DTensor) for p in model.parameters()) else ["parameters after a call that raised"]


TASKS: list[Task] = [
    *((check_parallel, Block(recipe)) for recipe in ("none", "mxfp8", "delayed")),
    (check_parallel, Block("current", stored=True)),
    (check_parallel, Block("nvfp4", stored=True, sequence=False)),
    *((check_sharded, Block(recipe, stored=True, sequence=False)) for recipe in ("current", "block")),
]
MORE: list[Task] = [
    (check, Block(recipe, stored, sequence))
    for check, sequences in ((check_parallel, (False, True)), (check_sharded, (False,)))
    for recipe in RECIPES
    for stored in (False, True)
    for sequence in sequences
    if recipe != "none" or not stored
]
