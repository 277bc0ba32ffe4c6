"""Finds the user's own code in a segment.

What the library's code does follows from the key of its plan, so a program may repeat it. The user's code may do something else
at each call, so it runs at each call.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any, NamedTuple

from opfuse.compiler.cover import Group
from opfuse.compiler.graph import BACKWARD, FORWARD, Node
from opfuse.compiler.plan import Plan, Segment, Stretch, UserCode
from opfuse.core.cast import GRADIENT, Cast
from opfuse.core.grouped_cast import GroupedCast
from opfuse.core.operation import BasicOperation
from opfuse.core.spec import beyond_gradients
from opfuse.core.watched import rewritten
from opfuse.numerics.pointwise import Pointwise
from opfuse.tensors.quantizers.base import is_library_code, is_library_quantizer, reduces

_log = logging.getLogger("opfuse.programs")

BEFORE_FORWARD = "before forward"
"""A forward pass whose only own code is casts of parameters and of the segment's inputs, which run before the segment."""


class _Reason(NamedTuple):
    """Why a program cannot repeat a pass, and the nodes in whose groups the code is. cast: the quantize node that alone is it.

    is_users: whether the code is the user's; else it does something beside computing results.
    """

    side: str
    why: str
    nodes: tuple[int, ...]
    cast: Node | None = None
    is_users: bool = True


def user_code(plan: Plan, segment: Segment, ops: Sequence[BasicOperation]) -> UserCode:
    """What of the user's own runs in the segment, which keeps it and the log tells: for each pass why a program cannot
    repeat all of it, and the casts to run before the segment; other passes are left out.
    """
    reasons = list(_reasons(plan, segment, ops))
    found = _parts(plan, segment, reasons) if reasons else UserCode()
    for side, why in found.why.items():
        _log.info("%s, nodes %s, %s: runs at every call, since %s", plan.name, segment.nodes, side, why)
    segment.user_code = found
    return found


def _parts(plan: Plan, segment: Segment, reasons: Sequence[_Reason]) -> UserCode:
    """The passes of the segment, cut around the user's own code."""
    casts = [reason.cast for reason in reasons if reason.side == FORWARD]
    before = tuple(node for node in casts if node is not None and _comes_in(plan, segment, node))
    if len(before) < len(casts):
        before = ()
    why = {BEFORE_FORWARD if before and each.side == FORWARD else each.side: each.why for each in reversed(reasons)}
    theirs = {i for reason in reasons if reason.side == BACKWARD for i in reason.nodes}
    casting = {i: plan.casts[i] for i in segment.nodes if plan.graph.nodes[i].is_cast}
    # A cast in groups leaves the gradient itself in the context of its reader, which may be in another stretch.
    theirs |= {i for i, cast in casting.items() if isinstance(cast, GroupedCast) or not is_library_cast(cast)}
    users = frozenset(reason.side for reason in reasons if reason.is_users)
    return UserCode(why, users, before, tuple(_stretches(plan, segment.backward, theirs if BACKWARD in why else ())))


def _reasons(plan: Plan, segment: Segment, ops: Sequence[BasicOperation]) -> Iterator[_Reason]:
    passes, nodes = (FORWARD, BACKWARD), [plan.graph.nodes[i] for i in segment.nodes]
    for side, groups in zip(passes, (segment.forward, segment.backward)):
        for group in groups:
            if group.opaque:
                yield _Reason(side, f"{group.name} is a fused op, with code of its own", group.nodes)
            if group.rule and not is_library_code(getattr(group.rule, side)):
                yield _Reason(side, f"the rule {group.rule.name} is the user's own", group.nodes)
    by_op: dict[int, list[int]] = {i: [] for i in segment.ops}
    for node in nodes:
        if not node.is_cast:
            by_op[node.op].append(node.index)
    for i, indices in by_op.items():
        op, runs = ops[i], tuple(indices)
        if not is_library_op(op):
            yield from (_Reason(side, f"{op.label} has code of the user's own", runs) for side in passes)
        for what in beyond_gradients(op.spec):
            yield _Reason(BACKWARD, f"{op.label} {what}", runs, is_users=False)
    for node in nodes:
        for cast in (plan.casts[node.index],) if node.is_cast else plan.own_casts.get(node.index, {}).values():
            if not is_library_quantizer(cast.quantizer):
                how = "with an amax over the ranks of each call" if reduces(cast.quantizer) else "by code of the user's own"
                side = BACKWARD if cast.role == GRADIENT else FORWARD
                yield _Reason(side, f"{cast.where} is cast {how}", (node.index,), node if node.is_cast else None)


def _stretches(plan: Plan, groups: Sequence[Group], theirs: Collection[int]) -> Iterator[Stretch]:
    """The groups of a backward pass, cut around those that run code of the nodes ``theirs``."""
    for repeats, part in groupby(groups, lambda group: _read_by(plan, group).isdisjoint(theirs)):
        members = tuple(part)
        nodes = tuple(i for group in members for i in group.nodes)
        read = set().union(*[_read_by(plan, group) for group in members])
        yield Stretch(members, repeats, nodes, tuple(sorted(read.difference(nodes))))


def _read_by(plan: Plan, group: Group) -> set[int]:
    """The nodes whose contexts a group reads in a backward pass: its own, and those from which operands are made anew."""
    rematerialized = [operand for reader in group.nodes for operand in plan.rematerialized.get(reader, ())]
    return {*group.nodes, *(i for operand in rematerialized for i in (operand.source, *operand.chain))}


def _comes_in(plan: Plan, segment: Segment, node: Node) -> bool:
    """Whether a cast reads only a parameter or an input of the segment.

    No fusion runs it then: those of the library have casts only behind their own ops, and any other is the user's own code.
    """
    reads = node.side or (len(node.inputs) == 1 and node.inputs[0] in segment.inputs)
    return reads and node.index not in plan.rematerialized.cast_once and not isinstance(plan.casts[node.index], GroupedCast)


def is_library_cast(cast: Cast) -> bool:
    """Whether a cast runs the library's code only: its quantizer, and the methods of its op that it calls."""
    return is_library_quantizer(cast.quantizer) and _ASKED_BY_CASTS.isdisjoint(_replaced(cast.op))


_ASKED_BY_CASTS = frozenset(
    ("compute_dtype", "checked_dtype", "in_features", "quantizer_role", "__getattr__", "__getattribute__", "owner")
    + ("parameter", "parameter_names", "parameter_values", "parameter_slots", "borrows")
)


def is_library_op(op: BasicOperation) -> bool:
    """Whether all code of the op is the library's; the ``math`` of an elementwise op is a value that has functions."""
    return not _replaced(op) - {"math"} and _is_fixed(getattr(op, "math", None))


def _replaced(op: BasicOperation) -> set[str]:
    """Names of the op's code that is not the library's: in its classes, written into a class later, or set on the op itself."""
    theirs: set[str] = set()
    for kind in type(op).__mro__:
        if not _is_known(kind):
            theirs.update([name for name, value in vars(kind).items() if _is_code(value)])
    for name in rewritten(type(op)):
        value = getattr(type(op), name, None)
        if _is_code(value) and not is_library_code(value):
            theirs.add(name)
    for name, value in vars(op).items():
        if callable(value) and hasattr(type(op), name):
            theirs.add(name)
    return theirs


def _is_fixed(math: Any) -> bool:
    """Whether the functions of an elementwise op read nothing but their arguments, so that all runs do the same."""
    made_of = (math.value, math.grad, math.operand_grad) if isinstance(math, Pointwise) else ()
    return all(map(_is_closed, filter(None, made_of)))


def _is_closed(function: Any) -> bool:
    """Whether a function is torch's or opfuse's own, or reads, beside its arguments, only modules and such functions.

    A function that opfuse makes of an op's functions, as ``gated`` does, has these in its closure, and they may be the user's.
    """
    if not isinstance(function, FunctionType) or _is_known_function(function):
        cells = (function.__closure__ or ()) if isinstance(function, FunctionType) and is_library_code(function) else ()
        known = isinstance(function, (FunctionType, BuiltinFunctionType, MethodDescriptorType))
        return known and all(_is_fixed(cell.cell_contents) for cell in cells)
    named = (function.__globals__.get(name) for name in _names(function.__code__))
    kept = function.__closure__ or function.__defaults__ or function.__kwdefaults__
    return not kept and all(value is None or isinstance(value, ModuleType) or _is_known_function(value) for value in named)


def _is_known_function(value: Any) -> bool:
    module = str(getattr(value, "__module__", None) or "torch")
    return isinstance(value, (FunctionType, BuiltinFunctionType)) and module.partition(".")[0] in ("torch", "opfuse", "math")


def _names(code: CodeType) -> Iterator[str]:
    """The names that the code reads from outside, also those that functions inside of it read."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _is_known(kind: type) -> bool:
    return is_library_code(kind) or kind.__module__.partition(".")[0] in ("torch", "builtins", "abc", "typing")


def _is_code(value: Any) -> bool:
    return callable(value) or isinstance(value, (property, classmethod, staticmethod))
