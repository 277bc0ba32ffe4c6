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
import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from opfuse.convert.converted import converted, is_converted
from opfuse.convert.fuse import fuse_
from opfuse.convert.head_loss import LossKind
from opfuse.convert.policy import Policy
from opfuse.core.operation import FusibleOperation
from opfuse.domains import SIZE, checked_arguments
from opfuse.errors import ConversionError, describe, nearest
from opfuse.inspect.charts import thinned
from opfuse.inspect.ledger import BLOCK, AllocatedBlock, Ledger, curve, rounded_up, storages_of, tensors_within
from opfuse.inspect.observe import other_main_grads, undone
from opfuse.inspect.step_memory import LayerMemory, Memory, MemorySettings, Proposal
from opfuse.ops import Sequential
from opfuse.recipes import RECIPES, Recipe, as_recipe, autocast, recipe_of
from opfuse.runtime.plans.misses import trial_plans
from opfuse.torch_private.tensors import number_of


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
    "adamw": OptimizerMemory(lambda count, size: 2 * rounded_up(count * size) + BLOCK),
    "adamw_foreach": OptimizerMemory(
        lambda count, size: 2 * rounded_up(count * size), lambda count, size: rounded_up(count * size)
    ),
    "adamw_masters": OptimizerMemory(
        lambda count, size: 3 * rounded_up(4 * count) + BLOCK, lambda count, size: rounded_up(4 * count)
    ),
    "adamw8bit": OptimizerMemory(_moments_of_8_bits),
}
"""adamw: torch's with ``fused=True``, which counts steps on the GPU. adamw_foreach: as by default on a GPU, with a copy of a
moment while it steps. adamw_masters: over fp32 masters, whose gradients are made for the step unless they are main gradients.
adamw8bit: torchao's.
"""

Checkpointing = Literal["none", "layers"]


@checked_arguments(ConversionError, but="model")
def memory(
    model: nn.Module,
    *inputs: Any,
    recipe: object = None,
    optimizer: str = "adamw",
    world: Annotated[int, SIZE] = 1,
    checkpointing: Checkpointing = "none",
    loss: LossKind = "own",
    policy: Policy | None = None,
    main_grads: bool = False,
    budget: int | str | None = None,
    **named: Any,
) -> Memory:
    """Estimate the memory of a training step of ``model(*inputs, **named)`` on each GPU, without one. Changes nothing.

    Model and tensors lie on the meta device, but for what the model reads on the host. The backward pass begins at the ``loss``
    of what the model returns, if it has one, else at its first tensor, with a gradient of that shape which takes no memory.

    recipe: a recipe, or its kind; the model is converted by ``fuse_(recipe, policy=policy, pack=True, loss=loss)``, one of
    opfuse's ops computes under it. None: the model as it is. optimizer: a name of :data:`OPTIMIZERS`. world: ranks that FSDP2
    shards over, layer by layer. checkpointing: "layers" recomputes each layer in the backward pass. main_grads: gradients are
    summed in fp32 buffers beside those of the parameters, which are there all the time. budget: bytes, or a text as "80GiB";
    the result proposes what to change if a step takes more, in the order of what it costs, until it fits.

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
        wanted, got = "a tensor on the meta device", "one with memory"
        cure = "make model and inputs under torch.device('meta'), or move them: model.to('meta')"
        raise ConversionError(describe(f"memory: {first}", wanted=wanted, got=got, cure=cure))
    most, chosen = None if budget is None else bytes_of(budget), _recipe(recipe)
    settings = MemorySettings("none" if chosen is None else repr(chosen), optimizer, world, checkpointing, loss, main_grads)
    step = _MemoryStep(model, inputs, named, chosen, settings, policy)
    if policy is not None and not step.converts:
        got, cure = "none, or one that is an op of opfuse", "name the recipe of fuse_, or leave the policy out"
        raise ConversionError(describe("memory(policy=)", wanted="a recipe and a model to convert", got=got, cure=cure))
    if loss == "fused" and not step.converts:
        got, cure = "one of opfuse's ops, or one that is converted", "pass the model before fuse_, with its recipe"
        raise ConversionError(describe('memory(loss="fused")', wanted="a model to convert", got=got, cure=cure))
    found = step.estimate()
    if most is None:
        return found
    found = replace(found, budget=most)
    return found if found.fits else replace(found, proposals=tuple(_proposals(step, found.most, most)))


_BUDGET = re.compile(r"(\d+(?:\.\d+)?) *([KMGT]?)i?B?", re.IGNORECASE)


def bytes_of(budget: int | str) -> int:
    """Bytes of a number, or of a text as "80GiB" or "80 GB", which both are those of 2**30. ConversionError for another text."""
    if isinstance(budget, int) and budget > 0:
        return budget
    found = _BUDGET.fullmatch(budget.strip()) if isinstance(budget, str) else None
    if found is None:
        wanted, cure = "bytes, or a text such as 80GiB", "write a number and its unit, 80GiB"
        raise ConversionError(describe("memory(budget=)", wanted=wanted, got=repr(budget), cure=cure))
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


def _has_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_meta and value.is_floating_point()


def _recipe(given: object) -> Recipe | None:
    """The recipe, of its kind alone too."""
    if given is None:
        return None
    return recipe_of(given, {}) if isinstance(given, str) and given in RECIPES else as_recipe(given)


@dataclass(frozen=True)
class _MemoryStep:
    """A step to estimate. made: converted copies of the model, by recipe and form of the loss; steps with changed settings share
    them.
    """

    model: nn.Module
    inputs: tuple[Any, ...]
    named: Mapping[str, Any]
    recipe: Recipe | None
    settings: MemorySettings
    policy: Policy | None = None
    made: dict[tuple[Recipe | None, str], nn.Module] = field(default_factory=dict, repr=False)

    def estimate(self) -> Memory:
        """Run the step on meta. ConversionError where the settings do not fit the model."""
        model, settings = self.model, self.settings
        if self.converts:
            model = self._converted()
        with ExitStack() as stack:
            if settings.checkpointing == "layers":
                stack.enter_context(_checkpointed_layers(model))
            stack.enter_context(undone(model))
            stack.enter_context(other_main_grads(model))
            stack.enter_context(_no_gradients((*model.parameters(), *tensors_within((self.inputs, self.named)))))
            stack.enter_context(trial_plans())
            if self.recipe is not None and not self.converts:
                stack.enter_context(autocast(recipe=self.recipe))
            return self._run(model)

    def _converted(self) -> nn.Module:
        key = self.recipe, self.settings.loss
        if key not in self.made:
            model = copy.deepcopy(self.model)
            fuse_(model, self.recipe, policy=self.policy, pack=True, loss=self.settings.loss)  # type: ignore[arg-type]
            self.made[key] = model
        return self.made[key]

    @property
    def converts(self) -> bool:
        """Whether a copy of the model is converted: not one of opfuse's ops, and none that is to stay as it is."""
        if _is_of_ops(self.model):
            return False
        return self.recipe is not None or (self.settings.loss == "fused" and not is_converted(self.model))

    def _run(self, model: nn.Module) -> Memory:
        """Both passes."""
        weights = {number_of(s): layer_of(name) for name, p in model.named_parameters() for s in storages_of([p])}
        ledger = Ledger(weights)
        ledger.known(*model.parameters(), *model.buffers(), *tensors_within((self.inputs, self.named)))
        with ledger.following():
            root = _root(model(*self.inputs, **self.named))
            forward, results = ledger.clock, {*ledger.of(root)}
            saved = [block for block in ledger.alive() if block not in results]
            torch.autograd.backward(root, None if root.numel() == 1 else root.detach())
            ledger.clock += 1
            grads = ((name, p.grad) for name, p in model.named_parameters() if p.requires_grad)
            gradients = {name: [*ledger.of(grad)] for name, grad in grads if grad is not None}
        return _MemoryAccount(self, model, ledger, forward, saved, gradients).memory()


def _is_of_ops(model: nn.Module) -> bool:
    """Whether a model computes by ops of opfuse as it is."""
    return not is_converted(model) and any(isinstance(module, FusibleOperation) for module in model.modules())


@contextmanager
def _no_gradients(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside the block, leaves begin without gradients."""
    before = [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf]
    for tensor, _ in before:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, gradient in before:
            tensor.grad = gradient


def _root(output: Any) -> torch.Tensor:
    """What the backward pass begins at."""
    loss = getattr(output, "loss", None)
    found = [loss] if isinstance(loss, torch.Tensor) else [each for each in tensors_within(output) if each.requires_grad]
    if not found:
        wanted, got = "a tensor with a gradient", type(output).__name__
        cure = "pass inputs of a training step: labels, or a model whose first tensor needs a gradient"
        raise ConversionError(describe("memory: the result", wanted=wanted, got=got, cure=cure))
    return found[0]


_NUMBER = re.compile(r"^(?:.*?\.)??\d+(?=\.|$)")


def layer_of(name: str) -> str:
    """The layer of a parameter: the first element of a list on its path, else its module."""
    found = _NUMBER.match(name)
    return found[0] if found else name.rpartition(".")[0] or name


def _is_layer(path: str) -> bool:
    return path.rpartition(".")[2].isdigit()


@contextmanager
def _checkpointed_layers(model: nn.Module) -> Iterator[None]:
    """Have each element of the outermost lists run in a checkpoint. ConversionError if none is called by itself."""
    paths = dict.fromkeys(layer_of(name) for name, _ in model.named_parameters())
    called = [model.get_submodule(path) for path in paths if _is_layer(path) and not _in_pipeline(model, path)]
    if not called:
        wanted, cure = "a model that calls the elements of a list of layers", "leave checkpointing out"
        got = "one whose layers are parts of pipelines" if any(map(_is_layer, paths)) else "one without such a list"
        raise ConversionError(describe('memory(checkpointing="layers")', wanted=wanted, got=got, cure=cure))
    before = [(layer, vars(layer).get("forward")) for layer in called]
    for layer in called:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer, forward in before:
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def _in_pipeline(model: nn.Module, path: str) -> bool:
    """Whether a module above runs what is at ``path`` without calling it."""
    steps = path.split(".")
    above = (model.get_submodule(".".join(steps[:i])) for i in range(len(steps)))
    return any(converted(module) is not None or isinstance(module, (FusibleOperation, Sequential)) for module in above)


class MemorySpan(NamedTuple):
    """Bytes from one op to another, both included. kind: gradients, saved, gathered or working, which is the rest."""

    kind: str
    size: int
    start: int
    end: int


KINDS = ("gradients", "saved", "gathered", "working")


@dataclass(frozen=True)
class _MemoryAccount:
    """What a step's ledger comes to on one rank. saved: what is alive after the op ``forward``, the last of the forward pass.
    gradients: by parameter.
    """

    step: _MemoryStep
    model: nn.Module
    ledger: Ledger
    forward: int
    saved: Sequence[AllocatedBlock]
    gradients: Mapping[str, Sequence[AllocatedBlock]]

    def memory(self) -> Memory:
        """The figures."""
        held = self._held()
        static, line, first = sum(held.values()), self._line(self.ledger.last), self._line(self.ledger.last_interpreted)
        gradients = sum(self._part(block.size) for block in self._gradients)
        at, stepping = max(range(len(line)), key=line.__getitem__), gradients + self._while_stepping()
        place, made = self._place(at), self._parts(at)
        if stepping > line[at]:
            place, made = "optimizer step", {"gradients": gradients, "working": stepping - gradients}
        points = thinned([(op, static + size) for op, size in enumerate(line)])
        return Memory(
            settings=self.step.settings,
            held=held,
            saved=sum(block.size for block in self.saved),
            gradients=gradients,
            peak=static + max(line[at], stepping),
            place=place,
            at_peak={**held, **made},
            first_peak=static + max(*first, stepping),
            layers=tuple(self._layers()),
            timeline=tuple((int(op), int(size)) for op, size in points),
        )

    # -- what is held ------------------------------------------------------------------------------------------------

    @property
    def _world(self) -> int:
        return self.step.settings.world

    @property
    def _optimizer(self) -> OptimizerMemory:
        return OPTIMIZERS[self.step.settings.optimizer]

    def _part(self, size: int) -> int:
        """Of a rank."""
        return -(-size // self._world)

    @cached_property
    def _trained(self) -> Mapping[str, tuple[int, int]]:
        """By name, elements of a rank's part of each parameter that is trained, and their bytes."""
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        rows = {name: self._part(len(p)) if p.dim() else 1 for name, p in trained.items()}
        return {name: (rows[name] * math.prod(p.shape[1:]), p.element_size()) for name, p in trained.items()}

    def _held(self) -> dict[str, int]:
        """Bytes from step to step, by what they are."""
        main = sum(rounded_up(4 * count) for count, _ in self._trained.values()) if self.step.settings.main_grads else 0
        return {
            "weights": sum(map(self._part, self._weights.values())),
            "buffers": _bytes_of_all(self.model.buffers()),
            "optimizer": sum(self._optimizer.state(*each) for each in self._trained.values()),
            "main gradients": main,
            "inputs": _bytes_of_all(tensors_within((self.step.inputs, self.step.named))),
        }

    @cached_property
    def _weights(self) -> Mapping[str, int]:
        """Bytes of the weights of each layer, each storage once."""
        storages = {number_of(s): (layer_of(n), s) for n, p in self.model.named_parameters() for s in storages_of([p])}
        sizes = dict.fromkeys((layer_of(name) for name, _ in self.model.named_parameters()), 0)
        for layer, storage in storages.values():
            sizes[layer] += rounded_up(storage.nbytes())
        return sizes

    def _while_stepping(self) -> int:
        """Bytes that the optimizer takes beside its states and the gradients. Main gradients are those of masters."""
        masters = self.step.settings.main_grads and self.step.settings.optimizer == "adamw_masters"
        return 0 if masters else sum(self._optimizer.step(*each) for each in self._trained.values())

    def _layers(self) -> Iterator[LayerMemory]:
        """Each layer, in the order of the model."""
        saved, gradients, states = Counter[str](), Counter[str](), Counter[str]()
        for block in self.saved:
            saved[block.place] += block.size
        for block, layer in self._gradients.items():
            gradients[layer] += self._part(block.size)
        for name, each in self._trained.items():
            states[layer_of(name)] += self._optimizer.state(*each)
        for path in dict.fromkeys((*self._weights, *saved)):
            weights = self._part(self._weights.get(path, 0))
            yield LayerMemory(path, weights, gradients[path], states[path], saved[path])

    # -- the timeline ------------------------------------------------------------------------------------------------

    @cached_property
    def _gradients(self) -> Mapping[AllocatedBlock, str]:
        """The layer of each block with gradients of parameters."""
        return {block: layer_of(name) for name, blocks in self.gradients.items() for block in blocks}

    def _line(self, last: Callable[[AllocatedBlock], int]) -> list[int]:
        """Bytes at each op beside what is held. last: the last op while a block is alive."""
        return curve([(size, start, end) for _, size, start, end in self._spans(last)], self.ledger.clock)

    def _parts(self, at: int) -> dict[str, int]:
        """Of what the bytes at an op consist, beside what is held."""
        parts = dict.fromkeys(KINDS, 0)
        for kind, size, start, end in self._spans(self.ledger.last):
            parts[kind] += size if start <= at <= end else 0
        return parts

    def _spans(self, last: Callable[[AllocatedBlock], int]) -> Iterator[MemorySpan]:
        """What is alive from when to when."""
        saved, end, whole = {*self.saved}, self.ledger.clock, self._until_reduced()
        for block in self.ledger.blocks:
            if block not in self._gradients:
                yield MemorySpan("saved" if block in saved else "working", block.size, block.start, last(block))
                continue
            until = max(whole.get(self._gradients[block], end), block.start)
            yield MemorySpan("gradients", block.size, block.start, until)
            if until < end:
                yield MemorySpan("gradients", self._part(block.size), until + 1, end)
        if self._world > 1:
            yield from self._gathered()

    @cached_property
    def _intervals(self) -> Sequence[tuple[str, int, int]]:
        """Which layer computes from which op to which."""
        places = [(clock, place) for clock, place in self.ledger.places if _is_layer(place)]
        ends = [*(clock - 1 for clock, _ in places[1:]), self.ledger.clock]
        return [(place, clock, until) for (clock, place), until in zip(places, ends)]

    def _until_reduced(self) -> Mapping[str, int]:
        """Until when gradients of a layer are whole: through the layer of the backward pass that comes after it."""
        if self._world == 1:
            return {}
        ends = [until for *_, until in self._intervals]
        return {place: ends[min(i + 1, len(ends) - 1)] for i, (place, *_) in enumerate(self._intervals)}

    def _gathered(self) -> Iterator[MemorySpan]:
        """Whole weights beside the parts that a rank holds."""
        root = sum(size for path, size in self._weights.items() if not _is_layer(path))
        yield MemorySpan("gathered", root, 0, self.ledger.clock)
        for i, (place, start, until) in enumerate(self._intervals):
            coming = next((other for other, *_ in self._intervals[i + 1 :] if other != place), None)
            size = sum(self._weights.get(each, 0) for each in (place, coming) if each is not None)
            yield MemorySpan("gathered", size, start, until)

    def _place(self, at: int) -> str:
        """Where an op stands."""
        clocks = [clock for clock, _ in self.ledger.places]
        place = self.ledger.places[bisect_right(clocks, at) - 1][1]
        return f"{'forward' if at <= self.forward else 'backward'} of {place or 'the call'}"


def _bytes_of_all(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of tensors, each once."""
    storages = {number_of(storage): storage for storage in storages_of(tensors)}
    return sum(rounded_up(storage.nbytes()) for storage in storages.values())


# -- what to change ------------------------------------------------------------------------------------------------------------


MOST_RANKS = 1024
WORTH = 0.01
"""The least share of the peak by which a change that is proposed lowers it."""


def _proposals(step: _MemoryStep, peak: int, budget: int) -> Iterator[Proposal]:
    """Changes on top of each other, without those that lower the peak by nothing to speak of, until a step fits."""
    for change, changed in _changes(step):
        try:
            tried = changed(step)
            found = replace(tried.estimate(), budget=budget)
        except ConversionError:  # as of a loss that cannot be fused
            continue
        if found.most < (1 - WORTH) * peak:
            step, peak = tried, found.most
            yield Proposal(change, peak, found.fits)
            if found.fits:
                return


def _changes(step: _MemoryStep) -> Iterator[tuple[str, Callable[[_MemoryStep], _MemoryStep]]]:
    """Changes in the order of what they cost."""
    settings = step.settings
    if settings.loss == "own" and replace(step, settings=replace(settings, loss="fused")).converts:
        yield 'loss="fused"', partial(_with, loss="fused")
    if step.recipe is not None and step.recipe.keep is None:
        for keep in ("recompute", "quantized"):
            yield f'keep="{keep}"', partial(_keeping, keep=keep)
    if settings.optimizer in ("adamw", "adamw_foreach"):
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
