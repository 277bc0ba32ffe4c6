"""compute-sanitizer over every kernel and case: ``python -m benchmarks.sanitizer [TOOL …] [--kernel NAME …]``.

Needs the CUDA toolkit. With ``--kernel``, over the cases of these kernels alone.

Each tool watches several processes that share the cases; torch's caching allocator is off, so that every tensor has edges.
A tool rewrites every kernel that a process loads, so cases of one kernel's variant are dealt to few processes, by
:func:`shares`. Values are not compared here; tests/gpu does that.

Initcheck does not see what the engine of Hopper stores (cp.async.bulk), so it reports whoever reads that: :data:`UNSEEN` leaves
out the cases with such a reader. ``python -m benchmarks.sanitizer --unseen`` shows this of a program, unseen.cu, that stores
its values in either way.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opfuse.errors import UnsupportedError, describe

if TYPE_CHECKING:
    from opfuse.kernels.engine.compiling import Variant

SANITIZER = "compute-sanitizer"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PROCESSES = 16
DEALT = 24
"""How many cases go to one process and then to the next: each then loads half as many variants as of cases dealt singly."""
UNSEEN: Mapping[str, tuple[str, str]] = {"initcheck": ("product_chain", "current")}
"""Of a tool, the kernel, and a word of those of its cases that are left out: a cast reads what the engine stored before it."""
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
_DONE = re.compile(r"ran (\d+) cases of (\d+) kernels")


def shares(tool: str, only: Collection[str] = (), count: int = PROCESSES) -> list[list[tuple[str, str]]]:
    """The cases that ``tool`` is for, as names of kernel and case, dealt to at most ``count`` processes. Needs no GPU.

    Of the kernels in ``only``, by default of all. Cases that launch the same variants follow each other, and are dealt
    :data:`DEALT` at a time.
    """
    from tests.kernels.catalogue import CASES

    unseen, word = UNSEEN.get(tool, ("", ""))
    known = {kernel.name for kernel in CASES}
    if unknown := sorted({*only} - known):
        cure = f"name some of {', '.join(sorted(known))}"
        raise UnsupportedError(describe("--kernel", wanted="names of kernels", got=", ".join(unknown), cure=cure))
    numbers: dict[Variant, int] = {}
    launched: dict[tuple[str, str], list[int]] = {}
    for kernel, cases in CASES.items():
        if only and kernel.name not in only:
            continue
        launched |= {(kernel.name, name): [] for name in cases if kernel.name != unseen or word not in name}
        for (variant, _), names in kernel.launches(cases).items():
            for case in {(kernel.name, name) for name in names} & launched.keys():
                launched[case].append(numbers.setdefault(variant, len(numbers)))
    inorder = sorted(launched, key=launched.__getitem__)
    dealt = ([case for i, case in enumerate(inorder) if i // DEALT % count == share] for share in range(count))
    return [share for share in dealt if share]


def run_cases(chosen: Sequence[Sequence[str]]) -> None:
    """The cases with these names, in this process."""
    import torch

    from tests.kernels.catalogue import CASES

    kernels = {kernel.name: (kernel, cases) for kernel, cases in CASES.items()}
    for name, which in chosen:
        kernel, cases = kernels[name]
        arguments = cases[which](torch.device("cuda"))
        kernel(*arguments.args, **arguments.kwargs)
    torch.cuda.synchronize()
    print(f"ran {len(chosen)} cases of {len({name for name, _ in chosen})} kernels")


def errors(tool: str, only: Collection[str] = ()) -> tuple[int, int]:
    """What ``tool`` found, and in how many cases: of the kernels in ``only``, by default of all.

    UnsupportedError without the tool, RuntimeError with its output if it did not run them all.
    """
    if shutil.which(SANITIZER) is None:
        cure = "install the CUDA toolkit, and put its bin folder on PATH"
        raise UnsupportedError(describe("compute-sanitizer", wanted=f"{SANITIZER} on PATH", got="none", cure=cure))
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [SANITIZER, "--tool", tool, sys.executable, "-m", "benchmarks.sanitizer", "--cases"]
    processes = [
        subprocess.Popen(
            [*command, json.dumps(share)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for share in shares(tool, only)
    ]
    found = ran = 0
    try:
        for process in processes:
            output = process.communicate()[0]
            summary, done = _SUMMARY.search(output), _DONE.search(output)
            if summary is None or done is None:
                raise RuntimeError(f"{tool} did not finish:\n{output[-3000:]}")
            count = int(summary[1] or summary[2])
            found, ran = found + count, ran + int(done[1])
            if count:
                print(output[:6000], file=sys.stderr)
    finally:
        for process in processes:
            process.kill()  # those that are done stay as they are
    return found, ran


def records(tools: Sequence[str] = TOOLS, only: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Figures for the record."""
    for tool in tools:
        found, ran = errors(tool, only)
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=f"of {', '.join(TOOLS)}: by default all")
    parser.add_argument("--kernel", nargs="+", default=[], metavar="NAME", help="as `opfuse kernels` names them")
    parser.add_argument("--unseen", action="store_true", help="show what initcheck does not see")
    parser.add_argument("--cases", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cases is not None:
        run_cases(arguments.cases)
    elif arguments.unseen:
        show_unseen()
    else:
        for record in records(arguments.tools or TOOLS, arguments.kernel):
            print(f"{record['name']:44s} {record['value']} errors", flush=True)


if __name__ == "__main__":
    main()
