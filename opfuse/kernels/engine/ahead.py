"""Kernels that threads compile while their caller goes on; who needs one waits for that one alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from opfuse.kernels.engine.compiling import Variant, assemble, cubin, is_compiled
from opfuse.kernels.engine.cubins import CubinCache
from opfuse.kernels.engine.variants import is_joined

_coming: dict[tuple[Variant, str, CubinCache], Future[bytes]] = {}
"""What is being compiled, or waits for its turn."""

os.register_at_fork(after_in_child=_coming.clear)  # the threads stay behind


def compile_together(variants: Iterable[Variant], arch: str, cache: CubinCache) -> None:
    """Begin to compile those that the cache does not have, each in a thread, from when it is named.

    NVRTC runs without Python's lock. An interpreter that ends has them compiled first.
    """
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    for variant in _missing(variants, arch, cache):
        key = variant, arch, cache
        _coming[key] = made = pool.submit(cubin, *key)
        made.add_done_callback(lambda _, key=key: _coming.pop(key, None))  # type: ignore[misc]
    pool.shutdown(wait=False)


def wait_for(variant: Variant, arch: str, cache: CubinCache) -> None:
    """Return when the variant is compiled, if it is being; one that does not compile is told of when it is used."""
    if (made := _coming.get((variant, arch, cache))) is not None:
        made.exception()


def in_turn(variants: Iterable[Variant]) -> list[Variant]:
    """In the order of their texts' lengths, by which compiling takes longer: what is begun last should be done soon.

    NVRTC reads one text at a time, under a lock of its own; it optimizes several. Launches become one in programs above all, so
    kernels for those, which few first calls wait for, come last.
    """
    return sorted(variants, key=lambda variant: (is_joined(variant), -len(assemble(variant))))


def _missing(variants: Iterable[Variant], arch: str, cache: CubinCache) -> Iterator[Variant]:
    """Those that the cache does not have and no thread makes."""
    for variant in variants:
        if (variant, arch, cache) not in _coming and not is_compiled(variant, arch, cache):
            yield variant
