"""Casts by code of the user's own of what comes into a segment: made before it runs, in which all else is the library's then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from opfuse.compiler.graph import Node
from opfuse.compiler.plan import Plan, Segment
from opfuse.core.context import identity
from opfuse.core.operation import BasicOperation
from opfuse.runtime.kept import Held


def made_before(
    plan: Plan, segment: Segment, ops: Sequence[BasicOperation], nodes: Sequence[Node], inputs: Sequence[Any]
) -> tuple[Held, ...]:
    """What ``nodes`` cast, in their order. inputs: of the segment first. A look is None where no program may take the cast."""
    with torch.no_grad():
        return tuple(_made(plan, segment, ops, nodes, inputs))


def _made(
    plan: Plan, segment: Segment, ops: Sequence[BasicOperation], nodes: Sequence[Node], inputs: Sequence[Any]
) -> Iterator[Held]:
    for node in nodes:
        cast = plan.casts[node.index]
        source = ops[node.op].parameter(cast.role) if node.side else inputs[segment.inputs.index(node.inputs[0])]
        storage = cast(source)
        try:
            yield Held(node.index, storage, storage.tensors(), identity(storage))
        except KeyError:
            yield Held(node.index, storage, (), None)
