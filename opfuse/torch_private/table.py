"""All entries of :data:`~opfuse.torch_private.names.NAMES`: the modules that make them are imported here."""

from __future__ import annotations

from opfuse.torch_private import (
    autograd,
    checkpoints,
    compiler,
    devices,
    dispatch,
    modules,
    operations,
    sharding,
    sizes,
    stack,
    tensors,
    unloaded,
)
from opfuse.torch_private.names import NAMES, NEEDS, TRIED, faults

__all__ = ["ENTRIES_OF", "NAMES", "NEEDS", "TRIED", "faults"]

ENTRIES_OF = (
    *(autograd, checkpoints, compiler, devices, dispatch, modules),
    *(operations, sharding, sizes, stack, tensors, unloaded),
)
"""The modules that have entries, and the one that reads Python's stack."""
