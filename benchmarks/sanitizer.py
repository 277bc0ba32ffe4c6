"""compute-sanitizer over every kernel and case: ``python -m benchmarks.sanitizer [TOOL …]``. Needs the CUDA toolkit.

Each tool watches several processes that share the cases; torch's caching allocator is off, so that every tensor has edges.
Values are not compared here; tests/gpu does that.

Initcheck does not see what the engine of Hopper stores (cp.async.bulk), so it reports whoever reads that: :data:`UNSEEN` leaves
out the cases with such a reader. ``python -m benchmarks.sanitizer --unseen`` shows this of a program, unseen.cu, that stores
its values in either way.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from opfuse.errors import UnsupportedError, describe

SANITIZER = "compute-sanitizer"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PROCESSES = 16
UNSEEN: Mapping[str, tuple[str, str]] = {"initcheck": ("product_chain", "current")}
"""Of a tool, the kernel, and a word of those of its cases that are left out: a cast reads what the engine stored before it."""
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
_DONE = re.compile(r"ran (\d+) cases of (\d+) kernels")


def run_cases(tool: str, share: int, shares: int) -> None:
    """Every ``shares``-th case of all kernels that ``tool`` is for, in this process."""
    import torch

    from opfuse.kernels.catalogue import CASES

    unseen, word = UNSEEN.get(tool, ("", ""))
    every = ((kernel, name, case) for kernel, cases in CASES.items() for name, case in cases.items())
    cases = [(kernel, case) for kernel, name, case in every if kernel.name != unseen or word not in name][share::shares]
    for kernel, case in cases:
        arguments = case(torch.device("cuda"))
        kernel(*arguments.args, **arguments.kwargs)
    torch.cuda.synchronize()
    print(f"ran {len(cases)} cases of {len({kernel.name for kernel, _ in cases})} kernels")


def errors(tool: str) -> tuple[int, int]:
    """What ``tool`` found, and in how many cases.

    UnsupportedError without the tool, RuntimeError with its output if it did not run them all.
    """
    if shutil.which(SANITIZER) is None:
        cure = "install the CUDA toolkit, and put its bin folder on PATH"
        raise UnsupportedError(describe("compute-sanitizer", wanted=f"{SANITIZER} on PATH", got="none", cure=cure))
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [SANITIZER, "--tool", tool, sys.executable, "-m", "benchmarks.sanitizer", "--share", tool]
    shares = [
        subprocess.Popen(
            [*command, str(i), str(PROCESSES)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for i in range(PROCESSES)
    ]
    found = ran = 0
    try:
        for process in shares:
            output = process.communicate()[0]
            summary, done = _SUMMARY.search(output), _DONE.search(output)
            if summary is None or done is None:
                raise RuntimeError(f"{tool} did not finish:\n{output[-3000:]}")
            count = int(summary[1] or summary[2])
            found, ran = found + count, ran + int(done[1])
            if count:
                print(output[:6000], file=sys.stderr)
    finally:
        for process in shares:
            process.kill()  # those that are done stay as they are
    return found, ran


def records(tools: tuple[str, ...] = TOOLS) -> Iterator[dict[str, Any]]:
    """Figures for the record."""
    for tool in tools:
        found, ran = errors(tool)
        yield {"name": f"compute-sanitizer {tool}, {ran} cases", "value": found, "unit": "errors", "limit": 0, "met": found == 0}


def show_unseen() -> None:
    """What initcheck says of the same values stored by threads, and by the engine. Needs nvcc and a Hopper GPU."""
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "unseen")
        subprocess.run(["nvcc", "-arch=sm_90a", "-o", program, str(Path(__file__).with_name("unseen.cu"))], check=True)
        for way in ("threads", "engine"):
            command = [SANITIZER, "--tool", "initcheck", program, way]
            output = subprocess.run(command, check=False, capture_output=True, text=True).stdout
            print(f"{way}: {' '.join(line.strip('= ') for line in output.splitlines() if 'SUMMARY' in line or 'right' in line)}")


def main() -> None:
    if sys.argv[1:2] == ["--share"]:
        run_cases(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        return
    if sys.argv[1:] == ["--unseen"]:
        show_unseen()
        return
    for record in records(tuple(sys.argv[1:]) or TOOLS):
        print(f"{record['name']:44s} {record['value']} errors", flush=True)


if __name__ == "__main__":
    main()
