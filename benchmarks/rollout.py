"""What ``opfuse.invariant`` costs a rollout and a training step: ``python -m benchmarks.rollout``.

Layers of a transformers model under one recipe, batch-invariant and not, on random tokens, in turns. It needs transformers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import opfuse

RECIPE = opfuse.recipes.Float8BlockScaling(backward_override="dequantized")
WARM, ROUNDS = 3, 5


class Shape(NamedTuple):
    """Sizes of a model and of its calls. rows: sequences. prompt, words: of each, given and decoded."""

    layers: int = 4
    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    vocabulary: int = 32768
    rows: int = 8
    prompt: int = 1024
    words: int = 32


SMALL = Shape(layers=1, hidden=128, inner=256, heads=2, vocabulary=128, rows=2, prompt=8, words=2)
"""For a CPU, on which figures say nothing."""


def model_of(shape: Shape, device: str, *, invariant: bool) -> Any:
    """A model in bf16 whose layers compute under RECIPE."""
    heads = {"num_attention_heads": shape.heads, "num_key_value_heads": max(shape.heads // 4, 1)}
    sizes = {"hidden_size": shape.hidden, "intermediate_size": shape.inner, "vocab_size": shape.vocabulary}
    config = LlamaConfig(**sizes, **heads, num_hidden_layers=shape.layers, max_position_embeddings=8192)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    opfuse.fuse_(model, RECIPE)
    if invariant:
        opfuse.invariant(model)
    return model


def rollout(model: Any, tokens: torch.Tensor, words: int) -> None:
    """Prefill, then ``words`` decoded tokens."""
    cache = None
    with torch.no_grad(), opfuse.kept_weights(model):
        for _ in range(words + 1):
            out = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            tokens, cache = out.logits[:, -1:].argmax(-1), out.past_key_values


def train(model: Any, tokens: torch.Tensor) -> None:
    """A forward and a backward pass."""
    logits = model(input_ids=tokens, use_cache=False).logits
    opfuse.log_probs(logits[:, :-1], tokens[:, 1:]).mean().backward()
    model.zero_grad()


def seconds(phase: Callable[[Any], None], model: Any, device: str) -> float:
    """Wall time of a phase."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    phase(model)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(shape: Shape, device: str) -> dict[str, tuple[float, float, float]]:
    """By phase: seconds with ``invariant`` and without, and the median ratio of a round."""
    models = [model_of(shape, device, invariant=invariant) for invariant in (True, False)]
    tokens = torch.randint(shape.vocabulary, (shape.rows, shape.prompt), device=device)

    def rolls(model: Any) -> None:
        rollout(model, tokens, shape.words)

    def trains(model: Any) -> None:
        train(model, tokens)

    for model in models * WARM:
        rolls(model)
        trains(model)
    phases = {"rollout": rolls, "training": trains}
    rounds = [[[seconds(phase, model, device) for model in models] for phase in phases.values()] for _ in range(ROUNDS)]
    took = dict(zip(phases, zip(*rounds)))
    took["both"] = tuple([[sum(times) for times in zip(*each)] for each in rounds])
    medians = {name: map(statistics.median, zip(*pairs)) for name, pairs in took.items()}
    return {name: (*medians[name], statistics.median(one / other for one, other in pairs)) for name, pairs in took.items()}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    for name, (one, other, ratio) in measure(Shape() if device == "cuda" else SMALL, device).items():
        print(f"{name:9s} {one * 1e3:9.1f} ms invariant, {other * 1e3:9.1f} ms not: {ratio:5.3f} times", flush=True)


if __name__ == "__main__":
    main()
