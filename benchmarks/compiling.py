"""What is compiled, and when: ``python -m benchmarks.compiling``. And what each kernel uses of a multiprocessor.

First calls of a process: compiling a cast, finding it on disk, other numbers of rows. Each figure is of a process of its own
with its own cache directory. NVRTC loads its library at its first call, which is timed apart, on a text of one line. Sizes or
addresses that vectors of 16 bytes do not divide take a second variant, which is compiled when the first of them comes.

First training steps: B of 1024 features on 1024 rows, forward and backward, each in a process that has imported what it needs,
made model and input on the device, and made a step of the same layers in plain bf16. That step is torch's own share: cuBLAS, the
thread of the backward pass, and about two seconds of modules that torch imports at its first backward pass. What is left to the
first step under a recipe has a limit, in the median of several processes: imports of CuPy and of the rules, lowering, planning,
compiling or loading each kernel. The second step records the pipeline. The processes of one recipe start at once and make the
plain step; then each waits for its turn. Those of other recipes are not there, since what waits still takes memory and time.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from opfuse.kernels.engine import compiling, cubins
from tests.kernels.catalogue import CASES

SCRIPT = """
import json, time
import torch
from opfuse.formats import E4M3, USAGES, fp8_block, fp8_tensor, mxfp8
from opfuse.kernels.casts import tensor as cast
from opfuse.kernels.casts.block import cast_block
from opfuse.kernels.engine import compiling
from opfuse.numerics.layouts import Layout

def timed(call):
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)

compiled = []
compile_text = compiling.compile_text
compiling.compile_text = lambda *args: compiled.append(args) or compile_text(*args)

def layouts(fmt, x):
    return [Layout(fmt, usage, tuple(x.shape)) for usage in USAGES]

x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
library = timed(lambda: compile_text("__global__ void nothing() {}", compiling.architecture(0)))
scale, amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
calls = {
    "MXFP8, row + col": lambda x: cast.cast_mx(x, layouts(mxfp8(E4M3), x)),
    "1x128, row + col": lambda x: cast_block(x, layouts(fp8_block(E4M3, 1), x)),
    "delayed, row + col": lambda x: cast.cast_recording(x, scale, amax, layouts(fp8_tensor(E4M3), x)),
}
first = {name: timed(lambda: call(x)) for name, call in calls.items()}
counts = {256: len(compiled)}
for rows in (1280, 264, 257):
    before = len(compiled)
    for call in calls.values():
        call(torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16))
    counts[rows] = len(compiled) - before
print(json.dumps({"library": library, "first": first, "compiled": counts}))
"""

STEPS = """
import json, sys, time
import torch
import opfuse
from benchmarks.models import PIPELINES, Sizes, active
from opfuse import recipes

kind, device, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
x = torch.randn(size, size, device=device, dtype=torch.bfloat16).requires_grad_()
plain, fused = (make(Sizes(size, size, size)).to(device, torch.bfloat16) for make in (PIPELINES["B"].eager, PIPELINES["B"].fused))

def wait():
    if device == "cuda":
        torch.cuda.synchronize()

def step(model, recipe=None):
    wait()
    start = time.perf_counter()
    with active(recipe):
        y = model(x)
    y.backward(torch.ones_like(y))
    wait()
    return 1e3 * (time.perf_counter() - start)

own = step(plain)
print("ready", flush=True)
input()
print(json.dumps([own, *(step(fused, recipes.recipe_of(kind, {})) for _ in range(3))]))
"""

KINDS, SIZE = ("delayed", "fp8_current", "fp8_block", "mxfp8"), 1024
PROCESSES = 3
"""Whose median counts."""

MOST_FIRST = {"empty cache": 750, "kernels on disk": 300}
"""Milliseconds of a first training step, after torch's own; it imports CuPy."""


def run(directory: str) -> Any:
    """The first calls of a new process. Its kernels are kept in ``directory``."""
    with _begun(directory, SCRIPT) as process:
        return json.loads(_line(process))


def _begun(directory: str, script: str, *arguments: str) -> subprocess.Popen[str]:
    """A new process, which keeps its kernels in ``directory``. The with statement ends it."""
    environment = {**os.environ, cubins.ENVIRONMENT: directory}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _line(process: subprocess.Popen[str]) -> str:
    """The next line that a process prints: RuntimeError if it ends before."""
    line = process.stdout.readline() if process.stdout else ""
    if not line:
        raise RuntimeError(f"a process that is measured ended with {process.wait()}: its error is above")
    return line


def first_steps(device: str = "cuda", size: int = SIZE, kinds: Sequence[str] = KINDS) -> Iterator[dict[str, Any]]:
    """Training steps of new processes, the first with a limit: the kernels compiled in it, or on disk."""
    for kind in kinds:
        with contextlib.ExitStack() as stack:
            yield from _first_steps(stack, kind, device, size)


def _first_steps(stack: contextlib.ExitStack, kind: str, device: str, size: int) -> Iterator[dict[str, Any]]:
    """Those under one recipe. The processes with kernels on disk have those that the others compile."""
    directories = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(PROCESSES)]
    arguments = (STEPS, kind, device, str(size))
    processes = {cache: [stack.enter_context(_begun(each, *arguments)) for each in directories] for cache in MOST_FIRST}
    for begun in processes.values():
        for process in begun:
            _line(process)
    for cache, begun in processes.items():
        took = map(statistics.median, zip(*map(_steps, begun)))
        for which, ms in zip(("plain torch's", "first", "second", "third"), took):
            limit = MOST_FIRST[cache] if which == "first" else None
            yield _record(f"{which} training step, {cache}, B {size}x{size}, {kind}", ms, "ms", limit)


def _steps(process: subprocess.Popen[str]) -> list[float]:
    """Milliseconds of torch's own step, which a waiting process has made, and of three under a recipe, which it makes now."""
    if process.stdin:
        print(file=process.stdin, flush=True)
    took: list[float] = json.loads(_line(process))
    return took


def records() -> Iterator[dict[str, Any]]:
    """Figures for the record."""
    with tempfile.TemporaryDirectory() as directory:
        cold, warm = run(directory), run(directory)
    yield _record("NVRTC, first call of a process", cold["library"], "ms")
    for name, took in cold["first"].items():
        yield _record(f"first call, empty cache, {name}", took, "ms", 250)
    for name, took in warm["first"].items():
        yield _record(f"first call, from disk, {name}", took, "ms", 10)
    yield _record("kernels compiled with a warm cache", sum(warm["compiled"].values()), "kernels", 0)
    for rows, count in list(cold["compiled"].items())[1:]:
        limit = 0 if int(rows) % 16 == 0 else None
        yield _record(f"kernels compiled for {rows} rows after 256, each in turn", count, "kernels", limit)
    yield from first_steps()


def resources() -> Iterator[dict[str, Any]]:
    """Registers of a thread, and bytes of them that are spilled, of each kernel's largest variant, as the compiler says.

    For this device, or without one for an H100 and H200. Minutes if the cache of kernels is empty: it has every variant then.
    """
    arch = compiling.architecture(torch.cuda.current_device()) if torch.cuda.is_available() else "sm_90a"
    cache = cubins.cubin_cache(cubins.location())
    launched = {launch for kernel, cases in CASES.items() for launch in kernel.launches(cases)}
    variants = sorted({variant for variant, _ in launched})
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # the compiler lets go of the interpreter
        used = dict(zip(variants, pool.map(lambda variant: compiling.resources(variant, arch, cache), variants)))
    most: dict[str, dict[str, int]] = {}
    for variant, entry in launched:
        known = most.setdefault(f"{variant.source}, {entry}", {"registers": 0, "spills": 0})
        known.update({name: max(value, getattr(used[variant][entry], name)) for name, value in known.items()})
    for name, figures in sorted(most.items()):
        yield _record(name, figures["registers"], "registers")
        yield _record(name, figures["spills"], "bytes spilled", 0)


def _record(name: str, value: float, unit: str, limit: float | None = None) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "limit": limit, "met": None if limit is None else value <= limit}


def main() -> None:
    for record in (*records(), *resources()):
        print(f"{record['name']:70s} {record['value']:8.1f} {record['unit']}")


if __name__ == "__main__":
    main()
