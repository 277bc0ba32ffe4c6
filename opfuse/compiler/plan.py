"""A plan: how one pipeline runs under one key. Made by a short list of named passes over values."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from opfuse.compiler.cover import DIRECTIONS, Group, Outcome, cover
from opfuse.compiler.graph import BACKWARD, FORWARD, QUANTIZE, Graph
from opfuse.compiler.lower import Inputs, lower
from opfuse.compiler.registry import FusionFunction, RuleSet
from opfuse.compiler.rules import JOINT
from opfuse.core.cast import Cast
from opfuse.core.operation import BasicOperation, FusedOperation
from opfuse.core.signature import Env
from opfuse.errors import FusionError, describe
from opfuse.recipes import current_amax_group


class PlanKey(NamedTuple):
    """Everything a plan depends on. ops: digest of the pipeline's specs and channels. rules: the active rule set's digest."""

    ops: str
    env: Env
    inputs: Inputs
    rules: str


@dataclass(frozen=True)
class Segment:
    """A stretch of nodes that runs inside one autograd node.

    inputs, outputs: value numbers that enter and leave. forward, backward: groups in execution order.
    """

    nodes: range
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    forward: tuple[Group, ...]
    backward: tuple[Group, ...]
    ops: tuple[int, ...]
    requires_grad: bool


@dataclass(frozen=True)
class Plan:
    """Graph, groups, segments, and what became of every rule. opaque: some groups come from functions, not from rules."""

    key: PlanKey
    graph: Graph
    segments: tuple[Segment, ...]
    outcomes: tuple[Outcome, ...]
    opaque: bool = False
    casts: dict[int, Cast] = field(default_factory=dict, compare=False)

    @property
    def fusions(self) -> tuple[str, ...]:
        """Names of what fused, forward first, once for each place."""
        return tuple(outcome.rule for outcome in self.outcomes if outcome.status == "fused")


def compile_plan(ops: Sequence[BasicOperation], key: PlanKey, rules: RuleSet, names: Sequence[tuple[str, ...]],
                 presets: Sequence[FusedOperation] = ()) -> Plan:
    """The plan of ``ops`` under ``key``: fused ops in the pipeline itself, then functions, then rules, joint before forward and backward.

    presets: the FusedOperations that the user put into the pipeline.
    """
    graph = lower(ops, key.env, key.inputs, names)
    groups: dict[str, list[Group]] = {FORWARD: [], BACKWARD: []}
    outcomes: list[Outcome] = []
    opaque = claim_opaque(ops, graph, key.env, rules, presets, groups, outcomes)
    for direction in DIRECTIONS:
        taken = {i: group.name for side in _sides(direction) for group in groups[side] for i in group.nodes}
        found, seen = cover(graph, key.env, rules.of(direction, key.env.level), direction, taken)
        for side in _sides(direction):
            groups[side] += [_restricted(graph, group, side) for group in found]
        outcomes += seen
    forward, backward = (_complete(graph, side, groups[side]) for side in (FORWARD, BACKWARD))
    verify(graph, forward, FORWARD)
    verify(graph, backward, BACKWARD)
    return Plan(key, graph, partition(graph, forward, backward), tuple(outcomes), opaque, _live_casts(graph, ops, key.env))


def _live_casts(graph: Graph, ops: Sequence[BasicOperation], env: Env) -> dict[int, Cast]:
    return {
        node.index: Cast(node.spec.role, node.spec.quantizer, ops[node.op].label, env.recipe, node.spec.state, current_amax_group())
        for node in graph.nodes
        if node.kind == QUANTIZE and env.recipe is not None
    }


def _sides(direction: str) -> tuple[str, ...]:
    return (FORWARD, BACKWARD) if direction == JOINT else (direction,)


def _restricted(graph: Graph, group: Group, side: str) -> Group:
    nodes = tuple(i for i in group.nodes if side in graph.nodes[i].directions)
    return Group(nodes, group.rule, group.binding, group.opaque)


def _complete(graph: Graph, side: str, groups: Iterable[Group]) -> tuple[Group, ...]:
    """``groups`` and, for every node that none of them runs, a group of its own; in forward order."""
    groups = list(groups)
    owned = {i for group in groups for i in group.nodes}
    alone = [Group((node.index,)) for node in graph.nodes if side in node.directions and node.index not in owned]
    return tuple(sorted(groups + alone, key=lambda group: group.nodes[0]))


def verify(graph: Graph, groups: Sequence[Group], side: str) -> None:
    """FusionError unless ``groups`` run every node of ``side`` exactly once, each in order."""
    wanted = [node.index for node in graph.nodes if side in node.directions]
    got = sorted(i for group in groups for i in group.nodes)
    if got != wanted or any(list(group.nodes) != sorted(group.nodes) for group in groups):
        raise FusionError(describe(f"{side} plan", wanted=f"nodes {wanted}, each once and in order", got=got,
                                   cure="a fusion must keep the basic ops it takes, in order"))


# -- functions that fuse live ops ---------------------------------------------------------------------------------------


def claim_opaque(ops: Sequence[BasicOperation], graph: Graph, env: Env, rules: RuleSet, presets: Sequence[FusedOperation],
                 groups: dict[str, list[Group]], outcomes: list[Outcome]) -> bool:
    """Give runs of ops to the user's FusedOperations and to what fusion functions return; True if any was given."""
    position = {id(op): i for i, op in enumerate(ops)}
    for fused in presets:
        for side, method in ((FORWARD, "fuser_forward"), (BACKWARD, "fuser_backward")):
            if fused.overrides(method):
                claim(fused, position[id(fused.basic_ops[0])], (side,), graph, groups, outcomes, name=type(fused).__name__)
    for direction in DIRECTIONS:
        for function in rules.functions_of(direction, env.level):
            for start, fused in _replaced(function, ops, env):
                claim(fused, start, _sides(direction), graph, groups, outcomes, name=function.name)
    return any(groups.values())


def _replaced(function: FusionFunction, ops: Sequence[BasicOperation], env: Env) -> list[tuple[int, FusedOperation]]:
    """The FusedOperations that a function put in, with the index of their first basic op."""
    result = function.func(list(ops), recipe=env.recipe)
    if [id(basic) for op in result for basic in op.basic_ops] != [id(op) for op in ops]:
        raise FusionError(describe(f"fusion function {function.name!r}", wanted="the same basic ops in the same order",
                                   got=[op.label for op in result], cure="replace runs of ops by FusedOperations of exactly these ops"))
    starts = accumulate((len(op.basic_ops) for op in result), initial=0)
    return [(start, op) for start, op in zip(starts, result) if isinstance(op, FusedOperation)]


def claim(fused: FusedOperation, start: int, sides: Sequence[str], graph: Graph, groups: dict[str, list[Group]], outcomes: list[Outcome], *,
          name: str) -> None:
    """Give ``fused`` the nodes of its ops on these sides, unless some are taken: then the outcome says by whom."""
    indices = range(start, start + len(fused.basic_ops))
    names = tuple(node.name for node in graph.nodes if node.op in indices and not node.side)
    direction = JOINT if len(sides) == 2 else sides[0]
    for group in (group for side in sides for group in groups[side]):
        if any(graph.nodes[i].op in indices for i in group.nodes):
            outcomes.append(Outcome(name, direction, "shadowed", names, by=group.name))
            return
    for side in sides:
        nodes = tuple(node.index for node in graph.nodes if node.op in indices and side in node.directions)
        if nodes:
            groups[side].append(Group(nodes, opaque=fused))
    outcomes.append(Outcome(name, direction, "fused", names))


# -- segments ------------------------------------------------------------------------------------------------------------


def partition(graph: Graph, forward: Sequence[Group], backward: Sequence[Group]) -> tuple[Segment, ...]:
    """The smallest stretches that no group and no quantized value crosses."""
    reach = list(range(len(graph.nodes)))
    for group in (*forward, *backward):
        reach[group.nodes[0]] = max(reach[group.nodes[0]], group.nodes[-1])
    for node in graph.nodes:
        if node.kind == QUANTIZE:
            first, last = _quantized_span(graph, node.index)
            reach[first] = max(reach[first], last)
    starts = [0] if reach else []
    end = 0
    for i, last in enumerate(reach):
        if i > end:
            starts.append(i)
        end = max(end, last, i)
    bins: list[tuple[list[Group], list[Group]]] = [([], []) for _ in starts]
    for side, groups in enumerate((forward, backward)):
        for group in groups:
            bins[bisect_right(starts, group.nodes[0]) - 1][side].append(group)
    return tuple(_segment(graph, range(start, stop), *sides) for start, stop, sides in zip(starts, [*starts[1:], len(reach)], bins))


def _quantized_span(graph: Graph, index: int) -> tuple[int, int]:
    node = graph.nodes[index]
    if node.directions == {BACKWARD}:
        return graph.producer.get(node.outputs[0], index), index
    return index, max(graph.consumers.get(node.outputs[0], (index,)))


def _segment(graph: Graph, nodes: range, forward: Sequence[Group], backward: Sequence[Group]) -> Segment:
    members = [graph.nodes[i] for i in nodes]
    made = {value for node in members for value in node.outputs if graph.producer[value] in nodes}
    read = dict.fromkeys(value for node in members for value in node.inputs if value not in made)
    leaves = [v for v in made if v in graph.outputs or any(reader not in nodes for reader in graph.consumers.get(v, ()))]
    trains = any(node.needs for node in members)
    return Segment(nodes, tuple(read), tuple(sorted(leaves)), tuple(forward), tuple(reversed(backward)),
                   tuple(dict.fromkeys(node.op for node in members)), trains)
