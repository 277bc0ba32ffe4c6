"""Rates of products by recipe, measured on one H200: what advice and warnings estimate from."""

from __future__ import annotations

from collections.abc import Mapping

BF16 = 800e12
RATES: Mapping[str, float] = {"fp8_current": 1440e12, "fp8_block": 1155e12, "mxfp8": 670e12, "nvfp4": 685e12}
"""FLOP/s of products in bf16 and by kind of recipe: means over the three products and both sizes of the record."""

RECORD = "benchmarks/results/h200.json"
"""Where the rates were measured."""
