"""What it costs to be asked: watching, tracing and sources, on and off: ``python -m benchmarks.overhead``.

Wall time is that of training steps of B at full size, where the device decides: windows of 100 steps, one of which is looked at,
beside as many that nobody looks at, in turns; and the step that is looked at beside one that is not. Host time is that of a step
of A in small while the device has nothing to do, and of making a plan; tracing and sources queue nothing on the device.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

import opfuse
from benchmarks.calls import host_calls
from benchmarks.models import LARGE, PIPELINES, Sizes, settings
from benchmarks.timing import Call, host_time, wall_time
from opfuse.recipes import autocast
from opfuse.runtime.fuser import OperationFuser
from opfuse.runtime.plans.trace import TRACE

Record = dict[str, Any]
Setting = Callable[[nn.Module], AbstractContextManager[object]]

KINDS = ("delayed", "fp8_current", "fp8_block")
EVERY, MOST = 100, 1.0
"""Steps of which one is looked at, and percent of the time of all that this may add."""
SMALL = Sizes(256, 256, 256)

OFF, WATCHED, LOOKS, TRACED, UNSOURCED = "as it is", f"watch(every={EVERY})", "watch(every=1)", "tracing", "without sources"


@contextmanager
def _traced(model: nn.Module) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as directory, mock.patch.dict(os.environ, {TRACE: directory}):
        yield


def _no_site() -> tuple[str, int]:
    return "nowhere", 1


def _no_caller() -> str:
    return "nowhere:1"


@contextmanager
def _unsourced(model: nn.Module) -> Iterator[None]:
    """Nobody looks for lines of the user's code."""
    with (
        mock.patch(f"{autocast.__module__}.site", new=_no_site),
        mock.patch(f"{OperationFuser.__module__}.caller", new=_no_caller),
    ):
        yield


SETTINGS: Mapping[str, Setting] = {
    OFF: nullcontext,
    WATCHED: lambda model: opfuse.watch(model, every=EVERY, alarms={}),
    LOOKS: lambda model: opfuse.watch(model, every=1, alarms={}),
    TRACED: _traced,
    UNSOURCED: _unsourced,
}


def in_turns(model: nn.Module, timed: Callable[[], float], rounds: int, names: Sequence[str]) -> dict[str, list[float]]:
    """Microseconds under each setting, in each round; every second round goes through them backwards."""
    took: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        for name in names[:: -1 if i % 2 else 1]:
            with SETTINGS[name](model):
                took[name].append(timed())
    return took


def added(took: Mapping[str, list[float]], name: str) -> float:
    """Percent that a setting adds to the time of all rounds, in which the state of the machine drifts."""
    return 100 * (sum(took[name]) / sum(took[OFF]) - 1)


def _told(label: str, took: Mapping[str, list[float]], unit: str, micro: float) -> Iterator[Record]:
    for name, times in took.items():
        full = f"{label}, {name}"
        yield {"name": full, "value": statistics.median(times) / micro, "unit": unit, "limit": None, "met": None}
        if name != OFF:
            yield {"name": full, "value": added(took, name), "unit": "% more", "limit": None, "met": None}


def _step(model: nn.Module, kind: str, x: torch.Tensor) -> Call:
    recipe = next(recipe for name, override, recipe in settings() if (name, override) == (kind, None))
    return host_calls(model, recipe, x)["forward + backward"]


def _model(pipeline: str, sizes: Sizes, device: str) -> tuple[nn.Module, torch.Tensor]:
    model = PIPELINES[pipeline].fused(sizes).to(device, torch.bfloat16)
    return model, torch.randn(sizes.tokens, sizes.hidden, device=device, dtype=torch.bfloat16).requires_grad_()


def step_records(sizes: Sizes = LARGE, *, rounds: int = 4, every: int = EVERY, device: str = "cuda") -> Iterator[Record]:
    """Wall time of training steps of B."""
    for kind in KINDS:
        model, x = _model("B", sizes, device)
        step = _step(model, kind, x)
        in_turns(model, partial(wall_time, step, calls=1), 1, (OFF, LOOKS))  # kernels are compiled and loaded
        label = f"overhead, step of B {sizes.tokens}x{sizes.hidden}, {kind}"
        yield from _told(label, in_turns(model, partial(wall_time, step, calls=8), rounds, (OFF, LOOKS)), "ms", 1e3)
        percent = added(in_turns(model, partial(wall_time, step, calls=every), rounds, (OFF, WATCHED)), WATCHED)
        yield {"name": f"{label}, {WATCHED}", "value": percent, "unit": "% more", "limit": MOST, "met": percent <= MOST}


def host_records(sizes: Sizes = SMALL, *, rounds: int = 9, calls: int = 25, device: str = "cuda") -> Iterator[Record]:
    """Time of the host for a training step of A, and for a plan of it."""
    model, x = _model("A", sizes, device)
    step = _step(model, "fp8_current", x)
    took = in_turns(model, lambda: host_time(step, calls=calls, repeats=1).median, rounds, tuple(SETTINGS))
    yield from _told(f"overhead, host of A {sizes.tokens}x{sizes.hidden}, fp8_current", took, "us", 1)
    fuser = OperationFuser(nn.ModuleList(PIPELINES["A"].fused(sizes)).to(device, torch.bfloat16))

    def planned() -> float:
        fuser.cache.clear()
        start = time.perf_counter()
        fuser.plan(x)
        return (time.perf_counter() - start) * 1e6

    planned()
    took = in_turns(model, planned, 3 * rounds, (OFF, TRACED, UNSOURCED))
    yield from _told(f"overhead, plan of A {sizes.tokens}x{sizes.hidden}", took, "us", 1)


def records() -> Iterator[Record]:
    """Figures for the record."""
    yield from step_records()
    yield from host_records()


def main() -> None:
    start = time.perf_counter()
    for record in records():
        limit = "" if record["limit"] is None else f", at most {record['limit']:.1f}"
        print(f"{record['name']:70s} {record['value']:9.2f} {record['unit']}{limit}", flush=True)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
