"""Who runs which nodes: the user's fused ops first, then fusion functions, then rules; what nobody claims runs alone.

Rules match the chain of nodes, and every rule has an outcome, with a reason, at every place that it nearly matched.

Rules that cannot fire differ from rules that may not. *Absent* is a pattern that matched nowhere, told with the place where it
got furthest; *missed* is a match that a guard refused; *shadowed* is a match whose nodes another rule took.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from typing import Any
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

    status: fused, shadowed (``by`` names the rule that took the nodes), missed (``guard`` wanted something else), or absent.
    ops: names of the nodes concerned.
    """

    rule: str
    direction: str
    status: str
    ops: tuple[str, ...] = ()
    by: str | None = None
    guard: str | None = None
    wanted: str | None = None
    got: str | None = None

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


@dataclass(frozen=True)
class PartialMatch:
    """How far a pattern got where it did not match.

    depth, term: the place at which it stopped. node: the node there, None at the end of the run. at: the nodes matched before.
    bounded: whether more unclaimed nodes could have changed the result.
    """

    depth: int
    node: Node | None
    term: Term
    at: tuple[int, ...]
    bounded: bool


class MainChain:
    """The main chain of a graph in one direction, with links only where a fused kernel may hide the value in between."""

    def __init__(self, graph: Graph, direction: str) -> None:
        self.direction = direction
        self.nodes = graph.view(direction if direction != JOINT else FORWARD)
        if direction == JOINT:
            self.nodes = tuple(node for node in graph.nodes if not node.side)
        self.next: list[Node | None] = [None] * len(self.nodes)
        for i, (node, follower) in enumerate(zip(self.nodes, self.nodes[1:])):
            if graph.linked(node, follower, self.direction):
                self.next[i] = follower

    def takes(self, node: Node, rule: Fusion) -> bool:
        """Whether ``rule`` can run ``node``: a forward implementation returns the main output, and may leave extra ones."""
        return self.direction == BACKWARD or len(node.outputs) == 1 or rule.extra_outputs


class Tries:
    """Tries to bind a rule's pattern to nodes in a row, each from one start on, in order from left to right.

    Each place takes as many nodes as it can, and gives some back if a later place needs them. What one try has found lets later
    ones look at each node a few times, however many tries there are. limits: for each node where a match that begins there has
    to end.

    _dead: pairs of place and position from which no match exists, up to the limit of the last try. One that begins later has
    fewer nodes, and cannot match where an earlier one could not. _lost: the same of a place without an upper bound, as a range up
    to where its nodes end: from any position in it the place could stop where it could from the first.
    """

    def __init__(self, rule: Fusion, nodes: Sequence[Node], limits: Sequence[int]) -> None:
        self.pattern = rule.pattern
        self._least = 1 if rule.single else 2
        self._nodes = nodes
        self._limits = limits
        self._ends: dict[int, list[int]] = {}
        self._limit, self._dead, self._lost = -1, set[tuple[int, int]](), dict[int, tuple[int, int]]()

    def bind(self, start: int) -> tuple[range, ...] | None:
        """The positions at each place of a match that begins at ``start``; None if there is none, and then how far it got."""
        if self._limits[start] != self._limit:  # what was found of other nodes' ends says nothing of these
            self._limit = self._limits[start]
            self._dead, self._lost = set(), {}
        self._start = start
        self.furthest, self.bounded = (-1, 0, 0), False
        return self._bind(0, start)

    def node(self, at: int) -> Node | None:
        """The node at a position, if a match may go so far."""
        if at < self._limit:
            return self._nodes[at]
        self.bounded = True
        return None

    def indices(self, positions: range) -> tuple[int, ...]:
        """The indices of the nodes at these positions, as far as a match may go."""
        return tuple(node.index for node in self._nodes[positions.start : min(positions.stop, self._limit)])

    def _end(self, place: int, at: int) -> int:
        """Where the nodes end that the place can take from ``at`` on."""
        if place not in self._ends:
            term, ends = self.pattern[place], [len(self._nodes)]
            for i, node in zip(range(len(self._nodes) - 1, -1, -1), reversed(self._nodes)):
                ends.append(ends[-1] if term.accepts(node) else i)
            self._ends[place] = ends[::-1]
        most = self.pattern[place].high
        end = min(self._ends[place][at], self._limit)
        if most is not None and end >= at + most:
            return at + most
        self.bounded |= end == self._limit
        return end

    def _bind(self, place: int, at: int) -> tuple[range, ...] | None:
        """The positions at each place from ``place`` on, when those before it took all up to ``at``; None if there is no way."""
        if place == len(self.pattern):
            return () if at - self._start >= self._least else None
        if (place, at) in self._dead:
            self._give_up()
            return None
        term, end = self.pattern[place], self._end(place, at)
        first, to = self._lost.get(place, (0, -1)) if term.high is None else (0, -1)
        lost = first if to == end else end + 1  # from here on
        if lost <= at:
            self._give_up()
            return None
        if end - at < term.low:
            self.furthest = max(self.furthest, (place, end - self._start, at - self._start))
        last = min(end, lost + term.low - 1)
        if last < end and place + 1 < len(self.pattern):
            self._give_up()
        for stop in range(last, at + term.low - 1, -1):
            if (rest := self._bind(place + 1, stop)) is not None:
                return range(at, stop), *rest
        if term.high is None:
            self._lost[place] = at, end
        else:
            self._dead.add((place, at))
        return None

    def _give_up(self) -> None:
        """Of what is lost nothing more is known than that it is."""
        self.furthest, self.bounded = max(self.furthest, (0, 0, 0)), True


def bound(rule: Fusion, nodes: Sequence[Node], start: int = 0) -> tuple[range, ...] | None:
    """Which of ``nodes``, counted from ``start``, each place of the rule takes; None if it does not fit there."""
    left = nodes[start:]
    return Tries(rule, left, [len(left)] * max(len(left), 1)).bind(0)


def tries_over(chain: MainChain, rule: Fusion, claimed: Collection[int] = ()) -> Tries:
    """Tries of a rule over a chain, each up to a node that is claimed, or that the rule cannot take or go on from."""
    limits, limit = [0] * len(chain.nodes), len(chain.nodes)
    for i, node in zip(range(len(chain.nodes) - 1, -1, -1), reversed(chain.nodes)):
        if node.index in claimed or not chain.takes(node, rule):
            limit = i
        elif chain.next[i] is None:
            limit = i + 1
        limits[i] = limit
    return Tries(rule, chain.nodes, limits)


def match(tries: Tries, start: int) -> Binding | PartialMatch:
    """The nodes at each place of a match that begins at ``start``; a PartialMatch says where it stopped."""
    found = tries.bind(start)
    if found is not None:
        return tuple(tries.indices(place) for place in found)
    place, end, at = tries.furthest
    if place < 0:  # every place has its nodes, which are too few together
        return PartialMatch(1, None, tries.pattern[-1], tries.indices(range(start, start + 1)), tries.bounded)
    node = tries.node(start + end)
    return PartialMatch(place, node, tries.pattern[place], tries.indices(range(start, start + at)), tries.bounded)


def _flat(binding: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(i for place in binding for i in place)


def read(path: str, graph: Graph, env: Env, names: Mapping[str, tuple[int, ...]]) -> list[Any]:
    """The values a guard's path stands for: one for ``env``, one for each node bound to a name."""
    root, *rest = path.split(".")
    starts: list[Any] = [env] if root == "env" else [graph.nodes[i] for i in names[root]]
    return [_walk(start, rest) for start in starts]


def _parts(value: Any) -> Mapping[str, Any]:
    """What a guard may read of ``value``: what is in the key or follows from it, so that no plan outlives an answer."""
    parts = key_fields(value) or {}
    if isinstance(value, Node):
        return {**parts, **(key_fields(value.spec) or {}), **dict(value.params)}
    derived = (name for cls, names in DERIVED.items() if isinstance(value, cls) for name in names)
    return {**parts, **{name: getattr(value, name) for name in derived}}


def _walk(value: Any, path: Sequence[str]) -> Any:
    for step in path:
        value = _parts(value).get(step, ABSENT)
    return value


_LEVEL_GUARDS: Mapping[int, tuple[Guard, ...]] = {0: (at_least("env.level", 1),), 1: (is_("env.rounding", "per_op"),)}
"""What a level asks of every rule before the rule's own guards."""


def _refusal(rule: Fusion, graph: Graph, env: Env, binding: Binding) -> tuple[Guard, Any] | None:
    names = {term.name: place for term, place in zip(rule.pattern, binding)}
    for guard in _LEVEL_GUARDS.get(env.level, ()) + rule.when:
        for got in read(guard.reads, graph, env, names):
            if not guard.ok(got):
                return guard, got
    return None


def cover(
    graph: Graph, env: Env, rules: Sequence[Fusion], direction: str, taken: Mapping[int, str]
) -> tuple[list[Group], list[Outcome]]:
    """Groups of the rules of one direction, and their outcomes.

    Rules claim in order, each over the whole chain from left to right; ``taken`` maps nodes that are claimed already to the
    claimant's name.
    """
    chain = MainChain(graph, direction)
    claimed = dict(taken)
    groups: list[Group] = []
    outcomes: list[Outcome] = []
    for rule in rules:
        found, seen = _apply(rule, chain, graph, env, claimed)
        groups += found
        outcomes += seen
    return groups, outcomes


def _apply(rule: Fusion, chain: MainChain, graph: Graph, env: Env, claimed: dict[int, str]) -> tuple[list[Group], list[Outcome]]:
    groups: list[Group] = []
    outcomes: list[Outcome] = []
    nearest: PartialMatch | None = None
    start, first = 0, rule.pattern[0]
    tries, unclaimed = tries_over(chain, rule, claimed), None
    while start < len(chain.nodes):
        if first.low and not first.accepts(chain.nodes[start]):  # as at most nodes: nothing that an outcome would tell
            start += 1
            continue
        binding = match(tries, start)
        if not isinstance(binding, PartialMatch):
            outcome = _judged(rule, graph, env, binding)
            if outcome.status == FUSED:
                groups.append(Group(_flat(binding), rule, binding))
                claimed.update(dict.fromkeys(_flat(binding), rule.name))
        else:
            # What a match lost to earlier claims is worth an outcome of its own.
            if binding.bounded:
                unclaimed = unclaimed or tries_over(chain, rule)
                binding = match(unclaimed, start)
            if isinstance(binding, PartialMatch):
                nearest = binding if nearest is None or binding.depth > nearest.depth else nearest
                start += 1
                continue
            outcome = _shadowed(rule, graph, binding, claimed)
        outcomes.append(outcome)
        start += _advance(outcome, _flat(binding), claimed)
    return groups, outcomes or [_absence(rule, graph, nearest)]


def _judged(rule: Fusion, graph: Graph, env: Env, binding: Binding) -> Outcome:
    ops = tuple(graph.nodes[i].name for i in _flat(binding))
    refusal = _refusal(rule, graph, env, binding)
    return Outcome(rule.name, rule.direction, FUSED, ops) if refusal is None else _missed(rule, ops, *refusal)


def _missed(rule: Fusion, ops: tuple[str, ...], guard: Guard, got: Any) -> Outcome:
    return Outcome(rule.name, rule.direction, MISSED, ops, guard=guard.reads, wanted=guard.wanted_text, got=repr(got))


def refused_everywhere(rule: Fusion, graph: Graph, env: Env, ops: tuple[str, ...]) -> Outcome | None:
    """The outcome of a rule at ``ops`` that a guard on the environment refuses whatever the nodes are; None: none does."""
    asked = ((guard, got) for guard in rule.when if guard.reads.startswith("env.") for got in read(guard.reads, graph, env, {}))
    refusal = next(((guard, got) for guard, got in asked if not guard.ok(got)), None)
    return None if refusal is None else _missed(rule, ops, *refusal)


def _shadowed(rule: Fusion, graph: Graph, binding: Binding, claimed: Mapping[int, str]) -> Outcome:
    nodes = _flat(binding)
    owner = next(claimed[i] for i in nodes if i in claimed)
    return Outcome(rule.name, rule.direction, SHADOWED, tuple(graph.nodes[i].name for i in nodes), by=owner)


def _advance(outcome: Outcome, nodes: Sequence[int], claimed: Mapping[int, str]) -> int:
    """How many nodes to go on by. What lies within a fused place, or a place missed for its environment, is settled with it."""
    if outcome.status == FUSED or (outcome.guard or "").startswith("env."):
        return len(nodes)
    if outcome.status == SHADOWED:
        return max(1, sum(1 for _ in takewhile(lambda i: claimed.get(i) == outcome.by, nodes)))
    return 1


def _absence(rule: Fusion, graph: Graph, nearest: PartialMatch | None) -> Outcome:
    if nearest is None or not nearest.at:
        return Outcome(rule.name, rule.direction, ABSENT_STATUS)
    ops = tuple(graph.nodes[i].name for i in nearest.at)
    got = nearest.node.kind if nearest.node is not None else "the end of the run"
    return Outcome(
        rule.name, rule.direction, ABSENT_STATUS, ops, guard=f"pattern.{nearest.term.name}", wanted=str(nearest.term), got=got
    )


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
