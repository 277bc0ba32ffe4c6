"""A recording as a program, which fills in addresses and launches, without branches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, cast

import torch

from opfuse.environment import variable
from opfuse.kernels.engine import launch as launching
from opfuse.runtime.replay.batch_launches import joined_launches
from opfuse.runtime.replay.codegen import MAKES_ROOM, SLAB, Line, located
from opfuse.runtime.replay.cublaslt import OPERANDS, Product, ProductForm, library
from opfuse.runtime.replay.host_bytes import bytes_of
from opfuse.runtime.replay.instructions import CallStep, CopyStep, Joining, LaunchStep, OpStep, ProductStep, Step, TensorOffset
from opfuse.runtime.replay.launch_args import Frame, Reader, Readers
from opfuse.runtime.replay.memory_plan import (
    Slab,
    aligned,
    first_free,
    largest_alive,
    numbers_of,
    shared_rooms,
    slab_of,
    with_rooms,
)
from opfuse.runtime.replay.recorder import RecordedTensor, Recorder
from opfuse.torch_private.devices import raw_stream

_aten: Any = torch.ops.aten

SMALL = 1 << 20
"""Bytes of the largest tensor in a program's slab, which is allocated from the first step to the last.

Larger tensors are freed after their last reader (``memory_plan.py``). torch's allocator divides small from large blocks
at the same size.
"""

PART = 512
"""Which part of a device's memory a program may hold longer than it must, so that a CUDA graph can stand for what it queues.

For a graph, all memory is made before anything is queued (``launch_graph.py``). A program that would hold more lets each large
tensor go as soon as it is read: with many rows memory counts, and the host waits for the device.
"""


@cache
def spare_bytes(device: int) -> int:
    """Bytes of :data:`PART` of a device's memory."""
    return torch.cuda.get_device_properties(device).total_memory // PART


@dataclass(frozen=True, eq=False)
class Recording:
    """The steps of a run. given, results: numbers of the tensors that come in and go out. device: where launches run.

    sizes, large: bytes of the memory of small tensors on that device, and of others, by number. parameters: those that come in.
    """

    steps: tuple[Step, ...]
    given: tuple[int, ...]
    results: tuple[int, ...]
    device: int | None
    sizes: Mapping[int, int]
    parameters: frozenset[int]
    large: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, recorder: Recorder, results: Sequence[int]) -> Recording:
        """The recorded steps without those that nobody needs, with launches joined, and products by cuBLASLt where possible."""
        joined = _without_same_views(recorder, _joined(recorder.steps), results)
        steps = _needed([substep for step in joined for substep in _by_address(recorder, step)], results)
        device = next((step.device for step in steps if isinstance(step, (LaunchStep, ProductStep))), None)
        made = cls(tuple(steps), tuple(recorder.given), tuple(results), device, {}, recorder.parameters)
        if device is None:  # ops of torch alone: no launch to join, and nobody reads an address
            return made
        copied = [substep for step in steps for substep in _copy_by_address(recorder, step, device)]
        steps = joined_launches(copied, recorder.homes)
        there = sorted({*numbers_of(steps), *made.given, *made.results})
        every = {i: size for i in there if (size := _size_on(recorder.tensors[i], device))}
        sizes = {i: size for i, size in every.items() if size <= SMALL}
        large = {i: size for i, size in every.items() if size > SMALL}
        return replace(made, steps=tuple(steps), sizes=sizes, large=large)

    @property
    def lasting(self) -> set[int]:
        """Numbers of tensors whose memory stays to the end: in a slab, of a parameter, which its module holds, or going out."""
        return {*self.sizes, *self.parameters, *self.results}

    def with_shared_rooms(self) -> tuple[Step, ...]:
        """The steps, with large tensors that are made and let go together in one room."""
        return tuple(shared_rooms(self.steps, MAKES_ROOM[0], self.large, self.lasting, (*self.given, *self.results)))

    def as_graph(self, slab: Slab) -> bool:
        """Whether a CUDA graph may stand for what a call queues. slab: with large tensors, too.

        So it may if whatever the steps compute is queued by addresses, and holding all memory to the end does not cost much.
        """
        others = [step for step in self.steps if isinstance(step, OpStep)]
        if self.device is None or not all(step.op.is_view or step.op in MAKES_ROOM for step in others):
            return False
        given = [number for number in self.given if number not in self.parameters]
        made = [step.results[0] for step in others if step.op in MAKES_ROOM]
        every = {**self.sizes, **self.large}
        sizes = {number: every[number] for number in (*given, *made) if number in every}
        going = {*self.results}
        for step in reversed(others):
            if step.op.is_view and not going.isdisjoint(step.results):
                going.update(step.reads())
        whole = slab.size + sum(size for number, size in sizes.items() if number not in slab.offsets)
        return whole - largest_alive(self.steps, sizes, given, going) <= spare_bytes(self.device)

    def in_rooms(self, groups: Sequence[Sequence[int]], sizes: Mapping[int, int]) -> Recording:
        """The same with tensors that come in, or go out, in one of bytes for each of ``groups``, in the place of the first.

        sizes: bytes of the tensors, of which kernels alone read the addresses.
        """
        rooms = dict(enumerate(groups, first_free((*numbers_of(self.steps), *self.given, *self.results))))
        inside = {number: room for room, group in rooms.items() for number in group}

        def moved(numbers: Sequence[int]) -> Iterator[int]:
            left = set(rooms)
            for number in numbers:
                if number not in inside:
                    yield number
                elif inside[number] in left:
                    left.remove(inside[number])
                    yield inside[number]

        steps = with_rooms(self.steps, rooms, sizes)
        large = {**self.large, **{room: sum(aligned(sizes[number]) for number in group) for room, group in rooms.items()}}
        return replace(self, steps=tuple(steps), large=large, given=tuple(moved(self.given)), results=tuple(moved(self.results)))

    @cached_property
    def read_as_tensors(self) -> frozenset[int]:
        """Numbers of the tensors of which torch reads more than the address."""
        return frozenset(number for step in self.steps if isinstance(step, (OpStep, CallStep)) for number in step.reads())

    @cached_property
    def seen_as_tensors(self) -> frozenset[int]:
        """These, and what goes out, which the caller gets as tensors."""
        return self.read_as_tensors.union(self.results)


class Program:
    """Runs a recording again, for tensors that look like those of the recorded run.

    Small tensors that only kernels read lie in one slab; others are tensors of their own: large ones, those that torch reads, and
    results. Threads may run a program at the same time: each call has a frame of its own. Nothing that a call allocates is held
    between calls.

    recording: what it was made of, until :meth:`settle`. launches, products: its steps of these kinds, in order. used: larger
    than that of a program whose last call, or whose making, was earlier.
    """

    recording: Recording | None
    used: int
    _bytes: int | None

    def __init__(self, recorder: Recorder, results: Sequence[int]) -> None:
        """results: the numbers of the tensors that a call returns."""
        self._make(Recording.of(recorder, results))

    @classmethod
    def of(cls, recording: Recording) -> Program:
        """The program of a recording."""
        program = cls.__new__(cls)
        program._make(recording)
        return program

    def settle(self) -> None:
        """Let go of the recording, of which nothing else will be made: most of what a program takes on the host."""
        self.recording, self._bytes = None, None

    def _make(self, recording: Recording) -> None:
        self.recording, self.used = recording, next(_USES)
        self._bytes = None
        self._device = recording.device
        steps, (empty, zeros) = recording.steps, MAKES_ROOM
        workspace = max((step.workspace for step in steps if isinstance(step, ProductStep)), default=0)
        zeroed = slab_of(steps, recording.sizes, zeros, recording.results, reuses=False)

        def slab_for(steps: Sequence[Step], sizes: Mapping[int, int]) -> Slab:
            slab = slab_of(steps, sizes, empty, recording.results, reserved=zeroed.size + workspace)
            return slab._replace(offsets={**zeroed.offsets, **slab.offsets})

        self.slab = slab_for(steps, {**recording.sizes, **recording.large})
        together = variable("OPFUSE_LAUNCH_GRAPHS") != "0" and recording.as_graph(self.slab)
        if not together:
            steps = recording.with_shared_rooms()
            self.slab = slab_for(steps, recording.sizes)
        self.launches = [step for step in steps if isinstance(step, LaunchStep)]
        self.products = [step for step in steps if isinstance(step, ProductStep)]
        copies = [step for step in steps if isinstance(step, CopyStep)]
        places = {SLAB: 0, **self.slab.offsets}
        bases: dict[int, int] = {}
        self._readers = self._read(bases, places, copies, workspace=zeroed.size)
        line = Line(None if self._device is None else torch.device("cuda", self._device), bases, places, together=together)
        self.code, self._run, self._queue = line.write(
            steps,
            recording.given,
            recording.results,
            slab=self.slab.size,
            zeroed=zeroed.size,
        )
        self._frames = [self._new_frame()]

    def _read(
        self, bases: dict[int, int], places: Mapping[int, int], copies: Sequence[CopyStep], *, workspace: int
    ) -> dict[int, Readers]:
        """The readers of each address, by base. Bases are numbered here: tensors, and the slab for those in it, by ``places``."""
        readers: dict[int, Readers] = {}

        def base_of(place: TensorOffset) -> tuple[int, int]:
            number, offset = located(place, places)
            base = bases.setdefault(number, len(bases))
            readers.setdefault(base, Readers([], []))
            return base, offset

        for index, launch in enumerate(self.launches):
            for slot in launch.slots:
                base, offset = base_of(slot.place)
                readers[base].launches.append(Reader(index, slot.word, offset))
        for index, product in enumerate(self.products):
            operands = {**product.places, "workspace": TensorOffset(SLAB, workspace)}
            for at, operand in enumerate(OPERANDS):
                base, offset = base_of(operands[operand])
                readers[base].products.append(Reader(index, at, offset))
        for copy in copies:
            base_of(copy.source)
            base_of(copy.target)
        return readers

    def _new_frame(self) -> Frame:
        forms = [step.form for step in self.products]
        return Frame([step.parameter for step in self.launches], forms, self._readers, self._queue)

    @property
    def text(self) -> str:
        """The function that runs it, as Python."""
        return self.code.text

    @property
    def block_bytes(self) -> int:
        """Bytes of the slab."""
        return self.slab.size

    @property
    def instance_bytes(self) -> int:
        """Bytes of the host's memory that it takes beside its code, which equal layers share."""
        if self._bytes is None:
            self._bytes = bytes_of([self, self.constants], without=[self.code]) + self.frame_bytes
        return self._bytes

    @property
    def frame_bytes(self) -> int:
        """Bytes of the parameters that it holds between calls, in memory that is no object of Python's."""
        return sum(frame.nbytes for frame in self._frames)

    @property
    def graphs(self) -> int:
        """CUDA graphs that stand for its launches."""
        return sum(len(frame.queue) for frame in self._frames if frame.queue is not None)

    @property
    def constants(self) -> Mapping[str, object]:
        """The values of names in the text."""
        return self._run.__globals__

    def __call__(self, given: list[torch.Tensor]) -> list[Any]:
        """The results. given: the inputs, in the order of the recording; the list is emptied.

        An input that nobody else holds is freed after its last reader.
        """
        device = self._device
        if device is not None and not launching.is_current(device):
            with launching.on_device(device):
                return self(given)
        self.used = next(_USES)
        try:
            frame = self._frames.pop()
        except IndexError:  # other calls have them all
            frame = self._new_frame()
        results = self._run(given, frame, 0 if device is None else raw_stream(device))
        self._frames.append(frame)
        return results


_USES = itertools.count()


def host_bytes(programs: Iterable[Program]) -> int:
    """Bytes of the host's memory that programs take together. Code that some share counts once."""
    every = list({id(each): each for each in programs}.values())
    return sum(each.instance_bytes for each in every) + sum({id(each.code): each.code.nbytes for each in every}.values())


def _size_on(tensor: RecordedTensor | None, device: int) -> int | None:
    """Bytes of a tensor's memory, if that is on the device."""
    return tensor.size if tensor is not None and (tensor.device.type, tensor.device.index) == ("cuda", device) else None


# -- what a program makes of a recording ----------------------------------------------------------------------------------------


def _joined(steps: Sequence[Step]) -> list[Step]:
    """``steps`` with one call in place of all calls that can be made together, of which there may be one."""
    calls = [step for step in steps if isinstance(step, CallStep)]
    functions = [step.function for step in calls]
    found = [(call, each) for call, each in zip(calls, functions) if isinstance(each, Joining)]
    if not found:
        return list(steps)
    (first, function), *others = found
    joined = CallStep(
        cast(Joining, function).together([each for _, each in others]), tuple(i for call, _ in found for i in call.results)
    )
    gone = {id(call) for call, _ in others}
    return [joined if step is first else step for step in steps if id(step) not in gone]


def _without_same_views(recorder: Recorder, steps: Sequence[Step], results: Sequence[int]) -> Iterator[Step]:
    """``steps`` without views that are the same as their tensor, except results, which must not be the tensor itself."""
    same, out = dict[int, int](), {*results}
    for step in steps:
        if not isinstance(step, OpStep):
            yield step
            continue
        step = step.renamed(same)
        number = step.results[0] if step.op.is_view and step.single else None
        if number is None or number in out or not recorder.are_same(number, source := next(step.reads())):
            yield step
        else:
            same[number] = source


def _needed(steps: Sequence[Step], results: Sequence[int]) -> list[Step]:
    """``steps`` without pure ops whose results nobody reads, such as views of which only the address was read."""
    read, kept = set(results), []
    for step in reversed(steps):
        if isinstance(step, OpStep) and step.is_pure and read.isdisjoint(step.results):
            continue
        read.update(step.reads())
        kept.append(step)
    return kept[::-1]


def _by_address(recorder: Recorder, step: Step) -> list[Step]:
    """``step``; a product that torch gives to cuBLASLt becomes one by addresses, after an op that allocates its result."""
    if not isinstance(step, OpStep) or step.op not in _SCALED_MM or library() is None:
        return [step]
    given, out = step.by_name(), step.results[0]
    left, right = given["self"].number, given["mat2"].number
    known = [tensor for number in (left, right, out) if (tensor := recorder.tensors[number]) is not None]
    device = known[0].device
    a, b, c = (tensor.on_meta() for tensor in known)
    if (
        device.type != "cuda"
        or given["bias"] is not None
        or not (a.is_contiguous() and b.t().is_contiguous() and c.is_contiguous())
    ):
        return [step]
    (left_scaling, *_), (right_scaling, *_) = given["recipe_a"], given["recipe_b"]
    form = ProductForm(
        rows=len(a),
        columns=b.shape[1],
        length=b.shape[0],
        left=a.dtype,
        right=b.dtype,
        out=c.dtype,
        left_scaling=left_scaling,
        right_scaling=right_scaling,
        fast=bool(given["use_fast_accum"]),
        device=device.index,
    )
    tried = Product(form)
    if not tried.found:
        return [step]
    (left_scale, *_), (right_scale, *_) = given["scale_a"], given["scale_b"]
    numbers = {"left": left, "right": right, "left_scale": left_scale.number, "right_scale": right_scale.number, "out": out}
    product = ProductStep(form, {name: recorder.place(number) for name, number in numbers.items()}, tried.workspace)
    if step.op is _aten._scaled_mm_v2.out:
        return [product]
    room = {"dtype": c.dtype, "device": device}
    return [OpStep(_aten.empty.memory_format, (list(c.shape),), room, step.results, single=True), product]


def _copy_by_address(recorder: Recorder, step: Step, device: int) -> list[Step]:
    """``step``; a clone of memory on the device that has no gaps becomes a copy by addresses, after an op that allocates."""
    if not isinstance(step, OpStep) or step.op is not _aten.clone.default or step.kwargs:
        return [step]
    (number,) = step.reads()
    source = recorder.tensors[number]
    if source is None or not _size_on(source, device) or not source.shape.numel():
        return [step]
    like = torch.empty(source.shape, dtype=source.dtype, device="meta")
    if like.stride() != source.strides:  # a clone has them as they are, also of a dimension of length 1
        return [step]
    room = {"dtype": source.dtype, "device": source.device}
    made = OpStep(_aten.empty.memory_format, (list(source.shape),), room, step.results, single=True)
    return [made, CopyStep(recorder.place(number), recorder.place(step.results[0]), like.nbytes)]


_SCALED_MM = (_aten._scaled_mm_v2.default, _aten._scaled_mm_v2.out)
