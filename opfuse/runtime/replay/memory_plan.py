"""Where the memory of a program lies: a slab for small tensors that only kernels read, shared blocks for large ones.

A slab is one block from the first step to the last. In it, the planes of the weights of many experts, which one product reads,
would be alive all the time; memory of its own for each would take the host an allocation and a comparison of addresses each. So
large tensors that live through one stretch of a program share a block that is allocated for that stretch.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate as running_sums
from typing import Any, NamedTuple

import torch

from opfuse.runtime.replay.instructions import CallStep, CopyStep, LaunchStep, OpStep, ProductStep, Step, TensorOffset

ALIGNMENT = 256
"""Alignment in a slab, in bytes: at least that of torch's allocator, so that kernels find the alignment of the recorded run."""


class Slab(NamedTuple):
    """Bytes of the block, and the offset in it of each tensor that lies there."""

    size: int
    offsets: Mapping[int, int]


def last_reads(steps: Sequence[Step]) -> dict[int, int]:
    """The last step that reads each tensor."""
    return {number: i for i, step in enumerate(steps) for number in step.reads()}


def slab_of(
    steps: Sequence[Step],
    sizes: Mapping[int, int],
    made_by: Any,
    results: Collection[int],
    *,
    reserved: int = 0,
    reuses: bool = True,
) -> Slab:
    """A block for the tensors that the op ``made_by`` makes and whose addresses alone are read: first fit, by lifetimes.

    sizes: bytes of the tensors that may lie in it, all on one device. results: tensors that outlive the program. reserved: bytes
    at the start that no tensor takes. reuses: whether tensors that are not alive at the same time may share memory.
    """
    if not sizes:
        return Slab(aligned(reserved), {})
    as_tensors = {number for step in steps if isinstance(step, (OpStep, CallStep)) for number in step.reads()}
    apart, last = as_tensors.union(results), last_reads(steps)
    alive: list[_LiveRange] = []  # by start
    offsets: dict[int, int] = {}
    size = begin = aligned(reserved)
    for first, step in enumerate(steps):
        if not isinstance(step, OpStep) or step.op is not made_by:
            continue
        (number,) = step.results
        if number in apart or number not in sizes:
            continue
        needed, offset = aligned(sizes[number]), size
        if reuses:
            alive = [piece for piece in alive if piece.last >= first]
            offset = _first_gap(alive, begin, needed)
            insort(alive, _LiveRange(offset, offset + needed, last.get(number, first)))
        offsets[number] = offset
        size = max(size, offset + needed)
    return Slab(size, offsets)


class _LiveRange(NamedTuple):
    """Bytes from ``start`` to ``end`` that a tensor takes until the step ``last`` has read it."""

    start: int
    end: int
    last: int


def _first_gap(alive: Sequence[_LiveRange], begin: int, needed: int) -> int:
    """The first offset from ``begin`` on with ``needed`` bytes that none of ``alive``, in the order of their starts, takes."""
    offset = begin
    for start, end, _ in alive:
        if offset + needed <= start:
            break
        offset = max(offset, end)
    return offset


def aligned(size: int) -> int:
    """So many bytes, up to the next place."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def shared_rooms(
    steps: Sequence[Step], made_by: object, large: Mapping[int, int], lasting: Collection[int], outside: Collection[int]
) -> list[Step]:
    """The steps, with one tensor of bytes for those that the op ``made_by`` makes, that are last read by one step, and between
    whose making no memory is let go: so at no step more is alive than without.

    large: bytes of the tensors that may be joined. lasting: those whose memory nobody lets go of before the end. outside: tensors
    that come in or go out.
    """
    as_tensors = {number for step in steps if isinstance(step, (OpStep, CallStep)) for number in step.reads()}
    apart, last = as_tensors.union(outside), last_reads(steps)
    own = {n: last[n] for n in large if n in last and n not in apart}
    groups = allocated_together(steps, made_by, own, lasting)
    return with_rooms(steps, dict(enumerate(groups, first_free((*numbers_of(steps), *outside)))), large)


def allocated_together(
    steps: Sequence[Step], made_by: object, ends: Mapping[int, object], lasting: Collection[int]
) -> list[list[int]]:
    """The tensors in ``ends``, grouped if they end alike and nothing is freed between their allocations.

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


def largest_alive(steps: Sequence[Step], sizes: Mapping[int, int], given: Collection[int], results: Collection[int]) -> int:
    """The most bytes that are alive at one step, if each tensor goes when it is read last.

    sizes: of those that count, which are ``given`` or which steps make. results: tensors that outlive the program.
    """
    last, alive = last_reads(steps), sum(sizes.get(number, 0) for number in given)
    peak = alive
    for i, step in enumerate(steps):
        made = step.results if isinstance(step, (OpStep, CallStep)) else ()
        alive += sum(sizes.get(number, 0) for number in made)
        peak = max(peak, alive)
        alive -= sum(sizes.get(n, 0) for n in {*step.reads(), *made} if last.get(n, i) == i and n not in results)
    return peak


def with_rooms(steps: Sequence[Step], rooms: Mapping[int, Sequence[int]], sizes: Mapping[int, int]) -> list[Step]:
    """The steps, with one tensor of bytes for those of each of ``rooms``, under its number, made where the first of them is.

    The tensors of a room lie in the order of the room, whatever the order in which the steps make them.
    """
    places, bytes_of = dict[int, TensorOffset](), dict[int, int]()
    for block, group in rooms.items():
        *offsets, bytes_of[block] = running_sums((aligned(sizes[number]) for number in group), initial=0)
        places |= {number: TensorOffset(block, offset) for number, offset in zip(group, offsets)}
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


def _moved(step: Step, places: Mapping[int, TensorOffset]) -> Step:
    """A copy of the step that reads other addresses."""

    def there(place: TensorOffset) -> TensorOffset:
        at = places.get(place.number)
        return place if at is None else TensorOffset(at.number, at.offset + place.offset)

    if isinstance(step, LaunchStep):
        return replace(step, slots=tuple(slot._replace(place=there(slot.place)) for slot in step.slots))
    if isinstance(step, ProductStep):
        return replace(step, places={name: there(place) for name, place in step.places.items()})
    if isinstance(step, CopyStep):
        return replace(step, source=there(step.source), target=there(step.target))
    return step
