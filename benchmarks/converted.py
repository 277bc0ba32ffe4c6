"""Layers of Llama 3 8B as transformers has them, converted by ``fuse_``: ``python -m benchmarks.converted``.

Four decoder layers and the last norm, random weights in bf16, two sequences of 4096 tokens. "called": nothing is compiled.
"compiled": torch.compile takes each layer, and what is no op there (most norms before attention, rotary embeddings, sums) becomes
its kernels. Layers are compiled one by one, plain ones too: in a graph of the whole model transformers hands attention a mask
instead of the word "causal", and attention takes three times as long.
Under one recipe at a time: the model that is called, the one that is compiled and plain bf16 that is compiled take turns. Torch
forgets before what it has compiled; else layers of all models share one cache, whose entries are tried one after another.
AdamW is torch's fused one, over weights in bf16; every step begins without gradients.

Memory is what a forward pass leaves beside its output, and the most that both passes take above the weights.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

import opfuse
from benchmarks.calls import EAGER, in_turns
from benchmarks.models import LARGE, Sizes
from benchmarks.timing import Call, wall_time
from opfuse import recipes

COMPILED = "torch.compile bf16"
KINDS = ("delayed", "fp8_current", "fp8_block")
QUANTIZED = "fp8_current keep=quantized"
"""A kind that is measured compiled alone: what it saves less decides about memory."""
LEAST = {"delayed compiled": 1.30, "fp8_current compiled": 1.30, f"{QUANTIZED} compiled": 1.28}
"""Times the speed of torch.compile in bf16: at least."""

LENGTH = 4096
"""Tokens of the longest sequence: a step of more tokens has several. In one sequence of 16 384 tokens attention, which no recipe
touches, takes nearly half of a pass through Qwen3-30B-A3B's layers in bf16, and a fifth of Mixtral's.
"""

WARM = 3
"""Steps before any is timed: one compiles or is interpreted, one is recorded, one finds what is saved in a block."""

PASSES, STEP, MEMORY = "forward and backward", "with AdamW", "memory"
MOST_SAVED, MOST_PEAK = 85, 95
"""Percent of the memory of torch.compile in bf16, of models that are compiled: at most."""
MOST_QUANTIZED = 50, 75
"""The same of :data:`QUANTIZED`."""

MIB = 2**20

Record = dict[str, Any]
Calls = dict[str, Call]


class Stack(NamedTuple):
    """Layers, sizes of each, heads of queries and of keys."""

    layers: int
    sizes: Sizes
    heads: int
    groups: int


LLAMA = Stack(4, Sizes(8192, LARGE.hidden, LARGE.ffn), 32, 8)


SDPA, UNMASKED = "sdpa", "sdpa without a mask"


def unmasked() -> str:
    """The name of torch's attention for one sequence, causal without a look at positions.

    transformers reads positions on the host at each call, to see that one sequence is there. While a CUDA graph is captured it
    cannot, and makes a mask.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(UNMASKED, sdpa_attention_forward)
    AttentionMaskInterface.register(UNMASKED, lambda *_, **__: None)
    return UNMASKED


def llama(stack: Stack, device: str, *, attention: str = SDPA) -> nn.Module:
    """Without a head, whose product belongs to no layer; its embedding is not called."""
    from transformers import AutoModel, LlamaConfig

    config = LlamaConfig(
        hidden_size=stack.sizes.hidden,
        intermediate_size=stack.sizes.ffn,
        num_hidden_layers=stack.layers,
        num_attention_heads=stack.heads,
        num_key_value_heads=stack.groups,
        max_position_embeddings=2 * stack.sizes.tokens,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        vocab_size=16,
        use_cache=False,
        attn_implementation=attention,
    )
    with torch.device(device):
        model: nn.Module = AutoModel.from_config(config, dtype=torch.bfloat16)
    return model


def compiled(model: nn.Module, mode: str | None = None) -> nn.Module:
    """Layer by layer, in one of torch.compile's modes."""
    for name in ("layers", "norm"):
        part = model.get_submodule(name)
        for each in part if isinstance(part, nn.ModuleList) else [part]:
            each.compile(mode=mode)
    return model


def as_graph(step: Call, model: nn.Module, *optimizers: torch.optim.Optimizer) -> Call:
    """A step as one CUDA graph, which forgets gradients at its end."""

    def whole() -> None:
        step()
        model.zero_grad()

    return opfuse.graphed_step(whole, model, *optimizers)


def batch(tokens: int) -> tuple[int, int]:
    """How many sequences a step has, and how long they are. ValueError for tokens that are no whole sequences."""
    length = min(tokens, LENGTH)
    if tokens % length:
        raise ValueError(f"a step wants whole sequences of {LENGTH} tokens, got {tokens} tokens; time a multiple of {LENGTH}")
    return tokens // length, length


def calls_of(model: nn.Module, stack: Stack, device: str, *, graph: bool = False) -> Calls:
    """What is timed of a model: both passes, and a step of training, as a graph if its attention is :func:`unmasked`."""
    shape = batch(stack.sizes.tokens)
    x, dy = (torch.randn(*shape, stack.sizes.hidden, device=device, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    parameters = [parameter for name, parameter in model.named_parameters() if "embed" not in name]
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True, capturable=graph)

    def passes() -> None:
        for each in (x, *parameters):
            each.grad = None
        model(inputs_embeds=x).last_hidden_state.backward(dy)

    def step() -> None:
        passes()
        optimizer.step()

    return {PASSES: passes, STEP: as_graph(step, model, optimizer) if graph else step}


def model_of(kind: str, stack: Stack, device: str) -> nn.Module:
    """Under the recipe of that kind, or in bf16."""
    model = llama(stack, device)
    if kind:
        name, _, keep = kind.partition(" keep=")
        opfuse.fuse_(model, recipes.recipe_of(name, {"keep": keep} if keep else {}), pack=True)
    return model


class Memory(NamedTuple):
    """Bytes that a forward pass leaves for the backward pass, and the most that both passes take above the weights."""

    saved: int
    peak: int


def memory_of(model: nn.Module, tokens: int, width: int) -> Memory:
    """Of a model on a GPU that is warm."""
    for each in model.parameters():
        each.grad = None
    x = torch.randn(*batch(tokens), width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = model(inputs_embeds=x).last_hidden_state
    saved = torch.cuda.memory_allocated() - before - y.nbytes
    y.backward(y.detach())
    return Memory(saved, torch.cuda.max_memory_allocated() - before)


def groups(stack: Stack, device: str) -> Iterator[dict[str, nn.Module]]:
    """Models that take turns, by name: :data:`COMPILED` beside those of bf16 that are called, and then of each recipe."""
    for kind in ("", *KINDS, QUANTIZED):
        torch._dynamo.reset()
        own: dict[str, Callable[[nn.Module], nn.Module]] = {f"{kind} compiled": compiled} if kind else {}
        if kind != QUANTIZED:
            own = {f"{kind} called" if kind else EAGER: lambda model: model, **own}
        yield {
            COMPILED: compiled(llama(stack, device)),
            **{name: last(model_of(kind, stack, device)) for name, last in own.items()},
        }


def milliseconds(call: Call) -> float:
    return wall_time(call, calls=3) / 1e3


SETTLES = 12
"""Calls that come before the timed ones of a turn, where the host decides: allocations have to find their places again, and
opfuse's launches to become CUDA graphs, as in a process that trains one model.
"""


def settled(call: Call) -> float:
    """Milliseconds of a call among others of its kind."""
    for _ in range(SETTLES):
        call()
    return wall_time(call, calls=6) / 1e3


def speeds(name: str, times: Sequence[float], beside: Mapping[str, tuple[Sequence[float], float | None]]) -> Iterator[Record]:
    """The median of what a call took, in ms, and of how many times as fast as others it was in the same round.

    beside: what others took, and how many times as fast it is to be at least, by the unit of that figure.
    """
    yield {"name": name, "value": statistics.median(times), "unit": "ms", "limit": None, "met": None}
    for unit, (others, least) in beside.items():
        ratio = statistics.median(its / mine for mine, its in zip(times, others))
        yield {"name": name, "value": ratio, "unit": unit, "limit": least, "met": least and ratio >= least}


def compared(label: str, took: Mapping[tuple[str, str], list[float]], *, whole: bool) -> Iterator[Record]:
    """Each beside :data:`COMPILED`. whole: with figures of itself."""
    for (name, what), times in took.items():
        if name != COMPILED or whole:
            yield from speeds(f"{label}, {name}, {what}", times, {f"x {COMPILED}": (took[COMPILED, what], LEAST.get(name))})


def label_of(stack: Stack) -> str:
    """What names begin with."""
    return f"converted, Llama of {stack.layers} layers {stack.sizes.tokens}x{stack.sizes.hidden}"


def records(rounds: int = 5, *, stack: Stack = LLAMA, device: str = "cuda") -> Iterator[Record]:
    """Figures for the record."""
    label = label_of(stack)
    for number, models in enumerate(groups(stack, device)):
        every = {name: calls_of(model, stack, device) for name, model in models.items()}
        for calls in every.values():
            for _ in range(WARM):
                calls[STEP]()
        yield from compared(label, in_turns(every, milliseconds, rounds), whole=number == 0)
        if device == "cuda":
            yield from memories(label, models, stack, whole=number == 0)


def memories(label: str, models: Mapping[str, nn.Module], stack: Stack, *, whole: bool) -> Iterator[Record]:
    """MiB, and percent of :data:`COMPILED`. whole: with those of itself."""
    found = {name: memory_of(model, stack.sizes.tokens, stack.sizes.hidden) for name, model in models.items()}
    for name, memory in found.items():
        limits = MOST_QUANTIZED if name.startswith(QUANTIZED) else (MOST_SAVED, MOST_PEAK)
        for what, value, beside, most in zip(("saved", "peak"), memory, found[COMPILED], limits):
            full = f"{label}, {name}, {MEMORY}"
            if name != COMPILED or whole:
                yield {"name": full, "value": value / MIB, "unit": f"MiB {what}", "limit": None, "met": None}
            if name != COMPILED:
                percent, limit = 100 * value / beside, most if name.endswith(" compiled") else None
                yield {"name": full, "value": percent, "unit": f"% {what}", "limit": limit, "met": limit and percent <= limit}


def show(records: Iterable[Record]) -> None:
    """Print figures as they come, with their limits, and how long all took."""
    start = time.perf_counter()
    for record in records:
        limit = "" if record["limit"] is None else f", limit {record['limit']:.2f}"
        print(f"{record['name']:90s} {record['value']:9.2f} {record['unit']}{limit}", flush=True)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    show(records())
