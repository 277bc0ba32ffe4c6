"""Whether all code that runs in a stretch of a pipeline is the library's: what it does then follows from its plan's key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any

from opfuse.compiler.plan import Plan, Segment
from opfuse.core.operation import BasicOperation
from opfuse.core.spec import accumulates
from opfuse.core.watched import rewritten
from opfuse.numerics.pointwise import Pointwise
from opfuse.tensors.quantizers.own import is_ours, is_own_quantizer


def is_own(plan: Plan, segment: Segment, ops: Sequence[BasicOperation]) -> bool:
    """Whether all that runs in the segment is the library's, and done when it is run."""
    nodes = [plan.graph.nodes[i] for i in segment.nodes]
    if not any(node.inputs for node in nodes):
        return False
    groups = (*segment.forward, *segment.backward)
    rules = [function for group in groups if group.rule for function in (group.rule.forward, group.rule.backward) if function]
    return (
        not any(group.opaque for group in groups)
        and all(is_ours(function) for function in rules)
        and all(has_own_methods(ops[i]) and not _leaves_work(ops[i].spec) for i in segment.ops)
        and all(is_own_quantizer(plan.casts[node.index].quantizer) for node in nodes if node.is_cast)
    )


def _leaves_work(spec: Any) -> bool:
    """Whether an op writes to tensors of the caller, or puts products off."""
    return accumulates(spec) or getattr(spec, "delay_wgrad_compute", False)


def has_own_methods(op: BasicOperation) -> bool:
    """Whether all code of the op is the library's; ``math`` of an elementwise op is a value."""
    theirs = {name for kind in type(op).__mro__ if not _is_known(kind) for name, value in vars(kind).items() if _is_code(value)}
    later = {name for name in rewritten(type(op)) if _is_code(value := getattr(type(op), name, None)) and not is_ours(value)}
    on_itself = {name for name, value in vars(op).items() if callable(value) and hasattr(type(op), name)}
    return not (theirs | later | on_itself) - {"math"} and _is_fixed(getattr(op, "math", None))


def _is_fixed(math: Any) -> bool:
    """Whether the definitions of an elementwise op read nothing but their arguments, so that one run tells of all."""
    made_of = (math.value, math.grad, math.operand_grad) if isinstance(math, Pointwise) else ()
    return all(function is None or _is_closed(function) for function in made_of)


def _is_closed(function: Any) -> bool:
    """Whether a function is torch's or opfuse's own, or names only modules and such functions beside its arguments.

    What makes one op of another, as ``gated`` does, has the definitions of that, which may be the user's.
    """
    if not isinstance(function, FunctionType) or _is_known_function(function):
        cells = (function.__closure__ or ()) if isinstance(function, FunctionType) and is_ours(function) else ()
        known = isinstance(function, (FunctionType, BuiltinFunctionType, MethodDescriptorType))
        return known and all(_is_fixed(cell.cell_contents) for cell in cells)
    named = (function.__globals__.get(name) for name in _names(function.__code__))
    kept = function.__closure__ or function.__defaults__ or function.__kwdefaults__
    return not kept and all(value is None or isinstance(value, ModuleType) or _is_known_function(value) for value in named)


def _is_known_function(value: Any) -> bool:
    module = str(getattr(value, "__module__", None) or "torch")
    return isinstance(value, (FunctionType, BuiltinFunctionType)) and module.partition(".")[0] in ("torch", "opfuse", "math")


def _names(code: CodeType) -> Iterator[str]:
    """What the code reads from outside, and that of the functions in it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _is_known(kind: type) -> bool:
    return is_ours(kind) or kind.__module__.partition(".")[0] in ("torch", "builtins", "abc", "typing")


def _is_code(value: Any) -> bool:
    return callable(value) or isinstance(value, (property, classmethod, staticmethod))
