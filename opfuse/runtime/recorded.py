"""What is kept of recorded segments: programs of the forward pass and, for each, of the backward pass, by look."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from opfuse.core.context import Value
from opfuse.environment import number
from opfuse.program.line import MAKES_ROOM, plain_room
from opfuse.program.program import Program, host_bytes
from opfuse.program.rooms import made_together
from opfuse.program.slab import aligned, last_reads
from opfuse.program.steps import OpStep, Step
from opfuse.program.tape import Tape, Unrecordable
from opfuse.runtime.gradients import Left
from opfuse.runtime.run import Runner
from opfuse.tensors.storage import QuantizedStorage

_log = logging.getLogger("opfuse.programs")

INTERPRETED_FIRST = True
"""Whether a look is interpreted when it first comes, and recorded when it comes again, since some never do."""

LOOKS, BACKWARD_LOOKS = 32, 8
"""How many looks of inputs a segment keeps programs for, and how many looks of gradients behind each; the oldest goes first."""

SEEN, REFUSED = "seen", "refused"


@dataclass(eq=False)
class RecordedLook:
    """What was recorded for one look."""

    program: Program

    def programs(self) -> Iterator[Program]:
        """All that are kept for this look."""
        yield self.program

    def further(self) -> Iterator[Programs]:
        """What is known of the looks of what follows, as of gradients."""
        yield from ()


class Programs(dict[Any, Any]):
    """What is known of each look: SEEN once, REFUSED by the recorder, or what was recorded. At most ``limit`` looks.

    The programs of a process take at most ``OPFUSE_PROGRAM_BYTES`` of the host's memory. To make room, those that were used least
    recently go, but for the one that needs the room; a look whose program is gone is a new one. dropped: how many went so.

    Threads may share one. No OrderedDict: parts of a look are hashed and compared by Python, in the midst of which another thread
    may run, and an OrderedDict that is written meanwhile loses its order.
    """

    def __init__(self, limit: int = LOOKS) -> None:
        super().__init__()
        self.limit, self.dropped = limit, 0
        _ALL[id(self)] = self

    def is_new(self, look: Any) -> bool:
        """Whether this is the first call with a look; notes that it came."""
        if not INTERPRETED_FIRST or look in self:
            return False
        self.note(look, SEEN)
        return True

    def note(self, look: Any, what: Any) -> None:
        """Enter ``what`` for a look, and forget the oldest entry if there are too many."""
        self.pop(look, None)  # so that it is entered as the latest
        self[look] = what
        for oldest in [*self][: max(len(self) - self.limit, 0)]:
            self.pop(oldest, None)
        if isinstance(what, RecordedLook):
            _make_room(what)

    def made(self) -> list[tuple[Any, RecordedLook]]:
        """The looks of which there are programs."""
        return [(look, what) for look, what in list(self.items()) if isinstance(what, RecordedLook)]


_ALL: WeakValueDictionary[int, Programs] = WeakValueDictionary()


@dataclass
class _Spare:
    """Bytes that programs may yet take under a bound before all of them are counted again, which takes as long as there are many.

    What goes by itself is not added, so it is never too much.
    """

    bound: int = 0
    left: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def takes(self, size: int, bound: int) -> bool:
        """Whether there are so many; they are taken."""
        with self.lock:
            fits = bound == self.bound and size <= self.left
            self.left -= size * fits
            return fits

    def counted(self, total: int, bound: int) -> None:
        """All programs take ``total`` bytes."""
        with self.lock:
            self.bound, self.left = bound, bound - total


_spare = _Spare()


def _make_room(new: RecordedLook) -> None:
    """Drop what was used least recently until the programs of the process fit in their bound; never ``new``."""
    most = number("OPFUSE_PROGRAM_BYTES")
    if _spare.takes(host_bytes(new.programs()), most):
        return
    while True:
        known = [each for ref in _ALL.valuerefs() if (each := ref()) is not None]
        found = [(looks, look, what) for looks in known for look, what in looks.made()]
        total = host_bytes(program for _, _, what in found for program in what.programs())
        old = [each for each in found if new.program not in each[2].programs()] if total > most else []
        if not old:
            _spare.counted(total, most)
            return
        looks, look, _ = min(old, key=lambda each: max(program.used for program in each[2].programs()))
        if looks.pop(look, None) is not None:
            looks.dropped += 1
            _log.info("dropped a program, the least recently used: all may take %d bytes (OPFUSE_PROGRAM_BYTES)", most)


Structures = tuple[QuantizedStorage | None, ...]
"""For each value, the record of planes over empty tensors if it is quantized; None for a plain tensor."""

_NOTHING = torch.empty(0, device="cpu")


def structures_of(values: Sequence[Value]) -> tuple[Structures, list[torch.Tensor]]:
    """The structures of values, and the tensors that they are made of."""
    parts = [value.tensors() if isinstance(value, QuantizedStorage) else (value,) for value in values]
    pairs = zip(values, parts)
    structures = (v.with_tensors([_NOTHING] * len(p)) if isinstance(v, QuantizedStorage) else None for v, p in pairs)
    return tuple(structures), [tensor for part in parts for tensor in part]


def program_of(tape: Tape, results: Sequence[torch.Tensor], name: str, nodes: range, *, packs: bool = False) -> Program | None:
    """The program of a tape, which returns ``results``; None, and a line of the log, if the tape cannot be repeated.

    name: of the pipeline. nodes: of the plan that the tape recorded. packs: whether saved tensors may yet share blocks, for which
    the program keeps its recording.
    """
    refusal = tape.refusal
    try:
        if not refusal:
            program = Program(tape, [tape.number(tensor) for tensor in results])
            if not packs or not (program.launches or program.products):
                program.settle()
            return program
    except Unrecordable as reason:
        refusal = str(reason)
    _log.info("%s, nodes %s: interpreted at every call, since %s", name, nodes, refusal)
    return None


def without_autocast(device: str, program: Program, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results of a program, which runs without torch.autocast: that has acted on the ops when they were recorded."""
    if torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return program(given)
    return program(given)


@dataclass(eq=False)
class RecordedBackward(RecordedLook):
    """The program of a backward pass, for one look of its gradients. present: which of the pass's results are not None."""

    present: tuple[bool, ...]


@dataclass(eq=False)
class RecordedValues(RecordedLook):
    """A recording of the library's code. outputs: the structures of the values that it makes."""

    outputs: Structures

    @cached_property
    def results(self) -> int:
        """The number of tensors that make up the outputs."""
        return sum(1 if output is None else len(output.tensors()) for output in self.outputs)

    def values(self, results: Sequence[torch.Tensor]) -> list[Value]:
        """The outputs, made of the tensors that a call of the program returned."""
        values: list[Value] = []
        at = 0
        for structure in self.outputs:
            count = 1 if structure is None else len(structure.tensors())
            values.append(results[at] if structure is None else structure.with_tensors(results[at : at + count]))
            at += count
        return values


@dataclass(eq=False)
class RecordedStretch(RecordedValues):
    """Groups of a backward pass between code of the user's own. left: whose gradients the outputs are."""

    left: Left


@dataclass(eq=False)
class Recorded(RecordedValues):
    """A recorded forward pass of a segment; its program returns the outputs, then the saved tensors.

    interpreter: runs a backward pass that is not recorded yet; it has the contexts of the recorded run. backward: recorded
    backward passes, by look; none if that pass runs in steps. packing: how saved tensors go in one block; None before a backward
    pass has been repeated, and where a block would save nothing. packs: whether that has yet to be decided.
    """

    interpreter: Runner
    backward: Programs = field(default_factory=lambda: Programs(BACKWARD_LOOKS))
    packing: Packing | None = None
    packs: bool = True

    def programs(self) -> Iterator[Program]:
        """All that are kept for this look."""
        yield self.program
        if self.packing is not None:
            yield self.packing.forward
        yield from (program for looks in self.further() for _, made in looks.made() for program in made.programs())

    def further(self) -> Iterator[Programs]:
        """Backward passes, those that take blocks as well."""
        yield self.backward
        if self.packing is not None:
            yield self.packing.backward

    def pack(self, backward: RecordedBackward, grads: int) -> None:
        """Have later calls save what ``backward`` reads by address in one block. grads: how many gradients come before it."""
        if self.packs:
            self.packs, self.packing = False, Packing.of(self, backward.program, grads)
            self.program.settle()
            _make_room(self)
        if self.packing is None:
            backward.program.settle()


@dataclass(eq=False)
class Packing:
    """Saved tensors that only kernels read, in few blocks of memory: few allocations, and few tensors for autograd to carry.

    One block has all small tensors. The others have large ones that one step of the backward pass reads last, as planes of
    experts' weights, and between whose making no memory is freed: so at no step of either pass more is alive than without.

    forward: the program that returns the blocks, each in the place of its first tensor. groups: of each block the positions of
    its tensors among the saved ones. rooms: their shapes and dtypes, by position. count: of all saved tensors. backward: recorded
    backward passes that take the blocks, by the look of what comes in.
    """

    forward: Program
    groups: Sequence[Sequence[int]]
    rooms: Mapping[int, SavedRoom]
    count: int
    backward: Programs = field(default_factory=lambda: Programs(BACKWARD_LOOKS))

    @classmethod
    def of(cls, recorded: Recorded, backward: Program, grads: int) -> Packing | None:
        """Blocks for the saved tensors that ``backward`` reads by address only; None if no two of them share one."""
        recording, read = recorded.program.recording, backward.recording
        if recording is None or read is None:
            return None
        saved = recording.results[recorded.results :]
        device = None if recording.device is None else torch.device("cuda", recording.device)
        made, times = dict(_rooms(recording.steps, device)), Counter(recording.results)
        positions = {
            number: position
            for position, number in enumerate(saved)
            if number in made and number not in recording.read_as_tensors and times[number] == 1
            if grads + position not in read.seen_as_tensors
        }
        last = last_reads(read.steps)
        large = {number: last.get(grads + at) for number, at in positions.items() if number not in recording.sizes}
        together = made_together(recording.steps, MAKES_ROOM[0], large, recording.lasting)
        small = [number for number in positions if number not in large]
        groups = [group for group in (small, *together) if len(group) > 1]
        if not groups:
            return None
        forward = Program.of(recording.in_rooms(groups, {number: made[number].nbytes for number in positions}))
        forward.settle()
        rooms = {position: made[number] for number, position in positions.items()}
        return cls(forward, [[positions[number] for number in group] for group in groups], rooms, len(saved))

    def of_backward(self, backward: RecordedBackward, grads: int) -> Any:
        """The recorded pass, taking the blocks; REFUSED if it reads a tensor of theirs other than by its address."""
        groups = [[grads + position for position in group] for group in self.groups]
        recording = backward.program.recording
        if recording is None or not recording.seen_as_tensors.isdisjoint(chain.from_iterable(groups)):
            return REFUSED
        sizes = {grads + position: room.nbytes for position, room in self.rooms.items()}
        program = Program.of(recording.in_rooms(groups, sizes))
        for each in (program, backward.program):
            each.settle()
        return RecordedBackward(program, backward.present)

    def unpacked(self, saved: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """All saved tensors, in order; those in blocks are copied into memory of their own."""
        there, apart = iter(saved), dict[int, torch.Tensor]()
        groups = {position: group for group in self.groups for position in group}
        for position in range(self.count):
            if position in groups and position not in apart:
                apart |= self._apart(groups[position], next(there))
            yield apart.pop(position) if position in groups else next(there)

    def _apart(self, group: Sequence[int], block: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Position and copy of each tensor of a block."""
        start = 0
        for position in group:
            room = self.rooms[position]
            made = torch.empty(room.shape, dtype=room.dtype, device=block.device)
            made.view(-1).view(torch.uint8).copy_(block[start : start + room.nbytes])
            yield position, made
            start += aligned(room.nbytes)


class SavedRoom(NamedTuple):
    """The memory of a contiguous tensor."""

    shape: Sequence[int]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def _rooms(steps: Sequence[Step], device: torch.device | None) -> Iterator[tuple[int, SavedRoom]]:
    """Number, shape and dtype of each tensor that a step allocates without values."""
    for step in steps:
        if isinstance(step, OpStep) and step.op is MAKES_ROOM[0] and (room := plain_room(step, device)) is not None:
            yield step.results[0], SavedRoom(*room)
