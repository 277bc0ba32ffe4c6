"""Grouping what layers of a model have in common, so that reports tell it once, with the number of layers; aligned rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def alike(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Items grouped by key, in the order in which keys first appear."""
    found: dict[Hashable, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return [*found.values()]


def starred(name: str) -> str:
    """``name`` with a star for each step of its paths that is a number."""
    return re.sub(r"(?<![^.+ ])(?<!\.\.)\d+(?!\.\.)(?![^.+ ])", "*", name)


def short(name: str) -> str:
    """``a.b.q+k`` for ``a.b.q+a.b.k``, the paths of modules that run as one."""
    first, *others = name.split("+")
    parent = first.rpartition(".")[0] + "."
    return "+".join((first, *(other.removeprefix(parent) for other in others)))


def common(names: Sequence[str]) -> str:
    """One name for those that differ by numbers alone: ``layers.*.mlp``."""
    return names[0] if len({*names}) == 1 else starred(names[0])


def counted(names: Sequence[str]) -> str:
    """The :func:`common` name, with the number of names if there are several: ``layers.*.mlp ×2``."""
    return f"{common(names)} ×{len(names)}" if len(names) > 1 else names[0]


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> Iterator[str]:
    """A line of text for each row, whose cells begin below each other; those of the columns ``right`` end so."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = (cell.rjust(n) if i in right else cell.ljust(n) for i, (cell, n) in enumerate(zip(row, widths)))
        yield "  ".join(cells).rstrip()
