"""What files may name of other packages: ops and functions that an installed distribution offers as entry points.

A file imports nothing: ``op: mish`` means what the entry point ``mish`` of :data:`OP_PLUGINS` names, if a distribution has one,
and ``emit: norm_gate`` what the entry point ``norm_gate`` of :data:`FUNCTION_PLUGINS` names.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from opfuse.config.findings import sentence
from opfuse.core.operation import FusibleOperation
from opfuse.core.spec import argument, domains, spec_of
from opfuse.errors import OpfuseError, OpfuseWarning, describe
from opfuse.fusions.declared import EMITTERS, learn
from opfuse.ops import OPS

OP_PLUGINS = "opfuse.ops"
FUNCTION_PLUGINS = "opfuse.fusions"

PointFault = tuple[str, str, str] | None
"""What an entry point should be, is, and what to do; None if it is that."""


def plugin_ops() -> Mapping[str, type[FusibleOperation]]:
    """The classes by the names of their entry points; what is none of an op, or fails, is told by a warning and left out."""
    found = dict(_offered(OP_PLUGINS, _fault_of_op))
    for cls in found.values():
        learn(cls)
    return found


def plugin_functions() -> Mapping[str, Callable[..., Any]]:
    """The functions that declared rules may emit, by the names of their entry points; anything else is told and left out."""
    return dict(_offered(FUNCTION_PLUGINS, _fault_of_function))


def _offered(group: str, fault_of: Callable[[EntryPoint, Any], PointFault]) -> Iterator[tuple[str, Any]]:
    """Name and value of each entry point of ``group`` that has no fault, in the order of their names."""
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        try:
            value = point.load()
            fault = fault_of(point, value)
        except Exception as error:  # whatever the module of somebody else raises
            message, cure = sentence(str(error)) if isinstance(error, OpfuseError) else (str(error), "")
            value = None
            fault = "one that can be imported", f"{type(error).__name__}: {message}", cure or "mend or uninstall it"
        if fault is None:
            yield point.name, value
        else:
            wanted, got, cure = fault
            where = f"entry point {point.name} = {point.value} of {point.dist.name if point.dist else 'a distribution'}"
            warnings.warn(describe(where, wanted=wanted, got=got, cure=cure), OpfuseWarning, stacklevel=2)


def _fault_of_op(point: EntryPoint, cls: Any) -> PointFault:
    if not isinstance(cls, type) or not issubclass(cls, FusibleOperation):
        return "a class of opfuse.ops", repr(cls), "derive it from ops.BasicOperation"
    if point.name in OPS:
        return "a name that no op of opfuse has", repr(point.name), "rename class and entry point"
    if point.name != cls.kind:
        return "the kind of its op, which patterns say", repr(point.name), f"name the entry point {cls.kind}"
    spec = spec_of(cls)
    untyped = [argument(each.name) for each in fields(spec) if each.name not in domains(spec)]
    if untyped:
        cure = f"annotate it with int, float, bool or str, as in {untyped[0]}: int"
        return "arguments with types that a file can hold", f"{cls.__name__}(..., {untyped[0]}, ...)", cure
    return None


def _fault_of_function(point: EntryPoint, function: Any) -> PointFault:
    if isinstance(function, type) or not callable(function):
        return "a function", repr(function), "name one, def f(x, *, PLACE, ...)"
    if point.name in EMITTERS:
        return "a name that opfuse does not emit itself", repr(point.name), "rename the entry point"
    return None
