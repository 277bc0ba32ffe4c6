"""How many threads share a row of a matrix, and what each holds: the macros of row.cuh."""

from __future__ import annotations

from opfuse.kernels.engine.launch import Grid
from opfuse.numerics.layouts import ceil_div
from opfuse.numerics.norm import EIGHT, THREADS, team

MOST_BYTES = 16
"""Bytes of one element from each eight that a thread holds, at most: a tensor then takes 32 registers."""


def packs(columns: int) -> int:
    """How many eights of columns a thread has."""
    return ceil_div(columns, EIGHT * team(columns))


def held(columns: int, itemsize: int) -> int:
    """How many eights of elements of ``itemsize`` bytes a thread holds in registers: all of its own, or 0 if they do not fit."""
    return packs(columns) if packs(columns) * itemsize <= MOST_BYTES else 0


def defines(columns: int, eights: int, *, is_aligned: bool) -> dict[str, int]:
    """The macros of row.cuh for rows of which a thread holds so many ``eights``."""
    whole = is_aligned and eights * EIGHT * team(columns) == columns
    return {"TEAM": team(columns), "PACKS": eights, "ALIGNED": int(is_aligned), "WHOLE": int(whole)}


def grid(rows: int, columns: int) -> Grid:
    """Enough blocks of threads for all rows."""
    return Grid(ceil_div(rows, THREADS // team(columns)), THREADS)
