"""Rates of products by recipe, measured on one H200: what advice and warnings estimate from."""

from __future__ import annotations

from collections.abc import Mapping

BF16 = 810e12
RATES: Mapping[str, float] = {"fp8_current": 1465e12, "fp8_block": 1270e12, "mxfp8": 680e12, "nvfp4": 690e12}
"""FLOP/s of products in bf16 and by kind of recipe: means over the three products and both sizes of the record."""

RECORD = "benchmarks/results/h200.json"
"""Where the rates were measured."""
