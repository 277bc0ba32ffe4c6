"""Large memory that kernels alone see: what is alive for one stretch of a program is allocated at once.

As the planes of the weights of many experts, which one product reads: memory of its own for each would take the host an
allocation and a comparison of addresses each, and in a slab it would be there from the first step to the last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate as running_sums

import torch

from opfuse.program.slab import aligned, last_reads
from opfuse.program.steps import CallStep, LaunchStep, OpStep, Place, ProductStep, Step


def shared_rooms(
    steps: Sequence[Step], made_by: object, large: Mapping[int, int], lasting: Collection[int], results: Collection[int]
) -> list[Step]:
    """The steps, with one tensor of bytes for those that the op ``made_by`` makes, that are last read by one step, and between
    whose making no memory is let go: so at no step more is alive than without.

    large: bytes of the tensors that may be joined. lasting: those whose memory nobody lets go of before the end. results: tensors
    that outlive the program.
    """
    as_tensors = {number for step in steps if isinstance(step, (OpStep, CallStep)) for number in step.reads()}
    apart, last = as_tensors.union(results), last_reads(steps)
    own = {n: last[n] for n in large if n in last and n not in apart}
    groups = made_together(steps, made_by, own, lasting)
    return with_rooms(steps, dict(enumerate(groups, first_free(numbers_of(steps)))), large)


def made_together(
    steps: Sequence[Step], made_by: object, ends: Mapping[int, object], lasting: Collection[int]
) -> list[list[int]]:
    """Of the tensors in ``ends`` those that end alike, and between whose making no memory is freed.

    lasting: tensors whose memory nobody frees before the end.
    """
    last = last_reads(steps)
    groups, open_ = list[list[int]](), dict[object, list[int]]()
    for i, step in enumerate(steps):
        made = step.results if isinstance(step, (OpStep, CallStep)) else ()
        if isinstance(step, OpStep) and step.op is made_by and (number := made[0]) in ends:
            if ends[number] not in open_:
                groups.append(open_.setdefault(ends[number], []))
            open_[ends[number]].append(number)
        if any(last.get(n, i) == i and n not in lasting for n in (*step.reads(), *made)):
            open_.clear()
    return [group for group in groups if len(group) > 1]


def with_rooms(steps: Sequence[Step], rooms: Mapping[int, Sequence[int]], sizes: Mapping[int, int]) -> list[Step]:
    """The steps, with one tensor of bytes for those of each of ``rooms``, under its number, made where the first of them is.

    The tensors of a room lie in the order of the room, whatever the order in which the steps make them.
    """
    places, bytes_of = dict[int, Place](), dict[int, int]()
    for block, group in rooms.items():
        *offsets, bytes_of[block] = running_sums((aligned(sizes[number]) for number in group), initial=0)
        places |= {number: Place(block, offset) for number, offset in zip(group, offsets)}
    found: list[Step] = []
    for step in steps:
        made = step.results[0] if isinstance(step, OpStep) and len(step.results) == 1 else None
        if not isinstance(step, OpStep) or made not in places:
            found.append(_moved(step, places))
        elif (size := bytes_of.pop(block := places[made].number, None)) is not None:
            found.append(replace(step, args=([size],), kwargs={**step.kwargs, "dtype": torch.uint8}, results=(block,)))
    return found


def numbers_of(steps: Sequence[Step]) -> Iterator[int]:
    """Those of all tensors that the steps read or make."""
    for step in steps:
        yield from step.reads()
        yield from step.results if isinstance(step, (OpStep, CallStep)) else ()


def first_free(numbers: Iterable[int]) -> int:
    """A number behind all of these."""
    return max(numbers, default=-1) + 1


def _moved(step: Step, places: Mapping[int, Place]) -> Step:
    """The same for other places of what it reads by address."""

    def there(place: Place) -> Place:
        at = places.get(place.number)
        return place if at is None else Place(at.number, at.offset + place.offset)

    if isinstance(step, LaunchStep):
        return replace(step, holes=tuple(hole._replace(place=there(hole.place)) for hole in step.holes))
    if isinstance(step, ProductStep):
        return replace(step, places={name: there(place) for name, place in step.places.items()})
    return step
