"""Training steps of Llama layers beside torchao and bf16, by the number of tokens: ``python -m benchmarks.libraries``.

Layers, optimizer and the way of compiling are those of :mod:`benchmarks.converted`. torchao, where it is installed, converts the
same linear layers to FP8 with one scale for each tensor, its default. A step of 16 384 tokens has four sequences. "packed" is
``fuse_(pack=True)``, which lays weights that are one product out in one memory. "as a graph": with few tokens the host decides,
so the whole step of compiled layers, in bf16 too, is also repeated as one CUDA graph (``opfuse.graphed_step``).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import opfuse
from benchmarks.calls import in_turns
from benchmarks.converted import (
    COMPILED,
    LLAMA,
    SDPA,
    STEP,
    WARM,
    Calls,
    Stack,
    calls_of,
    compiled,
    llama,
    milliseconds,
    settled,
    show,
    speeds,
    unmasked,
)
from opfuse import recipes

TORCHAO = "torchao compiled"
TOKENS = (512, 1024, 2048, 4096, 16384)
FEW = 2048
"""Up to this number of tokens steps are also repeated as graphs."""
AS_GRAPH = "as a graph"
_CURRENT, _BLOCK = (
    {512: 1.0, 1024: 1.05, 2048: 1.2, 4096: 1.4, 16384: 1.52},
    {512: 0.97, 1024: 1.0, 2048: 1.12, 4096: 1.33, 16384: 1.42},
)
LEAST: Mapping[str, Mapping[int, float]] = {
    "fp8_current packed": _CURRENT,
    "fp8_block packed": _BLOCK,
    f"fp8_current packed {AS_GRAPH}": _CURRENT,
    f"fp8_block packed {AS_GRAPH}": _BLOCK,
}
"""Times the speed of torch.compile in bf16: at least."""

LEADS = 4096
"""Tokens from which on opfuse is to be as fast as torchao."""

Record = dict[str, Any]


def converted_model(kind: str, stack: Stack, device: str, *, pack: bool, attention: str = SDPA) -> nn.Module:
    """Under the recipe of that kind."""
    model = llama(stack, device, attention=attention)
    opfuse.fuse_(model, recipes.recipe_of(kind, {}), pack=pack)
    return model


def torchao_model(stack: Stack, device: str) -> nn.Module:
    from torchao.float8 import convert_to_float8_training

    model: nn.Module = convert_to_float8_training(llama(stack, device))
    return model


def models_of(stack: Stack, device: str) -> dict[str, nn.Module]:
    """The contenders, compiled, by name; torchao's products need a GPU."""
    found = {COMPILED: llama(stack, device)}
    if device == "cuda" and importlib.util.find_spec("torchao") is not None:
        found[TORCHAO] = torchao_model(stack, device)
    for kind in ("fp8_current", "fp8_block"):
        found[f"{kind} packed"] = converted_model(kind, stack, device, pack=True)
    found["fp8_current"] = converted_model("fp8_current", stack, device, pack=False)
    return {name: compiled(model) for name, model in found.items()}


def graphs_of(stack: Stack) -> dict[str, Calls]:
    """Steps as CUDA graphs, by name."""
    models = {COMPILED: llama(stack, "cuda", attention=unmasked())}
    for kind in ("fp8_current", "fp8_block"):
        models[f"{kind} packed"] = converted_model(kind, stack, "cuda", pack=True, attention=unmasked())
    return {
        f"{name} {AS_GRAPH}": {STEP: calls_of(compiled(model), stack, "cuda", graph=True)[STEP]} for name, model in models.items()
    }


def records(rounds: int = 5, *, stack: Stack = LLAMA, tokens: Sequence[int] = TOKENS, device: str = "cuda") -> Iterator[Record]:
    """Figures for the record."""
    for number in tokens:
        torch._dynamo.reset()
        sized = stack._replace(sizes=stack.sizes._replace(tokens=number))
        steps = {name: {STEP: calls_of(model, sized, device)[STEP]} for name, model in models_of(sized, device).items()}
        if device == "cuda" and number <= FEW:
            steps |= graphs_of(sized)
        for step in steps.values():
            for _ in range(WARM + 1):  # the last one captures
                step[STEP]()
        yield from compared(number, sized, in_turns(steps, settled if number <= FEW else milliseconds, rounds))


def compared(tokens: int, stack: Stack, took: Mapping[tuple[str, str], list[float]]) -> Iterator[Record]:
    """Each beside bf16 and torchao, and graphs beside that of bf16."""
    label = f"libraries, Llama of {stack.layers} layers {tokens}x{stack.sizes.hidden}"
    for (name, what), times in took.items():
        least = {COMPILED: LEAST.get(name, {}).get(tokens), TORCHAO: 1.0 if name in LEAST and tokens >= LEADS else None}
        others = [COMPILED, TORCHAO, *([f"{COMPILED} {AS_GRAPH}"] if name.endswith(AS_GRAPH) else [])]
        beside = {f"x {each}": (took[each, what], least.get(each)) for each in others if each != name and (each, what) in took}
        yield from speeds(f"{label}, {name}, {what}", times, beside)


if __name__ == "__main__":
    show(records())
