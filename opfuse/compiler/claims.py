"""Who runs which nodes: the user's fused ops first, then fusion functions, then rules; what nobody claims runs alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any
from weakref import WeakSet

from opfuse.compiler.cover import ABSENT_STATUS, FUSED, SHADOWED, Group, Outcome, cover
from opfuse.compiler.graph import BACKWARD, FORWARD, Graph
from opfuse.compiler.registry import FusionFunction, RuleSet
from opfuse.compiler.rules import PASSES, Fusion
from opfuse.core.fused import FusedOperation
from opfuse.core.operation import BasicOperation, FusibleOperation
from opfuse.core.signature import Env
from opfuse.errors import FusionError, OpfuseWarning, describe


class Claims:
    """Groups of nodes by pass, and the outcome of everything that asked for some."""

    def __init__(self, graph: Graph, env: Env) -> None:
        self.graph = graph
        self.env = env
        self.groups: dict[str, list[Group]] = {FORWARD: [], BACKWARD: []}
        self.owners: dict[str, dict[int, str]] = {FORWARD: {}, BACKWARD: {}}
        self.outcomes: list[Outcome] = []

    def claim_presets(self, presets: Sequence[tuple[int, FusedOperation]]) -> None:
        """Fused ops that stand in the pipeline itself take their ops, from a position on, in the passes they implement."""
        for start, fused in presets:
            for side, method in ((FORWARD, "fuser_forward"), (BACKWARD, "fuser_backward")):
                if fused.overrides(method):
                    self._claim(fused, start, side, name=type(fused).__name__)

    def claim_functions(self, rules: RuleSet, ops: Sequence[BasicOperation]) -> None:
        """Fusion functions see the live ops and replace runs of them."""
        for direction in PASSES:
            for function in rules.functions_of(direction, self.env.level):
                found = _replaced(function, ops, self.env)
                for start, fused in found:
                    self._claim(fused, start, direction, name=function.name)
                if not found:
                    self.outcomes.append(Outcome(function.name, direction, ABSENT_STATUS))
                _warn_idle(function, ops, worked=bool(found))

    def claim_rules(self, rules: Sequence[Fusion], direction: str) -> None:
        """Rules of one direction take what is left of it."""
        sides = PASSES[direction]
        taken = {i: name for side in sides for i, name in self.owners[side].items()}
        found, outcomes = cover(self.graph, self.env, rules, direction, taken)
        for group in found:
            self._add(group, direction)
        self.outcomes += outcomes

    def complete(self, side: str) -> tuple[Group, ...]:
        """All groups of one pass, with a group of its own for every node that nobody claimed.

        In the order of their last nodes: what a group reads aside, such as a quantized weight, is made before the group runs.
        """
        free = (node.index for node in self.graph.nodes if side in node.directions and node.index not in self.owners[side])
        return tuple(sorted([*self.groups[side], *(Group((i,)) for i in free)], key=lambda group: group.nodes[-1]))

    def _claim(self, fused: FusedOperation, start: int, direction: str, *, name: str) -> None:
        """Give ``fused`` the nodes of its ops, unless some are taken: then the outcome says by whom."""
        ops = range(start, start + len(fused.basic_ops))
        nodes = [node for op in ops for node in self.graph.by_op.get(op, ())]
        names = tuple(node.name for node in nodes if not node.side)
        owners = (self.owners[side].get(node.index) for side in PASSES[direction] for node in nodes)
        if owner := next(filter(None, owners), None):
            self.outcomes.append(Outcome(name, direction, SHADOWED, names, by=owner))
            return
        self._add(Group(tuple(node.index for node in nodes), opaque=fused, ops=ops), direction)
        self.outcomes.append(Outcome(name, direction, FUSED, names))

    def _add(self, group: Group, direction: str) -> None:
        """Let ``group`` run its nodes, in each pass those that do something in it."""
        for side in PASSES[direction]:
            nodes = tuple(i for i in group.nodes if side in self.graph.nodes[i].directions)
            if nodes:
                self.groups[side].append(replace(group, nodes=nodes))
                self.owners[side].update(dict.fromkeys(nodes, group.name))


_known: WeakSet[Callable[..., Any]] = WeakSet()
"""Functions that have replaced ops once, or that were warned of."""


def _warn_idle(function: FusionFunction, ops: Sequence[BasicOperation], *, worked: bool) -> None:
    """One OpfuseWarning for a registered function that leaves the first pipeline that it sees as it is."""
    if not worked and function.func not in _known:
        code = getattr(function.func, "__code__", None)
        where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
        got = f"none in [{', '.join(op.label for op in ops)}]"
        cure = "compare its conditions with these basic ops: a Linear is a BasicLinear and a Bias; unregister it if it has no use"
        message = describe(
            f"fusion function {function.name!r}{where}", wanted="FusedOperations in place of ops", got=got, cure=cure
        )
        warnings.warn(message, OpfuseWarning, stacklevel=2)
    _known.add(function.func)


def _replaced(function: FusionFunction, ops: Sequence[BasicOperation], env: Env) -> list[tuple[int, FusedOperation]]:
    """The FusedOperations that a function put in, with the index of their first basic op."""
    result = function.func(list(ops), recipe=env.recipe)
    is_list = isinstance(result, Sequence) and all(isinstance(op, FusibleOperation) for op in result)
    if not is_list or [id(basic) for op in result for basic in op.basic_ops] != [id(op) for op in ops]:
        raise FusionError(
            describe(
                f"fusion function {function.name!r}",
                wanted="a list of ops that stand for the same basic ops in the same order",
                got=[op.label for op in result] if is_list else repr(result),
                cure="replace runs of ops by FusedOperations of exactly these ops",
            )
        )
    starts = accumulate((len(op.basic_ops) for op in result), initial=0)
    return [(start, op) for start, op in zip(starts, result) if isinstance(op, FusedOperation)]
