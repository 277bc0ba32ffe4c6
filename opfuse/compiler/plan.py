"""A plan: how one pipeline runs under one key; made by lowering, claims of rules, a check, and a cut into segments."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from opfuse.compiler.cover import ABSENT_STATUS, FUSED, Claims, Group, Outcome, refused_everywhere
from opfuse.compiler.graph import BACKWARD, DISPATCHES, FORWARD, RETURNS, TRANSPARENT, VIEW, CastSpec, Graph, Node
from opfuse.compiler.lower import Inputs, lower
from opfuse.compiler.registry import RuleSet
from opfuse.compiler.rematerialize import Rematerialized, rematerialized_operands
from opfuse.compiler.rules import PASSES, Fusion
from opfuse.core.cast import GRADIENT, Cast
from opfuse.core.fused import FusedOperation
from opfuse.core.grouped_cast import GroupedCast
from opfuse.core.operation import BasicOperation
from opfuse.core.protocol import Grouping
from opfuse.core.signature import Env
from opfuse.errors import FusionError, OpfuseError, describe
from opfuse.recipes import Recipe
from opfuse.recipes.autocast import current_amax_group
from opfuse.recipes.delayed import THIS_RANK


class PlanKey(NamedTuple):
    """Everything a plan depends on. ops: digest of the pipeline's specs and channels. rules: the active rule set's digest."""

    ops: str
    env: Env
    inputs: Inputs
    rules: str


class Stretch(NamedTuple):
    """Groups of a backward pass that follow each other: all run code of the user's own, or none does.

    repeats: whether none does. nodes: theirs. beside: other nodes whose contexts they read.
    """

    groups: tuple[Group, ...]
    repeats: bool
    nodes: tuple[int, ...]
    beside: tuple[int, ...]


class UserCode(NamedTuple):
    """What of the user's own runs in a segment. why: in which passes, and what; of ``users`` it is the user's code, in others the
    library's, which does more than return results. before: casts that run before the segment does.

    backward: the backward pass, cut around such code; empty if neither pass has any.
    """

    why: Mapping[str, str] = MappingProxyType({})
    users: frozenset[str] = frozenset()
    before: tuple[Node, ...] = ()
    backward: tuple[Stretch, ...] = ()


NOT_READ = UserCode()
"""In place of what is found of a segment, until it runs."""


@dataclass
class Segment:
    """Nodes that run inside one autograd node.

    inputs, outputs: value numbers that enter and leave. forward, backward: groups in execution order. requires_grad: it needs
    an autograd node; not if there is no gradient to compute, nor for views alone, which torch itself follows. again: inputs that
    several of its nodes read, once for each further reader: autograd gets each reader's gradient and sums them, in the order in
    which it would get them from ops with nodes of their own. constant: outputs that want no gradient, as ops with nodes of their
    own would leave them.

    What is found when it first runs: user_code: what of the user's own runs in it. keepable: its casts of weights that may be
    kept from call to call. grouped: its ops with groups of rows, and their casts.
    """

    nodes: range
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    forward: tuple[Group, ...]
    backward: tuple[Group, ...]
    ops: tuple[int, ...]
    requires_grad: bool
    again: tuple[int, ...] = ()
    constant: frozenset[int] = frozenset()
    user_code: UserCode = field(default=NOT_READ, compare=False, repr=False)
    keepable: Any = field(default=None, compare=False, repr=False)
    grouped: Sequence[tuple[Node, Grouping, Sequence[Cast]]] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Plan:
    """Graph, groups, segments, and what became of every rule.

    opaque: some groups come from functions, not from rules. casts: what quantize nodes run. own_casts: what ``ctx.cast`` runs in
    methods that cast by themselves, by node and role. name, ops: labels of the pipeline and of its basic ops. rematerialized:
    operands that the backward pass makes anew, by the node that reads them.

    programs: recordings, by a segment's first node, those of stretches also by pass and position, those of casts by cast.
    """

    key: PlanKey
    graph: Graph
    segments: tuple[Segment, ...]
    outcomes: tuple[Outcome, ...]
    opaque: bool = False
    casts: dict[int, Cast] = field(default_factory=dict, compare=False)
    own_casts: dict[int, dict[str, Cast]] = field(default_factory=dict, compare=False)
    name: str = ""
    ops: tuple[str, ...] = ()
    rematerialized: Rematerialized = field(default_factory=Rematerialized, compare=False)
    programs: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def reads_sizes(self) -> bool:
        """Whether some op may need the host to know the sizes of groups of rows."""
        return any(node.grouping is not None for node in self.graph.nodes)

    @cached_property
    def first_trained(self) -> int:
        """The first op that the backward pass reaches; their number if it reaches none."""
        return min((node.op for node in self.graph.nodes if node.needs), default=len(self.ops))

    @cached_property
    def delays(self) -> bool:
        """Whether scales of gradients come from earlier steps."""
        by_place: list[Mapping[Any, Cast]] = [self.casts, *self.own_casts.values()]
        for casts in by_place:
            for cast in casts.values():
                if cast.role == GRADIENT and cast.live_states:
                    return True
        return False

    @property
    def fusions(self) -> tuple[str, ...]:
        """Names of what fused, forward first, once for each place."""
        return tuple(outcome.rule for outcome in self.outcomes if outcome.status == FUSED)


def compile_plan(
    ops: Sequence[BasicOperation],
    key: PlanKey,
    rules: RuleSet,
    *,
    presets: Sequence[tuple[int, FusedOperation]] = (),
    name: str = "",
    exports: frozenset[str] = frozenset(),
) -> Plan:
    """The plan of ``ops`` under ``key``: lower, let everyone claim nodes, check, cut into segments.

    presets: FusedOperations that the user put into the pipeline, each with the position of its first op. name: of the pipeline,
    for explanations. exports: channels that later pipelines read.
    """
    graph = lower(ops, key.env, key.inputs, exports, moves=not (presets or rules.functions))
    claims = Claims(graph, key.env)
    claims.claim_presets(presets)
    claims.claim_functions(rules, ops)
    opaque = any(claims.groups.values())
    for direction in PASSES:
        claims.claim_rules(rules.of(direction), direction)
    forward, backward = claims.complete(FORWARD), claims.complete(BACKWARD)
    verify(graph, forward, FORWARD)
    verify(graph, backward, BACKWARD)
    labels = tuple([op.label for op in ops])
    casts, own = live_casts(graph, ops, key.env, labels)
    rematerialized = rematerialized_operands(graph, ops, key.env, casts, (*forward, *backward))
    segments = partition(graph, forward, backward, rematerialized)
    outcomes, recipe = tuple(claims.outcomes), key.env.recipe
    if recipe is not None and recipe.backward_override is not None:
        outcomes = _outcomes_without_override(claims, ops, key, rules, exports=exports, recipe=recipe)
    return Plan(key, graph, segments, outcomes, opaque, casts, own, name, labels, rematerialized)


def _outcomes_without_override(
    claims: Claims, ops: Sequence[BasicOperation], key: PlanKey, rules: RuleSet, *, exports: frozenset[str], recipe: Recipe
) -> tuple[Outcome, ...]:
    """All outcomes, in which a rule that would run without the backward override says so, and not that ops are missing.

    An override leaves casts out, so what a pattern wants may be there without it alone. That is found by lowering the ops again.
    """
    outcomes = tuple(claims.outcomes)
    absent = {outcome.rule for outcome in outcomes if outcome.status == ABSENT_STATUS}
    asked = [rule for rule in rules.rules if rule.name in absent and refused_everywhere(rule, claims.graph, key.env, ())]
    if not asked:
        return outcomes
    try:
        env = key.env._replace(recipe=recipe.replace(backward_override=None))
        free = Claims(lower(ops, env, key.inputs, exports), env)
    except OpfuseError:  # the recipe's other fields, or a product of the backward pass, ask for the override
        return outcomes
    for direction in PASSES:
        free.claim_rules(rules.of(direction), direction)
    found = {rule.name: _outcome_of_override(rule, claims, free) for rule in asked}
    return tuple((found.get(outcome.rule) or outcome) if outcome.status == ABSENT_STATUS else outcome for outcome in outcomes)


def _outcome_of_override(rule: Fusion, claims: Claims, free: Claims) -> Outcome | None:
    """What to tell of a rule that the override keeps from where it runs in ``free``; None if it runs nowhere there."""
    group = next((group for side in PASSES[rule.direction] for group in free.groups[side] if group.rule is rule), None)
    if group is None:
        return None
    concerned = {free.graph.nodes[i].op for i in group.nodes if not free.graph.nodes[i].is_cast}
    names = tuple(node.name for node in claims.graph.nodes if node.op in concerned and not node.is_cast)
    return refused_everywhere(rule, claims.graph, claims.env, names)


def live_casts(
    graph: Graph, ops: Sequence[BasicOperation], env: Env, labels: Sequence[str]
) -> tuple[dict[int, Cast], dict[int, dict[str, Cast]]]:
    """What each quantize node runs, and what the methods of ops that cast by themselves do, by role. labels: of the ops."""
    around = group = current_amax_group()
    casts, own = {}, {}
    for node in graph.nodes:
        if not RANK_ALONE.isdisjoint(node.traits):
            group = THIS_RANK if DISPATCHES in node.traits else around
        if node.is_cast:
            casts[node.index] = _live_cast(node.spec, ops[node.op], env, group, labels[node.op])
        if node.casts:
            op, label = ops[node.op], labels[node.op]
            own[node.index] = {spec.role: _live_cast(spec, op, env, group, label) for spec in node.casts}
    return casts, own


RANK_ALONE = frozenset((DISPATCHES, RETURNS))
"""Traits of ops between which amaxes are nobody else's."""


def _live_cast(spec: CastSpec, op: BasicOperation, env: Env, group: Any, label: str) -> Cast:
    where = f"{label} {spec.role}"
    quantizer = spec.quantizer.on_one_rank() if group is THIS_RANK else spec.quantizer
    if not spec.groups:
        return Cast(spec.role, quantizer, op, env, where, spec.state, group)
    grouping = op.grouping(())
    padded = spec.role not in op.parameter_names and grouping is not None and grouping.padded
    states = tuple(spec.state or ())
    grouped = {"groups": spec.groups, "states": states, "padded": padded, "ragged": spec.ragged}
    return GroupedCast(spec.role, quantizer, op, env, where, group=group, **grouped)


def verify(graph: Graph, groups: Sequence[Group], side: str) -> None:
    """FusionError unless ``groups`` run every node of ``side`` exactly once, each in order."""
    wanted = [node.index for node in graph.nodes if side in node.directions]
    each: list[int] = []
    ordered = True
    for group in groups:
        each += group.nodes
        ordered = ordered and [*group.nodes] == sorted(group.nodes)
    got = sorted(each)
    if got != wanted or not ordered:
        cure = "a fusion must keep the basic ops it takes, in order"
        raise FusionError(describe(f"{side} plan", wanted=f"nodes {wanted}, each once and in order", got=got, cure=cure))


# -- segments ------------------------------------------------------------------------------------------------------------


def partition(
    graph: Graph, forward: Sequence[Group], backward: Sequence[Group], rematerialized: Rematerialized
) -> tuple[Segment, ...]:
    """The smallest stretches that no group, no quantized value and no state from which an operand is made anew crosses."""
    reach = list(range(len(graph.nodes)))
    for group in (*forward, *backward):
        reach[group.nodes[0]] = max(reach[group.nodes[0]], group.nodes[-1])
    for node in graph.nodes:
        if node.is_cast:
            first, last = _quantized_span(graph, node.index)
            reach[first] = max(reach[first], last)
    for operands in rematerialized.values():
        for operand in operands:
            first = min(operand.source, *operand.chain[:1], operand.reader)
            reach[first] = max(reach[first], operand.reader)
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
    stops = [*starts[1:], len(reach)]
    return tuple([_segment(graph, range(start, stop), *sides) for start, stop, sides in zip(starts, stops, bins)])


def _quantized_span(graph: Graph, index: int) -> tuple[int, int]:
    """From a cast to the last reader of what it made, or of a copy of it."""
    node = graph.nodes[index]
    if node.directions == {BACKWARD}:
        first = graph.producer.get(node.outputs[0], index)
        if graph.nodes[first].transfer is not None:  # which hands the quantized gradient on
            first = graph.producer.get(graph.nodes[first].inputs[0], first)
        return first, index
    last, made = index, list(node.outputs)
    for value in made:
        for reader in graph.consumers.get(value, ()):
            last = max(last, reader)
            if TRANSPARENT in graph.nodes[reader].traits or graph.nodes[reader].transfer is not None:
                made.append(graph.nodes[reader].outputs[0])
    return index, last


def _segment(graph: Graph, nodes: range, forward: Sequence[Group], backward: Sequence[Group]) -> Segment:
    members = [graph.nodes[i] for i in nodes]
    produced: set[int] = set()
    outputs: list[int] = []
    readers: Counter[int] = Counter()
    trains, only_views, ops = False, True, dict[int, None]()
    for group in (*forward, *backward):
        only_views = only_views and not group.claimed
    for node in members:
        ops[node.op] = None
        trains = trains or bool(node.needs)
        only_views = only_views and VIEW in node.traits
        if (
            not node.is_cast
        ):  # only inputs of channels have several readers: what is cast, forwards or backwards, is read by one op
            readers.update(node.inputs)
        for value in node.outputs:
            if graph.producer[value] in nodes and value not in produced:
                produced.add(value)
                if value in graph.outputs or not set(graph.consumers.get(value, ())).issubset(nodes):
                    outputs.append(value)
    inputs = _inputs(members, produced)
    trains = trains or not graph.grads.isdisjoint(outputs)
    return Segment(
        nodes,
        inputs=inputs,
        outputs=tuple(sorted(outputs)),
        forward=tuple(forward),
        backward=tuple(reversed(backward)),
        ops=tuple(ops),
        requires_grad=trains and not only_views,
        again=tuple([value for value in inputs if value in graph.grads for _ in range(readers[value] - 1)]),
        constant=frozenset(outputs) - graph.grads,
    )


def _inputs(members: Sequence[Node], produced: Collection[int]) -> tuple[int, ...]:
    """The values that nodes read and do not produce.

    A view that an autograd node overwrites must be the node's first input. Of the others those that are read last come first: so
    autograd sums gradients of one tensor in the order in which it gets them from ops that are nodes of their own.
    """
    written = {value for node in members if getattr(node.spec, "in_place", False) for value in node.inputs[1:]}
    places = {value: (-node.index, i) for node in members for i, value in enumerate(node.inputs) if value not in produced}
    return tuple(sorted(places, key=lambda value: (value not in written, places[value])))
