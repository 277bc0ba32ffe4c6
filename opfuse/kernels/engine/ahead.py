"""Compiles kernels in threads while the caller goes on; a launch waits only for its own kernel.

NVRTC releases Python's lock and compiles several kernels at a time, but reads one text at a time under a lock of its own. So
long texts come first, and last those of launches that programs join. The forward pass runs while kernels of the backward pass
are compiled.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from opfuse.kernels.engine.compiling import Variant, assemble, cubin, is_compiled
from opfuse.kernels.engine.cubins import CubinCache
from opfuse.kernels.engine.variants import is_joined

_coming: dict[tuple[Variant, str, CubinCache], Future[bytes]] = {}
"""Compilations that run or wait for their turn."""

os.register_at_fork(after_in_child=_coming.clear)  # a child process has none of the threads


def compile_together(variants: Iterable[Variant], arch: str, cache: CubinCache) -> None:
    """Begin to compile the variants that the cache does not have, each in a thread, as soon as the iterable yields it.

    NVRTC runs without Python's lock. A process that ends waits for what it has begun.
    """
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    for variant in _missing(variants, arch, cache):
        key = variant, arch, cache
        _coming[key] = made = pool.submit(cubin, *key)
        made.add_done_callback(lambda _, key=key: _coming.pop(key, None))  # type: ignore[misc]
    pool.shutdown(wait=False)


def wait_for(variant: Variant, arch: str, cache: CubinCache) -> None:
    """Wait for a variant that a thread compiles. If it does not compile, its use raises the error, not this call."""
    if (made := _coming.get((variant, arch, cache))) is not None:
        made.exception()


_SLOW = {"dequantize.cu": 2.5}
"""Sources whose texts take so many times as long as others of their length: what a thread decodes is all unrolled."""


def in_turn(variants: Iterable[Variant]) -> list[Variant]:
    """The order in which to compile: long texts, which take longer, before short ones, and joined variants last.

    NVRTC reads one text at a time, under a lock of its own, but optimizes several at once. Joined variants are for programs, so
    few first calls wait for them.
    """
    return sorted(variants, key=lambda each: (is_joined(each), -_SLOW.get(each.source, 1) * len(assemble(each))))


def _missing(variants: Iterable[Variant], arch: str, cache: CubinCache) -> Iterator[Variant]:
    """The variants that the cache does not have and no thread compiles."""
    for variant in variants:
        if (variant, arch, cache) not in _coming and not is_compiled(variant, arch, cache):
            yield variant
