"""Delayed scaling: the state of one tensor, and when it is updated.

A cast uses the scale of the last update and max-accumulates its amax into slot 0 of the history. An update finds the new scale
from the history, and moves that by a slot; ``opfuse/kernels/delayed.py`` has its rule.

Forward states are updated when the outermost autocast region ends, backward states once after the backward pass that used
them; only states that were used by a call that records gradients: one under ``torch.no_grad()``, inside a region or around it,
casts with the scale that there is, moves none and counts no amax, so validation changes no training, whatever its data. A second
backward pass of the same graph (``retain_graph=True``) casts gradients with the scale that the first one updated, and updates it
again.

A parameter that lives quantized has no state: no call casts it. Every write does, with the scale of the amax of what is written.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Hashable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
import torch.distributed

from opfuse.errors import QuantizerError, RecipeError, describe
from opfuse.kernels.delayed import UpdateRule, delayed_update
from opfuse.recipes.autocast import at_outermost_exit, current_amax_group
from opfuse.recipes.builtin import DelayedScaling
from opfuse.recipes.recipe import QuantizerRole
from opfuse.tensors.quantizers import Float8Quantizer
from opfuse.tensors.quantizers.base import reduce_amax

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_FORWARD, _BACKWARD = QuantizerRole(tensor_type="input"), QuantizerRole(tensor_type="grad_output")


class DelayedScalingState:
    """Scale and amax history of one tensor of one op.

    scale: fp32 (1,), what a cast multiplies by, initially 1. amax_history: fp32 (length,), initially 0: slot 0 accumulates, the
    others hold earlier steps, the latest in the last slot. Both are written in place, so quantizers and graphs that hold them
    stay valid; only :meth:`resize` and :meth:`to` replace them.
    """

    def __init__(self, length: int = 1024, *, device: torch.device | str | None = None) -> None:
        self._begin(length, device)

    def _begin(self, length: int, device: torch.device | str | None) -> None:
        with torch.inference_mode(mode=False):  # what that mode makes, a later call could not write
            scale = torch.ones(1, dtype=torch.float32, device=device)
            self._hold(scale, torch.zeros(length, dtype=torch.float32, device=device))

    def _hold(self, scale: torch.Tensor, amax_history: torch.Tensor) -> None:
        """Take these tensors in place of those before, with the quantizers over them."""
        self.scale, self.amax_history = scale, amax_history
        self._quantizers: dict[tuple[torch.dtype, bool, bool, bool], Float8Quantizer] = {}

    def __getstate__(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.scale, self.amax_history

    def __setstate__(self, tensors: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._hold(*tensors)

    @property
    def amax(self) -> torch.Tensor:
        """Slot 0 of the history, shape (1,), sharing its memory: where casts accumulate."""
        return self.amax_history[:1]

    def quantizer(
        self, fp8_dtype: torch.dtype, *, rowwise: bool = True, columnwise: bool = True, counts: bool = True
    ) -> Float8Quantizer:
        """A quantizer over this state; during a recomputation, one over the scale of the first run that records nothing.

        counts: its amaxes enter the history.
        """
        active = _SNAPSHOT.get()
        if active is not None:
            scale, amax = active.snapshot.tensors(self, replaying=active.replaying)
            amax = amax if counts else torch.zeros_like(scale)
            return Float8Quantizer(scale, amax, fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        return self.live_quantizer(fp8_dtype, rowwise=rowwise, columnwise=columnwise, counts=counts)

    def live_quantizer(
        self, fp8_dtype: torch.dtype, *, rowwise: bool = True, columnwise: bool = True, counts: bool = True
    ) -> Float8Quantizer:
        """The quantizer over this state's own tensors; one for equal arguments, until the state gets others."""
        key = fp8_dtype, rowwise, columnwise, counts
        if key not in self._quantizers:
            with torch.inference_mode(mode=False):
                amax = self.amax if counts else torch.zeros_like(self.scale)
            self._quantizers[key] = Float8Quantizer(self.scale, amax, fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        return self._quantizers[key]

    def resize(self, length: int) -> None:
        """Cut the history to its first ``length`` slots or pad it with zeros; the scale stays."""
        old = self.amax_history
        if len(old) != length:
            with torch.inference_mode(mode=False):
                self._hold(self.scale, old.new_zeros(length))
                self.amax_history[: len(old)] = old[:length]

    def to(self, device: torch.device) -> None:
        """Move both tensors, if they are elsewhere; from the meta device, which has no values, to a new state."""
        if self.scale.device == device:
            return
        if self.scale.is_meta:
            self._begin(len(self.amax_history), device)
        else:
            with torch.inference_mode(mode=False):
                self._hold(self.scale.to(device), self.amax_history.to(device))

    def to_dict(self) -> dict[str, torch.Tensor]:
        """The state as plain tensors (clones)."""
        return {"scale": self.scale.clone(), "amax_history": self.amax_history.clone()}

    def load_dict(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Take over a state of :meth:`to_dict`, of any history length; QuantizerError when it is not one."""
        wanted = {"scale": saved.get("scale"), "amax_history": saved.get("amax_history")}
        shapes = {name: None if tensor is None else tuple(tensor.shape) for name, tensor in wanted.items()}
        scale, history = wanted["scale"], wanted["amax_history"]
        if scale is None or history is None or scale.numel() != 1 or history.ndim != 1 or not len(history):
            cure = "load what DelayedScalingState.to_dict() made"
            wants = "'scale' of shape (1,) and 'amax_history' of shape (length,)"
            raise QuantizerError(describe("delayed-scaling state", wanted=wants, got=shapes, cure=cure))
        self.resize(len(history))
        self.scale.copy_(scale.reshape(1))
        self.amax_history.copy_(history)


class DelayedScalingStates:
    """The states of one op by role. A role keeps its state for the life of the op, whatever recipes come and go."""

    def __init__(self) -> None:
        self._states: dict[str, DelayedScalingState] = {}

    def get(self, role: QuantizerRole, *, length: int, device: torch.device | str | None) -> DelayedScalingState:
        """The state of ``role``, made on first use with this history length."""
        key = _key(role)
        if key not in self._states:
            self._states[key] = DelayedScalingState(length, device=device)
        return self._states[key]

    def find(self, role: QuantizerRole) -> DelayedScalingState | None:
        """The state of ``role``, if there is one."""
        return self._states.get(_key(role))

    def __len__(self) -> int:
        return len(self._states)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Afterwards there are the states that there were, with the very tensors they had; writes to these are not undone."""
        before = {key: (state, state.scale, state.amax_history) for key, state in self._states.items()}
        try:
            yield
        finally:
            self._states = {key: state for key, (state, _, _) in before.items()}
            for state, scale, history in before.values():
                state._hold(scale, history)

    def __iter__(self) -> Iterator[DelayedScalingState]:
        return iter(self._states.values())

    def to_dict(self) -> dict[str, torch.Tensor]:
        """Every tensor under ``role/field``; empty when delayed scaling was never used."""
        return {f"{key}/{name}": tensor for key, state in self._states.items() for name, tensor in state.to_dict().items()}

    def load_dict(self, saved: Mapping[str, torch.Tensor], *, device: torch.device | str | None = None) -> None:
        """Take over :meth:`to_dict`; states that ``saved`` does not mention stay as they are."""
        for key in dict.fromkeys(name.rpartition("/")[0] for name in saved):
            fields = {name.rpartition("/")[2]: tensor for name, tensor in saved.items() if name.rpartition("/")[0] == key}
            self._states.setdefault(key, DelayedScalingState(device=device)).load_dict(fields)


def _key(role: QuantizerRole) -> str:
    return f"{role.name}:{role.tensor_type}" if role.name else role.tensor_type


class Snapshot:
    """Scales that a checkpointed forward used, so that its recomputation casts the same bits and counts no amax twice.

    Nested checkpoints share the outermost snapshot. Whatever runs inside a recomputation is one: it records nothing.
    """

    def __init__(self) -> None:
        self._scales: dict[DelayedScalingState, torch.Tensor] = {}

    @classmethod
    def current(cls) -> Snapshot:
        """The snapshot of the checkpoint around, or a new one."""
        active = _SNAPSHOT.get()
        return cls() if active is None else active.snapshot

    def tensors(self, state: DelayedScalingState, *, replaying: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and amax for a cast: the live ones while recording; the recorded scale and a spare amax while replaying."""
        if replaying:
            return self._scales.get(state, state.scale), torch.zeros_like(state.scale)
        if state not in self._scales:
            self._scales[state] = state.scale.clone()
        return state.scale, state.amax

    @contextlib.contextmanager
    def _active(self, *, replaying: bool) -> Iterator[None]:
        token = _SNAPSHOT.set(_Active(self, replaying))
        try:
            yield
        finally:
            _SNAPSHOT.reset(token)

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Around the first run of a checkpointed forward."""
        return self._active(replaying=is_recomputing())

    def replaying(self) -> contextlib.AbstractContextManager[None]:
        """Around its recomputation."""
        return self._active(replaying=True)


class _Active(NamedTuple):
    snapshot: Snapshot
    replaying: bool


_SNAPSHOT: ContextVar[_Active | None] = ContextVar("opfuse_scale_snapshot", default=None)


@dataclass(frozen=True, eq=False)
class _Use:
    """How a state was last used: what its update needs."""

    recipe: DelayedScaling
    element_max: float
    group: ProcessGroup | None

    @property
    def rule(self) -> UpdateRule:
        return UpdateRule(self.element_max, self.recipe.margin, self.recipe.amax_compute_algo)


class _Pending:
    """States used since the last update, in order of first use."""

    def __init__(self) -> None:
        self._uses: dict[DelayedScalingState, _Use] = {}

    def add(self, state: DelayedScalingState, use: _Use) -> None:
        self._uses[state] = use

    def __call__(self) -> None:
        """Update every state once. Ranks of a group must have used the same states in the same order."""
        with torch.no_grad():
            _reduce_amaxes(self._uses)
            for _, states in _grouped({state: state.scale.device for state in self._uses}):
                histories, scales = [state.amax_history for state in states], [state.scale for state in states]
                delayed_update(histories, scales, [self._uses[state].rule for state in states])
        self._uses.clear()


_Key = TypeVar("_Key", bound=Hashable)


def _grouped(keys: Mapping[DelayedScalingState, _Key]) -> Iterator[tuple[_Key, list[DelayedScalingState]]]:
    """States by key, both in order of first appearance."""
    groups: dict[_Key, list[DelayedScalingState]] = {}
    for state, key in keys.items():
        groups.setdefault(key, []).append(state)
    yield from groups.items()


def _reduce_amaxes(uses: Mapping[DelayedScalingState, _Use]) -> None:
    """Slot 0 of every history becomes its maximum over the ranks of its group: one collective a group."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    shared = {state: (use.group, state.scale.device) for state, use in uses.items() if use.recipe.reduce_amax}
    for (group, _), states in _grouped(shared):
        amaxes = reduce_amax(torch.cat([state.amax for state in states]), group)
        torch._foreach_copy_([state.amax for state in states], list(torch.split(amaxes, 1)))


def is_recomputing() -> bool:
    """Whether this is a recomputation, which records nothing."""
    active = _SNAPSHOT.get()
    return active is not None and active.replaying


def touch_forward(state: DelayedScalingState, recipe: DelayedScaling) -> None:
    """Have ``state``, which a cast of a forward pass that records gradients uses, updated when the outermost region ends.

    Whether gradients are recorded the caller knows: inside an autograd.Function torch says no. Nothing in a recomputation;
    RecipeError outside any region.
    """
    if is_recomputing():
        return
    element = recipe.fp8_format.element(_FORWARD)
    at_outermost_exit("delayed scaling", _Pending).add(state, _Use(recipe, element.max, current_amax_group()))


_BACKWARD_PASSES: weakref.WeakValueDictionary[int, _Pending] = weakref.WeakValueDictionary()
"""Pending updates by backward pass. The engine's callback alone keeps them alive: a pass that fails takes its own along."""


def touch_backward(state: DelayedScalingState, recipe: DelayedScaling, *, group: ProcessGroup | None = None) -> None:
    """Have ``state``, which a cast of a gradient uses, updated once after the running backward pass.

    Must be called from inside the pass, where ``autocast`` is over: ``group`` is the ``current_amax_group()`` of the forward.
    The engine runs the update after the last node of the pass. RecipeError outside a backward pass.
    """
    task = torch._C._current_graph_task_id()
    if task < 0:
        cure = "call it from the backward of an autograd.Function"
        raise RecipeError(describe("touch_backward", wanted="a running backward pass", got=None, cure=cure))
    with _LOCK:
        pending = _BACKWARD_PASSES.get(task)
        if pending is None:
            pending = _BACKWARD_PASSES[task] = _Pending()
            torch.autograd.Variable._execution_engine.queue_callback(pending)
        pending.add(state, _Use(recipe, recipe.fp8_format.element(_BACKWARD).max, group))


_LOCK = threading.Lock()
"""The engine runs one thread a device, and a pass may use states on several."""
