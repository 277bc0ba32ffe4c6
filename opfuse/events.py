"""What calls do, as events: the code that does it emits them; reports, traces, recorders and tests listen.

An event is made only if somebody listens. Where nobody does, it costs one look at a context variable:

    if TensorSaved in listeners():
        emit(TensorSaved(plan, node, name, value))

A subscription holds inside its block, for its own thread or task, and for code that runs in a copy of its context, as the
recomputations of checkpoints do. Groups of a backward pass go to the listeners of its forward pass, whose block may have ended,
on whatever thread it runs. Subscriptions add up. A block may silence those around it: looks that leave no trace and dry runs
silence all, a recomputation what its first run has emitted.

No event changes what is computed. What a report wants of a call beside events, as plans that no cache keeps, is a policy that it
sets (``runtime/plans/misses.py``). But a program emits no more than the plan that it repeats, so calls are interpreted, with
the same bits, while somebody listens to what the interpreter alone sees (``INTERPRETED``).

Fields whose classes belong to later packages are of type Any, and name the class.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch


@dataclass(frozen=True, slots=True)
class PlanUsed:
    """A pipeline is about to run under ``plan``, a :class:`~opfuse.compiler.plan.Plan`: in every call, repeated ones as well."""

    plan: Any


@dataclass(frozen=True, slots=True)
class PlanMissed:
    """A call found no plan, so ``plan`` was made and is kept.

    pipeline: a :class:`~opfuse.runtime.fuser.OperationFuser`. record: the :class:`~opfuse.runtime.plans.trace.PlanRecord` of its
    history.
    """

    pipeline: Any
    record: Any
    plan: Any


@dataclass(frozen=True, slots=True)
class GroupRan:
    """A group of nodes ran. The interpreter alone emits it.

    pipeline: its name. side: forward or backward. name: of the rule that took the group, or of its node. nodes: their names.
    ops: those of the nodes. role: of the tensor, if the group is one cast. seconds: of the host. source: the input of a cast that
    runs alone, else None. result: of the group; backward, the gradient of the input of its first node; None if there is none.
    """

    pipeline: str
    side: str
    name: str
    nodes: tuple[str, ...]
    ops: tuple[Any, ...]
    role: str | None
    seconds: float
    source: Any
    result: Any


@dataclass(frozen=True, slots=True)
class TensorSaved:
    """A node of a plan saved a value under a name for the backward pass. The interpreter alone emits it.

    plan: a :class:`~opfuse.compiler.plan.Plan`. node: the number of the node. value: a tensor, or a record of planes.
    """

    plan: Any
    node: int
    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class ProductChosen:
    """How a product of quantized operands with elementwise ops behind it is made. The interpreter alone emits it.

    shape: of the product. ops: the names of the ops. apart: why they are no part of its launch; an empty string if they are.
    """

    shape: torch.Size
    ops: tuple[str, ...]
    apart: str


@dataclass(frozen=True, slots=True)
class KernelLaunched:
    """A kernel is about to be queued: the arguments of :func:`opfuse.kernels.engine.launch.launch`.

    Programs queue their kernels without that function, and emit nothing. variant: a
    :class:`~opfuse.kernels.engine.compiling.Variant`. grid: a :class:`~opfuse.kernels.engine.launch.Grid`.
    """

    variant: Any
    entry: str
    grid: Any
    layout: struct.Struct
    fields: Sequence[int | float]
    device: int


@dataclass(frozen=True, slots=True)
class ValuesRead:
    """The host reads values of a tensor and acts on them, so a run with other values may do something else. what: it reads."""

    what: str


@dataclass(frozen=True, slots=True)
class HostCallBegan:
    """A function of the host begins whose tensors kernels read; what it does inside is no part of the run."""


@dataclass(frozen=True, slots=True)
class HostCallEnded:
    """It has ended. tensors: what it returned, which every repetition of the run has to ask it for; None if it raised."""

    function: Callable[[], Sequence[torch.Tensor]]
    tensors: Sequence[torch.Tensor] | None


@dataclass(frozen=True, slots=True)
class KernelSized:
    """A kernel was called whose tensors have no memory: it made what it returned, and queued nothing.

    arguments: those of the call, in which tensors lie in tuples, mappings and dataclasses.
    """

    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class SegmentRan:
    """A pass of a segment begins, or has ended: until its end, a program lets go of each tensor at its last reader. The
    interpreter alone emits it.
    """

    ended: bool


INTERPRETED = frozenset((GroupRan, TensorSaved, ProductChosen, SegmentRan))
"""Events that programs do not emit: calls are interpreted where somebody listens to one of these."""

FIRST_RUN = (PlanUsed, TensorSaved, ProductChosen)
"""Events that the first run of a checkpoint emits and its recomputation does not, which would say the same again."""

Listener = Callable[[Any], None]
Event = TypeVar("Event")

_listeners: ContextVar[Mapping[type, tuple[Listener, ...]]] = ContextVar("opfuse_listeners", default={})  # noqa: B039
"""Never changed in place."""

_everywhere: dict[type, tuple[Listener, ...]] = {}

listeners = _listeners.get
"""Those of the context, by type of event; empty, and so false, where nobody listens."""


def emit(event: object, to: Mapping[type, tuple[Listener, ...]] | None = None) -> None:
    """Call the listeners of the event's type: those of the whole process, then those of the context, the outermost first.

    to: the listeners of the context in which a call was made, for what happens in its backward pass.
    """
    kind = type(event)
    for listener in (*_everywhere.get(kind, ()), *(listeners() if to is None else to).get(kind, ())):
        listener(event)


@contextmanager
def subscribed(listener: Listener, *types: type) -> Iterator[None]:
    """Inside the block, call ``listener`` with each event of these types, after the listeners of blocks around it."""
    before = listeners()
    reset = _listeners.set({**before, **{kind: (*before.get(kind, ()), listener) for kind in types}})
    try:
        yield
    finally:
        _listeners.reset(reset)


@contextmanager
def silenced(*types: type) -> Iterator[None]:
    """Inside the block, listeners of blocks around it get no events of these types, or of any, if none is named."""
    reset = _listeners.set({kind: heard for kind, heard in listeners().items() if types and kind not in types})
    try:
        yield
    finally:
        _listeners.reset(reset)


@contextmanager
def collected(kind: type[Event]) -> Iterator[list[Event]]:
    """The events of a type inside the block, in order."""
    events: list[Event] = []
    with subscribed(events.append, kind):
        yield events


def subscribe_everywhere(listener: Listener, *types: type) -> None:
    """Call ``listener`` with each event of these types from now on, in every thread, and also where others are silenced."""
    for kind in types:
        _everywhere[kind] = (*_everywhere.get(kind, ()), listener)
