"""The device memory of a training step, estimated without a device from a model on meta.

Each rank holds from step to step: weights, each storage once, quantized ones by their planes; buffers; the optimizer's states
(:data:`OPTIMIZERS`); main gradients in fp32, where there are any; and the inputs of the call.

The rest comes and goes along a timeline, which both passes write on the meta device (``inspect/ledger.py``): the forward pass
adds what layers save, the head and the loss add logits, the backward pass frees layer by layer while gradients appear, since
``zero_grad`` has let go of them. Beside that stands what one op needs for a while: its results before its inputs are freed,
planes of casts, gradients of weights. The optimizer's step comes last, with all gradients. The peak is the highest point of this
line, and its place the layer whose weights were read last.

Sharded by FSDP2 over ``world`` ranks, weights, gradients and states are a part of each layer. Gathered are weights of the layer
that computes and of the next one, and those of no layer (embedding, last norm, head) all the time; gradients of a layer are whole
until the next layer of the backward pass is through, while they are reduced.

The figure is that of ``torch.cuda.max_memory_allocated``: blocks of 512 bytes, without what the allocator reserves beyond them,
the CUDA context, and scratch memory of cuBLAS, of which a process has some tens of MiB. Ops of torch are those of eager mode:
layers in torch.compile hold less of what is not converted. Products and kernels are those of an H200. ``first_peak`` is that of
the first two steps, which are interpreted and free some tensors later than the programs that repeat them.
"""

from __future__ import annotations

import copy
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from opfuse.convert.converted import converted
from opfuse.convert.fuse import fuse_
from opfuse.convert.head_loss import LossKind
from opfuse.core.operation import FusibleOperation
from opfuse.domains import SIZE, checked_arguments
from opfuse.errors import ConversionError, describe, nearest
from opfuse.inspect.alike import alike, counted, starred
from opfuse.inspect.ledger import AllocatedBlock, Ledger, curve, rounded_up
from opfuse.inspect.observe import parts_of, undone
from opfuse.recipes import RECIPES, Recipe, as_recipe, autocast, recipe_of
from opfuse.runtime.plans.misses import trial_plans
from opfuse.tensors.masters import stored_in
from opfuse.torch_private.tensors import number_of

GIB = 2**30


class OptimizerMemory(NamedTuple):
    """What an optimizer takes for a parameter, by its elements and their bytes. state: all the time; step: while it steps."""

    state: Callable[[int, int], int]
    step: Callable[[int, int], int] = lambda count, size: 0


def _moments_of_8_bits(count: int, size: int) -> int:
    """Two moments of torchao's AdamW8bit: codes, an fp32 scale for 256 of them, 256 values; small ones are not coded."""
    if count < 4096 or count % 256:
        return 2 * rounded_up(count * size)
    return 2 * (rounded_up(count) + rounded_up(4 * count // 256) + 1024)


OPTIMIZERS: Mapping[str, OptimizerMemory] = {
    "none": OptimizerMemory(lambda count, size: 0),
    "sgd": OptimizerMemory(lambda count, size: 0),
    "sgd_momentum": OptimizerMemory(lambda count, size: rounded_up(count * size)),
    "adamw": OptimizerMemory(lambda count, size: 2 * rounded_up(count * size)),
    "adamw_foreach": OptimizerMemory(
        lambda count, size: 2 * rounded_up(count * size), lambda count, size: rounded_up(count * size)
    ),
    "adamw_masters": OptimizerMemory(lambda count, size: 3 * rounded_up(4 * count), lambda count, size: rounded_up(4 * count)),
    "adamw8bit": OptimizerMemory(_moments_of_8_bits),
}
"""adamw: torch's with ``fused=True``; adamw_foreach: as by default on a GPU, which needs a copy of a moment while it steps.
adamw_masters: over fp32 masters, whose gradients are made for the step unless they are main gradients. adamw8bit: torchao's.
"""

Checkpointing = Literal["none", "layers"]


class LayerMemory(NamedTuple):
    """Bytes of one layer on a rank. saved: at the end of the forward pass."""

    path: str
    weights: int
    gradients: int
    optimizer: int
    saved: int


class Proposal(NamedTuple):
    """A change of settings, on top of those before it, and the peak with all of them."""

    change: str
    peak: int
    fits: bool

    def __str__(self) -> str:
        return f"{self.change:<28} {_gib(self.peak)}{'  fits' if self.fits else ''}"


@dataclass(frozen=True)
class MemorySettings:
    """What a step is estimated under."""

    recipe: str
    optimizer: str
    world: int
    checkpointing: str
    loss: str
    main_grads: bool


@dataclass(frozen=True)
class Memory:
    """Bytes of a training step on each rank.

    held: from step to step, by what it is. saved: at the end of the forward pass, for the backward pass, of which logits and
    others that belong to no layer are a part. gradients: all of them, after the backward pass. peak: the most at once, at
    ``place``; at_peak: of what it consists. first_peak: of the first two steps, which no program repeats. layers: in their order.
    """

    settings: MemorySettings
    held: Mapping[str, int]
    saved: int
    gradients: int
    peak: int
    place: str
    at_peak: Mapping[str, int]
    first_peak: int
    layers: tuple[LayerMemory, ...] = field(repr=False)
    budget: int | None = None
    proposals: tuple[Proposal, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether every step stays within the budget; True without one."""
        return self.budget is None or max(self.peak, self.first_peak) <= self.budget

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        own = {name: value for name, value in vars(self).items() if name not in ("settings", "layers", "proposals")}
        told = {"settings": asdict(self.settings), **own, "held": dict(self.held), "at_peak": dict(self.at_peak)}
        return told | {
            "layers": [each._asdict() for each in self.layers],
            "proposals": [each._asdict() for each in self.proposals],
        }

    def __str__(self) -> str:
        return "\n".join(_told(self))


def _gib(size: int) -> str:
    return f"{size / GIB:9.3f} GiB"


def _told(found: Memory) -> Iterator[str]:
    s = found.settings
    parts = {"recipe": s.recipe, "optimizer": s.optimizer, "world": s.world, "checkpointing": s.checkpointing, "loss": s.loss}
    yield ", ".join(f"{name} {value}" for name, value in parts.items()) + (", main gradients" if s.main_grads else "")
    yield ""
    rows: list[tuple[str, ...]] = [("layer", "weights", "gradients", "optimizer", "saved")]
    for same in alike(found.layers, lambda each: starred(each.path)):
        sums = [f"{sum(column) / GIB:.3f}" for column in zip(*(each[1:] for each in same))]
        rows.append((counted([each.path for each in same]), *sums))
    widths = [max(map(len, column)) for column in zip(*rows)]
    for name, *cells in rows:
        yield "  ".join((name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:]))))
    yield ""
    for name, size in (*found.held.items(), ("saved by the forward pass", found.saved), ("gradients", found.gradients)):
        if size:
            yield f"{name:<28} {_gib(size)}"
    made = ", ".join(f"{name} {size / GIB:.3f}" for name, size in found.at_peak.items() if size)
    yield f"{'peak':<28} {_gib(found.peak)}  {found.place}: {made}"
    yield f"{'peak of the first two steps':<28} {_gib(found.first_peak)}"
    if found.budget is not None:
        yield f"{'budget':<28} {_gib(found.budget)}  {'fits' if found.fits else 'does not fit'}"
        yield from map(str, found.proposals)


@checked_arguments(ConversionError, but="model")
def memory(
    model: nn.Module,
    *inputs: Any,
    recipe: object = None,
    optimizer: str = "adamw",
    world: Annotated[int, SIZE] = 1,
    checkpointing: Checkpointing = "none",
    loss: LossKind = "own",
    main_grads: bool = False,
    budget: int | None = None,
    **named: Any,
) -> Memory:
    """Estimate the memory of a training step of ``model(*inputs, **named)`` on each GPU, without one. Changes nothing.

    Model and tensors lie on the meta device, but for what the model reads on the host. The backward pass begins at the ``loss``
    of what the model returns, if it has one, else at its first tensor, with a gradient of that shape which takes no memory.

    recipe: a recipe, or its kind; the model is converted by ``fuse_(recipe, pack=True, loss=loss)``, one of opfuse's ops computes
    under it. None: the model as it is. optimizer: a name of :data:`OPTIMIZERS`. world: ranks that FSDP2 shards over, layer by
    layer. checkpointing: "layers" recomputes each layer in the backward pass. main_grads: gradients are summed in fp32 buffers
    beside those of the parameters, which are there all the time. budget: bytes; the result proposes what to change if a step
    takes more, in the order of what it costs.

    ConversionError for what is no module, has memory, or cannot be converted, and for an unknown optimizer or kind.
    """
    if not isinstance(model, nn.Module):
        cure = "pass a model on the meta device: with torch.device('meta'): model = ..."
        raise ConversionError(describe("memory", wanted="an nn.Module", got=type(model).__name__, cure=cure))
    if optimizer not in OPTIMIZERS:
        got, cure = f"{optimizer!r}{nearest(optimizer, OPTIMIZERS)}", f"name one of {', '.join(OPTIMIZERS)}"
        raise ConversionError(describe("memory(optimizer=)", wanted="an optimizer whose states are known", got=got, cure=cure))
    first = next((name for name, p in (*model.named_parameters(), *model.named_buffers()) if not p.is_meta), None)
    first = first or next((f"input {i}" for i, each in enumerate(inputs) if _has_memory(each)), None)
    first = first or next((name for name, each in named.items() if _has_memory(each)), None)
    if first is not None:
        cure = "make model and inputs under torch.device('meta'), or move them: model.to('meta')"
        raise ConversionError(
            describe(f"memory: {first}", wanted="a tensor on the meta device", got="one with memory", cure=cure)
        )
    chosen = _recipe(recipe)
    settings = MemorySettings("none" if chosen is None else repr(chosen), optimizer, world, checkpointing, loss, main_grads)
    step = _MemoryStep(model, inputs, named, chosen, settings)
    found = step.estimate()
    if budget is None:
        return found
    found = replace(found, budget=budget)
    return found if found.fits else replace(found, proposals=tuple(_proposals(step, found.peak, budget)))


def _has_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_meta and value.is_floating_point()


def _recipe(given: object) -> Recipe | None:
    """The recipe, of its kind alone too."""
    if given is None:
        return None
    return recipe_of(given, {}) if isinstance(given, str) and given in RECIPES else as_recipe(given)


@dataclass(frozen=True)
class _MemoryStep:
    """A step to estimate."""

    model: nn.Module
    inputs: tuple[Any, ...]
    named: Mapping[str, Any]
    recipe: Recipe | None
    settings: MemorySettings

    def estimate(self) -> Memory:
        """Run the step on meta."""
        model, settings = copy.deepcopy(self.model), self.settings
        of_ops = any(isinstance(part, FusibleOperation) for part in model.modules()) and not any(map(converted, model.modules()))
        if not of_ops and (self.recipe is not None or settings.loss == "fused"):
            fuse_(model, self.recipe, pack=True, loss=settings.loss)  # type: ignore[arg-type]
        if settings.checkpointing == "layers":
            _checkpoint_layers(model)
        parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        weights = {
            number_of(part.untyped_storage()): layer_of(n) for n, p in model.named_parameters() for part in parts_of(stored_in(p))
        }
        ledger = Ledger(weights)
        ledger.known(*model.parameters(), *model.buffers(), *_tensors((self.inputs, self.named)))
        with ExitStack() as stack:
            stack.enter_context(undone(model))
            stack.enter_context(trial_plans())
            if of_ops and self.recipe is not None:
                stack.enter_context(autocast(recipe=self.recipe))
            stack.enter_context(ledger.following())
            root = _root(model(*self.inputs, **self.named))
            forward = ledger.clock
            results = {id(block) for block in ledger.of(root)}
            saved = [block for block in ledger.alive() if id(block) not in results]
            torch.autograd.backward(root, None if root.numel() == 1 else root.detach())
            ledger.clock += 1
            gradients = {name: [*ledger.of(p.grad)] for name, p in parameters.items() if p.grad is not None}
        return _MemoryAccount(self, model, ledger, forward, saved, gradients).memory()


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _root(output: Any) -> torch.Tensor:
    """What the backward pass begins at."""
    loss = getattr(output, "loss", None)
    found = [loss] if isinstance(loss, torch.Tensor) else [each for each in _tensors(output) if each.requires_grad]
    if not found:
        cure = "pass inputs of a training step: labels, or a model whose first tensor needs a gradient"
        raise ConversionError(
            describe("memory: the result", wanted="a tensor with a gradient", got=type(output).__name__, cure=cure)
        )
    return found[0]


_NUMBER = re.compile(r"^(?:.*?\.)??\d+(?=\.|$)")


def layer_of(name: str) -> str:
    """The layer of a parameter: the first element of a list on its path, else its module."""
    found = _NUMBER.match(name)
    return found[0] if found else name.rpartition(".")[0] or name


def _is_layer(path: str) -> bool:
    return path.rpartition(".")[2].isdigit()


def _checkpoint_layers(model: nn.Module) -> None:
    """Have each element of the outermost lists run in a checkpoint."""
    paths = dict.fromkeys(layer_of(name) for name, _ in model.named_parameters())
    for path in filter(_is_layer, paths):
        layer = model.get_submodule(path)
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


@dataclass(frozen=True)
class _MemoryAccount:
    """What a step's ledger comes to on one rank."""

    step: _MemoryStep
    model: nn.Module
    ledger: Ledger
    forward: int
    saved: Sequence[AllocatedBlock]
    gradients: Mapping[str, Sequence[AllocatedBlock]]

    def memory(self) -> Memory:
        """The figures."""
        settings, world = self.step.settings, self.step.settings.world
        table = OPTIMIZERS[settings.optimizer]
        sizes = self._sizes()
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        states = {n: table.state(_share(p, world), p.element_size()) for n, p in trained.items()}
        extra = sum(table.step(_share(p, world), p.element_size()) for p in trained.values())
        main = sum(rounded_up(4 * _share(p, world)) for p in trained.values()) if settings.main_grads else 0
        if settings.main_grads and settings.optimizer == "adamw_masters":
            extra = 0
        buffers = {number_of(part.untyped_storage()): part for b in self.model.buffers() for part in parts_of(b)}
        batch = {number_of(t.untyped_storage()): t for t in _tensors((self.step.inputs, self.step.named))}
        held = {
            "weights": sum(-(-size // world) for size in sizes.values()),
            "buffers": sum(rounded_up(part.untyped_storage().nbytes()) for part in buffers.values()),
            "optimizer": sum(states.values()),
            "main gradients": main,
            "inputs": sum(rounded_up(t.untyped_storage().nbytes()) for t in batch.values()),
        }
        static = sum(held.values())
        grads = {id(block): layer_of(name) for name, blocks in self.gradients.items() for block in blocks}
        whole = {id(b): b.size for blocks in self.gradients.values() for b in blocks}
        total = sum(-(-size // world) for size in whole.values())
        line, first = (self._line(grads, sizes, last) for last in (self.ledger.last, self._interpreted))
        at = max(range(len(line)), key=line.__getitem__)
        peak, place, made = static + line[at], self._place(at), self._parts(at, grads, line[at])
        if total + extra > line[at]:
            peak, place, made = static + total + extra, "optimizer step", {"gradients": total, "working": extra}
        of_layer = {layer: (sum(b.size for b in self.saved if b.place == layer)) for layer in {b.place for b in self.saved}}
        layers = tuple(
            LayerMemory(
                path,
                -(-sizes.get(path, 0) // world),
                sum(-(-size // world) for i, size in whole.items() if grads[i] == path),
                sum(size for name, size in states.items() if layer_of(name) == path),
                of_layer.get(path, 0),
            )
            for path in dict.fromkeys((*sizes, *of_layer))
        )
        return Memory(
            settings,
            held,
            sum(block.size for block in self.saved),
            total,
            peak,
            place,
            {**held, **made},
            max(static + max(first), static + total + extra),
            layers,
        )

    def _sizes(self) -> dict[str, int]:
        """Bytes of the weights of each layer, each storage once."""
        sizes: dict[str, int] = {}
        seen: set[int] = set()
        for name, parameter in self.model.named_parameters():
            for part in parts_of(stored_in(parameter)):
                if (number := number_of(part.untyped_storage())) not in seen:
                    seen.add(number)
                    sizes[layer_of(name)] = sizes.get(layer_of(name), 0) + rounded_up(part.untyped_storage().nbytes())
        return sizes

    def _interpreted(self, block: AllocatedBlock) -> int:
        return self.ledger.clock if block.end is None else block.end

    def _line(self, grads: Mapping[int, str], sizes: Mapping[str, int], last: Callable[[AllocatedBlock], int]) -> list[int]:
        """Bytes at each op beside what is held."""
        world, end = self.step.settings.world, self.ledger.clock
        spans = []
        leaves = self._ends_of_layers() if world > 1 else {}
        for block in self.ledger.blocks:
            if id(block) in grads and world > 1:
                gone = max(leaves.get(grads[id(block)], end), block.start)
                spans.append((block.size, block.start, gone))
                if gone < end:
                    spans.append((-(-block.size // world), gone + 1, end))
            else:
                spans.append((block.size, block.start, last(block)))
        if world > 1:
            spans += self._gathered(sizes)
        return curve(spans, end)

    def _intervals(self) -> list[tuple[str, int, int]]:
        """Which layer computes from which op to which."""
        places = [(clock, place) for clock, place in self.ledger.places if _is_layer(place)]
        ends = [*(clock - 1 for clock, _ in places[1:]), self.ledger.clock]
        return [(place, clock, until) for (clock, place), until in zip(places, ends)]

    def _ends_of_layers(self) -> dict[str, int]:
        """Until when the gradients of a layer are whole: until the layer computes that comes after the next one."""
        intervals = self._intervals()
        ends = [until for *_, until in intervals]
        return {place: ends[min(i + 1, len(ends) - 1)] for i, (place, *_) in enumerate(intervals)}

    def _gathered(self, sizes: Mapping[str, int]) -> Iterator[tuple[int, int, int]]:
        """Whole weights beside the parts that a rank holds."""
        intervals = self._intervals()
        yield sum(size for path, size in sizes.items() if not _is_layer(path)), 0, self.ledger.clock
        for i, (place, start, until) in enumerate(intervals):
            coming = next((other for other, *_ in intervals[i + 1 :] if other != place), None)
            yield sizes.get(place, 0) + (sizes.get(coming, 0) if coming is not None else 0), start, until

    def _place(self, at: int) -> str:
        """Where an op stands."""
        clocks = [clock for clock, _ in self.ledger.places]
        place = self.ledger.places[bisect_right(clocks, at) - 1][1]
        return f"{'forward' if at <= self.forward else 'backward'} of {place or 'the model'}"

    def _parts(self, at: int, grads: Mapping[int, str], total: int) -> dict[str, int]:
        """Of what the bytes at an op consist, beside what is held: the rest is gathered, or one op's."""
        kept = {id(block) for block in self.saved}
        there = [b for b in self.ledger.blocks if b.start <= at <= self.ledger.last(b)]
        parts = {
            "gradients": sum(block.size for block in there if id(block) in grads),
            "saved": sum(block.size for block in there if id(block) in kept),
        }
        return {**parts, "working": total - sum(parts.values())}


def _share(parameter: torch.Tensor, world: int) -> int:
    """Elements of a rank's part."""
    return (
        parameter.numel()
        if not parameter.dim()
        else -(-parameter.shape[0] // world) * (parameter[0].numel() if len(parameter) else 0)
    )


# -- what to change ------------------------------------------------------------------------------------------------------------


MOST_RANKS = 1024


def _proposals(step: _MemoryStep, peak: int, budget: int) -> Iterator[Proposal]:
    """Changes on top of each other, those alone that lower the peak, until a step fits."""
    for change, changed in _changes(step):
        try:
            tried = changed(step)
            found = replace(tried.estimate(), budget=budget)
        except ConversionError:  # as of a loss that cannot be fused
            continue
        if found.peak < peak:
            step, peak = tried, found.peak
            yield Proposal(change, max(found.peak, found.first_peak), found.fits)
            if found.fits:
                return


def _changes(step: _MemoryStep) -> Iterator[tuple[str, Callable[[_MemoryStep], _MemoryStep]]]:
    """Changes in the order of what they cost."""
    settings = step.settings
    if settings.loss == "own":
        yield 'loss="fused"', partial(_with, loss="fused")
    if step.recipe is not None and step.recipe.keep is None:
        for keep in ("recompute", "quantized"):
            yield f'keep="{keep}"', partial(_keeping, keep=keep)
    if settings.optimizer.startswith("adamw") and settings.optimizer != "adamw8bit":
        yield 'optimizer="adamw8bit"', partial(_with, optimizer="adamw8bit")
    if settings.checkpointing == "none":
        yield 'checkpointing="layers"', partial(_with, checkpointing="layers")
    world = settings.world
    while (world := 2 * world) <= MOST_RANKS:
        yield f"world={world}", partial(_with, world=world)


def _with(step: _MemoryStep, **changed: Any) -> _MemoryStep:
    return replace(step, settings=replace(step.settings, **changed))


def _keeping(step: _MemoryStep, keep: str) -> _MemoryStep:
    recipe = step.recipe and step.recipe.replace(keep=keep)
    return replace(_with(step, recipe=repr(recipe)), recipe=recipe)
