"""Estimates of ``opfuse.memory`` beside what a GPU allocates: ``python -m benchmarks.memory_estimates``.

Each case is a step of training of some layers of transformers with random weights: it runs three times, and the fourth is
measured, above what was allocated before the case. "static": before the step, which begins without gradients. "saved": what the
forward pass leaves. "peak": the most at once; "first": in the first two steps. Where torch compiles layers, the estimate is that
for eager mode, since what is converted is the same. ``--estimate-only`` needs no GPU.
"""

from __future__ import annotations

import argparse
import gc
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import opfuse
from benchmarks.converted import compiled
from opfuse import recipes
from opfuse.inspect.step_memory import Memory

MIB = 2**20
WARM = 3
MOST = 5
"""Percent of the measured peak that an estimate may be off."""

LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4}
MIXTRAL = {**LLAMA_8B, "num_local_experts": 8, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Case:
    """A step of training. head: with output head and loss, over so many words; 0: from the last hidden state. compile: whether
    torch takes each layer. tokens: of each of ``batch`` sequences.
    """

    name: str
    fields: Mapping[str, Any]
    kind: str = ""
    layers: int = 4
    tokens: int = 4096
    batch: int = 1
    head: int = 0
    keep: str | None = None
    compile: bool = False
    checkpointing: str = "none"
    optimizer: str = "none"
    loss: str = "own"
    of: str = "Llama"
    limit: int | None = MOST
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def recipe(self) -> Any:
        """None for bf16."""
        return recipes.recipe_of(self.kind, {"keep": self.keep}) if self.kind else None

    def model(self, device: str) -> nn.Module:
        """Not converted."""
        import transformers

        config = getattr(transformers, f"{self.of}Config")(
            **{
                **self.fields,
                "num_hidden_layers": self.layers,
                "max_position_embeddings": max(self.tokens, 2048),
                "rms_norm_eps": 1e-5,
                "vocab_size": self.head or 16,
                "use_cache": False,
            },
            **({"experts_implementation": "grouped_mm"} if self.of == "Mixtral" else {}),
        )
        kind = transformers.AutoModelForCausalLM if self.head else transformers.AutoModel
        torch.manual_seed(0)
        with torch.device(device):
            model: nn.Module = kind.from_config(config, dtype=torch.bfloat16)
        return model

    def inputs(self, device: str) -> dict[str, torch.Tensor]:
        """By name."""
        if self.head:
            ids = (
                torch.randint(self.head, (self.batch, self.tokens)) if device != "meta" else torch.zeros(self.batch, self.tokens)
            )
            ids = ids.to(device, torch.int64)
            return {"input_ids": ids, "labels": ids}
        shape = self.batch, self.tokens, self.fields["hidden_size"]
        return {"inputs_embeds": torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_()}

    def estimate(self) -> Memory:
        """Without a GPU."""
        return opfuse.memory(
            self.model("meta"),
            recipe=self.recipe,
            optimizer=self.optimizer,
            checkpointing=self.checkpointing,
            loss=self.loss,
            **self.options,
            **self.inputs("meta"),
        )


CASES = (
    Case("bf16, called", LLAMA_8B, optimizer="adamw"),
    Case("fp8_current, called", LLAMA_8B, "fp8_current", optimizer="adamw"),
    Case("fp8_current, compiled", LLAMA_8B, "fp8_current", tokens=8192, compile=True),
    Case("fp8_block, compiled", LLAMA_8B, "fp8_block", compile=True),
    Case("fp8_current, keep=quantized, called", LLAMA_8B, "fp8_current", tokens=8192, keep="quantized"),
    Case("bf16, checkpointed layers", LLAMA_8B, tokens=8192, checkpointing="layers"),
    Case("fp8_current, checkpointed layers", LLAMA_8B, "fp8_current", tokens=8192, checkpointing="layers"),
    Case(
        "1.1 B, fp8_current, AdamW over masters",
        LLAMA_1B,
        "fp8_current",
        layers=22,
        tokens=2048,
        batch=8,
        head=32768,
        compile=True,
        optimizer="adamw_masters",
        options={"main_grads": True},
    ),
    Case("Mixtral, fp8_current", MIXTRAL, "fp8_current", layers=2, tokens=8192, of="Mixtral"),
    Case("head of 128256 words, bf16", LLAMA_8B, layers=1, tokens=8192, head=128256, optimizer="adamw_foreach"),
    Case(
        "head of 128256 words, fp8_current, fused loss", LLAMA_8B, "fp8_current", layers=1, tokens=8192, head=128256, loss="fused"
    ),
    Case("bf16, compiled: not what is estimated", LLAMA_8B, compile=True, limit=None),
)


def trainable(case: Case) -> nn.Module:
    """The model on the GPU, as its estimate has it."""
    model = case.model("cuda")
    if case.kind:
        opfuse.fuse_(model, case.recipe, pack=True, loss=case.loss)
    inner = model.model if case.head else model
    if case.checkpointing == "layers":
        for layer in inner.layers:
            layer.forward = _checkpointed(layer.forward)
    if case.compile:
        compiled(inner)
    return model


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


class Training:
    """Steps of a case. masters: fp32 weights with gradients, by the parameters that are cast from them."""

    def __init__(self, case: Case) -> None:
        self.model, self.inputs = trainable(case), case.inputs("cuda")
        own = [p for name, p in self.model.named_parameters() if case.head or "embed" not in name]
        self.masters: dict[nn.Parameter, torch.Tensor] = {}
        if case.optimizer == "adamw_masters":
            self.masters = {p: p.detach().float().clone() for p in own}
            for master in self.masters.values():
                master.grad = torch.zeros_like(master)
        fused = {"fused": case.optimizer != "adamw_foreach"}
        trained = [*self.masters.values()] or own
        self.optimizer = None if case.optimizer == "none" else torch.optim.AdamW(trained, lr=1e-6, **fused)

    def step(self) -> tuple[int, int]:
        """One step. Bytes that are allocated before it, and after the forward pass."""
        for each in (*self.model.parameters(), *self.inputs.values()):
            each.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output = self.model(**self.inputs)
        loss = getattr(output, "loss", None)
        root = output.last_hidden_state if loss is None else loss
        del output
        forward = torch.cuda.memory_allocated()
        root.backward(None if loss is not None else root.detach())
        for parameter, master in self.masters.items():
            if parameter.grad is not None and master.grad is not None:
                master.grad.add_(parameter.grad)
                parameter.grad = None
        if self.optimizer is not None:
            self.optimizer.step()
        with torch.no_grad():
            for parameter, master in self.masters.items():
                parameter.copy_(master)
        return before, forward - before - (root.nbytes if loss is None else 0)


@dataclass(frozen=True)
class Measured:
    """Bytes above what was there before the case. first: the peak of the first two steps."""

    static: int
    saved: int
    peak: int
    first: int


def measure(case: Case) -> Measured:
    """On this GPU."""
    base = torch.cuda.memory_allocated()
    training = Training(case)
    peaks = []
    for _ in range(WARM + 1):
        before, saved = training.step()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - base)
    return Measured(before - base, saved, peaks[-1], max(peaks[:2]))


def _free() -> None:
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()


def _warm() -> None:
    """Scratch memory of libraries, which stays, for both threads of autograd."""
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (x @ x).sum().backward()
    with opfuse.autocast(recipe=recipes.recipe_of("fp8_current", {})):
        opfuse.ops.Linear(4096, 4096, device="cuda", dtype=torch.bfloat16)(x).sum().backward()
    x.grad = None


def name_of(case: Case) -> str:
    """What figures are called."""
    return f"memory of {case.name}, {case.layers} layers, {case.batch}x{case.tokens} tokens"


def records(cases: tuple[Case, ...] = CASES) -> Iterator[dict[str, Any]]:
    """Figures for the record: how far estimates are off, in percent of the measured peak."""
    _warm()
    for case in cases:
        found, measured = case.estimate(), _measured(case)
        if measured is None:
            continue
        off = 100 * abs(found.peak / measured.peak - 1)
        show(case, found, measured)
        met = None if case.limit is None else off <= case.limit
        yield {"name": name_of(case), "value": off, "unit": "% off the peak", "limit": case.limit, "met": met}


def _measured(case: Case) -> Measured | None:
    """None if the case failed, which is printed."""
    try:
        return measure(case)
    except Exception:  # of any type, so that the others run
        traceback.print_exc()
        return None
    finally:
        _free()


def show(case: Case, found: Memory, measured: Measured | None) -> None:
    """Each part, estimated and measured, in MiB."""
    static = sum(found.held.values())
    pairs = {"static": static, "saved": found.saved, "peak": found.peak, "first": found.first_peak}
    print(f"{name_of(case)}: {found.place}", flush=True)
    for name, estimate in pairs.items():
        real = None if measured is None else getattr(measured, name)
        beside = "" if real is None else f" {real / MIB:12.2f} {estimate / max(real, 1):8.4f}"
        print(f"  {name:8s} {estimate / MIB:12.2f}{beside}", flush=True)


def main() -> None:
    """Print estimates, and what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--estimate-only", action="store_true", help="measure nothing; needs no GPU")
    parser.add_argument("--case", type=int, nargs="+", help="only these, by number from 0")
    chosen = parser.parse_args()
    cases = CASES if chosen.case is None else tuple(CASES[i] for i in chosen.case)
    start = time.perf_counter()
    if chosen.estimate_only:
        for case in cases:
            show(case, case.estimate(), None)
    else:
        for record in records(cases):
            print(record, flush=True)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
