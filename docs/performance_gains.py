"""The first chapter of docs/performance.md: what a user gains, task by task, in figures of the records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks import calls
from benchmarks.adapters import ALL, BF16, GRAPH, OURS, SHORT
from benchmarks.converted import COMPILED, LLAMA, STEP
from benchmarks.libraries import AS_GRAPH, TORCHAO
from benchmarks.pretrain import PLAIN, QUANTIZED
from benchmarks.steps import EIGHT, MANY, ONE, Case
from docs import performance_text as prose
from docs.performance_figures import of_script
from docs.tables import llama_speeds

Record = Mapping[str, Any]

FP8 = ("fp8_block", "fp8_current", "delayed")
DECODER, SMALLEST = "host, decoder of 4 layers", "A 256x256"
WAYS = ("called", "compiled")


def gains(record: Record, several: Record, h100: Record) -> str:
    """The text, from the records of an H200, of two, and of an H100."""
    return prose.GAINS.format(
        **llama(record),
        **by_tokens(record),
        **adapters(record),
        **decoders(record, h100),
        **ranks(several),
        **small(record),
        **mixtures(record),
        **compiled(record),
        **memory(record),
        **steps(record),
        **emulated(record),
    )


def value(record: Record, script: str, name: str, unit: str) -> float:
    """A figure."""
    return float(of_script(record, script)[name][unit]["value"])


def between(figures: Iterable[float], digits: int = 2) -> str:
    """The smallest and the largest of some, or the one that both are, as they are shown."""
    shown = [f"{figure:.{digits}f}" for figure in sorted(figures)]
    return shown[0] if shown[0] == shown[-1] else f"{shown[0]} to {shown[-1]}"


def llama(record: Record) -> dict[str, str]:
    """Speeds of training steps of converted layers, over layers in bf16 that are called and compiled."""
    speeds = llama_speeds(record["results"])
    return {
        **{f"llama_{way}": between(speeds[f"{kind} {way}"].over_eager for kind in FP8) for way in WAYS},
        **{f"llama_{way}_over_compiled": between(speeds[f"{kind} {way}"].over_compiled for kind in FP8) for way in WAYS},
    }


def by_tokens(record: Record) -> dict[str, str]:
    """Speeds of training steps of converted layers that are compiled, over bf16 and torchao, by the number of tokens."""

    def speeds(tokens: int, unit: str, how: str = "packed") -> str:
        label = f"libraries, Llama of {LLAMA.layers} layers {tokens}x{LLAMA.sizes.hidden}"
        kinds = ("fp8_block", "fp8_current")
        return between(value(record, "libraries", f"{label}, {kind} {how}, {STEP}", unit) for kind in kinds)

    graph = f"packed {AS_GRAPH}"
    return {
        **{f"tokens_{tokens}": speeds(tokens, f"x {COMPILED}") for tokens in (512, 4096, 16384)},
        **{f"graph_{tokens}": speeds(tokens, f"x {COMPILED}", graph) for tokens in (512, 1024, 2048)},
        **{f"graphs_{tokens}": speeds(tokens, f"x {COMPILED} {AS_GRAPH}", graph) for tokens in (512, 2048)},
        "torchao_16384": speeds(16384, f"x {TORCHAO}"),
    }


def adapters(record: Record) -> dict[str, str]:
    """Speeds of LoRA over weights stored in FP8, of all layers in checkpoints."""
    label = f"adapters, Llama of {ALL} layers {SHORT.sizes.tokens}x{SHORT.sizes.hidden}, {OURS}"
    ways = {"called": "in checkpoints", "compiled": "compiled in checkpoints", "graph": GRAPH}
    return {
        f"lora_{key}": f"{value(record, 'adapters', f'{label} {how}, step', f'x {BF16} {how}'):.2f}" for key, how in ways.items()
    }


def decoders(record: Record, h100: Record) -> dict[str, str]:
    """Speeds of the decoder of the chapter on CPU time, on each device."""
    size = f"{calls.DECODER.tokens}x{calls.DECODER.hidden}"
    names = [f"{DECODER} {size}, {kind}, step, wall" for kind in FP8]
    found = {"h200": record, "h100": h100}
    return {
        "decoder_tokens": str(calls.DECODER.tokens),
        **{
            f"decoder_{device}": between(1 / value(each, "host", name, f"x {calls.EAGER}") for name in names)
            for device, each in found.items()
        },
    }


def ranks(several: Record) -> dict[str, str]:
    """Speed and bytes of FSDP2 with weights stored in FP8, and speeds of experts that are spread."""
    name = "opfuse, FP8 gathered"
    return {
        "ranks": str(several["ranks"]),
        "fsdp_speed": f"{1 / value(several, 'distributed', name, 'x torch, with AdamW'):.2f}",
        "fsdp_bytes": f"{value(several, 'distributed', name, 'x bytes of bf16'):.2f}",
        **{
            f"spread_{key}": between(
                value(several, "experts", f"{shape}, opfuse, {kind}", "x the speed of torch")
                for kind in ("fp8_block", "fp8_current")
            )
            for key, shape in {"qwen": "Qwen3-30B-A3B", "mixtral": "Mixtral"}.items()
        },
    }


def small(record: Record) -> dict[str, str]:
    """Times of the smallest model, called and as a CUDA graph."""
    steps = [f"host, {SMALLEST}, {kind}, forward + backward" for kind in ("none", *FP8)]
    graphs = [f"graphs, {SMALLEST}, {kind}, graphed" for kind in FP8]
    return {
        "small": between((value(record, "host", name, f"x {calls.EAGER}") for name in steps), 1),
        "small_graphed": between(value(record, "pytorch", name, "x called") for name in graphs),
    }


def mixtures(record: Record) -> dict[str, str]:
    """Speeds of mixtures over layers in bf16 that are compiled: called, compiled, and compiled as a graph."""
    sizes = {"mixtral": "Mixtral, 16384", "qwen": "Qwen3-30B-A3B, 16384", "qwen_few": "Qwen3-30B-A3B, 8192"}
    return {
        f"{key}_{way.replace(' ', '_')}": between(
            value(record, "mixtures", f"two layers of {size} tokens, {kind} {way}", f"x {COMPILED}")
            for kind in ("fp8_block", "fp8_current")
        )
        for key, size in sizes.items()
        for way in (*WAYS, f"compiled {AS_GRAPH}")
    }


def compiled(record: Record) -> dict[str, str]:
    """What compiling converted layers saves, in percent, and what it costs."""
    over = {name: speed.over_compiled for name, speed in llama_speeds(record["results"]).items()}
    model = f"compiled, decoder of 2 layers {calls.DECODER.tokens}x{calls.DECODER.hidden}"
    return {
        "compiling_saves": between((round(100 - 100 * over[f"{kind} called"] / over[f"{kind} compiled"]) for kind in FP8), 0),
        "first_compiled": f"{value(record, 'pytorch', f'{model}, first call', 's'):.0f}",
        "breaks": f"{value(record, 'pytorch', f'{model}, every recipe', 'graph breaks'):.0f}",
        "recompilations": f"{value(record, 'pytorch', f'{model}, every recipe', 'recompilations'):.0f}",
    }


def memory(record: Record) -> dict[str, str]:
    """Saved bytes and peaks of decoder layers, in percent of bf16."""
    settings = {"kept": "", "recomputed": " keep=recompute,"}
    return {
        f"{what}_{key}": between(
            (
                value(record, "memory", f"decoder of 4 layers, {kind},{setting} 8192 tokens, 4096-14336, {what}", "% of bf16")
                for kind in ("fp8_block", "fp8_current")
            ),
            0,
        )
        for key, setting in settings.items()
        for what in ("saved", "peak")
    }


def steps(record: Record) -> dict[str, str]:
    """Speeds of whole training steps over bf16, and peaks in percent of its."""
    whole = {"whole": [Case(EIGHT, kind, "adamw8bit") for kind in ("fp8_current", "delayed")]}
    whole |= {"whole_graph": [Case(EIGHT, kind, "adamw8bit", graph=True) for kind in ("fp8_block", "fp8_current")]}
    as_graph = Case(EIGHT, PLAIN, "adamw8bit", graph=True)
    least = {name: Case(size, "delayed", "adamw8bit", QUANTIZED, graph=True) for name, size in (("small", ONE), ("large", MANY))}

    def speed(case: Case) -> float:
        return value(record, "steps", f"{case}, step", f"x {COMPILED}")

    return {
        **{name: between(map(speed, cases)) for name, cases in whole.items()},
        "whole_graphs": between(speed(case) / speed(as_graph) for case in whole["whole_graph"]),
        **{f"{name}_speed": f"{speed(case):.2f}" for name, case in least.items()},
        **{f"{name}_peak": f"{value(record, 'steps', f'{case}, peak', f'% of {COMPILED}'):.0f}" for name, case in least.items()},
    }


def emulated(record: Record) -> dict[str, str]:
    """Times of a step of B in formats that are emulated, relative to eager bf16."""
    bf16 = value(record, "pipelines", "B, eager bf16, training", "ms")
    times = (value(record, "pipelines", f"B, {kind}, training", "ms") / bf16 for kind in ("mxfp8", "nvfp4"))
    return {"emulated": between(times)}
