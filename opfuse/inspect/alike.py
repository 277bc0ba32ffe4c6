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


_NUMBER = re.compile(r"(?<![^.+ ])(?<!\.\.)\d+(?!\.\.)(?![^.+ ])")
"""A step of a path that is a number."""


def starred(name: str) -> str:
    """``name`` with a star for each step of its paths that is a number."""
    return _NUMBER.sub("*", name)


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


def spanned(names: Sequence[str]) -> str:
    """``layers.{0-2,5}.mlp ×4`` for names that differ by one number; the :func:`counted` name of others."""
    columns = [*zip(*map(_NUMBER.findall, names))]
    if [len({*column}) > 1 for column in columns].count(True) != 1:
        return counted(names)
    steps = (column[0] if len({*column}) == 1 else f"{{{_ranges(sorted(map(int, column)))}}}" for column in columns)
    return f"{_NUMBER.sub(lambda _: next(steps), names[0])} ×{len(names)}"


def _ranges(numbers: Sequence[int]) -> str:
    """``0-2,5`` for rising numbers."""
    begins = [n for i, n in enumerate(numbers) if not i or numbers[i - 1] + 1 < n]
    ends = [n for i, n in enumerate(numbers, 1) if i == len(numbers) or numbers[i] > n + 1]
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in zip(begins, ends))


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> Iterator[str]:
    """A line of text for each row, whose cells begin below each other; those of the columns ``right`` end so."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = (cell.rjust(n) if i in right else cell.ljust(n) for i, (cell, n) in enumerate(zip(row, widths)))
        yield "  ".join(cells).rstrip()
