"""Measures on a GPU what the benchmarks can, and writes it down: ``python -m benchmarks.record [--file FILE] [--only SCRIPT …]``.

A record is one figure: name, value, unit, the limit it should reach (None: no limit is set), whether it does, and the script.
With ``--only``, the figures of other scripts stay in FILE, if its machine and packages are the same: of each script the file says
when it ran, and the digests of the code that it measured. ``--tests`` adds the same of tests/gpu, from the reports that
pytest wrote under ``--junit-xml``. Scripts in :data:`ANYWHERE` also run without a GPU, for the machine of FILE.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks import (
    adapters,
    calls,
    casts,
    chained,
    choices,
    compiling,
    converted,
    epilogues,
    gemm,
    grouped,
    invariance,
    libraries,
    memory,
    memory_estimates,
    mixtures,
    norms,
    overhead,
    pipelines,
    products,
    profiles,
    pytorch,
    rollout,
    sanitizer,
    small,
    steps,
    training,
)
from benchmarks.bandwidth import SHAPES, Table, measure, measure_peers
from benchmarks.stamp import device_file, moment, versions

Record = dict[str, Any]

# Percent of a copy of the same matrix in the same process, for 16384 x 8192 bf16: at least.
LEAST = {
    "delayed, row": 97,
    "1x128, row": 97,
    "128x128, row": 97,
    "MXFP8, row": 97,
    "current, row": 95,
    "row-scaled, row": 97,
    "row-scaled, row + col": 85,
    "delayed, row + col": 88,
    "1x128, row + col": 88,
    "128x128, row + col": 88,
    "MXFP8, row + col": 91,
    "decode, row": 92,
    "decode row-scaled, row": 92,
    "decode 1x128, row": 92,
    "decode 128x128, row": 92,
    "decode MXFP8, row": 92,
    "NVFP4, row, known amax": 70,
    "NVFP4, row + rotated, known amax": 45,
    "bias, GELU, cast both": 85,
    "bias, GELU, blocks both": 78,
    "bias, GELU, MXFP8 both": 80,
    "SwiGLU, cast both": 90,
    "RMSNorm, delayed, row": 88,
    "d GELU, d bias, cast both": 85,
    "d SwiGLU, d bias, cast both": 85,
}
# Microseconds for 4096 x 4096 bf16: at most.
MOST = {
    **dict.fromkeys(("delayed, row", "1x128, row", "128x128, row", "MXFP8, row"), 17),
    **dict.fromkeys(("delayed, row + col", "1x128, row + col", "128x128, row + col", "MXFP8, row + col"), 23),
}


def bandwidths(table: Table) -> Iterator[Record]:
    """Of a table of kernels: the large shape as a part of copy, the small one in time."""
    large, small = SHAPES
    for shape in SHAPES:
        for row in measure(table, shape):
            least, most = LEAST.get(row["name"]) if shape == large else None, MOST.get(row["name"]) if shape == small else None
            percent, us = row["percent"], row["us"]
            label = f"{row['name']}, {shape[0]}x{shape[1]} bf16"
            yield {"name": label, "value": percent, "unit": "% of copy", "limit": least, "met": least and percent >= least}
            yield {"name": label, "value": us, "unit": "us", "limit": most, "met": most and us <= most}


def peers() -> Iterator[Record]:
    """What PyTorch takes for the same results, as multiples of the kernels' times."""
    for table, others in TABLES.values():
        for row in measure_peers(table, others, SHAPES[0]):
            name = f"{row['name']}, {row['peer']}, {SHAPES[0][0]}x{SHAPES[0][1]} bf16"
            yield {"name": name, "value": row["times"], "unit": "x time", "limit": None, "met": None}


TABLES = {
    "casts": (casts.CASTS, casts.PEERS),
    "epilogues": (epilogues.CHAINS, epilogues.PEERS),
    "norms": (norms.NORMS, norms.PEERS),
}
SCRIPTS: Mapping[str, Callable[[], Iterator[Record]]] = {
    **{name: functools.partial(bandwidths, table) for name, (table, _) in TABLES.items()},
    "peers": peers,
    "gemm": gemm.records,
    "products": products.records,
    "chained": chained.records,
    "choices": choices.records,
    "pipelines": pipelines.records,
    "profiles": profiles.records,
    "invariance": invariance.records,
    "grouped": grouped.records,
    "host": calls.records,
    "converted": converted.records,
    "libraries": libraries.records,
    "small": small.records,
    "mixtures": mixtures.records,
    "steps": steps.records,
    "adapters": adapters.records,
    "rollout": rollout.records,
    "overhead": overhead.records,
    "pytorch": pytorch.records,
    "training": training.records,
    "memory": memory.records,
    "memory_estimates": memory_estimates.records,
    "compiling": compiling.records,
    "registers": compiling.resources,
    **{tool: functools.partial(sanitizer.records, (tool,)) for tool in sanitizer.TOOLS},
}
"""What is measured, in this order; all but the tools of compute-sanitizer by default, which take minutes."""

ANYWHERE = frozenset({"registers"})
"""Scripts that ask the compiler alone, which compiles for a GPU that is not there."""


def earlier(file: Path, only: Collection[str] = SCRIPTS) -> dict[str, Any]:
    """What ``file`` has of this machine with these packages; of any machine where there is no GPU and ``only`` needs none."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    elsewhere = ANYWHERE.issuperset(only) and not torch.cuda.is_available()
    return found if elsewhere or found.get("versions") == versions() else {}


def begun() -> dict[str, Any]:
    """A record without figures."""
    return {"script": "python -m benchmarks.record", "versions": versions(), "measured": {}, "results": []}


def counts(reports: Sequence[Path]) -> dict[str, int]:
    """How many tests passed, failed or were skipped, by pytest's reports in the form of JUnit. An error counts as a failure."""
    found = dict.fromkeys(("passed", "failed", "skipped"), 0)
    for report in reports:
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            tests, failures, errors, skipped = (int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped"))
            found["passed"] += tests - failures - errors - skipped
            found["failed"] += failures + errors
            found["skipped"] += skipped
    return found


def main() -> None:
    """Measure, print what has a limit, write the file after each script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, help="by default named after the device, in benchmarks/results")
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=[name for name in SCRIPTS if name not in sanitizer.TOOLS])
    parser.add_argument("--tests", nargs="+", type=Path, default=[], metavar="XML", help="pytest's reports of tests/gpu")
    arguments = parser.parse_args()
    file: Path = arguments.file or device_file()
    whole = earlier(file, arguments.only) or begun()
    if arguments.tests:
        whole["tests"] = {**counts(arguments.tests), **moment()}
    for script in arguments.only:
        start = time.perf_counter()
        add(whole, script, [told(record) for record in SCRIPTS[script]()])
        print(f"{script}: {time.perf_counter() - start:.0f} s", flush=True)
        file.write_text(json.dumps(whole, indent=1) + "\n")


def add(whole: dict[str, Any], script: str, found: Sequence[Record]) -> None:
    """Put the figures of ``script`` in the place of those that it measured earlier."""
    order = list(SCRIPTS)
    others = [record for record in whole["results"] if record["script"] != script]
    made = [*others, *({**record, "script": script} for record in found)]
    whole["results"] = sorted(made, key=lambda record: order.index(record["script"]))
    whole["measured"] = {**whole["measured"], script: moment()}


def told(record: Record) -> Record:
    """The figure, printed if it has a limit."""
    if record["limit"] is not None:
        state = "met" if record["met"] else "NOT MET"
        print(f"{record['name']:60s} {record['value']:8.1f} {record['unit']}, limit {record['limit']:.1f}: {state}")
    return record


if __name__ == "__main__":
    main()
