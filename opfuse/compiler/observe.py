"""A forward pass that leaves no trace: the plans that it runs, and every value that it saves for the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from opfuse.compiler.fuser import recorded_plans
from opfuse.compiler.plan import Plan
from opfuse.compiler.segment import Kept, recorded_saves
from opfuse.core.context import Value
from opfuse.recipes.delayed import DelayedScalingStates, Snapshot
from opfuse.tensors.storage import QuantizedStorage
from opfuse.tensors.tensor import QuantizedTensor

OWN, TORCH, PLAIN = "own", "torch", "plain"


@dataclass(frozen=True)
class SavedValue:
    """One value that is saved for the backward pass.

    op: its node in the plan, behind the pipeline's name where there are several; "torch" for what plain modules save.
    name: what the op calls it. format, usages: of its planes; "plain" and none for a tensor. dtype: nominal.
    bytes: of its data, scales and amaxes together. memory: "own"; else who holds it anyway: "input", "extra input 0",
    "parameter 1.weight", "buffer ..." or the value that was saved first.
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
    """Bytes of the memory that the saved values keep alive, each block once, parameters and buffers left out.

    own: the inputs of the call, which the caller may hold anyway, left out as well.
    """

    bytes: int
    own: int


@dataclass(frozen=True)
class Observation:
    """What one forward pass did."""

    plans: tuple[Plan, ...]
    values: tuple[SavedValue, ...]
    totals: Totals


def observe(
    model: nn.Module, x: torch.Tensor, extras: Sequence[torch.Tensor], state: Mapping[str, torch.Tensor] | None = None
) -> Observation:
    """Run ``model(x, *extras)`` forward once. state: parameters and buffers to use in place of the model's own.

    The run works on copies of the inputs and of buffers, makes plans that no cache keeps, delayed-scaling states record nothing
    and those that it makes are dropped, and random state is restored. Only hooks of the caller see it.
    """
    state = dict(state or {name: buffer.clone() for name, buffer in model.named_buffers()})
    inputs = {name: _copy(tensor) for name, tensor in zip(_input_names(), (x, *extras))}
    tensors: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with _undone(model), recorded_plans(trial=True) as plans, recorded_saves() as kept, hooks:
        torch.func.functional_call(model, state, tuple(inputs.values()))
    weights = {f"parameter {name}": state.get(name, parameter) for name, parameter in model.named_parameters()}
    weights |= {f"buffer {name}": state[name] for name, _ in model.named_buffers()}
    memory = _Memory(weights, inputs)
    values = [*_of_pipelines(kept, memory), *_of_modules(kept, tensors, memory)]
    return Observation(tuple(plans), tuple(values), memory.totals())


def _input_names() -> Iterator[str]:
    yield "input"
    number = 0
    while True:
        yield f"extra input {number}"
        number += 1


def _of_pipelines(kept: Sequence[Kept], memory: _Memory) -> Iterator[SavedValue]:
    several = len({id(each.plan) for each in kept}) > 1
    for plan, index, name, value in kept:
        op = plan.graph.nodes[index].name
        yield memory.saved(f"{plan.name} {op}" if several else op, name, value)


def _of_modules(kept: Sequence[Kept], tensors: Iterable[torch.Tensor], memory: _Memory) -> Iterator[SavedValue]:
    known = {id(tensor) for each in kept for tensor in (each.value, *_parts(each.value))}
    return (memory.saved(TORCH, "", tensor) for tensor in tensors if id(tensor) not in known)


class _Memory:
    """Who holds each block of memory, by its address, and how much of it is saved.

    weights, inputs: what is held anyway, by name.
    """

    def __init__(self, weights: Mapping[str, Value], inputs: Mapping[str, Value]) -> None:
        self.holder: dict[int, str] = {}
        self.sizes: dict[int, int] = {}
        for name, value in weights.items():
            self._hold(name, value)
        self.weights = set(self.holder)
        for name, value in inputs.items():
            self._hold(name, value)
        self.held = set(self.holder)

    def _hold(self, name: str, value: Value) -> None:
        for tensor in _parts(value):
            self.holder.setdefault(_address(tensor), name)

    def saved(self, op: str, name: str, value: Value) -> SavedValue:
        """Count ``value`` and describe it."""
        parts = {id(tensor): tensor for tensor in _parts(value)}.values()
        holders = dict.fromkeys(self.holder.get(_address(tensor), OWN) for tensor in parts)
        for tensor in parts:
            address = _address(tensor)
            size = tensor.nbytes if address in self.held else tensor.untyped_storage().nbytes()
            self.sizes[address] = max(self.sizes.get(address, 0), size)
        self._hold(f"{op} {name}".strip(), value)
        return SavedValue(
            op,
            name,
            *_planes(value),
            str(value.dtype).removeprefix("torch."),
            tuple(value.shape),
            sum(tensor.nbytes for tensor in parts),
            ", ".join(holders),
        )

    def totals(self) -> Totals:
        """What all saved values come to."""
        kept = {address: size for address, size in self.sizes.items() if address not in self.weights}
        return Totals(sum(kept.values()), sum(size for address, size in kept.items() if address not in self.held))


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _parts(value: Value) -> tuple[torch.Tensor, ...]:
    storage = value.storage if isinstance(value, QuantizedTensor) else value
    return storage.tensors() if isinstance(storage, QuantizedStorage) else (storage,)


def _planes(value: Value) -> tuple[str, tuple[str, ...]]:
    """Formats and directions of a value."""
    storage = value.storage if isinstance(value, QuantizedTensor) else value
    if not isinstance(storage, QuantizedStorage):
        return PLAIN, ()
    formats = dict.fromkeys(str(storage.plane(usage).format) for usage in storage.usages)
    return " / ".join(formats), storage.usages


@contextmanager
def _undone(model: nn.Module) -> Iterator[None]:
    states = [getattr(module, "quantizer_states", None) for module in model.modules()]
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng())
        stack.enter_context(Snapshot().replaying())
        for state in states:
            if isinstance(state, DelayedScalingStates):
                stack.enter_context(state.kept())
        yield


def _copy(x: torch.Tensor) -> torch.Tensor:
    """``x`` in memory of its own, as aligned, as much a leaf and with the same need of a gradient: its plan is the same."""
    copy = x.detach().clone()
    if type(x) is torch.Tensor and (shift := (x.data_ptr() - copy.data_ptr()) % 16):
        room = x.new_empty(x.numel() + 16)
        shift = (x.data_ptr() - room.data_ptr()) % 16 // x.element_size()
        copy = room[shift : shift + x.numel()].view(x.shape).copy_(copy)
    if x.requires_grad and not x.is_leaf and type(x) is torch.Tensor:
        return copy.copy_(copy.clone().requires_grad_())
    return copy.requires_grad_(x.requires_grad)
