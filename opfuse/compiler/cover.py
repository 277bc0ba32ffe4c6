"""Who runs which nodes: the user's fused ops first, then fusion functions, then rules; what nobody claims runs alone.

Rules match the chain of nodes, and every rule has an outcome, with a reason, at every place that it nearly matched.

Rules that cannot fire differ from rules that may not. *Absent* is a pattern that matched nowhere, told with the place where it
got furthest; *missed* is a match that a guard refused; *shadowed* is a match whose nodes another rule took.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any, NamedTuple
from weakref import WeakSet

from opfuse.compiler.graph import BACKWARD, FORWARD, Graph, Node
from opfuse.compiler.registry import FusionFunction, RuleSet
from opfuse.compiler.rules import ABSENT, JOINT, PASSES, Fusion, Guard, Term, at_least, is_
from opfuse.compiler.vocabulary import DERIVED
from opfuse.core.fused import FusedOperation
from opfuse.core.operation import BasicOperation, FusibleOperation
from opfuse.core.signature import Env
from opfuse.errors import FusionError, OpfuseWarning, describe
from opfuse.keys import key_fields

FUSED, SHADOWED, MISSED, ABSENT_STATUS = "fused", "shadowed", "missed", "absent"

Binding = tuple[tuple[int, ...], ...]
"""Node indices at each place of a pattern."""


@dataclass(frozen=True)
class Outcome:
    """What became of one rule at one place.

    status: fused, shadowed (``by`` names the rule that took the nodes), missed (a guard ``asks`` for something else), or absent
    (a place of the pattern does). ops: names of the nodes concerned.
    """

    rule: str
    direction: str
    status: str
    ops: tuple[str, ...] = ()
    by: str | None = None
    asks: Guard | Term | None = None
    got: str | None = None

    @property
    def guard(self) -> str | None:
        """What the guard reads, or which place of the pattern it is."""
        if isinstance(self.asks, Term):
            return f"pattern.{self.asks.name}"
        return None if self.asks is None else self.asks.reads

    @property
    def wanted(self) -> str | None:
        """What that wants, in words."""
        if isinstance(self.asks, Guard):
            return self.asks.wanted_text
        return None if self.asks is None else str(self.asks)

    @property
    def reason(self) -> str:
        """Which rule took the ops, or what the guard or the pattern wanted; empty where it fused, or where nothing is near."""
        return f"by {self.by}" if self.by else f"{self.guard}: wants {self.wanted}, got {self.got}" if self.guard else ""

    def __str__(self) -> str:
        return f"{self.direction:<9} {self.rule:<28} {self.status:<9} {' '.join(self.ops):<40} {self.reason}".rstrip()


@dataclass(frozen=True)
class Group:
    """Nodes that one implementation runs. rule: None for a node that runs alone. opaque: a fused op, which stands for ``ops``."""

    nodes: tuple[int, ...]
    rule: Fusion | None = None
    binding: Binding = ()
    opaque: Any = None
    ops: range = range(0)

    @property
    def claimed(self) -> bool:
        """Whether a rule or a fused op runs it."""
        return self.rule is not None or self.opaque is not None

    @property
    def name(self) -> str:
        """The rule's name, or the fused op's class."""
        return self.rule.name if self.rule is not None else type(self.opaque).__name__


class PartialMatch(NamedTuple):
    """How far a pattern got where it did not match.

    depth, term: the place at which it stopped. node: the node there, None at the end of the run. at: the nodes matched before.
    """

    depth: int
    node: Node | None
    term: Term
    at: tuple[int, ...]


class Fits:
    """How the pattern of a rule fits nodes in a row, of which it may take none that is ``claimed``.

    Each place takes as many nodes as it can, and gives some back if a later place needs them. So it is found from the last place
    to the first, and for each node: up to where the place could take nodes, and where it stops, which is the last node before
    there from which all later places fit; -1 if they fit from none.
    """

    def __init__(self, rule: Fusion, nodes: Sequence[Node], claimed: Collection[int] = ()) -> None:
        self._pattern, self._least = rule.pattern, 1 if rule.single else 2
        self._nodes, self.indices = nodes, tuple([node.index for node in nodes])
        # Forwards an implementation returns the main output, and may leave extra ones.
        takes_all = rule.direction == BACKWARD or rule.extra_outputs
        self._free = [node.index not in claimed and (takes_all or len(node.outputs) < 2) for node in nodes]
        self._ends: list[list[int]] = []
        self._stops: list[list[int]] = []
        fitting = [*range(len(nodes) + 1)]  # for each position the last one up to it from which the later places fit
        for term in reversed(self._pattern):
            ends, stops, following, last = [len(nodes)], list[int](), list[int](), -1
            for i in reversed(range(len(nodes))):
                ends.append(ends[-1] if self._free[i] and term.accepts(nodes[i]) else i)
            ends.reverse()
            for i, run_end in enumerate(ends):
                ends[i] = end = run_end if term.high is None else min(run_end, i + term.high)
                stops.append(fitting[end] if fitting[end] >= i + term.low else -1)
                last = i if stops[i] >= 0 else last
                following.append(last)
            fitting = following
            self._ends.insert(0, ends)
            self._stops.insert(0, stops)

    def binding(self, start: int) -> Binding | None:
        """The nodes at each place of a match that begins at position ``start``; None if there is none."""
        at, places = start, []
        for stops in self._stops:
            if stops[at] < 0:
                return None
            places.append(self.indices[at : stops[at]])
            at = stops[at]
        return tuple(places) if at - start >= self._least else None

    def nearest(self) -> PartialMatch | None:
        """Of nodes of which no match begins at any, the partial match that reaches the latest place, the first one of several.

        None if no node could be at the first place.
        """
        needed, starts, alone = self._pattern[0].low, list[int](), len(self._nodes)
        for i in reversed(range(len(self._nodes))):
            if not needed or self._ends[0][i] > i:
                starts.insert(0, i)
                alone = i if self._stops[0][i] >= 0 else alone
        place, stuck = self._stuck(starts)
        start = min(stuck)[0] if place > 0 else len(self._nodes)
        if place < 2 and alone < start:  # it fits, but takes too few nodes
            return PartialMatch(1, None, self._pattern[-1], self.indices[alone : alone + 1])
        if place < 1:
            return None
        _, end, at = max(self._stuck([start])[1])
        node = self._nodes[end] if end < len(self._nodes) and self._free[end] else None
        return PartialMatch(place, node, self._pattern[place], self.indices[start:at])

    def _stuck(self, starts: Sequence[int]) -> tuple[int, list[tuple[int, int, int]]]:
        """The latest place that lacks nodes in some way to bind the places before it, and all such ways: the start, the first of
        several; where its nodes end; where they begin. -1 if no place ever does.
        """
        place, found = -1, list[tuple[int, int, int]]()
        reached = dict(zip(starts, starts))  # by position, the first start from which the places before can stop there
        for i, (term, ends) in enumerate(zip(self._pattern, self._ends)):
            if stuck := [(start, ends[at], at) for at, start in reached.items() if ends[at] < at + term.low]:
                place, found = i, stuck
            ways, reached, last = reached, {}, -1
            for at, start in ways.items():  # in order, so that a later one adds only positions behind those of earlier ones
                reached.update(dict.fromkeys(range(max(at + term.low, last + 1), ends[at] + 1), start))
                last = max(last, ends[at])
        return place, found


def linked_nodes(graph: Graph, direction: str) -> list[list[Node]]:
    """The nodes of the main chain in one direction, cut where no fused kernel may hide the value between two of them."""
    chains: list[list[Node]] = []
    for node in graph.nodes:
        if node.side or not (direction == JOINT or direction in node.directions):
            continue
        if chains and graph.linked(chains[-1][-1], node, direction):
            chains[-1].append(node)
        else:
            chains.append([node])
    return chains


def read(path: str, graph: Graph, env: Env, names: Mapping[str, tuple[int, ...]]) -> list[Any]:
    """The values a guard's path stands for: one for ``env``, one for each node bound to a name."""
    root, *rest = path.split(".")
    values: list[Any] = [env] if root == "env" else [graph.nodes[i] for i in names[root]]
    for step in rest:
        values = [_parts(value).get(step, ABSENT) for value in values]
    return values


def _parts(value: Any) -> Mapping[str, Any]:
    """What a guard may read of ``value``: what is in the key or follows from it, so that no plan outlives an answer."""
    parts = dict(key_fields(value) or {})
    if isinstance(value, Node):
        return {**parts, **(key_fields(value.spec) or {}), **dict(value.params)}
    for cls, names in DERIVED.items():
        if isinstance(value, cls):
            parts.update(zip(names, map(partial(getattr, value), names)))
    return parts


_LEVEL_GUARDS: Mapping[int, tuple[Guard, ...]] = {0: (at_least("env.level", 1),), 1: (is_("env.rounding", "per_op"),)}
"""What a level asks of every rule before the rule's own guards."""


def cover(
    graph: Graph, env: Env, rules: Sequence[Fusion], direction: str, taken: Mapping[int, str]
) -> tuple[list[Group], list[Outcome]]:
    """Groups of the rules of one direction, and their outcomes.

    Rules claim in order, each over the whole chain from left to right; ``taken`` maps nodes that are claimed already to the
    claimant's name.
    """
    chains = linked_nodes(graph, direction)
    claimed = dict(taken)
    groups: list[Group] = []
    outcomes: list[Outcome] = []
    for rule in rules:
        found: list[Outcome] = []
        partial_matches: list[PartialMatch] = []
        for nodes in chains:
            free = Fits(rule, nodes)
            left = free if claimed.keys().isdisjoint(free.indices) else Fits(rule, nodes, claimed)
            start = 0
            while start < len(nodes):
                binding = left.binding(start) or free.binding(start)
                if binding is None:
                    start += 1
                    continue
                bound = tuple(chain.from_iterable(binding))
                ops = tuple([graph.nodes[i].name for i in bound])
                owners = [*map(claimed.get, bound)]
                if any(owners):  # what a match lost is worth an outcome of its own
                    outcome = Outcome(rule.name, rule.direction, SHADOWED, ops, by=next(filter(None, owners)))
                else:
                    outcome = _judged(rule, graph, env, binding, ops)
                if outcome.status == FUSED:
                    groups.append(Group(bound, rule, binding))
                    claimed.update(dict.fromkeys(bound, rule.name))
                found.append(outcome)
                start += _advance(outcome, owners)
            if not found and (partial_match := free.nearest()) is not None:
                partial_matches.append(partial_match)
        outcomes += found or [_absence(rule, graph, max(partial_matches, key=itemgetter(0), default=None))]
    return groups, outcomes


def _judged(rule: Fusion, graph: Graph, env: Env, binding: Binding, ops: tuple[str, ...]) -> Outcome:
    """The outcome of a match at ``ops``: fused, unless a guard refuses it."""
    names = {term.name: place for term, place in zip(rule.pattern, binding)}
    for guard in _LEVEL_GUARDS.get(env.level, ()) + rule.when:
        for got in read(guard.reads, graph, env, names):
            if not guard.ok(got):
                return _missed(rule, ops, guard, got)
    return Outcome(rule.name, rule.direction, FUSED, ops)


def _missed(rule: Fusion, ops: tuple[str, ...], guard: Guard, got: Any) -> Outcome:
    return Outcome(rule.name, rule.direction, MISSED, ops, asks=guard, got=repr(got))


def refused_everywhere(rule: Fusion, graph: Graph, env: Env, ops: tuple[str, ...]) -> Outcome | None:
    """The outcome of a rule at ``ops`` that a guard on the environment refuses whatever the nodes are; None: none does."""
    for guard in rule.when:
        for got in read(guard.reads, graph, env, {}) if guard.reads.startswith("env.") else ():
            if not guard.ok(got):
                return _missed(rule, ops, guard, got)
    return None


def _advance(outcome: Outcome, owners: Sequence[str | None]) -> int:
    """How many nodes to go on by. What lies within a fused place, or a place missed for its environment, is settled with it.

    owners: of the nodes that were matched, who had claimed each.
    """
    if outcome.status == FUSED or (isinstance(outcome.asks, Guard) and outcome.asks.reads.startswith("env.")):
        return len(owners)
    if outcome.status == SHADOWED and owners[0] == outcome.by:  # all that it took here in a row
        return next((i for i, owner in enumerate(owners) if owner != outcome.by), len(owners))
    return 1


def _absence(rule: Fusion, graph: Graph, nearest: PartialMatch | None) -> Outcome:
    if nearest is None or not nearest.at:
        return Outcome(rule.name, rule.direction, ABSENT_STATUS)
    ops = tuple([graph.nodes[i].name for i in nearest.at])
    got = nearest.node.kind if nearest.node is not None else "the end of the run"
    return Outcome(rule.name, rule.direction, ABSENT_STATUS, ops, asks=nearest.term, got=got)


# -- claims ------------------------------------------------------------------------------------------------------------------


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
            for function in rules.functions if self.env.level else ():
                if function.direction != direction:
                    continue
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
        groups = [*self.groups[side]]
        for node in self.graph.nodes:
            if side in node.directions and node.index not in self.owners[side]:
                groups.append(Group((node.index,)))
        return tuple(sorted(groups, key=lambda group: group.nodes[-1]))

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
            nodes = tuple([i for i in group.nodes if side in self.graph.nodes[i].directions])
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
        wanted = "a list of ops that stand for the same basic ops in the same order"
        got = [op.label for op in result] if is_list else repr(result)
        cure = "replace runs of ops by FusedOperations of exactly these ops"
        raise FusionError(describe(f"fusion function {function.name!r}", wanted=wanted, got=got, cure=cure))
    starts = accumulate((len(op.basic_ops) for op in result), initial=0)
    return [(start, op) for start, op in zip(starts, result) if isinstance(op, FusedOperation)]
