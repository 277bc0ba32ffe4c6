"""Advice, layer by layer: low precision or bf16, by the measured times of products and casts on one GPU.

A training step multiplies three times and casts the input, the weight and the gradient once each. Times follow from measured
rates of large products and of memory (``benchmarks/results/h200.json``); a product that is too small for its casts gains nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from torch import nn

from opfuse.core.operation import BasicOperation
from opfuse.domains import SIZE, checked_arguments
from opfuse.errors import ConversionError, describe, nearest, number_of
from opfuse.inspect.alike import alike, counted, starred
from opfuse.inspect.heads import HEADS, OUTPUT_HEAD, heads_of
from opfuse.recipes.availability import BF16, RATES, RECORD

BANDWIDTH = 4.1e12
"""Bytes/s that a copy moves, which casts reach to about nine tenths."""

CAST_BYTES = 6
"""Of each element: read for the amax, read and written in both directions by the cast."""

EXPERTS = "experts: their gain depends on how many tokens each gets; docs/performance.md has measured mixtures"

WORTH = 1.05
"""The least gain for which low precision is advised."""

MULTIPLE = 16
"""What both sizes of a native product are multiples of."""


@dataclass(frozen=True)
class LayerAdvice:
    """The advice for one layer. gain: how many times as fast a training step of it is expected to be; None if not estimated."""

    path: str
    sizes: tuple[int, int]
    advice: str
    gain: float | None
    why: str

    @property
    def is_estimated(self) -> bool:
        """Whether the gain is known: also where it stays in bf16, and has none."""
        return self.advice == "bf16" or self.gain is not None

    def __str__(self) -> str:
        gain = "" if self.gain is None else f"x {self.gain:.2f}"
        return f"{self.path:<40} {self.sizes[0]:>6} x {self.sizes[1]:<6} {self.advice:<12} {gain:<8} {self.why}".rstrip()


@dataclass(frozen=True)
class Advice:
    """The advice for a model, layer by layer. rows: tokens of the training step that was assumed."""

    rows: int
    layers: tuple[LayerAdvice, ...] = field(repr=False)

    @property
    def policy(self) -> dict[str, None]:
        """The layers that should stay in high precision, as a policy of :func:`opfuse.fuse_`."""
        return {layer.path: None for layer in self.layers if layer.advice == "bf16"}

    @property
    def gain(self) -> float:
        """How many times as fast a training step of these layers, without those that have no estimate, is expected to be if they
        follow the advice.
        """
        layers = [layer for layer in self.layers if layer.is_estimated]
        before = sum(_flops(layer.sizes, self.rows) for layer in layers)
        after = sum(_flops(x.sizes, self.rows) / (1 if x.advice == "bf16" or x.gain is None else x.gain) for x in layers)
        return before / after if after else 1.0

    def __str__(self) -> str:
        where = f"on an H200 with {number_of(self.rows, 'token')} ({RECORD})"
        estimated = "these products" if all(layer.is_estimated for layer in self.layers) else "products with an estimate"
        total = f"expected of {estimated}: x {self.gain:.2f} of bf16 {where}"
        same = alike(self.layers, lambda layer: replace(layer, path=starred(layer.path)))
        lines = (replace(layers[0], path=counted([layer.path for layer in layers])) for layers in same)
        return "\n".join((*map(str, lines), total))

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"rows": self.rows, "gain": self.gain, "layers": [asdict(layer) for layer in self.layers]}


@checked_arguments(ConversionError, but="model")
def advise(
    model: nn.Module, *, kind: str = "fp8_current", rows: Annotated[int, SIZE] = 8192, heads: Collection[str] = ()
) -> Advice:
    """Advise the recipe ``kind`` or bf16 for each linear layer of ``model``, with the expected gain of a training step.

    rows: tokens of a step. Heads and routers stay in high precision, since their errors are those of the loss and of routing;
    they are known by name, or by the model's own word. heads: paths of output heads beside these. A module with the matrices of
    all experts in one parameter has a line without an estimate. The model may lie on the meta device. ConversionError for a kind
    that was not measured, and for what has no linear layer.
    """
    if kind not in RATES:
        got, cure = f"{kind!r}{nearest(kind, RATES)}", f"name one of {', '.join(RATES)}"
        raise ConversionError(describe("advise(kind=)", wanted="a kind of recipe that was measured", got=got, cure=cure))
    layers = list(_layers(model, heads)) if isinstance(model, nn.Module) else []
    if not layers:
        got, cure = f"{type(model).__name__}, which has none", "pass a model of nn.Linear, or of opfuse.ops"
        raise ConversionError(describe("advise", wanted="a module with linear layers", got=got, cure=cure))
    return Advice(rows, tuple(_layer(path, sizes, what, kind, rows) for path, sizes, what in layers))


def _layers(model: nn.Module, heads: Collection[str]) -> Iterator[tuple[str, tuple[int, int], str | None]]:
    """The path of each linear layer, its sizes (out, in), and what it is if it stays in high precision: a head or a router."""
    own = dict(heads_of(model))
    inside: set[int] = set()
    for path, module in model.named_modules():
        sizes = getattr(module, "out_features", None), getattr(module, "in_features", None)
        experts = [parameter for parameter in module._parameters.values() if parameter is not None and parameter.dim() == 3]
        if len(experts) > 1 and len({len(parameter) for parameter in experts}) == 1:
            yield path or "model", tuple(experts[0].shape[1:]), EXPERTS
        if id(module) in inside or not all(isinstance(size, int) for size in sizes):
            continue
        if isinstance(module, (nn.Linear, BasicOperation)) or hasattr(module, "basic_ops"):
            inside |= {id(part) for part in module.modules()}
            what = OUTPUT_HEAD if path in heads else own.get(id(module)) or HEADS.get(path.rpartition(".")[2])
            yield path or "model", sizes, what  # type: ignore[misc]


def _layer(path: str, sizes: tuple[int, int], what: str | None, kind: str, rows: int) -> LayerAdvice:
    if what == EXPERTS and RATES[kind] >= BF16:
        return LayerAdvice(path, sizes, kind, None, EXPERTS)
    if what is not None and what != EXPERTS:
        return LayerAdvice(
            path, sizes, "bf16", None, f"{what}: its errors are those of {'routing' if 'router' in what else 'the loss'}"
        )
    if any(size % MULTIPLE for size in (*sizes, rows)):
        return LayerAdvice(path, sizes, "bf16", None, f"sizes and rows must be multiples of {MULTIPLE} for native products")
    gain = _gain(sizes, kind, rows)
    if gain >= WORTH:
        return LayerAdvice(path, sizes, kind, gain, "")
    slower = RATES[kind] < BF16
    why = (
        "products of this recipe are emulated on an H200"
        if slower
        else "casts take what products gain: too small, or too few rows"
    )
    return LayerAdvice(path, sizes, "bf16", gain, why)


def _flops(sizes: tuple[int, int], rows: int) -> float:
    return 6.0 * rows * sizes[0] * sizes[1]


def _gain(sizes: tuple[int, int], kind: str, rows: int) -> float:
    out, into = sizes
    casts = CAST_BYTES * (rows * into + out * into + rows * out) / BANDWIDTH
    return (_flops(sizes, rows) / BF16) / (_flops(sizes, rows) / RATES[kind] + casts)
