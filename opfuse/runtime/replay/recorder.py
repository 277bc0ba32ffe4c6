"""Recording one run: every torch op and every kernel launch, with tensors as numbers.

What a run does follows from its caller's key and from the looks of the tensors that come in: shapes, strides, dtypes, alignment.
So all runs of one look do the same. A recorder is a torch dispatch mode, which sees each op below autograd and autocast;
it listens to each kernel that is launched. A tensor is recognised by the memory that it shows, an
address in a kernel's parameter by the storage that it points into. All tensors of a run stay alive while it is recorded, so no
memory is used twice.

If something cannot be repeated, the recording ends, and the run goes on: a value that the host reads, a shape that depends on
values, a tensor that came from outside without a number. ``refusal`` says which.
"""

from __future__ import annotations

import struct
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch

from opfuse.events import HostCallBegan, HostCallEnded, KernelLaunched, ValuesRead, subscribed
from opfuse.runtime.replay.instructions import WORD, AddressSlot, CallStep, LaunchStep, OpStep, Ref, Step, TensorOffset
from opfuse.torch_private.dispatch import TorchDispatchMode, schema_of
from opfuse.torch_private.tensors import number_of

_aten: Any = torch.ops.aten
PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Classes of tensors whose ops are those of torch alone; others may do as they like."""

_UNKNOWN_SHAPE = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
"""Torch's tags of ops whose results depend on values: a tensor's size, or a number for the host."""

ViewKey = tuple[Any, ...]
"""What a tensor shows: storage, offset in it, shape, strides, dtype."""


class Unrecordable(Exception):
    """A run cannot be repeated by a program; the text says why. Never leaves the library."""


class _StorageSpan(NamedTuple):
    """A storage: its end, and the first tensor that was seen in it, with its address."""

    end: int
    number: int
    address: int


class Recorder(TorchDispatchMode):
    """The steps of one run, in order. Records what the thread does inside ``with recorder.recording():``.

    given: the tensors that come in, numbered from 0; one that is given twice is given twice in every run. A tensor subclass is
    passed on as it is, and the tensors that it wraps must be given as well. refusal: why the run cannot be repeated, or empty.
    """

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given = tuple(given)
        self.refusal = ""
        self.steps: list[Step] = []
        self.tensors: list[torch.Tensor] = []
        self._alive: list[torch.Tensor] = []
        self._paused = 0
        self._wrappers: dict[int, int] = {}
        self._views: dict[ViewKey, int] = {}
        self._memory: dict[int, _StorageSpan] = {}
        self._starts: list[int] = []
        with self._refusing():
            for tensor in self.given:
                known = self._memory.get(tensor.untyped_storage().data_ptr()) if type(tensor) in PLAIN else None
                if known is not None and _view_key(tensor) not in self._views:
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
        for records in (self.steps, self.tensors, self._alive, self._views, self._memory, self._starts, self._wrappers):
            records.clear()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would wrap the method below, and import torch.compile at its first call, which takes seconds.

        Nothing is lost: what opfuse runs inside of compiled code is a custom op, where dynamo does not look.
        """
        return False

    # -- numbers -----------------------------------------------------------------------------------------------------

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a known tensor; for another view of known memory, a new number and a step that makes the view."""
        if type(tensor) not in PLAIN:
            if id(tensor) in self._wrappers:
                return self._wrappers[id(tensor)]
            raise Unrecordable(f"a {type(tensor).__name__} that came from elsewhere")
        found = self._views.get(_view_key(tensor))
        return self._view(tensor) if found is None else found

    def place(self, number: int) -> TensorOffset:
        """Where a tensor begins."""
        return self._at(self.tensors[number].data_ptr())

    def homes(self, numbers: Iterable[int]) -> set[int] | None:
        """The memory of these tensors, each by the number of the first tensor seen there; None if one is no plain tensor."""
        tensors = [self.tensors[number] for number in numbers]
        if not all(type(tensor) in PLAIN for tensor in tensors):
            return None
        return {self._at(tensor.data_ptr()).number for tensor in tensors if tensor.numel()}

    def are_same(self, *numbers: int) -> bool:
        """Whether these plain tensors show the same memory in the same way."""
        tensors = [self.tensors[number] for number in numbers]
        return all(type(tensor) in PLAIN for tensor in tensors) and len({_view_key(tensor) for tensor in tensors}) == 1

    def _new(self, tensor: torch.Tensor) -> int:
        number = len(self.tensors)
        self.tensors.append(tensor)
        if type(tensor) not in PLAIN:
            self._wrappers[id(tensor)] = number
            return number
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if not start and tensor.numel():
            raise Unrecordable("a tensor without memory")
        if start not in self._memory and tensor.numel():  # one without elements, as of a group without rows, has no address
            insort(self._starts, start)
            self._memory[start] = _StorageSpan(start + storage.nbytes(), number, tensor.data_ptr())
        self._views[_view_key(tensor)] = number
        return number

    def _view(self, tensor: torch.Tensor) -> int:
        memory = self._memory.get(tensor.untyped_storage().data_ptr())
        if memory is None:
            raise Unrecordable(f"a tensor {tuple(tensor.shape)} of {tensor.dtype} that came from elsewhere")
        if self.tensors[memory.number].dtype != tensor.dtype:
            raise Unrecordable(f"a view of {tensor.dtype} that no op made")
        self._check_place(memory.number)
        args = Ref(memory.number), list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
        number = self._new(tensor)
        self.steps.append(OpStep(_aten.as_strided.default, args, {}, (number,), single=True))
        return number

    def _check_place(self, number: int) -> None:
        """Refuse an offset into the storage of an input: the next call's input may begin elsewhere in its storage."""
        if number < len(self.given):
            raise Unrecordable("a place in the storage of a tensor that comes in")

    def _at(self, address: int) -> TensorOffset:
        before = bisect_right(self._starts, address) - 1
        memory = self._memory[self._starts[before]] if before >= 0 else None
        if memory is None or address >= memory.end:
            raise Unrecordable("the address of a tensor that came from elsewhere")
        return TensorOffset(memory.number, address - memory.address)

    # -- what is seen ------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused or self.refusal:
            return func(*args, **kwargs)
        if wrapper := next((kind for kind in types if kind not in PLAIN), None):
            with self:  # what it does with the tensors that it wraps is what is recorded
                return wrapper.__torch_dispatch__(func, types, args, kwargs)
        filled: Any = ()
        with self._refusing():
            if _decided_by_values(func):
                raise Unrecordable(f"values decide the result of {func}")
            filled = self._filled(args), self._filled(kwargs)
            if func is _aten.as_strided.default and (len(args) > 3 or "storage_offset" in kwargs):
                self._check_place(self._memory[args[0].untyped_storage().data_ptr()].number)
        result = self._run(func, args, kwargs)
        if not self.refusal:
            with self._refusing():
                self._note(func, filled, result)
        return result

    def _filled(self, value: Any) -> Any:
        """Arguments with numbers in the place of tensors."""
        if isinstance(value, torch.Tensor):
            return Ref(self.number(value))
        kind = type(value)
        if kind is tuple or kind is list:
            return kind(map(self._filled, value))
        return {name: self._filled(each) for name, each in value.items()} if kind is dict else value

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of the op. If memory runs out, the recording is given up with the tensors it keeps, and the op rerun."""
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError:
            self.refuse("there is no memory to keep all tensors of the run")
        return func(*args, **kwargs)

    def _note(self, func: Any, filled: tuple[Any, Any], result: Any) -> None:
        if func is _aten.detach.default or self._is_the_same(func, result):  # the same memory, under the same number
            self._alive.append(result)
            return
        single = isinstance(result, torch.Tensor)
        tensors = (
            (result,) if single else () if result is None else tuple(result) if isinstance(result, (tuple, list)) else (None,)
        )
        if not all(type(tensor) in PLAIN for tensor in tensors):
            raise Unrecordable(f"{func} returns more than tensors")
        written = schema_of(func).is_mutable
        numbers = [self._views[look] if written and (look := _view_key(t)) in self._views else self._new(t) for t in tensors]
        self.steps.append(OpStep(func, *filled, tuple(numbers), single))

    def _is_the_same(self, func: Any, result: Any) -> bool:
        """Whether a view has the look of a tensor that the run has already made, as a transposed vector does."""
        return bool(func.is_view) and type(result) in PLAIN and self._views.get(_view_key(result), -1) >= len(self.given)

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
                numbers = tuple(self._views[key] if (key := _view_key(t)) in self._views else self._new(t) for t in call.tensors)
                self.steps.append(CallStep(call.function, numbers))


@cache
def _decided_by_values(op: Any) -> bool:
    """Whether values decide the result of an op; torch makes its set of tags anew at each look."""
    return not _UNKNOWN_SHAPE.isdisjoint(op.tags)


def _view_key(tensor: torch.Tensor) -> ViewKey:
    storage = tensor.untyped_storage()
    where = storage.data_ptr() or -number_of(storage)  # storages without bytes have no address, and are not one for that
    return where, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


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
