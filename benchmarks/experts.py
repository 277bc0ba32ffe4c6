"""A mixture whose experts are spread over ranks: part of ``python -m benchmarks.distributed``.

One layer of experts in the shape of Qwen3-30B-A3B's (128, eight for each token) and of Mixtral's (8, two for each), forward and
backward, random tokens and routes. Beside it the same of torch in bf16: rows by index, ``all_to_all_single``, ``grouped_mm``, its
elementwise parts compiled. All take turns; the slowest rank counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import opfuse
from opfuse import recipes
from opfuse.tensors import expert_rows

BF16 = torch.bfloat16


class Shape(NamedTuple):
    """tokens: of a rank. chosen: experts of a token."""

    label: str
    tokens: int
    experts: int
    chosen: int
    width: int
    inner: int


QWEN, MIXTRAL = Shape("Qwen3-30B-A3B", 8192, 128, 8, 2048, 768), Shape("Mixtral", 8192, 8, 2, 4096, 14336)
SMALL = Shape("small", 64, 4, 2, 128, 128)
TURNS, STEPS = 5, 4
ROUTES = 2 + (TURNS + 1) * (1 + STEPS)
"""As many as there are calls."""


LEAST = 1.15
"""Times the speed of torch in bf16, under FP8 in blocks: at least."""

WIRE = 0.55
"""Most bytes to experts, beside those of bf16."""


class Experts(nn.Module):
    """All experts in two parameters, as transformers has them."""

    def __init__(self, shape: Shape, device: str) -> None:
        super().__init__()
        options = {"device": device, "dtype": BF16}
        self.gate_up_proj = nn.Parameter(torch.randn(shape.experts, 2 * shape.inner, shape.width, **options) * 0.02)
        self.down_proj = nn.Parameter(torch.randn(shape.experts, shape.width, shape.inner, **options) * 0.02)
        self.act_fn = nn.SiLU()

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(self.down_proj.shape[0]):
            token, place = torch.where(index == expert)
            gate, up = F.linear(hidden[token], self.gate_up_proj[expert]).chunk(2, -1)
            y = F.linear(self.act_fn(gate) * up, self.down_proj[expert]) * weights[token, place, None]
            out.index_add_(0, token, y.to(out.dtype))
        return out


def unit(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def combined(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (rows[places] * weights.unsqueeze(-1)).sum(1)


class OfTorch(nn.Module):
    """The same of torch in bf16. own: experts of this rank."""

    def __init__(self, shape: Shape, ranks: int, device: str) -> None:
        super().__init__()
        self.shape, self.ranks = shape, ranks
        whole = Experts(shape._replace(experts=shape.experts // ranks), device)
        self.gate_up_proj, self.down_proj = whole.gate_up_proj, whole.down_proj
        gpu = device == "cuda"
        self.unit, self.combined = (torch.compile(each, dynamic=True) if gpu else each for each in (unit, combined))

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        flat, (experts, chosen) = index.flatten(), (self.shape.experts, self.shape.chosen)
        order = flat.argsort(stable=True)
        splits = torch.histc(flat.float(), experts, 0, experts - 1).long()
        incoming = torch.empty_like(splits)
        dist.all_to_all_single(incoming, splits)
        counts = torch.stack((splits, incoming)).view(2, self.ranks, -1)
        sent, received = counts.sum(2).tolist()
        rows = exchanged(x.index_select(0, order // chosen), received, sent)
        by_expert = incoming.view(self.ranks, -1)
        source = by_expert.flatten()
        starts = (source.cumsum(0) - source).view_as(by_expert).t().flatten()
        sizes = by_expert.t().flatten()
        places = torch.arange(len(rows), device=x.device)
        places += (starts - sizes.cumsum(0) + sizes).repeat_interleave(sizes, output_size=len(rows))
        ends = by_expert.sum(0).cumsum(0).int()
        y = product(self.unit(product(rows[places], self.gate_up_proj, ends)), self.down_proj, ends)
        back = exchanged(
            y[torch.empty_like(places).scatter_(0, places, torch.arange(len(rows), device=x.device))], sent, received
        )
        where = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        return self.combined(back, where.view_as(index), weights)


def exchanged(rows: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    made: torch.Tensor = all_to_all_single_autograd(rows, received, sent, dist.group.WORLD)
    return torch.ops._c10d_functional.wait_tensor(made)  # type: ignore[no-any-return]


def product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if x.is_cuda:
        return torch._grouped_mm(x, weight.mT, offs=ends)  # type: ignore[no-any-return]
    starts = [0, *ends.tolist()]
    return torch.cat([F.linear(x[start:stop], w) for start, stop, w in zip(starts, starts[1:], weight)])


class Variant(NamedTuple):
    """recipe: None: in bf16. codes: whether rows may travel as codes. least, most: limits of its speed and of its bytes."""

    recipe: Any = None
    codes: bool = True
    least: float | None = None
    most: float | None = None


PLAIN = "torch, bf16"
VARIANTS = {
    PLAIN: Variant(),
    "opfuse, bf16": Variant(),
    "opfuse, fp8_block": Variant(recipes.Float8BlockScaling(), least=LEAST, most=WIRE),
    "opfuse, fp8_block, values travel": Variant(recipes.Float8BlockScaling(), codes=False),
    "opfuse, fp8_current": Variant(recipes.Float8CurrentScaling(), least=LEAST, most=WIRE),
}


class Layer:
    """One variant, and its passes."""

    def __init__(self, name: str, shape: Shape, ranks: int, device: str) -> None:
        self.variant, self.sent = VARIANTS[name], 0
        torch.manual_seed(dist.get_rank())
        options = {"device": device, "dtype": BF16}
        self.x, self.dy = (torch.randn(shape.tokens, shape.width, **options) for _ in range(2))
        self.routes = [torch.rand(shape.tokens, shape.experts, device=device).topk(shape.chosen).indices for _ in range(ROUTES)]
        self.calls = 0
        self.weights = torch.rand(shape.tokens, shape.chosen, **options)
        self.model: nn.Module
        if name == PLAIN:
            self.model = OfTorch(shape, ranks, device)
            return
        self.model = Experts(shape, device)
        opfuse.fuse_(self.model)
        parallelize_module(self.model, init_device_mesh(device, (ranks,)), opfuse.ExpertParallel(quantized=self.variant.codes))

    def passes(self) -> None:
        """With a route that is not that of the last calls: no numbers of rows are those of a step before."""
        index = self.routes[self.calls % ROUTES]
        self.calls += 1
        x, weights = self.x.detach().requires_grad_(), self.weights.detach().requires_grad_()
        with opfuse.autocast(enabled=self.variant.recipe is not None, recipe=self.variant.recipe):
            y = self.model(x, index, weights)
        y.backward(self.dy)
        for parameter in self.model.parameters():
            parameter.grad = None

    def bytes_to_experts(self) -> int:
        """Of one forward and backward pass, those to other ranks and to itself; those of other ways are the same in all."""
        total, count = 0, expert_rows.to_experts

        def counting(rows: torch.Tensor, exchange: Any) -> torch.Tensor:
            nonlocal total
            total += rows.nbytes
            return count(rows, exchange)

        with (
            mock.patch("opfuse.tensors.expert_rows.to_experts", counting),
            mock.patch("opfuse.ops.all_to_all.to_experts", counting),
        ):
            self.passes()
        return total


Record = Callable[..., dict[str, Any]]


def records(
    shapes: tuple[Shape, ...], ranks: int, device: str, clock: Callable[[], Any], slowest: Callable[[float, str], float]
) -> Iterator[dict[str, Any]]:
    """Figures for the record, the same on each rank."""

    def record(name: str, value: float, unit: str, least: float | None = None, most: float | None = None) -> dict[str, Any]:
        limit = least if most is None else most
        met = None if limit is None else value >= limit if most is None else value <= limit
        return {"name": name, "value": value, "unit": unit, "limit": limit, "met": met, "script": "experts"}

    for shape in shapes:
        layers = {name: Layer(name, shape, ranks, device) for name in VARIANTS}
        plain = layers["opfuse, bf16"].bytes_to_experts()
        for name, layer in layers.items():
            if name != PLAIN:
                part = layer.bytes_to_experts() / plain
                yield record(f"{shape.label}, {name}", part, "x bytes to experts", most=layer.variant.most)
        times: dict[str, list[float]] = {name: [] for name in layers}
        for turn in range(TURNS + 1):
            for name, layer in layers.items():
                dist.barrier()
                layer.passes()
                read = clock()
                start = read()
                for _ in range(STEPS):
                    layer.passes()
                took = (read()() - start()) / STEPS
                times[name] += [took] if turn else []
        medians = {name: slowest(statistics.median(found), device) for name, found in times.items()}
        for name, median in medians.items():
            yield record(f"{shape.label}, {name}", median, "ms, forward and backward")
            yield record(f"{shape.label}, {name}", medians[PLAIN] / median, "x the speed of torch", layers[name].variant.least)
