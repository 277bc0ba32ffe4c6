"""Recording one run: every torch op and every kernel launch, with tensors as numbers.

What a run does follows from its caller's key and from the layouts of the tensors that come in: shapes, strides, dtypes,
alignment. So all runs of one layout do the same. A recorder is a torch dispatch mode, which sees each op below autograd and
autocast; it listens to each kernel that is launched. A tensor is recognised by the memory that it shows, an address in a kernel's
parameter by the storage that it points into. The recorder holds no tensor, so a recorded run takes the memory of any other: it
knows a storage by a weak reference, and an address whose storage is gone is that of whatever is made there next.

If something cannot be repeated, the recording ends, and the run goes on: a value that the host reads, a shape that depends on
values, a tensor that came from outside without a number. ``refusal`` says which.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from opfuse.events import HostCallBegan, HostCallEnded, KernelLaunched, ValuesRead, subscribed
from opfuse.runtime.replay.instructions import WORD, AddressSlot, CallStep, LaunchStep, OpStep, Ref, Step, TensorOffset
from opfuse.torch_private.dispatch import UncompiledMode, schema_of
from opfuse.torch_private.tensors import number_of

_aten: Any = torch.ops.aten
PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Classes of tensors whose ops are those of torch alone; others may do as they like."""

_UNKNOWN_SHAPE = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
"""Torch's tags of ops whose results depend on values: a tensor's size, or a number for the host."""


class RecordedTensor(NamedTuple):
    """What a program has to know of a tensor.

    home: the number of the first tensor with elements that was seen in its storage. offset: in bytes from where that one begins,
    of a tensor with elements. size: bytes of the storage.
    """

    home: int
    offset: int
    size: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def on_meta(self) -> torch.Tensor:
        """A tensor that lies as this one does, without memory."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


class Unrecordable(Exception):
    """A run cannot be repeated by a program; the text says why. Never leaves the library."""


@dataclass(eq=False)
class _StorageSpan:
    """A storage, and where it ends.

    number, address: of the first tensor with elements that was seen in it; one without, as of a group without rows, has no
    address. views: numbers of all that were seen, by how they show it.
    """

    storage: StorageWeakRef
    end: int
    number: int = -1
    address: int = 0
    views: dict[Any, int] = field(default_factory=dict)


class Recorder(UncompiledMode):
    """The steps of one run, in order. Records what the thread does inside ``with recorder.recording():``.

    given: the tensors that come in, numbered from 0; one that is given twice is given twice in every run. A tensor subclass is
    passed on as it is, and the tensors that it wraps must be given as well. parameters: numbers of those that are given.
    refusal: why the run cannot be repeated, or empty.
    """

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given = range(len(given))
        self.parameters = frozenset(i for i, tensor in enumerate(given) if isinstance(tensor, torch.nn.Parameter))
        self.refusal = ""
        self.steps: list[Step] = []
        self.tensors: list[RecordedTensor | None] = []  # None: of a subclass
        self._paused = 0
        self._wrappers: dict[int, tuple[torch.Tensor, int]] = {}  # they hold no memory of their own
        self._spans: dict[int, _StorageSpan] = {}
        self._starts: list[int] = []
        with self._refusing():
            for tensor in given:
                known = self._span(tensor.untyped_storage()) if type(tensor) in PLAIN else None
                if known is not None and known.number >= 0 and _view_of(tensor) not in known.views:
                    raise Unrecordable("two tensors that come in share memory")
                self._new(tensor)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what this thread does."""
        if self.refusal:
            yield
            return
        with (
            subscribed(self.launched, KernelLaunched),
            subscribed(lambda read: self.refuse(f"the host reads {read.what}"), ValuesRead),
            subscribed(self._host_call_began, HostCallBegan),
            subscribed(self._host_call_ended, HostCallEnded),
            self,
        ):
            yield

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """End the recording where something inside the block cannot be repeated."""
        try:
            yield
        except Unrecordable as reason:
            self.refuse(str(reason))

    def refuse(self, reason: str) -> None:
        """End the recording, since the run cannot be repeated."""
        self.refusal = self.refusal or reason
        for records in (self.steps, self.tensors, self._spans, self._starts, self._wrappers):
            records.clear()

    # -- numbers -----------------------------------------------------------------------------------------------------

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a known tensor; for another view of known memory, a new number and a step that makes the view."""
        if type(tensor) not in PLAIN:
            if id(tensor) in self._wrappers:
                return self._wrappers[id(tensor)][1]
            raise Unrecordable(f"a {type(tensor).__name__} that came from elsewhere")
        found = self._known(tensor)
        return self._view(tensor) if found is None else found

    def place(self, number: int) -> TensorOffset:
        """Where a tensor begins."""
        tensor = self.tensors[number]
        if tensor is None or not tensor.shape.numel():
            raise Unrecordable("the address of a tensor without memory")
        return TensorOffset(tensor.home, tensor.offset)

    def homes(self, numbers: Iterable[int]) -> set[int] | None:
        """The memory of these tensors, each by the number of the first tensor seen there; None if one is no plain tensor."""
        homes = set[int]()
        for number in numbers:
            tensor = self.tensors[number]
            if tensor is None:
                return None
            if tensor.shape.numel():
                homes.add(tensor.home)
        return homes

    def are_same(self, one: int, other: int) -> bool:
        """Whether two plain tensors show the same memory in the same way."""
        return self.tensors[one] is not None and self.tensors[one] == self.tensors[other]

    def _new(self, tensor: torch.Tensor) -> int:
        number = len(self.tensors)
        if type(tensor) not in PLAIN:
            self.tensors.append(None)
            self._wrappers[id(tensor)] = tensor, number
            return number
        storage, address = tensor.untyped_storage(), tensor.data_ptr()
        if not storage.data_ptr() and tensor.numel():
            raise Unrecordable("a tensor without memory")
        span = self._span(storage) or self._enter(storage)
        span.views[_view_of(tensor)] = number
        if span.number < 0 and tensor.numel():
            span.number, span.address = number, address
        shown = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        self.tensors.append(RecordedTensor(span.number, address - span.address, storage.nbytes(), *shown))
        return number

    def _span(self, storage: torch.UntypedStorage) -> _StorageSpan | None:
        """What is known of a storage."""
        span = self._spans.get(_start(storage))
        return None if span is None or span.storage.expired() else span

    def _enter(self, storage: torch.UntypedStorage) -> _StorageSpan:
        """A new storage, in place of all that are gone and lay where it lies."""
        start = _start(storage)
        end = start + storage.nbytes()
        if start > 0:
            first, last = bisect_left(self._starts, start), bisect_left(self._starts, max(end, start + 1))
            self._starts[first:last] = [start]
        span = self._spans[start] = _StorageSpan(StorageWeakRef(storage), end)
        return span

    def _known(self, tensor: torch.Tensor) -> int | None:
        """The number of a plain tensor that was seen."""
        span = self._span(tensor.untyped_storage())
        return None if span is None else span.views.get(_view_of(tensor))

    def _view(self, tensor: torch.Tensor) -> int:
        span = self._span(tensor.untyped_storage())
        if span is None or span.number < 0:
            raise Unrecordable(f"a tensor {tuple(tensor.shape)} of {tensor.dtype} that came from elsewhere")
        first = self.tensors[span.number]
        if first is None or first.dtype != tensor.dtype:
            raise Unrecordable(f"a view of {tensor.dtype} that no op made")
        self._check_place(span.number)
        args = Ref(span.number), list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
        number = self._new(tensor)
        self.steps.append(OpStep(_aten.as_strided.default, args, {}, (number,), single=True))
        return number

    def _check_place(self, number: int) -> None:
        """Refuse an offset into the storage of an input: the next call's input may begin elsewhere in its storage."""
        if number < len(self.given):
            raise Unrecordable("a place in the storage of a tensor that comes in")

    def _at(self, address: int) -> TensorOffset:
        before = bisect_right(self._starts, address) - 1
        span = self._spans[self._starts[before]] if before >= 0 else None
        if span is None or span.number < 0 or address >= span.end or span.storage.expired():
            raise Unrecordable("the address of a tensor that came from elsewhere")
        return TensorOffset(span.number, address - span.address)

    # -- what is seen ------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused or self.refusal:
            return func(*args, **kwargs)
        if wrapper := next((kind for kind in types if kind not in PLAIN), None):
            with self:  # what it does with the tensors that it wraps is what is recorded
                return wrapper.__torch_dispatch__(func, types, args, kwargs)
        filled: Any = ()
        try:  # not a block that refuses: this runs for each op, and a context manager takes as long as all else here
            if _decided_by_values(func):
                raise Unrecordable(f"values decide the result of {func}")
            filled = self._filled(args), self._filled(kwargs)
            if func is _aten.as_strided.default and (len(args) > 3 or "storage_offset" in kwargs):
                self._check_place(self._spans[_start(args[0].untyped_storage())].number)
        except Unrecordable as reason:
            self.refuse(str(reason))
        result = func(*args, **kwargs)
        if not self.refusal:
            try:
                self._record_op(func, filled, result)
            except Unrecordable as reason:
                self.refuse(str(reason))
        return result

    def _filled(self, value: Any) -> Any:
        """Arguments with numbers in the place of tensors."""
        if isinstance(value, torch.Tensor):
            return Ref(self.number(value))
        kind = type(value)
        if kind is tuple or kind is list:
            return kind(map(self._filled, value))
        return {name: self._filled(part) for name, part in value.items()} if kind is dict else value

    def _record_op(self, func: Any, filled: tuple[Any, Any], result: Any) -> None:
        if func is _aten.detach.default or self._is_the_same(func, result):  # the same memory, under the same number
            return
        single = isinstance(result, torch.Tensor)
        tensors = (
            (result,) if single else () if result is None else tuple(result) if isinstance(result, (tuple, list)) else (None,)
        )
        if not all(type(tensor) in PLAIN for tensor in tensors):
            raise Unrecordable(f"{func} returns more than tensors")
        written = schema_of(func).is_mutable
        known = [self._known(tensor) if written else None for tensor in tensors]
        numbers = [self._new(tensor) if number is None else number for tensor, number in zip(tensors, known)]
        self.steps.append(OpStep(func, *filled, tuple(numbers), single))

    def _is_the_same(self, func: Any, result: Any) -> bool:
        """Whether a view has the layout of a tensor that the run has already made, as a transposed vector does."""
        known = self._known(result) if func.is_view and type(result) in PLAIN else None
        return known is not None and known >= len(self.given)

    def launched(self, launch: KernelLaunched) -> None:
        """Note a kernel that is about to be queued."""
        if self.refusal:
            return
        with self._refusing():
            if self._paused:
                raise Unrecordable(f"{launch.entry} is launched by a function of the host")
            blank, slots = list(launch.fields), []
            for index, word in pointers(launch.layout.format):
                if address := int(blank[index]):
                    slots.append(AddressSlot(word, self._at(address)))
                    blank[index] = 0
            parameter = launch.layout.pack(*blank)
            self.steps.append(LaunchStep(launch.variant, launch.entry, launch.grid, launch.device, parameter, tuple(slots)))

    def _host_call_began(self, call: HostCallBegan) -> None:
        """See nothing of what a function of the host does."""
        self._paused += 1

    def _host_call_ended(self, call: HostCallEnded) -> None:
        """Number its tensors, which are read from now on; a program calls it at its place."""
        self._paused -= 1
        if not self.refusal and call.tensors is not None:
            with self._refusing():
                known = [(tensor, self._known(tensor)) for tensor in call.tensors]
                numbers = tuple(self._new(tensor) if number is None else number for tensor, number in known)
                self.steps.append(CallStep(call.function, numbers))


@cache
def _decided_by_values(op: Any) -> bool:
    """Whether values decide the result of an op; torch makes its set of tags anew at each look."""
    return not _UNKNOWN_SHAPE.isdisjoint(op.tags)


def _start(storage: torch.UntypedStorage) -> int:
    """Where a storage begins. One without bytes has no address: it is known by its number, below zero."""
    return storage.data_ptr() or -number_of(storage)


def _view_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """How a tensor shows its storage."""
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


@cache
def pointers(layout: str) -> tuple[tuple[int, int], ...]:
    """For every address in a native ``struct`` format: its index among the fields, and among the 8-byte words when packed."""
    found, index, before = [], 0, ""
    for count, char in _codes(layout):
        if count == 0:
            before += f"0{char}"
        for _ in range(count):
            before += char
            if char == "P":
                found.append((index, struct.calcsize(before) // WORD - 1))
            index += char != "x"
    return tuple(found)


def _codes(layout: str) -> Iterable[tuple[int, str]]:
    count = ""
    for char in layout:
        if char.isdigit():
            count += char
        else:
            yield int(count or 1), char
            count = ""
