"""The ladder of settings that compilation tries, rung after rung, until a kernel's threads have enough registers.

How many registers a chain takes is known only when it is compiled, above all with a user's own activation. So the values of three
macros are only where compilation begins. No grid depends on them:

RESIDENT    how many blocks share a multiprocessor, and so its registers; 0 leaves it to the compiler
AHEAD       how many rows a thread loads before it needs them: a power of two, at most 4
HERE        whether results are made row by row; else the compiler may keep what they are made of until they are cast

The cubin of the first rung without spills is kept. A kernel that spills on every rung is reported when it is loaded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

_MOST_AHEAD = 4
_MODEST = 4  # blocks of 256 threads, of which each may have 64 registers


def rungs(defines: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The definitions ``NAME=value`` as given, then others under which less may be spilled, down to one block.

    Results row by row come first, then other values of AHEAD, smaller ones before larger ones: the compiler then orders
    instructions anew, and as many threads as before hide each other's waits. Then fewer blocks leave each thread more registers.
    """
    given = dict(define.split("=", 1) for define in defines if "=" in define)
    ladders = {name: [*others(int(given[name]))] for name, others in _LADDERS.items() if name in given}
    for values in itertools.product(*ladders.values()):
        chosen = dict(zip(ladders, values))
        names = (define.partition("=")[0] for define in defines)
        yield tuple(f"{name}={chosen[name]}" if name in chosen else define for name, define in zip(names, defines))


def _fewer_blocks(blocks: int) -> Iterator[int]:
    if blocks == 0:  # the compiler may spill to have more blocks
        yield blocks
        blocks = _MODEST
    while blocks > 0:
        yield blocks
        blocks = blocks * 4 // 5  # each step gives a thread a quarter more registers at least


def _other_rows(rows: int) -> Iterator[int]:
    fewer = itertools.takewhile(bool, (rows >> n for n in itertools.count()))
    return itertools.chain(fewer, (more for more in (2 * rows, 4 * rows) if more <= _MOST_AHEAD))


_Others = Callable[[int], Iterable[int]]
_LADDERS: dict[str, _Others] = {"RESIDENT": _fewer_blocks, "AHEAD": _other_rows, "HERE": lambda _: range(2)}
"""The values to try for each macro; those of the last change fastest."""
