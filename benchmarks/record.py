"""Measures on a GPU what benchmarks/casts.py and epilogues.py can, and writes the record: ``python -m benchmarks.record FILE``.

A record is one figure: name, value, unit, the limit it should reach (None: no limit is set), whether it does, and the script.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import opfuse
from benchmarks import casts, epilogues
from opfuse.kernels.registry import sources_digest

# Percent of a copy of the same matrix in the same process, for 16384 x 8192 bf16.
LIMITS = {
    "delayed, row": 97,
    "1x128, row": 97,
    "128x128, row": 97,
    "MXFP8, row": 97,
    "current, row": 95,
    "delayed, row + col": 88,
    "1x128, row + col": 88,
    "128x128, row + col": 88,
    "MXFP8, row + col": 91,
    "decode, row": 92,
    "decode 1x128, row": 92,
    "decode 128x128, row": 92,
    "decode MXFP8, row": 92,
    "bias, GELU, cast both": 85,
    "bias, GELU, blocks both": 78,
    "SwiGLU, cast both": 90,
    "d GELU, d bias, cast both": 85,
    "d SwiGLU, d bias, cast both": 85,
}


def records() -> Iterator[dict[str, Any]]:
    """All figures, the largest shape first."""
    for script, measure, word in (("casts.py", casts.measure, "cast"), ("epilogues.py", epilogues.measure, "chain")):
        for shape in casts.SHAPES:
            for row in measure(shape):
                limit = LIMITS.get(str(row[word])) if shape == casts.SHAPES[0] else None
                name = f"{row[word]}, {shape[0]}x{shape[1]} bf16"
                met = None if limit is None else row["percent"] >= limit
                yield {"name": name, "value": row["percent"], "unit": "% of copy", "limit": limit, "met": met, "script": script}
                yield {"name": name, "value": row["us"], "unit": "us", "limit": None, "met": None, "script": script}


def main() -> None:
    """Measure, print what misses its limit, write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    found = list(records())
    for record in found:
        if record["limit"] is not None:
            state = "met" if record["met"] else "NOT MET"
            print(f"{record['name']:48s} {record['value']:6.1f} {record['unit']}, at least {record['limit']}: {state}")
    versions = {"opfuse": opfuse.__version__, "torch": torch.__version__, "cupy": version("cupy-cuda13x")}
    machine = {"device": torch.cuda.get_device_name(), "python": platform.python_version(), **versions}
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    record = {
        "date": date,
        "versions": machine,
        "kernels_digest": sources_digest(),
        "script": "benchmarks/record.py",
        "results": found,
    }
    arguments.file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
