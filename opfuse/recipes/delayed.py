"""Delayed scaling: the state of one tensor.

A cast uses the scale of the last update and max-accumulates its amax into slot 0 of the history. An update finds the new scale
from the history, and moves that by a slot; ``opfuse/numerics/delayed.py`` has its rule.

A state knows which rule its scale was found under. A training call under another element or margin converts the scale, by the
ratio of what the two rules make of one amax, and under another history length cuts the history or pads it; a call that records no
gradients casts with a converted copy.

A parameter that lives quantized has no state: no call casts it. Every write does, with the scale of the amax of what is written.

All values of such a parameter are known when it is written. The scale of an earlier step would clip what has grown (a weight of
0.707 became 0.177 in a test) and save one read of what is written anyway.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from opfuse.errors import OpfuseWarning, RecipeError, describe, notice, number_of
from opfuse.kernels.engine.launch import check_capture
from opfuse.numerics.delayed import UpdateRule
from opfuse.numerics.scalars import FLT_MAX
from opfuse.recipes.autocast import scales_of_region
from opfuse.recipes.builtin import DelayedScaling
from opfuse.recipes.passes import Pass, current_pass
from opfuse.recipes.recipe import QuantizerRole
from opfuse.recipes.saved_states import SavedState, checked_states, saved_state, unused_state
from opfuse.recipes.standing import Standing
from opfuse.tensors.quantizers import Float8Quantizer
from opfuse.tensors.quantizers.ranks import in_distributed_run

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LEAST = 2.0**-149
"""The least fp32 above 0."""


class DelayedScalingState:
    """Scale and amax history of one tensor of one op.

    scale: fp32 (1,), what a cast multiplies by, initially 1. amax_history: fp32 (length,), initially 0: slot 0 accumulates, the
    others hold earlier steps, the latest in the last slot. left_out: int32 (1,), how many amaxes were not finite and so entered
    no history. All are written in place, so quantizers and graphs that hold them stay valid; only :meth:`adopt`, for another
    length, and :meth:`to` replace them.

    rule: what the scale was found under; None while it is the initial one, or where a file does not tell. tensors_id: another
    object whenever it holds other tensors, rule or recipe than before. pending: the update that its amaxes count for. generation:
    how often counting for an update began, ended or was dropped: while it stands, so does the scale, and what was counted still
    counts. bound: the last update of states of which this was the first. agreed: whether ranks that share its amax were found to
    mean the same tensor, since it was made or loaded.
    """

    def __init__(self, length: int = 1024, *, device: torch.device | str | None = None) -> None:
        self._begin(length, device)

    def _begin(self, length: int, device: torch.device | str | None) -> None:
        with torch.inference_mode(mode=False):  # what that mode makes, a later call could not write
            scale = torch.ones(1, dtype=torch.float32, device=device)
            history = torch.zeros(length, dtype=torch.float32, device=device)
            self._set(scale, history, torch.zeros(1, dtype=torch.int32, device=device), None)
        self._warned_left_out, self.generation, self.agreed = 0, 0, False
        self.pending: weakref.ref[Any] | None = None

    def _set(self, scale: torch.Tensor, amax_history: torch.Tensor, left_out: torch.Tensor, rule: UpdateRule | None) -> None:
        """Take these in place of those before, with the quantizers over them."""
        self.scale, self.amax_history, self.left_out, self.rule = scale, amax_history, left_out, rule
        self._quantizers: dict[tuple[torch.dtype, bool, bool, bool], Float8Quantizer] = {}
        self._adopted: DelayedScaling | None = None
        self.bound: BoundUpdate | None = None
        self.tensors_id = object()

    def _fields(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, UpdateRule | None]:
        return self.scale, self.amax_history, self.left_out, self.rule

    def __getstate__(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, UpdateRule | None]:
        self.drop_unfinished()
        return self._fields()

    def __setstate__(self, held: tuple[torch.Tensor, torch.Tensor, torch.Tensor, UpdateRule | None]) -> None:
        self._set(*held)
        self._warned_left_out, self.generation, self.agreed, self.pending = 0, 0, False, None

    @property
    def trained(self) -> bool:
        """Whether a training call cast with it, here or before it was saved."""
        return self.rule is not None or self._adopted is not None

    @property
    def amax(self) -> torch.Tensor:
        """Slot 0 of the history, shape (1,), sharing its memory: where casts accumulate."""
        return self.amax_history[:1]

    def quantizer(
        self,
        fp8_dtype: torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        counts: bool = True,
        rule: UpdateRule | None = None,
    ) -> Float8Quantizer:
        """A quantizer over this state; in a recomputation, over the scale of the first run.

        counts: whether its amaxes enter the history; never in a recomputation. rule: the rule that the scale shall fit (None: the
        state's own); for another rule the quantizer has a converted copy of the scale, and counts nothing. RecipeError if a
        recomputation casts what the first run did not.
        """
        run = current_pass()
        if run is Pass.RECOMPUTE:
            scale, amax = self._saved_scale(rule)
            return Float8Quantizer(scale, amax, fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        scale = self._scale_for(rule)
        if run in (Pass.FIRST, Pass.TRAINED):
            self._save_scale(rule, scale)
        if scale is self.scale and run is not Pass.DRY_RUN:
            return self.live_quantizer(fp8_dtype, rowwise=rowwise, columnwise=columnwise, counts=counts)
        return Float8Quantizer(scale, torch.zeros_like(scale), fp8_dtype, rowwise=rowwise, columnwise=columnwise)

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

    def _save_scale(self, rule: UpdateRule | None, scale: torch.Tensor) -> None:
        """Keep the scale of a cast, and a spare amax, for a recomputation, which must run no other operations than this run."""
        scales, key = scales_of_region(), (self, rule and rule[:2])
        if scales is not None and key not in scales:
            with torch.inference_mode(mode=False):
                scales[key] = scale.clone(), torch.zeros_like(scale)

    def _saved_scale(self, rule: UpdateRule | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The scale that the first run cast with, and a spare amax."""
        scales = scales_of_region()
        entry = None if scales is None else scales.get((self, rule and rule[:2]))
        if entry is None:
            wanted, cure = "the casts of the first run", "checkpoint a function that does the same whenever it is called"
            raise RecipeError(describe("recomputation", wanted=wanted, got="a cast that it did not make", cure=cure))
        scale, amax = entry
        return scale, amax

    def updated(self, rule: UpdateRule) -> None:
        """Note that an update found the scale under another ``rule`` than before."""
        self.rule = rule
        self.tensors_id = object()

    def drop_unfinished(self) -> None:
        """Drop the amaxes of a backward pass that failed, whose update nobody holds any more."""
        if self.pending is not None and self.pending() is None:
            self.pending = None
            self.generation += 1
            with torch.no_grad():
                self.amax.zero_()

    # -- under another recipe ------------------------------------------------------------------------------------------------

    def adopt(self, recipe: DelayedScaling, rule: UpdateRule, *, where: str = "a cast") -> None:
        """Serve ``recipe`` under its ``rule`` from now on: convert the scale, and cut or pad the history.

        UnsupportedError while a CUDA graph is captured, which would do that again whenever it is replayed. where: the cast.
        """
        if self._adopted is recipe:
            return
        scale = self._scale_for(rule)
        if scale is not self.scale or len(self.amax_history) != recipe.amax_history_len:
            cure = "run a training step under this recipe before the capture"
            check_capture(f"delayed scaling of {where}", got="a state that is converted to another recipe", cure=cure)
        if scale is not self.scale:
            self.scale.copy_(scale)
            self.rule = rule
        self.resize(recipe.amax_history_len)
        self._adopted = recipe
        self.tensors_id = object()

    def _scale_for(self, rule: UpdateRule | None) -> torch.Tensor:
        """The scale itself if it was found under ``rule``, or is the initial one; else a copy converted to ``rule``.

        All FP8 maxima are 7 times a power of two. So the ratio of two rules is a power of two, and the copy is exact, except at
        the ends of fp32's range.
        """
        old = self.rule
        if rule is None or old is None or rule is old or rule[:2] == old[:2]:
            return self.scale
        power = max(-600, min(600, old.margin - rule.margin))
        ratio = rule.fp8_max / old.fp8_max * 2.0**power
        return (self.scale.double() * ratio).clamp(_LEAST, FLT_MAX).float()

    def resize(self, length: int) -> None:
        """Cut the history to its first ``length`` slots or pad it with zeros; the scale stays."""
        old = self.amax_history
        if len(old) != length:
            with torch.inference_mode(mode=False):
                self._set(self.scale, old.new_zeros(length), self.left_out, self.rule)
                self.amax_history[: len(old)] = old[:length]

    def copy_from(self, other: DelayedScalingState) -> None:
        """Take over the values of ``other``, converted to this state's rule and length, in the memory that this state has."""
        with torch.no_grad():
            self.scale.copy_(other._scale_for(self.rule))
            length = min(len(self.amax_history), len(other.amax_history))
            self.amax_history.zero_()[:length] = other.amax_history[:length]
            self.left_out.copy_(other.left_out)

    def to(self, device: torch.device) -> None:
        """Move all tensors, if they are elsewhere; from the meta device, which has no values, to a new state."""
        if self.scale.device == device:
            return
        if self.scale.is_meta:
            self._begin(len(self.amax_history), device)
        else:
            with torch.inference_mode(mode=False):
                self._set(self.scale.to(device), self.amax_history.to(device), self.left_out.to(device), self.rule)

    # -- to and from files -----------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, torch.Tensor]:
        """The state as plain tensors (clones): :func:`opfuse.recipes.saved_states.saved_state`."""
        self.drop_unfinished()
        return saved_state(self.scale, self.amax_history, self.rule)

    def load_dict(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Take over a state of :meth:`to_dict`, of any history length; QuantizerError when it is not one, and nothing changed."""
        for state in checked_states({f"/{name}": value for name, value in saved.items()}, where="delayed-scaling state").values():
            self._load(state)

    def _load(self, saved: SavedState) -> None:
        device = saved.scale.device if self.scale.is_meta else self.scale.device
        with torch.inference_mode(mode=False), torch.no_grad():
            if self.scale.is_meta:
                self._begin(len(saved.amax_history), device)
            self.resize(len(saved.amax_history))
            self.scale.copy_(saved.scale)
            self.amax_history.copy_(saved.amax_history)
            self.left_out.zero_()
        self.rule, self._adopted, self._warned_left_out, self.pending, self.agreed = saved.rule, None, 0, None, False
        self.tensors_id = object()


THIS_RANK: Any = "this rank"
"""In place of a process group: amaxes that no other rank shares."""


class LastUse(NamedTuple):
    """How a state was last used: what its update needs.

    group: the ranks that share its amax, if it is ``shared``; None is torch's default group; or THIS_RANK. name: of the cast, and
    where it stands in the model.
    """

    rule: UpdateRule
    group: ProcessGroup | None
    shared: bool
    name: str

    @classmethod
    def under(
        cls,
        recipe: DelayedScaling,
        rule: UpdateRule,
        group: ProcessGroup | None,
        name: str,
        standing: Standing = Standing(),  # noqa: B008
    ) -> LastUse:
        """A use now. Whether there are ranks is in the key of a plan, so whoever keeps it for the plan's calls may.

        RecipeError for a stage of a pipeline over ranks that would share its amaxes with all of them, and so with other layers.
        """
        shared = recipe.reduce_amax and in_distributed_run() and group is not THIS_RANK
        if shared and group is None and standing.stage and dist.get_world_size() > 1:
            cure = "give autocast an amax_reduction_group of the ranks that run this stage, or set reduce_amax=False"
            got = f"torch's default group, in {standing.stage}"
            raise RecipeError(describe(f"delayed scaling of {name}", wanted="ranks that have this layer", got=got, cure=cure))
        return cls(rule, group, shared, f"{name} at {standing}" if str(standing) else name)


class BoundUpdate(NamedTuple):
    """The update of several states as ``calls`` in order, valid for these ``tensors_ids`` and last ``uses`` of the states."""

    tensors_ids: list[object]
    uses: list[LastUse]
    calls: list[Callable[[], object]]


class DelayedScalingStates:
    """The states of one op by role. A role keeps its state for the life of the op, whatever recipes come and go."""

    tracked: bool = False
    """Whether the op was told that it trains under delayed scaling."""

    unread: bool = False
    """Whether the op's own state dict, which has no keys for them, was filled and loaded: what filled it may have had them."""

    def __init__(self) -> None:
        self._states: dict[str, DelayedScalingState] = {}

    @property
    def saved(self) -> bool:
        """Whether the op's state dict has them: it was told, or trained so."""
        return self.tracked or any(state.trained for state in self)

    def get(self, role: QuantizerRole, *, length: int, device: torch.device | str | None) -> DelayedScalingState:
        """The state of ``role``, made on first use with this history length."""
        key = _key(role)
        if self.unread:
            self.unread = False
            got = "a state dict without the keys of states, which was then filled and loaded"
            cure = "call opfuse.prepare_delayed(model, recipe) before model.state_dict(), for states of the checkpoint to be read"
            warnings.warn(describe("delayed scaling", wanted="its states", got=got, cure=cure), OpfuseWarning, stacklevel=2)
        if key not in self._states:
            self._states[key] = DelayedScalingState(length, device=device)
        return self._states[key]

    def find(self, role: QuantizerRole) -> DelayedScalingState | None:
        """The state of ``role``, if there is one."""
        return self._states.get(_key(role))

    def part(self, slots: Collection[QuantizerRole]) -> DelayedScalingStates:
        """The states of ``slots``, not copies of them, for an op that stands for a part of this one."""
        made, keys = DelayedScalingStates(), set(map(_key, slots))
        made._states = {key: state for key, state in self._states.items() if key in keys}
        made.tracked, made.unread = self.tracked, self.unread
        return made

    def __len__(self) -> int:
        return len(self._states)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore, at the end, the states that there are now, with their very tensors; writes to these are not undone."""
        before = {key: (state, state._fields()) for key, state in self._states.items()}
        try:
            yield
        finally:
            self._states = {key: state for key, (state, _) in before.items()}
            for state, held in before.values():
                state._set(*held)

    def __iter__(self) -> Iterator[DelayedScalingState]:
        return iter(self._states.values())

    def to_dict(
        self, slots: Collection[QuantizerRole] = (), *, device: torch.device | str | None = None
    ) -> dict[str, torch.Tensor]:
        """Every tensor under ``role/field``. slots: roles that are there also if nothing was cast for them yet, on ``device``."""
        named = {_key(role): unused_state(device) for role in slots} if slots else {}
        named |= {key: state.to_dict() for key, state in self._states.items()}
        return {f"{key}/{name}": tensor for key, fields in named.items() for name, tensor in fields.items()}

    def load_dict(
        self,
        saved: object,
        *,
        slots: Collection[QuantizerRole] | None = None,
        elsewhere: Collection[QuantizerRole] = (),
        device: torch.device | str | None = None,
        where: str = "delayed-scaling states",
    ) -> None:
        """Take over :meth:`to_dict`; states that ``saved`` does not mention stay as they are.

        All or nothing: QuantizerError, and no state changed, for anything that is no such dictionary, for tensors of other
        shapes or without the memory that these take, scales that are not finite and positive, and roles that are not among
        ``slots`` (None: any) or ``elsewhere``, which are left out. New states are on ``device``.
        """
        if elsewhere and isinstance(saved, Mapping):
            others = set(map(_key, elsewhere))
            saved = {name: tensor for name, tensor in saved.items() if str(name).rpartition("/")[0] not in others}
        known = None if slots is None else [*map(_key, slots), *self._states]
        self.unread = False
        for key, state in checked_states(saved, known=known, where=where).items():
            self.tracked |= state.used
            if key in self._states or state.used:
                self._states.setdefault(key, DelayedScalingState(len(state.amax_history), device=device))._load(state)

    def warn_of_left_out(self, where: str) -> None:
        """OpfuseWarning for amaxes that were not finite since the last time that this was asked. Waits for the device.

        where: the op; empty if roles have its path.
        """
        for key, state in self._states.items():
            count = 0 if state.left_out.is_meta else int(state.left_out.item())
            if count > state._warned_left_out:
                more = count - state._warned_left_out
                were = f"{number_of(more, 'amax')} {'was' if more == 1 else 'were'} infinite or NaN"
                got = f"{were}, and left out of the history that scales come from"
                cure = (
                    "if losses were not finite either, find the op by opfuse.watch(model, every=1), which names it and the step"
                )
                warnings.warn(notice(f"{where} {key}".strip(), got=got, cure=cure), OpfuseWarning, stacklevel=3)
                state._warned_left_out = count


def _key(role: QuantizerRole) -> str:
    return f"{role.name}:{role.tensor_type}" if role.name else role.tensor_type
