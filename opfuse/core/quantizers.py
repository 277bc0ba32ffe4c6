"""The quantizers that an op asks for itself, by slot, where the compiler places no quantize nodes for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, cast, get_args

import torch

from opfuse.domains import INTEGER
from opfuse.errors import QuantizerError, QuantizerTypeError, describe
from opfuse.recipes import CustomRecipe, DelayedScaling, QuantizerRole, Recipe, current_recipe
from opfuse.recipes.autocast import current_amax_group, mark_region_used
from opfuse.recipes.counting import quantizer_of_call
from opfuse.recipes.delayed import DelayedScalingState, DelayedScalingStates, LastUse
from opfuse.recipes.passes import is_trained
from opfuse.tensors.quantizers import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    Quantizer,
)
from opfuse.tensors.storage import QuantizedStorage
from opfuse.torch_private.autograd import backward_pass

Mode = Literal["forward", "backward"]
SLOTS: dict[str, tuple[str, ...]] = {"forward": ("input", "weight", "output"), "backward": ("grad_output", "grad_input")}
"""Tensor types of the slots of an op that gives their number only."""

_LIKE = {"output": "input", "grad_input": "grad_output"}
"""Results, which the tables of recipes do not list, and the tensor type that each is cast like."""

_records: ContextVar[bool] = ContextVar("opfuse_records", default=False)


@contextmanager
def recording_gradients(grad: bool) -> Iterator[None]:
    """Tell casts inside whether the call records gradients: in an autograd.Function, torch's own grad mode is off."""
    reset = _records.set(grad)
    try:
        yield
    finally:
        _records.reset(reset)


@dataclass(frozen=True, repr=False)
class _Delayed(Float8Quantizer):
    """Delayed scaling over the state of a slot, which is due for an update once something was cast.

    A cast of the compiler knows its pass by its role. Whoever asked for this quantizer may call it in either pass, so each call
    looks.
    """

    slot: DelayedScalingState = field(compare=False, repr=False)
    recipe: DelayedScaling = field(compare=False, repr=False)
    use: LastUse = field(compare=False, repr=False)

    def quantize(self, x: torch.Tensor) -> QuantizedStorage:
        backward = backward_pass() >= 0
        counts = backward or torch.is_grad_enabled() or _records.get() or is_trained()
        made = quantizer_of_call(self.slot, self, self.recipe, self.use, device=x.device, counts=counts, backward=backward)
        return made.quantize(x)


class QuantizerSlotsMixin:
    """Quantizers by mode (``"forward"`` or ``"backward"``) and slot.

    By default the slots are the op's ``roles``, for which the compiler also casts. An op without roles that casts in its own
    methods overrides ``num_quantizers``, and ``get_quantizer_roles`` where :data:`SLOTS` does not name its tensors; it asks in
    its forward, inside the recipe, and keeps in ``ctx`` what its backward uses.

    slot_part, slot_parts: which of how many ranks this is, if each has an equal part of the slots: states are named as if one
    had all.
    """

    slot_part: int = 0
    slot_parts: int = 1

    kind: ClassVar[str]
    module_type: ClassVar[str] = ""
    name: str
    quantizer_states: DelayedScalingStates
    parameter_values: Any
    quantized_roles: Any
    label: Any
    standing: Any

    def num_quantizers(self, mode: Mode) -> int:
        """The number of slots; ``mode`` is ``"forward"`` or ``"backward"``, else QuantizerError."""
        return len(self._declared(mode))

    def get_quantizer_roles(self, mode: Mode) -> Sequence[QuantizerRole | None] | None:
        """The role of each slot; None for a slot, or for all, stands for that of :data:`SLOTS`."""
        names, count = self._declared(mode), self.num_quantizers(mode)
        names = names if len(names) == count else tuple(SLOTS[mode][i % len(SLOTS[mode])] for i in range(count))
        return [self.quantizer_role(name) for name in names]

    def get_quantizer(self, mode: Mode, index: int) -> Quantizer | None:
        """The active recipe's quantizer of a slot; None without a recipe. QuantizerError for a slot that there is not."""
        count, index = self.num_quantizers(mode), INTEGER.checked(f"{self.label} {mode} quantizers", index, QuantizerTypeError)
        if not 0 <= index < count:
            where, cure = f"{self.label} {mode} quantizers", "check num_quantizers"
            raise QuantizerError(describe(where, wanted=f"an index below {count}", got=index, cure=cure))
        recipe = current_recipe()
        if recipe is None:
            return None
        mark_region_used()
        role, slot = self._slots_of(mode, count)[index]
        quantizer, state = self.quantizer_of(role, recipe, slot=slot)
        if role.tensor_type in _LIKE and isinstance(quantizer, (HybridQuantizer, IdentityQuantizer)):
            where, cure = f"{self.label} {role.tensor_type}", "return a quantizer of one format for this role"
            raise QuantizerError(describe(where, wanted="a format that a product can emit", got=repr(quantizer), cure=cure))
        delayed = cast(DelayedScaling | None, recipe.delayed_scaling(role))
        if state is None or delayed is None:
            return quantizer
        made, rule = cast(Float8Quantizer, quantizer), delayed.forward_rule if mode == "forward" else delayed.backward_rule
        name = f"{self.label} {mode} quantizer {index}"
        use = LastUse.under(delayed, rule, current_amax_group(), name, self.standing)
        return _Delayed(made.scale, made.amax, made.fp8_dtype, state, delayed, use)

    def _slots_of(self, mode: Mode, count: int, part: int | None = None) -> list[tuple[QuantizerRole, QuantizerRole]]:
        """The role of each slot, and the role that its state is kept under. part: whose slots; None: this op's."""
        first = count * (self.slot_part if part is None else part)
        roles = self.get_quantizer_roles(mode) or (None,) * count
        named = [role or self.quantizer_role(SLOTS[mode][i % len(SLOTS[mode])]) for i, role in enumerate(roles)]
        repeated = [i >= len(SLOTS[mode]) or role in roles[:i] for i, role in enumerate(named)]
        slots = enumerate(zip(named, repeated), start=first)
        return [(role, separate_slot(role, i) if again or first else role) for i, (role, again) in slots]

    def quantizer_slots(self) -> tuple[tuple[QuantizerRole, QuantizerRole], ...]:
        """The role of each slot, and the role that its delayed-scaling state is kept under, whether or not it is there yet."""
        return tuple(pair for mode in get_args(Mode) for pair in self._slots_of(mode, self.num_quantizers(mode)))

    def slots_elsewhere(self) -> tuple[QuantizerRole, ...]:
        """What the states of the other parts are kept under, which other ranks have."""
        others = [part for part in range(self.slot_parts) if part != self.slot_part]
        counts = {mode: self.num_quantizers(mode) for mode in get_args(Mode)}
        return tuple(slot for part in others for mode in counts for _, slot in self._slots_of(mode, counts[mode], part))

    def reset_recipe_state(self, recipe: Recipe | None = None) -> None:
        """A hook for subclasses, called before a call under another recipe than the last one. Quantizers need no such reset."""

    def get_input_quantizer(self) -> Quantizer | None:
        """The quantizer of forward slot 0 under the active recipe, or None."""
        return self.get_quantizer("forward", 0) if self.num_quantizers("forward") else None

    def get_grad_output_quantizer(self) -> Quantizer | None:
        """The quantizer of backward slot 0 under the active recipe, or None."""
        return self.get_quantizer("backward", 0) if self.num_quantizers("backward") else None

    def quantizer_role(self, name: str) -> QuantizerRole:
        """The role of a tensor type, or of a parameter by its name."""
        known = name in SLOTS["forward"] or name in SLOTS["backward"]
        return QuantizerRole(module_type=self.module_type or self.kind, tensor_type=name if known else "weight", name=self.name)

    def quantizer_of(
        self, role: QuantizerRole, recipe: Recipe, *, slot: QuantizerRole | None = None
    ) -> tuple[Quantizer, DelayedScalingState | None]:
        """The recipe's quantizer for ``role``, and, where scaling is delayed, the op's state for ``slot`` (None: ``role``)."""
        if not isinstance(recipe, CustomRecipe):
            role, slot = replace(role, tensor_type=_LIKE.get(role.tensor_type, role.tensor_type)), slot or role
        delayed = cast(DelayedScaling | None, recipe.delayed_scaling(role))
        if delayed is None:
            return recipe.quantizer(role), None
        device = next((p.device for p in self.parameter_values() if p is not None), None)
        state = self.quantizer_states.get(slot or role, length=delayed.amax_history_len, device=device)
        return recipe.quantizer(role, state=state), state

    def stored_quantizer(self, role: str, recipe: Recipe) -> Quantizer:
        """The recipe's quantizer for a parameter that lives quantized.

        Such a parameter is cast when it is written, by an optimizer or by anyone else. All its values are there, so its scale
        comes from them, also under delayed scaling: the scale of an earlier write would clip what has grown since.
        """
        asked = self.quantizer_role(role)
        delayed = cast(DelayedScaling | None, recipe.delayed_scaling(asked))
        return recipe.quantizer(asked) if delayed is None else Float8CurrentScalingQuantizer(delayed.fp8_dtype(asked))

    def _declared(self, mode: str) -> tuple[str, ...]:
        if mode not in SLOTS:
            where, wanted = f"{self.label} quantizers", " or ".join(map(repr, get_args(Mode)))
            raise QuantizerError(describe(where, wanted=wanted, got=repr(mode), cure="choose one of the two"))
        names = [name for name in self.quantized_roles() if (name == "grad_output") == (mode == "backward")]
        return tuple(sorted(names, key=lambda name: name != "input"))


def separate_slot(role: QuantizerRole, index: int) -> QuantizerRole:
    """A role of its own for a slot whose role an earlier slot has: two tensors never share a state."""
    return replace(role, name=f"{role.name}[{index}]")
