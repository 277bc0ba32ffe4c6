"""The pipelines that benchmarks run: of opfuse ops, and the same in torch; recipes and overrides to run them under.

A = Linear with bias, GELU, Linear with bias. B = RMSNorm, Linear to twice the width, SwiGLU, Linear. A decoder is layers of
RMSNorm, attention with one product for query, key and value, and B, each added to what came in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import opfuse
from opfuse import ops, recipes
from opfuse.errors import RecipeError
from opfuse.recipes.recipe import OVERRIDES, Recipe


class Sizes(NamedTuple):
    """Tokens, width of the model, width inside the block."""

    tokens: int
    hidden: int
    ffn: int


SMALL, LARGE = Sizes(256, 128, 384), Sizes(8192, 4096, 14336)
"""By default on a CPU, and on a GPU."""


class SwiGLU(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


class Pipeline(NamedTuple):
    """A pipeline of opfuse ops, the same in torch, and (inputs, outputs) of its linear layers."""

    fused: Callable[[Sizes], nn.Module]
    eager: Callable[[Sizes], nn.Module]
    linears: Callable[[Sizes], tuple[tuple[int, int], ...]]


PIPELINES = {
    "A": Pipeline(
        lambda s: ops.Sequential(ops.Linear(s.hidden, s.ffn), ops.GELU(), ops.Linear(s.ffn, s.hidden)),
        lambda s: nn.Sequential(nn.Linear(s.hidden, s.ffn), nn.GELU("tanh"), nn.Linear(s.ffn, s.hidden)),
        lambda s: ((s.hidden, s.ffn), (s.ffn, s.hidden)),
    ),
    "B": Pipeline(
        lambda s: ops.Sequential(
            ops.RMSNorm(s.hidden),
            ops.Linear(s.hidden, 2 * s.ffn, bias=False),
            ops.SwiGLU(),
            ops.Linear(s.ffn, s.hidden, bias=False),
        ),
        lambda s: nn.Sequential(
            nn.RMSNorm(s.hidden),
            nn.Linear(s.hidden, 2 * s.ffn, bias=False),
            SwiGLU(),
            nn.Linear(s.ffn, s.hidden, bias=False),
        ),
        lambda s: ((s.hidden, 2 * s.ffn), (s.ffn, s.hidden)),
    ),
}


class DecoderLayer(nn.Module):
    """x (tokens, hidden) of one sequence. read: norm and product of query, key and value; write: product of what heads say."""

    def __init__(self, read: nn.Module, write: nn.Module, mlp: nn.Module, head: int = 128) -> None:
        super().__init__()
        self.read, self.write, self.mlp, self.head = read, write, mlp, head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.read(x).view(len(x), 3, -1, self.head).permute(1, 2, 0, 3)[:, None]
        said = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.write(said[0].transpose(0, 1).reshape(len(x), -1))
        result: torch.Tensor = x + self.mlp(x)
        return result


def decoder(sizes: Sizes, layers: int, *, fused: bool) -> nn.Sequential:
    """Layers of opfuse pipelines, or the same in torch."""
    made, lib = [], ops if fused else nn
    for _ in range(layers):
        read: tuple[nn.Module, ...] = lib.RMSNorm(sizes.hidden), lib.Linear(sizes.hidden, 3 * sizes.hidden, bias=False)
        write = lib.Linear(sizes.hidden, sizes.hidden, bias=False)
        mlp = PIPELINES["B"].fused(sizes) if fused else PIPELINES["B"].eager(sizes)
        made.append(DecoderLayer(lib.Sequential(*read), write, mlp, head=min(128, sizes.hidden)))
    return nn.Sequential(*made)


def settings() -> Iterator[tuple[str, str | None, Recipe | None]]:
    """(kind, override, recipe) of every recipe under every override that it takes, no recipe first."""
    yield "none", None, None
    for kind in recipes.RECIPES:
        for override in OVERRIDES if kind != "custom" else ():
            try:
                yield kind, override, recipes.recipe_of(kind, {"backward_override": override})
            except RecipeError:
                continue  # delayed scaling takes no override


def active(recipe: Recipe | None) -> Any:
    """The region of a recipe, or none."""
    return nullcontext() if recipe is None else opfuse.autocast(recipe=recipe)
