"""Two pipelines beside the sum of their matrix products, every recipe and override: ``python -m benchmarks.pipelines``.

A = Linear with bias, GELU, Linear with bias. B = RMSNorm, Linear to twice the width, SwiGLU, Linear. bf16 weights and input.
The products are measured without the rest, in turns with the pipeline, so that both find the same clocks: forward products in the
recipe's format, backward products in it too, or in bf16 under an override. "weights kept" is the same pipeline inside of
:func:`opfuse.kept_weights`, as in serving or between steps of an optimizer, for calls that keep them. Peers are eager torch and
torch.compile of the same modules in bf16. Wall time is what a user waits for.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.calls import KEPT, with_kept_weights
from benchmarks.models import LARGE, PIPELINES, active, settings
from benchmarks.timing import Call, device_time, wall_time
from opfuse import recipes
from opfuse.recipes.recipe import SPLIT, QuantizerRole, Recipe
from opfuse.tensors.gemm import GEMMS, gemm


class Limits(NamedTuple):
    """Of one call in inference, and of one forward and backward pass."""

    forward: float
    training: float


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


Calls = dict[str, Call]
"""What is timed, by the fields of :class:`Limits`."""


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

    return {"forward": forward, "training": training}


def product_calls(linears: tuple[tuple[int, int], ...], recipe: Recipe | None, override: str | None) -> Calls:
    """The products of linear layers of so many inputs and outputs, in the order of a training step, back to back."""
    forward = [_product("fprop", *sizes, recipe) for sizes in linears]
    backward = [
        _product(name, *sizes, recipe if override is None else None) for sizes in reversed(linears) for name in ("dgrad", "wgrad")
    ]

    def run(products: list[Call]) -> list[object]:
        return [product() for product in products]

    return {"forward": lambda: run(forward), "training": lambda: run(forward + backward)}


def in_turns(calls: Calls) -> dict[str, float]:
    """Milliseconds of each call: the median over rounds in which every call is timed once."""
    rounds = [{name: device_time([call], launches=4, repeats=1).median for name, call in calls.items()} for _ in range(7)]
    return {name: statistics.median(each[name] for each in rounds) / 1e3 for name in calls}


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
    if kept and recipe is not None:
        called = with_kept_weights(model, recipe, called, {"forward"})
    took = in_turns({**called, **{f"products of {what}": alone[what] for what in called}})
    times = {what: (took[what], took[f"products of {what}"], wall_time(call) / 1e3) for what, call in called.items()}
    return {"name": name, "override": override, "kind": kind, "times": times}


LIMITED = "B"
MOST = {
    "delayed": Limits(1.07, 1.08),
    "fp8_current": Limits(1.12, 1.12),
    "fp8_block": Limits(1.07, 1.05),
}
"""Times as long as its products that pipeline B may take by recipe, without an override."""


def most(row: Mapping[str, Any], what: str) -> float | None:
    """Times as long as its products that a row of :func:`measure` may take."""
    if row["override"] == "dequantized" and row["kind"] in ("fp8_current", "fp8_block") and what == "training":
        return 1.10
    limited = row["override"] is None and row["kind"] in MOST and row["name"].startswith(LIMITED)
    return getattr(MOST[row["kind"]], what) if limited else None


def records() -> Iterator[dict[str, Any]]:
    """Figures for the record: milliseconds of the device, as a multiple of the products alone too, and of a user's wait."""
    for row in measure():
        for what, (took, products, wall) in row["times"].items():
            name = f"{row['name']}, {what}"
            limit, ratio = most(row, what), took / products
            yield {"name": name, "value": took, "unit": "ms", "limit": None, "met": None}
            yield {"name": name, "value": ratio, "unit": "x products", "limit": limit, "met": limit and ratio <= limit}
            yield {"name": name, "value": wall, "unit": "ms of wall time", "limit": None, "met": None}


def main() -> None:
    for row in measure():
        told = (
            f"{what} {took:7.2f} ms {took / products:5.2f} x products {wall:7.2f} ms of wall time"
            for what, (took, products, wall) in row["times"].items()
        )
        print(f"{row['name']:28s} {'   '.join(told)}", flush=True)


if __name__ == "__main__":
    main()
