"""Casts of weights that are kept from call to call, inside a scope that the user opens.

A cast is found by the parameter, the quantizer and the stream. It is valid while the parameter lies in the memory that was cast
and autograd has counted no write to it; under delayed scaling also while its scale stays and its amax counts for the same update.
Otherwise a call casts anew, so every call has the bits that it has without the scope. Casts with code that is not the library's,
with random numbers or with other ranks are not kept.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from opfuse.compiler.graph import Node
from opfuse.compiler.plan import Plan, Segment
from opfuse.core.cast import Cast
from opfuse.core.operation import BasicOperation
from opfuse.errors import PipelineError, UnsupportedError, describe
from opfuse.program.tape import PLAIN
from opfuse.recipes.passes import Pass, current_pass
from opfuse.runtime.blocks import gathered, in_blocks, made_again
from opfuse.runtime.own import has_own_methods
from opfuse.tensors.quantizers.own import draws, is_own_quantizer
from opfuse.tensors.storage import QuantizedStorage

CASTS = 4
"""Casts of one weight that a scope keeps, by recipe, planes and stream. Of more, the oldest is dropped."""

PLANS = 64
"""Casts of plans that an entry finds by identity; beyond that number, by comparison."""

VAIN, REST = 3, 32
"""After VAIN kept casts of a weight in a row that served no second call, only every REST-th call keeps its cast."""


class Held(NamedTuple):
    """A cast that a segment finds made. node: the quantize node that need not run.

    tensors: the memory of the storage without the weight's own: blocks first, then what lies in none. look: how both lie, or the
    structure of the storage.
    """

    node: int
    storage: QuantizedStorage
    tensors: tuple[torch.Tensor, ...]
    look: object | None
    blocks: tuple[torch.Tensor, ...] = ()

    def made_again(self) -> QuantizedStorage:
        """The storage over views of the blocks that are made now, for a tape that knows the blocks."""
        return made_again(self.storage, self.blocks) if self.blocks else self.storage


class _CachedCast:
    """A cast of a weight, and everything that its validity depends on."""

    def __init__(self, cast: Cast, parameter: torch.Tensor, stream: int) -> None:
        # Neither inference mode nor a graph may mark what later calls save for their backward passes.
        with torch.inference_mode(mode=False), torch.no_grad():
            memory = parameter.untyped_storage()
            self._memory = StorageWeakRef(memory)  # type: ignore[no-untyped-call]  # while it is here, no other has the number
            self._storage, self._address, self._writes = memory._cdata, parameter.data_ptr(), parameter._version
            self._lies = parameter.shape, parameter.stride(), parameter.dtype
            self.storage, self.blocks = in_blocks(cast(parameter), parameter)
        self.parameter, self.stream, self.casts, self.served = parameter, stream, {cast}, False
        self._cast, self._dtype = cast, _dtype(cast, parameter)
        self._states = [(state, state.look, state.turn, state.scale._version) for state in cast.live_states]
        lying, places = gathered(self.storage.tensors(), self.blocks)
        apart = {id(t): t for t in lying if t.untyped_storage()._cdata != self._storage}
        self.tensors = tuple(apart.values())
        self.look = _interned((places, *((t.shape, t.stride(), t.dtype) for t in self.tensors)))
        self._written = [(t, t._version) for t in self.tensors]

    def stands(self) -> bool:
        """Whether the cast is still valid."""
        parameter = self.parameter
        if (
            parameter._version != self._writes
            or parameter.data_ptr() != self._address
            or parameter.untyped_storage()._cdata != self._storage
            or (parameter.shape, parameter.stride(), parameter.dtype) != self._lies
        ):
            return False
        for tensor, writes in self._written:  # no generator: its calls cost as much as what is compared
            if tensor._version != writes:
                return False
        return not self._states or all(
            (s.look, s.turn, s.scale._version) == (look, turn, version) for s, look, turn, version in self._states
        )

    def serves(self, cast: Cast) -> bool:
        """Whether ``cast``, of the same weight, would make the same bytes and count the same amaxes."""
        mine = self._cast
        return (
            mine.quantizer == cast.quantizer
            and mine.counts == cast.counts
            and len(mine.live_states) == len(cast.live_states)
            and all(one is other for one, other in zip(mine.live_states, cast.live_states))
            and (not cast.live_states or mine.rule == cast.rule)
            and self._dtype == _dtype(cast, self.parameter)
        )


class KeptLook:
    """How a kept cast lies in memory, as one object for all that lie alike: looks of calls are compared by it."""

    def __init__(self, what: tuple[Any, ...]) -> None:
        self.what = what


_LOOKS: WeakValueDictionary[tuple[Any, ...], KeptLook] = WeakValueDictionary()


def _interned(what: tuple[Any, ...]) -> KeptLook:
    return _LOOKS.setdefault(what, KeptLook(what))


def _dtype(cast: Cast, parameter: torch.Tensor) -> torch.dtype:
    return cast.op.compute_dtype(cast.env, parameter)


class KeptWeights:
    """The casts that a :func:`kept_weights` scope keeps. Several threads may use it at once."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        self._parameters = {id(parameter): parameter for parameter in parameters if type(parameter) in PLAIN}
        self._entries: dict[int, list[_CachedCast]] = {}
        self._known: dict[tuple[Cast, int], _CachedCast] = {}
        self._vain: dict[int, int] = {}
        self._lock = threading.RLock()
        self._open = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.casts} casts, {self.nbytes} bytes)"

    @property
    def casts(self) -> int:
        """How many casts are kept."""
        return sum(map(len, list(self._entries.values())))

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the kept casts take beside the weights."""
        return sum(t.untyped_storage().nbytes() for t in {id(t): t for t in self.tensors()}.values())

    def tensors(self) -> Iterator[torch.Tensor]:
        """The memory of all kept casts."""
        for entries in list(self._entries.values()):
            for entry in entries:
                yield from entry.tensors

    def drop(self) -> None:
        """Forget all casts: the next call of each makes it anew. For writes that autograd does not count."""
        with self._lock:
            self._entries, self._known, self._vain = {}, {}, {}

    def _close(self) -> None:
        self._open = False
        self.drop()

    def owns(self, parameter: object) -> bool:
        """Whether casts of it are kept."""
        return self._open and self._parameters.get(id(parameter)) is parameter

    def find(self, cast: Cast, parameter: torch.Tensor, stream: int, *, make: bool) -> _CachedCast | None:
        """The kept cast of a parameter; if there is none and ``make`` is set, one is made and kept.

        None for a parameter that the scope does not own, and if keeping has been in vain: the weight changes before every call.
        """
        found = self._known.get((cast, stream))
        if found is not None and found.parameter is parameter and found.stands():
            found.served = True
            return found
        if not self.owns(parameter) or parameter.is_inference():
            return None
        with self._lock:
            return self._find(cast, parameter, stream, make=make)

    def _find(self, cast: Cast, parameter: torch.Tensor, stream: int, *, make: bool) -> _CachedCast | None:
        before = self._entries.get(id(parameter), [])
        there = [entry for entry in before if entry.stands()]
        found = next((entry for entry in there if entry.stream == stream and entry.serves(cast)), None)
        if not make:
            return found
        if found is None:
            self._forget(entry for entry in before if entry not in there)  # what is stale goes before its successor is made
            self._entries[id(parameter)] = there
            if self._is_vain(parameter, before):
                return None
            found = _CachedCast(cast, parameter, stream)
            self._forget(there[: -(CASTS - 1)])
            there = [*there[-(CASTS - 1) :], found]
        else:
            found.served = True
        if len(found.casts) >= PLANS:
            self._forget([found])
        found.casts.add(cast)
        if self._open:
            self._entries[id(parameter)] = there
            self._known[cast, stream] = found
        return found

    def _is_vain(self, parameter: torch.Tensor, before: list[_CachedCast]) -> bool:
        """Whether the weight changes before every call, so that this call should cast without keeping."""
        count = self._vain.get(id(parameter), 0)
        if any(entry.served for entry in before):
            count = 0
        elif before or count >= VAIN:
            count += 1
        self._vain[id(parameter)] = count
        return count >= VAIN and count % REST != 0

    def _forget(self, entries: Iterable[_CachedCast]) -> None:
        """No longer find these by identity."""
        for entry in entries:
            for cast in entry.casts:
                self._known.pop((cast, entry.stream), None)
            entry.casts.clear()


_owners: ContextVar[Mapping[int, KeptWeights]] = ContextVar("opfuse_kept_weights", default={})  # noqa: B039
"""By the identity of a parameter, the scope that keeps its casts. Never changed in place."""


@contextmanager
def kept_weights(model: nn.Module) -> Iterator[KeptWeights]:
    """Inside the block, casts of the weights of ``model`` are kept from call to call: over microbatches of a step, in serving.

    Every call has the bits that it has without the block: a weight is cast anew after a write that autograd counts, such as an
    optimizer's, if it lies in other memory, under another recipe, and once its delayed scale may have moved. Graphs of the block
    may be run backward after it. Casts take device memory, ``nbytes`` of what the block yields, at most :data:`CASTS` for each
    weight; all are freed at the end of the block. A block inside another one of the same weights keeps nothing. The gain is
    time of the device: to check a kept cast costs the host about as much as to launch a cast, so small models gain nothing. A
    weight that changes before every call, as under delayed scaling with a region for each call, is soon cast as without the
    block, and tried again from time to time.

    Some writes are not counted: through ``parameter.data``, through memory shared with numpy, by collectives on such tensors, by
    the replay of a CUDA graph. After these call ``drop()`` of what the block yields. That is why casts are kept only on request.

    Not kept are casts of weights that live quantized, of ops, quantizers and fused ops with code of your own, of weights that a
    converted module joins from several parameters, of DTensors, and in the capture of a CUDA graph. The block holds for its own
    thread, and for others that run in a copy of its context.

    PipelineError for what is no module. UnsupportedError under FSDP, whose gathers write parameters without a count.
    """
    if not isinstance(model, nn.Module):
        where, cure = "kept_weights", "pass the model whose weights stay as they are inside the block"
        raise PipelineError(describe(where, wanted="an nn.Module", got=type(model).__name__, cure=cure))
    _check_counted(model)
    outer = _owners.get()
    kept = KeptWeights(p for p in model.parameters() if not (id(p) in outer and outer[id(p)].owns(p)))
    reset = _owners.set({**outer, **dict.fromkeys(kept._parameters, kept)})
    try:
        yield kept
    finally:
        kept._close()
        with suppress(ValueError):  # in another context than it began in, whose value is not this one's
            _owners.reset(reset)


def sharded_part(model: nn.Module) -> str | None:
    """The first module under FSDP, whose parameters may be whole between two passes; None if there is none."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = tuple(getattr(fsdp, name) for name in ("FSDPModule", "FullyShardedDataParallel") if hasattr(fsdp, name))
    return next((name or type(module).__name__ for name, module in model.named_modules() if isinstance(module, sharded)), None)


def _check_counted(model: nn.Module) -> None:
    found = sharded_part(model)
    if found is not None:
        wanted, cure = "parameters whose writes autograd counts", "do without the block: FSDP gathers weights for each pass"
        raise UnsupportedError(describe(f"kept_weights of {found}", wanted=wanted, got="parameters under FSDP", cure=cure))


def held_casts(plan: Plan, segment: Segment, ops: Sequence[BasicOperation]) -> tuple[Held, ...]:
    """The kept casts of weights for a call of ``segment``, in the order of its nodes; missing ones are made now."""
    owners = _owners.get()
    if not owners or torch._C._len_torch_dispatch_stack():
        return ()
    nodes = plan.keepable.get(segment.nodes.start)
    if nodes is None:
        nodes = plan.keepable[segment.nodes.start] = tuple(_keepable(plan, segment, ops))
    held, run, streams = [], current_pass(), dict[torch.device, int | None]()
    for node, place in nodes:
        cast: Cast = plan.casts[node.index]
        slot, name = ops[node.op].parameter_places()[place]
        parameter = slot[name]
        owner = owners.get(id(parameter))
        if owner is None or parameter is None or (run is not None and cast.live_states):
            continue
        if (device := parameter.device) not in streams:
            streams[device] = _stream(device)
        if (stream := streams[device]) is None:
            continue
        found = owner.find(cast, parameter, stream, make=run is not Pass.LOOK)
        if found is not None:
            held.append(Held(node.index, found.storage, found.tensors, found.look, found.blocks))
    return tuple(held)


def _stream(device: torch.device) -> int | None:
    """The stream of a call; None while a CUDA graph is captured, in which a cast has no values yet."""
    if device.type != "cuda":
        return 0
    if torch._C._cuda_isCurrentStreamCapturing():
        return None
    return torch._C._cuda_getCurrentRawStream(device.index)


def scopes_of(model: nn.Module) -> list[KeptWeights]:
    """The active scopes that keep casts of weights of ``model``."""
    owners = _owners.get()
    return list(dict.fromkeys(owners[id(p)] for p in model.parameters() if id(p) in owners and owners[id(p)].owns(p)))


def _keepable(plan: Plan, segment: Segment, ops: Sequence[BasicOperation]) -> Iterator[tuple[Node, int]]:
    """Nodes that cast a weight, and which parameter of their op it is."""
    for group in segment.forward:
        node = plan.graph.nodes[group.nodes[0]]
        if len(group.nodes) == 1 and group.rule is None and group.opaque is None and node.is_cast and node.side:
            cast, op = plan.casts[node.index], ops[node.op]
            if has_own_methods(op) and is_own_quantizer(cast.quantizer) and not draws(cast.quantizer):
                yield node, op.parameter_names.index(cast.role)
