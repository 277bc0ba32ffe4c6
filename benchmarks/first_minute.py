"""What somebody sees who converts a model for the first time, on a CPU: ``python -m benchmarks.first_minute [--json FILE]``.

*Seconds*: the README's script that converts a Llama, in processes of their own with empty caches of opfuse, from the start of
Python to the end of the first optimizer step, on the clock and of processors; the shortest of some, since a host has other things
to do. *Losses*: how far the means over 20 steps are from those without opfuse, at most, in 200 steps of the model of
tests/convert/test_loss.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from opfuse.recipes import recipe_of
from tests.convert.test_loss import KINDS, differences, losses

ROOT = Path(__file__).resolve().parents[1]
CORES, RUNS, STEPS = 2, 3, 200


def script() -> str:
    """The README's block that converts a model, up to its first step; it prints when that is done."""
    blocks = re.findall(r"```py\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (block,) = [each for each in blocks if "opfuse.fuse_(" in each]
    before, step, _ = block.partition("optimizer.step()\n")
    return f"import time\n{before}{step}print(time.time(), time.process_time())\n"


def seconds() -> tuple[float, float]:
    """From the start of Python to the end of the script: on the clock, and those of processors."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": str(CORES), "XDG_CACHE_HOME": folder, "PYTHONPATH": str(ROOT)}
        start = time.time()
        done = subprocess.run(
            [sys.executable, "-c", script()], env=environment, capture_output=True, text=True, check=True, cwd=folder
        )
        end, busy = map(float, done.stdout.split()[-2:])
        return end - start, busy


def apart(seed: int) -> Iterator[tuple[str, float]]:
    """Most that the loss under each recipe is apart from that without, as a part of it."""
    plain = losses(None, steps=STEPS, seed=seed)
    for kind in KINDS:
        yield kind, max(map(abs, differences(losses(recipe_of(kind, {}), steps=STEPS, seed=seed), plain)))


def figures() -> Iterator[tuple[str, float, str]]:
    """A name, a value and its unit, one after another."""
    clock, busy = zip(*(seconds() for _ in range(RUNS)))
    yield "first FP8 step", min(clock), "s"
    yield "first FP8 step, processors", min(busy), "s"
    for seed in range(2):
        yield from ((f"loss apart, {kind}, seed {seed}", most, "") for kind, most in apart(seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    target = parser.parse_args().json
    torch.set_num_threads(CORES)
    found: dict[str, Any] = {"torch": torch.__version__, "cores": CORES, "results": []}
    for name, value, unit in figures():
        print(f"{name:40s} {value:8.4f} {unit}", flush=True)
        found["results"].append({"name": name, "value": value, "unit": unit})
        if target is not None:
            target.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
