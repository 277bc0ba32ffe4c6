"""Saved tensors that only kernels read, in few blocks of memory: few allocations, and few tensors for autograd to carry.

One block has all small tensors, one those that are zeros before kernels write them, as amaxes are, so that one launch fills
them. The others have large ones that one step of the backward pass reads last, as planes of experts'
weights, and between whose making no memory is freed: so at no step of either pass more is alive than without.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch

from opfuse.runtime.replay.codegen import MAKES_ROOM, plain_room
from opfuse.runtime.replay.instructions import OpStep, Step
from opfuse.runtime.replay.memory_plan import aligned, allocated_together, last_reads
from opfuse.runtime.replay.program import Program, Recording


class SavedRoom(NamedTuple):
    """The memory of a contiguous tensor. zeroed: whether it is filled with zeros."""

    shape: Sequence[int]
    dtype: torch.dtype
    zeroed: bool

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Packing:
    """How the saved tensors of a pass go in blocks, each in the place of its first tensor.

    groups: of each block the positions of its tensors among the saved ones. rooms: their shapes and dtypes, by position.
    count: of all saved tensors.
    """

    groups: Sequence[Sequence[int]]
    rooms: Mapping[int, SavedRoom]
    count: int

    @classmethod
    def of(cls, recording: Recording, read: Recording, *, grads: int, count: int) -> Packing | None:
        """Blocks for the tensors that a backward pass reads by address only; None if no two of them share one.

        recording: of the forward pass, whose last ``count`` results are saved. read: of the backward pass, which gets them behind
        ``grads`` gradients.
        """
        saved = _saved(recording, count)
        device = None if recording.device is None else torch.device("cuda", recording.device)
        made, times = dict(_rooms(recording.steps, device)), Counter(recording.results)
        positions = {
            number: position
            for position, number in enumerate(saved)
            if number in made and number not in recording.read_as_tensors and times[number] == 1
            if grads + position not in read.seen_as_tensors
        }
        last = last_reads(read.steps)
        small = [[n for n in positions if n in recording.sizes and made[n].zeroed is zeroed] for zeroed in (False, True)]
        large = {n: last.get(grads + at) for n, at in positions.items() if n not in recording.sizes}
        together = allocated_together(recording.steps, MAKES_ROOM[0], large, recording.lasting)
        groups = [[positions[number] for number in group] for group in (*small, *together) if len(group) > 1]
        return cls(groups, {at: made[number] for number, at in positions.items()}, count) if groups else None

    def forward(self, recording: Recording) -> Program:
        """The forward pass, which returns the blocks."""
        saved = _saved(recording, self.count)
        groups = [[saved[position] for position in group] for group in self.groups]
        return _settled(recording, groups, {saved[position]: room.nbytes for position, room in self.rooms.items()})

    def backward(self, recording: Recording | None, grads: int) -> Program | None:
        """A backward pass that takes the blocks, behind ``grads`` gradients; None if it reads a tensor of theirs as a tensor."""
        groups = [[grads + position for position in group] for group in self.groups]
        if recording is None or not recording.seen_as_tensors.isdisjoint(chain.from_iterable(groups)):
            return None
        return _settled(recording, groups, {grads + position: room.nbytes for position, room in self.rooms.items()})

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


def _saved(recording: Recording, count: int) -> Sequence[int]:
    """The numbers of the saved tensors, which are the last results of a forward pass."""
    return recording.results[len(recording.results) - count :]


def _settled(recording: Recording, groups: Sequence[Sequence[int]], sizes: Mapping[int, int]) -> Program:
    """The program of a recording with these tensors in blocks, of which nothing else will be made."""
    program = Program.of(recording.in_rooms(groups, sizes))
    program.settle()
    return program


def _rooms(steps: Sequence[Step], device: torch.device | None) -> Iterator[tuple[int, SavedRoom]]:
    """Number and memory of each tensor that a step allocates, without values or with zeros."""
    for step in steps:
        if isinstance(step, OpStep) and step.op in MAKES_ROOM and (room := plain_room(step, device)) is not None:
            yield step.results[0], SavedRoom(*room, zeroed=step.op is MAKES_ROOM[1])
