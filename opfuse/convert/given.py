"""The forwards that ``fuse_`` gives to modules, and copies of these modules.

A module keeps its class. It gets a ``forward`` of its own, which is bound to the object that computes. A shallow copy of the
module, as ``copy.copy`` and ``DataParallel`` make one, may have other parameters, so it runs the forward of its class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import nn

from opfuse.convert.weights import stand_ins
from opfuse.core.watched import enroll
from opfuse.torch_private.stack import module_that_calls

FORWARD = "forward"
"""The attribute of a module that holds the method it is called by."""

OWN = "opfuse_forward"
"""The attribute of a module that holds its :class:`GivenForward`, beside the method, which others may bind anew."""

STATE = "__getstate__"
"""The method of a module that ``copy`` and pickle ask for its attributes."""


class GivenForward:
    """Is called in place of the forward of a module's class. path: of the module in the model."""

    def __init__(self, module: nn.Module, path: str) -> None:
        self.module = module
        self.kind = type(module)
        self.path = path
        self.ticket = enroll(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # The module that a copy belongs to has its ``forward``, and may need it before the copy has its state.
        own = {name: value for name, value in self.__dict__.items() if name != "ticket"}
        return _blank, (type(self), type(self.module)), own

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, ticket=enroll(self))

    def __getattr__(self, name: str) -> Any:
        """An attribute of the module, for code that takes the ``__self__`` of its forward for the module."""
        if name.startswith("__") or "module" not in vars(self):
            raise AttributeError(name)
        return getattr(self.module, name)

    @property
    def forward(self) -> Callable[..., Any]:
        """The ``forward`` for the module, with the name, docstring and signature of its class's."""
        return MethodType(_forward_of(self.kind), self)

    @property
    def label(self) -> str:
        """How messages call it."""
        return self.path or type(self.module).__name__

    def install(self) -> None:
        """Replace the module's forward, and what copies it."""
        vars(self.module).update({FORWARD: self.forward, OWN: self, STATE: self.state})

    def installed(self, attributes: Mapping[str, Any]) -> set[str]:
        """The names of those ``attributes`` of the module that are opfuse's."""
        return {FORWARD, OWN, STATE}

    def remove(self, module: nn.Module) -> None:
        """Give ``module``, which has them, its own attributes back."""
        for name in self.installed(vars(module)):
            vars(module).pop(name, None)

    def state(self) -> Any:
        """The state of the module for ``copy`` and pickle."""
        state = type(self.module).__getstate__(self.module)
        return CopiedState(self, state) if isinstance(state, dict) else state

    def warn_of_copy(self) -> None:
        """Say what a shallow copy of the module does that the module does not."""


class CopiedState(Mapping[str, Any]):
    """The attributes of a module with a :class:`GivenForward`, with which a copy of it begins.

    A deep copy and a pickle get all. A shallow copy gets those that the module had before, since the forward that it has now is
    bound to the module itself, and so would read parameters that the copy may not have.
    """

    def __init__(self, forward: GivenForward, state: dict[str, Any]) -> None:
        self.forward, self.all = forward, state

    def __getitem__(self, name: str) -> Any:
        return self.all[name]

    def __len__(self) -> int:
        return len(self.all.keys() - self.forward.installed(self.all))

    def __iter__(self) -> Iterator[str]:
        self.forward.warn_of_copy()
        given = self.forward.installed(self.all)
        return iter([name for name in self.all if name not in given])

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return deepcopy(self.all, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.all,)


def _blank(made: type[GivenForward], kind: type[nn.Module]) -> GivenForward:
    """A copy that has no state yet, for unpickling."""
    copy = made.__new__(made)
    copy.kind = kind
    return copy


def _forward_of(kind: type[nn.Module]) -> Callable[..., Any]:
    """The one ``forward`` function for all modules of a class, since dynamo guards the function of a bound method.

    It has the signature of the class's own forward, which Trainer reads to choose columns of a data set. It has no
    ``__wrapped__``: under ``mixed_precision`` Accelerate unwraps functions, and binds this one to the module itself.
    """
    if kind not in _forwards:

        @wraps(kind.forward, updated=())
        def forward(self: GivenForward | nn.Module, *args: Any, **kwargs: Any) -> Any:
            own: Any
            caller: Any
            if isinstance(self, nn.Module):
                own, caller = vars(self).get(OWN), self
            else:
                followed = torch.compiler.is_compiling() or stand_ins() is not None
                own, caller = self, None if followed else module_that_calls()
            if caller is None or (own is not None and (caller is own.module or vars(caller).get(OWN) is not own)):
                return own(*args, **kwargs)
            if own is not None:  # as it is where it is bound to a module that is not converted
                own.warn_of_copy()
            return kind.forward(caller, *args, **kwargs)

        del forward.__wrapped__
        vars(forward)["__signature__"] = inspect.signature(kind.forward)
        _forwards[kind] = forward
    return _forwards[kind]


_forwards: dict[type[nn.Module], Callable[..., Any]] = {}
"""The forward of each class of modules that were given one."""


def given_forward(module: nn.Module) -> GivenForward | None:
    """The forward that opfuse gave a module, if it has one."""
    method = vars(module).get(FORWARD)
    own = getattr(method, "__self__", None)
    if own is module and getattr(method, "__func__", None) is _forwards.get(type(module)):
        own = vars(module).get(OWN)
    return own if isinstance(own, GivenForward) else None
