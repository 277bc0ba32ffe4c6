"""What batch invariance costs a forward pass: ``python -m benchmarks.invariance``.

Pipelines in inference under a recipe with ``batch_invariant=True`` and without it, in turns, at several numbers of tokens. Few
tokens read weights and wait for the host; a limit is set where the products are what takes the time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

import opfuse
from benchmarks.models import LARGE, PIPELINES, Sizes
from benchmarks.timing import Call, compared
from opfuse import recipes
from opfuse.recipes.recipe import Recipe

RECIPES: Mapping[str, Recipe] = {
    "fp8_block": recipes.Float8BlockScaling(),
    "fp8_row": recipes.CustomRecipe(qfactory="fp8_row_scaled"),
    "delayed": recipes.DelayedScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
}

TOKENS, LIMIT, EMULATED = (8192, 512, 1), 1.05, ("mxfp8",)
"""A limit is set for products that are native on compute capability 9.0."""


def _forward(model: torch.nn.Module, x: torch.Tensor, recipe: Recipe) -> Call:
    def call() -> None:
        with torch.no_grad(), opfuse.autocast(recipe=recipe):
            model(x)

    return call


def measure(
    sizes: Sizes = LARGE, tokens: tuple[int, ...] = TOKENS, device: str = "cuda"
) -> Iterator[tuple[str, str, int, float]]:
    """(pipeline, recipe, tokens, times as long as without the field)."""
    for pipeline in ("B", "A"):
        model = PIPELINES[pipeline].fused(sizes).to(device, torch.bfloat16)
        for (name, recipe), count in itertools.product(RECIPES.items(), tokens):
            x = torch.randn(count, sizes.hidden, device=device, dtype=torch.bfloat16)
            with_it, without = (_forward(model, x, each) for each in (recipe.replace(batch_invariant=True), recipe))
            yield pipeline, name, count, compared(with_it, without, launches=4).ratio


def records() -> Iterator[dict[str, Any]]:
    """Figures for the record."""
    for pipeline, name, count, ratio in measure():
        limit = LIMIT if count == max(TOKENS) and name not in EMULATED else None
        named = {"name": f"{pipeline}, {name}, {count} tokens, batch-invariant forward", "value": ratio, "unit": "x without"}
        yield {**named, "limit": limit, "met": None if limit is None else ratio <= limit}


def main() -> None:
    """Print a table."""
    for pipeline, name, count, ratio in measure():
        print(f"{pipeline}, {name:12s} {count:6d} tokens: {ratio:5.3f} times without", flush=True)


if __name__ == "__main__":
    main()
