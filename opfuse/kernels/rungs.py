"""The ladder that a kernel goes down until its threads have registers for all that they hold.

How many registers a chain takes is known only when it is compiled, a user's own activation above all. So what a source asks for
by these names is where compilation begins, and not what it insists on; grids depend on neither:

RESIDENT    blocks that share a multiprocessor, and with it its registers
AHEAD       rows that a thread loads before it needs them, whose registers wait
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

# From the outer to the inner: with fewer rows AHEAD as many threads stay to hide what each waits for, so that is tried first.
_STEPS: Mapping[str, Callable[[int], int]] = {
    "RESIDENT": lambda blocks: blocks * 4 // 5,
    "AHEAD": lambda rows: rows // 2,
}


def rungs(defines: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Definitions ``NAME=value`` as they are given, then with ever more registers for a thread, down to one block and one row."""
    given = dict(define.split("=", 1) for define in defines if "=" in define)
    ladders = {name: [*_down(int(given[name]), step)] for name, step in _STEPS.items() if name in given}
    for values in itertools.product(*ladders.values()):
        chosen = {**given, **dict(zip(ladders, map(str, values)))}
        yield tuple(f"{name}={chosen[name]}" if name in ladders else define for name, define in zip(map(_name, defines), defines))


def _name(define: str) -> str:
    return define.partition("=")[0]


def _down(value: int, step: Callable[[int], int]) -> Iterator[int]:
    """``value`` and what is left of it after each step, as long as something is."""
    while value > 0:
        yield value
        value = step(value)
