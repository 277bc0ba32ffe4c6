"""What a user waits for: the host's time, wall time and Python calls of whole steps: ``python -m benchmarks.calls``.

A in small, where the host decides, and four decoder layers at 2048 tokens, called and replayed as a CUDA graph. Models take
turns, so that ratios are of one state of the machine. "weights kept" is the same inside of :func:`opfuse.kept_weights`, as in
serving or between two steps of an optimizer, for calls that keep them.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import copy_context
from typing import Any

import torch
from torch import nn

import opfuse
from benchmarks.models import LARGE, Sizes, active, decoder, settings
from benchmarks.timing import Call, host_time, wall_time
from opfuse import ops
from opfuse.recipes import DelayedScaling, Recipe

EAGER, COMPILED, KEPT = "eager bf16", "torch.compile bf16", "weights kept"
SMALL = 256

Record = dict[str, Any]
Calls = dict[str, Call]

MOST_HOST = {
    "infer": {"fp8_current": 3.2, "delayed": 2.6, "fp8_block": 2.8},
    "forward + backward": {"fp8_current": 1.9, "delayed": 1.7, "fp8_block": 1.7},
}
"""What the host may take for A in small, as multiples of what eager bf16 takes."""

MOST_CALLS = {"infer": 250, "forward + backward": 600}
"""Python calls of A in small, under every recipe of :data:`MOST_HOST`."""

MOST_WALL = {"delayed": 0.80, "fp8_current": 0.85, "fp8_block": 0.85}
"""Wall time of decoder layers that are called, as multiples of what eager bf16 takes."""

DECODER, LAYERS = Sizes(2048, LARGE.hidden, LARGE.ffn), 4


def host_calls(model: nn.Module, recipe: Recipe | None, x: torch.Tensor) -> Calls:
    """What is timed of a model: inference, the forward pass, a step, whose gradients are added to those before."""

    def forward() -> torch.Tensor:
        with active(recipe):
            result: torch.Tensor = model(x)
        return result

    def training() -> None:
        forward().backward(x.detach())

    return {"infer": torch.no_grad()(forward), "forward": forward, "forward + backward": training}


class Kept:
    """A call inside of a scope of its own that stays open as long as the call is here."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        self._call, self._inside, self._scope = call, copy_context(), opfuse.kept_weights(model)
        self.weights = self._inside.run(self._scope.__enter__)

    def __call__(self) -> object:
        return self._inside.run(self._call)


def with_kept_weights(model: nn.Module, recipe: Recipe, calls: Calls, inference: Collection[str]) -> Calls:
    """Those of the calls that keep casts of weights, each in a scope of its own; ``inference`` names those that do not train.

    Under delayed scaling the scales of weights move after each region that trains, so a call of it casts anew.
    """
    keeping = inference if isinstance(recipe, DelayedScaling) else calls
    return {what: Kept(model, call) for what, call in calls.items() if what in keeping}


def of_recipes(model: nn.Module, x: torch.Tensor) -> dict[str, Calls]:
    """The calls of a model under every recipe without an override, and with kept weights under the native ones."""
    given = {kind: recipe for kind, override, recipe in settings() if override is None}
    made = {kind: host_calls(model, recipe, x) for kind, recipe in given.items()}
    native = {kind: recipe for kind, recipe in given.items() if kind in MOST_WALL and recipe is not None}
    kept = {f"{kind} {KEPT}": with_kept_weights(model, recipe, made[kind], {"infer"}) for kind, recipe in native.items()}
    return {**made, **kept}


def in_turns(models: Mapping[str, Calls], timer: Callable[[Call], float], rounds: int) -> dict[tuple[str, str], list[float]]:
    """By model and what it does: the time in each round, in which each takes a turn."""
    took: dict[tuple[str, str], list[float]] = {(name, what): [] for name, calls in models.items() for what in calls}
    whats = dict.fromkeys(what for calls in models.values() for what in calls)
    for _ in range(rounds):
        for what in whats:
            for name, calls in models.items():
                if what in calls:
                    took[name, what].append(timer(calls[what]))
    return took


def compared(
    label: str, took: Mapping[tuple[str, str], list[float]], unit: str, most: Mapping[str, Mapping[str, float]]
) -> Iterator[Record]:
    """Medians, and medians of the ratios to eager bf16 in the same round."""
    for (name, what), times in took.items():
        full = f"{label}, {name}, {what}"
        yield {"name": full, "value": statistics.median(times), "unit": unit, "limit": None, "met": None}
        ratio = statistics.median(mine / its for mine, its in zip(times, took[EAGER, what]))
        limit = most.get(what, {}).get(name)
        yield {"name": full, "value": ratio, "unit": f"x {EAGER}", "limit": limit, "met": limit and ratio <= limit}


def python_calls(call: Call) -> int:
    """How many functions Python calls in one call, by cProfile, with the backward pass on this thread, which it sees."""
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(4):
            call()
        with cProfile.Profile() as profile:
            call()
    count: int = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    return count


def host_records(rounds: int = 9, *, small: int = SMALL, device: str = "cuda", calls: int = 25) -> Iterator[Record]:
    """Microseconds of the host, and Python calls, for A in small, while the device has nothing to do."""
    fused = ops.Sequential(ops.Linear(small, small), ops.GELU(), ops.Linear(small, small)).to(device, torch.bfloat16)
    eager = nn.Sequential(nn.Linear(small, small), nn.GELU("tanh"), nn.Linear(small, small)).to(device, torch.bfloat16)
    x = torch.randn(small, small, device=device, dtype=torch.bfloat16).requires_grad_()
    models = {EAGER: host_calls(eager, None, x), COMPILED: host_calls(torch.compile(eager), None, x), **of_recipes(fused, x)}
    label = f"host, A {small}x{small}"
    took = in_turns(models, lambda call: host_time(call, calls=calls, repeats=1).median, rounds)
    yield from compared(label, took, "us", MOST_HOST)
    for (name, what), most in ((pair, MOST_CALLS.get(pair[1])) for pair in took if pair[0] != COMPILED):
        limit = most if name in MOST_HOST["infer"] else None
        count = python_calls(models[name][what])
        yield {
            "name": f"{label}, {name}, {what}",
            "value": count,
            "unit": "Python calls",
            "limit": limit,
            "met": limit and count <= limit,
        }


def captured(call: Call) -> Call:
    """The replay of a call that a CUDA graph was captured of."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            call()
    torch.cuda.synchronize()
    gc.collect()  # what dies during a capture may ask the device, which ends it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph.replay


def decoder_records(
    rounds: int = 7, *, sizes: Sizes = DECODER, layers: int = LAYERS, device: str = "cuda", graphs: bool = True
) -> Iterator[Record]:
    """Milliseconds of training steps of decoder layers: of wall time, of the host's, of the replay of a graph."""
    x = torch.randn(sizes.tokens, sizes.hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    eager, fused = (decoder(sizes, layers, fused=mine).to(device, torch.bfloat16) for mine in (False, True))
    every = {EAGER: host_calls(eager, None, x), **of_recipes(fused, x)}
    wanted = (EAGER, "none", *MOST_WALL, *(f"{kind} {KEPT}" for kind in MOST_WALL))
    steps = {name: every[name]["forward + backward"] for name in wanted if "forward + backward" in every[name]}
    label = f"host, decoder of {layers} layers {sizes.tokens}x{sizes.hidden}"
    wall = in_turns({name: {"step, wall": step} for name, step in steps.items()}, lambda call: wall_time(call) / 1e3, rounds)
    yield from compared(label, wall, "ms", {"step, wall": MOST_WALL})
    queued = {name: {"step, host": step} for name, step in steps.items()}
    yield from compared(label, in_turns(queued, lambda call: host_time(call, calls=2, repeats=1).median / 1e3, rounds), "ms", {})
    if graphs:
        replayed = {name: {"step, replayed": captured(step)} for name, step in steps.items() if KEPT not in name}
        yield from compared(label, in_turns(replayed, lambda call: wall_time(call) / 1e3, rounds), "ms", {})


def records() -> Iterator[Record]:
    """Figures for the record."""
    yield from host_records()
    torch._dynamo.reset()
    yield from decoder_records()


def main() -> None:
    start = time.perf_counter()
    for record in records():
        limit = "" if record["limit"] is None else f", at most {record['limit']:.2f}"
        print(f"{record['name']:80s} {record['value']:9.2f} {record['unit']}{limit}", flush=True)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
