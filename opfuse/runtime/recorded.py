"""What is kept of a segment that was recorded: its programs, forward and backward, by looks of what comes in."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from opfuse.core.context import Value
from opfuse.program.line import MAKES_ROOM, plain_room
from opfuse.program.program import Program
from opfuse.program.slab import ALIGNMENT, Slab
from opfuse.program.steps import OpStep, Step
from opfuse.program.tape import Tape, Unrecordable
from opfuse.runtime.run import Runner
from opfuse.tensors.storage import QuantizedStorage

_log = logging.getLogger("opfuse.programs")

BEFORE = 1
"""Calls of a look that are interpreted before one is recorded."""

LOOKS, BACKWARD_LOOKS = 32, 8
"""Looks of inputs for which a segment of a plan keeps programs, and looks of gradients for each; what was entered first goes."""

SEEN, REFUSED = "seen", "refused"


class Programs(OrderedDict[Any, Any]):
    """What became of each look, of which there are at most ``limit``: SEEN once, REFUSED, or its program."""

    def __init__(self, limit: int = LOOKS) -> None:
        super().__init__()
        self.limit = limit

    def is_new(self, look: Any) -> bool:
        """Whether a look has not come before; from now on it has."""
        if not BEFORE or look in self:
            return False
        self.note(look, SEEN)
        return True

    def note(self, look: Any, what: Any) -> None:
        """Enter it, and forget the oldest if there are too many."""
        self[look] = what
        self.move_to_end(look)
        while len(self) > self.limit:
            self.popitem(last=False)


Structures = tuple[QuantizedStorage | None, ...]
"""Of values: those that are quantized, over no tensors."""

_NOTHING = torch.empty(0, device="cpu")


def structures_of(values: Sequence[Value]) -> tuple[Structures, list[torch.Tensor]]:
    """The structures of values, and the tensors that they are made of."""
    parts = [value.tensors() if isinstance(value, QuantizedStorage) else (value,) for value in values]
    pairs = zip(values, parts)
    structures = (v.with_tensors([_NOTHING] * len(p)) if isinstance(v, QuantizedStorage) else None for v, p in pairs)
    return tuple(structures), [tensor for part in parts for tensor in part]


def program_of(tape: Tape, results: Sequence[torch.Tensor], name: str, nodes: range) -> Program | None:
    """The program of a tape that gives ``results``; None, and the log says why, if there is none. name: of the pipeline."""
    refusal = tape.refusal
    try:
        if not refusal:
            return Program(tape, [tape.number(tensor) for tensor in results])
    except Unrecordable as reason:
        refusal = str(reason)
    _log.info("%s, nodes %s: interpreted at every call, since %s", name, nodes, refusal)
    return None


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """torch.autocast had its say when ops were recorded; one that is around a program has none."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


@dataclass(eq=False)
class RecordedBackward:
    """The backward pass of a recorded segment, for one look of what comes in: which results there are, and their program."""

    program: Program
    present: tuple[bool, ...]

    def programs(self) -> Iterator[Program]:
        """All that are kept for this look."""
        yield self.program


@dataclass(eq=False)
class RecordedValues:
    """A recorded stretch of the library's code. outputs: for each value that it makes the structure, if that is quantized."""

    program: Program
    outputs: Structures

    def programs(self) -> Iterator[Program]:
        """All that are kept for this look."""
        yield self.program

    @cached_property
    def results(self) -> int:
        """How many tensors the outputs are made of."""
        return sum(1 if output is None else len(output.tensors()) for output in self.outputs)

    def values(self, results: Sequence[torch.Tensor]) -> list[Value]:
        """The outputs of a call of the program that gave ``results``."""
        values: list[Value] = []
        at = 0
        for structure in self.outputs:
            count = 1 if structure is None else len(structure.tensors())
            values.append(results[at] if structure is None else structure.with_tensors(results[at : at + count]))
            at += count
        return values


@dataclass(eq=False)
class Recorded(RecordedValues):
    """A recorded segment; what is saved comes behind its outputs.

    interpreter: it, with what its ops know of the run, for a backward pass that is not recorded yet. backward: programs by
    looks; a pass that runs in steps has none. packing: how what is saved goes in one block; None before a backward pass has been
    repeated, and where that would save nothing. packs: whether that is still open.
    """

    interpreter: Runner
    backward: Programs = field(default_factory=lambda: Programs(BACKWARD_LOOKS))
    packing: Packing | None = None
    packs: bool = True

    def programs(self) -> Iterator[Program]:
        """All that are kept for this look."""
        packed = self.packing
        yield from (self.program, *(() if packed is None else (packed.forward,)))
        for looks in (self.backward, *(() if packed is None else (packed.backward,))):
            yield from (made.program for made in list(looks.values()) if isinstance(made, RecordedBackward))

    def pack(self, backward: RecordedBackward, grads: int) -> None:
        """Have later calls save in one block what ``backward`` reads by address. grads: how many come in before what is saved."""
        if self.packs:
            self.packs, self.packing = False, Packing.of(self, backward.program, grads)


@dataclass(eq=False)
class Packing:
    """Small tensors that only kernels read, saved in one block: one allocation, one tensor for autograd to carry.

    forward: the program that returns the others, and the block last. offsets: in the block, by position among what is saved.
    rooms: shape and dtype, likewise. count: of all that is saved. backward: programs that take the block last, by looks of the
    others.
    """

    forward: Program
    offsets: dict[int, int]
    rooms: dict[int, tuple[Sequence[int], torch.dtype]]
    count: int
    size: int
    backward: Programs = field(default_factory=lambda: Programs(BACKWARD_LOOKS))

    @classmethod
    def of(cls, recorded: Recorded, backward: Program, grads: int) -> Packing | None:
        """For what this backward pass reads by address; None if that are less than two tensors."""
        recording = recorded.program.recording
        saved = recording.results[recorded.results :]
        device = None if recording.device is None else torch.device("cuda", recording.device)
        made = dict(_rooms(recording.steps, device))
        for number in recording.read_as_tensors():
            made.pop(number, None)
        packed = [
            position
            for position, number in enumerate(saved)
            if number in made and number in recording.sizes and recording.results.count(number) == 1
            if _is_by_address(backward, grads + position)
        ]
        if len(packed) < 2:
            return None
        offsets, size = dict[int, int](), 0
        for position in packed:
            offsets[position] = size
            size += -(-recording.sizes[saved[position]] // ALIGNMENT) * ALIGNMENT
        goes = Slab(size, {saved[position]: offset for position, offset in offsets.items()})
        rooms = {position: made[saved[position]] for position in packed}
        return cls(recorded.program.with_blocks(goes=goes), offsets, rooms, len(saved), size)

    def of_backward(self, backward: RecordedBackward, grads: int) -> Any:
        """The same for the block; REFUSED if it reads more than addresses of what is in there."""
        comes = Slab(self.size, {grads + position: offset for position, offset in self.offsets.items()})
        if not all(_is_by_address(backward.program, number) for number in comes.offsets):
            return REFUSED
        return RecordedBackward(backward.program.with_blocks(comes=comes), backward.present)

    def unpacked(self, saved: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """All that was saved, in order; what the block holds in memory of its own, as if it had never been there."""
        *others, block = saved
        rest = iter(others)
        for position in range(self.count):
            if position not in self.offsets:
                yield next(rest)
                continue
            shape, dtype = self.rooms[position]
            room = torch.empty(shape, dtype=dtype, device=block.device)
            start = self.offsets[position]
            room.view(-1).view(torch.uint8).copy_(block[start : start + room.nbytes])
            yield room


def _rooms(steps: Sequence[Step], device: torch.device | None) -> Iterator[tuple[int, tuple[Sequence[int], torch.dtype]]]:
    """Number, shape and dtype of the tensors whose values kernels alone decide."""
    for step in steps:
        if isinstance(step, OpStep) and step.op is MAKES_ROOM[0] and (room := plain_room(step, device)) is not None:
            yield step.results[0], room


def _is_by_address(program: Program, number: int) -> bool:
    return number not in program.recording.results and number not in program.recording.read_as_tensors()
