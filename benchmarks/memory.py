"""Memory of training: every pipeline, recipe and override: ``python -m benchmarks.memory [--tokens M] [--hidden H] [--ffn F]``.

And decoder layers under every ``keep``, where what all of them save outweighs what one of them holds for a while.

Prints the bytes kept for the backward pass, counted through autograd's hooks by distinct storage and without inputs and
parameters, beside what the formats say they must be, and as a part of bf16. On a GPU also the peak of a forward and backward
pass above what was allocated before, beside the peak of torch's own modules in bf16.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.models import LARGE, PIPELINES, SMALL, Sizes, active, decoder, settings
from opfuse import recipes
from opfuse.recipes.recipe import Recipe

BF16, FP32 = 2, 4
MIB = 2**20
WORKSPACE = 32 * MIB
"""Scratch memory that the products may have."""

SLACK = 1.02


# -- what the formats say --------------------------------------------------------------------------------------------------


def padded(n: int, multiple: int) -> int:
    """The next multiple at or above n."""
    return -(-n // multiple) * multiple


def plane_bytes(kind: str, rows: int, columns: int, *, rowwise: bool, weight: bool) -> int:
    """Data, scales and amax of one plane of a (rows, columns) matrix as the recipe ``kind`` casts it by default.

    Scales run along the blocked dimension: fp32 over all of it, or over 128 (weights: 128 x 128) in rows of whole 16 bytes; E8M0
    over 32 and E4M3 over 16, in tiles of 128 x 4.
    """
    lines, length = (rows, columns) if rowwise else (columns, rows)
    blocks = -(-length // 128)
    return {
        "delayed": lines * length + FP32,
        "fp8_current": lines * length + FP32,
        "fp8_row": lines * length + FP32 * lines,
        "fp8_block": lines * length + FP32 * (-(-lines // 128) * padded(blocks, 4) if weight else blocks * padded(lines, 4)),
        "mxfp8": lines * length + padded(lines, 128) * padded(-(-length // 32), 4),
        "nvfp4": lines * length // 2 + padded(lines, 128) * padded(-(-length // 16), 4) + FP32,
    }[kind]


@dataclass(frozen=True)
class Operands:
    """What one linear layer saves. source: where its input comes from: the caller, a norm, or an activation."""

    tokens: int
    inputs: int
    outputs: int
    source: str

    def bytes(self, kind: str, override: str | None, keep: str | None = None) -> int:
        """Of input and weight: one plane of each, or the tensors themselves, of which only a made input costs anything.

        Casts of weights and of a norm's results are made anew, unless ``keep`` is "all"; under another ``keep`` so is all that
        the caller has not given. That is under the delayed scale of the call or under the amax that it found, which are saved; an
        input that follows from a quantized one has an amax of its own.
        """
        remade = kind != "none" and self.source in _REMADE.get(keep, (NORM, ACTIVATION))
        if kind == "none" or override == "high_precision":
            return BF16 * self.tokens * self.inputs if self.source != CALLER and not remade else 0
        rowwise, own_amax = override == "dequantized", keep == "quantized" and self.source != CALLER
        again = FP32 * (kind == "delayed" or (kind == "fp8_current" and not own_amax))
        x = again if remade else plane_bytes(kind, self.tokens, self.inputs, rowwise=rowwise, weight=False)
        if keep == "all":
            return x + plane_bytes(kind, self.outputs, self.inputs, rowwise=rowwise, weight=True)
        return x + FP32 * (kind in ("delayed", "fp8_current", "nvfp4"))  # an amax of rotated NVFP4 inputs is not that of weights


CALLER, NORM, ACTIVATION = "caller", "norm", "activation"

_REMADE: dict[str | None, tuple[str, ...]] = {None: (NORM,), "all": ()}
"""Whose results the backward pass makes anew, by the values of ``keep`` with which it does not make them all."""


# -- pipelines -------------------------------------------------------------------------------------------------------------


class Saves(NamedTuple):
    """Of a pipeline: its linear layers, columns of the inputs of its activation and of its norm, which the pipeline is given, and
    bytes that are saved whatever the recipe."""

    layers: Callable[[Sizes], tuple[Operands, ...]]
    activated: Callable[[Sizes], int]
    normed: Callable[[Sizes], int]
    always: Callable[[Sizes], int]


SAVES: dict[str, Saves] = {
    "A": Saves(
        lambda s: (Operands(s.tokens, s.hidden, s.ffn, CALLER), Operands(s.tokens, s.ffn, s.hidden, ACTIVATION)),
        lambda s: s.ffn,
        lambda s: 0,
        lambda s: 0,
    ),
    "B": Saves(
        lambda s: (Operands(s.tokens, s.hidden, 2 * s.ffn, NORM), Operands(s.tokens, s.ffn, s.hidden, ACTIVATION)),
        lambda s: 2 * s.ffn,
        lambda s: s.hidden,
        lambda s: FP32 * s.tokens,
    ),
}


def formula(name: str, sizes: Sizes, kind: str, override: str | None, keep: str | None = None) -> int:
    """Bytes that pipeline ``name`` must save beside its input and its parameters."""
    layers, activated, normed, always = SAVES[name]
    read = BF16 * sizes.tokens * activated(sizes)
    if keep == "quantized":
        read = sum(
            plane_bytes("fp8_block", sizes.tokens, columns(sizes), rowwise=True, weight=False) for columns in (activated, normed)
        )
    return read + always(sizes) + sum(layer.bytes(kind, override, keep) for layer in layers(sizes))


def transient(name: str, sizes: Sizes, kind: str, override: str | None, keep: str | None = None) -> int:
    """Bytes that a call may hold for a while beside what bf16 modules hold: casts, or dequantized operands, of one layer.

    A gradient that is cast under its own amax is stored first. A product that is emulated multiplies bf16 copies of its operands.
    Under ``keep`` the operands of one layer are made anew, from a dequantized input of the activation where that is quantized.
    """
    if kind == "none":
        return 0
    layers = SAVES[name].layers(sizes)
    if keep not in (None, "all"):
        anew = max(layer.inputs * (layer.tokens + layer.outputs) for layer in layers)
        read = BF16 * sizes.tokens * SAVES[name].activated(sizes) if keep == "quantized" else 0
        return transient(name, sizes, kind, override) + anew + read
    if override == "dequantized":
        casts = max(BF16 * max(layer.tokens * layer.inputs, layer.outputs * layer.inputs) for layer in layers)
    elif override == "high_precision":
        casts = max(layer.inputs * (layer.tokens + layer.outputs) for layer in layers)
    else:
        stored = BF16 if kind in ("fp8_current", "nvfp4") else 0
        casts = max((2 + stored) * layer.tokens * layer.outputs for layer in layers)
    native = recipes.support(kind).status == "native"
    return casts if native else casts + max(_copies(layer, override) for layer in layers)


def _copies(layer: Operands, override: str | None) -> int:
    """Bytes of bf16 copies of the operands of the layer's largest product: forward, or any without an override."""
    x, w, dy = layer.tokens * layer.inputs, layer.inputs * layer.outputs, layer.tokens * layer.outputs
    return BF16 * (x + w if override is not None else max(x + w, dy + w, dy + x))


# -- what is measured ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Bytes of one pipeline under one recipe, override and ``keep``. peak, limit: on a GPU; limit from torch's peak in bf16."""

    pipeline: str
    kind: str
    override: str | None
    saved: int
    formula: int
    of_bf16: float
    peak: int | None = None
    limit: int | None = None
    keep: str | None = None

    @property
    def name(self) -> str:
        """Pipeline, recipe, override or what is kept."""
        return named(self.pipeline, self.kind, self.override, self.keep)

    @property
    def most(self) -> int | None:
        """Percent of what bf16 saves that this may be."""
        return MOST[self.pipeline] if self.keep == "quantized" else None


class Stack(NamedTuple):
    """Bytes of decoder layers. peak: on a GPU."""

    name: str
    keep: str | None
    saved: int
    peak: int | None


MOST = {"A": 60, "B": 65}
"""Percent of what bf16 saves, under ``keep="quantized"``."""

LAYERS, NATIVE = 4, ("fp8_current", "fp8_block")
"""Of the decoder, and the recipes that it is measured under."""

MOST_OF_LAYERS = {"recompute": 80, "quantized": 70}
"""Percent of the peak of torch's layers in bf16, by ``keep``."""


def named(pipeline: str, kind: str, override: str | None, keep: str | None) -> str:
    """What is measured, as figures are called."""
    kept = None if keep is None else f"keep={keep}"
    return ", ".join(filter(None, (pipeline, kind, override, kept)))


def saved_bytes(model: nn.Module, x: torch.Tensor, recipe: Recipe | None) -> int:
    """Bytes of the distinct storages that a call saves, without those of the input and of parameters."""
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), active(recipe):
        model(x)
    others = {tensor.untyped_storage().data_ptr() for tensor in (x, *model.parameters())}
    return sum(storage.nbytes() for address, storage in kept.items() if address not in others)


def peak_bytes(model: nn.Module, x: torch.Tensor, recipe: Recipe | None) -> int:
    """The most that is allocated in a forward and backward pass, above what is allocated before; gradients are there already."""
    dy = torch.randn_like(x)
    for _ in range(2):  # the first pass makes plans, kernels and gradients
        gc.collect()  # a graph whose hooks gave tensors back as they were holds itself
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with active(recipe):
            y = model(x)
        y.backward(dy)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del y
    return peak


def measure(sizes: Sizes, device: str) -> Iterator[Row]:
    """All rows of both pipelines."""
    for name, pipeline in PIPELINES.items():
        torch.manual_seed(0)
        x = torch.randn(sizes.tokens, sizes.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
        eager = peak_bytes(pipeline.eager(sizes).to(device, torch.bfloat16), x, None) if device == "cuda" else None
        model = pipeline.fused(sizes).to(device, torch.bfloat16)
        plain = formula(name, sizes, "none", None)
        for kind, override, keep, recipe in kept_settings():
            want, saved = formula(name, sizes, kind, override, keep), saved_bytes(model, x, recipe)
            peak, limit = None, None
            if eager is not None:
                peak = peak_bytes(model, x, recipe)
                limit = round(SLACK * (eager + want - plain + transient(name, sizes, kind, override, keep))) + WORKSPACE
            yield Row(name, kind, override, saved, want, saved / plain, peak, limit, keep)


def stacks(sizes: Sizes, device: str, count: int = LAYERS) -> Iterator[Stack]:
    """Decoder layers of torch in bf16 first, then of opfuse."""
    torch.manual_seed(0)
    x = torch.randn(sizes.tokens, sizes.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    kept = [setting for setting in kept_settings() if setting[0] in NATIVE and setting[1] is None]
    for fused, runs in ((False, [("torch", None, None, None)]), (True, kept)):
        with torch.device(device):
            model = decoder(sizes, count, fused=fused).bfloat16()
        for kind, override, keep, recipe in runs:
            saved = saved_bytes(model, x, recipe)
            peak = peak_bytes(model, x, recipe) if device == "cuda" else None
            yield Stack(named(f"decoder of {count} layers", kind, override, keep), keep, saved, peak)


def kept_settings() -> Iterator[tuple[str, str | None, str | None, Recipe | None]]:
    """(kind, override, keep, recipe): every recipe under every override, and without one under every ``keep``."""
    for kind, override, recipe in settings():
        yield kind, override, None, recipe
        if recipe is not None and override is None:
            for keep in ("recompute", "quantized"):
                yield kind, None, keep, recipe.replace(keep=keep)


def records(sizes: Sizes | None = None, device: str | None = None) -> Iterator[dict[str, Any]]:
    """Figures for the record: saved bytes against the formula, as a part of bf16, and peaks where there is a GPU."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    sizes = sizes or (LARGE if device == "cuda" else SMALL)
    for row in measure(sizes, device):
        name = f"{row.name}, {sizes.tokens} tokens, {sizes.hidden}-{sizes.ffn}"
        yield _record(f"{name}, saved", row.saved / MIB, "MiB", row.formula / MIB)
        yield _record(f"{name}, saved", 100 * row.of_bf16, "% of bf16", row.most)
        if row.peak is not None and row.limit is not None:
            yield _record(f"{name}, peak", row.peak / MIB, "MiB", row.limit / MIB)
    plain, *others = stacks(sizes, device)
    for stack in (plain, *others):
        name = f"{stack.name}, {sizes.tokens} tokens, {sizes.hidden}-{sizes.ffn}"
        yield _record(f"{name}, saved", stack.saved / MIB, "MiB", None)
        yield _record(f"{name}, saved", 100 * stack.saved / plain.saved, "% of bf16", None)
        if stack.peak is not None and plain.peak is not None:
            yield _record(f"{name}, peak", stack.peak / MIB, "MiB", None)
            yield _record(f"{name}, peak", 100 * stack.peak / plain.peak, "% of bf16", MOST_OF_LAYERS.get(stack.keep or ""))


def _record(name: str, value: float, unit: str, limit: float | None) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "limit": limit, "met": None if limit is None else value <= limit}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    default = LARGE if device == "cuda" else SMALL
    for name, value in default._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=value)
    sizes = Sizes(**vars(parser.parse_args()))
    print(f"{sizes.tokens} tokens, hidden {sizes.hidden}, ffn {sizes.ffn}, bf16, {device}; MiB beside input and parameters")
    print(f"{'pipeline, recipe, override':36s} {'saved':>10s} {'formula':>10s} {'of bf16':>8s} {'peak':>10s} {'limit':>10s}")
    for row in measure(sizes, device):
        figures = [f"{row.saved / MIB:10.3f} {row.formula / MIB:10.3f} {row.of_bf16:8.1%}"]
        if row.peak is not None and row.limit is not None:
            figures.append(f"{row.peak / MIB:10.1f} {row.limit / MIB:10.1f}{'' if row.peak <= row.limit else '  NOT MET'}")
        mark = "" if row.saved == row.formula else "  NOT THE FORMULA"
        print(f"{row.name:36s} {' '.join(figures)}{mark}", flush=True)
    for name, _, saved, peak in stacks(sizes, device):
        print(f"{name:42s} {saved / MIB:10.3f} MiB saved{'' if peak is None else f', peak {peak / MIB:.1f}'}", flush=True)


if __name__ == "__main__":
    main()
