"""``opfuse run --device cuda`` of configurations whose products are native there: ``python -m benchmarks.training``.

What is recorded: the loss of the last steps, and by how much it is off that of the same run without a recipe.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opfuse.config import load
from opfuse.train import Comparison, compare

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
NAMES = ("delayed", "fp8_current", "fp8_current_dequantized", "fp8_row_scaled", "fp8_block", "fp8_block_dequantized")
MOST = 2.0
"""Percent that a loss may be off."""


def runs() -> Iterator[Comparison]:
    for name in NAMES:
        yield compare(load(CONFIGS / f"{name}.yaml"), device="cuda")


def records() -> Iterator[dict[str, Any]]:
    """Figures for the record. A run whose products were emulated does not meet its limit."""
    for run in runs():
        loss, plain = run.run.last, run.baseline.last if run.baseline else math.nan
        name = f"opfuse run {run.name}, {run.settings.steps} steps, {run.backend.status} products"
        off = 100 * abs(loss / plain - 1)
        yield {"name": f"{name}, loss", "value": loss, "unit": "nats", "limit": None, "met": None}
        met = off <= MOST and run.backend.status == "native"
        yield {"name": f"{name}, off {run.labels[1]}", "value": off, "unit": "%", "limit": MOST, "met": met}


def main() -> None:
    for record in records():
        print(f"{record['name']:70s} {record['value']:8.4f} {record['unit']}", flush=True)


if __name__ == "__main__":
    main()
