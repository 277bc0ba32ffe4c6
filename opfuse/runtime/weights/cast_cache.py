"""Casts of weights that are kept from call to call, inside a scope that the user opens.

A cast is found by the parameter, the quantizer and the stream, once for each plan; later calls compare. It is valid while the
parameter lies in the memory that was cast and autograd has counted no write to it; under delayed scaling also while its scale
stays and its amax counts for the same update. Otherwise a call casts anew, so every call has the bits that it has without the
scope. Fused optimizers write without a count, so whatever an optimizer that steps has is taken as written. Casts with code that
is not the library's, with random numbers or with other ranks are not kept.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from opfuse.compiler.graph import Node
from opfuse.compiler.plan import Plan, Segment
from opfuse.core.cast import Cast
from opfuse.core.operation import BasicOperation
from opfuse.errors import PipelineError, UnsupportedError, describe, number_of
from opfuse.recipes.passes import Pass, current_pass
from opfuse.runtime.replay.recorder import PLAIN
from opfuse.runtime.replay.user_code import is_library_op
from opfuse.runtime.weights.cached_cast import CachedCast, CachedLayout, Unchanged, interned, settle
from opfuse.runtime.weights.packed import unpack
from opfuse.tensors.quantizers.base import is_repeatable
from opfuse.tensors.storage import QuantizedStorage
from opfuse.torch_private.devices import raw_stream
from opfuse.torch_private.dispatch import active_modes

CASTS = 4
"""Casts of one weight that a scope keeps, by recipe, planes and stream. Of more, the oldest is dropped."""

VAIN, REST = 3, 32
"""After VAIN kept casts of a weight in a row that served no second call, only every REST-th call keeps its cast."""


class PrecomputedCast(NamedTuple):
    """A cast that a segment finds made. node: the quantize node that need not run.

    tensors: the memory of the storage without the weight's own, ``blocks`` first. layout: the structure of the storage, of a cast
    that is not kept.
    """

    node: int
    storage: QuantizedStorage
    tensors: tuple[torch.Tensor, ...]
    layout: tuple[Any, ...] | None = None
    blocks: tuple[torch.Tensor, ...] = ()

    def unpack(self) -> QuantizedStorage:
        """The storage over views of the blocks that are made now, for a recorder that knows the blocks."""
        return unpack(self.storage, self.blocks) if self.blocks else self.storage


class CachedCasts(NamedTuple):
    """Those that a segment finds, in the order of its nodes; their memory; how that lies, to be compared."""

    casts: tuple[PrecomputedCast, ...] = ()
    tensors: tuple[torch.Tensor, ...] = ()
    layout: CachedLayout | None = None

    @classmethod
    def of(cls, found: Mapping[int, CachedCast]) -> CachedCasts:
        """The cached casts, from casts by node."""
        tensors = {id(tensor): tensor for cast in found.values() for tensor in cast.tensors}
        at = {key: i for i, key in enumerate(tensors)}
        layout = interned(
            tuple((node, cast.layout, *(at[id(tensor)] for tensor in cast.tensors)) for node, cast in found.items())
        )
        casts = (PrecomputedCast(node, cast.storage, cast.tensors, blocks=cast.blocks) for node, cast in found.items())
        return cls(tuple(casts), tuple(tensors.values()), layout)


NO_CASTS = CachedCasts()


class _CastRequest(NamedTuple):
    """A cast that a call needs."""

    node: Node
    cast: Cast
    parameter: torch.Tensor
    stream: int


class KeptWeights:
    """The casts that a :func:`kept_weights` scope keeps. Several threads may use it at once."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        self._parameters = {id(parameter): parameter for parameter in parameters if type(parameter) in PLAIN}
        self._entries: dict[int, list[CachedCast]] = {}
        self._vain: dict[int, int] = {}
        self._lock = threading.RLock()
        self._open = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({number_of(self.casts, 'cast')}, {number_of(self.nbytes, 'byte')})"

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
            entries, self._entries, self._vain = self._entries, {}, {}
            _end(entry for casts in entries.values() for entry in casts)

    def stepped(self, optimizer: Optimizer, *_: Any) -> None:
        """An optimizer steps, or has stepped: a fused one writes its parameters without a count."""
        with self._lock:
            for parameter in (p for group in optimizer.param_groups for p in group["params"] if self.owns(p)):
                entries = self._entries.get(id(parameter), [])
                _end(entries)
                for entry in entries:
                    entry.unchanged.changed()

    def _close(self) -> None:
        self._open = False
        self.drop()

    def owns(self, parameter: object) -> bool:
        """Whether casts of it are kept."""
        return self._open and self._parameters.get(id(parameter)) is parameter

    def find(self, wanted: Sequence[_CastRequest], *, make: bool) -> list[CachedCast | None]:
        """The kept casts of parameters that the scope owns; missing ones are made and kept if ``make`` is set.

        None also where keeping has been in vain: the weight changes before every call. Casts that are made together, for one op,
        lie in the same blocks.
        """
        with self._lock:
            there = {id(request.parameter): self._entries.get(id(request.parameter), []) for request in wanted}
            served = {key: [entry.served for entry in entries] for key, entries in there.items()}
            stale = [entry for entries in there.values() for entry in entries if not entry.unchanged]
            there = {key: [entry for entry in entries if entry not in stale] for key, entries in there.items()}
            if make:
                _end(stale)  # what is stale goes before its successor is made
                stale.clear()
                self._entries |= there
                there = self._with_missing(wanted, there, served)
            return [_serving(there[id(request.parameter)], request) for request in wanted]

    def _with_missing(
        self, wanted: Sequence[_CastRequest], there: Mapping[int, list[CachedCast]], served: Mapping[int, list[bool]]
    ) -> dict[int, list[CachedCast]]:
        """The casts ``there``, and new ones. served: of each cast of a parameter before this call, whether one has found it."""
        every = {key: [*entries] for key, entries in there.items()}
        new: dict[tuple[int, torch.device], list[CachedCast]] = {}
        for request in wanted:
            key = id(request.parameter)
            if (found := _serving(every[key], request)) is not None:
                found.served = True
            elif not self._is_vain(key, served[key]):
                entry = CachedCast(request.cast, request.parameter, request.stream)
                every[key].append(entry)
                new.setdefault((request.node.op, request.parameter.device), []).append(entry)
        for made in new.values():
            settle(made)
        if self._open:
            _end(entry for entries in every.values() for entry in entries[:-CASTS])
            self._entries |= {key: entries[-CASTS:] for key, entries in every.items()}
        return every

    def bound(self, owners: Mapping[int, KeptWeights], casts: Mapping[int, CachedCast]) -> _Bound | None:
        """The casts that a segment has found, by node; None if one has gone since."""
        with self._lock:
            valid = all(cast in self._entries.get(id(cast.parameter), ()) for cast in casts.values())
            return _Bound(owners, casts) if valid else None

    def _is_vain(self, key: int, served: Sequence[bool]) -> bool:
        """Whether the weight changes before every call, so that this call should cast without keeping."""
        count = self._vain.get(key, 0)
        if any(served):
            count = 0
        elif served or count >= VAIN:
            count += 1
        self._vain[key] = count
        return count >= VAIN and count % REST != 0


def _serving(entries: Sequence[CachedCast], wanted: _CastRequest) -> CachedCast | None:
    return next((entry for entry in entries if entry.serves(wanted.cast, wanted.stream)), None)


def _end(entries: Iterable[CachedCast]) -> None:
    """No call shall find these, and nothing hold them."""
    for entry in entries:
        for ref in entry.users.valuerefs():  # a list at once, which other threads may add to meanwhile
            if (bound := ref()) is not None:
                bound.end()


_owners: ContextVar[Mapping[int, KeptWeights]] = ContextVar("opfuse_kept_weights", default={})  # noqa: B039
"""By the identity of a parameter, the scope that keeps its casts. Never changed in place."""

keeps_casts = _owners.get
"""What is true if a scope around keeps casts."""


@contextmanager
def kept_weights(model: nn.Module) -> Iterator[KeptWeights]:
    """Inside the block, casts of the weights of ``model`` are kept from call to call: over microbatches of a step, in serving.

    Every call has the bits that it has without the block: a weight is cast anew after a write that autograd counts, after a step
    of an optimizer that has it, if it lies in other memory, under another recipe, and once its delayed scale may have moved.
    Graphs of the block may be run backward after it. Casts take device memory, ``nbytes`` of what the block yields, at most
    :data:`CASTS` for each weight; all are freed at the end of the block. A block inside another one of the same weights keeps
    nothing. The gain is time of the device: a call compares all weights of a layer at once, for which the host takes about as
    long as for launching their casts. A weight that changes before every call, as under delayed scaling with a region for each
    call, is soon cast as without the block, and tried again from time to time. While casts of a layer are made, they take half as
    much memory again.

    Some writes are not counted: through ``parameter.data``, through memory shared with numpy, by collectives on such tensors, by
    kernels that torch does not know, by the replay of a CUDA graph. After these call ``drop()`` of what the block yields. That is
    why casts are kept only on request.

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
    # Before a step, which may fail halfway, and after it, since its closure may have made casts.
    steps = [register(kept.stepped) for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)]
    try:
        yield kept
    finally:
        for each in steps:
            each.remove()
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


class _Bound:
    """What a segment finds, while nothing has changed: compared for all of its weights at once."""

    def __init__(self, owners: Mapping[int, KeptWeights], found: Mapping[int, CachedCast]) -> None:
        entries = [*found.values()]
        unchanged = Unchanged.together([entry.unchanged for entry in entries])
        self._what: Any = owners, [id(entry.parameter) for entry in entries], unchanged, CachedCasts.of(found)
        self._new = [entry for entry in entries if not entry.served]
        for entry in entries:
            entry.users[id(self)] = self

    def casts(self, owners: Mapping[int, KeptWeights], weights: Sequence[object], run: Pass | None) -> CachedCasts | None:
        """The cached casts; None if scopes or weights have changed."""
        if (what := self._what) is None:
            return None
        mine, numbers, unchanged, casts = what
        if owners is not mine or [*map(id, weights)] != numbers or (run is not None and unchanged.is_delayed) or not unchanged:
            return None
        while self._new:
            self._new.pop().served = True
        found: CachedCasts = casts
        return found

    def end(self) -> None:
        """Hold nothing more."""
        self._what, self._new = None, []


class _Keepable:
    """The casts of a segment that may be kept. bound: what was found on a stream."""

    def __init__(self, plan: Plan, segment: Segment, ops: Sequence[BasicOperation]) -> None:
        found = [*_keepable(plan, segment, ops)]
        self._places = {node.op: [place for other, place in found if other.op == node.op] for node, _ in found}
        self.casts = [(node, plan.casts[node.index]) for op in self._places for node, _ in found if node.op == op]
        self.bound: dict[int | None, _Bound] = {}

    def weights(self, ops: Sequence[BasicOperation]) -> list[torch.Tensor | None]:
        """What they cast, in their order."""
        found: list[torch.Tensor | None] = []
        for op, places in self._places.items():
            slots = ops[op].parameter_slots()
            found += [held[key] for _, held, key in map(slots.__getitem__, places)]
        return found


def cached_casts(plan: Plan, segment: Segment, ops: Sequence[BasicOperation]) -> CachedCasts:
    """The casts of weights that scopes around keep, for a call of ``segment``; missing ones are made now."""
    if active_modes():
        return NO_CASTS
    owners = _owners.get()
    keepable: _Keepable | None = segment.keepable
    if keepable is None:
        keepable = segment.keepable = _Keepable(plan, segment, ops)
    weights = keepable.weights(ops)
    if not weights or weights[0] is None:
        return NO_CASTS
    run, stream = current_pass(), _stream(weights[0].device)
    bound = keepable.bound.get(stream)
    found = None if bound is None else bound.casts(owners, weights, run)
    return _looked_up_casts(keepable, owners, weights, run) if found is None else found


def _looked_up_casts(
    keepable: _Keepable, owners: Mapping[int, KeptWeights], weights: Sequence[torch.Tensor | None], run: Pass | None
) -> CachedCasts:
    """Slow path of :func:`cached_casts`: look up each weight; if all hit, remember the set."""
    streams = {device: _stream(device) for device in {weight.device for weight in weights if weight is not None}}
    wanted: dict[KeptWeights, list[_CastRequest]] = {}
    for (node, cast), parameter in zip(keepable.casts, weights):
        owner = owners.get(id(parameter))
        if owner is None or parameter is None or not owner.owns(parameter) or parameter.is_inference():
            continue
        if (stream := streams[parameter.device]) is not None and not (run is not None and cast.live_states):
            wanted.setdefault(owner, []).append(_CastRequest(node, cast, parameter, stream))
    found: dict[int, CachedCast] = {}
    for owner, requests in wanted.items():
        casts = owner.find(requests, make=run is not Pass.DRY_RUN)
        found |= {one.node.index: cast for one, cast in zip(requests, casts) if cast is not None}
    if len(found) == len(keepable.casts) and len(wanted) == len(streams) == 1:
        ((scope, _),), ((_, stream),) = wanted.items(), streams.items()
        if bound := scope.bound(owners, found):
            keepable.bound[stream] = bound
    return CachedCasts.of(found) if found else NO_CASTS


def _stream(device: torch.device) -> int | None:
    """The stream of a call; None while a CUDA graph is captured, in which a cast has no values yet."""
    if device.type != "cuda":
        return 0
    if torch.cuda.is_current_stream_capturing():
        return None
    return raw_stream(device.index)


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
            if is_library_op(op) and is_repeatable(cast.quantizer):
                yield node, op.parameter_names.index(cast.role)
