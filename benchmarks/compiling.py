"""First calls of a process: compiling a cast, finding it on disk, another number of rows: ``python -m benchmarks.compiling``.

Each figure is of a process of its own, with a cache directory of its own. NVRTC loads its library at its first call, which is
timed apart, on a text of one line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from opfuse.kernels import cubins

SCRIPT = """
import json, time
import torch
from opfuse.formats import E4M3, USAGES, fp8_block, mxfp8
from opfuse.kernels import cast, launch
from opfuse.kernels.cast_block import cast_block
from opfuse.kernels.layouts import Layout

def timed(call):
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)

compiled = []
compile_text = launch.compile_text
launch.compile_text = lambda *args: compiled.append(args) or compile_text(*args)

def layouts(fmt, x):
    return [Layout(fmt, usage, tuple(x.shape)) for usage in USAGES]

x, longer = (torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16) for rows in (256, 1280))
library = timed(lambda: compile_text("__global__ void nothing() {}", launch.architecture(0)))
timed(lambda: launch._cupy())
calls = {
    "MXFP8, row + col": lambda x: cast.cast_mx(x, layouts(mxfp8(E4M3), x)),
    "1x128, row + col": lambda x: cast_block(x, layouts(fp8_block(E4M3, 1), x)),
}
first = {name: timed(lambda: call(x)) for name, call in calls.items()}
before = len(compiled)
again = {name: timed(lambda: call(longer)) for name, call in calls.items()}
print(json.dumps({"library": library, "first": first, "again": again, "compiled": before, "for_rows": len(compiled) - before}))
"""


def run(directory: str) -> dict[str, Any]:
    """Milliseconds of a new process whose kernels are kept in ``directory``."""
    environment = {**os.environ, cubins.ENVIRONMENT: directory}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def records() -> Iterator[dict[str, Any]]:
    """Figures for the record."""
    with tempfile.TemporaryDirectory() as directory:
        cold, warm = run(directory), run(directory)
    yield _record("NVRTC, first call of a process", cold["library"], "ms")
    for name, took in cold["first"].items():
        yield _record(f"first call, empty cache, {name}", took, "ms", 250)
    for name, took in warm["first"].items():
        yield _record(f"first call, from disk, {name}", took, "ms", 10)
    yield _record("kernels compiled with a warm cache", warm["compiled"], "kernels", 0)
    yield _record("kernels compiled for another number of rows", cold["for_rows"], "kernels", 0)


def _record(name: str, value: float, unit: str, limit: float | None = None) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "limit": limit, "met": None if limit is None else value <= limit}


def main() -> None:
    for record in records():
        print(f"{record['name']:44s} {record['value']:8.1f} {record['unit']}")


if __name__ == "__main__":
    main()
