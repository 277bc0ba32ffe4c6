"""A row of a matrix and the threads that share it, as row.cuh is compiled for them."""

from __future__ import annotations

from opfuse.kernels.engine.launch import Grid
from opfuse.numerics.layouts import ceil_div
from opfuse.numerics.norm import EIGHT, THREADS, team

MOST_BYTES = 16
"""Of neighbouring elements, one from each eight that a thread holds: 32 registers of one tensor."""


def packs(columns: int) -> int:
    """Eights of columns that a thread has."""
    return ceil_div(columns, EIGHT * team(columns))


def held(columns: int, itemsize: int) -> int:
    """The eights of elements of so many bytes that a thread can hold in registers, 0 if they are too many."""
    return packs(columns) if packs(columns) * itemsize <= MOST_BYTES else 0


def defines(columns: int, eights: int, *, is_aligned: bool) -> dict[str, int]:
    """What row.cuh is compiled with, where a thread holds so many of them."""
    whole = is_aligned and eights * EIGHT * team(columns) == columns
    return {"TEAM": team(columns), "PACKS": eights, "ALIGNED": int(is_aligned), "WHOLE": int(whole)}


def grid(rows: int, columns: int) -> Grid:
    """Blocks for all rows."""
    return Grid(ceil_div(rows, THREADS // team(columns)), THREADS)
