"""Joins launches of a kernel: one launch for each group of rows would take the host longer than the groups take the GPU.

A source that can be joined reads its parameters through ``joined.cuh``. Each block of threads does what it does in a launch of
its own, so the bits are the same.
"""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from opfuse.kernels.engine.compiling import Variant
from opfuse.kernels.engine.launch import Grid
from opfuse.kernels.engine.parameters import parameter_of
from opfuse.kernels.engine.registry import Launcher
from opfuse.kernels.engine.variants import parameter_bytes

JOINED = 32
"""How many launches become one, at most: as many as have room for their parameters in the 4 KB of a launch."""

_CASTS = ("amax", "cast_tensor", "cast_block", "cast_mx", "amax_lines", "cast_lines", "cast_row", "amax_nvfp4", "cast_nvfp4")
READ_WORDS: dict[str, tuple[int, ...]] = {f"{name}.cu": parameter_of(f"{name}.cu").read_words for name in _CASTS}
"""By source that can be joined: the words of its parameter that are addresses of inputs. At the other addresses a launch writes
memory that no other launch reads or writes."""

_NOBODY = 0xFFFFFFFF
_FIRSTS = struct.Struct(f"{JOINED}I")


def joined_variant(variant: Variant) -> Variant:
    """The variant for joined launches of ``variant``."""
    size = parameter_bytes(variant)
    single, joined = f"PARAMETER_BYTES={size}", f"PARAMETER_BYTES={size * JOINED + _FIRSTS.size}"
    defines = (joined if define == single else define for define in variant.defines)
    return variant._replace(defines=(*defines, f"JOINED={JOINED}"))


def joined_parameter(parameters: Sequence[bytes], blocks: Sequence[int]) -> bytes:
    """The parameter of a joined launch, from the parameters of its launches, all of one size, and their numbers of blocks."""
    return b"".join(parameters).ljust(len(parameters[0]) * JOINED, b"\0") + _FIRSTS.pack(*_firsts(blocks))


def _firsts(blocks: Sequence[int]) -> list[int]:
    """The number of each launch's first block."""
    return [sum(blocks[:i]) for i in range(len(blocks))] + [_NOBODY] * (JOINED - len(blocks))


def with_joined(variants: Iterable[Variant]) -> list[Variant]:
    """The variants of launches in this order, once each, and the joined variants that neighbouring launches may need.

    Launches of a kernel are joined only if no launch of a source that cannot be joined comes between them.
    """
    found, near = dict[Variant, None](), set[Variant]()
    for each in variants:
        found[each] = None
        if each.source not in READ_WORDS:
            near.clear()
        elif each in near:
            found[joined_variant(each)] = None
        near.add(each)
    return [*found]


@contextlib.contextmanager
def together(launch: Launcher) -> Iterator[Launcher]:
    """Yield a launcher that gathers launches and makes them at the end of the block, joined where they can be.

    No launch in the block may depend on another one.
    """
    found: dict[tuple[Variant, str, int, int, int], list[tuple[int, struct.Struct, Sequence[int | float]]]] = {}

    def gather(variant: Variant, entry: str, grid: Grid, layout: struct.Struct, *fields: int | float, device: int) -> None:
        kind = variant, entry, grid.threads, grid.shared, device
        found.setdefault(kind, []).append((grid.blocks, layout, fields))

    yield gather
    for (variant, entry, threads, shared, device), parts in found.items():
        for start in range(0, len(parts), JOINED):
            some = parts[start : start + JOINED]
            blocks, layouts, fields = zip(*some)
            grid = Grid(sum(blocks), threads, shared)
            if len(some) == 1:
                launch(variant, entry, grid, layouts[0], *fields[0], device=device)
            else:
                words = _joined_fields(fields, blocks)
                launch(joined_variant(variant), entry, grid, _joined_layout(layouts[0]), *words, device=device)


def _joined_fields(fields: Sequence[Sequence[int | float]], blocks: Sequence[int]) -> list[int | float]:
    """The fields that :func:`joined_parameter` packs."""
    return [*chain.from_iterable(fields), *[0] * (len(fields[0]) * (JOINED - len(fields))), *_firsts(blocks)]


@functools.cache
def _joined_layout(single: struct.Struct) -> struct.Struct:
    return struct.Struct(single.format * JOINED + _FIRSTS.format)
