"""The lowered pipeline: nodes with explicit quantization, wired by the numbers of the values that they read and write.

Nodes stand in forward order. A node reads values by number and writes new ones; value 0 is the pipeline's input. The *main*
value of a node is its first input and first output; a channel is an edge like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from opfuse.core.protocol import Grouping
from opfuse.core.signature import TensorSig
from opfuse.formats import NumberFormat
from opfuse.tensors.quantizers.base import casts_itself
from opfuse.tensors.row_collectives import PlaneTransfer

if TYPE_CHECKING:
    import networkx as nx

FORWARD = "forward"
BACKWARD = "backward"
BOTH = frozenset((FORWARD, BACKWARD))

QUANTIZE = "quantize"
QUANTIZE_GROUPS = "quantize_groups"
"""Kinds of quantize nodes: for a whole tensor, and for groups of rows apart. Rules that end in a cast mean the first."""

BUILTIN_CAST = "builtin_cast"
"""Trait of a cast of a whole tensor by the library's own code, so that a kernel may do it on its way."""

CAST_WORDS = (QUANTIZE, BUILTIN_CAST)
"""What patterns may call such a cast."""

DISPATCHES, RETURNS = "dispatches", "returns"
"""Traits of ops that send rows to experts on other ranks, and back. Between them a rank has experts of its own."""

GEMM = "gemm"
"""Trait of an op whose roles are the operands of the three products."""

GROUPED = "grouped"
"""Trait of an op whose rows are in groups; its ``grouping`` says how."""

TRANSPARENT = "transparent"
"""Trait of an op that returns its input itself, quantized or not."""

VIEW = "view"
"""Trait of an op that is a view of torch's, which autograd follows by itself, in-place changes included."""


@dataclass(frozen=True)
class CastSpec:
    """What an explicit quantize node does: the operand's role, and the quantizer with the planes that will be read.

    state: the op's delayed-scaling state, or None; for groups, a tuple of states. groups: how many groups of rows are cast apart;
    0: the tensor is cast as one. ragged: the products of the op, if the sizes of its groups may stay on a device.
    """

    role: str
    quantizer: Any
    state: Any = field(default=None, compare=False)
    groups: int = 0
    ragged: Any = None

    @property
    def kind(self) -> str:
        """The kind of its node."""
        return QUANTIZE_GROUPS if self.groups else QUANTIZE


@dataclass(frozen=True)
class ProductFormats:
    """One of the products of an op: its name in GEMMS, and the formats that its operands have in the planes it reads.

    None stands for an operand in high precision, which makes the product one too. sizes: of operands that the op itself cuts and
    casts, as :class:`~opfuse.core.operation.OwnProducts` has them.
    """

    op: int
    name: str
    left: NumberFormat | None
    right: NumberFormat | None
    sizes: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class CollectiveCast:
    """A collective beside the cast of an operand. format: in which rows travel; None: in high precision, and why.

    op: the index of the collective. product, role: the index of the op that reads the operand, and the operand.
    """

    op: int
    product: int
    role: str
    format: NumberFormat | None
    why: str


@dataclass(frozen=True)
class Node:
    """One step of the lowered pipeline.

    kind: what patterns call it. op: index of the basic op it came from. operands: values of side nodes by name. side: it feeds an
    operand, such as a weight, and is not on the main chain. casts: what the op's own methods have cast, by ``ctx.cast``.
    takes_quantized: its methods take quantized values. transfer: for a collective, which planes of a cast travel when.
    directions: the passes in which it does anything. needs: what wants a gradient: "input", parameter names, "extra0" ….
    grouping: how the rows of an op are in groups, or None.
    """

    index: int
    kind: str
    op: int
    spec: Any
    traits: frozenset[str] = frozenset()
    params: tuple[tuple[str, TensorSig | None], ...] = ()
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    operands: tuple[tuple[str, int], ...] = ()
    directions: frozenset[str] = BOTH
    needs: frozenset[str] = frozenset()
    grouping: Grouping | None = None
    side: bool = False
    casts: tuple[CastSpec, ...] = ()
    takes_quantized: bool = False
    transfer: PlaneTransfer | None = None

    @property
    def name(self) -> str:
        """How explanations call the node: ``3:gelu``, ``1:quantize[weight]``."""
        role = f"[{self.spec.role}]" if self.is_cast else ""
        return f"{self.index}:{self.kind}{role}"

    @property
    def is_cast(self) -> bool:
        """Whether it is a quantize node."""
        return isinstance(self.spec, CastSpec)

    @property
    def extra_inputs(self) -> tuple[int, ...]:
        """The values that an op reads beside the main one."""
        return self.inputs[1:]

    @cached_property
    def words(self) -> frozenset[str]:
        """What patterns may call this node: its kind and its traits."""
        is_whole = self.is_cast and not self.spec.groups  # an op may be called as a cast is
        return self.traits | {*(CAST_WORDS if is_whole and casts_itself(self.spec.quantizer) else (self.kind,))}


@dataclass(frozen=True)
class Graph:
    """Lowered nodes and their wiring.

    root: value that a quantized copy is a copy of; their gradients are one. extra_inputs: value number of each extra input the
    caller gives. outputs: value numbers the pipeline returns, main first. products: matrix products of ops with quantized
    operands, and the formats that meet in them. collective_casts: collectives beside casts.
    """

    nodes: tuple[Node, ...]
    extra_inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    grads: frozenset[int]
    producer: dict[int, int] = field(compare=False)
    consumers: dict[int, tuple[int, ...]] = field(compare=False)
    root: dict[int, int] = field(compare=False)
    products: tuple[ProductFormats, ...] = ()
    collective_casts: tuple[CollectiveCast, ...] = ()

    @classmethod
    def of(
        cls,
        nodes: Sequence[Node],
        extra_inputs: Iterable[int],
        outputs: Iterable[int],
        grads: Iterable[int],
        products: Iterable[ProductFormats] = (),
    ) -> Graph:
        """Wire ``nodes`` up. grads: numbers of the values that a gradient flows into."""
        producer = {value: node.index for node in nodes if FORWARD in node.directions for value in node.outputs}
        consumers: dict[int, list[int]] = {}
        for node in nodes:
            for value in (*node.inputs, *dict(node.operands).values()):
                consumers.setdefault(value, []).append(node.index)
        root: dict[int, int] = {}
        for node in nodes:
            if node.is_cast and node.inputs and node.inputs != node.outputs:
                root[node.outputs[0]] = root.get(node.inputs[0], node.inputs[0])
        readers = {value: tuple(indices) for value, indices in consumers.items()}
        values = tuple(extra_inputs), tuple(outputs), frozenset(grads)
        return cls(tuple(nodes), *values, producer, readers, root, tuple(products))

    @cached_property
    def digraph(self) -> nx.MultiDiGraph:
        """Node indices as vertices, one edge per value read, with attribute ``value``."""
        import networkx as nx  # which takes a fifth of a second, and only what shows or studies a graph needs it

        wired = nx.MultiDiGraph()
        wired.add_nodes_from(node.index for node in self.nodes)
        for value, readers in self.consumers.items():
            if value in self.producer:
                wired.add_edges_from((self.producer[value], reader, {"value": value}) for reader in readers)
        return wired

    def gradient_of(self, value: int) -> int:
        """The number under which the gradient of ``value`` is summed."""
        return self.root.get(value, value)

    @cached_property
    def by_op(self) -> dict[int, tuple[Node, ...]]:
        """The nodes of each basic op, in order."""
        ordered = sorted(self.nodes, key=lambda node: node.op)
        return {op: tuple(nodes) for op, nodes in groupby(ordered, key=lambda node: node.op)}

    def view(self, direction: str) -> tuple[Node, ...]:
        """The main-chain nodes that do something in ``direction``, in forward order."""
        return tuple(node for node in self.nodes if direction in node.directions and not node.side)

    def cast_of_experts(self, node: Node) -> CastSpec | None:
        """The cast of what ``node`` sends to experts on other ranks, there and group by group, if a product is next; else None.

        Of rows forward, of gradients backward.
        """
        value, role = (node.outputs[0], "input") if DISPATCHES in node.traits else (node.inputs[0], "grad_output")
        casts = (each for each in self.nodes if each.is_cast and each.inputs[:1] == (value,))
        return next((each.spec for each in casts if each.spec.groups and each.spec.role == role), None)

    def linked(self, node: Node, follower: Node, direction: str) -> bool:
        """Whether ``follower`` alone continues ``node``: the value between them leaves nowhere.

        It has no other reader, since a value that several ops read is an extra output. Forward, extra inputs of ``follower`` must
        be the first extra outputs of ``node``, so that an implementation of both can tell them from the caller's.
        """
        value = node.outputs[0]
        if not follower.inputs or self.gradient_of(follower.inputs[0]) != self.gradient_of(value) or value in self.outputs:
            return False
        alone = direction == BACKWARD or len(node.outputs) == 1
        return alone or node.outputs[1 : len(follower.inputs)] == follower.inputs[1:]
