"""The ladder that a kernel goes down until its threads have registers for all that they hold.

How many registers a chain takes is known only when it is compiled, a user's own activation above all. So what a source asks for
by these names is where compilation begins, and not what it insists on; grids depend on neither:

RESIDENT    blocks that share a multiprocessor, and with it its registers; 0 leaves it to the compiler
AHEAD       rows that a thread loads before it needs them: a power of two, at most 4
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

_MOST_AHEAD = 4
_MODEST = 4  # blocks of 256 threads, of which each may have 64 registers


def rungs(defines: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Definitions ``NAME=value`` as they are given, then others under which less may be spilled, down to one block.

    Other numbers of rows AHEAD come first, fewer before more: the compiler orders all instructions anew, and as many threads stay
    to hide what each waits for. Then fewer blocks leave a thread more registers.
    """
    given = dict(define.split("=", 1) for define in defines if "=" in define)
    ladders = {name: [*others(int(given[name]))] for name, others in _LADDERS.items() if name in given}
    for values in itertools.product(*ladders.values()):
        chosen = dict(zip(ladders, values))
        names = (define.partition("=")[0] for define in defines)
        yield tuple(f"{name}={chosen[name]}" if name in chosen else define for name, define in zip(names, defines))


def _fewer_blocks(blocks: int) -> Iterator[int]:
    if blocks == 0:  # for the sake of more blocks the compiler may spill
        yield blocks
        blocks = _MODEST
    while blocks > 0:
        yield blocks
        blocks = blocks * 4 // 5  # each step gives a thread a quarter more registers at least


def _other_rows(rows: int) -> Iterator[int]:
    fewer = itertools.takewhile(bool, (rows >> n for n in itertools.count()))
    return itertools.chain(fewer, (more for more in (2 * rows, 4 * rows) if more <= _MOST_AHEAD))


_LADDERS = {"RESIDENT": _fewer_blocks, "AHEAD": _other_rows}
"""From the outer to the inner."""
