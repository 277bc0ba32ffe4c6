"""Runners of a segment: the interpreter, one that records what it does, and one that repeats the recording.

A segment is interpreted when its inputs look new, recorded when they look so again, and repeated from then on. Only what the
library itself computes is recorded: an op, a rule or a quantizer of the user's own may do what no tape sees. A pass that has
one runs in steps (``stepped.py``); the other one is repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from opfuse.compiler.graph import BACKWARD, FORWARD, GROUPED, Node
from opfuse.compiler.plan import OwnCode, Plan, Segment
from opfuse.core.cast import Cast
from opfuse.core.context import Value
from opfuse.core.grouped_cast import GroupedCast
from opfuse.core.operation import BasicOperation
from opfuse.core.protocol import Grouping
from opfuse.environment import variable
from opfuse.events import INTERPRETED, GroupRan, listeners
from opfuse.program.tape import Tape
from opfuse.recipes.counting import PassAround
from opfuse.runtime.backward import BackwardPass, GradOutputs, Result
from opfuse.runtime.before import made_before
from opfuse.runtime.kept import Held, KeptCasts, held_casts
from opfuse.runtime.looks import firsts, given, look_of
from opfuse.runtime.observed import ObservedRunner
from opfuse.runtime.own import own_code
from opfuse.runtime.recorded import (
    BACKWARD_LOOKS,
    REFUSED,
    Packing,
    Programs,
    Recorded,
    RecordedBackward,
    program_of,
    structures_of,
    without_autocast,
)
from opfuse.runtime.rehearsal import RehearsedRunner
from opfuse.runtime.run import Kwargs, Runner
from opfuse.runtime.stepped import SteppedRunner
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
) -> Runner | Recorder | Repeater:
    """Who runs ``segment`` in this call. tensors: its inputs, then the parameters of its ops; None: the interpreter shall."""
    kept = held_casts(plan, segment, ops)
    if heard := listeners():
        if GroupRan in heard:
            return ObservedRunner(plan, segment, ops, kwargs, kept.casts)
        if not INTERPRETED.isdisjoint(heard):
            tensors = None
    own = _own_code(plan, segment, ops)
    before = made_before(plan, segment, ops, own.before, tensors) if own.before and tensors is not None else ()
    held = (*before, *kept.casts) if before else kept.casts
    if tensors is None or not _enabled.get() or active_modes():
        return Runner(plan, segment, ops, kwargs, held)
    look = None if FORWARD in own.why or any(kwargs) else _look(plan, segment, ops, tensors, before=before, kept=kept)
    if look is None:
        return (SteppedRunner if own.why else Runner)(plan, segment, ops, kwargs, held)
    if held:
        tensors = [*tensors, *[tensor for each in before for tensor in each.tensors], *kept.tensors]
    programs = plan.programs.get(segment.nodes.start)
    if programs is None:
        programs = plan.programs.setdefault(segment.nodes.start, Programs())
    found = programs.get(look)
    if isinstance(found, Recorded):
        return Repeater(found, plan, segment, tensors)
    refused = found is REFUSED or is_capturing()  # a program may want kernels that no call has launched: a capture loads none
    if refused or programs.is_new(look):
        return (Runner if refused else RehearsedRunner)(plan, segment, ops, kwargs, held)
    return Recorder(plan, segment, ops, kwargs, held, tensors=tensors, note=lambda what: programs.note(look, what))


def _look(
    plan: Plan,
    segment: Segment,
    ops: Sequence[BasicOperation],
    tensors: Sequence[torch.Tensor | None],
    *,
    before: Sequence[Held],
    kept: KeptCasts,
) -> tuple[Any, ...] | None:
    """What a program of this call depends on beside the key of its plan; None if no program may run.

    before, kept: the casts that are made already; those that were kept told their look when they were made.
    """
    if before and any(each.look is None for each in before):
        return None
    look = look_of([*tensors, *[tensor for each in before for tensor in each.tensors]] if before else tensors)
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


def _own_code(plan: Plan, segment: Segment, ops: Sequence[BasicOperation]) -> OwnCode:
    """What of the user's own runs in the segment."""
    found = plan.own_code.get(segment.nodes.start)
    if found is None:
        found = plan.own_code[segment.nodes.start] = own_code(plan, segment, ops)
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


# -- recording -------------------------------------------------------------------------------------------------------------------


class Recorder(Runner):
    """The interpreter, on tape."""

    def __init__(
        self,
        plan: Plan,
        segment: Segment,
        ops: Sequence[BasicOperation],
        kwargs: Kwargs,
        held: Sequence[Held],
        *,
        tensors: Sequence[torch.Tensor | None],
        note: Callable[[Any], None],
    ) -> None:
        """tensors: all that come in. note: takes what becomes of the look."""
        super().__init__(plan, segment, ops, kwargs, held)
        self._note = note
        self._kept = held
        self._tape: Tape | None = Tape(given(tensors))
        self._values: list[Value] = []

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[Value]:
        tape = self._tape
        if tape is None:
            return super().forward(tensors)
        with tape.recording():
            self.held, self._kept = {each.node: each.made_again() for each in self._kept}, ()
            values = self._values = super().forward(tensors)
        if self.dirty:
            tape.refuse("a tensor of the caller is changed in place")
        if not self.segment.requires_grad:
            self._end([])
        return values

    def released(self) -> list[torch.Tensor]:
        saved = super().released()
        self._end(saved)
        return saved

    def _end(self, saved: Sequence[torch.Tensor]) -> None:
        tape, values, self._tape, self._values = self._tape, self._values, None, []
        if tape is None:
            return
        structures, tensors = structures_of(values)
        stepped = BACKWARD in self.plan.own_code[self.segment.nodes.start].why
        packs = self.segment.requires_grad and not stepped
        program = program_of(tape, [*tensors, *saved], self.plan.name, self.segment.nodes, packs=packs)
        if program is None:
            self._note(REFUSED)
            return
        interpreter = (SteppedRunner if stepped else Runner)(self.plan, self.segment, self.ops, ())
        if self.segment.requires_grad:  # else no backward pass wants them, and they hold what the ops read
            interpreter.contexts, interpreter.places = self.contexts, self.places
        backward = Programs(0 if stepped else BACKWARD_LOOKS)
        self._note(Recorded(program, structures, interpreter, backward, packs=program.recording is not None))


# -- repeating -------------------------------------------------------------------------------------------------------------------


class Repeater:
    """Runs what was recorded, with the methods of the interpreter."""

    dirty: Sequence[Any] = ()
    outer: PassAround = None

    def __init__(self, recorded: Recorded, plan: Plan, segment: Segment, tensors: Sequence[torch.Tensor | None]) -> None:
        self.plan, self.segment = plan, segment
        self._recorded = recorded
        self._given = given(tensors)
        self.places = recorded.interpreter.places
        self._saved: list[torch.Tensor] = []
        self._packing: Packing | None = None

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[Value]:
        """The segment's outputs."""
        recorded, program = self._recorded, self._recorded.program
        # Hooks of saved tensors, such as a checkpoint's, may count what is saved, or compare it with an earlier call.
        if recorded.packing is not None and saving_hooks(True) is None:
            self._packing, program = recorded.packing, recorded.packing.forward
        results = without_autocast(self.plan.key.env.device, program, self._given)
        self._given = []
        self._saved = results[recorded.results :]
        return recorded.values(results)

    def released(self) -> list[torch.Tensor]:
        """The tensors that are saved for the backward pass."""
        saved, self._saved = self._saved, []
        return saved

    def gradients(self, grad_outputs: GradOutputs, tensors: Iterator[torch.Tensor]) -> Result:
        """As of the interpreter."""
        recorded, saved = self._recorded, list(tensors)
        unseen = None  # the look of what comes in blocks, if it is not known yet whether a program can take them so
        packs = recorded.packs or recorded.packing is not None
        backward = BackwardPass(self.plan, self.segment, recorded.interpreter.gradients, recorded.backward, packs=packs)
        if (packing := self._packing) is not None:
            look = backward.look(grad_outputs, saved)
            found = packing.backward.get(look)
            if isinstance(found, RecordedBackward):
                return backward.repeated(found, grad_outputs, saved)
            saved, unseen = [*packing.unpacked(saved)], look if found is None else None
        look = backward.look(grad_outputs, saved)
        found = recorded.backward.get(look)
        if isinstance(found, RecordedBackward):
            self._pack(found, grad_outputs, unseen)
        return backward.run(grad_outputs, saved, look, found)

    def _pack(self, backward: RecordedBackward, grad_outputs: GradOutputs, look: tuple[Any, ...] | None) -> None:
        """Have later calls save together what ``backward`` reads by address. look: of what came, where it was saved so."""
        recorded, grads = self._recorded, sum(grad is not None for grad in grad_outputs.values())
        if look is None:
            recorded.pack(backward, grads)
        elif self._packing is not None:
            self._packing.backward.note(look, self._packing.of_backward(backward, grads))
