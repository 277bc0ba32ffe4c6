"""One block of memory for the small tensors that only kernels read."""

from __future__ import annotations

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
    last = last_reads(steps)
    placed: list[tuple[int, int, int]] = []  # last step, start, end
    offsets: dict[int, int] = {}
    size = aligned(reserved)
    for first, step in enumerate(steps):
        if not isinstance(step, OpStep) or step.op is not made_by:
            continue
        (number,) = step.results
        if number in as_tensors or number in results or number not in sizes:
            continue
        needed, offset = aligned(sizes[number]), aligned(reserved)
        for _, start, end in sorted((place for place in placed if place[0] >= first or not reuses), key=lambda place: place[1]):
            if offset + needed <= start:
                break
            offset = max(offset, end)
        offsets[number] = offset
        placed.append((last.get(number, first), offset, offset + needed))
        size = max(size, offset + needed)
    return Slab(size, offsets)


def aligned(size: int) -> int:
    """So many bytes, up to the next place."""
    return -(-size // ALIGNMENT) * ALIGNMENT
