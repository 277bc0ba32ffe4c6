"""Two pipelines beside the sum of their matrix products, every recipe and override: ``python -m benchmarks.pipelines``.

A = Linear with bias, GELU, Linear with bias. B = RMSNorm, Linear to twice the width, SwiGLU, Linear. bf16 weights and input.
The products are measured without the rest, in turns with the pipeline, so that both find the same clocks: forward products in the
recipe's format, backward products in it too, or in bf16 under an override. "weights kept" is the same pipeline inside of
:func:`opfuse.kept_weights`, as in inference or between steps of an optimizer. Peers are eager torch and torch.compile of the same
modules in bf16.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.calls import KEPT, with_kept_weights
from benchmarks.models import LARGE, PIPELINES, active, settings
from benchmarks.timing import Call, device_time
from opfuse import recipes
from opfuse.recipes.policy import SPLIT
from opfuse.recipes.recipe import QuantizerRole, Recipe
from opfuse.tensors.gemm import GEMMS, gemm


class Times(NamedTuple):
    """Milliseconds of one call in inference, and of one forward and backward pass."""

    forward: float
    training: float


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


Calls = tuple[Call, Call]
"""What :class:`Times` are of."""


def module_calls(model: nn.Module, recipe: Recipe | None) -> Calls:
    """A model under ``recipe``."""
    x, dy = random(LARGE.tokens, LARGE.hidden).requires_grad_(), random(LARGE.tokens, LARGE.hidden)

    @torch.no_grad()
    def forward() -> None:
        with active(recipe):
            model(x)

    def training() -> None:
        with active(recipe):
            y = model(x)
        torch.autograd.grad(y, [x, *model.parameters()], dy)

    return forward, training


def product_calls(linears: tuple[tuple[int, int], ...], recipe: Recipe | None, override: str | None) -> Calls:
    """The products of linear layers of so many inputs and outputs, in the order of a training step, back to back."""
    forward = [_product("fprop", *sizes, recipe) for sizes in linears]
    backward = [
        _product(name, *sizes, recipe if override is None else None) for sizes in reversed(linears) for name in ("dgrad", "wgrad")
    ]

    def run(products: list[Call]) -> list[object]:
        return [product() for product in products]

    return (lambda: run(forward)), (lambda: run(forward + backward))


def in_turns(*pairs: Calls) -> list[Times]:
    """Of each pair, by the median over rounds in which every call is timed once."""
    calls = [call for pair in pairs for call in pair]
    rounds = [[device_time([call], launches=4, repeats=1).median for call in calls] for _ in range(7)]
    medians = [statistics.median(of_call) / 1e3 for of_call in zip(*rounds)]
    return [Times(*medians[i : i + 2]) for i in range(0, len(medians), 2)]


def _product(name: str, inputs: int, outputs: int, recipe: Recipe | None) -> Call:
    what = GEMMS[name]
    shapes = {"input": (LARGE.tokens, inputs), "weight": (outputs, inputs), "grad_output": (LARGE.tokens, outputs)}
    operands: list[Any] = [random(*shapes[role]) / 16 for role in (what.left, what.right)]
    if recipe is not None:
        roles = (QuantizerRole("linear", role, "") for role in (what.left, what.right))
        operands = [recipe.quantizer(role).quantize(x) for role, x in zip(roles, operands)]
    return lambda: gemm(name, *operands, dtype=torch.bfloat16, fast=name not in SPLIT["backward"])


def measure() -> Iterator[dict[str, Any]]:
    """One row for each pipeline, recipe and override, the peers first."""
    for label, pipeline in PIPELINES.items():
        eager = pipeline.eager(LARGE).to("cuda", torch.bfloat16)
        for peer, module in (("eager bf16", eager), ("torch.compile bf16", torch.compile(eager))):
            yield _row(label, peer, None, module, None)
        model = pipeline.fused(LARGE).to("cuda", torch.bfloat16)
        for kind, override, recipe in settings():
            yield _row(label, kind, override, model, recipe)
            if override is None and kind in MOST and label == LIMITED:
                yield _row(label, kind, override, model, recipe, kept=True)


def _stateless(recipe: Recipe | None) -> Recipe | None:
    """A recipe of the same products whose quantizers need no state."""
    return recipes.Float8CurrentScaling() if isinstance(recipe, recipes.DelayedScaling) else recipe


def _row(
    pipeline: str, kind: str, override: str | None, model: nn.Module, recipe: Recipe | None, *, kept: bool = False
) -> dict[str, Any]:
    name = ", ".join(filter(None, (pipeline, kind, override, KEPT if kept else "")))
    alone = product_calls(PIPELINES[pipeline].linears(LARGE), _stateless(recipe), override)
    called = module_calls(model, recipe)
    if kept:
        scoped = with_kept_weights(model, dict(zip(Times._fields, called)))
        called = scoped["forward"], scoped["training"]
    took, products = in_turns(called, alone)
    return {"name": name, "override": override, "kind": kind, "took": took, "products": products}


LIMITED = "B"
MOST = {
    "delayed": Times(1.07, 1.08),
    "fp8_current": Times(1.12, 1.12),
    "fp8_block": Times(1.07, 1.05),
}
"""Times as long as its products that pipeline B may take by recipe, without an override."""


def most(row: Mapping[str, Any], what: str) -> float | None:
    """Times as long as its products that a row of :func:`measure` may take."""
    if row["override"] == "dequantized" and row["kind"] in ("fp8_current", "fp8_block") and what == "training":
        return 1.10
    limited = row["override"] is None and row["kind"] in MOST and row["name"].startswith(LIMITED)
    return getattr(MOST[row["kind"]], what) if limited else None


def records() -> Iterator[dict[str, Any]]:
    """Figures for the record: milliseconds, and the time as a multiple of that of the products alone."""
    for row in measure():
        for what, took, products in zip(Times._fields, row["took"], row["products"]):
            name = f"{row['name']}, {what}"
            limit, ratio = most(row, what), took / products
            yield {"name": name, "value": took, "unit": "ms", "limit": None, "met": None}
            yield {
                "name": name,
                "value": ratio,
                "unit": "x products",
                "limit": limit,
                "met": limit and ratio <= limit,
            }


def main() -> None:
    for row in measure():
        times = zip(row["took"], row["products"])
        forward, training = (f"{took:7.2f} ms {took / alone:5.2f} x products" for took, alone in times)
        print(f"{row['name']:28s} forward {forward}   forward + backward {training}", flush=True)


if __name__ == "__main__":
    main()
