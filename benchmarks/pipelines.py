"""Two pipelines beside the sum of their matrix products, every recipe and override: ``python benchmarks/pipelines.py``.

A = Linear with bias, GELU, Linear with bias. B = RMSNorm, Linear to twice the width, SwiGLU, Linear. bf16 weights and input.
The products are measured alone, in the same process and in the same way: forward products in the recipe's format, backward
products in it too, or in bf16 under an override. Peers are eager torch and torch.compile of the same modules in bf16.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timing import device_time, host_time
from torch import nn

import opfuse
from opfuse import ops, recipes
from opfuse.errors import RecipeError
from opfuse.recipes.policy import KEEP
from opfuse.recipes.recipe import QuantizerRole, Recipe
from opfuse.tensors.gemm import GEMMS, gemm

TOKENS, HIDDEN, FFN = 8192, 4096, 14336
RECIPES: dict[str, Callable[..., Recipe]] = {
    "delayed": recipes.DelayedScaling,
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
}


class Pipeline(NamedTuple):
    """A pipeline of opfuse ops, the same in torch, and (inputs, outputs) of its linear layers."""

    fused: Callable[[], nn.Module]
    eager: Callable[[], nn.Module]
    linears: tuple[tuple[int, int], ...]


class SwiGLU(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


PIPELINES = {
    "A": Pipeline(
        lambda: ops.Sequential(ops.Linear(HIDDEN, FFN), ops.GELU(), ops.Linear(FFN, HIDDEN)),
        lambda: nn.Sequential(nn.Linear(HIDDEN, FFN), nn.GELU("tanh"), nn.Linear(FFN, HIDDEN)),
        ((HIDDEN, FFN), (FFN, HIDDEN)),
    ),
    "B": Pipeline(
        lambda: ops.Sequential(
            ops.RMSNorm(HIDDEN), ops.Linear(HIDDEN, 2 * FFN, bias=False), ops.SwiGLU(), ops.Linear(FFN, HIDDEN, bias=False)
        ),
        lambda: nn.Sequential(
            nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, 2 * FFN, bias=False), SwiGLU(), nn.Linear(FFN, HIDDEN, bias=False)
        ),
        ((HIDDEN, 2 * FFN), (FFN, HIDDEN)),
    ),
}


class Times(NamedTuple):
    """Milliseconds of one call in inference, and of one forward and backward pass."""

    forward: float
    training: float


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def module_times(model: nn.Module, recipe: Recipe | None, *, tokens: int = TOKENS) -> Times:
    """Of a model that is warm under ``recipe``."""
    x, dy = random(tokens, HIDDEN).requires_grad_(), random(tokens, HIDDEN)
    active = (lambda: opfuse.autocast(recipe=recipe)) if recipe is not None else nullcontext

    @torch.no_grad()
    def forward() -> None:
        with active():
            model(x)

    def training() -> None:
        model.zero_grad()
        with active():
            y = model(x)
        torch.autograd.grad(y, [x, *model.parameters()], dy)

    return Times(*(device_time([call], launches=4, repeats=5).median / 1e3 for call in (forward, training)))


def product_times(pipeline: Pipeline, recipe: Recipe | None, override: str | None) -> Times:
    """The sums of the products of its linear layers."""
    took = dict.fromkeys(GEMMS, 0.0)
    for inputs, outputs in pipeline.linears:
        shapes = {"input": (TOKENS, inputs), "weight": (outputs, inputs), "grad_output": (TOKENS, outputs)}
        for name, what in GEMMS.items():
            operands: list[Any] = [random(*shapes[role]) / 16 for role in (what.left, what.right)]
            if recipe is not None and (override is None or name == "fprop"):
                roles = (QuantizerRole("linear", role, "") for role in (what.left, what.right))
                operands = [recipe.quantizer(role).quantize(x) for role, x in zip(roles, operands)]

            def call(name: str = name, operands: list[Any] = operands) -> None:
                gemm(name, *operands, dtype=torch.bfloat16)

            took[name] += device_time([call], launches=4, repeats=5).median / 1e3
    return Times(took["fprop"], sum(took.values()))


def measure() -> Iterator[dict[str, Any]]:
    """One row for each pipeline, recipe and override, the peers first."""
    for label, pipeline in PIPELINES.items():
        products: dict[tuple[str, bool], Times] = {("bf16", False): product_times(pipeline, None, None)}
        eager = pipeline.eager().to("cuda", torch.bfloat16)
        for peer, model in (("eager bf16", eager), ("torch.compile bf16", torch.compile(eager))):
            yield _row(label, peer, None, module_times(model, None), products["bf16", False])
        model = pipeline.fused().to("cuda", torch.bfloat16)
        yield _row(label, "bf16", None, module_times(model, None), products["bf16", False])
        for kind, make in RECIPES.items():
            for override in KEEP:
                try:
                    recipe = make(backward_override=override)
                except RecipeError:
                    continue  # delayed scaling takes no override
                key = kind, override is None
                if key not in products:
                    products[key] = product_times(pipeline, _stateless(recipe), override)
                yield _row(label, kind, override, module_times(model, recipe), products[key])


def _stateless(recipe: Recipe) -> Recipe:
    """A recipe of the same products whose quantizers need no state."""
    return recipes.Float8CurrentScaling() if isinstance(recipe, recipes.DelayedScaling) else recipe


def _row(pipeline: str, kind: str, override: str | None, took: Times, products: Times) -> dict[str, Any]:
    name = f"{pipeline}, {kind}" + (f", {override}" if override else "")
    return {"name": name, "override": override, "kind": kind, "took": took, "products": products}


def records() -> Iterator[dict[str, Any]]:
    """Figures for the record: milliseconds, and the time as a multiple of that of the products alone."""
    for row in measure():
        for what, took, products in zip(Times._fields, row["took"], row["products"]):
            name = f"{row['name']}, {what}"
            native = row["kind"] in ("current", "block")
            limit = 1.10 if row["override"] == "dequantized" and native and what == "training" else None
            ratio = took / products
            yield {"name": name, "value": took, "unit": "ms", "limit": None, "met": None}
            yield {
                "name": name,
                "value": ratio,
                "unit": "x products",
                "limit": limit,
                "met": limit and ratio <= limit,
            }


def host_records() -> Iterator[dict[str, Any]]:
    """Microseconds of the host for A in small, while the device has nothing to do."""
    small = 256
    fused = ops.Sequential(ops.Linear(small, small), ops.GELU(), ops.Linear(small, small)).to("cuda", torch.bfloat16)
    eager = nn.Sequential(nn.Linear(small, small), nn.GELU("tanh"), nn.Linear(small, small)).to("cuda", torch.bfloat16)
    x = random(small, small).requires_grad_()
    models: dict[str, tuple[nn.Module, Recipe | None]] = {
        "eager bf16": (eager, None),
        "torch.compile bf16": (torch.compile(eager), None),
        "bf16": (fused, None),
        **{kind: (fused, make()) for kind, make in RECIPES.items()},
    }
    for name, (model, recipe) in models.items():

        def forward(model: nn.Module = model, recipe: Recipe | None = recipe) -> torch.Tensor:
            with opfuse.autocast(recipe=recipe) if recipe is not None else nullcontext():
                return model(x)

        def training(forward: Callable[..., torch.Tensor] = forward) -> None:
            forward().backward(x.detach())

        for what, call in (("infer", torch.no_grad()(forward)), ("forward", forward), ("forward + backward", training)):
            yield {
                "name": f"host, A 256x256, {name}, {what}",
                "value": host_time(call, calls=50).median,
                "unit": "us",
                "limit": None,
                "met": None,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", action="store_true", help="the host's time alone")
    arguments = parser.parse_args()
    if arguments.host:
        for record in host_records():
            print(f"{record['name']:60s} {record['value']:8.1f} us")
        return
    for row in measure():
        times = zip(row["took"], row["products"])
        forward, training = (f"{took:7.2f} ms {took / alone:5.2f} x products" for took, alone in times)
        print(f"{row['name']:28s} forward {forward}   forward + backward {training}", flush=True)


if __name__ == "__main__":
    main()
