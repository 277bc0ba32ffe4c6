"""compute-sanitizer over every kernel and case: ``python -m benchmarks.sanitizer [TOOL …]``. Needs the CUDA toolkit.

Each tool watches several processes that share the cases; torch's caching allocator is off, so that every tensor has edges.
Values are not compared here; tests/gpu does that.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from opfuse.errors import UnsupportedError, describe

SANITIZER = "compute-sanitizer"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PROCESSES = 16
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
_DONE = re.compile(r"ran (\d+) cases of (\d+) kernels")


def run_cases(share: int, shares: int) -> None:
    """Every ``shares``-th case of all kernels, in this process."""
    import torch

    from opfuse.kernels.catalogue import CASES

    cases = [(kernel, case) for kernel, cases in CASES.items() for case in cases.values()][share::shares]
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
    command = [SANITIZER, "--tool", tool, sys.executable, "-m", "benchmarks.sanitizer", "--share"]
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


def main() -> None:
    if sys.argv[1:2] == ["--share"]:
        run_cases(int(sys.argv[2]), int(sys.argv[3]))
        return
    for record in records(tuple(sys.argv[1:]) or TOOLS):
        print(f"{record['name']:44s} {record['value']} errors", flush=True)


if __name__ == "__main__":
    main()
