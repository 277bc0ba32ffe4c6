"""The steps of a recorded run, with tensors as numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from opfuse.kernels.engine.compiling import Variant
from opfuse.kernels.engine.launch import Grid
from opfuse.runtime.replay.cublaslt import ProductForm
from opfuse.torch_private.dispatch import arguments_of, schema_of
from opfuse.torch_private.operations import tree_map_only

WORD = 8
"""Bytes of a word of a launch's parameter, which holds one address."""


class Ref(NamedTuple):
    """A tensor by its number, in the arguments of an op."""

    number: int


class TensorOffset(NamedTuple):
    """Where something lies in memory: bytes after the first element of the tensor ``number``."""

    number: int
    offset: int


class AddressSlot(NamedTuple):
    """An address in a launch's parameter: the word of 8 bytes where it stands, and what it is the address of."""

    word: int
    place: TensorOffset


@dataclass(frozen=True, eq=False)
class OpStep:
    """A torch op. results: the numbers of what it returns; single: which is one tensor, not a tuple."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int, ...]
    single: bool

    def reads(self) -> Iterator[int]:
        """Numbers of the tensors that the step reads or writes."""
        return iter(self._read)

    @cached_property
    def _read(self) -> tuple[int, ...]:
        return (*numbers_in(self.args), *numbers_in(self.kwargs))

    def by_name(self) -> dict[str, Any]:
        """The arguments by the names of the op's schema, with its defaults."""
        declared = arguments_of(self.op)
        given = dict(zip((argument.name for argument in declared), self.args)) | self.kwargs
        return {argument.name: given.get(argument.name, argument.default_value) for argument in declared}

    def renamed(self, names: Mapping[int, int]) -> OpStep:
        """A copy of the step that reads tensors of other numbers."""
        if names.keys().isdisjoint(self.reads()):
            return self
        args, kwargs = tree_map_only(Ref, lambda ref: Ref(names.get(ref.number, ref.number)), (self.args, self.kwargs), _is_ref)
        return replace(self, args=args, kwargs=kwargs)

    @property
    def is_pure(self) -> bool:
        """Whether the step can be dropped if nobody reads its results: it writes nothing and draws no random numbers.

        An op without results, such as an assertion, is there for its effect.
        """
        return bool(self.results) and _has_no_effect(self.op)


@dataclass(frozen=True, eq=False)
class LaunchStep:
    """A kernel. parameter: its one parameter as it is packed, with 0 for the addresses, which are in ``slots``."""

    variant: Variant
    entry: str
    grid: Grid
    device: int
    parameter: bytes
    slots: tuple[AddressSlot, ...]

    def reads(self) -> Iterator[int]:
        """Numbers of the tensors that the step reads or writes."""
        return (slot.place.number for slot in self.slots)


@dataclass(frozen=True, eq=False)
class ProductStep:
    """A product by addresses. places: of its operands, their scales and the result, by the names of cuBLASLt's operands.

    workspace: bytes that it needs beside them.
    """

    form: ProductForm
    places: Mapping[str, TensorOffset]
    workspace: int

    @property
    def device(self) -> int:
        """The number of the CUDA device."""
        return self.form.device

    def reads(self) -> Iterator[int]:
        """Numbers of the tensors that the step reads or writes."""
        return (place.number for place in self.places.values())


@dataclass(frozen=True, eq=False)
class CopyStep:
    """A copy of so many bytes on the device of the program."""

    source: TensorOffset
    target: TensorOffset
    nbytes: int

    def reads(self) -> Iterator[int]:
        """Numbers of the tensors that the step reads or writes."""
        return iter((self.source.number, self.target.number))


@dataclass(frozen=True, eq=False)
class CallStep:
    """A host function that returns tensors of the same layout at every call, such as the scale and amax of a delayed cast.

    It may run before what the recording has queued before it: what it writes is read by no launch that comes earlier.
    """

    function: Callable[[], Sequence[torch.Tensor]]
    results: tuple[int, ...]

    def reads(self) -> Iterator[int]:
        """No tensors."""
        return iter(())


@runtime_checkable
class Joining(Protocol):
    """A host function that can be merged with others of its kind into one call, at the place of the first."""

    def together(self, others: Sequence[Any]) -> Callable[[], Sequence[torch.Tensor]]:
        """One function that returns the tensors of this one, then those of the others."""


def _is_ref(value: Any) -> bool:
    return isinstance(value, Ref)


@cache
def _has_no_effect(op: Any) -> bool:
    """Whether an op writes nothing and draws no random numbers."""
    return not schema_of(op).is_mutable and torch.Tag.nondeterministic_seeded not in op.tags


Step = OpStep | LaunchStep | ProductStep | CopyStep | CallStep


def numbers_in(value: Any) -> Iterator[int]:
    """The numbers of the tensors in arguments."""
    kind = type(value)
    if kind is Ref:
        yield value.number
    elif kind is dict:
        for each in value.values():
            yield from numbers_in(each)
    elif kind is tuple or kind is list:
        for each in value:
            yield from numbers_in(each)
