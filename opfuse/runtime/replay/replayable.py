"""What runs again and again, by key: interpreted when a key is new, recorded when it comes again, repeated from then on.

A key says all that a run depends on: shapes, strides, alignment and identity of its tensors, beside the key of its plan.
Forward passes, the backward passes behind them, stretches of passes between code of the user's own and casts beside such code
are repeated so.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from opfuse.compiler.plan import Plan
from opfuse.core.context import Value
from opfuse.environment import number
from opfuse.kernels.engine.launch import is_capturing
from opfuse.kernels.engine.variants import VECTOR
from opfuse.runtime.replay.program import Program, host_bytes
from opfuse.runtime.replay.recorder import PLAIN, Recorder, Unrecordable
from opfuse.tensors.storage import QuantizedStorage
from opfuse.tensors.tensor import QuantizedTensor

_log = logging.getLogger("opfuse.programs")

# -- layouts -------------------------------------------------------------------------------------------------------------------

_PLAIN = frozenset(PLAIN)
_KNOWN = frozenset((*_PLAIN, QuantizedTensor, type(None)))

# Mapped over tensors, since every call of a pipeline looks at all that it reads: no function of Python runs for each.
_ADDRESS, _STRIDES, _SHOWN = torch.Tensor.data_ptr, torch.Tensor.stride, attrgetter("shape", "dtype", "device")
_OFFSET = (VECTOR - 1).__and__
"""An address modulo VECTOR, a power of two."""


def layout_key(tensors: Sequence[Any]) -> tuple[Any, ...] | None:
    """The layout of ``tensors``: how each lies in memory, and which of them are the same.

    None for a tensor of an unknown class, and for two tensors over the same memory, since each counts its own writes.
    """
    kinds = frozenset(map(type, tensors))
    plain = kinds <= _PLAIN
    if not plain and not kinds <= _KNOWN:
        return None
    leaves = tensors if plain else [leaf for tensor in tensors for leaf in _leaves(tensor)]
    addresses = [*map(_ADDRESS, leaves)]
    layout: list[Any] = [*map(_SHOWN, leaves), *map(_STRIDES, leaves), *map(_OFFSET, addresses)]
    if not plain:
        layout += [_structure(tensor) for tensor in tensors]
    if len(set(addresses)) < len(addresses):
        lying = [(leaf, address) for leaf, address in zip(leaves, addresses) if address]  # one without elements lies nowhere
        first = firsts([address for _, address in lying])
        if any(lying[i][0] is not leaf for i, (leaf, _) in zip(first, lying)):
            return None
        return (*layout, *first)
    return tuple(layout)


def firsts(values: Iterable[Hashable]) -> list[int]:
    """For each value the position of the first one that is equal: which of them are the same."""
    known: dict[Hashable, int] = {}
    return [known.setdefault(value, i) for i, value in enumerate(values)]


def _leaves(tensor: Any) -> Sequence[torch.Tensor]:
    """What lies in memory of a plain tensor, a quantized one or None."""
    if tensor is None:
        return ()
    return tensor.held.tensors() if type(tensor) is QuantizedTensor else (tensor,)


def _structure(tensor: Any) -> Any:
    """What a layout says of a tensor beside its leaves: which there are, and what they mean."""
    return (tensor.shape, tensor.signature) if type(tensor) is QuantizedTensor else tensor is None


def tensors_and_planes(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors that are not None, followed by the planes of quantized ones."""
    there = [tensor for tensor in tensors if tensor is not None]
    if QuantizedTensor in map(type, there):
        there += [plane for tensor in there if type(tensor) is QuantizedTensor for plane in tensor.held.tensors()]
    return there


# -- runs ----------------------------------------------------------------------------------------------------------------------

INTERPRETED_FIRST = True
"""Whether a key is interpreted when it first comes, and recorded when it comes again, since some never do."""

LOOKS, BACKWARD_LOOKS = 32, 8
"""How many keys a pass keeps programs for, and how many a backward pass behind each; the oldest goes first."""

SEEN, REFUSED = "seen", "refused"


class Ran(NamedTuple):
    """What a run leaves.

    values: what it returns; None where it returns nothing. rest: what it returns beside, which follows from the key, and is that
    of the recorded run in a repeated one. behind: recordings of what follows, as of backward passes. packs: whether its last
    values may yet be made in blocks, for which its program keeps its recording.
    """

    values: Sequence[Value | None]
    rest: Any = None
    behind: Sequence[Replayable] = ()
    packs: bool = False


@dataclass(frozen=True, eq=False)
class Recorded:
    """A recorded run. structures: of its values; None if all are tensors. rest, behind: as of :class:`Ran`."""

    program: Program
    structures: Structures | None = None
    rest: Any = None
    behind: Sequence[Replayable] = ()

    def programs(self) -> Iterator[Program]:
        """All that are kept for this key."""
        yield self.program
        yield from (
            program for replayable in self.behind for _, recorded in replayable.recorded() for program in recorded.programs()
        )

    def repeat(self, device: str, given: list[torch.Tensor]) -> Sequence[Value | None]:
        """The values for other tensors, without torch.autocast: that has acted on the ops when they were recorded."""
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                results = self.program(given)
        else:
            results = self.program(given)
        return results if self.structures is None else values_of(self.structures, results)


class Replayable(dict[Any, Any]):
    """What is known of each key: SEEN once, REFUSED by the recorder, or what was recorded. At most ``limit`` keys.

    The programs of a process take at most ``OPFUSE_PROGRAM_BYTES`` of the host's memory. To make room, those that were used least
    recently go, but for the one that needs the room; a key whose program is gone is a new one. dropped: how many went so.
    changes: how often a key was entered or went, for callers who keep what they found.

    Threads may share one. No OrderedDict: parts of a key are hashed and compared by Python, in the midst of which another thread
    may run, and an OrderedDict that is written meanwhile loses its order.

    device: on which programs run. where: what is recorded, for the log.
    """

    def __init__(self, device: str = "", where: str = "", limit: int = LOOKS) -> None:
        super().__init__()
        self.device, self.where, self.limit = device, where, limit
        self.dropped = self.changes = 0
        _ALL[id(self)] = self

    @classmethod
    def of(cls, plan: Plan, key: Any, nodes: range, limit: int = LOOKS) -> Replayable:
        """That of a part of a plan, which has it under ``key``. nodes: those of the part."""
        found: Replayable | None = plan.programs.get(key)
        if found is None:
            found = plan.programs.setdefault(key, cls(plan.key.env.device, f"{plan.name}, nodes {nodes}", limit))
        return found

    def __call__(
        self,
        key: Any,
        given: list[torch.Tensor],
        interpret: Callable[[Recorder | None], Ran],
        release: Callable[[], None] | None = None,
    ) -> tuple[Any, Any]:
        """The values of a run and what it returns beside them.

        key: None if no program may run. given: the tensors that come in; the list is emptied.
        interpret: runs without a program, and gets a recorder where the run is recorded. release: called before a program runs,
        which then alone holds what comes in, and lets each tensor go when it is read.
        """
        found = self.get(key)
        if isinstance(found, Recorded):
            if release is not None:
                release()
            return found.repeat(self.device, given), found.rest
        # A program may want kernels that no call has launched: a capture loads none.
        interprets = key is None or found is REFUSED or is_capturing()
        if not interprets and found is None and INTERPRETED_FIRST:
            self.add(key, SEEN)
            interprets = True
        if interprets:
            given.clear()
            ran = interpret(None)
        else:
            recorder = Recorder(given)
            given.clear()
            with recorder.recording():
                ran = interpret(recorder)
            self.add(key, self._recorded(recorder, ran))
        return ran.values, ran.rest

    def _recorded(self, recorder: Recorder, ran: Ran) -> Recorded | str:
        """The program of a recorded run; REFUSED, and a line of the log, if the run cannot be repeated."""
        structures, results = structures_of(ran.values)
        refusal = recorder.refusal
        try:
            if not refusal:
                program = Program(recorder, [recorder.number(tensor) for tensor in results])
                if not ran.packs or not (program.launches or program.products):
                    program.settle()
                return Recorded(program, structures, ran.rest, ran.behind)
        except Unrecordable as reason:
            refusal = str(reason)
        _log.info("%s: interpreted at every call, since %s", self.where, refusal)
        return REFUSED

    def add(self, key: Any, what: Any) -> None:
        """Enter ``what`` for a key, and forget the oldest entry if there are too many."""
        self.changes += 1
        self.pop(key, None)  # so that it is entered as the latest
        self[key] = what
        for oldest in [*self][: max(len(self) - self.limit, 0)]:
            self.pop(oldest, None)
        if isinstance(what, Recorded):
            _make_room(what)

    def recorded(self) -> list[tuple[Any, Recorded]]:
        """The keys of which there are programs."""
        return [(key, what) for key, what in list(self.items()) if isinstance(what, Recorded)]


# -- values as tensors ---------------------------------------------------------------------------------------------------------

TENSOR = "tensor"
Structures = Sequence[QuantizedStorage | str | None]
"""For each value its record of planes, over empty tensors; TENSOR for a plain one; None for none."""

_NOTHING = torch.empty(0, device="cpu")


def structures_of(values: Sequence[Value | None]) -> tuple[Structures | None, list[torch.Tensor]]:
    """The structures of values but for plain tensors at their end, None if that leaves none; and the tensors they are made of."""
    structures: list[QuantizedStorage | str | None] = []
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, QuantizedStorage):
            parts = value.tensors()
            structures.append(value.with_tensors([_NOTHING] * len(parts)))
            tensors += parts
        elif value is None:
            structures.append(None)
        else:
            structures.append(TENSOR)
            tensors.append(value)
    while structures and structures[-1] is TENSOR:
        structures.pop()
    return tuple(structures) or None, tensors


def values_of(structures: Structures, tensors: Sequence[torch.Tensor]) -> list[Value | None]:
    """The values with these structures over other tensors; those that are left over come behind them."""
    left = iter(tensors)
    values: list[Value | None] = []
    for structure in structures:
        if structure is TENSOR:
            values.append(next(left))
        elif isinstance(structure, QuantizedStorage):
            values.append(structure.with_tensors([next(left) for _ in structure.tensors()]))
        else:
            values.append(None)
    return [*values, *left]


# -- how much of the host's memory ---------------------------------------------------------------------------------------------

_ALL: WeakValueDictionary[int, Replayable] = WeakValueDictionary()


@dataclass
class _Spare:
    """Bytes that programs may yet take under a bound before all of them are counted again, which takes as long as there are many.

    What goes by itself is not added, so it is never too much.
    """

    bound: int = 0
    left: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def takes(self, size: int, bound: int) -> bool:
        """Whether there are so many; they are taken."""
        with self.lock:
            fits = bound == self.bound and size <= self.left
            self.left -= size * fits
            return fits

    def counted(self, total: int, bound: int) -> None:
        """All programs take ``total`` bytes."""
        with self.lock:
            self.bound, self.left = bound, bound - total


_spare = _Spare()


def _make_room(new: Recorded) -> None:
    """Drop what was used least recently until the programs of the process fit in their bound; never ``new``."""
    most = number("OPFUSE_PROGRAM_BYTES")
    if _spare.takes(host_bytes(new.programs()), most):
        return
    while True:
        known = [recording for ref in _ALL.valuerefs() if (recording := ref()) is not None]
        recordings = [(replayable, key, what) for replayable in known for key, what in replayable.recorded()]
        total = host_bytes(program for _, _, what in recordings for program in what.programs())
        old = [recording for recording in recordings if new.program not in recording[2].programs()] if total > most else []
        if not old:
            _spare.counted(total, most)
            return
        replayable, key, _ = min(old, key=lambda recording: max(program.used for program in recording[2].programs()))
        if replayable.pop(key, None) is not None:
            replayable.dropped += 1
            replayable.changes += 1
            _log.info("dropped a program, the least recently used: all may take %d bytes (OPFUSE_PROGRAM_BYTES)", most)
