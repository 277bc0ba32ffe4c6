"""Training over processes beside training in one: the table of cases.

Ranks see different data. One process that sees the data of all of them, each rank's in a call of its own, takes the same steps:
its losses, gradients and parameters are what is expected. With two ranks, and on a mesh of (2, 2), every sum of gradients has two
terms at a time, hence one order, and all of it is equal bit for bit. With more, the collective chooses the order: then losses
before the first step are equal, and its gradients up to ``BOUND``.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

import opfuse
from benchmarks.distributed import Counting
from opfuse import ops, recipes
from opfuse.tensors import QuantizedTensor
from opfuse.tensors.masters import stored_in
from tests.convert.blocks import GatedMLP
from tests.distributed.running import Task, say

ROWS, STEPS = 32, 2
BOUND = 2.0**-6
"""Largest difference of sums over more than two ranks, relative to the largest value: a few roundings to bf16."""

APART = ("mxfp8", "block rows")
"""Recipes of weights whose planes are cast apart."""

WIRE = 0.55
"""Most bytes of gathered weights that live quantized, beside those of bf16."""

RECIPES: dict[str, Callable[[], recipes.Recipe | None]] = {
    "none": lambda: None,
    "current": recipes.Float8CurrentScaling,
    "delayed": lambda: recipes.DelayedScaling(amax_history_len=2),
    "block": recipes.Float8BlockScaling,
    "block rows": lambda: recipes.Float8BlockScaling(x_block_scaling_dim=1, w_block_scaling_dim=1, grad_block_scaling_dim=1),
    "mxfp8": recipes.MXFP8BlockScaling,
    "mxfp8 tiles": lambda: recipes.MXFP8BlockScaling(enable_2d_quantization=True),
    "nvfp4": lambda: recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
}


@dataclass(frozen=True)
class Case:
    """One way to train.

    wrap: how the model is spread. stored: weights live quantized, and AdamW steps on masters. reshard: parameters are freed
    between forward and backward. mixed: parameters in fp32, computing in bf16, gradients summed in fp32. micro: batches whose
    gradients are accumulated, of which the last one is reduced. recompute: layers run inside a checkpoint. keep: parameters stay
    whole after a backward pass that reduces nothing. offload: shards, and so the optimizer, live on the CPU. converted: a model
    of torch that ``fuse_`` converted; its gate and up are read as one matrix, which no rank may put together from shards.
    """

    recipe: str
    stored: bool = False
    wrap: str = "fsdp"
    reshard: bool = True
    mixed: bool = False
    micro: int = 1
    recompute: bool = False
    keep: bool = False
    offload: bool = False
    converted: bool = False

    def __str__(self) -> str:
        flags = {"stored": self.stored, "whole between passes": not self.reshard, "mixed": self.mixed, "micro": self.micro > 1}
        flags |= {"recomputed": self.recompute, "kept": self.keep, "offloaded": self.offload, "converted": self.converted}
        return ", ".join((self.recipe, self.wrap, *(name for name, on in flags.items() if on)))


@dataclass
class Trained:
    """What training leaves: losses of this rank's batches; for each step the gradients and then the parameters, whole."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[list[torch.Tensor]] = field(default_factory=list)
    parameters: list[list[torch.Tensor]] = field(default_factory=list)


def width(recipe: str, ranks: int) -> int:
    """Features of every layer: whole blocks of rows on each rank."""
    return {"block": 128, "block rows": 128}.get(recipe, 64) * max(ranks, 2)


def build(case: Case, ranks: int, device: str) -> nn.Sequential:
    torch.manual_seed(0)
    features, dtype = width(case.recipe, ranks), torch.float32 if case.mixed else torch.bfloat16
    if case.converted:
        gated = nn.Sequential(nn.RMSNorm(features, dtype=dtype), GatedMLP(features, features, bias=True).to(dtype))
        model = nn.Sequential(gated, nn.Linear(features, features, dtype=dtype)).to(device)
        opfuse.fuse_(model)
        return model
    with opfuse.quantized_model_init(enabled=case.stored, recipe=RECIPES[case.recipe]()):
        made = Recomputed if case.recompute else ops.Sequential
        first = made(ops.RMSNorm(features, dtype=dtype), ops.Linear(features, features, dtype=dtype), ops.GELU())
        last = made(ops.Linear(features, features, dtype=dtype))
    return nn.Sequential(first, last).to(device)


def data(case: Case, step: int, micro: int, rank: int, ranks: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn((ROWS, width(case.recipe, ranks)), generator=generator).to(torch.bfloat16)


class Recomputed(ops.Sequential):
    """A pipeline that runs inside a checkpoint, inside of what FSDP2 gathers for it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def optimizer_of(case: Case, parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, foreach=True)
    return opfuse.with_masters(optimizer) if case.stored else optimizer


def region_of(name: str) -> Any:
    recipe = RECIPES[name]()
    return opfuse.autocast(enabled=recipe is not None, recipe=recipe)


# -- one process -----------------------------------------------------------------------------------------------------------------


def alone(case: Case, rank: int, ranks: int, device: str) -> Trained:
    """Training in one process that sees the batches of all ranks, and the losses of those of ``rank``."""
    kept = build(case, ranks, device)
    models = replicas(kept.to(torch.bfloat16) if case.mixed else kept, ranks)
    kept = build(case, ranks, device) if case.mixed else kept
    optimizer, trained = optimizer_of(case, kept.parameters()), Trained()
    for step in range(STEPS):
        sums: list[list[torch.Tensor]] = [[] for _ in models]
        for micro in range(case.micro):
            with region_of(case.recipe):
                losses = [loss_of(model, data(case, step, micro, i, ranks).to(device)) for i, model in enumerate(models)]
            torch.autograd.backward(losses)
            trained.losses.append(losses[rank].detach())
            for model, old in zip(models, sums):
                new = [p.grad.float() if case.mixed else p.grad for p in model.parameters()]
                old[:] = [a + b for a, b in zip(old, new)] if old else new
                model.zero_grad()
        for p, *grads in zip(kept.parameters(), *sums, strict=True):
            p.grad = mean(grads, nested=case.wrap == "hsdp")
        trained.gradients.append([p.grad.clone() for p in kept.parameters()])
        optimizer.step()
        trained.parameters.append([p.detach().float().clone() for p in kept.parameters()])
        with torch.no_grad():
            for model in models:
                for p, source in zip(model.parameters(), kept.parameters()):
                    p.copy_(source)
        kept.zero_grad()
    return trained


def replicas(model: nn.Sequential, count: int) -> list[nn.Sequential]:
    """``model`` and copies that share its delayed-scaling states, so that one region and one backward pass count all amaxes."""
    made = [model, *(copy.deepcopy(model) for _ in range(count - 1))]
    for other in made[1:]:
        for mine, its in zip(model.modules(), other.modules()):
            for op, twin in zip(getattr(mine, "basic_ops", ()), getattr(its, "basic_ops", ())):
                twin.__dict__["quantizer_states"] = op.__dict__["quantizer_states"]
    return made


def mean(grads: list[torch.Tensor], *, nested: bool) -> torch.Tensor:
    """Over ranks. nested: pairs first, as a mesh of (2, 2) adds them."""
    half = len(grads) // 2
    parts = [sum(grads[:half]), sum(grads[half:])] if nested else grads
    return sum(parts) / len(grads)


# -- many processes --------------------------------------------------------------------------------------------------------------


def together(case: Case, rank: int, ranks: int, device: str) -> Trained:
    """Training of this rank beside the others."""
    model = WRAPS[case.wrap](build(case, ranks, device), case, ranks, device)
    optimizer, trained = optimizer_of(case, model.parameters()), Trained()
    for step in range(STEPS):
        for micro in range(case.micro):
            with synchronised(model, micro == case.micro - 1, keep=case.keep):
                with region_of(case.recipe):
                    loss = loss_of(model, data(case, step, micro, rank, ranks).to(device))
                loss.backward()
            trained.losses.append(loss.detach())
        trained.gradients.append(whole([p.grad for p in model.parameters()], device))
        optimizer.step()
        optimizer.zero_grad()
        trained.parameters.append(whole(model.parameters(), device))
    return trained


def copied(device: str) -> Any:
    """Inside, FSDP2 gathers copies of the shards that it keeps on the CPU: on a GPU it does, and on a CPU it is made to."""

    def to(tensor: QuantizedTensor, *args: Any, **options: Any) -> torch.Tensor:
        return tensor.clone() if options.get("non_blocking") else torch.Tensor.to(tensor, *args, **options)

    return contextlib.nullcontext() if device == "cuda" else mock.patch.object(QuantizedTensor, "to", to)


def shard(model: nn.Sequential, case: Case, mesh: Any) -> nn.Module:
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if case.mixed else MixedPrecisionPolicy()
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if case.offload else OffloadPolicy()
    for module in (model,) if case.converted else (*model, model):  # pipelines of a converted model run across its modules
        fully_shard(module, mesh=mesh, reshard_after_forward=case.reshard, mp_policy=mixed, offload_policy=offload)
    return model


def fsdp(model: nn.Sequential, case: Case, ranks: int, device: str) -> nn.Module:
    return shard(model, case, init_device_mesh(device, (ranks,)))


def hsdp(model: nn.Sequential, case: Case, ranks: int, device: str) -> nn.Module:
    return shard(model, case, init_device_mesh(device, (2, ranks // 2), mesh_dim_names=("replicate", "shard")))


def ddp(model: nn.Sequential, case: Case, ranks: int, device: str) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


WRAPS: dict[str, Callable[[nn.Sequential, Case, int, str], nn.Module]] = {"fsdp": fsdp, "hsdp": hsdp, "ddp": ddp}


@contextlib.contextmanager
def synchronised(model: nn.Module, last: bool, *, keep: bool) -> Iterator[None]:
    """Inside, a backward pass reduces gradients if it is that of the last batch of a step."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        with contextlib.nullcontext() if last else model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(last)  # type: ignore[operator]
    model.set_reshard_after_backward(last or not keep)  # type: ignore[operator]
    yield


def whole(tensors: Any, device: str | None = None) -> list[torch.Tensor]:
    """The values of parameters or gradients, of a quantized shard those that it decodes to; ``device``: where they are then."""
    values = []
    for tensor in tensors:
        held = stored_in(tensor.detach())
        piece = held.float().contiguous() if held is not tensor else held.clone()
        if hasattr(tensor, "device_mesh"):
            group = tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1)
            pieces = [torch.empty_like(piece) for _ in range(dist.get_world_size(group))]
            dist.all_gather(pieces, piece, group=group)
            piece = torch.cat(pieces)
        values.append(piece.float().to(device))
    return values


# -- bytes on the wire -----------------------------------------------------------------------------------------------------------


def sent(recipe: str, ranks: int, device: str, *, reshard: bool) -> tuple[int, int]:
    """Bytes that a rank gives to the all-gathers of stored weights, in a forward and a backward pass; and those of bf16."""
    counting, features = Counting(), width("block", ranks)
    with opfuse.quantized_model_init(recipe=RECIPES[recipe]()):
        layers = [ops.Sequential(ops.Linear(features, features, bias=False, dtype=torch.bfloat16)) for _ in range(2)]
    model = fsdp(nn.Sequential(*layers).to(device), Case(recipe, stored=True, reshard=reshard), ranks, device)
    for layer in layers:
        layer.set_custom_all_gather(counting)
    with region_of(recipe):
        loss = loss_of(model, torch.ones(ROWS, features, dtype=torch.bfloat16, device=device))
    loss.backward()
    return counting.sent, len(layers) * features * features // ranks * 2 * (2 if reshard else 1)


# -- tasks -----------------------------------------------------------------------------------------------------------------------


def differences(got: Trained, want: Trained, case: Case, ranks: int) -> list[str]:
    """What differs, and by how much, relative to the largest value; nothing where all is as it must be."""
    pairs = [(f"loss {i}", a, b, 0.0) for i, (a, b) in enumerate(zip(got.losses, want.losses, strict=True))]
    apart = case.offload and got.losses[0].is_cuda  # an optimizer on the CPU, and one on the GPU
    exact = not apart and (ranks <= 2 or (case.wrap == "hsdp" and ranks == 4))
    for name, mine, its in (("gradient", got.gradients, want.gradients), ("parameter", got.parameters, want.parameters)):
        steps = enumerate(zip(mine, its, strict=True))
        bound = 0.0 if exact else BOUND
        pairs += [
            (f"{name} {i} of step {n}", a, b, bound) for n, (x, y) in steps for i, (a, b) in enumerate(zip(x, y, strict=True))
        ]
    if not exact:
        pairs = [pair for pair in pairs if pair[0].endswith("of step 0") and "gradient" in pair[0]] + pairs[: case.micro]
    far = [(name, ((a - b).abs().max() / b.abs().max()).item(), bound) for name, a, b, bound in pairs if not torch.equal(a, b)]
    return [f"{name}: {distance:.2g}" for name, distance, bound in far if not distance <= bound]


def check_case(case: Case, rank: int, ranks: int, device: str) -> list[str]:
    with copied(device) if case.offload else contextlib.nullcontext():
        got = together(case, rank, ranks, device)
    return differences(got, alone(case, rank, ranks, device), case, ranks)


def check_wire(recipe: str, rank: int, ranks: int, device: str) -> list[str]:
    """Stored weights take at most 0.55 of the bytes of bf16. Only where they stay whole between the passes both planes travel at
    once, if they were cast apart: in the one gather for both passes."""
    found = []
    for reshard in (True, False) if ranks > 1 else ():
        mine, plain = sent(recipe, ranks, device, reshard=reshard)
        say(rank, f"{recipe}, {'freed' if reshard else 'whole'} between the passes: {mine / plain:.3f} of the bytes of bf16")
        if mine > (WIRE if reshard or recipe not in APART else 2 * WIRE) * plain:
            found.append(f"{mine / plain:.3f} of the bytes of bf16 on the wire")
    return found


WIRES: list[Task] = [(check_wire, name) for name in RECIPES if name != "none"]

FEW = [
    Case("delayed"),
    Case("mxfp8", stored=True, mixed=True, micro=2),
    Case("nvfp4", stored=True, reshard=False),
    Case("block rows", stored=True, recompute=True, offload=True),
    Case("mxfp8", converted=True),
    Case("delayed", wrap="ddp", micro=2),
    Case("mxfp8", stored=True, wrap="ddp"),
]
"""One case for each that may go wrong by itself."""


def table(ranks: int) -> list[Case]:
    """Every recipe with plain and with stored weights, spread in every way that so many ranks have."""
    wraps = ["fsdp", "ddp", *(["hsdp"] if ranks >= 4 and ranks % 2 == 0 else [])]
    return [
        Case(recipe, stored=stored, wrap=wrap, **options)
        for recipe in RECIPES
        for stored in (False, True)
        if recipe != "none" or not stored
        for wrap in wraps
        for options in (
            {"micro": 2},
            {"reshard": False},
            {"mixed": True, "micro": 2},
            {"recompute": True},
            {"micro": 2, "keep": True},
            {"offload": True},
        )
        if wrap != "ddp" or options == {"micro": 2}
    ]
