"""A forward pass that leaves no trace: the plans that it runs, and every value that it saves for the backward pass."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn

from opfuse.compiler.plan import Plan
from opfuse.core.context import Value
from opfuse.core.protocol import runs_ops
from opfuse.errors import PipelineError, describe
from opfuse.events import PlanUsed, ProductChosen, TensorSaved, collected, silenced, subscribed
from opfuse.formats import dtype_name
from opfuse.kernels.engine.variants import VECTOR
from opfuse.recipes import current_recipe
from opfuse.recipes.delayed import DelayedScalingStates
from opfuse.recipes.passes import Pass, running
from opfuse.runtime.plans.misses import check_tensors, trial_plans
from opfuse.runtime.weights.cast_cache import scopes_of
from opfuse.tensors.masters import stored_in
from opfuse.tensors.storage import QuantizedStorage
from opfuse.tensors.tensor import QuantizedTensor
from opfuse.torch_private.autograd import COMPARED, hooked
from opfuse.torch_private.tensors import number_of

OWN, TORCH, PLAIN, KEPT = "own", "torch", "plain", "kept weights"
WHERE = "inspected call"


@dataclass(frozen=True)
class SavedValue:
    """One value that is saved for the backward pass.

    op: its node in the plan, after the pipeline's name where there are several; "torch" for what plain modules save.
    name: what the op calls it. format, usages: those of its planes; "plain" and none for a tensor. dtype: nominal.
    bytes: of its data, scales and amaxes together, as if it were contiguous; a view keeps more memory alive, or less if it
    repeats elements, which only :class:`Totals` counts. memory: "own", or who holds it anyway: "input", "extra input 0",
    "parameter 1.weight", "buffer ...", "kept weights" for a scope of :func:`opfuse.kept_weights`, or a value that was saved
    earlier.
    """

    op: str
    name: str
    format: str
    usages: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    memory: str


class Totals(NamedTuple):
    """Bytes of the memory that the saved values keep alive, each block once; parameters, buffers and kept weights do not count.

    A block is a whole torch storage: a saved view counts with all that it keeps alive. own: the bytes without the inputs of the
    call, which the caller may hold anyway.
    """

    bytes: int
    own: int


@dataclass(frozen=True)
class Observation:
    """What one forward pass did.

    kept: casts of weights that scopes around it keep, and their bytes. products: those with elementwise ops behind them.
    """

    plans: tuple[Plan, ...]
    values: tuple[SavedValue, ...]
    totals: Totals
    kept: tuple[int, int]
    products: tuple[ProductChosen, ...]


class CallInputs(NamedTuple):
    """What a call is given, by place and by name."""

    inputs: tuple[Any, ...]
    named: Mapping[str, Any]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(value for value in (*self.inputs, *self.named.values()) if isinstance(value, torch.Tensor))

    @property
    def on_cuda(self) -> bool:
        return any(tensor.is_cuda for tensor in self.tensors)

    def by_name(self) -> dict[str, torch.Tensor]:
        """The tensors, as reports call them."""
        given = {**dict(zip(_input_names(), self.inputs)), **self.named}
        return {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}

    def copied(self) -> CallInputs:
        """The call on copies of its tensors."""
        inputs, named = ([_copied(value) for value in values] for values in (self.inputs, self.named.values()))
        return CallInputs(tuple(inputs), dict(zip(self.named, named)))


class _TensorsSaved(list[torch.Tensor]):
    """What autograd saves, in order.

    keeps_tensors: tensors stay as they are, so that one which two nodes save takes no more memory than one.
    """

    keeps_tensors = True

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """The hook of autograd."""
        self.append(tensor)
        return tensor


def observe(model: nn.Module, given: CallInputs, *, of_opfuse: bool = True) -> Observation:
    """Run ``model(*given.inputs, **given.named)`` forward once, without a trace, as :func:`opfuse.explain` says.

    of_opfuse: ops of opfuse must run. PipelineError for what is no module, for one that runs none of these, and for a call
    without a tensor; DtypeError for a first input that is no tensor.
    """
    _check(model, given)
    call = given.copied()
    inputs = call.by_name()
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    tensors = _TensorsSaved()
    saves: list[TensorSaved] = []

    def save(event: TensorSaved) -> None:
        if hooked() != COMPARED:  # a checkpoint inside the model lets go of it, and saves it again in its recomputation
            saves.append(event)

    hooks = torch.autograd.graph.saved_tensors_hooks(tensors.keep, lambda tensor: tensor)
    with (
        undone(model),
        trial_plans(),
        collected(PlanUsed) as used,
        subscribed(save, TensorSaved),
        collected(ProductChosen) as products,
        hooks,
    ):
        torch.func.functional_call(model, buffers, call.inputs, dict(call.named))
    if of_opfuse and not used:
        raise _no_op_ran(model)
    weights: dict[str, Value] = {f"parameter {name}": stored_in(parameter) for name, parameter in model.named_parameters()}
    weights |= {f"buffer {name}": buffer for name, buffer in buffers.items()}
    scopes = scopes_of(model)
    originals = dict(pair for tensor, copy in zip(given.tensors, call.tensors) for pair in _blocks(tensor, copy))
    memory = _SavedMemory(weights, inputs, originals)
    memory.exclude(KEPT, (tensor for scope in scopes for tensor in scope.tensors()))
    values = [*_of_pipelines(saves, memory), *_of_modules(saves, tensors, memory)]
    held = sum(scope.casts for scope in scopes), sum(scope.nbytes for scope in scopes)
    plans = tuple(event.plan for event in used)
    return Observation(plans, tuple(values), memory.totals(), held, tuple(products))


@contextmanager
def copied_call(model: nn.Module, given: CallInputs) -> Iterator[Callable[[], Any]]:
    """A call of ``model`` on copies, as :func:`observe` makes it; its backward pass belongs into the block, too.

    Inside, the ``main_grad`` of each parameter is another buffer, of zeros.
    """
    _check(model, given)
    call = given.copied()
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    with undone(model), other_main_grads(model):
        yield lambda: torch.func.functional_call(model, buffers, call.inputs, dict(call.named))


@contextmanager
def other_main_grads(model: nn.Module) -> Iterator[None]:
    """Afterwards the caller's buffers and flags are those that there were."""
    kept = [(p, {name: vars(p)[name] for name in _OF_MAIN_GRAD if name in vars(p)}) for p in model.parameters()]
    try:
        for parameter, had in kept:
            if "main_grad" in had:
                vars(parameter)["main_grad"] = torch.zeros_like(had["main_grad"])
            vars(parameter).pop("grad_added_to_main_grad", None)  # so that autograd gets nothing that stands for the gradient
        yield
    finally:
        for parameter, had in kept:
            vars(parameter).update(had)


_OF_MAIN_GRAD = ("main_grad", "grad_added_to_main_grad")


def _check(model: object, given: CallInputs) -> None:
    if not isinstance(model, nn.Module):
        cure = "pass a module of opfuse.ops, or one that calls such modules"
        raise PipelineError(describe(WHERE, wanted="an nn.Module", got=type(model).__name__, cure=cure))
    check_tensors(WHERE, *given.inputs[:1])
    if not given.tensors:
        cure = "pass what the model is called with, by place or by name"
        raise PipelineError(describe(WHERE, wanted="inputs", got="no tensor", cure=cure))


def _no_op_ran(model: nn.Module) -> PipelineError:
    """The error for a call in which no op ran."""
    got, cure = type(model).__name__, "convert the model, opfuse.fuse_(model, recipe), or pass a module of opfuse.ops"
    if any(map(runs_ops, model.modules())):
        without = " since no recipe is active" if current_recipe() is None else ""
        got = f"a converted {got} whose modules ran their own forwards{without}"
        cure = "call it under a recipe: inside of opfuse.autocast(recipe=...), or outside of autocast(enabled=False)"
    return PipelineError(describe(WHERE, wanted="a module that runs ops of opfuse", got=got, cure=cure))


def _input_names() -> Iterator[str]:
    yield "input"
    number = 0
    while True:
        yield f"extra input {number}"
        number += 1


def _of_pipelines(saves: Sequence[TensorSaved], memory: _SavedMemory) -> Iterator[SavedValue]:
    several = len({id(save.plan) for save in saves}) > 1
    for save in saves:
        op = save.plan.graph.nodes[save.node].name
        yield memory.saved(f"{save.plan.name} {op}" if several else op, save.name, save.value)


def _of_modules(saves: Sequence[TensorSaved], tensors: Iterable[torch.Tensor], memory: _SavedMemory) -> Iterator[SavedValue]:
    known = {id(tensor) for save in saves for tensor in (save.value, *parts_of(save.value))}
    return (memory.saved(TORCH, "", tensor) for tensor in tensors if id(tensor) not in known)


class _Block(NamedTuple):
    """A piece of memory that is freed as a whole: a torch storage. On the meta device torch's record of it gives the address."""

    address: int
    bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Block:
        storage = stored_in(tensor).untyped_storage()
        return cls(storage.data_ptr() or number_of(storage), storage.nbytes())


def _blocks(given: Value, copy: Value) -> Iterator[tuple[int, _Block]]:
    """For the address of each part of a copied input: the block of the input itself."""
    for original, part in zip(parts_of(given), parts_of(copy)):
        yield _Block.of(part).address, _Block.of(original)


class _SavedMemory:
    """The holder of each block of memory, by its address, and how much of the block is saved.

    weights, inputs: what is held anyway, by name. originals: by the address of a copied input, the block of the input itself.
    """

    def __init__(self, weights: Mapping[str, Value], inputs: Mapping[str, Value], originals: Mapping[int, _Block]) -> None:
        self.originals = originals
        self.holder: dict[int, str] = {}
        self.sizes: dict[int, int] = {}
        for name, value in weights.items():
            self._add_holder(name, value)
        self.weights = set(self.holder)
        for name, value in inputs.items():
            self._add_holder(name, value)
        self.held = set(self.holder)

    def _block(self, tensor: torch.Tensor) -> _Block:
        own = _Block.of(tensor)
        return self.originals.get(own.address, own)

    def _add_holder(self, name: str, value: Value) -> None:
        for tensor in parts_of(value):
            self.holder.setdefault(self._block(tensor).address, name)

    def exclude(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """Leave ``tensors`` out, which somebody holds under ``name``."""
        for tensor in tensors:
            self._add_holder(name, tensor)
            self.weights.add(self._block(tensor).address)
            self.held.add(self._block(tensor).address)

    def saved(self, op: str, name: str, value: Value) -> SavedValue:
        """Count ``value`` and describe it."""
        parts = {id(tensor): tensor for tensor in parts_of(value)}.values()
        blocks = [self._block(tensor) for tensor in parts]
        holders = dict.fromkeys(self.holder.get(block.address, OWN) for block in blocks)
        self.sizes.update(blocks)
        self._add_holder(f"{op} {name}".strip(), value)
        return SavedValue(
            op,
            name,
            *_planes(value),
            dtype_name(value.dtype),
            tuple(value.shape),
            sum(tensor.nbytes for tensor in parts),
            ", ".join(holders),
        )

    def totals(self) -> Totals:
        """What all saved values come to."""
        kept = {address: size for address, size in self.sizes.items() if address not in self.weights}
        return Totals(sum(kept.values()), sum(size for address, size in kept.items() if address not in self.held))


def parts_of(value: Value) -> tuple[torch.Tensor, ...]:
    """The tensors with memory of which a value consists."""
    storage = value.record if isinstance(value, QuantizedTensor) else value
    return storage.tensors() if isinstance(storage, QuantizedStorage) else (storage,)


def _planes(value: Value) -> tuple[str, tuple[str, ...]]:
    """Formats and directions of a value."""
    storage = value.record if isinstance(value, QuantizedTensor) else value
    if not isinstance(storage, QuantizedStorage):
        return PLAIN, ()
    formats = dict.fromkeys(str(storage.plane(usage).format) for usage in storage.usages)
    return " / ".join(formats), storage.usages


@contextmanager
def undone(model: nn.Module) -> Iterator[None]:
    """Afterwards random state and the delayed-scaling states of ``model`` are what they were.

    Casts inside record nothing, and listeners around get no events. Models also draw from Python's and numpy's generators, as
    those that leave out layers at random.
    """
    states = [getattr(module, "quantizer_states", None) for module in model.modules()]
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng())
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.enter_context(running(Pass.DRY_RUN))
        stack.enter_context(silenced())
        for state in states:
            if isinstance(state, DelayedScalingStates):
                stack.enter_context(state.restored())
        yield


# -- copies --------------------------------------------------------------------------------------------------------------


def _copied(value: Any) -> Any:
    return _copy(value) if isinstance(value, torch.Tensor) else value


def _copy(x: torch.Tensor) -> torch.Tensor:
    """``x`` in memory of its own.

    Strides, alignment, need of a gradient and being a leaf stay as they are: so the call has the same plan.
    """
    plain = x.detach()
    if type(plain) is not torch.Tensor or plain.layout != torch.strided:
        return plain.clone().requires_grad_(x.requires_grad)
    span = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride())) if x.numel() else 0
    room = plain.new_empty(span + VECTOR)
    shift = (x.data_ptr() - room.data_ptr()) % VECTOR // room.element_size()
    room[shift : shift + span].copy_(plain.as_strided((span,), (1,)))
    copy = room.new_empty(0).set_(room.untyped_storage(), shift, x.shape, x.stride())
    if x.requires_grad and not x.is_leaf:
        with torch.enable_grad():
            return cast(torch.Tensor, _Computed.apply(copy.new_zeros((), requires_grad=True), copy))  # type: ignore[no-untyped-call]
    return copy.requires_grad_(x.requires_grad)


class _Computed(torch.autograd.Function):
    """Makes a tensor no leaf, in the memory that it has and whatever its strides."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0].sum(), None
