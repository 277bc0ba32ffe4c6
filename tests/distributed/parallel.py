"""A SwiGLU block under tensor and sequence parallelism beside the same block on one rank.

Gradients of weights are bit for bit those of one rank, which has the tokens in the order in which they are gathered: casts are
alike, and no sum is divided. Results, and gradients of the input, of the norm and, under sequence parallelism, of the last bias,
are sums over ranks, which round once more.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import opfuse
from opfuse import ops, recipes
from opfuse.errors import OpfuseWarning, ShapeError
from opfuse.tensors import QuantizedTensor, row_collectives
from opfuse.tensors.masters import stored_in
from tests.distributed.running import Task
from tests.distributed.shards import same_on_all
from tests.distributed.training import RECIPES, Case, optimizer_of

BOUNDS = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-6}
"""Of sums of two terms that were rounded apart, relative to the largest value."""


DEVICE_BOUND = 2.0**-4
"""On a GPU, where a product of other sizes may take another kernel, which sums in another order: a cast behind it may flip."""


AFTER = 2.0**-3
"""After a step of AdamW, which divides by the size of a gradient: the rounding of a small one may become a whole step."""


MADE = {
    **RECIPES,
    "mxfp8 recomputed": lambda: recipes.MXFP8BlockScaling(keep="recompute"),
    "mxfp8 dequantized": lambda: recipes.MXFP8BlockScaling(backward_override="dequantized"),
    "current high precision": lambda: recipes.Float8CurrentScaling(backward_override="high_precision"),
}


def region_of(name: str) -> Any:
    recipe = MADE[name]()
    return opfuse.autocast(enabled=recipe is not None, recipe=recipe)


class Block(NamedTuple):
    """sequence: the dimension of the tokens, of which each rank has a part; None: all have all of them."""

    recipe: str
    stored: bool = False
    sequence: int | None = 0

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.recipe == "nvfp4" else torch.float32  # its rotation takes bf16


def build(block: Block, ranks: int, device: str, *, glu: int | None = 32) -> ops.Sequential:
    torch.manual_seed(0)
    hidden, dtype = 128 * max(ranks, 2), block.dtype
    with opfuse.quantized_model_init(enabled=block.stored, recipe=MADE[block.recipe]()):
        linears = ops.Linear(128, 2 * hidden, dtype=dtype), ops.Linear(hidden, 128, dtype=dtype)
    return ops.Sequential(ops.RMSNorm(128, dtype=dtype), linears[0], ops.SwiGLU(glu_interleave_size=glu), linears[1]).to(device)


def check_parallel(block: Block, rank: int, ranks: int, device: str) -> list[str]:
    wrong: list[str] = []
    one, many = build(block, ranks, device), build(block, ranks, device)
    style = opfuse.TensorParallel(sequence_dim=block.sequence)
    inexact = ("0.",) if block.sequence is None else ("0.", "3.bias")
    parallelize_module(many, init_device_mesh(device, (ranks,)), style)
    optimizers = [optimizer_of(Case(block.recipe, stored=block.stored), model.parameters()) for model in (one, many)]

    def own(x: torch.Tensor) -> torch.Tensor:
        return x if block.sequence is None else x.chunk(ranks)[rank]

    def compare(name: str, got: torch.Tensor, want: torch.Tensor, *, exact: bool = False) -> None:
        distance = ((got - want).abs().max() / want.abs().max()).item()
        bound = DEVICE_BOUND if device != "cpu" else 0.0 if exact else BOUNDS[block.dtype]
        if not distance <= bound:
            wrong.append(f"{name}: {distance:.2g}")

    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        tokens = (64 if block.recipe.startswith("block") else 32) * ranks
        x, dy = (torch.randn(tokens, 2, 128, generator=generator).to(device, block.dtype) for _ in range(2))
        whole, part = x.clone().requires_grad_(), own(x).clone().requires_grad_()
        dim = block.sequence or 0
        for model, given, grad in ((one, whole, dy), (many, part, own(dy))):
            moved = (given.movedim(0, dim), grad.movedim(0, dim)) if model is many else (given, grad)
            with region_of(block.recipe):
                y = model(moved[0])
            y.backward(moved[1])
            results = y.detach().movedim(dim, 0) if model is many else own(y.detach())
            if model is one:
                want = results
        compare(f"result {step}", results, want)
        compare(f"gradient of the input {step}", part.grad, own(whole.grad))
        for (name, mine), its in zip(many.named_parameters(), one.parameters(), strict=True):
            exact = not name.startswith(inexact) and step == 0
            compare(f"gradient of {name} {step}", mine.grad.full_tensor(), its.grad, exact=exact)
        if step == 0:
            wrong += check_fault(many, part.detach().movedim(0, dim), block)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():  # a gradient near zero that is rounded once more may have another sign: a whole step of AdamW
            for (name, mine), its in zip(many.named_parameters(), one.parameters(), strict=True):
                if name.startswith(inexact):
                    mine.to_local().copy_(its)
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


class Wire(NamedTuple):
    """Bytes that a value of a rank is on the wire: of the input going forward; of the input and of the gradient going backward.

    values: how many operands travel in high precision.
    """

    recipe: str
    forward: float
    backward: float
    values: int = 0


class Collectives:
    """Those that pipelines use, of which gathers are counted in bytes of this rank, or fail."""

    def __init__(self, *, fail: bool = False) -> None:
        self.sent, self.fail = 0, fail

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops._c10d_functional, name)

    def all_gather_into_tensor(self, x: torch.Tensor, *others: Any) -> torch.Tensor:
        if self.fail:
            raise OSError("injected")
        self.sent += x.nbytes
        return torch.ops._c10d_functional.all_gather_into_tensor(x, *others)


def check_wire(wire: Wire, rank: int, ranks: int, device: str) -> list[str]:
    """Rows travel as they are cast. After a collective that failed, in either pass, a step has the bits that the first had."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"dtype": torch.bfloat16}
    members = ops.RMSNorm(128, **options), ops.Linear(128, 256, **options), ops.GELU(), ops.Linear(256, 128, **options)
    model = ops.Sequential(*members).to(device)
    parallelize_module(model, init_device_mesh(device, (ranks,)), opfuse.TensorParallel(sequence_dim=0))
    x, dy = (torch.randn(128, 128).to(device, torch.bfloat16) for _ in range(2))

    def passes(*gathers: Any) -> list[torch.Tensor]:
        model.zero_grad()
        given = x.clone().requires_grad_()
        with region_of(wire.recipe), mock.patch.object(row_collectives, "functional_collectives", gathers[0]):
            y = model(given)
        with mock.patch.object(row_collectives, "functional_collectives", gathers[1]):
            y.backward(dy)
        return [y.detach(), given.grad, *(parameter.grad.to_local().clone() for parameter in model.parameters())]

    counted, fails = (Collectives(), Collectives()), Collectives(fail=True)
    with opfuse.interpreted():
        want = passes(*counted)
    wrong = [] if [each.sent / x.numel() for each in counted] == [wire.forward, wire.backward] else ["other bytes"]
    wrong += [f"{each.sent / x.numel()} bytes a value" for each in counted] if wrong else []
    for gathers in ((fails, counted[1]), (counted[0], fails)):
        with pytest.raises(OSError, match="injected"), opfuse.interpreted():
            passes(*gathers)
    for call in range(3 if wire.recipe != "delayed" else 0):  # interpreted, recorded, repeated; a step moves delayed scales
        wrong += [f"other bits in call {call}"] if not all(map(torch.equal, passes(*counted), want)) else []
    if wire.recipe in ("none", "block", "mxfp8") and not model.cache_info().programs:  # others find amaxes over the ranks
        wrong.append("no program repeats a collective")
    if not all(isinstance(parameter, DTensor) for parameter in model.parameters()):
        wrong.append("parameters after a failure")
    with region_of(wire.recipe):
        told = str(opfuse.explain(model, x.clone().requires_grad_()))
    lines = [line for line in told.splitlines() if line.startswith(("    AllGather(", "    ReduceScatter("))]
    high = [line for line in lines if "values, cast anew: in both directions they are more bytes" in line]
    return wrong + ([] if (len(lines), len(high)) == (2 * (wire.recipe != "none"), wire.values) else [told])


def check_quantize(recipe: str, rank: int, ranks: int, device: str) -> list[str]:
    """A Quantize that stands between a gather and a product changes no bits: it casts what was gathered."""
    torch.manual_seed(0)
    linear = ops.Linear(128, 128, bias=False).to(device)
    x, dy = torch.randn(64, 128).to(device) * 37**rank, torch.randn(64 * ranks, 128).to(device)  # other amaxes on each rank
    found = []
    for members in ([linear], [ops.Quantize(), linear]):
        linear.weight.grad = None
        with region_of(recipe):
            y = ops.Sequential(ops.AllGather(), *members)(x)
        y.backward(dy)
        found.append((y.detach(), linear.weight.grad))
    return [f"{what} behind Quantize" for what, *both in zip(("result", "gradient"), *found) if not torch.equal(*both)]


BLOCKS, MX, NV = 1 + 4 / 128, 1 + 1 / 32, 1 / 2 + 1 / 16
"""Bytes of a value with its part of a scale."""

WIRES: list[Task] = [
    (check_wire, wire)
    for wire in (
        Wire("none", 2, 2),
        Wire("current", 1, 1),
        Wire("delayed", 1, 1),
        Wire("block", BLOCKS, BLOCKS + 2, values=1),
        Wire("mxfp8", MX, MX + 2, values=1),
        Wire("nvfp4", NV, 3 * NV),
    )
]
"""In bf16. Planes that are cast apart travel in the pass that reads them; both at once may be more bytes than values in bf16."""

TASKS: list[Task] = [
    *((check_parallel, Block(recipe)) for recipe in ("none", "mxfp8", "delayed")),
    (check_parallel, Block("current", stored=True)),
    (check_parallel, Block("nvfp4", stored=True, sequence=None)),
    (check_parallel, Block("block", sequence=1)),
    *((check_sharded, Block(recipe, stored=True, sequence=None)) for recipe in ("current", "block")),
    *WIRES,
    *((check_quantize, recipe) for recipe in ("current", "block")),
]
MORE: list[Task] = [
    *((check_parallel, Block(recipe)) for recipe in MADE if recipe not in RECIPES),
    *(
        (check, Block(recipe, stored, sequence))
        for check, sequences in ((check_parallel, (None, 0)), (check_sharded, (None,)))
        for recipe in RECIPES
        for stored in (False, True)
        for sequence in sequences
        if recipe != "none" or not stored
    ),
]
