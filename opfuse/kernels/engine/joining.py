"""Several launches of a kernel as one: a launch for each group of rows costs the host more than the groups are worth.

A source that can do so has its parameters as ``joined.cuh`` has them. Each block does what it did in a launch of its own, so bits
are the same.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from opfuse.kernels.engine.compiling import Variant
from opfuse.kernels.engine.parameters import parameter_of
from opfuse.kernels.engine.variants import parameter_bytes

JOINED = 8
"""Launches that become one at most."""

_CASTS = ("amax", "cast_tensor", "cast_block", "cast_mx", "amax_lines", "cast_lines", "cast_row")

READ_WORDS: dict[str, tuple[int, ...]] = {f"{name}.cu": parameter_of(f"{name}.cu").read_words for name in _CASTS}
"""By source that can do so: words of the parameter with addresses of what is read; at others it writes what nobody else does."""

_NOBODY = 0xFFFFFFFF
_FIRSTS = struct.Struct(f"{JOINED}I")


def joined_variant(variant: Variant) -> Variant:
    """What is compiled for launches of ``variant`` that are one."""
    size = parameter_bytes(variant)
    single, joined = f"PARAMETER_BYTES={size}", f"PARAMETER_BYTES={size * JOINED + _FIRSTS.size}"
    defines = (joined if define == single else define for define in variant.defines)
    return variant._replace(defines=(*defines, f"JOINED={JOINED}"))


def joined_parameter(parameters: Sequence[bytes], blocks: Sequence[int]) -> bytes:
    """The one parameter of launches with these, of one size, and of so many blocks each."""
    firsts = [sum(blocks[:i]) for i in range(len(blocks))]
    firsts += [_NOBODY] * (JOINED - len(blocks))
    return b"".join(parameters).ljust(len(parameters[0]) * JOINED, b"\0") + _FIRSTS.pack(*firsts)


def with_joined(variants: Iterable[Variant]) -> list[Variant]:
    """Those of launches in this order, once each, and those that launches of them may become: none behind another kernel's."""
    found, near = dict[Variant, None](), set[Variant]()
    for each in variants:
        found[each] = None
        if each.source not in READ_WORDS:
            near.clear()
        elif each in near:
            found[joined_variant(each)] = None
        near.add(each)
    return [*found]
