"""Training under FSDP2 on the GPUs of a machine, one rank each: ``python -m benchmarks.distributed [--tests REPORT]``.

A stack of four layers in the shape of an 8B model, each sharded by itself: weights of opfuse that live quantized and are gathered
so, weights in bf16 that each rank casts after the gather, torch in bf16, and the FP8 gather of torchao if that is installed. All
live in one process group and take turns. Then mixtures whose experts are spread over the ranks (benchmarks/experts.py). Figures
are those of the slowest rank; the record is a file of its own, named after the devices. ``--tests`` adds what became of
``python -m tests.distributed``, from the report that it wrote.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import opfuse
from benchmarks import experts
from benchmarks.models import PIPELINES, Sizes, active
from benchmarks.stamp import device_file, stamp
from opfuse import ops, recipes

BF16 = torch.bfloat16
WIRE = 0.55
"""Most bytes of an FP8 gather, beside those of bf16."""


BESIDE = 85
"""Least percentage of the time of FP8 gathers during which other kernels run."""


class Stack(NamedTuple):
    """Layers, sizes of each (tokens of a rank), heads of queries and of keys; turns, and steps in each."""

    layers: int
    sizes: Sizes
    heads: int
    groups: int
    turns: int
    steps: int


LARGE, SMALL = Stack(4, Sizes(4096, 4096, 14336), 32, 8, 5, 4), Stack(1, Sizes(32, 64, 96), 2, 1, 1, 1)
"""On GPUs, and to try the script on a CPU."""


class Layer(nn.Module):
    """A transformer layer: causal attention over the tokens of a rank as one sequence, then B; norms are inside the parts."""

    def __init__(self, heads: int, groups: int, entry: nn.Module, leave: nn.Module, inside: nn.Module) -> None:
        super().__init__()
        self.heads, self.groups, self.entry, self.leave, self.inside = heads, groups, entry, leave, inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.entry(x).view(1, x.shape[0], self.heads + 2 * self.groups, -1).transpose(1, 2)
        q, k, v = mixed.split((self.heads, self.groups, self.groups), 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.leave(y.transpose(1, 2).reshape(x.shape))
        out: torch.Tensor = x + self.inside(x)
        return out


def fused(stack: Stack, device: str, *, stored: bool) -> list[nn.Module]:
    """Layers of opfuse's pipelines."""
    hidden = stack.sizes.hidden

    def layer() -> nn.Module:
        width = (stack.heads + 2 * stack.groups) * hidden // stack.heads
        entry = ops.Sequential(ops.RMSNorm(hidden), ops.Linear(hidden, width, bias=False))
        leave = ops.Sequential(ops.Linear(hidden, hidden, bias=False))
        return Layer(stack.heads, stack.groups, entry, leave, PIPELINES["B"].fused(stack.sizes)).to(device, BF16)

    with opfuse.quantized_model_init(enabled=stored, recipe=recipes.Float8CurrentScaling()):
        return [layer() for _ in range(stack.layers)]


def eager(stack: Stack, device: str) -> list[nn.Module]:
    """The same of torch."""
    hidden = stack.sizes.hidden

    def layer() -> nn.Module:
        width = (stack.heads + 2 * stack.groups) * hidden // stack.heads
        entry = nn.Sequential(nn.RMSNorm(hidden), nn.Linear(hidden, width, bias=False))
        leave = nn.Linear(hidden, hidden, bias=False)
        return Layer(stack.heads, stack.groups, entry, leave, PIPELINES["B"].eager(stack.sizes)).to(device, BF16)

    return [layer() for _ in range(stack.layers)]


def torchao(stack: Stack, device: str) -> list[nn.Module]:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    return [convert_to_float8_training(layer, config=config) for layer in eager(stack, device)]


def compiled(layers: list[nn.Module]) -> list[nn.Module]:
    return [torch.compile(layer) for layer in layers]


class Variant(NamedTuple):
    """How layers are made, whether under a recipe; at most: bytes of a gather beside bf16, and waits for the device in a step."""

    make: Callable[[Stack, str], list[nn.Module]]
    recipe: bool = False
    wire: float | None = None
    waits: int | None = None


TRACED = 3
"""Steps in a trace."""

PLAIN = "torch, bf16"
VARIANTS = {
    PLAIN: Variant(eager),
    "torch, bf16, compiled": Variant(lambda stack, device: compiled(eager(stack, device))),
    "opfuse, bf16 gathered": Variant(lambda stack, device: fused(stack, device, stored=False), recipe=True, waits=0),
    "opfuse, FP8 gathered": Variant(lambda stack, device: fused(stack, device, stored=True), recipe=True, wire=WIRE, waits=0),
    "torchao, FP8 gathered, compiled": Variant(lambda stack, device: compiled(torchao(stack, device)), wire=WIRE),
}


def variants(device: str) -> dict[str, Variant]:
    """Those that this machine can run: the FP8 products of torchao need a GPU, and compiling its time."""
    here = device == "cuda"
    has = here and importlib.util.find_spec("torchao") is not None
    return {name: each for name, each in VARIANTS.items() if (here or "compiled" not in name) and (has or "torchao" not in name)}


class Counting:
    """The all-gather of FSDP2, which counts the bytes that this rank gives."""

    def __init__(self) -> None:
        self.sent = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False) -> Any:
        self.sent += input_tensor.nbytes
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # of which the second is the older name
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)


class Training:
    """One variant, sharded, and its optimizer."""

    def __init__(self, name: str, stack: Stack, ranks: int, device: str) -> None:
        torch.manual_seed(0)
        self.variant, self.counting = VARIANTS[name], Counting()
        mesh, layers = init_device_mesh(device, (ranks,)), self.variant.make(stack, device)
        for layer in layers:
            fully_shard(layer, mesh=mesh).set_custom_all_gather(self.counting)
        self.model = fully_shard(nn.Sequential(*layers), mesh=mesh)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.optimizer = opfuse.with_masters(optimizer) if "opfuse, FP8" in name else optimizer
        self.after = self._scales if "torchao" in name else lambda: None
        self.x, self.dy = (torch.randn(stack.sizes.tokens, stack.sizes.hidden, device=device, dtype=BF16) for _ in range(2))

    def passes(self) -> None:
        with active(recipes.Float8CurrentScaling() if self.variant.recipe else None):
            y = self.model(self.x)
        y.backward(self.dy)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.after()

    def step(self) -> None:
        self.passes()
        self.update()

    def _scales(self) -> None:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(self.model)


# -- what is measured ------------------------------------------------------------------------------------------------------------


def clock(device: str) -> Callable[[], Callable[[], float]]:
    """A clock: reading it gives a moment, which is in milliseconds once the device has come there."""
    if device == "cpu":
        return lambda: functools.partial(float, 1e3 * time.perf_counter())
    zero = torch.cuda.Event(enable_timing=True)
    zero.record()

    def read() -> Callable[[], float]:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return lambda: event.synchronize() or zero.elapsed_time(event)

    return read


def turn(training: Training, steps: int, device: str) -> Iterator[tuple[float, float]]:
    """Milliseconds of both passes, and of the whole step, of each of some steps that follow each other."""
    dist.barrier()
    training.step()
    read, moments = clock(device), []
    for _ in range(steps):
        start = read()
        training.passes()
        between = read()
        training.update()
        moments.append((start, between, read()))
    for start, between, end in moments:
        yield between() - start(), end() - start()


def waits(training: Training) -> int:
    """How often the host waits for the device in a warm step."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            training.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [str(each.message) for each in told if "synchroniz" in str(each.message)]
    return sum("prototype" not in text for text in found)  # of the debug mode itself


def traced(training: Training) -> list[dict[str, Any]]:
    """What ran on the device in ``TRACED`` steps that follow each other, by torch.profiler's trace.

    A step before them fills the device's queue: from an idle device, gathers would wait for the host, as in no step of a run.
    """
    torch.cuda.synchronize()
    dist.barrier()
    with tempfile.TemporaryDirectory() as folder:
        file, schedule = Path(folder, "trace.json"), torch.profiler.schedule(wait=0, warmup=1, active=TRACED)
        with torch.profiler.profile(
            schedule=schedule, on_trace_ready=lambda made: made.export_chrome_trace(str(file))
        ) as profile:
            for number in range(1 + TRACED):
                training.step()
                if number == TRACED:
                    torch.cuda.synchronize()
                profile.step()
        events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def covered(events: list[dict[str, Any]], kind: str) -> tuple[float, float]:
    """Milliseconds of the kernels of NCCL with ``kind`` in their names, and the part of these in which others ran beside them."""
    spans = [(event["ts"], event["ts"] + event["dur"], event["name"]) for event in events]
    busy: list[list[float]] = []
    for start, end in sorted((start, end) for start, end, name in spans if "nccl" not in name):
        if busy and start <= busy[-1][1]:
            busy[-1][1] = max(busy[-1][1], end)
        else:
            busy.append([start, end])
    collective = [(start, end) for start, end, name in spans if "nccl" in name and kind in name]
    total = sum(end - start for start, end in collective)
    beside = sum(max(0.0, min(end, to) - max(start, since)) for start, end in collective for since, to in busy)
    return total / 1e3, beside / total if total else 0.0


# -- the ranks -------------------------------------------------------------------------------------------------------------------


def slowest(value: float, device: str) -> float:
    """The largest over the ranks."""
    most = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def record(name: str, value: float, unit: str, most: float | None = None, least: float | None = None) -> dict[str, Any]:
    limit = least if most is None else most
    met = None if limit is None else value >= limit if most is None else value <= limit
    return {"name": name, "value": value, "unit": unit, "limit": limit, "met": met, "script": "distributed"}


def records(stack: Stack, ranks: int, device: str) -> Iterator[dict[str, Any]]:
    """Figures for the record, the same on each rank but for what is read off the trace of the first."""
    trainings: dict[str, Training] = {}
    for name in variants(device):
        trainings[name] = made = Training(name, stack, ranks, device)
        made.step()
        made.counting.sent = 0
        made.step()
        yield record(name, made.counting.sent / 1e6, "MB given to gathers a step")
        yield record(name, made.counting.sent / trainings[PLAIN].counting.sent, "x bytes of bf16", made.variant.wire)
    gc.freeze()  # of all variants there are many objects, which a step of none has to look through
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in trainings}
    for _ in range(stack.turns):
        for name, training in trainings.items():
            times[name] += turn(training, stack.steps, device)
    medians = {name: [slowest(statistics.median(column), device) for column in zip(*those)] for name, those in times.items()}
    for name, (passes, whole) in medians.items():
        yield record(name, passes, "ms, forward and backward")
        yield record(name, whole, "ms, with AdamW")
        yield record(name, passes / medians[PLAIN][0], "x torch, forward and backward")
        yield record(name, whole / medians[PLAIN][1], "x torch, with AdamW")
    for name, training in trainings.items() if device == "cuda" else ():
        yield record(name, waits(training), "waits of the host in a step", training.variant.waits)
        events = traced(training)
        for kind, said in (("AllGather", "gathers"), ("ReduceScatter", "scatters")):
            took, part = covered(events, kind)
            yield record(name, took / TRACED, f"ms of {said} a step")
            limited = training.variant.waits == 0 and training.variant.wire is not None and kind == "AllGather"
            yield record(name, 100 * part, f"% of {said} beside kernels", least=BESIDE if limited else None)


def worker(rank: int, folder: Path, stack: Stack, ranks: int, device: str) -> None:
    """Measure with the other ranks; the first one writes the figures down."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=ranks, init_method=f"file://{folder}/store")
    found, read = [], clock(device)
    shapes = (experts.QWEN, experts.MIXTRAL) if device == "cuda" else (experts.SMALL,)
    spread = experts.records(shapes, ranks, device, lambda: read, slowest)
    for each in chain(records(stack, ranks, device), spread):
        found.append(each)
        if rank == 0:
            state = "" if each["limit"] is None else f", limit {each['limit']}: {'met' if each['met'] else 'NOT MET'}"
            print(f"{each['name']:32s} {each['value']:9.3f} {each['unit']}{state}", flush=True)
            (folder / "records.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, help="by default named after the devices, in benchmarks/results")
    parser.add_argument("--tests", type=Path, metavar="JSON", help="the report of python -m tests.distributed")
    given, ranks = parser.parse_args(), torch.cuda.device_count()
    file: Path = given.file or device_file().with_stem(f"{device_file().stem}x{ranks}")
    tests = {"tests": json.loads(given.tests.read_text())} if given.tests else {}
    with tempfile.TemporaryDirectory() as folder:
        arguments = (Path(folder), LARGE, ranks, "cuda")
        try:
            torch.multiprocessing.start_processes(worker, arguments, nprocs=ranks, start_method="spawn")
        finally:  # what was measured until something went wrong
            found = json.loads(Path(folder, "records.json").read_text())
            whole = {**stamp("python -m benchmarks.distributed"), "ranks": ranks, **tests, "results": found}
            whole["versions"]["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
            whole["versions"]["torchao"] = version("torchao") if importlib.util.find_spec("torchao") else "none"
            file.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
