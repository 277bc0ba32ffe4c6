"""Launches of a recording that become one: of one kernel, and none of them waits for another or for what lies between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from opfuse.kernels.engine.joining import JOINED, READ_WORDS, joined_parameter, joined_variant
from opfuse.program.steps import Hole, LaunchStep, Step

_WORD = 8

Homes = Callable[[Iterable[int]], set[int] | None]
"""The memory of tensors, by the number of the first one seen there; None where it is not known."""


@dataclass
class _LaunchGroup:
    """Launches that may become one, at the place of the last; what they read, and what they write."""

    places: list[int] = field(default_factory=list)
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)

    def add(self, place: int, reads: set[int], writes: set[int]) -> None:
        """One more."""
        self.places.append(place)
        self.reads |= reads
        self.writes |= writes

    def waits_for(self, reads: set[int] | None, writes: set[int] | None) -> bool:
        """Whether the order matters of them, and of a step that reads and writes this; None: nobody knows what."""
        return (
            reads is None
            or writes is None
            or not (self.writes.isdisjoint(reads) and self.writes.isdisjoint(writes) and self.reads.isdisjoint(writes))
        )


def joined_launches(steps: Sequence[Step], homes: Homes) -> list[Step]:
    """The steps, with one launch for several. Launches move to the place of their last, never further up."""
    found: list[_LaunchGroup] = []
    opened: dict[tuple[object, ...], _LaunchGroup] = {}
    for i, step in enumerate(steps):
        split = _split(step)
        touched = homes(step.reads()) if split is None else set[int]()
        reads, writes = split or (touched, touched)
        opened = {key: group for key, group in opened.items() if not group.waits_for(reads, writes)}
        if split is not None and isinstance(step, LaunchStep):
            key = step.variant, step.entry, step.device, step.grid[1:]
            if key not in opened or len(opened[key].places) == JOINED:
                opened[key] = _LaunchGroup()
                found.append(opened[key])
            opened[key].add(i, *split)
    return _with_joined(steps, [group.places for group in found if len(group.places) > 1])


def _split(step: Step) -> tuple[set[int], set[int]] | None:
    """What a launch that can be joined reads, and what it writes; places are known by the first tensor that was seen there."""
    if not isinstance(step, LaunchStep) or step.variant.source not in READ_WORDS:
        return None
    read = READ_WORDS[step.variant.source]
    return (
        {hole.place.number for hole in step.holes if hole.word in read},
        {hole.place.number for hole in step.holes if hole.word not in read},
    )


def _with_joined(steps: Sequence[Step], groups: Sequence[Sequence[int]]) -> list[Step]:
    gone = {i for places in groups for i in places[:-1]}
    joined = {places[-1]: _joined([step for i in places if isinstance(step := steps[i], LaunchStep)]) for places in groups}
    return [joined.get(i, step) for i, step in enumerate(steps) if i not in gone]


def _joined(launches: Sequence[LaunchStep]) -> LaunchStep:
    first, blocks = launches[0], [launch.grid.blocks for launch in launches]
    words = len(first.parameter) // _WORD
    holes = [Hole(i * words + hole.word, hole.place) for i, launch in enumerate(launches) for hole in launch.holes]
    parameter = joined_parameter([launch.parameter for launch in launches], blocks)
    grid = first.grid._replace(blocks=sum(blocks))
    return LaunchStep(joined_variant(first.variant), first.entry, grid, first.device, parameter, tuple(holes))
