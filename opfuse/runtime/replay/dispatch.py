"""Who runs a segment: the interpreter, or a program that it has recorded.

Only what the library itself computes is recorded: a user's op, rule or quantizer may do what no recorder sees. A pass
that has one is repeated in parts (``partial.py``), the other one as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

from opfuse.compiler.graph import BACKWARD, FORWARD, GROUPED, Node
from opfuse.compiler.plan import Plan, Segment, UserCode
from opfuse.core.cast import Cast
from opfuse.core.grouped_cast import GroupedCast
from opfuse.core.operation import BasicOperation
from opfuse.core.protocol import Grouping
from opfuse.environment import variable
from opfuse.events import INTERPRETED, GroupRan, listeners
from opfuse.kernels.engine.launch import compiled_ahead
from opfuse.recipes.counting import PassAround
from opfuse.runtime.interpret.interpreter import GradOutputs, Interpreter, Kwargs, Result
from opfuse.runtime.interpret.observed import GroupEvents
from opfuse.runtime.replay.backward import BackwardPass
from opfuse.runtime.replay.layout_key import firsts, given, layout_key
from opfuse.runtime.replay.partial import made_before
from opfuse.runtime.replay.recorder import Recorder
from opfuse.runtime.replay.replayable import BACKWARD_LOOKS, Ran, Replayable
from opfuse.runtime.replay.user_code import user_code
from opfuse.runtime.replay.warmup import rehearsed
from opfuse.runtime.weights.cast_cache import CachedCasts, PrecomputedCast, cached_casts
from opfuse.runtime.weights.packed import PlaceInBlock
from opfuse.tensors.capture import is_capturing
from opfuse.tensors.groups import Sizes, check_copied, check_splits, known_sizes, read_sizes
from opfuse.tensors.storage import matrix_shape
from opfuse.torch_private.autograd import saving_hooks
from opfuse.torch_private.dispatch import active_modes

_log = logging.getLogger("opfuse.programs")
_enabled: ContextVar[bool] = ContextVar("opfuse_programs", default=variable("OPFUSE_PROGRAMS") != "0")


@contextmanager
def interpreted() -> Iterator[None]:
    """Inside the block every call runs op by op in Python: nothing is recorded or repeated. Same bits, more CPU time.

    For debuggers, which see each op run. ``OPFUSE_PROGRAMS=0`` in the environment has the same effect on a whole process.
    """
    reset = _enabled.set(False)
    try:
        yield
    finally:
        _enabled.reset(reset)


def runner_of(
    plan: Plan, segment: Segment, ops: Sequence[BasicOperation], kwargs: Kwargs, tensors: Sequence[torch.Tensor | None] | None
) -> Interpreter | ReplayedSegment:
    """Who runs ``segment`` in this call. tensors: its inputs, then the parameters of its ops; None: the interpreter shall."""
    kept = cached_casts(plan, segment, ops)
    if heard := listeners():
        if GroupRan in heard:
            return Interpreter(plan, segment, ops, kwargs, kept.casts, events=GroupEvents(plan, ops, heard))
        if not INTERPRETED.isdisjoint(heard):
            tensors = None
    own = plan.user_code.get(segment.nodes.start) or _user_code(plan, segment, ops)
    before = made_before(plan, segment, ops, own.before, tensors) if own.before and tensors is not None else ()
    held = (*before, *kept.casts) if before else kept.casts
    if tensors is None or not _enabled.get() or active_modes():
        return Interpreter(plan, segment, ops, kwargs, held)
    key = None if FORWARD in own.why or any(kwargs) else _key(plan, segment, ops, tensors, before=before, kept=kept)
    if key is None:
        return Interpreter(plan, segment, ops, kwargs, held, in_parts=bool(own.why))
    if segment.requires_grad and _are_saved_one_by_one():
        key = *key, HOOKED
    if held:
        tensors = [*tensors, *[tensor for each in before for tensor in each.tensors], *kept.tensors]
    return ReplayedSegment(plan, segment, ops, held, key=key, tensors=given(tensors))


def _key(
    plan: Plan,
    segment: Segment,
    ops: Sequence[BasicOperation],
    tensors: Sequence[torch.Tensor | None],
    *,
    before: Sequence[PrecomputedCast],
    kept: CachedCasts,
) -> tuple[Any, ...] | None:
    """What a program of this call depends on beside the key of its plan; None if no program may run.

    before, kept: the casts that are made already; those that were kept told their look when they were made.
    """
    if before and any(each.look is None for each in before):
        return None
    look = layout_key([*tensors, *[tensor for each in before for tensor in each.tensors]] if before else tensors)
    if look is None:
        return None
    if before:
        look += tuple([(each.node, each.look) for each in before])
        ids = [id(each.storage) for each in before]
        if len(set(ids)) < len(ids):  # one weight of several ops
            look += tuple(firsts(ids))
    if kept.casts:
        look = *look, kept.look
    return (*look, *_sizes(plan, segment, ops, tensors)) if plan.reads_sizes else look


def _user_code(plan: Plan, segment: Segment, ops: Sequence[BasicOperation]) -> UserCode:
    """What of the user's own runs in the segment, which is told once."""
    found = plan.user_code[segment.nodes.start] = user_code(plan, segment, ops)
    for side, why in found.why.items():
        _log.info("%s, nodes %s, %s: runs at every call, since %s", plan.name, segment.nodes, side, why)
    return found


def _sizes(
    plan: Plan, segment: Segment, ops: Sequence[BasicOperation], tensors: Sequence[torch.Tensor | None]
) -> Iterator[Sizes | None]:
    """How many rows the groups of each grouped op have, in numbers, which its run depends on; None where no host knows them.

    From a device they are read where the run would read them too: it finds them read. Those that stay on the device, or are
    copied there, decide nothing that the host does; but no program that copies them has a place in a CUDA graph.
    """
    given = dict(zip(segment.inputs, tensors))
    for node, grouping, casts in _grouped(plan, segment, ops):
        x, splits = given.get(_with_rows_of(plan, node.inputs[0], given)), given.get(node.extra_inputs[grouping.splits])
        if splits is None:
            yield None
            continue
        where = plan.ops[node.op]
        check_splits(splits, grouping.number, where=where)
        rows = 0 if x is None else matrix_shape(x.shape)[0]
        grouped = next((cast for cast in casts if isinstance(cast, GroupedCast)), None)
        if grouped is not None and grouped.stays(splits, (1,) if x is None else x.shape):
            if x is not None:
                check_copied(splits, rows, where=where)
            yield known_sizes(splits, rows) if is_capturing() else None
        else:
            reads = casts or grouping.summed
            yield read_sizes(splits, rows, where=where) if reads else known_sizes(splits, rows)


def _with_rows_of(plan: Plan, value: int, given: Collection[int]) -> int:
    """The one of the ``given`` values from which ops that keep rows made ``value``; if there is none, what another op made."""
    while value not in given and value in plan.graph.producer:
        node = plan.graph.nodes[plan.graph.producer[value]]
        if not node.is_cast and _KEEP_ROWS.isdisjoint(node.traits):
            break
        value = node.inputs[0]
    return value


_KEEP_ROWS = frozenset(("elementwise", GROUPED))
"""Traits of ops whose result has a row for each row of their input."""


def _grouped(plan: Plan, segment: Segment, ops: Sequence[BasicOperation]) -> Sequence[tuple[Node, Grouping, Sequence[Cast]]]:
    """The segment's ops with groups of rows, and their casts; looked for once, since experts have many nodes."""
    found = plan.grouped.get(segment.nodes.start)
    if found is None:
        nodes = [plan.graph.nodes[i] for i in segment.nodes]
        grouped = [(node, node.grouping) for node in nodes if node.grouping is not None]
        casts = {node.op: [cast for cast in plan.casts.values() if cast.op is ops[node.op]] for node, _ in grouped}
        found = plan.grouped[segment.nodes.start] = tuple((*each, casts[each[0].op]) for each in grouped)
    return found


# -- repeating -------------------------------------------------------------------------------------------------------------------

HOOKED = "hooked"
"""Ends the key of a call under a user's hooks of saved tensors, which see them one by one: no blocks."""


def _are_saved_one_by_one() -> bool:
    """Whether hooks of saved tensors are set that may count what is saved, or compare it. Those of a call in a compiled graph
    take blocks: of 128 experts it saves 500 tensors otherwise, which takes the host 10 ms a layer.
    """
    hooks = saving_hooks(True)
    return hooks is not None and not getattr(getattr(hooks[0], "__self__", None), "takes_blocks", False)


class ReplayedSegment:
    """One segment in one call, with the methods of the interpreter: interpreted, recorded or repeated, as its key is known."""

    outer: PassAround = None

    def __init__(
        self,
        plan: Plan,
        segment: Segment,
        ops: Sequence[BasicOperation],
        held: Sequence[PrecomputedCast],
        *,
        key: tuple[Any, ...],
        tensors: list[torch.Tensor],
    ) -> None:
        """tensors: all that come in."""
        self.plan, self.segment = plan, segment
        self._ops, self._held = ops, held
        self._key, self._tensors = key, tensors
        self._replayable = Replayable.of(plan, segment.nodes.start, segment.nodes)
        self._backward: Any = None
        self._saved: list[Any] = []
        self.places: tuple[PlaceInBlock, ...] = ()
        self.dirty: Sequence[tuple[int, torch.Tensor]] = ()

    def forward(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """The segment's outputs for its inputs."""
        found: tuple[list[Any], BackwardPass | None] = self._replayable(
            self._key, self._tensors, partial(self._interpret, inputs)
        )
        values, self._backward = found
        if self._backward is None:
            return values
        self.places = self._backward.interpreter.places
        count = len(self.segment.outputs)
        self._saved = values[count:]
        return values[:count]

    def _interpret(self, inputs: Sequence[torch.Tensor], recorder: Recorder | None) -> Ran:
        """The outputs, then the saved tensors; and the backward pass behind them, if there is one."""
        plan, segment, stepped = self.plan, self.segment, BACKWARD in self.plan.user_code[self.segment.nodes.start].why
        interpreter = Interpreter(plan, segment, self._ops, ({},) * len(self._ops), self._held)
        if recorder is None:
            with compiled_ahead(partial(rehearsed, interpreter, inputs)):
                values = interpreter.forward(inputs)
        else:
            interpreter.held = {each.node: each.unpack() for each in self._held}
            values = interpreter.forward(inputs)
            if interpreter.dirty:
                recorder.refuse("a tensor of the caller is changed in place")
        if not segment.requires_grad:
            return Ran(values)
        self.dirty, saved = interpreter.dirty, interpreter.released()
        interpreter.in_parts = stepped
        limit = 0 if stepped else BACKWARD_LOOKS
        replayable = Replayable(self._replayable.device, self._replayable.where, limit)
        backward = BackwardPass(interpreter, replayable, packs=not stepped and self._key[-1] != HOOKED)
        return Ran([*values, *saved], backward, backward.replayables, backward.packs)

    def released(self) -> list[torch.Tensor]:
        """The tensors that are saved for the backward pass; whatever else is held of this call is let go."""
        saved, self._saved = self._saved, []
        self.dirty, self._held = (), ()
        return saved

    def gradients(self, grad_outputs: GradOutputs, tensors: Iterator[torch.Tensor]) -> Result:
        """As of the interpreter."""
        found: Result = self._backward(grad_outputs, list(tensors), (self._replayable, self._key))
        return found
