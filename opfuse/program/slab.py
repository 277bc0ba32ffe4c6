"""One block of memory for the small tensors that only kernels read."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from opfuse.program.steps import CallStep, OpStep, Step

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
    as_tensors = {number for step in steps if isinstance(step, (OpStep, CallStep)) for number in step.reads()}
    apart, last = as_tensors.union(results), last_reads(steps)
    alive: list[_Piece] = []  # by start
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
            insort(alive, _Piece(offset, offset + needed, last.get(number, first)))
        offsets[number] = offset
        size = max(size, offset + needed)
    return Slab(size, offsets)


class _Piece(NamedTuple):
    """Bytes from ``start`` to ``end`` that a tensor takes until the step ``last`` has read it."""

    start: int
    end: int
    last: int


def _first_gap(alive: Sequence[_Piece], begin: int, needed: int) -> int:
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
