"""LoRA over frozen layers of Llama 3 8B, in bf16 and stored as FP8: ``python -m benchmarks.adapters``.

The four layers of ``benchmarks/converted.py``, at 4096 and 8192 tokens, with adapters of rank 16 in bf16 at every linear layer:
PEFT over weights in bf16; PEFT over transformers' ``FP8Linear``, whose kernel is that of the hub (FP8 in the forward pass,
weights decoded to bf16 in the backward pass); and the same ``FP8Linear`` converted by ``fuse_``, which multiplies the stored
bytes in both passes. Models take turns in one process, so that ratios are of one state of the machine. Where the hub's kernel is
not to be had, transformers' model is left out, which a line says.

Memory is what a process that trains one model has: its weights, and at most in a step. The gradient of the layers' input is not
asked for, as in a model whose embedding is frozen. All 32 layers of the model are called in checkpoints, as adapters are trained
where memory is short; there weights are most of it. Compiled layers have their checkpoints around them; that of
``gradient_checkpointing_enable()`` would be inside. Their step is also repeated as one CUDA graph.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import opfuse
from benchmarks.calls import in_turns
from benchmarks.converted import (
    LENGTH,
    LLAMA,
    SDPA,
    Calls,
    Record,
    Stack,
    as_graph,
    compiled,
    label_of,
    llama,
    milliseconds,
    show,
    unmasked,
)
from opfuse.interchange.layouts import LAYOUTS
from opfuse.tensors.quantizers import Float8BlockQuantizer

SHORT = LLAMA._replace(sizes=LLAMA.sizes._replace(tokens=LENGTH))
"""Steps of one sequence; :func:`records` also has steps of two."""

RANK, STEP, WARM, ALL = 16, "step", 3, 32
BF16, THEIRS, OURS = "PEFT bf16", "PEFT transformers FP8", "PEFT opfuse FP8"
GRAPH = "compiled in checkpoints, as a graph"
LEAST = {BF16: 1.2, THEIRS: 1.5}
"""Times the speed of each: at least."""
MOST_MEMORY = 0.60
"""Of the peak of bf16: at most."""

MIB = 2**20


def stored(model: nn.Module) -> nn.Module:
    """The model with every linear layer as transformers loads it from a checkpoint of DeepSeek's layout."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    quantizer = Float8BlockQuantizer(torch.float8_e4m3fn, scale_rule="deepgemm", force_pow_2_scales=False)
    for name, module in [*model.named_modules()]:
        if type(module) is nn.Linear:
            planes = quantizer.quantize(module.weight.detach())
            arrays = LAYOUTS["deepseek"].written("x", planes)
            with torch.device(module.weight.device):
                other = FP8Linear(module.in_features, module.out_features, block_size=(128, 128))
            other.weight = nn.Parameter(arrays["x.weight"], requires_grad=False)
            other.weight_scale_inv = nn.Parameter(arrays["x.weight_scale_inv"], requires_grad=False)
            model.set_submodule(name, other)
    return model


def adapted(model: nn.Module) -> nn.Module:
    """With adapters in bf16, whose second matrix is not zero. PEFT makes them in fp32, in which all would multiply slower."""
    import peft

    model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules="all-linear"))
    for each in model.parameters():
        if each.requires_grad:
            each.data = torch.randn(each.shape, device=each.device, dtype=torch.bfloat16) / 100
    return model


def converted(model: nn.Module) -> nn.Module:
    opfuse.fuse_(model, opfuse.recipes.Float8BlockScaling(), pack=True)
    return model


MODELS: dict[str, Callable[[nn.Module], nn.Module]] = {
    BF16: adapted,
    THEIRS: lambda model: adapted(stored(model)),
    OURS: lambda model: converted(adapted(stored(model))),
}


def has_kernel() -> bool:
    """Whether transformers finds the kernel that its FP8Linear calls."""
    from transformers.integrations import finegrained_fp8

    try:
        finegrained_fp8.load_finegrained_fp8_kernel()
    except Exception as error:
        print(f"{THEIRS} is left out: {error}", flush=True)
        return False
    return True


def calls_of(model: nn.Module, stack: Stack, device: str, *, graph: bool = False) -> Calls:
    """A step of training: both passes, and AdamW over the adapters."""
    shape = 1, stack.sizes.tokens, stack.sizes.hidden
    x, dy = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6, fused=True, capturable=graph)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs_embeds=x).last_hidden_state.backward(dy)
        optimizer.step()

    return {STEP: as_graph(step, model, optimizer) if graph else step}


def in_checkpoints(model: nn.Module) -> nn.Module:
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model.train()


def compiled_in_checkpoints(model: nn.Module) -> nn.Module:
    layers: Any = compiled(model).get_submodule("layers")
    for number, layer in enumerate(layers):
        layers[number] = checkpoint_wrapper(layer)
    return model


HOW: dict[str, Callable[[Any], object]] = {
    "called": lambda model: model,
    "compiled": compiled,
    "in checkpoints": in_checkpoints,
    "compiled in checkpoints": compiled_in_checkpoints,
    GRAPH: compiled_in_checkpoints,
}


def made(name: str, how: str, stack: Stack, device: str) -> nn.Module:
    model = MODELS[name](llama(stack, device, attention=unmasked() if how == GRAPH else SDPA))
    HOW[how](model.base_model.model)  # type: ignore[union-attr]
    return model


def memory_of(name: str, how: str, stack: Stack, device: str) -> tuple[float, float]:
    """MiB that weights take, and at most in a step, in a process that has only this model."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = made(name, how, stack, device)
    gc.collect()
    weights = torch.cuda.memory_allocated() - before
    step = calls_of(model, stack, device)[STEP]
    for _ in range(WARM):
        step()
    torch.cuda.reset_peak_memory_stats()
    step()
    return weights / MIB, (torch.cuda.max_memory_allocated() - before) / MIB


def records(rounds: int = 5, *, stack: Stack = SHORT, device: str = "cuda") -> Iterator[Record]:
    """Figures for the record."""
    names, twice = [name for name in MODELS if name != THEIRS or has_kernel()], 2 * stack.sizes.tokens
    longer, whole = stack._replace(sizes=stack.sizes._replace(tokens=twice)), stack._replace(layers=ALL)
    for how, each in (
        ("called", stack),
        ("called", longer),
        ("compiled", longer),
        ("in checkpoints", whole),
        ("compiled in checkpoints", whole),
        (GRAPH, whole),
    ):
        yield from _records(names, how, each, device, rounds)


def _records(names: Sequence[str], how: str, stack: Stack, device: str, rounds: int) -> Iterator[Record]:
    label = label_of(stack).replace("converted", "adapters")
    record = partial(dict, limit=None, met=None)
    used = {name: memory_of(name, how, stack, device) for name in names if how != GRAPH}
    for name, (weights, peak) in used.items():
        full, ratio, limit = f"{label}, {name} {how}", peak / used[BF16][1], MOST_MEMORY if name == OURS else None
        yield record(name=f"{full}, weights", value=weights, unit="MiB")
        yield record(name=f"{full}, peak of a step", value=peak, unit="MiB")
        yield record(name=f"{full}, peak", value=ratio, unit=f"x {BF16} {how}", limit=limit, met=limit and ratio <= limit)
    torch._dynamo.reset()
    every = {name: calls_of(made(name, how, stack, device), stack, device, graph=how == GRAPH) for name in names}
    for calls in every.values():
        for _ in range(WARM + 1):  # the last one captures
            calls[STEP]()
    took = in_turns(every, milliseconds, rounds)
    for name in names:
        yield record(name=f"{label}, {name} {how}, {STEP}", value=statistics.median(took[name, STEP]), unit="ms")
    for name in [each for each in names if each != OURS]:
        ratio = statistics.median(its / mine for mine, its in zip(took[OURS, STEP], took[name, STEP]))
        full, limit = f"{label}, {OURS} {how}, {STEP}", LEAST[name]
        yield record(name=full, value=ratio, unit=f"x {name} {how}", limit=limit, met=ratio >= limit)


if __name__ == "__main__":
    show(records())
