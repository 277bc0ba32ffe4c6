"""Ops of other packages that files may name: those that an installed distribution offers as entry points.

A file imports nothing: ``op: mish`` means what the entry point ``mish`` of the group names, if a distribution has one.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from opfuse.core.operation import FusibleOperation
from opfuse.errors import OpfuseWarning, describe
from opfuse.fusions.declared import learn
from opfuse.ops import OPS

GROUP = "opfuse.ops"


def own_ops() -> Mapping[str, type[FusibleOperation]]:
    """The classes by the names of their entry points; what is none of an op, or fails, is told by a warning and left out."""
    found: dict[str, type[FusibleOperation]] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            cls = point.load()
            fault = _fault(point, cls)
        except Exception as error:  # whatever the module of somebody else raises
            cls, fault = None, ("one that can be imported", f"{type(error).__name__}: {error}", "mend or uninstall it")
        if fault is None:
            found[point.name] = cls
            learn(cls)
        else:
            wanted, got, cure = fault
            where = f"entry point {point.name} = {point.value} of {point.dist.name if point.dist else 'a distribution'}"
            warnings.warn(describe(where, wanted=wanted, got=got, cure=cure), OpfuseWarning, stacklevel=2)
    return found


def _fault(point: EntryPoint, cls: Any) -> tuple[str, str, str] | None:
    """What an entry point should be, is, and what to do; None if it is that."""
    if not isinstance(cls, type) or not issubclass(cls, FusibleOperation):
        return "a class of opfuse.ops", repr(cls), "derive it from ops.BasicOperation"
    if point.name in OPS:
        return "a name that no op of opfuse has", repr(point.name), "rename class and entry point"
    if point.name != cls.kind:
        return "the kind of its op, which patterns say", repr(point.name), f"name the entry point {cls.kind}"
    return None
