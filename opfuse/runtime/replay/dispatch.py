"""The choice of what runs a segment, forward and backward: the interpreter, or a program that it has recorded.

Only what the library itself computes is recorded: a user's op, rule or quantizer may do what no recorder sees. A pass
that has one is repeated in parts (``partial.py``), the other one as a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any

import torch

from opfuse.compiler.graph import BACKWARD, FORWARD, GROUPED, Node
from opfuse.compiler.plan import NOT_READ, Plan, Segment
from opfuse.core.cast import Cast
from opfuse.core.grouped_cast import GroupedCast
from opfuse.core.operation import BasicOperation
from opfuse.core.protocol import Grouping
from opfuse.environment import variable
from opfuse.events import INTERPRETED, GroupRan, listeners
from opfuse.kernels.engine.launch import compiled_ahead, is_capturing
from opfuse.recipes.counting import PassAround
from opfuse.runtime.interpret.interpreter import GradOutputs, Interpreter, Kwargs, Result
from opfuse.runtime.interpret.observed import GroupEvents
from opfuse.runtime.replay.packing import Packing
from opfuse.runtime.replay.partial import precomputed_casts
from opfuse.runtime.replay.recorder import Recorder
from opfuse.runtime.replay.replayable import (
    BACKWARD_LOOKS,
    REFUSED,
    Ran,
    Recorded,
    Replayable,
    firsts,
    layout_key,
    tensors_and_planes,
)
from opfuse.runtime.replay.user_code import user_code
from opfuse.runtime.replay.warmup import rehearsed
from opfuse.runtime.weights.cast_cache import NO_CASTS, CachedCasts, PrecomputedCast, cached_casts, keeps_casts
from opfuse.runtime.weights.packed import PlaceInBlock
from opfuse.tensors.groups import Sizes, check_copied, check_splits, known_sizes, read_sizes, sizes_read_once
from opfuse.tensors.storage import matrix_shape
from opfuse.torch_private.autograd import COMPARED, HOOKED, hooked
from opfuse.torch_private.dispatch import active_modes

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
    """The runner of ``segment`` for this call. tensors: its inputs, then parameters of its ops; None forces the interpreter."""
    cached = cached_casts(plan, segment, ops) if keeps_casts() else NO_CASTS
    if heard := listeners():
        if GroupRan in heard:
            return Interpreter(plan, segment, ops, kwargs, cached.casts, events=GroupEvents(plan, ops, heard))
        if not INTERPRETED.isdisjoint(heard):
            tensors = None
    code = user_code(plan, segment, ops) if segment.user_code is NOT_READ else segment.user_code
    before = precomputed_casts(plan, segment, ops, code.before, tensors) if code.before and tensors is not None else ()
    precomputed = (*before, *cached.casts) if before else cached.casts
    if tensors is None or not _enabled.get() or active_modes():
        return Interpreter(plan, segment, ops, kwargs, precomputed)
    key = None if FORWARD in code.why or any(kwargs) else _key(plan, segment, ops, tensors, before=before, cached=cached)
    if key is None:
        return Interpreter(plan, segment, ops, kwargs, precomputed, in_parts=bool(code.why))
    hooks = hooked() if segment.requires_grad else ""
    if hooks:
        key = *key, hooks
    if precomputed:
        tensors = [*tensors, *[tensor for cast in before for tensor in cast.tensors], *cached.tensors]
    runner = ReplayedSegment(plan, segment, ops, precomputed, key=key, tensors=tensors_and_planes(tensors))
    if not (code.why or precomputed or hooks):
        runner.reads, runner.sized = len(tensors), plan.reads_sizes and any(map(_ON_HOST, tensors))
    return runner


def repeats_here() -> bool:
    """Whether a call that was repeated in this context depends on its key alone: nobody looks at calls, keeps casts or counts
    what is saved, and no CUDA graph is captured.
    """
    return _enabled.get() and not (listeners() or active_modes() or keeps_casts() or hooked() == HOOKED or is_capturing())


def _key(
    plan: Plan,
    segment: Segment,
    ops: Sequence[BasicOperation],
    tensors: Sequence[torch.Tensor | None],
    *,
    before: Sequence[PrecomputedCast],
    cached: CachedCasts,
) -> tuple[Any, ...] | None:
    """What a program of this call depends on beside the key of its plan; None if no program may run.

    before, cached: the casts that are made already; those of an earlier call have their layout.
    """
    if before and any(cast.layout is None for cast in before):
        return None
    layout = layout_key([*tensors, *[tensor for cast in before for tensor in cast.tensors]] if before else tensors)
    if layout is None:
        return None
    if before:
        layout += tuple([(cast.node, cast.layout) for cast in before])
        ids = [id(cast.storage) for cast in before]
        if len(set(ids)) < len(ids):  # one weight of several ops
            layout += tuple(firsts(ids))
    if cached.casts:
        layout = *layout, cached.layout
    return (*layout, *_sizes(plan, segment, ops, tensors)) if plan.reads_sizes else layout


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


def _ON_HOST(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.is_cpu


_KEEP_ROWS = frozenset(("elementwise", GROUPED))
"""Traits of ops whose result has a row for each row of their input."""


def _grouped(plan: Plan, segment: Segment, ops: Sequence[BasicOperation]) -> Sequence[tuple[Node, Grouping, Sequence[Cast]]]:
    """The segment's ops with groups of rows, and their casts; looked for once, since experts have many nodes."""
    groups = segment.grouped
    if groups is None:
        nodes = [plan.graph.nodes[i] for i in segment.nodes]
        grouped = [(node, node.grouping) for node in nodes if node.grouping is not None]
        casts = {node.op: [cast for cast in plan.casts.values() if cast.op is ops[node.op]] for node, _ in grouped}
        groups = segment.grouped = tuple((*group, casts[group[0].op]) for group in grouped)
    return groups


# -- repeating -------------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class BackwardPass:
    """The backward passes of a segment, for all calls that repeat one forward pass.

    interpreter: has the contexts of that pass, as they were when it was recorded. replayable: by what comes in. packs: whether it
    has yet to be decided which saved tensors go in blocks. packing: how they do, if some do. packed: by what comes in blocks.
    """

    interpreter: Interpreter
    replayable: Replayable
    packs: bool = False
    packing: Packing | None = None
    packed: Replayable | None = None

    @property
    def replayables(self) -> Sequence[Replayable]:
        """All that is repeated."""
        return (self.replayable,) if self.packed is None else (self.replayable, self.packed)

    def __call__(self, grads: GradOutputs, saved: list[torch.Tensor], forward: tuple[Replayable, Any]) -> Result:
        """The gradients of the interpreter for those of the outputs; both arguments are emptied.

        forward: where the forward pass is kept, and under which key, to have it save tensors in blocks.
        """
        unknown, known = None, self.replayable if self.packed is None else self.packed
        key = self._key(grads, saved)
        found = known.get(key)
        if isinstance(found, Recorded) and not self.packs:
            given = tensors_and_planes([*grads.values(), *saved])
            saved.clear()
            grads.clear()
            gradients: Any = found.repeat(known.device, given)
            return gradients  # type: ignore[no-any-return]
        if self.packing is not None and self.packed is not None:
            saved[:], unknown = [*self.packing.unpacked(saved)], key if found is None else None
            key = self._key(grads, saved)
        if (self.packs or unknown is not None) and isinstance(found := self.replayable.get(key), Recorded):
            count = sum(grad is not None for grad in grads.values())
            if unknown is None:
                self._decide(found, count, len(saved), forward)
            else:
                self._enter_blocks(found, count, unknown)
        return self._run(self.replayable, key, grads, saved)

    def _key(self, grads: GradOutputs, saved: list[torch.Tensor]) -> tuple[Any, ...] | None:
        """What a program depends on; None if none may run."""
        if not self.replayable.limit or active_modes():
            return None
        layout = layout_key([*grads.values(), *saved])
        return None if layout is None else (*grads, *layout)

    def _run(self, replayable: Replayable, key: Any, grads: GradOutputs, saved: list[torch.Tensor]) -> Result:
        def interpret(recorder: Recorder | None) -> Ran:
            return Ran(self.interpreter.gradients(grads, popped(saved)), packs=self.packs or self.packing is not None)

        def release() -> None:
            saved.clear()
            grads.clear()

        result: Result = replayable(key, tensors_and_planes([*grads.values(), *saved]), interpret, release)[0]
        return result

    def _decide(self, backward: Recorded, grads: int, count: int, forward: tuple[Replayable, Any]) -> None:
        """Have later calls save in blocks what ``backward`` reads by address.

        grads: how many gradients come before the ``count`` saved tensors.
        """
        replayable, key = forward
        recorded = replayable.get(key)
        if not isinstance(recorded, Recorded) or recorded.rest is not self:
            return
        self.packs = False
        made, read = recorded.program.recording, backward.program.recording
        packing = None if made is None or read is None else Packing.of(made, read, grads=grads, count=count)
        if packing is None or made is None:
            backward.program.settle()
        else:
            packed = Replayable(replayable.device, replayable.where, BACKWARD_LOOKS)
            rest = BackwardPass(self.interpreter, self.replayable, packing=packing, packed=packed)
            replayable.add(key, replace(recorded, program=packing.forward(made), rest=rest, behind=rest.replayables))
        recorded.program.settle()

    def _enter_blocks(self, backward: Recorded, grads: int, key: Any) -> None:
        """Have the next call of which this is the key run ``backward`` over blocks, if it reads what is in them by address."""
        if self.packing is not None and self.packed is not None:
            program = self.packing.backward(backward.program.recording, grads)
            self.packed.add(key, REFUSED if program is None else replace(backward, program=program))
            backward.program.settle()


def popped(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors in order, each released when it is taken. No generator: most passes take all at once, in one call."""
    tensors.reverse()
    return map(tensors.pop, repeat(-1, len(tensors)))


class ReplayedSegment:
    """One segment in one call, with the methods of the interpreter: interpreted, recorded or repeated, as its key is known.

    tensors: all that come in. reads: how many of these are its inputs and parameters; 0 if its key says more than that of a call
    in which :func:`repeats_here`. sized: whether the host may know sizes of its groups.
    """

    reads = 0
    sized = False

    outer: PassAround = None

    def __init__(
        self,
        plan: Plan,
        segment: Segment,
        ops: Sequence[BasicOperation],
        precomputed: Sequence[PrecomputedCast],
        *,
        key: tuple[Any, ...],
        tensors: list[torch.Tensor],
    ) -> None:
        self.plan, self.segment = plan, segment
        self._ops, self._precomputed = ops, precomputed
        self._key, self.tensors = key, tensors
        self.replayable = Replayable.of(plan, segment.nodes.start, segment.nodes)
        self._backward: Any = None
        self._saved: list[Any] = []
        self.places: tuple[PlaceInBlock, ...] = ()
        self.dirty: Sequence[tuple[int, torch.Tensor]] = ()

    def forward(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """The segment's outputs for its inputs."""
        found: tuple[list[Any], BackwardPass | None] = self.replayable(self._key, self.tensors, partial(self._interpret, inputs))
        values, self._backward = found
        if self._backward is None:
            return values
        self.places = self._backward.interpreter.places
        count = len(self.segment.outputs)
        self._saved = values[count:]
        return values[:count]

    def _interpret(self, inputs: Sequence[torch.Tensor], recorder: Recorder | None) -> Ran:
        """The outputs, then the saved tensors; and the backward pass behind them, if there is one."""
        plan, segment, stepped = self.plan, self.segment, BACKWARD in self.segment.user_code.why
        interpreter = Interpreter(plan, segment, self._ops, ({},) * len(self._ops), self._precomputed)
        if recorder is None:
            with compiled_ahead(partial(rehearsed, interpreter, inputs)):
                values = interpreter.forward(inputs)
        else:
            interpreter.precomputed = {cast.node: cast.unpack() for cast in self._precomputed}
            values = interpreter.forward(inputs)
            if interpreter.dirty:
                recorder.refuse("a tensor of the caller is changed in place")
        if not segment.requires_grad:
            return Ran(values)
        self.dirty, saved = interpreter.dirty, interpreter.released()
        interpreter.in_parts = stepped
        limit = 0 if stepped else BACKWARD_LOOKS
        replayable = Replayable(self.replayable.device, self.replayable.where, limit)
        backward = BackwardPass(interpreter, replayable, packs=not stepped and self._key[-1] not in (HOOKED, COMPARED))
        return Ran([*values, *saved], backward, backward.replayables, backward.packs)

    def found(self) -> Recorded | None:
        """What repeats the call as long as ``replayable.changes`` stays; None if nothing does, or more than the key decides."""
        found = self.replayable.get(self._key) if self.reads else None
        return found if isinstance(found, Recorded) and found.structures is None and not self.dirty else None

    def has_sizes_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether grouped ops have as many rows in each group as in this call, for other inputs and parameters."""
        with sizes_read_once():
            sizes = tuple(_sizes(self.plan, self.segment, self._ops, tensors[: self.reads]))
        return sizes == self._key[len(self._key) - len(sizes) :]

    def released(self) -> list[torch.Tensor]:
        """The tensors that are saved for the backward pass; whatever else is precomputed of this call is let go."""
        saved, self._saved = self._saved, []
        self.dirty, self._precomputed = (), ()
        return saved

    def gradients(self, grad_outputs: GradOutputs, tensors: Iterator[torch.Tensor]) -> Result:
        """As of the interpreter."""
        found: Result = self._backward(grad_outputs, list(tensors), (self.replayable, self._key))
        return found
