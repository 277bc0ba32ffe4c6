"""State dicts: delayed-scaling states are saved beside the parameters, as plain tensors, once an op trains under delayed scaling.

The keys are ``delayed_scaling.ROLE.FIELD``, such as ``0.delayed_scaling.input.scale``; `recipes/saved_states.py` says what a
field holds. An op has all of its keys, always in the same shapes, or none. It has them once it was told that it trains under
delayed scaling: by :func:`prepare_delayed`, by a state dict that has them, or by a training call under such a recipe. Any other
op has the state dict of its parameters, which is that of its counterpart in torch.nn.

Why all or none: most pipelines never use delayed scaling, and a key in every op would prevent strict loading of torch.nn's
state dicts. Keys that depend on what has run would not work either, since ``torch.distributed.checkpoint`` fills only keys that
a model shows. A prepared model has the same keys before and after it has run.

Why copies and no buffers: DDP broadcasts buffers at every step, ``.to(bfloat16)`` would round scales, ``to_empty`` would leave
them uninitialized. Hooks of the module write and read the keys. ``torch.distributed.checkpoint`` walks a model along the dots
of a key and finds them in ``op.delayed_scaling``; inside DDP it renames keys by the buffers of each module, so an op's
``named_buffers`` lists them.

A checkpoint without the keys looks like one that has none. But an op notices that its own tensors were filled and loaded, and
warns when delayed scaling then starts over.
"""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from opfuse.core.context import versions
from opfuse.core.watched import WatchedModule
from opfuse.domains import checked_arguments
from opfuse.errors import OpfuseWarning, QuantizedTensorError, RecipeError, describe
from opfuse.recipes import DelayedScaling, QuantizerRole, as_recipe
from opfuse.recipes.delayed import DelayedScalingStates
from opfuse.recipes.saved_states import FIELDS
from opfuse.tensors.files import from_planes, put_together
from opfuse.tensors.masters import stored_in
from opfuse.tensors.tensor import QuantizedTensor
from opfuse.torch_private.stack import module_of_caller

NAMESPACE = "delayed_scaling"
"""What the keys of an op's delayed-scaling states begin with."""

_OLD = "_extra_state"
"""The key of an op in files of earlier versions, a dictionary by 'role/field', and of te.ops, a tensor of pickled bytes."""

_STATE = re.compile(rf"(?:.*\.)?{NAMESPACE}\.(?:[^.]+\.){{1,2}}(?:{'|'.join(FIELDS)})")

_QUOTED = {"%": "%25", ".": "%2E"}
"""What stands in a key for a character of a role: torch walks a model along the dots of its keys."""


class StatefulModule(WatchedModule):
    """Moves, saves and loads the delayed-scaling states of an op together with its parameters.

    A module without ``quantizer_states`` has none, such as an op that stands for several others.
    """

    basic_ops: Any

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        self.forget_shown()
        for state in self._states():
            state.to(fn(state.scale).device)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    @property
    def delayed_scaling(self) -> SimpleNamespace:
        """Copies of the saved tensors by role and field, as keys name them: ``op.delayed_scaling.input.scale``.

        torch.distributed.checkpoint looks up what a key names.
        """
        found = SimpleNamespace()
        for name, tensor in self._saved().items():
            role, _, field = name.partition(".")
            vars(found).setdefault(role, SimpleNamespace())
            setattr(vars(found)[role], field, tensor)
        return found

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers; for torch.distributed.checkpoint, which finds keys module by module, also :attr:`delayed_scaling`.

        No other caller gets those: DDP broadcasts buffers, and others walk a model by their names.
        """
        yield from super().named_buffers(prefix, recurse, remove_duplicate)
        if not recurse and module_of_caller() == "torch.distributed.checkpoint.state_dict":
            start = f"{prefix}.{NAMESPACE}" if prefix else NAMESPACE
            yield from ((f"{start}.{name}", tensor) for name, tensor in self._saved().items())

    # -- to and from files -----------------------------------------------------------------------------------------------------

    def _saved(self) -> dict[str, torch.Tensor]:
        return self.saved_states(self._device)

    def saved_states(self, device: torch.device | None) -> dict[str, torch.Tensor]:
        """The saved tensors by ``ROLE.FIELD``, for every role; ``device`` is for roles for which nothing was cast yet."""
        states = self._states()
        named = states.to_dict([slot for _, slot in self._state_roles()], device=device) if states.saved else {}
        return {_key(*name.rpartition("/")): tensor for name, tensor in named.items()}

    def load_states(self, saved: object, device: torch.device | None, *, where: str) -> None:
        """Take over what was saved by ``role/field``; QuantizerError for what is no state of this op on any rank."""
        slots = [slot for _, slot in self._state_roles()]
        elsewhere = [slot for op in self.basic_ops for slot in op.slots_elsewhere()] if slots else []
        self._states().load_dict(saved, slots=slots, elsewhere=elsewhere, device=device, where=where)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """OpfuseWarning for amaxes that were not finite: this is where the host reads states."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self._states().warn_of_left_out(self.label)
        for name, tensor in self._saved().items():
            destination[f"{prefix}{NAMESPACE}.{name}"] = tensor
        self.note_shown(p for p in self._parameters.values() if p is not None)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load state dicts of plain modules (without states), of earlier versions and of te.ops, and weights plane by plane.

        The states in a dictionary are taken over, all of an op's or none; otherwise they stay as they are. QuantizerError for
        roles that the op does not have, scales that are not finite and positive, and tensors that claim more memory than they
        have.
        """
        put_together(state_dict, prefix)
        self.adapt_state_dict(state_dict, prefix)
        taken = dict(self._extracted(state_dict, prefix))
        self.note_loaded({} if taken else state_dict)
        super()._load_from_state_dict(state_dict, prefix, *args)
        for key, saved in taken.items():
            self.load_states(saved, self._device, where=f"{self.label} {key}")
            self._states().tracked |= key == NAMESPACE

    def note_shown(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note which parameters a state dict showed, and how often each had been written."""
        shown = [(weakref.ref(parameter), _writes(parameter)) for parameter in parameters]
        self.__dict__["_shown"] = shown
        if not any(op._captured for op in getattr(self, "basic_ops", ())):
            self.__dict__["_shown_unused"] = shown

    def forget_shown(self) -> None:
        """Hold no parameter weakly any more: torch moves and casts one of a class of its own only where nothing does."""
        for name in ("_shown", "_shown_unused"):
            self.__dict__.pop(name, None)

    def note_loaded(self, state_dict: Mapping[str, Any]) -> None:
        """Note that ``state_dict``, which has no states of the op, is loaded.

        If it has the op's own parameters, written since they were shown, torch's checkpoints filled it.
        """
        self.__dict__.pop("_shown_unused", None)
        shown = [(parameter, writes) for ref, writes in self.__dict__.get("_shown", ()) if (parameter := ref()) is not None]
        if shown and not self._states().saved:
            own = {place: writes for parameter, writes in shown for place in _places(parameter)}
            given = [value for value in state_dict.values() if isinstance(value, torch.Tensor)]
            self._states().unread |= any(_is_filled(value, own) for value in given)

    def note_called(self) -> None:
        """Note, at a call, that a state dict without states was filled in place before the op ever ran.

        torch.distributed.checkpoint fills state dicts so, and then loads nothing. An optimizer writes only after a call.
        """
        shown = self.__dict__.pop("_shown_unused", ())
        if shown and _written(shown):
            self._states().unread |= not self._states().saved

    def adapt_state_dict(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Rename and reshape entries of ``state_dict`` that were saved under other names or in another form; in place."""

    def _extracted(self, state_dict: dict[str, Any], prefix: str) -> Iterator[tuple[str, object]]:
        """The states in ``state_dict``, by their kind of key, taken out of it; keys that the op cannot have are left to torch."""
        old, start = prefix + _OLD, f"{prefix}{NAMESPACE}."
        if old in state_dict and type(self).get_extra_state is nn.Module.get_extra_state:
            if isinstance(state_dict[old], torch.Tensor):
                if state_dict.pop(old).numel():
                    text = f"{old}: pickled state of another library is not read; delayed scaling starts anew"
                    warnings.warn(text, OpfuseWarning, stacklevel=2)
            elif self._state_roles():
                yield _OLD, state_dict.pop(old)
        names = [name for name in state_dict if name.startswith(start)]
        if names and self._state_roles():
            yield NAMESPACE, {unquoted(name.removeprefix(start)): state_dict.pop(name) for name in names}

    def _states(self) -> DelayedScalingStates:
        return getattr(self, "quantizer_states", _NONE)

    def _state_roles(self) -> list[tuple[QuantizerRole, QuantizerRole]]:
        """The role of each operand that may have a state, and the role that the state is kept under."""
        return [pair for op in self.basic_ops for pair in op.quantizer_slots()] if hasattr(self, "quantizer_states") else []

    @property
    def _device(self) -> torch.device | None:
        return next((p.device for p in self.parameters()), None)


def _writes(value: torch.Tensor) -> list[int]:
    """How often a tensor, or the part of it that this rank has, was written."""
    return versions(stored_in(value))


def _written(shown: Iterable[tuple[weakref.ref[torch.Tensor], list[int]]]) -> list[torch.Tensor]:
    """The parameters that were written since they were shown."""
    return [parameter for ref, writes in shown if (parameter := ref()) is not None and _writes(parameter) != writes]


def _is_filled(value: torch.Tensor, own: Mapping[int, list[int]]) -> bool:
    """Whether a value of a state dict is one of an op's parameters, and was written since it was shown.

    own: by the address of a parameter's values, how often it had been written. A DTensor in a state dict counts anew, from 0.
    """
    before = next((own[place] for place in _places(value) if place in own), None)
    if before is None:
        return False
    held = stored_in(value)
    return any(versions(held)) if held is not value and type(held) is torch.Tensor else versions(held) != before


def _places(value: torch.Tensor) -> set[int]:
    """The addresses of a tensor's values, or of its planes."""
    held = stored_in(value)
    return {part.data_ptr() for part in (held.record.tensors() if isinstance(held, QuantizedTensor) else (held,))}


_NONE = DelayedScalingStates()


def quoted(name: str) -> str:
    """``name`` without dots."""
    for character, code in _QUOTED.items():
        name = name.replace(character, code)
    return name


def _key(role: str, _: str, field: str) -> str:
    return f"{quoted(role)}.{field}"


def unquoted(key: str) -> str:
    """The ``role/field`` of a key ``ROLE.FIELD``."""
    role, _, field = key.rpartition(".")
    for character, code in reversed(_QUOTED.items()):
        role = role.replace(code, character)
    return f"{role}/{field}"


@checked_arguments(RecipeError)
def prepare_delayed(model: nn.Module, recipe: object = None) -> nn.Module:
    """Tell ``model`` that it trains under ``recipe`` (None: ``DelayedScaling()``), so that its state dict has the keys of states.

    Whatever has run then, the keys are the same: call it once the model is built, on each rank of each run that saves or loads
    checkpoints key by key, as torch.distributed.checkpoint does. ``load_state_dict`` needs no such call. Ops to whose operands
    the recipe gives no delayed scaling are left alone. Returns the model; RecipeError where there are no others.
    """
    wanted = DelayedScaling() if recipe is None else as_recipe(recipe)
    delayed = [op for _, op in stateful(model) if any(wanted.delayed_scaling(role) for role, _ in op._state_roles())]
    for op in delayed:
        op._states().tracked = True
    if not delayed:
        cure = "pass a recipe with delayed scaling, and a model that is made of opfuse.ops or that opfuse.fuse_ has converted"
        what = f"ops to which {type(wanted).__name__} gives delayed scaling"
        raise RecipeError(describe("prepare_delayed", wanted=what, got=f"none in a {type(model).__name__}", cure=cure))
    return model


def stateful(model: nn.Module) -> Iterator[tuple[str, StatefulModule]]:
    """What may have states: modules, by their paths, and the ops of those that :func:`opfuse.fuse_` has converted.

    Of these the roles have the path, so their own is empty.
    """
    for path, module in model.named_modules():
        if isinstance(module, StatefulModule):
            yield path or type(module).__name__, module
        else:
            yield from (("", op) for op in getattr(vars(module).get(NAMESPACE), "ops", {}).values())


def is_delayed_state(key: str) -> bool:
    """Whether a key of a state dict is one of delayed scaling."""
    return _STATE.fullmatch(key) is not None


@checked_arguments(QuantizedTensorError)
def plain_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict that torch's own modules load strictly: without states, and with quantized tensors, also those saved plane by
    plane, decoded.
    """
    whole = from_planes(state_dict)
    kept = {name: value for name, value in whole.items() if not is_delayed_state(name)}
    return {name: value.dequantize() if isinstance(value, QuantizedTensor) else value for name, value in kept.items()}
