"""Operands of products that the backward pass makes anew, as a recipe's ``keep`` says: from what, and by which cast.

An operand is rematerialized if it is a cast of a parameter, of an input that the op before the pipeline saves in any case, as
attention saves its result, or of a result that follows from saved state: that of a norm or of an elementwise op that saved its
input, of elementwise ops after it, and of an op that gives rows of its input to experts. All code that this takes must be the
library's own and deterministic; any other operand is saved.

By default these are the operands that take little time to make. Casts of parameters would be as many bytes as the model has
parameters, and to cast the weight again took at most 2 % of a step of 4096 tokens of Llama layers on an H200. A norm's kernel
that writes one plane is nearly as fast as a copy, and one that writes two is not, so each pass writes its own in about the time
of both. Rows for experts are each token once for each of its experts, from an input that a router keeps as well.

Whatever ``keep`` says, a plane that a collective left where it was cast travels when the backward pass reads it.

The result is a table of the plan. The interpreter makes these casts for the forward product alone, saves the parameter or the
input itself, which autograd watches, and the scale or the amax of the call; it fills the product's context before its backward
group runs. Ops, rules and programs know nothing of it, so a rule fires as it does without. The ops from whose state an operand
is computed belong to the segment that reads it, fused or not, so both have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from opfuse.compiler.cover import Group
from opfuse.compiler.graph import GEMM, Graph, Node
from opfuse.core.cast import Cast
from opfuse.core.context import Context
from opfuse.core.operation import BasicOperation
from opfuse.core.signature import Env
from opfuse.formats import COLUMNWISE, IDENTITY, ROWWISE, Usage
from opfuse.recipes.recipe import OVERRIDES
from opfuse.tensors.quantizers import HybridQuantizer, Quantizer
from opfuse.tensors.quantizers.base import is_library_code, is_repeatable

_CHEAP = frozenset(("norm", "routes"))
"""Traits of ops whose results are made anew by default."""

_FOLLOWED = _CHEAP | {"elementwise"}
"""Traits of ops whose results may follow from their saved state."""


@dataclass(frozen=True, eq=False)
class RematerializedOperand:
    """An operand that is not saved.

    reader: node of the product. role: of the operand, which would be saved as ``name``. source: node of the cast. forward: the
    cast of that node for the forward product alone. anew: the cast that the backward pass runs; None: it reads the values in high
    precision. chain: nodes of the ops that make the values again, from the saved state of the first on; none for a parameter.
    given: whether it is the pipeline's input, which is saved. same: whether both casts are of the same values on this rank, so
    that they have one amax; not of values that follow from an input in FP8, nor of rows that come from other ranks.
    """

    reader: int
    role: str
    name: str
    source: int
    forward: Cast
    anew: Cast | None
    chain: tuple[int, ...] = ()
    given: bool = False
    same: bool = False


class Rematerialized(dict[int, tuple[RematerializedOperand, ...]]):
    """Operands that are made anew, by the node of the product that reads them.

    cast_once: by node, their casts for the forward product alone. measured_once: those of these nodes whose amax holds in the
    backward pass, too. remade: nodes of ops whose results the backward pass makes anew.
    """

    def __init__(self, by_reader: Mapping[int, tuple[RematerializedOperand, ...]] = MappingProxyType({})) -> None:
        super().__init__(by_reader)
        operands = [operand for each in by_reader.values() for operand in each]
        self.cast_once = {operand.source: operand.forward for operand in operands}
        self.measured_once = frozenset([operand.source for operand in operands if operand.same])
        self.remade = frozenset([i for operand in operands for i in operand.chain])


def rematerialized_operands(
    graph: Graph, ops: Sequence[BasicOperation], env: Env, casts: Mapping[int, Cast], groups: Sequence[Group]
) -> Rematerialized:
    """What the backward pass makes anew. groups: of both passes."""
    if not env.grad or (env.keep == "all" and not graph.collective_casts):
        return Rematerialized()
    foreign = {i for group in groups if not _saves_like_its_ops(group) for i in group.nodes}
    by_reader = {}
    for node in graph.nodes:
        if GEMM in node.traits and not node.is_cast and node.index not in foreign:
            candidates = [*_postponed(graph, ops, casts, node)] if graph.collective_casts else []
            candidates += _of_reader(graph, ops, env, casts, node) if env.keep != "all" else ()
            by_reader[node.index] = tuple(
                [operand for operand in candidates if foreign.isdisjoint((operand.source, *operand.chain))]
            )
    return Rematerialized({reader: operands for reader, operands in by_reader.items() if operands})


def _saves_like_its_ops(group: Group) -> bool:
    """Whether a group saves and reads the same state as its ops would one by one."""
    rule = group.rule
    if rule is None:
        return group.opaque is None
    sides = [function for function in (rule.forward, rule.backward) if function is not None]
    return len(sides) == 1 and is_library_code(sides[0])


def _postponed(
    graph: Graph, ops: Sequence[BasicOperation], casts: Mapping[int, Cast], reader: Node
) -> Iterator[RematerializedOperand]:
    """The input of a product, if a collective before it sends a plane in the backward pass only."""
    collective = graph.nodes[graph.producer[reader.inputs[0]]] if reader.inputs[0] in graph.producer else None
    if collective is not None and collective.transfer is not None and collective.transfer.later:
        source, name = graph.producer[collective.inputs[0]], ops[reader.op].rematerialized_as["input"]
        anew = replace(casts[source], quantizer=_only(casts[source].quantizer, COLUMNWISE))
        yield RematerializedOperand(reader.index, "input", name, source, casts[source], anew, (collective.index,))


def _of_reader(
    graph: Graph, ops: Sequence[BasicOperation], env: Env, casts: Mapping[int, Cast], reader: Node
) -> Iterator[RematerializedOperand]:
    values = {"input": reader.inputs[0], **dict(reader.operands)}
    for role, name in ops[reader.op].rematerialized_as.items():
        value = values.get(role)
        source = graph.nodes[graph.producer[value]] if value is not None and value in graph.producer else None
        if source is None or not source.is_cast or graph.consumers[source.outputs[0]] != (reader.index,):
            continue
        if env.keep is None and source.side and getattr(ops[source.op].owner, "copied", False):
            continue  # of a copy that is made for the call, the cast is the smaller one to keep
        readers = ops[reader.op].rematerialized_as.keys() - {"input"} if role == "input" else {"input"}  # whose gradients read it
        cast, saved = casts[source.index], OVERRIDES[env.backward_override].saved
        if readers.isdisjoint(reader.needs) or source.outputs[0] in graph.outputs:
            continue
        if not is_repeatable(cast.quantizer):
            continue
        given = env.input_saved and source.inputs == (0,) and not source.spec.groups and saved != "original"
        followed = _CHEAP if env.keep is None else _FOLLOWED
        chain = () if source.side or given else _chain(graph, ops, env, source.inputs[0], followed)
        if chain is None:
            continue
        is_plain = cast.quantizer.formats[1].family == IDENTITY.family
        if source.side and (saved == "original" or (saved == "columnwise" and is_plain)):
            continue  # the parameter itself would be saved, so that there is nothing to gain
        forward = replace(cast, quantizer=_only(cast.quantizer, ROWWISE), whole=cast.quantizer)
        usage: Usage = ROWWISE if saved == "rowwise" else COLUMNWISE
        anew = None if saved == "original" else replace(cast, quantizer=_only(cast.quantizer, usage))
        exact = env.keep != "quantized" or not chain or "routes" in graph.nodes[chain[0]].traits
        same = exact and anew is not None
        yield RematerializedOperand(reader.index, role, name, source.index, forward, anew, chain, given, same)


def _only(quantizer: Quantizer, usage: Usage) -> Quantizer:
    """``quantizer`` for one direction alone; the sub-quantizer of a hybrid."""
    if isinstance(quantizer, HybridQuantizer):
        if usage == ROWWISE:
            return quantizer.rowwise_quantizer
        if quantizer.columnwise_source == "original":
            return quantizer.columnwise_quantizer
    return quantizer.wanting(rowwise=usage == ROWWISE, columnwise=usage == COLUMNWISE)


def _chain(graph: Graph, ops: Sequence[BasicOperation], env: Env, value: int, followed: frozenset[str]) -> tuple[int, ...] | None:
    """The ops from whose saved state ``value`` follows, in order; None if it does not. followed: traits that they may have."""
    chain: list[int] = []
    while value in graph.producer:
        node = graph.nodes[graph.producer[value]]
        op = ops[node.op]
        if node.is_cast or value != node.outputs[0] or followed.isdisjoint(node.traits):
            return None
        follows = op.remakes(Context(op, env, node.needs))
        if not follows:
            return None
        chain.insert(0, node.index)
        if follows == "saved":
            return tuple(chain)
        value = node.inputs[0]
    return None
