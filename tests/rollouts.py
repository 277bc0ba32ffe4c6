"""What shows that a causal language model gives a token one log-probability, however it is called. For a CPU and a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import transformers

import opfuse

SIZES = {
    "vocab_size": 130,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
CONFIGS = {
    "dense": lambda **more: transformers.LlamaConfig(**{**SIZES, **more}),
    "mixture": lambda **more: transformers.Qwen3MoeConfig(
        **{**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, **more}
    ),
}


def model_of(kind: str, dtype: torch.dtype, device: Any = "cpu", **more: Any) -> Any:
    """A tiny model whose probabilities are far from even."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](**more)).to(device, dtype)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(3)
    return model


def log_probs(model: Any, tokens: torch.Tensor, **more: Any) -> torch.Tensor:
    """Those of all tokens but the first."""
    return opfuse.log_probs(model(input_ids=tokens, **more).logits[:, :-1], tokens[:, 1:])


def decoded(model: Any, tokens: torch.Tensor, start: int, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The same, token by token from ``start`` on."""
    made, cache, begin = [], None, 0
    mask = torch.ones_like(tokens) if mask is None else mask
    with torch.no_grad():
        for end in range(start, tokens.shape[1] + 1):
            positions = (mask[:, :end].cumsum(1) - 1).clamp(min=0)[:, begin:]
            more = {"attention_mask": mask[:, :end], "position_ids": positions, "past_key_values": cache}
            out = model(input_ids=tokens[:, begin:end], use_cache=True, **more)
            made.append(out.logits)
            cache, begin = out.past_key_values, end
    return opfuse.log_probs(torch.cat(made, 1)[:, :-1], tokens[:, 1:])


def ways(model: Any, tokens: torch.Tensor, last: int = 6) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """How, the log-probabilities that way, and those of one call with all of ``tokens`` (rows, length), without gradients."""
    with torch.no_grad():
        whole = log_probs(model, tokens)
    length = tokens.shape[1]
    yield "with gradients", log_probs(model, tokens).detach(), whole
    with torch.no_grad():
        yield "alone", torch.cat([log_probs(model, row[None]) for row in tokens]), whole
        yield "a shorter sequence", log_probs(model, tokens[:2, : length // 2]), whole[:2, : length // 2 - 1]
        counts = [length, length // 3, 5]
        parts = [(row[:count], scores[: count - 1]) for row, count, scores in zip(tokens, counts, whole)]
        packed = torch.cat([part for part, _ in parts])[None]
        positions = torch.cat([torch.arange(count) for count in counts])[None].to(tokens.device)
        scores = log_probs(model, packed, position_ids=positions)[0]
        kept = positions[0, 1:] > 0
        yield "padding-free", scores[kept], torch.cat([wanted for _, wanted in parts])
        padded, mask = torch.zeros_like(tokens[:3]), torch.zeros_like(tokens[:3])
        for row, count in enumerate(counts):
            padded[row, length - count :], mask[row, length - count :] = tokens[row, :count], 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        scores = log_probs(model, padded, attention_mask=mask, position_ids=positions)
        got = [scores[row, length - count :] for row, count in enumerate(counts)]
        yield "left-padded", torch.cat(got), torch.cat([wanted for _, wanted in parts])
        scores = decoded(model, padded, length - 2, mask)
        got = [scores[row, length - count :] for row, count in enumerate(counts)]
        yield "left-padded, decoded", torch.cat(got), torch.cat([wanted for _, wanted in parts])
    yield "decoded", decoded(model, tokens[:2], length - last), whole[:2]
    yield "decoded alone", decoded(model, tokens[:1], length - last), whole[:1]
