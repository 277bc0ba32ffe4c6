"""The measured gain of each recipe.

The figures are of one record, ``benchmarks/results/h200.json``: a training step of RMSNorm, Linear, SwiGLU, Linear with 8192
tokens, 4096 wide, 14336 inside, beside the same modules under ``torch.compile`` in bf16. `tests/convert/test_policy.py` compares.
"""

from __future__ import annotations

from opfuse.recipes import Recipe

RECORD = "benchmarks/results/h200.json"

GAINS: dict[tuple[str, str | None], float] = {
    ("delayed", None): 1.74,
    ("fp8_current", None): 1.7,
    ("fp8_current", "dequantized"): 1.14,
    ("fp8_current", "high_precision"): 1.18,
    ("fp8_block", None): 1.53,
    ("fp8_block", "dequantized"): 1.16,
    ("fp8_block", "high_precision"): 1.21,
    ("mxfp8", None): 0.94,
    ("mxfp8", "dequantized"): 1.02,
    ("mxfp8", "high_precision"): 1.0,
    ("nvfp4", None): 0.9,
    ("nvfp4", "dequantized"): 0.98,
    ("nvfp4", "high_precision"): 0.99,
}
"""How many times as fast, by kind of recipe and backward override. Below 1: an H200 has no such products, and emulates them."""


def gain_of(recipe: Recipe | None) -> float | None:
    """What products under ``recipe`` were measured to gain; None where they were not, or the recipe is not known yet."""
    return None if recipe is None else GAINS.get((recipe.kind, recipe.backward_override))
