"""Small Llama layers, where the host decides, in each way that a model is run: ``python -m benchmarks.small``.

Four layers 1024 wide with 256 tokens, forward and backward, some calls of a model at each of its turns. Each way stands beside
bf16 run in the same way: "called"; "compiled", layer by layer; "reduce-overhead", compiled in that mode of torch, which makes
CUDA graphs of what it compiles; "as a graph", both passes of the compiled layers as one CUDA graph (``opfuse.graphed_step``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from benchmarks.calls import in_turns
from benchmarks.converted import (
    PASSES,
    SDPA,
    WARM,
    Calls,
    Stack,
    as_graph,
    calls_of,
    compiled,
    llama,
    settled,
    show,
    speeds,
    unmasked,
)
from benchmarks.libraries import AS_GRAPH, converted_model
from benchmarks.models import Sizes

BF16, KINDS = "bf16", ("fp8_current", "fp8_block")
SMALL = Stack(4, Sizes(256, 1024, 3584), 8, 2)
CALLED, COMPILED, REDUCED = "called", "compiled", "reduce-overhead"
LEAST = {CALLED: 0.85, COMPILED: 0.90, REDUCED: 0.95, AS_GRAPH: 0.95}
"""Times the speed of bf16 run in the same way: at least."""

Record = dict[str, Any]


def passes_of(kind: str, how: str, stack: Stack, device: str) -> Calls:
    """Both passes of a model in bf16 or under the recipe of that kind, run in one way."""
    attention = unmasked() if how == AS_GRAPH else SDPA
    if kind == BF16:
        model = llama(stack, device, attention=attention)
    else:
        model = converted_model(kind, stack, device, pack=True, attention=attention)
    if how != CALLED:
        compiled(model, mode=REDUCED if how == REDUCED else None)
    passes = calls_of(model, stack, device)[PASSES]
    return {PASSES: as_graph(passes, model) if how == AS_GRAPH else passes}


def records(rounds: int = 9, *, stack: Stack = SMALL, device: str = "cuda") -> Iterator[Record]:
    """Figures for the record."""
    for how in (CALLED, COMPILED, REDUCED, AS_GRAPH) if device == "cuda" else (CALLED, COMPILED):
        torch._dynamo.reset()
        models = {kind: passes_of(kind, how, stack, device) for kind in (BF16, *KINDS)}
        for calls in models.values():
            for _ in range(WARM + 1):  # the last one captures
                calls[PASSES]()
        yield from compared(how, stack, in_turns(models, settled, rounds))


def compared(how: str, stack: Stack, took: Mapping[tuple[str, str], list[float]]) -> Iterator[Record]:
    """Each beside bf16."""
    label = f"small, Llama of {stack.layers} layers {stack.sizes.tokens}x{stack.sizes.hidden}"
    for (kind, what), times in took.items():
        beside = {} if kind == BF16 else {f"x {BF16} {how}": (took[BF16, what], LEAST[how])}
        yield from speeds(f"{label}, {kind} {how}, {what}", times, beside)


if __name__ == "__main__":
    show(records())
