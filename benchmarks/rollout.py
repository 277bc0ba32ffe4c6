"""What ``opfuse.invariant`` costs a rollout and a training step: ``python -m benchmarks.rollout``.

Layers of a transformers model under one recipe, batch-invariant and not, on random tokens, in turns. It needs transformers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import opfuse
from benchmarks.converted import Record, show

RECIPE = opfuse.recipes.Float8BlockScaling(backward_override="dequantized")
WARM, ROUNDS, MOST = 3, 5, 1.10


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


LARGE = Shape()
SMALL = Shape(layers=1, hidden=128, inner=256, heads=2, vocabulary=128, rows=2, prompt=8, words=2)
"""For a CPU, on which figures say nothing."""


def model_of(shape: Shape, device: str, *, invariant: bool) -> Any:
    """A model in bf16 whose layers compute under RECIPE."""
    from transformers import AutoModelForCausalLM, LlamaConfig

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
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    phase(model)
    wait()
    return time.perf_counter() - start


def records(*, shape: Shape = LARGE, device: str = "cuda") -> Iterator[Record]:
    """Figures for the record: milliseconds of both models, and the median ratio of a round."""
    models = {how: model_of(shape, device, invariant=how == "invariant") for how in ("invariant", "not invariant")}
    tokens = torch.randint(shape.vocabulary, (shape.rows, shape.prompt), device=device)
    phases: dict[str, Callable[[Any], None]] = {
        f"rollout of {shape.words} tokens": lambda model: rollout(model, tokens, shape.words),
        "training": lambda model: train(model, tokens),
    }
    for phase in phases.values():
        for model in [*models.values()] * WARM:
            phase(model)
    rounds = [
        {name: [1e3 * seconds(phase, model, device) for model in models.values()] for name, phase in phases.items()}
        for _ in range(ROUNDS)
    ]
    label = f"rollout, Llama of {shape.layers} layers {shape.rows}x{shape.prompt}x{shape.hidden}"
    for phase in (*phases, "both"):
        pairs = [each[phase] if phase in each else [*map(sum, zip(*each.values()))] for each in rounds]
        for how, times in zip(models, zip(*pairs)):
            name = f"{label}, {how}, {phase}"
            yield {"name": name, "value": statistics.median(times), "unit": "ms", "limit": None, "met": None}
        ratio, limit = statistics.median(one / other for one, other in pairs), MOST if phase == "both" else None
        name = f"{label}, invariant, {phase}"
        yield {"name": name, "value": ratio, "unit": "x not invariant", "limit": limit, "met": limit and ratio <= limit}


if __name__ == "__main__":
    show(records())
