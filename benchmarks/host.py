"""Host cost of planning, of recording and of finding a plan again: ``python -m benchmarks.host [--json [FILE]]``, on the CPU.

A *miss* lowers, covers and verifies a pipeline on an empty cache; the time should grow in proportion to the ops. A *recording* is
a run on tape, and the program that is made of it; the same run by the interpreter and by the program are set beside it. A *hit*
makes the key of a call and looks its plan up; it is set against a call of ``nn.Identity`` and of a small ``nn.Linear``. All times
are the shortest of several runs, since a host has other things to do; of a miss and a recording the processor's, which others
lengthen less.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import opfuse
from opfuse import ops
from opfuse.compiler.registry import active_rules
from opfuse.recipes.recipe import Recipe
from opfuse.runtime.fuser import OperationFuser

WIDTH = 64
SIZES = (100, 300, 1000)
MOST_PLANNING = {1000: 150.0}
"""Milliseconds that a miss of so many ops may take."""

PIPELINES = {
    3: lambda: [ops.RMSNorm(WIDTH), ops.Linear(WIDTH, WIDTH)],
    12: lambda: [op for _ in range(2) for op in _block()],
}
"""Pipelines to hit, by their number of basic ops."""

RECORDED = 100
RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "fp8_current": opfuse.recipes.Float8CurrentScaling(),
    "mxfp8": opfuse.recipes.MXFP8BlockScaling(),
}
"""Ops of the pipeline that is recorded, and its recipes."""


def _block() -> list[torch.nn.Module]:
    return [ops.RMSNorm(WIDTH), ops.Linear(WIDTH, 2 * WIDTH), ops.GELU(), ops.Linear(2 * WIDTH, WIDTH)]


def _modules(size: int) -> list[torch.nn.Module]:
    """RMSNorm, Linear, GELU, Linear again and again, up to ``size`` basic ops or a few more."""
    modules: list[torch.nn.Module] = []
    while sum(len(op.basic_ops) for op in modules) < size:
        modules += _block()
    return modules


def _pipeline(size: int) -> OperationFuser:
    return OperationFuser(torch.nn.ModuleList(_modules(size)).bfloat16())


def _input() -> torch.Tensor:
    return torch.randn(128, WIDTH, dtype=torch.bfloat16)


def plan_times(repeats: int = 15) -> list[dict[str, Any]]:
    """Milliseconds of a miss on the clock and of the processor, forward and backward, every built-in rule, for each of SIZES."""
    rows = []
    x = _input().requires_grad_()
    for size in SIZES:
        fuser, times = _pipeline(size), []
        for _ in range(repeats):
            fuser.cache.clear()
            gc.collect()
            start, busy = time.perf_counter(), time.process_time()
            plan = fuser.plan(x)
            times.append(((time.perf_counter() - start) * 1e3, (time.process_time() - busy) * 1e3))
        ms, cpu_ms = map(min, zip(*times))
        counts = {"ops": len(fuser.ops), "nodes": len(plan.graph.nodes), "fusions": len(plan.fusions)}
        limit = MOST_PLANNING.get(size)
        judged = {"limit": limit, "met": limit and ms <= limit}
        rows.append({**counts, "ms": ms, "cpu_ms": cpu_ms, "us_per_op": ms / len(fuser.ops) * 1e3, **judged})
    return rows


def _pass_times(model: torch.nn.Module, x: torch.Tensor, recipe: Recipe | None) -> tuple[float, float]:
    """Milliseconds of the processor for a forward and a backward pass."""
    start = time.process_time()
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x)
    between = time.process_time()
    y.backward(x)
    return (between - start) * 1e3, (time.process_time() - between) * 1e3


def record_times(size: int = RECORDED, repeats: int = 5) -> list[dict[str, Any]]:
    """Milliseconds of the processor for each pass of a pipeline, by recipe and by what the call does.

    The second call of a look records its forward pass, the fourth its backward pass.
    """
    x, rows = _input(), []
    for name, recipe in RECIPES.items():
        took: dict[str, list[tuple[float, float]]] = {}
        for _ in range(repeats):
            gc.collect()
            model = ops.Sequential(*_modules(size)).bfloat16()
            calls = [_pass_times(model, x, recipe) for _ in range(5)]
            with opfuse.interpreted():
                took.setdefault("interpreted", []).append(_pass_times(model, x, recipe))
            took.setdefault("recorded", []).append((calls[1][0], calls[3][1]))
            took.setdefault("repeated", []).append(calls[4])
        passes = {what: dict(zip(("forward_ms", "backward_ms"), map(min, zip(*times)))) for what, times in took.items()}
        rows.append({"recipe": name, "ops": sum(len(op.basic_ops) for op in model), **passes})
    return rows


def _microseconds(call: Callable[[], Any], calls: int = 200) -> float:
    return min(timeit.repeat(call, number=calls, repeat=200)) / calls * 1e6


def hit_times() -> dict[str, Any]:
    """Microseconds of a key and of a key with its lookup, and of the two modules they are set against."""
    x, rules = _input(), active_rules()
    modules = {"nn.Identity": torch.nn.Identity(), "nn.Linear": torch.nn.Linear(WIDTH, WIDTH).bfloat16()}
    with torch.no_grad():
        found: dict[str, Any] = {name: _microseconds(lambda m=module: m(x)) for name, module in modules.items()}
    rows = []
    for size, make in PIPELINES.items():
        fuser = OperationFuser(torch.nn.ModuleList(make()).bfloat16())
        fuser.plan(x)
        key = _microseconds(lambda f=fuser: f.key(x, (), rules))
        hit = _microseconds(lambda f=fuser: f.cache.get(f.key(x, (), rules)))
        parameters = sum(op.parameter_names != () for op in fuser.ops)
        rows.append({"ops": size, "parameters": parameters, "key_us": key, "hit_us": hit})
    return {**found, "pipelines": rows}


def report(plans: list[dict[str, Any]], recordings: list[dict[str, Any]], hits: dict[str, Any]) -> str:
    """All tables as text."""
    lines = [f"{'ops':>6} {'nodes':>6} {'fusions':>8} {'miss ms':>9} {'CPU ms':>9} {'us an op':>9}"]
    lines += ["{ops:6d} {nodes:6d} {fusions:8d} {ms:9.1f} {cpu_ms:9.1f} {us_per_op:9.1f}".format(**row) for row in plans]
    lines += ["", f"{'ops':>6} {'recipe':>12} {'run':>15} {'forward ms':>11} {'backward ms':>12}"]
    for row in recordings:
        for what, passes in ((what, passes) for what, passes in row.items() if isinstance(passes, dict)):
            lines.append(
                f"{row['ops']:6d} {row['recipe']:>12} {what:>15} {passes['forward_ms']:11.1f} {passes['backward_ms']:12.1f}"
            )
    lines += ["", f"{'ops':>6} {'params':>6} {'key us':>8} {'hit us':>9} {'nn.Identity calls':>18} {'nn.Linear calls':>16}"]
    for row in hits["pipelines"]:
        ratios = row["hit_us"] / hits["nn.Identity"], row["hit_us"] / hits["nn.Linear"]
        lines.append(
            "{ops:6d} {parameters:6d} {key_us:8.2f} {hit_us:9.2f}".format(**row) + f" {ratios[0]:18.1f} {ratios[1]:16.2f}"
        )
    return "\n".join(
        [*lines, "", f"nn.Identity {hits['nn.Identity']:.2f} us, nn.Linear({WIDTH}, {WIDTH}) {hits['nn.Linear']:.2f} us"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", nargs="?", type=Path, const=Path("-"), help="print JSON, or write it to FILE")
    target = parser.parse_args().json
    torch.set_num_threads(1)
    with opfuse.autocast(recipe=opfuse.recipes.MXFP8BlockScaling()):
        plans, hits = plan_times(), hit_times()
    recordings = record_times()
    text = json.dumps({"torch": torch.__version__, "planning": plans, "recording": recordings, "hit": hits}, indent=1)
    if target is not None and str(target) == "-":
        print(text)
        return
    print(report(plans, recordings, hits))
    if target is not None:
        target.write_text(text + "\n")


if __name__ == "__main__":
    main()
