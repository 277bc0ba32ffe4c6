"""Pipelines inside of what PyTorch offers: graphs, compiled code, offload: ``python -m benchmarks.pytorch``.

*Graphs*: a training step of A in small and of decoder layers, called, and replayed by :func:`opfuse.graphed`. *Compiled*: decoder
layers of pipelines under ``torch.compile(fullgraph=True)``, beside the same called and beside torch's own in bf16, and how often
dynamo broke the graph or compiled again. *Offload*: decoder layers whose saved tensors leave for the host, by ``save_on_cpu`` of
torch and by :func:`opfuse.offloaded`; what runs beside the copies is seen in a trace of torch.profiler.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

import opfuse
from benchmarks.models import LARGE, PIPELINES, Sizes, active, decoder
from benchmarks.timing import Call, wall_time
from opfuse import recipes
from opfuse.recipes.recipe import Recipe

Record = dict[str, Any]
Span = tuple[float, float]

RECIPES: Mapping[str, Recipe] = {kind: recipes.recipe_of(kind, {}) for kind in ("delayed", "fp8_current", "fp8_block")}
"""Those whose products the device has."""

SMALL, TOKENS, LAYERS = 256, 2048, 2
OFFLOADED = 8192
"""Tokens of the layers that are offloaded."""

ROUNDS = 5


def record(name: str, value: float, unit: str, limit: float | None = None) -> Record:
    """limit: the most that ``value`` should be."""
    return {"name": name, "value": value, "unit": unit, "limit": limit, "met": None if limit is None else value <= limit}


def step_of(model: nn.Module, x: torch.Tensor, recipe: Recipe | None, saved: Callable[[], Any] = nullcontext) -> Call:
    """Forward and backward pass; gradients are added to those before. saved: what stands around the forward pass."""

    def step() -> None:
        with active(recipe), saved():
            y: torch.Tensor = model(x)
        y.backward(x.detach())

    return step


def beside(label: str, steps: Mapping[str, Call], base: str, limit: Callable[[str], float | None]) -> Iterator[Record]:
    """Milliseconds of each step, by the median of rounds in which they take turns, and as a multiple of ``base`` in a round."""
    took: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            took[name].append(wall_time(step) / 1e3)
    for name, times in took.items():
        yield record(f"{label}, {name}", statistics.median(times), "ms")
        if name != base:
            ratio = statistics.median(mine / its for mine, its in zip(times, took[base]))
            yield record(f"{label}, {name}", ratio, f"x {base}", limit(name))


def made(make: Callable[[], nn.Module], device: str) -> nn.Module:
    """A model in bf16 whose first values are drawn where it lies."""
    with torch.device(device):
        return make().to(torch.bfloat16)


def random(sizes: Sizes, device: str) -> torch.Tensor:
    return torch.randn(sizes.tokens, sizes.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)


# -- graphs ----------------------------------------------------------------------------------------------------------------------


def graph_records(small: Sizes, sizes: Sizes, layers: int, device: str) -> Iterator[Record]:
    """A step that is called, and the same as a graph for each pass."""
    models = {
        f"A {small.tokens}x{small.hidden}": (small, lambda: PIPELINES["A"].fused(small)),
        f"decoder of {layers} layers {sizes.tokens}x{sizes.hidden}": (sizes, lambda: decoder(sizes, layers, fused=True)),
    }
    for label, (of, make) in models.items():
        for kind, recipe in RECIPES.items():
            model, x = made(make, device), random(of, device)
            steps = {"called": step_of(model, x, recipe), "graphed": step_of(opfuse.graphed(model, (x,), recipe=recipe), x, None)}
            yield from beside(f"graphs, {label}, {kind}", steps, "called", lambda name: 1.05)


# -- compiled code ---------------------------------------------------------------------------------------------------------------


def compile_records(sizes: Sizes, layers: int, device: str) -> Iterator[Record]:
    """One graph for every recipe: the first call compiles, and no other one does."""
    torch._dynamo.reset()
    x = random(sizes, device)
    eager, fused = (made(lambda mine=mine: decoder(sizes, layers, fused=mine), device) for mine in (False, True))  # type: ignore[misc]
    label = f"compiled, decoder of {layers} layers {sizes.tokens}x{sizes.hidden}"
    compiled = torch.compile(fused, fullgraph=True)
    counters.clear()
    start = time.perf_counter()
    compiled(x).backward(x.detach())
    torch.cuda.synchronize()
    yield record(f"{label}, first call", time.perf_counter() - start, "s")
    graphs = counters["stats"]["unique_graphs"]
    calls = {kind: step_of(compiled, x, recipe) for kind, recipe in RECIPES.items()}
    for call in calls.values():
        call()
    yield record(f"{label}, every recipe", sum(counters["graph_break"].values()), "graph breaks", 0)
    yield record(f"{label}, every recipe", counters["stats"]["unique_graphs"] - graphs, "recompilations", 0)
    base = "torch.compile bf16"
    bf16 = {base: step_of(torch.compile(eager), x, None), "eager bf16": step_of(eager, x, None)}
    steps = {f"{kind} called": step_of(fused, x, recipe) for kind, recipe in RECIPES.items()}
    steps |= {f"{kind} compiled": call for kind, call in calls.items()}
    yield from beside(label, bf16 | steps, base, lambda name: None)
    torch._dynamo.reset()


# -- offload ---------------------------------------------------------------------------------------------------------------------


def offload_records(sizes: Sizes, layers: int, device: str) -> Iterator[Record]:
    """Steps whose saved tensors stay, and leave in two ways; bytes, and the part of copies beside which something is computed."""
    x = random(sizes, device)
    for kind, recipe in {"none": None, "fp8_current": RECIPES["fp8_current"]}.items():
        model = made(lambda: decoder(sizes, layers, fused=True), device)
        scope = opfuse.offloaded(model)
        ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
            "kept": nullcontext,
            "save_on_cpu": lambda: torch.autograd.graph.save_on_cpu(pin_memory=True),
            "offloaded": lambda scope=scope: scope,  # type: ignore[misc]
        }
        label = f"offload, decoder of {layers} layers {sizes.tokens}x{sizes.hidden}, {kind}"
        steps = {name: step_of(model, x, recipe, saved) for name, saved in ways.items()}
        yield from beside(label, steps, "kept", lambda name: None)
        for name, step in steps.items():
            yield record(f"{label}, {name}", held_bytes(model, x, recipe, ways[name]) / 2**20, "MiB between the passes")
            events = traced(step) if name != "kept" else []
            for way in ("DtoH", "HtoD") if events else ():
                yield from copies(f"{label}, {name}, {way}", events, way)


def held_bytes(model: nn.Module, x: torch.Tensor, recipe: Recipe | None, saved: Callable[[], Any]) -> int:
    """What a device holds between the passes beyond what it did before."""
    if not x.is_cuda:
        return 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with active(recipe), saved():
        y = model(x)
    held = torch.cuda.memory_allocated() - before
    y.backward(x.detach())
    return held


def traced(step: Call) -> list[dict[str, Any]]:
    """What ran on the device in a step, by torch.profiler's trace."""
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile() as profile:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events: list[dict[str, Any]] = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    return [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def copies(label: str, events: Iterable[Mapping[str, Any]], way: str) -> Iterator[Record]:
    """Bytes that were copied in this direction, the time it took, and the part of that in which a kernel ran."""
    wanted = [event for event in events if event["cat"] == "gpu_memcpy" and way in event["name"]]
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in wanted]
    kernels = [(event["ts"], event["ts"] + event["dur"]) for event in events if event["cat"] == "kernel"]
    total = sum(end - start for start, end in spans)
    yield record(label, sum(event["args"]["bytes"] for event in wanted) / 2**20, "MiB a step")
    yield record(label, total / 1e3, "ms of copies a step")
    yield record(label, 100 * covered(spans, kernels) / total if total else 0.0, "% of copies beside kernels")


def covered(spans: Iterable[Span], others: Iterable[Span]) -> float:
    """How much of ``spans`` lies where any of ``others`` does."""
    busy: list[list[float]] = []
    for start, end in sorted(others):
        if busy and start <= busy[-1][1]:
            busy[-1][1] = max(busy[-1][1], end)
        else:
            busy.append([start, end])
    return sum(max(0.0, min(end, to) - max(start, since)) for start, end in spans for since, to in busy)


def records() -> Iterator[Record]:
    """Figures for the record."""
    sizes = Sizes(TOKENS, LARGE.hidden, LARGE.ffn)
    yield from graph_records(Sizes(SMALL, SMALL, SMALL), sizes, LAYERS, "cuda")
    yield from compile_records(sizes, LAYERS, "cuda")
    yield from offload_records(sizes._replace(tokens=OFFLOADED), LAYERS, "cuda")


def main() -> None:
    start = time.perf_counter()
    for each in records():
        limit = "" if each["limit"] is None else f", at most {each['limit']:.2f}"
        print(f"{time.perf_counter() - start:5.0f} s  {each['name']:80s} {each['value']:10.2f} {each['unit']}{limit}", flush=True)


if __name__ == "__main__":
    main()
