"""What is repeated of passes with the user's own code, which runs at each call.

A user's op, rule, fused op or quantizer may do what no recorder sees. So the interpreter runs it, with contexts. Casts of what
comes into a segment run before it, which then is the library's alone. Elsewhere the casts around such code are repeated one by
one, and a backward pass is cut around it: each stretch between is repeated. The user's code may have made what comes to a cast or
a stretch, so its layout is part of the key, and so is what the contexts hold beside tensors. A key without a program is
interpreted from where the pass is: nothing has to be undone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from opfuse.compiler.cover import Group
from opfuse.compiler.graph import BACKWARD, Node
from opfuse.compiler.plan import Plan, Segment, Stretch
from opfuse.core.cast import Cast
from opfuse.core.context import Context, Value, fingerprint_of, identity
from opfuse.core.operation import BasicOperation
from opfuse.runtime.interpret.gradients import Gradients
from opfuse.runtime.replay.recorder import Recorder
from opfuse.runtime.replay.replayable import LOOKS, Ran, Replayable, layout_key, tensors_and_planes
from opfuse.runtime.replay.user_code import is_library_cast
from opfuse.runtime.weights.cast_cache import PrecomputedCast
from opfuse.tensors.storage import QuantizedStorage
from opfuse.torch_private.dispatch import active_modes, in_transform

Interpret = Callable[[Sequence[Group], Gradients], None]
"""Runs groups of a backward pass one by one."""

_WANTS_GRADIENT = attrgetter("requires_grad")


@torch.no_grad()
def precomputed_casts(
    plan: Plan, segment: Segment, ops: Sequence[BasicOperation], nodes: Sequence[Node], inputs: Sequence[Any]
) -> tuple[PrecomputedCast, ...]:
    """What ``nodes`` cast, in their order. inputs: of the segment first. A layout is None where no program may take the cast."""
    made = []
    for node in nodes:
        cast = plan.casts[node.index]
        source = ops[node.op].parameter(cast.role) if node.side else inputs[segment.inputs.index(node.inputs[0])]
        storage = cast(source)
        try:
            made.append(PrecomputedCast(node.index, storage, storage.tensors(), identity(storage)))
        except KeyError:
            made.append(PrecomputedCast(node.index, storage, (), None))
    return tuple(made)


@dataclass(frozen=True, eq=False)
class RepeatedCast:
    """A cast by the library beside code of the user's own. node: its index."""

    plan: Plan
    node: int
    cast: Cast

    def __call__(self, source: Value, *by: Value) -> Value:
        """What the cast returns. by: further arguments of a cast in groups, whose sizes the host may have to read: no program."""
        replayable: Replayable | None = self.plan.programs.get(self.cast)
        if replayable is None:
            limit = LOOKS if is_library_cast(self.cast) else 0
            replayable = Replayable.of(self.plan, self.cast, range(self.node, self.node + 1), limit)
        if by or not replayable.limit or not isinstance(source, torch.Tensor):
            return self.cast(source, *by)
        # A mode or a transform of torch, or autograd, follows each op.
        followed = active_modes() or in_transform()
        key = None if followed or (source.requires_grad and torch.is_grad_enabled()) else layout_key([source])
        values: Any = replayable(key, tensors_and_planes([source]), lambda recorder: Ran([self.cast(source)]))[0]
        value: Value = values[0]
        return value


def context_fingerprints(stretches: Sequence[Stretch], contexts: dict[int, Context]) -> Sequence[tuple[Any, ...] | None]:
    """What the contexts that each stretch reads hold beside tensors; None for more than plain values, and for the user's code."""
    read = [(*stretch.nodes, *stretch.beside) for stretch in stretches]
    pairs = zip(stretches, read)
    return [
        fingerprint_of([contexts[i] for i in nodes if i in contexts]) if stretch.repeats else None for stretch, nodes in pairs
    ]


def repeat(
    plan: Plan, segment: Segment, fingerprints: Sequence[tuple[Any, ...] | None], grads: Gradients, interpret: Interpret
) -> None:
    """Run a backward pass stretch by stretch.

    fingerprints: as of :func:`context_fingerprints`. grads: the gradients so far, to which this function adds.
    """
    for at, (stretch, fingerprint) in enumerate(zip(segment.user_code.backward, fingerprints)):
        if fingerprint is None:
            interpret(stretch.groups, grads)
        else:
            nodes = range(min(stretch.nodes), max(stretch.nodes) + 1)
            _repeat(stretch, fingerprint, grads, interpret, Replayable.of(plan, (segment.nodes.start, BACKWARD, at), nodes))


def _repeat(
    stretch: Stretch, fingerprint: tuple[Any, ...], grads: Gradients, interpret: Interpret, replayable: Replayable
) -> None:
    key, tensors = _comes_in(stretch, fingerprint, grads)

    def interpreted(recorder: Recorder | None) -> Ran:
        rest = grads.rest()
        interpret(stretch.groups, rest)
        left, values = rest.left()
        return Ran(values, left)

    def release() -> None:
        grads.values.clear()
        for i in stretch.nodes:
            if i in grads.contexts:
                grads.contexts[i].forget()

    values, left = replayable(key, tensors, interpreted, release)
    grads.enter(left, values)


def _comes_in(
    stretch: Stretch, fingerprint: tuple[Any, ...], grads: Gradients
) -> tuple[tuple[Any, ...] | None, list[torch.Tensor]]:
    """The key of a stretch, None if no program may run, and the tensors that it reads."""
    contexts = grads.contexts
    values = [
        part for value in grads.values.values() for part in (value.tensors() if isinstance(value, QuantizedStorage) else (value,))
    ]
    saved = [part for i in (*stretch.nodes, *stretch.beside) if i in contexts for part in Context.parts(contexts[i])]
    tensors = [*values, *saved]
    layout = None if any(map(_WANTS_GRADIENT, values)) else layout_key(tensors)
    if layout is None:
        return None, []
    try:
        structures = [identity(value) for value in grads.values.values() if isinstance(value, QuantizedStorage)]
    except KeyError:  # a record of another class
        return None, []
    return (*fingerprint, *grads.values, *map(type, grads.values.values()), *structures, *layout), tensors_and_planes(tensors)
