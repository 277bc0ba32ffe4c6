"""What a CUDA graph of a training step has fixed, beside the step's arguments: compared before each replay."""

from __future__ import annotations

import dis
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from operator import is_
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from opfuse.compiler.registry import active_rules
from opfuse.core.watched import Tree, WatchedModule, all_enrolled
from opfuse.recipes.delayed import DelayedScalingState, DelayedScalingStates
from opfuse.runtime.replay.recorder import PLAIN
from opfuse.torch_private.modules import hooks_of as hooks_of_module
from opfuse.torch_private.operations import tree_leaves
from opfuse.torch_private.tensors import hooks_of, version_of

_CONSTANTS = (bool, int, float, complex, str, bytes)


class Objects(list[Any]):
    """Objects that are held, and equal only to themselves; constants to those that say the same."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Objects) or len(self) != len(other):
            return False
        return all(map(is_, self, other)) or all(map(_is_same, self, other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None


def _is_same(one: Any, other: Any) -> bool:
    """A step that computes a number again, as of a length, has another object: Python keeps those of few numbers."""
    return one is other or (type(one) is type(other) and type(one) in _CONSTANTS and repr(one) == repr(other))


class Fixed(NamedTuple):
    """What a graph has fixed, by what it is called in :data:`ABOUT`."""

    parameters: tuple[Objects, list[Any]]
    modules: Objects
    settings: list[Any]
    states: list[Any]
    scales: Objects
    read: tuple[Objects, list[Any]]
    values: Objects
    ops: int
    rules: str
    torch: tuple[Any, ...]


ABOUT = {
    "parameters": "parameters or buffers are others, lie in other memory, or want gradients otherwise",
    "modules": "a module or an optimizer has another value of an attribute, is in another mode, or has another forward or hook",
    "settings": "settings of an optimizer are others, as its learning rate",
    "states": "states of an optimizer are others, or lie in other memory",
    "scales": "delayed scales are loaded, or serve another recipe",
    "read": "a tensor that the step reads from around it is another one",
    "values": "a variable around the step, or an attribute of its object, that the step reads has another value",
    "ops": "ops of opfuse, or their settings, are others",
    "rules": "fusion rules are others",
    "torch": "torch.no_grad, torch.autocast, the default dtype or a setting of products is another one",
}
"""What has happened when a field differs."""


class GraphInputs:
    """The modules and optimizers of a step, and what its graph fixes of them and of its surroundings.

    scaled: the states of delayed scaling that graphs update.
    """

    def __init__(self, step: Callable[..., Any], modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._step, self._roots, self.optimizers = step, modules, optimizers
        self.scaled: dict[DelayedScalingState, None] = {}
        self._read_modules()

    def _read_modules(self) -> None:
        self._trees = [Tree.of(root) for root in self._roots]
        self._modules = list(dict.fromkeys(module for root in self._roots for module in root.modules()))
        self._hooks = [hooks for module in self._modules for hooks in hooks_of_module(module)]

    def parameters(self) -> list[torch.Tensor]:
        """Of modules and optimizers, each once."""
        if not all(tree.stands for tree in self._trees):
            self._read_modules()
        own = [p for module in self._modules for p in module._parameters.values() if p is not None]
        return [*dict.fromkeys(chain(own, *(group["params"] for group in self._groups())))]

    def has_hooks(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether Python code hangs at a module, or at the gradient of a parameter."""
        return any(self._hooks) or any(any(hooks_of(parameter)) for parameter in parameters)

    def fixed(self, parameters: Sequence[torch.Tensor]) -> Fixed:
        """What a graph of this call would fix."""
        buffers = [buffer for module in self._modules for buffer in module._buffers.values() if buffer is not None]
        main = [getattr(p, "main_grad", None) for p in parameters]
        around = read_around(self._step)
        states = [each.state.values() for each in self.optimizers]
        return Fixed(
            parameters=(
                Objects(parameters),
                [*map(memory_of, chain(parameters, buffers, main)), [p.requires_grad for p in parameters]],
            ),
            modules=Objects(chain(*(vars(each).values() for each in chain(self._modules, self.optimizers)), *self._step_hooks())),
            settings=[[memory_of(leaf) for leaf in tree_leaves(settings)] for settings in self._settings()],
            states=[memory_of(leaf) for state in chain(*states) for value in state.values() for leaf in _leaves(value)],
            scales=Objects(state.tensors_id for state in self.scaled),
            read=(Objects(around.tensors), [*map(memory_of, around.tensors)]),
            values=around.values,
            ops=WatchedModule.epoch,
            rules=active_rules().digest,
            torch=_settings_of_torch(),
        )

    def values(self) -> Objects:
        """What the step reads around it, but tensors."""
        return read_around(self._step).values

    def versions(self, parameters: Sequence[torch.Tensor]) -> dict[torch.Tensor, int]:
        """How often each parameter and buffer was written."""
        buffers = (buffer for module in self._modules for buffer in module._buffers.values() if buffer is not None)
        return {each: version_of(each) for each in (*parameters, *buffers)}

    def versions_of_settings(self) -> list[int]:
        """How often settings of optimizers were written that are tensors."""
        return [version_of(leaf) for each in self._settings() for leaf in tree_leaves(each) if isinstance(leaf, torch.Tensor)]

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def _step_hooks(self) -> Iterator[Iterable[Any]]:
        """What runs around the steps of optimizers, which hold hooks in ordered dictionaries."""
        return (held.values() for each in self.optimizers for held in vars(each).values() if isinstance(held, OrderedDict))

    def _settings(self) -> list[dict[str, Any]]:
        return [settings for optimizer in self.optimizers for settings in settings_of(optimizer)]


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What each group of an optimizer holds beside parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def delayed_states() -> Iterator[DelayedScalingState]:
    """The states of all ops that are alive, each once: ops of converted models are no submodules."""
    held = [getattr(op, "quantizer_states", None) for op in all_enrolled()]
    yield from dict.fromkeys(state for states in held if isinstance(states, DelayedScalingStates) for state in states)


class ReadByStep(NamedTuple):
    """What stands around a function: in its closure, among the globals that it reads, in the object that it is a method of.

    tensors: of the object all. values: of the object what the function reads, and None in place of tensors.
    """

    tensors: list[torch.Tensor]
    values: Objects


def read_around(step: Any) -> ReadByStep:
    """What ``step`` finds around it; of an object that can be called, its method does."""
    method = step if isinstance(step, (FunctionType, MethodType)) else MethodType(type(step).__call__, step)
    function: Any = method.__func__ if isinstance(method, MethodType) else method
    held: dict[str, Any] = getattr(method.__self__, "__dict__", {}) if isinstance(method, MethodType) else {}
    variables = _variables(function)
    names = _names(function.__code__)[1] if isinstance(function, FunctionType) else ()
    tensors = [value for value in chain(held.values(), variables) if isinstance(value, torch.Tensor)]
    read = chain(variables, (held[name] for name in names if name in held))
    return ReadByStep(tensors, Objects(None if isinstance(value, torch.Tensor) else value for value in read))


def _variables(function: Any) -> list[Any]:
    """The variables around a function, by value; none of another object that can be called."""
    if not isinstance(function, FunctionType):
        return []
    around = function.__globals__
    named = [around[name] for name in _names(function.__code__)[0] if name in around]
    return [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)] + named


@lru_cache(maxsize=64)
def _names(code: CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The globals that a function and those inside of it read, and the attributes of its first argument.

    ``co_names`` has attributes of all else beside them: ``loss`` of ``output.loss`` is no variable.
    """
    read: list[str] = []
    attributes: list[str] = []
    first, top = next(iter(code.co_varnames), None), None
    for each in dis.get_instructions(code):
        if each.opname == "LOAD_GLOBAL":
            read.append(each.argval)
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD") and top == first and top is not None:
            attributes.append(each.argval)
        names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
        top = names[-1] if each.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) else None
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            read += _names(inner)[0]
    return tuple(dict.fromkeys(read)), tuple(dict.fromkeys(attributes))


def _leaves(value: Any) -> Iterable[Any]:
    """The parts of a list, a tuple or a dictionary; anything else is one."""
    return tree_leaves(value) if isinstance(value, (list, tuple, dict)) else (value,)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - which raises
    except ValueError:
        return False
    return True


def memory_of(value: Any) -> Any:
    """Of a tensor, where and how it lies, or, if it wraps others, that of these; all else is itself."""
    if type(value) not in PLAIN:
        if not isinstance(value, torch.Tensor):
            return value
        flatten = getattr(value, "__tensor_flatten__", None)
        if flatten is not None:
            return [memory_of(getattr(value, name)) for name in flatten()[0]]
    return value.data_ptr(), value.shape, value.stride(), value.dtype


def _settings_of_torch() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )


def numbers_drawn() -> list[Any]:
    """Where the random numbers of the host stand: Python's, torch's and, if it is there, numpy's."""
    numpy = sys.modules.get("numpy")
    others = [] if numpy is None else [numpy.random.get_state()[1].tobytes(), numpy.random.get_state()[2]]
    return [random.getstate(), torch.get_rng_state().tolist(), *others]
