"""Pre-trains a Llama of 1.1 B parameters under a recipe: ``python -m benchmarks.pretrain --recipe fp8_current --seed 0``.

The model is transformers' LlamaForCausalLM with random weights, converted by ``fuse_(pack=True)`` and compiled layer by layer,
for the reasons that :mod:`benchmarks.converted` gives; "bf16" is the same model, compiled in the same way and not converted. The
text is what the machine has (:mod:`benchmarks.corpus`). Its tokens come in windows, each once before any comes again, in an order
that the seed gives: which windows a step reads follows from its number alone.

Weights are bf16, and ``--optimizer adamw``, torch's fused AdamW, updates fp32 masters, since bf16 would round most of its updates
away. ``adamw8bit``, torchao's with moments in 8 bits, updates the weights themselves, rounded at random, so that they move as
asked on average. The gradients of micro-batches are summed in fp32. No parameter has a hook, which would keep it from a joined
product.

An element of the model takes 20 bytes with ``adamw``: weight 2, its gradient 2, master 4, sum of gradients 4, moments 8. With
``adamw8bit`` it takes 6 where a step is one micro-batch: weight 2, gradient 2, moments 2, and scales of 4 bytes for each 256
moments. That leaves room for the activations of a Llama of 8 B parameters, 48 GB, on one GPU of 141 GB::

    --layers 32 --hidden 4096 --inner 14336 --heads 32 --groups 8 --vocabulary 128256 --loss fused --optimizer adamw8bit \\
    --micro 4 --step-tokens 8192

A run stops after ``--minutes``, writes its checkpoint under ``--checkpoint``, and goes on from there with ``--resume``: on a CPU
with the bits of a run that did not stop, on a GPU as far as torch's own kernels repeat theirs. ``--out`` gets a JSON file of
each run. ``--table FILE …`` merges such files into ``--file``, beside the runs that it has, of which docs/performance.md tells.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

import opfuse
from benchmarks import stamp
from benchmarks.converted import SDPA, compiled, unmasked
from benchmarks.corpus import PARTS, Corpus, corpus, told
from opfuse import recipes
from opfuse.errors import ConfigError, OutputError, TrainingError, describe

PLAIN = "bf16"
KINDS = (PLAIN, *(kind for kind in recipes.RECIPES if kind != "custom"))
FUSED, QUANTIZED = "fused", "quantized"
LOSSES = ("plain", "compiled", FUSED, QUANTIZED)
OF_HEADS: Mapping[str, Any] = {"delayed": recipes.Float8CurrentScaling()}
"""Recipes of a head whose loss is fused, where that of the layers does not do: it keeps no scales from step to step."""

DEFAULT = "default"
KEEPS = (DEFAULT, "all", "recompute", "quantized")
"""transformers' own; the same in torch.compile; that of ``fuse_(loss="fused")``, in bf16 around a model that is torch's but for
:data:`LEAST`; the same with products of the head under the recipe.
"""

LEAST = "model.layers.0.self_attn.o_proj"
"""A product to convert where ``fuse_`` wants one and none is to be converted: without a recipe it computes what it did."""

FILE = stamp.RESULTS / "pretrain_h200.json"
BETAS = (0.9, 0.95)
WARM = 3
"""First steps of a piece, which compile and plan: they count in no speed."""

LAST = 0.05
"""The part of the steps whose mean is the training loss at the end."""

SHARED = ("versions", "corpus")
"""What a file of results says once for all of its runs."""

POINTS = 100
"""Of a curve in the file of results, at most."""

GIB = 2**30
COLUMNS = ("step", "tokens", "loss", "rate", "norm", "seconds")
"""Of each step: loss in nats per token before its update, learning rate, norm of the gradient before it is clipped, wall time."""

CHECKED = ("step", "tokens", "loss", "bits")
"""Of each validation: after how many steps and tokens, nats per token, bits per byte."""

Record = dict[str, Any]
Curve = dict[str, list[float]]


@dataclass(frozen=True)
class Settings:
    """A run: two with the same settings train on the same tokens in the same order, from the same weights whatever the recipe.

    tokens: of the run; it sets the length of the schedule. step_tokens: of a step. sequence: tokens of a window. micro: windows
    of a micro-batch. groups: heads of keys. vocabulary: rows of embedding and head, of which the text uses as many as its
    tokenizer has. keep: of the recipe, "default" or one of its values. optimizer: of :data:`UPDATES`. rate: the highest learning
    rate, reached after warm_up of the steps; a cosine brings it down to floor of it. decay: of matrices. clip: norm of the
    gradient. validation_tokens: held out, the same ones every ``every`` steps. compile: whether torch.compile takes each layer.
    graph: whether passes, clipping and a step of ``adamw8bit`` are repeated as one CUDA graph. Masters are updated outside of it,
    since their gradients stay from step to step.
    """

    recipe: str = PLAIN
    seed: int = 0
    tokens: int = 20_000_000
    step_tokens: int = 131_072
    sequence: int = 2048
    micro: int = 16
    layers: int = 22
    hidden: int = 2048
    inner: int = 5632
    heads: int = 32
    groups: int = 4
    vocabulary: int = 32_768
    loss: str = "plain"
    keep: str = DEFAULT
    optimizer: str = "adamw"
    rate: float = 3e-4
    warm_up: float = 0.1
    floor: float = 0.1
    decay: float = 0.1
    clip: float = 1.0
    validation_tokens: int = 262_144
    every: int = 10
    compile: bool = True
    graph: bool = False

    def __post_init__(self) -> None:
        for what in ("step_tokens", "validation_tokens"):
            if getattr(self, what) % (self.micro * self.sequence) or getattr(self, what) == 0:
                wanted, cure = f"a multiple of micro * sequence, {self.micro * self.sequence}", "choose other sizes"
                raise ConfigError(describe(what, wanted=wanted, got=getattr(self, what), cure=cure))

    @property
    def steps(self) -> int:
        """Of the run."""
        return math.ceil(self.tokens / self.step_tokens)

    @property
    def name(self) -> str:
        """What files of the run are called: the recipe and what is not as by default."""
        others = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self) if field.name not in ("recipe",))
        changed = [f"{name}-{value}" for name, value in others if name == "seed" or value != getattr(Settings, name)]
        return "_".join((self.recipe, *changed))

    def rate_of(self, step: int) -> float:
        """The learning rate of the update with this number, from 0."""
        rise = max(1, round(self.warm_up * self.steps))
        if step < rise:
            return self.rate * (step + 1) / rise
        fallen = 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, self.steps - rise)))
        return self.rate * (self.floor + (1 - self.floor) * fallen)


def llama(settings: Settings, device: str) -> nn.Module:
    """With random weights that follow from the seed, in bf16."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=settings.hidden,
        intermediate_size=settings.inner,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.groups,
        max_position_embeddings=settings.sequence,
        rms_norm_eps=1e-5,
        vocab_size=settings.vocabulary,
        use_cache=False,
        attn_implementation=unmasked() if settings.graph else SDPA,
    )
    torch.manual_seed(settings.seed)
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model


def model_of(settings: Settings, device: str) -> Any:
    """Converted and compiled as the settings say."""
    model: Any = llama(settings, device)
    keep = {} if settings.keep == DEFAULT else {"keep": settings.keep}
    recipe = None if settings.recipe == PLAIN else recipes.recipe_of(settings.recipe, keep)
    is_fused = settings.loss in (FUSED, QUANTIZED)
    head = {"lm_head": OF_HEADS.get(settings.recipe, "default")} if settings.loss == QUANTIZED else None
    if recipe is not None:
        opfuse.fuse_(model, recipe, policy=head, pack=True, loss="fused" if is_fused else "own")
    elif is_fused:
        opfuse.fuse_(model, filter_fn=lambda _, path: path == LEAST, loss="fused")
    if settings.recipe == "delayed":
        opfuse.prepare_delayed(model, recipe)
    if settings.loss == "compiled":
        model.loss_function = torch.compile(model.loss_function)
    if settings.compile:
        compiled(model.model)
    return model


@functools.lru_cache(maxsize=2)
def order(windows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Which window comes when in an epoch, counted from 0."""
    return np.random.default_rng((seed, epoch)).permutation(windows)


def windows_of(windows: int, seed: int, first: int, count: int) -> list[int]:
    """The numbers of ``count`` windows, ``first`` windows after the start of the run."""
    places = (divmod(place, windows) for place in range(first, first + count))
    return [int(order(windows, seed, epoch)[at]) for epoch, at in places]


class Data:
    """Windows of tokens, as many as a corpus has whole ones. ConfigError if it has too few of them."""

    def __init__(self, found: Corpus, settings: Settings) -> None:
        self.corpus, self.settings = found, settings
        held_out = len(found.held_out) // settings.sequence
        self.windows, wanted = len(found.train) // settings.sequence, settings.validation_tokens // settings.sequence
        if found.about["words"] > settings.vocabulary or held_out < wanted or not self.windows:
            what = f"{found.about['words']} words, {self.windows} windows to train on, {held_out} held out"
            cure = "choose a larger vocabulary, fewer validation_tokens, or more text"
            least = f"at most {settings.vocabulary} words, at least 1 and {wanted} windows"
            raise ConfigError(describe("data", wanted=least, got=what, cure=cure))
        self.chosen = np.linspace(0, held_out - 1, wanted).astype(int).tolist()

    def of_step(self, step: int) -> torch.Tensor:
        """The windows of a step, counted from 0: int64 (windows, sequence)."""
        count = self.settings.step_tokens // self.settings.sequence
        return self._taken(self.corpus.train, windows_of(self.windows, self.settings.seed, step * count, count))

    def held_out(self) -> torch.Tensor:
        """Windows that nothing trains on, spread over all of these files: the same ones for every seed."""
        return self._taken(self.corpus.held_out, self.chosen)

    def bytes_of(self, windows: torch.Tensor) -> int:
        """Bytes that are predicted in ``windows``: of all tokens but the first of each."""
        return int(self.corpus.lengths[windows[:, 1:].numpy()].sum())

    @property
    def epochs(self) -> float:
        """How often the run reads the text."""
        return self.settings.steps * self.settings.step_tokens / (self.windows * self.settings.sequence)

    def _taken(self, tokens: npt.NDArray[np.uint16], numbers: Sequence[int]) -> torch.Tensor:
        length = self.settings.sequence
        return torch.from_numpy(np.stack([tokens[at * length : (at + 1) * length] for at in numbers]).astype(np.int64))


class OnMasters:
    """torch's fused AdamW over fp32 masters of the weights, whose gradients are the sums of those of micro-batches.

    updated: what the optimizer updates, by the names of the weights. in_graph: whether a CUDA graph of a step has the update.
    """

    in_graph = False

    def __init__(self, weights: Mapping[str, torch.Tensor], settings: Settings) -> None:
        self.weights = weights
        self.updated = {name: weight.detach().float().clone() for name, weight in weights.items()}
        for master in self.updated.values():
            master.grad = torch.zeros_like(master)
        groups = decayed(self.updated.values(), settings.decay)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=settings.rate, betas=BETAS, fused=True)

    def backward(self, loss: torch.Tensor, part: float) -> None:
        """Add ``part`` of the gradients of a micro-batch's loss."""
        loss.backward()
        for name, weight in self.weights.items():
            gradient, target = weight.grad, self.updated[name].grad
            if gradient is not None and target is not None:
                target.add_(gradient, alpha=part)
            weight.grad = None

    def set_rate(self, rate: float) -> None:
        """The learning rate of the next step."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def step(self) -> None:
        """Update, and forget the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.cast()

    def load(self, state: Record) -> None:
        """What the optimizer knew."""
        self.optimizer.load_state_dict(state)

    @torch.no_grad()
    def cast(self) -> None:
        """Write what was updated into the weights."""
        for name, weight in self.weights.items():
            weight.copy_(self.updated[name])


class OnWeights:
    """torchao's AdamW with moments in 8 bits on the bf16 weights themselves, rounded at random; nothing else is held.

    Gradients are those that autograd leaves: in bf16 if a step is one micro-batch, else summed in fp32. torchao makes its
    learning rate and its counts of steps on the default device: here on that of the weights, for a CUDA graph to read them.
    """

    in_graph = True

    def __init__(self, weights: Mapping[str, torch.Tensor], settings: Settings) -> None:
        from torchao.optim import AdamW8bit

        self.updated = weights
        if settings.step_tokens > settings.micro * settings.sequence:
            for weight in weights.values():
                weight.grad_dtype = torch.float32
        self._device = next(iter(weights.values())).device
        groups = decayed(weights.values(), settings.decay)
        with self._device:
            self.optimizer: torch.optim.Optimizer = AdamW8bit(groups, lr=settings.rate, betas=BETAS, bf16_stochastic_round=True)

    def backward(self, loss: torch.Tensor, part: float) -> None:
        """Add the gradients of ``part`` of a micro-batch's loss."""
        (loss * part).backward()

    def set_rate(self, rate: float) -> None:
        """The learning rate of the next step, a tensor."""
        for group in self.optimizer.param_groups:
            group["lr"].fill_(rate)

    def step(self) -> None:
        """Update, and forget the gradients."""
        with self._device:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def load(self, state: Record) -> None:
        """What the optimizer knew: torch moves neither the learning rate nor the counts to the device of the weights."""
        self.optimizer.load_state_dict(state)
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"].to(self._device)
        for known in self.optimizer.state.values():
            known["step"] = known["step"].to(self._device)

    def cast(self) -> None:
        """Weights are what is updated."""


UPDATES: Mapping[str, type[OnMasters | OnWeights]] = {"adamw": OnMasters, "adamw8bit": OnWeights}
"""What updates the weights, by the setting ``optimizer``."""


def decayed(tensors: Iterable[torch.Tensor], decay: float) -> list[Record]:
    """Groups of an optimizer, of which matrices decay."""
    matrices, others = [], []
    for each in tensors:
        (matrices if each.ndim > 1 else others).append(each)
    return [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


def clipped(tensors: Iterable[torch.Tensor], most: float) -> torch.Tensor:
    """The norm of all gradients, in fp32 whatever their dtype; then it is ``most`` at most.

    torch scales all gradients in a few launches if the factor has their dtype, else in one launch each: on an H200 201 gradients
    in bf16 took 5.0 ms by a factor in fp32, and 2.4 ms in fp32. So of gradients in bf16 the factor is rounded, the same for all.
    """
    given = [each for each in tensors if each.grad is not None]
    gradients = [each.grad for each in given if each.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each, dtype=torch.float32) for each in gradients]))
    nn.utils.clip_grads_with_norm_(given, most, norm.to(gradients[0].dtype))
    return norm


class Run:
    """A run, how far it has come, and what came of it. piece: what a process made of it."""

    def __init__(self, settings: Settings, data: Data, device: str) -> None:
        self.settings, self.data, self.device = settings, data, device
        self.began = time.perf_counter()
        self.model = model_of(settings, device)
        self.weights = dict(self.model.named_parameters())
        self.update = UPDATES[settings.optimizer](self.weights, settings)
        if self.update.in_graph:
            step, parts = self.passes_and_update, (self.model, self.update.optimizer)
        else:
            step, parts = self.passes, (self.model,)
        self._train_step = opfuse.graphed_step(step, *parts) if settings.graph else step
        self.held_out = data.held_out()
        self.step = self.first = 0
        self.curve: Curve = {name: [] for name in COLUMNS}
        self.validation: Curve = {name: [] for name in CHECKED}
        self.steady: list[float] = []
        self.spent = {"start": 0.0, "first steps": 0.0, "steps": 0.0, "validation": 0.0}
        self.peak = 0

    @property
    def tokens(self) -> int:
        """That the run has read."""
        return self.step * self.settings.step_tokens

    def minutes(self) -> float:
        """Since this piece began."""
        return (time.perf_counter() - self.began) / 60

    def begin(self) -> None:
        """Everything is there now; what follows counts in the peak."""
        self.spent["start"] += time.perf_counter() - self.began
        self.first = self.step
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def train(self) -> None:
        """One step."""
        start = time.perf_counter()
        rate, parts = self.settings.rate_of(self.step), self.data.of_step(self.step).split(self.settings.micro)
        self.update.set_rate(rate)
        loss, norm = self._train_step([part.to(self.device) for part in parts])
        if not self.update.in_graph:
            self.update.step()
        self.step += 1
        row = (self.step, self.tokens, loss.item(), rate, norm.item(), time.perf_counter() - start)
        for name, value in zip(COLUMNS, row):
            self.curve[name].append(value)
        warm = self.step - self.first <= WARM
        self.spent["first steps" if warm else "steps"] += row[-1]
        self.steady += () if warm else (row[-1],)
        if not math.isfinite(row[2]):
            cure = "choose a lower rate, or a recipe with more range"
            raise TrainingError(describe(f"loss of step {self.step}", wanted="a finite number", got=row[2], cure=cure))

    def passes(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Leave the gradients of a step's micro-batches, clipped; return its loss, and their norm before."""
        whole, part = torch.zeros((), device=self.device), 1 / len(parts)
        for windows in parts:
            loss: torch.Tensor = self.model(input_ids=windows, labels=windows).loss
            self.update.backward(loss, part)
            whole += part * loss.detach().float()
        return whole, clipped(self.update.updated.values(), self.settings.clip)

    def passes_and_update(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, and the weights follow the gradients."""
        found = self.passes(parts)
        self.update.step()
        return found

    def validate(self) -> None:
        """The loss of what is held out, in evaluation mode."""
        start = time.perf_counter()
        self.model.eval()
        parts = self.held_out.split(self.settings.micro)
        with torch.no_grad():
            losses = [self.model(input_ids=part, labels=part).loss.float() for part in (each.to(self.device) for each in parts)]
        self.model.train()
        loss = torch.stack(losses).double().mean().item()
        predicted = self.held_out.numel() - len(self.held_out)
        bits = loss * predicted / self.data.bytes_of(self.held_out) / math.log(2)
        for name, value in zip(CHECKED, (self.step, self.tokens, loss, bits)):
            self.validation[name].append(value)
        self.spent["validation"] += time.perf_counter() - start

    def most(self) -> int:
        """Bytes on the GPU at once, at most; 0 on a CPU. With a graph, what torch holds: the memory of a graph is never free."""
        if self.device != "cuda":
            return self.peak
        return max(self.peak, torch.cuda.memory_reserved() if self.settings.graph else torch.cuda.max_memory_allocated())

    def save(self, path: Path) -> None:
        """Write where the run stands: of the weights, what is updated, of which they are the casts."""
        others = {name: value for name, value in self.model.state_dict().items() if name not in self.weights}
        generators = {"cpu": torch.get_rng_state(), **({"cuda": torch.cuda.get_rng_state()} if self.device == "cuda" else {})}
        came = {"curve": self.curve, "validation": self.validation, "steady": self.steady, "spent": self.spent}
        optimizer, updated = self.update.optimizer.state_dict(), {k: v.detach() for k, v in self.update.updated.items()}
        state = {"updated": updated, "others": others, "optimizer": optimizer, "generators": generators}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save({**state, **came, **self._same(), "step": self.step, "peak": self.most()}, partial)
        os.replace(partial, path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint. OutputError if it is of another run."""
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        for name, value in self._same().items():
            if found[name] != value:
                cure = "go on with what the run began with, or begin anew without --resume"
                raise OutputError(describe(f"{path} {name}", wanted=f"{found[name]}", got=f"{value}", cure=cure))
        with torch.no_grad():
            for name, updated in self.update.updated.items():
                updated.copy_(found["updated"][name])
        self.update.cast()
        self.model.load_state_dict({**{name: weight.detach() for name, weight in self.weights.items()}, **found["others"]})
        self.update.load(found["optimizer"])
        torch.set_rng_state(found["generators"]["cpu"])
        if self.device == "cuda":
            torch.cuda.set_rng_state(found["generators"]["cuda"])
        self.step, self.peak = found["step"], found["peak"]
        self.curve, self.validation, self.steady, self.spent = (
            found[name] for name in ("curve", "validation", "steady", "spent")
        )

    def _same(self) -> Record:
        """What a checkpoint is for."""
        parts = {part: self.data.corpus.about[part]["sha256"] for part in PARTS}
        return {"settings": asdict(self.settings), "corpus": parts}

    def record(self) -> Record:
        """What the run's file says."""
        whole = sum(self.spent.values())
        return {
            "name": self.settings.name,
            "settings": asdict(self.settings),
            **origin(self.device),
            "products": products(self.settings.recipe),
            "corpus": self.data.corpus.about,
            "parameters": sum(weight.numel() for weight in self.weights.values()),
            "finished": self.step >= self.settings.steps,
            "epochs": self.data.epochs,
            "figures": figures(self.curve, self.validation, self.steady, self.settings.step_tokens, self.most()),
            "seconds": whole,
            "shares": {name: value / whole for name, value in self.spent.items()} if whole else {},
            "curve": self.curve,
            "validation": self.validation,
        }


def products(recipe: str) -> str:
    """How products run here: native or emulated."""
    return "native" if recipe == PLAIN else recipes.support(recipe).status


@functools.cache
def origin(device: str) -> Record:
    """When and of which code this process measures, and of the machine and what runs on it."""
    import tokenizers
    import transformers

    here = {"device": "cpu", "python": platform.python_version(), "opfuse": opfuse.__version__, "torch": torch.__version__}
    found = stamp.versions() if device == "cuda" else here
    libraries = {"transformers": transformers.__version__, "tokenizers": tokenizers.__version__}
    return {**stamp.moment(), "versions": {**found, **libraries}}


def figures(curve: Curve, validation: Curve, steady: Sequence[float], step_tokens: int, peak: int) -> Record:
    """What a table tells of a run; None for what is not known yet."""
    last = curve["loss"][-math.ceil(LAST * len(curve["loss"])) :]
    return {
        "tokens": curve["tokens"][-1] if last else 0,
        "training loss": statistics.fmean(last) if last else None,
        "validation loss": validation["loss"][-1] if validation["loss"] else None,
        "bits per byte": validation["bits"][-1] if validation["bits"] else None,
        "tokens per second": step_tokens / statistics.median(steady) if steady else None,
        "peak GiB": peak / GIB,
    }


def pretrain(
    settings: Settings,
    data: Data,
    out: Path,
    *,
    device: str,
    minutes: float = math.inf,
    steps: float = math.inf,
    checkpoint: Path | None = None,
    resume: bool = False,
) -> Run:
    """Train until the run is done, or until this piece of it has taken its minutes or steps. Writes the run's file, and a
    checkpoint, which a run that is done has no more.
    """
    run, kept = Run(settings, data, device), checkpoint and checkpoint / f"{settings.name}.pt"
    if resume and kept is not None and kept.exists():
        run.load(kept)
    run.begin()
    try:
        while run.step < settings.steps and run.minutes() < minutes and run.step - run.first < steps:
            run.train()
            if run.step == settings.steps or run.step % settings.every == 0:
                run.validate()
                written(run, out)
    finally:
        written(run, out)
    if kept is not None and run.step >= settings.steps:
        kept.unlink(missing_ok=True)
    elif kept is not None:
        run.save(kept)
    return run


def ended(settings: Settings, out: Path) -> bool:
    """Whether the file of a run says that it is done."""
    file = out / f"{settings.name}.json"
    return file.exists() and bool(json.loads(file.read_text(encoding="utf-8"))["finished"])


def written(run: Run, out: Path) -> None:
    """Write the run's file, and say where it stands."""
    out.mkdir(parents=True, exist_ok=True)
    found = run.record()
    (out / f"{run.settings.name}.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
    told = ", ".join(f"{name} {value:.4g}" for name, value in found["figures"].items() if value is not None)
    print(f"{run.settings.name} step {run.step} of {run.settings.steps}, {run.minutes():.1f} min: {told}", flush=True)


def thinned(curve: Mapping[str, Sequence[float]], points: int = POINTS) -> Curve:
    """A curve with at most ``points`` of its points at equal distances, the first and the last among them."""
    length = len(next(iter(curve.values())))
    at = range(length) if length <= points else [round(i * (length - 1) / (points - 1)) for i in range(points)]
    return {name: [rounded(values[i]) for i in at] for name, values in curve.items()}


def rounded(value: float) -> float:
    """Six digits of a number that is not whole."""
    return value if isinstance(value, int) else float(f"{value:.6g}")


def merged(runs: Sequence[Record], earlier: Mapping[str, Any] | None = None) -> Record:
    """The file of results, with the runs of an ``earlier`` one that were not run again.

    ConfigError if two runs have one name, or were not on one machine with the same packages and text.
    """
    names = [run["name"] for run in runs]
    if len({*names}) < len(names):
        raise ConfigError(describe("runs", wanted="different names", got=", ".join(names), cure="name each file once"))
    if earlier is not None:
        shared = {name: value for name, value in earlier.items() if name in SHARED}
        runs = [*runs, *({**run, **shared} for run in earlier["runs"] if run["name"] not in names)]
    digests = ([run["corpus"][part]["sha256"] for part in PARTS] for run in runs)
    if len({json.dumps([run["versions"], each]) for run, each in zip(runs, digests)}) != 1:
        got, cure = f"{len(runs)} runs that differ in one of these", "run all on one machine, with one folder of data"
        raise ConfigError(describe("runs", wanted="one machine, text and set of packages", got=got, cure=cure))
    shared = {name: runs[0][name] for name in SHARED}
    thin = ({**run, "curve": thinned(run["curve"]), "validation": thinned(run["validation"])} for run in runs)
    own = [{name: value for name, value in run.items() if name not in SHARED} for run in thin]
    own.sort(key=lambda run: (run["settings"]["vocabulary"], KINDS.index(run["settings"]["recipe"]), run["name"]))
    return {"script": "python -m benchmarks.pretrain", **shared, "runs": own}


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """A flag for each setting, and what is no setting of a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices: Mapping[str, tuple[str, ...]] = {"recipe": KINDS, "loss": LOSSES, "optimizer": tuple(UPDATES), "keep": KEEPS}
    for field in dataclasses.fields(Settings):
        flag, default = f"--{field.name.replace('_', '-')}", getattr(Settings, field.name)
        if isinstance(default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default)
        else:
            parser.add_argument(flag, type=type(default), default=default, choices=choices.get(field.name))
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so many, of start, compilation and all")
    parser.add_argument(
        "--data", type=Path, default=Path("build/corpus"), help="the folder of tokens, made of all text if it is not there"
    )
    parser.add_argument("--out", type=Path, default=Path("build/pretrain"), help="the folder of the run's JSON file")
    parser.add_argument("--checkpoint", type=Path, help="a folder for what the run goes on from, 13 GB of the 1.1 B model")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint, if there is one")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--table", type=Path, nargs="+", help="merge these files of runs into --file, beside those it has, and train nothing"
    )
    parser.add_argument("--file", type=Path, default=FILE)
    found = parser.parse_args(given)
    if found.resume and found.checkpoint is None:
        parser.error("--resume wants --checkpoint DIR")
    return found


def main(given: Sequence[str] | None = None) -> None:
    chosen = arguments(sys.argv[1:] if given is None else given)
    if chosen.table:
        runs = [json.loads(path.read_text(encoding="utf-8")) for path in chosen.table]
        earlier = json.loads(chosen.file.read_text(encoding="utf-8")) if chosen.file.exists() else {"runs": []}
        chosen.file.write_text(json.dumps(merged(runs, earlier), indent=1) + "\n", encoding="utf-8")
        return
    settings = Settings(**{field.name: getattr(chosen, field.name) for field in dataclasses.fields(Settings)})
    if chosen.resume and ended(settings, chosen.out):
        print(f"{settings.name} has ended")
        return
    found = corpus(chosen.data)
    print(*told(found.about), sep="\n", flush=True)
    data, kept = Data(found, settings), chosen.checkpoint
    limits = {"minutes": chosen.minutes, "checkpoint": kept, "resume": chosen.resume}
    pretrain(settings, data, chosen.out, device=chosen.device, **limits)


if __name__ == "__main__":
    main()
