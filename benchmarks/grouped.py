"""Grouped linear layers of mixtures of experts: ``python -m benchmarks.grouped``.

One layer of 7168 features in and 2048 out, rows spread evenly over its groups: forward, and forward with backward, without a
recipe and under each backward override, beside torch's own linear layers in bf16, one a group. Split sizes are on the host and
each group has a weight, but for "device splits", where the device has the sizes and one tensor the weights. Formats that the
device only emulates are measured at the first size. Of some layers it is also measured what the host takes, and what a user
waits: also of the 128 experts of Qwen3-30B-A3B, to eight of which each of 16384 tokens goes.

Of whole mixtures (gate, experts with SwiGLU, sums of their rows) steps are measured; how long rows take from the tokens to FP8,
read through their index by the cast, or copied and then cast; and how long what lies between layers takes (between_experts.py).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import opfuse
from benchmarks.between_experts import BETWEEN, Between
from benchmarks.calls import KEPT, with_kept_weights
from benchmarks.timing import Call, Compared, compared, device_time, host_time, wall_time
from opfuse import ops, recipes
from opfuse.compiler.registry import use_rules
from opfuse.fusions import RULES
from opfuse.recipes.recipe import OVERRIDES
from opfuse.tensors.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8RowQuantizer,
    Quantizer,
)
from opfuse.tensors.ragged import cast_in_groups

ROWS = (16384, 32768, 65536, 98304)
GROUPS = (4, 8)
IN, OUT = 7168, 2048
PRODUCTS = {"forward": 1, "forward + backward": 3}
BF16 = torch.bfloat16
TORCH, GROUPED, BLOCKS = "torch bf16, a linear a group", "bf16, device splits", "fp8_block, device splits"
ON_DEVICE: dict[str, recipes.Recipe | None] = {
    GROUPED: None,
    BLOCKS: recipes.Float8BlockScaling(),
    "fp8_current, device splits": recipes.Float8CurrentScaling(),
    "fp8_row, device splits": recipes.CustomRecipe(qfactory="fp8_row_scaled"),
}
Record = dict[str, Any]


class Problem(NamedTuple):
    """A layer's rows and groups, its features in and out."""

    rows: int
    groups: int
    inputs: int = IN
    outputs: int = OUT

    @property
    def splits(self) -> tuple[int, ...]:
        """Rows of each group."""
        return (self.rows // self.groups,) * self.groups

    def flops(self, what: str) -> float:
        """Operations of all products."""
        return 2.0 * self.rows * self.inputs * self.outputs * PRODUCTS[what]

    @property
    def label(self) -> str:
        """What stands in names of figures."""
        features = "" if (self.inputs, self.outputs) == (IN, OUT) else f", {self.inputs} to {self.outputs}"
        return f"{self.groups} x {self.rows // self.groups}{features} rows"


class Variant(NamedTuple):
    """A name, the recipe, whether the device holds the splits, torch's ops run alone, casts of weights are kept."""

    name: str
    recipe: recipes.Recipe | None = None
    on_device: bool = False
    torch_alone: bool = False
    kept: bool = False


def variants() -> Iterator[Variant]:
    """torch first, then the op without a recipe, then every recipe that takes an override."""
    yield Variant(TORCH, torch_alone=True)
    yield Variant("bf16")
    yield from (Variant(name, recipe, on_device=True) for name, recipe in ON_DEVICE.items())
    for kind, cls in recipes.RECIPES.items():
        if kind != "custom" and cls.takes_backward_override:
            for override in OVERRIDES:
                yield Variant(f"{kind}, {override}", recipes.recipe_of(kind, {"backward_override": override}))


def calls(variant: Variant, problem: Problem, device: str) -> dict[str, Call]:
    """The step forward, and forward with backward."""
    options = {"bias": False, "single_grouped_weight": variant.on_device, "dtype": BF16, "device": device}
    op = ops.GroupedLinear(problem.groups, problem.inputs, problem.outputs, **options)
    x = torch.randn(problem.rows, problem.inputs, device=device, dtype=BF16)
    dy = torch.randn(problem.rows, problem.outputs, device=device, dtype=BF16)
    splits = torch.tensor(problem.splits, device=device if variant.on_device else "cpu")

    def forward(x: torch.Tensor) -> torch.Tensor:
        if variant.torch_alone:
            weights = (getattr(op, name) for name in op.weight_names)
            return torch.cat([F.linear(piece, w) for piece, w in zip(x.split(problem.splits), weights)])
        with opfuse.autocast(enabled=variant.recipe is not None, recipe=variant.recipe):
            result: torch.Tensor = op(x, splits)
        return result

    leaf = x.detach().requires_grad_()

    def both() -> object:
        return torch.autograd.grad(forward(leaf), (leaf, *op.parameters()), dy)

    made: dict[str, Call] = {"forward": torch.no_grad()(lambda: forward(x)), "forward + backward": both}
    return with_kept_weights(op, variant.recipe, made, {"forward"}) if variant.kept and variant.recipe else made


def measure(
    timer: Callable[[Call], float], *, rows: tuple[int, ...] = ROWS, sizes: tuple[int, int] = (IN, OUT), device: str = "cuda"
) -> Iterator[dict[str, Any]]:
    """A record for each problem, variant and step: microseconds by ``timer``, and the time of torch's layers over it."""
    for problem in (Problem(m, groups, *sizes) for groups in GROUPS for m in rows):
        torch_us: dict[str, float] = {}
        for variant in variants():
            emulated = variant.recipe is not None and recipes.support(variant.recipe).status != "native"
            if emulated and problem.rows != rows[0]:
                continue
            for what, call in calls(variant, problem, device).items():
                us = timer(call)
                torch_us.setdefault(what, us)
                yield {
                    **dict(zip(("rows", "groups", "in", "out"), problem)),
                    "what": what,
                    "variant": variant.name,
                    "backend": "emulated" if emulated else "native",
                    "us": round(us, 1),
                    "tflops": round(problem.flops(what) / us / 1e6, 1),
                    "ratio": round(torch_us[what] / us, 3),
                }


KEPT_BLOCKS = Variant(f"{BLOCKS}, {KEPT}", recipes.Float8BlockScaling(), on_device=True, kept=True)
"""As over the microbatches of a step."""


class Used(NamedTuple):
    """A layer of which host and wall time are measured too, and the least speed there of some variants, beside another one."""

    problem: Problem
    least: float
    limited: tuple[str, ...] = ("fp8_block, None",)
    beside: str = TORCH


USED = (
    Used(Problem(16384, 8), 1.15),
    Used(Problem(32768, 4), 1.3),
    Used(Problem(65536, 8), 1.5),
    Used(Problem(98304, 4), 1.6),
    Used(Problem(131072, 128, 2048, 768), 1.1, (BLOCKS, KEPT_BLOCKS.name), GROUPED),
)
SPEEDS = {TORCH: "x torch bf16", GROUPED: "x bf16 grouped"}
"""Units of a speed, by what it is a multiple of."""

APART = "x apart"
"""Unit of a speed, as a multiple of that of the same numbers from the kernel that copies rows and the one that casts them."""


TWO_LAUNCHES = "x two launches"
"""Unit of a speed, as a multiple of that of the same numbers from the kernel of the activation and the one that casts them."""


def used(problems: Sequence[Used] = USED, *, device: str = "cuda") -> Iterator[Record]:
    """A step as a user waits for it, in milliseconds, and its speed as a multiple of others'; variants take turns."""
    for problem, least, limited, beside in problems:
        steps = {
            variant.name: calls(variant, problem, device)["forward + backward"]
            for variant in (*variants(), KEPT_BLOCKS)
            if variant.recipe is None or recipes.support(variant.recipe).status == "native"
        }
        for what, timed in (("wall", wall_time), ("host", lambda call: host_time(call, calls=2, repeats=1).median)):
            rounds = [{name: timed(step) / 1e3 for name, step in steps.items()} for _ in range(5)]
            for name in steps:
                full = f"{problem.label}, {name}, forward + backward by {what} time"
                median = statistics.median(took[name] for took in rounds)
                yield {"name": full, "value": median, "unit": "ms", "limit": None, "met": None}
                for other, unit in SPEEDS.items():
                    speed = statistics.median(took[other] / took[name] for took in rounds)
                    limit = least if what == "wall" and name in limited and other == beside else None
                    yield {"name": full, "value": speed, "unit": unit, "limit": limit, "met": limit and speed >= limit}


# -- whole mixtures ------------------------------------------------------------------------------------------------------------


class Mixture(NamedTuple):
    """Tokens and their features, experts, to how many of them a token goes, and how many features an expert has inside."""

    tokens: int
    features: int
    groups: int
    top_k: int
    inner: int

    @property
    def label(self) -> str:
        """What stands in names of figures."""
        return f"{self.tokens} tokens of {self.features} to {self.top_k} of {self.groups} rows"

    def gate(self, device: str) -> ops.TokenDispatch:
        """Which experts a token goes to."""
        return ops.TokenDispatch(self.groups, self.features, top_k=self.top_k, dtype=BF16, device=device)


MIXTURES = (Mixture(16384, 2048, 128, 8, 768), Mixture(8192, 7168, 8, 2, 2048))
"""Qwen3-30B-A3B; one of few wide experts."""


def mixture(problem: Mixture, device: str) -> ops.Sequential:
    """Its layers as a pipeline: a SwiGLU scaled by the gate's probabilities, in every expert."""
    options = {"bias": False, "single_grouped_weight": True, "dtype": BF16, "device": device}
    gate, act, combine = problem.gate(device), ops.ScaledSwiGLU(), ops.TokenCombine()
    up = ops.GroupedLinear(problem.groups, problem.features, 2 * problem.inner, **options)
    down = ops.GroupedLinear(problem.groups, problem.inner, problem.features, **options)
    for i, name in enumerate(("splits", "probabilities", "places")):
        gate.set_extra_output_channel(i, name, output_to_caller=False)
    for op, name in ((up, "splits"), (act, "probabilities"), (down, "splits"), (combine, "places")):
        op.set_extra_input_channel(0, name)
    return ops.Sequential(gate, up, act, down, combine)


FP8 = torch.float8_e4m3fn


class Read(NamedTuple):
    """A recipe under which casts read rows through their index, and how it casts the inputs of a group."""

    recipe: recipes.Recipe
    quantizer: Callable[[str], Quantizer]


READ = {
    "fp8_block": Read(recipes.Float8BlockScaling(), lambda _: Float8BlockQuantizer(FP8, block_scaling_dim=1)),
    "fp8_row": Read(recipes.CustomRecipe(qfactory="fp8_row_scaled"), lambda _: Float8RowQuantizer(FP8)),
    "fp8_current": Read(recipes.Float8CurrentScaling(), lambda _: Float8CurrentScalingQuantizer(FP8)),
    "delayed": Read(
        recipes.DelayedScaling(),
        lambda device: Float8Quantizer(torch.ones(1, device=device), torch.zeros(1, device=device), FP8),
    ),
}


def steps(problem: Mixture, device: str) -> dict[str, Call]:
    """A step of a mixture forward and back: in bf16, under each recipe, and under it with what it fuses apart."""
    model = mixture(problem, device)
    x = torch.randn(problem.tokens, problem.features, device=device, dtype=BF16).requires_grad_()
    dy = torch.randn_like(x)

    def step(recipe: recipes.Recipe | None, *without: str) -> Call:
        def call() -> object:
            with use_rules(RULES.without(*without)), opfuse.autocast(enabled=recipe is not None, recipe=recipe):
                return torch.autograd.grad(model(x), (x, *model.parameters()), dy)

        return call

    made = {"bf16": step(None)}
    for name, (recipe, _) in READ.items():
        made |= {name: step(recipe), f"{name}, {COPIED}": step(recipe, "dispatch_cast")}
        if name in CHAINED:
            made[f"{name}, {TWO}"] = step(recipe, "epilogue_groups", "backward_groups")
    return made


COPIED, TWO, ONE = "rows copied", "activation and cast apart", "activation and cast in one launch"
"""Of a recipe: rows are copied before they are cast; what experts have between their layers is launched apart, or together."""

CHAINED = ("fp8_block",)
"""Recipes whose cast in groups the kernel of an activation makes."""


def dispatches(problem: Mixture, quantizer: Callable[[str], Quantizer], device: str) -> tuple[Call, Call]:
    """Both planes of the rows of all experts: of copies of the rows, and straight from the tokens."""
    x = torch.randn(problem.tokens, problem.features, device=device, dtype=BF16)
    with torch.no_grad():
        _, splits, _, places = problem.gate(device)(x)
    each, places = [quantizer(device) for _ in range(problem.groups)], places.flatten()
    token = torch.arange(len(places), device=device) // problem.top_k
    index = torch.empty_like(places).scatter_(0, places, token)
    return (
        lambda: cast_in_groups(each[0], x.index_select(0, index), splits, each=each),
        lambda: cast_in_groups(each[0], x, splits, index, each=each),
    )


def between(problem: Mixture, device: str) -> Between:
    """The rows of all experts between their layers."""
    with torch.no_grad():
        _, splits, *_ = problem.gate(device)(torch.randn(problem.tokens, problem.features, device=device, dtype=BF16))
    return Between.drawn(problem.tokens * problem.top_k, problem.inner, splits)


def mixtures(
    timed: Callable[[Call], float],
    turns: Callable[[Call, Call], Compared],
    *,
    problems: Sequence[Mixture] = MIXTURES,
    device: str = "cuda",
) -> Iterator[Record]:
    """Milliseconds, and speeds as multiples of others'."""
    for problem in problems:
        cast: dict[str, tuple[float, dict[str, float]]] = {}
        for name, (_, quantizer) in READ.items():
            apart, fused, speed = turns(*dispatches(problem, quantizer, device))
            cast |= {f"{name}, {COPIED}": (apart, {}), f"{name}, rows read": (fused, {APART: speed})}
        chained: dict[str, dict[str, tuple[float, dict[str, float]]]] = {what: {} for what in BETWEEN}
        for what, name in itertools.product(BETWEEN, CHAINED):
            apart, fused, speed = turns(*BETWEEN[what](between(problem, device), READ[name].quantizer(device)))
            chained[what] |= {f"{name}, {TWO}": (apart, {}), f"{name}, {ONE}": (fused, {TWO_LAUNCHES: speed})}
        took = {name: timed(call) for name, call in steps(problem, device).items()}
        named = {name: (us, {SPEEDS[GROUPED]: took["bf16"] / us}) for name, us in took.items()}
        for name in READ:
            named[name][1][APART] = took[f"{name}, {COPIED}"] / took[name]
        for name in CHAINED:
            named[name][1][TWO_LAUNCHES] = took[f"{name}, {TWO}"] / took[name]
        measured = {"dispatch and cast": cast, **chained, "mixture forward + backward": named}
        for what, figures in measured.items():
            for name, (us, speeds) in figures.items():
                for unit, value in {"ms": us / 1e3, **speeds}.items():
                    full = f"{problem.label}, {name}, {what}"
                    yield {"name": full, "value": value, "unit": unit, "limit": None, "met": None}


WARM = 8
"""Calls before a measurement: the first ones compile kernels and record what later calls repeat."""


def timer(call: Call) -> float:
    """Microseconds of a call on the device, of those that repeat what was recorded."""
    for _ in range(WARM):
        call()
    return device_time([call], launches=3, repeats=3, waits=True).median


def records() -> Iterator[dict[str, Any]]:
    """Figures for the record: milliseconds, and as a multiple of the speed of torch's own layers."""
    for row in measure(timer):
        name = f"{Problem(row['rows'], row['groups']).label}, {row['variant']}, {row['what']}"
        yield {"name": name, "value": row["us"] / 1e3, "unit": "ms", "limit": None, "met": None}
        yield {"name": name, "value": row["ratio"], "unit": "x torch bf16", "limit": None, "met": None}
    yield from used()
    yield from mixtures(timer, compared)


def main() -> None:
    """Print a table."""
    for row in measure(timer):
        shape = f"{row['groups']} x {row['rows'] // row['groups']:<6}{row['what']:20s}{row['variant']:30s}"
        figures = f"{row['us'] / 1e3:8.3f} ms {row['tflops']:7.0f} TFLOP/s {row['ratio']:6.2f} x torch bf16"
        print(shape, figures, "" if row["backend"] == "native" else "(emulated)", flush=True)
    for record in (*used(), *mixtures(timer, compared)):
        print(f"{record['name']:80s} {record['value']:8.3f} {record['unit']}", flush=True)


if __name__ == "__main__":
    main()
