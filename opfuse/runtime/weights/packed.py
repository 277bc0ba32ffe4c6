"""Tensors that lie in one block of memory: a call looks at the block, a program takes it, autograd saves it, in place of each.

A weight of 128 experts has 512 planes and scales. Views of a block count their writes with it, so one number tells of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate as running_sums
from typing import Any, NamedTuple

import torch

from opfuse.formats import USAGES, Usage
from opfuse.runtime.replay.memory_plan import aligned
from opfuse.runtime.replay.recorder import PLAIN
from opfuse.tensors.storage import QuantizedStorage
from opfuse.torch_private.operations import copy_each
from opfuse.torch_private.tensors import storage_number


class BlockPart(NamedTuple):
    """Where a contiguous tensor lies in a block, uint8 (bytes,): its first byte and the one behind its last."""

    start: int
    end: int
    dtype: torch.dtype
    shape: torch.Size

    def of(self, block: torch.Tensor) -> torch.Tensor:
        """The tensor, a view."""
        return block[self.start : self.end].view(self.dtype).view(self.shape)

    def has_layout_of(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` may be it, and is no block, which has more than one."""
        return tensor.shape == self.shape and tensor.dtype == self.dtype


PlaceInBlock = tuple[int, BlockPart] | None
"""The position of a tensor's block among blocks, and the place in that block; None if it lies in none."""


def pack(
    storages: Sequence[QuantizedStorage], usage: Usage, weights: Sequence[torch.Tensor]
) -> tuple[Sequence[QuantizedStorage], list[torch.Tensor]]:
    """``storages``, casts of ``weights``, with the tensors of direction ``usage`` copied into one block; and the block, if any.

    One for each direction, since a backward pass holds only what it reads. What shares memory with its weight or with the other
    direction stays where it is, as does a single tensor.
    """
    moved: dict[int, torch.Tensor] = {}
    for storage, weight in zip(storages, weights):
        others = [tensor for other in USAGES if other != usage for tensor in _tensors(storage, other)]
        elsewhere = {*map(storage_number, (weight, *others))}
        moved |= {id(t): t for t in _tensors(storage, usage) if storage_number(t) not in elsewhere and t.is_contiguous()}
    if len(moved) < 2:
        return storages, []
    block, parts = _block_of([*moved.values()])
    views = dict(zip(moved, parts))
    return [_with_views(storage, usage, views) for storage in storages], [block]


def _with_views(storage: QuantizedStorage, usage: Usage, views: Mapping[int, torch.Tensor]) -> QuantizedStorage:
    if usage not in storage.usages:
        return storage
    plane = storage.plane(usage)
    there: dict[str, Any] = {usage: plane.with_tensors([views.get(id(tensor), tensor) for tensor in plane.tensors()])}
    return replace(storage, **there)


def to_blocks(
    tensors: Sequence[torch.Tensor], blocks: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], tuple[PlaceInBlock, ...]]:
    """``tensors``, with a block in the place of the first of those that lie in it; and where each lies, if some lie in one."""
    numbers = {storage_number(block): number for number, block in enumerate(blocks)}
    found: list[torch.Tensor] = []
    places: list[PlaceInBlock] = []
    seen = set[int]()
    for tensor in tensors:
        number = numbers.get(storage_number(tensor)) if type(tensor) in PLAIN and tensor.is_contiguous() else None
        if number is None:
            found.append(tensor)
            places.append(None)
            continue
        if number not in seen:
            seen.add(number)
            found.append(blocks[number])
        start = tensor.data_ptr() - blocks[number].data_ptr()
        places.append((number, BlockPart(start, start + tensor.nbytes, tensor.dtype, tensor.shape)))
    return found, tuple(places) if seen else ()


def from_blocks(tensors: Iterator[torch.Tensor], places: Sequence[PlaceInBlock]) -> Iterator[torch.Tensor]:
    """The tensors at ``places``, which :func:`to_blocks` gave: views of its blocks, or the tensors themselves."""
    blocks: dict[int, torch.Tensor] = {}
    for place in places:
        if place is None:
            yield next(tensors)
            continue
        number, part = place
        if number not in blocks:
            found = next(tensors)
            if part.has_layout_of(found):
                yield found
                continue
            blocks[number] = found
        yield part.of(blocks[number])


def to_blocks_again(tensors: Sequence[torch.Tensor], places: Sequence[PlaceInBlock]) -> Sequence[torch.Tensor]:
    """What :func:`to_blocks` returned, from the tensors one by one; from others these, as from copies that lie elsewhere."""
    if len(tensors) != len(places):
        return tensors
    blocks: dict[int, torch.Tensor] = {}
    for tensor, place in zip(tensors, places):
        if place is not None:
            number, part = place
            if number not in blocks:
                blocks[number] = tensor.new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            if not part.has_layout_of(tensor) or tensor.data_ptr() - part.start != blocks[number].data_ptr():
                return tensors
    return to_blocks(tensors, [*blocks.values()])[0]


def unpack(storage: QuantizedStorage, blocks: Sequence[torch.Tensor]) -> QuantizedStorage:
    """A copy of the record over new views, which a recorder sees come from ``blocks``."""
    tensors, places = to_blocks(storage.tensors(), blocks)
    return storage.with_tensors([*from_blocks(iter(tensors), places)])


def _block_of(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A block with copies of ``tensors``, and these."""
    starts = [*running_sums((aligned(tensor.nbytes) for tensor in tensors), initial=0)]
    block = torch.empty(starts[-1], dtype=torch.uint8, device=tensors[0].device)
    pieces = [BlockPart(start, start + t.nbytes, t.dtype, t.shape).of(block) for start, t in zip(starts, tensors)]
    to, of = ([tensor.view(-1).view(torch.uint8) for tensor in each] for each in (pieces, tensors))
    copy_each(to, of)
    return block, pieces


def _tensors(storage: QuantizedStorage, usage: str) -> tuple[torch.Tensor, ...]:
    return storage.plane(usage).tensors() if usage in storage.usages else ()
