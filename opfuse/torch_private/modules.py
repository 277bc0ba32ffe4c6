"""Modules: their dictionaries, their hooks and the methods that they override."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
)

from opfuse.torch_private.names import convention, private

# -- dictionaries, which are read by their names in many places: all code that writes modules relies on them ---------------------


def _holds(name: str, put: Callable[[nn.Module], Any]) -> Callable[[], bool]:
    def check() -> bool:
        module = nn.Module()
        put(module)
        held = vars(module)[name]
        before = dict(held)
        held["other"] = held["x"]
        return list(before) == ["x"] and module.other is before["x"]

    return check


convention(
    "torch.nn.Module._parameters",
    _holds("_parameters", lambda module: module.register_parameter("x", nn.Parameter(torch.zeros(1)))),
    use="reading and replacing a module's own parameters",
    breaks="no op would find its weights",
)
convention(
    "torch.nn.Module._buffers",
    _holds("_buffers", lambda module: module.register_buffer("x", torch.zeros(1))),
    use="telling modules with state from those without",
    breaks="a module with buffers might be replaced by an op that has none",
)
convention(
    "torch.nn.Module._modules",
    _holds("_modules", lambda module: module.register_module("x", nn.Module())),
    use="reading and replacing a module's submodules",
    breaks="a Sequential would not find its ops, nor fuse_ what to convert",
)


def _forgets() -> bool:
    module = nn.Module()
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("passing", torch.zeros(1), persistent=False)
    return vars(module)[_PASSING] == {"passing"} and list(module.state_dict()) == ["kept"]


_PASSING = convention(
    "torch.nn.Module._non_persistent_buffers_set",
    _forgets,
    use="sending the buffers that a state dict has, without making one",
    breaks="a rollout engine would get buffers that its checkpoint does not have",
)


def lasting_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of a module itself that its state dict has."""
    return {name: value for name, value in module._buffers.items() if value is not None and name not in vars(module)[_PASSING]}


# -- hooks -----------------------------------------------------------------------------------------------------------------------

_REGISTER: dict[str, tuple[Any, Any]] = {
    "_forward_pre_hooks": (nn.Module.register_forward_pre_hook, register_module_forward_pre_hook),
    "_forward_hooks": (nn.Module.register_forward_hook, register_module_forward_hook),
    "_backward_pre_hooks": (nn.Module.register_full_backward_pre_hook, register_module_full_backward_pre_hook),
    "_backward_hooks": (nn.Module.register_full_backward_hook, register_module_full_backward_hook),
}
"""By attribute: what registers a hook of one module, and of all modules."""


def _nothing(*_: Any) -> None:
    """A hook to try."""


def _has_hook(name: str) -> Callable[[], bool]:
    def check() -> bool:
        module = nn.Module()
        handle = _REGISTER[name][0](module, _nothing)
        registered = bool(vars(module)[name])
        handle.remove()
        return registered and not vars(module)[name]

    return check


def _has_global_hook(name: str) -> Callable[[Any], bool]:
    def check(hooks: Any) -> bool:
        before = len(hooks)
        handle = _REGISTER[name][1](_nothing)
        registered = len(hooks)
        handle.remove()
        return registered == before + 1 and len(hooks) == before

    return check


HOOKS = tuple(
    convention(
        f"torch.nn.Module.{name}",
        _has_hook(name),
        use="noticing hooks on a module that a pipeline runs without calling it",
        breaks="such a hook would silently not run",
    )
    for name in _REGISTER
)

_GLOBAL_HOOKS = tuple(
    private(
        f"torch.nn.modules.module._global{name}",
        _has_global_hook(name),
        use="noticing hooks of all modules",
        breaks="such a hook would silently not run for modules inside a converted one",
    )
    for name in _REGISTER
)


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module runs more than its forward."""
    own = vars(module)
    for hooks in HOOKS:  # noqa: SIM110 - a generator takes three times as long, at every call of a converted module
        if own.get(hooks):
            return True
    return False


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """The dictionaries that hold the hooks of a module itself, empty ones too."""
    return [vars(module)[hooks] for hooks in HOOKS]


def has_global_hooks() -> bool:
    """Whether a call of any module runs hooks that torch has for all of them."""
    return any(_GLOBAL_HOOKS)


def _keeps_number(numbers: dict[int, bool]) -> bool:
    handle = register_module_forward_hook(_nothing, with_kwargs=True)
    registered = handle.id in numbers
    handle.remove()
    forget_global_hook(handle.id)
    return registered and handle.id not in numbers


_with_keywords: dict[int, bool] = private(
    "torch.nn.modules.module._global_forward_hooks_with_kwargs",
    _keeps_number,
    use="removing what torch keeps of a removed hook of all modules",
    breaks="each model that fuse_ reads would leave an entry in torch",
)


def forget_global_hook(number: int) -> None:
    """Remove what torch keeps of a removed forward hook of all modules that took keywords. number: its handle's id."""
    _with_keywords.pop(number, None)


# -- methods to override ---------------------------------------------------------------------------------------------------------


class _SampleModule(nn.Linear):
    """Notes the methods that torch calls."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.called: list[str] = []

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        self.called.append("_apply")
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.called.append("_save_to_state_dict")
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.called.append("_load_from_state_dict")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        self.called.append("_call_impl")
        return super()._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def _calls(name: str, use: Callable[[_SampleModule], Any]) -> Callable[[], bool]:
    def check() -> bool:
        module = _SampleModule()
        use(module)
        return module.called == [name]

    return check


convention(
    "torch.nn.Module._apply",
    _calls("_apply", lambda module: module.double()),
    use="moving the states of delayed scaling with their module",
    breaks="scales would stay on the old device",
)
convention(
    "torch.nn.Module._save_to_state_dict",
    _calls("_save_to_state_dict", lambda module: module.state_dict()),
    use="saving the states of delayed scaling",
    breaks="checkpoints would lack them",
)
convention(
    "torch.nn.Module._load_from_state_dict",
    _calls("_load_from_state_dict", lambda module: module.load_state_dict(nn.Linear(1, 1).state_dict())),
    use="loading the states of delayed scaling and weights plane by plane",
    breaks="they would be reported as unexpected keys",
)
CALL = convention(
    "torch.nn.Module._call_impl",
    _calls("_call_impl", lambda module: module(torch.zeros(1))),
    use="noticing a module that is called in a way of its own",
    breaks="fuse_ would leave out what such a call does around the forward",
)
"""The method that runs a module's forward and its hooks."""
