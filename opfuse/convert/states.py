"""Delayed-scaling states of a converted module: moved with it, and in its state dict after :func:`opfuse.prepare_delayed`.

The ops that :func:`opfuse.fuse_` makes are no submodules, so four attributes of the module stand in for ``nn.Module``'s methods.
Keys are ``delayed_scaling.OP.ROLE.FIELD``, such as ``mlp.delayed_scaling.down_proj.input.scale``. Without that call a state dict
has the model's own keys alone, which are all that other readers of a checkpoint know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from opfuse.core.operation import BasicOperation
from opfuse.core.state import NAMESPACE, quoted, unquoted

METHODS = ("delayed_scaling", "_apply", "_save_to_state_dict", "_load_from_state_dict")
"""The attributes of a module that :class:`States` stands for."""

LOADS = [0]
"""How often a converted module has loaded a state dict, after which its parameters may be of any size."""


class States:
    """Moves, saves and loads the states of a converted module's ops.

    It is an attribute of the module, like the new forward, and its methods replace three of the module's. ops: by quoted name.
    """

    def __init__(self, module: nn.Module, ops: Mapping[str, BasicOperation]) -> None:
        self.module = module
        self.ops = {quoted(name): op for name, op in ops.items()}

    @property
    def methods(self) -> dict[str, Any]:
        """What the module gets: itself, and methods in place of the module's."""
        return dict(zip(METHODS, (self, self.apply, self.save, self.load)))

    def __getattr__(self, name: str) -> Any:
        """The saved tensors of an op by role and field: torch.distributed.checkpoint looks up what a key names."""
        op = vars(self).get("ops", {}).get(name)
        if op is None:
            raise AttributeError(name)
        return SimpleNamespace(**{_short(op, role): each for role, each in vars(op.delayed_scaling).items()})

    @property
    def device(self) -> torch.device | None:
        """The device of the module's parameters."""
        return next((p.device for p in self.module.parameters()), None)

    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """``nn.Module._apply``, for the states as well."""
        for op in self.ops.values():
            op.forget_shown()
            for state in op.quantizer_states:
                state.to(fn(state.scale).device)
        module: nn.Module = type(self.module)._apply(self.module, fn, recurse)
        return module

    def save(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """``nn.Module._save_to_state_dict``, with the states of ops that were told of delayed scaling."""
        type(self.module)._save_to_state_dict(self.module, destination, prefix, keep_vars)
        for name, op in self.ops.items():
            op.note_shown(self.module.parameters())
            op.quantizer_states.warn_of_left_out("")
            if op.quantizer_states.tracked:
                found = op.saved_states(self.device)
                start = f"{prefix}{NAMESPACE}.{name}."
                destination.update({start + _short(op, key): tensor for key, tensor in found.items()})

    def load(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """``nn.Module._load_from_state_dict``, with the states that ``state_dict`` has."""
        taken: dict[str, dict[str, Any]] = {}
        for name, op in self.ops.items():
            start = f"{prefix}{NAMESPACE}.{name}."
            for key in [key for key in state_dict if key.startswith(start)]:
                taken.setdefault(name, {})[unquoted(_whole(op, key.removeprefix(start)))] = state_dict.pop(key)
        for name, op in self.ops.items():
            op.note_loaded({} if name in taken else state_dict)
        type(self.module)._load_from_state_dict(self.module, state_dict, prefix, *args)
        LOADS[0] += 1
        for name, saved in taken.items():
            self.ops[name].load_states(saved, self.device, where=f"{prefix}{NAMESPACE}.{name}")
            self.ops[name].quantizer_states.tracked = True


def _short(op: BasicOperation, key: str) -> str:
    """A key of an op without the path of its module, which the module's own key repeats: ``input.scale``, ``[2]:input.scale``."""
    return key.removeprefix(quoted(op.name)).removeprefix(":")


def _whole(op: BasicOperation, key: str) -> str:
    """The key of an op from one without the path of its module."""
    colon = ":" if op.name and not key.startswith("[") else ""
    return f"{quoted(op.name)}{colon}{key}"
