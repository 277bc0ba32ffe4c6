"""Layers of mixtures of experts as transformers has them, converted by ``fuse_``: ``python -m benchmarks.mixtures``.

Two decoder layers of Qwen3-30B-A3B's shape (128 experts, eight for each token) and of Mixtral's (8, two for each), random weights
in bf16, sequences of 4096 tokens. Beside them the same layers in bf16, with transformers' ``grouped_mm``. "compiled":
torch.compile takes each layer; "called": nothing is compiled. Models take turns, and torch forgets what it compiled before each
size, else the second size would be compiled for any number of tokens. "as a graph": both passes of the compiled layers as one
CUDA graph, in bf16 too.

Of each model also the parts of one step on the device, by the names of kernels, how long the host takes to queue it, and what it
saves for the backward pass, of a recipe also with ``keep="quantized"``.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

import opfuse
from benchmarks.calls import EAGER, in_turns
from benchmarks.converted import (
    COMPILED,
    MIB,
    PASSES,
    SDPA,
    WARM,
    Record,
    as_graph,
    batch,
    compiled,
    memory_of,
    milliseconds,
    show,
    unmasked,
)
from benchmarks.libraries import AS_GRAPH
from benchmarks.profiles import kernel_of
from benchmarks.pytorch import traced
from benchmarks.timing import Call
from opfuse import recipes

KINDS = ("fp8_current", "fp8_block")

LEAST: dict[tuple[str, int, str], float] = {
    ("Qwen3-30B-A3B", 16384, "fp8_block compiled"): 1.25,
    ("Qwen3-30B-A3B", 16384, "fp8_current compiled"): 1.30,
    ("Qwen3-30B-A3B", 8192, "fp8_block compiled"): 1.15,
    ("Qwen3-30B-A3B", 8192, "fp8_current compiled"): 1.20,
    ("Mixtral", 16384, "fp8_block compiled"): 1.40,
    ("Mixtral", 16384, "fp8_current compiled"): 1.45,
}
LEAST |= {(label, tokens, f"{name} {AS_GRAPH}"): least for (label, tokens, name), least in LEAST.items()}
"""Times the speed of the same layers in bf16 that are compiled: at least."""

MOST_SAVED = {None: 60, "quantized": 45}
"""Percent of what the layers in bf16 save that are compiled, by ``keep``: at most."""

PARTS = {
    "products": r"^product$|^grouped|nvjet|gemm|cutlass|GroupProblem",
    "casts": r"^cast|amax|quantize",
    "elementwise chains": r"^chain|^forward_chain|^backward_chain",
    "norms": r"norm",
    "attention": r"sdpa|flash|fmha",
    "sorting and routing": r"sort|radix|topk|histogram|scan|bincount|runs|gatherTopK|softmax|Scan|Sort|row_groups|one_hot",
    "moved rows": r"index|gather|scatter|permute|combine",
    "compiled by torch": r"^triton",
    "copies": r"copy|Memcpy|Memset|fill",
}
"""What a kernel is for, by a pattern that its name contains; the first that fits."""

REST = "other kernels"


class Mixture(NamedTuple):
    """A model of transformers of two layers, by its configuration."""

    label: str
    config: str
    fields: Mapping[str, Any]


MIXTURES = (
    Mixture(
        "Qwen3-30B-A3B",
        "Qwen3MoeConfig",
        {
            **{"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128},
            **{"num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
        },
    ),
    Mixture(
        "Mixtral",
        "MixtralConfig",
        {
            **{"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2},
            **{"num_attention_heads": 32, "num_key_value_heads": 8},
        },
    ),
)
TOKENS = {"Qwen3-30B-A3B": (16384, 8192), "Mixtral": (16384,)}


def model_of(
    mixture: Mixture, tokens: int, kind: str, device: str, *, layers: int = 2, attention: str = SDPA, keep: str | None = None
) -> nn.Module:
    """Two layers with the last norm, under the recipe of that kind, or in bf16. Attention is torch's."""
    import transformers

    config = getattr(transformers, mixture.config)(
        **{
            **mixture.fields,
            "num_hidden_layers": layers,
            "max_position_embeddings": tokens,
            "vocab_size": 16,
            "use_cache": False,
        },
        experts_implementation="grouped_mm",
        attn_implementation=attention,
    )
    with torch.device(device):
        model: nn.Module = transformers.AutoModel.from_config(config, dtype=torch.bfloat16)
    if kind:
        opfuse.fuse_(model, recipes.recipe_of(kind, {"keep": keep}))
    return model


def passes_of(model: nn.Module, tokens: int, width: int, device: str) -> Call:
    """Both passes, from a gradient of the last hidden state; gradients are new at each call."""
    x, dy = (torch.randn(*batch(tokens), width, device=device, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    parameters = [parameter for name, parameter in model.named_parameters() if "embed" not in name]

    def passes() -> None:
        for leaf in (x, *parameters):
            leaf.grad = None
        model(inputs_embeds=x).last_hidden_state.backward(dy)

    return passes


def graph_of(mixture: Mixture, tokens: int, kind: str) -> Call:
    """Both passes of compiled layers as one CUDA graph."""
    model = compiled(model_of(mixture, tokens, kind, "cuda", attention=unmasked()))
    return as_graph(passes_of(model, tokens, mixture.fields["hidden_size"], "cuda"), model)


def part_of(kernel: str) -> str:
    """What a kernel is for."""
    return next((part for part, pattern in PARTS.items() if re.search(pattern, kernel)), REST)


def parts(label: str, passes: Call) -> Iterator[Record]:
    """Milliseconds and launches of each part of a step on the device, and the milliseconds in which the host queues it."""
    took, launches = Counter[str](), Counter[str]()
    for event in traced(passes):
        part = part_of(kernel_of(event["name"]) if event["cat"] == "kernel" else "copy")
        took[part] += event["dur"] / 1e3
        launches[part] += 1
    for part in (*PARTS, REST):
        if part in took:
            yield _record(f"{label}, {part}", took[part], "ms")
            yield _record(f"{label}, {part}", launches[part], "launches")
    yield _record(f"{label}, all kernels", took.total(), "ms")
    yield _record(f"{label}, all kernels", launches.total(), "launches")
    yield _record(f"{label}, host", _host(passes), "ms")


def _host(passes: Call) -> float:
    """How long the host takes to queue a step, the median of nine, each from an idle device."""
    times = []
    for _ in range(9):
        torch.cuda.synchronize()
        start = time.perf_counter()
        passes()
        times.append((time.perf_counter() - start) * 1e3)
    torch.cuda.synchronize()
    return statistics.median(times)


def _record(name: str, value: float, unit: str, limit: float | None = None) -> Record:
    return {"name": name, "value": value, "unit": unit, "limit": limit, "met": None if limit is None else value >= limit}


def saved(label: str, name: str, mixture: Mixture, models: Mapping[str, nn.Module], tokens: int) -> Iterator[Record]:
    """What a model of ``models``, and one like it under each ``keep``, saves, in MiB and in percent of :data:`COMPILED`."""
    width = mixture.fields["hidden_size"]
    plain = memory_of(models[COMPILED], tokens, width).saved
    kind = "" if name in (COMPILED, EAGER) else name.partition(" ")[0]
    for keep in MOST_SAVED if kind else (None,):
        model = models[name]
        if keep is not None:
            model = model_of(mixture, tokens, kind, next(model.parameters()).device.type, keep=keep)
            model = compiled(model) if name.endswith(" compiled") else model
        for _ in range(WARM):
            own = memory_of(model, tokens, width).saved
        full = f"{label}, {name}, {'saved' if keep is None else f'saved with keep={keep}'}"
        yield _record(full, own / MIB, "MiB")
        percent, limit = 100 * own / plain, MOST_SAVED[keep] if kind and name.endswith(" compiled") else None
        yield {"name": full, "value": percent, "unit": f"% of {COMPILED}", "limit": limit, "met": limit and percent <= limit}


def groups(mixture: Mixture, tokens: int, device: str) -> Iterator[dict[str, nn.Module]]:
    """Models that take turns, by name: :data:`COMPILED` beside those of bf16 that are called, and then of each recipe."""
    for kind in ("", *KINDS):
        torch._dynamo.reset()
        models = {COMPILED: compiled(model_of(mixture, tokens, "", device))}
        models |= {f"{kind} called" if kind else EAGER: model_of(mixture, tokens, kind, device)}
        models |= {f"{kind} compiled": compiled(model_of(mixture, tokens, kind, device))} if kind else {}
        yield models


def records(rounds: int = 5, *, device: str = "cuda") -> Iterator[Record]:
    """Figures for the record."""
    for mixture in MIXTURES:
        for tokens in TOKENS[mixture.label]:
            label = f"two layers of {mixture.label}, {tokens} tokens"
            width = mixture.fields["hidden_size"]
            for number, models in enumerate(groups(mixture, tokens, device)):
                calls = {name: passes_of(model, tokens, width, device) for name, model in models.items()}
                if device == "cuda":
                    kind = ("", *KINDS)[number]
                    calls[f"{f'{kind} compiled' if kind else COMPILED} {AS_GRAPH}"] = graph_of(mixture, tokens, kind)
                for passes in calls.values():
                    for _ in range(WARM + 1):  # the last one captures
                        passes()
                took = in_turns({name: {PASSES: passes} for name, passes in calls.items()}, milliseconds, rounds)
                for name, passes in calls.items():
                    if name == COMPILED and number:
                        continue
                    times = took[name, PASSES]
                    yield _record(f"{label}, {name}", statistics.median(times), "ms")
                    ratio = statistics.median(its / mine for mine, its in zip(times, took[COMPILED, PASSES]))
                    yield _record(f"{label}, {name}", ratio, f"x {COMPILED}", LEAST.get((mixture.label, tokens, name)))
                    if name in models:
                        yield from parts(f"{label}, {name}", passes)
                        yield from saved(label, name, mixture, models, tokens)


if __name__ == "__main__":
    show(records())
