"""Joining launches of a recording: several of one kernel become one, if none depends on another or on a step in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from opfuse.kernels.engine.joining import JOINED, READ_WORDS, joined_parameter, joined_variant
from opfuse.runtime.replay.instructions import WORD, AddressSlot, LaunchStep, Step

Homes = Callable[[Iterable[int]], set[int] | None]
"""The memory of tensors, by the number of the first one seen there; None where it is not known."""


@dataclass
class _LaunchGroup:
    """Launches that may become one. reads, writes: memory that they touch. behind: numbers of the groups that they depend on.

    place: the position at which they run, after everything that they depend on.
    """

    place: int
    launches: list[LaunchStep] = field(default_factory=list)
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    behind: set[int] = field(default_factory=set)

    def waits_for(self, reads: set[int] | None, writes: set[int] | None) -> bool:
        """Whether a step with these reads and writes must keep its order with the launches; None: unknown memory."""
        return (
            reads is None
            or writes is None
            or not (self.writes.isdisjoint(reads) and self.writes.isdisjoint(writes) and self.reads.isdisjoint(writes))
        )


class _LaunchGroups:
    """Groups in the order in which they run. A group is open until a step has passed that depends on it.

    A launch that depends on an open group closes none, but joins a later group. So if several tensors are each measured and then
    cast, one launch measures all, and the next one casts all.
    """

    def __init__(self) -> None:
        self.all: list[_LaunchGroup] = []
        self._open: set[int] = set()
        self._touching: dict[int, set[int]] = {}
        self._last: dict[tuple[object, ...], int] = {}

    def pass_by(self, reads: set[int] | None, writes: set[int] | None) -> None:
        """Close the groups that a step depends on, and those that these depend on."""
        closing = self._before(reads, writes)
        while closing:
            self._open -= closing
            closing = {number for each in closing for number in self.all[each].behind} & self._open

    def add(self, place: int, launch: LaunchStep, reads: set[int], writes: set[int]) -> None:
        """Add a launch to the last group of its kind, or to a new one if it depends on a group after that."""
        key = launch.variant, launch.entry, launch.device, launch.grid[1:]
        before, number = self._before(reads, writes), self._last.get(key, -1)
        if number not in self._open or max(before, default=-1) >= number or len(self.all[number].launches) == JOINED:
            number = self._last[key] = len(self.all)
            self.all.append(_LaunchGroup(place))
            self._open.add(number)
        group = self.all[number]
        group.launches.append(launch)
        group.place = place
        group.reads |= reads
        group.writes |= writes
        group.behind |= before
        for home in reads | writes:
            self._touching.setdefault(home, set()).add(number)

    def _before(self, reads: set[int] | None, writes: set[int] | None) -> set[int]:
        """The open groups that a step with these reads and writes depends on."""
        near = self._open
        if reads is not None and writes is not None:
            near = near.intersection(chain.from_iterable(self._touching.get(home, ()) for home in reads | writes))
        return {number for number in near if self.all[number].waits_for(reads, writes)}


def joined_launches(steps: Sequence[Step], homes: Homes) -> list[Step]:
    """The steps with joined launches. A launch moves to the place of the last of its group, never to an earlier one."""
    groups, kept = _LaunchGroups(), dict[int, list[Step]]()
    for place, step in enumerate(steps):
        split = _split(step)
        if split is not None and isinstance(step, LaunchStep):
            groups.add(place, step, *split)
        else:
            touched = homes(step.reads())
            groups.pass_by(touched, touched)
            kept[place] = [step]
    for group in groups.all:
        group.place = max([group.place, *(groups.all[number].place for number in group.behind)])
        kept.setdefault(group.place, []).append(_joined(group.launches))
    return [step for place in sorted(kept) for step in kept[place]]


def _split(step: Step) -> tuple[set[int], set[int]] | None:
    """The memory that a launch reads and writes, by the first tensor seen there; None if the step cannot be joined."""
    if not isinstance(step, LaunchStep) or step.variant.source not in READ_WORDS:
        return None
    read = READ_WORDS[step.variant.source]
    return (
        {slot.place.number for slot in step.slots if slot.word in read},
        {slot.place.number for slot in step.slots if slot.word not in read},
    )


def _joined(launches: Sequence[LaunchStep]) -> LaunchStep:
    first, blocks = launches[0], [launch.grid.blocks for launch in launches]
    if len(launches) == 1:
        return first
    words = len(first.parameter) // WORD
    slots = [AddressSlot(i * words + slot.word, slot.place) for i, launch in enumerate(launches) for slot in launch.slots]
    parameter = joined_parameter([launch.parameter for launch in launches], blocks)
    grid = first.grid._replace(blocks=sum(blocks))
    return LaunchStep(joined_variant(first.variant), first.entry, grid, first.device, parameter, tuple(slots))
