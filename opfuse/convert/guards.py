"""What a pipeline was proven on, and whether a call still has it.

A converted module runs its pipeline only if everything holds that the forward was read with: the attributes that it reads, its
submodules and their forwards, no hooks on modules that the pipeline runs without calling them, and inputs like those that the
forward was tried on. Otherwise its own forward runs, over its converted submodules.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple, cast
from zlib import crc32

import torch
from torch import nn

from opfuse.errors import Described, describe
from opfuse.torch_private.modules import has_global_hooks, has_hooks

# -- the module as it was --------------------------------------------------------------------------------------------------------

CONSTANTS = (bool, int, float, str, type(None), torch.dtype)
"""Types of attributes that are compared, on the module itself or on its class."""

FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)
"""Types of attributes that are compared if the module itself has them."""

DEPTH = 4
"""How deep configs in configs, and lists in lists, are compared."""

SIZES = ("in_features", "out_features")
"""Attributes that are compared even if no forward reads them: code that resizes a module sets them."""


class Settings(NamedTuple):
    """What a forward reads of a module beside tensors.

    attributes: by name; of an object, such as a config, its fields that the forward may read. parameters: names and
    shapes. submodules: names. of_class: the forward of its class. Not the mode: a chain is the same in all.
    """

    attributes: tuple[tuple[str, Any], ...]
    parameters: tuple[Any, ...]
    submodules: tuple[str, ...]
    of_class: Any

    def hold(self, module: nn.Module) -> bool:
        """Whether ``module`` is unchanged. Asked at every call, so identical objects are not compared further."""
        own, kind = vars(module), type(module)
        if kind.forward is not self.of_class:
            return False
        for name, before in self.attributes:
            now = own[name] if name in own else _default(kind, name)
            if now is not before and not _is_same(_seen(now, kind), before):
                return False
        return _present(own["_parameters"]) == self.parameters and tuple(own["_modules"]) == self.submodules

    @property
    def named(self) -> dict[str, Any]:
        """All of them by name, for messages."""
        rest = {"parameters": self.parameters, "submodules": self.submodules, "forward of its class": self.of_class}
        return {**dict(self.attributes), **rest}


def settings_of(module: nn.Module) -> Settings:
    """The settings of a module as it is now."""
    own, kind = vars(module), cast(Any, type(module))
    of_classes = {name for base in _bases(kind) for name in vars(base)}
    names = [name for name in sorted({*_read(kind), *SIZES}) if name in own or name in of_classes]
    attributes = tuple((name, _seen(own[name], kind) if name in own else _default(kind, name)) for name in names)
    return Settings(attributes, _present(own["_parameters"]), tuple(own["_modules"]), kind.forward)


def _seen(value: Any, kind: Any, depth: int = DEPTH) -> Any:
    """What is compared of an attribute's value. A tuple stands for what has parts or fields, which may change."""
    if isinstance(value, (*CONSTANTS, *FUNCTIONS, Enum)):
        return value
    if isinstance(value, (nn.Module, torch.Tensor, type)) or not depth:
        return type(value)
    if isinstance(value, (tuple, list)):
        return (type(value), *(_seen(each, kind, depth - 1) for each in value))
    if isinstance(value, dict):
        return (dict, *((key, _seen(each, kind, depth - 1)) for key, each in value.items()))
    if isinstance(value, partial):
        return (value.func, *_seen(value.args, kind, depth - 1), *_seen(value.keywords, kind, depth - 1))
    fields = getattr(value, "__dict__", None) or {}
    return (type(value), *((name, _seen(fields[name], kind, depth - 1)) for name in sorted(_read(kind) & fields.keys())))


def _is_same(now: Any, before: Any) -> bool:
    """Whether two values are one, or equal constants; tuples part by part."""
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if type(now) is tuple:
        return len(now) == len(before) and all(map(_is_same, now, before))
    return isinstance(now, (*CONSTANTS, MethodType)) and bool(now == before)


def _default(kind: type[nn.Module], name: str) -> Any:
    """The class's value of an attribute that the module itself does not have; None for what is neither constant nor function."""
    value = getattr(kind, name, None)
    return value if isinstance(value, (*CONSTANTS, *FUNCTIONS, Enum)) else None


def _present(parameters: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple([(name, tuple(value.shape)) for name, value in parameters.items() if value is not None])


class ModuleGuard:
    """What must hold of a converted module.

    label: how messages call it. members: if the pipeline stands for submodules, all that the module has, by path. forwards: by
    path, what :func:`opfuse.fuse_` has put in the place of a member's forward; None: nothing, so it has that of its class.
    """

    def __init__(self, module: nn.Module, label: str, members: Mapping[str, nn.Module]) -> None:
        self.module, self.label = module, label
        self.members = dict(members) and {path: each for path, each in module.named_modules() if path}
        self.forwards: dict[str, Any] = {}
        self.settings = {path: settings_of(each) for path, each in {"": module, **members}.items()}
        self.places = {(name, parent): _at(module, f"{parent}.{name}".lstrip(".")) for name, parent in self._places()}

    def _places(self) -> Iterator[tuple[str, str]]:
        """For each member and each module that it is in, its name and the path of what holds it."""
        for path in self.members:
            steps = path.split(".")
            yield from ((steps[n], ".".join(steps[:n])) for n in range(len(steps)))

    def change(self) -> Described | None:
        """What has changed since the module was converted; None: nothing."""
        for (name, parent), before in self.places.items():
            holder = _at(self.module, parent)
            if holder is None or holder._modules.get(name) is not before:
                other = None if holder is None else holder._modules.get(name)
                now = "nothing" if other is None else f"a {type(other).__name__}"
                return self._told(f"{parent}.{name}".lstrip("."), f"the {type(before).__name__} that was there", now)
        for path, settings in self.settings.items():
            member = self.members[path] if path else self.module
            if not settings.hold(member):
                wanted, got = settings.named, settings_of(member).named
                names = [name for name in wanted if not _is_same(wanted[name], got.get(name))]
                return self._told(path, *(str({name: each.get(name) for name in names}) for each in (wanted, got)))
            if not path:
                continue
            if has_hooks(member):
                return self._told(path, "no hooks on a module that runs as a part of another", "some, for which it is called")
            own = vars(member).get("forward")
            if (own is not None) if (given := self.forwards.get(path)) is None else (getattr(own, "__self__", None) is not given):
                return self._told(path, "its forward", "another one, put in its place")
        if self.members and has_global_hooks():
            return self._told("", "no hooks of all modules", "some, for which its submodules are called")
        return None

    def _told(self, path: str, wanted: str, got: str) -> Described:
        where = f"{self.label}.{path}".rstrip(".")
        cure = (
            "call opfuse.fuse_ again if this is to stay; until then the module's own forward runs, over its converted submodules"
        )
        return describe(where, wanted=f"what it was when fuse_ ran, {wanted}", got=got, cure=cure)


def _at(module: nn.Module, path: str) -> nn.Module | None:
    for name in path.split(".") if path else ():
        found = module._modules.get(name)
        if found is None:
            return None
        module = found
    return module


# -- the code that a class runs --------------------------------------------------------------------------------------------------


@cache
def _read(kind: Any) -> frozenset[str]:
    """Attributes that the forward of a class reads, with the methods and properties that it names."""
    steps = (step for code in codes_of(kind) for step in dis.get_instructions(code))
    return frozenset(step.argval for step in steps if step.opname in READS) - _OF_TORCH


_OF_TORCH = {*vars(nn.Module()), "forward"}
"""What torch and opfuse themselves assign in every module."""


READS = ("LOAD_ATTR", "LOAD_METHOD")


def codes_of(kind: type[nn.Module]) -> set[CodeType]:
    """The code of a class's forward, and of everything in the class and its bases that it names."""
    bases = _bases(kind)
    waiting, seen = ["forward"], set[CodeType]()
    while waiting:
        name = waiting.pop()
        found = {code for base in bases for code in _nested(_function(vars(base).get(name)))} - seen
        seen |= found
        waiting += [each for code in found for each in code.co_names]
    return seen


def code_of(kinds: Iterable[Any]) -> int:
    """A number for what the forwards of classes do, the same in every process."""
    return crc32("".join([_text(kind) for kind in dict.fromkeys(kinds)]).encode())


@cache
def _text(kind: type[nn.Module]) -> str:
    parts = [(code.co_code, code.co_names, [c for c in code.co_consts if isinstance(c, CONSTANTS)]) for code in codes_of(kind)]
    return repr(sorted(map(repr, parts)))


def _bases(kind: type[nn.Module]) -> Sequence[type]:
    """The class and its bases below ``nn.Module``."""
    return kind.__mro__[: kind.__mro__.index(nn.Module)]


def _function(value: Any) -> Any:
    """The function behind a method, a property or a decorated function."""
    return inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", value))


def _nested(function: Any) -> Iterator[CodeType]:
    """The code of a function, and of functions inside of it."""
    waiting = [getattr(function, "__code__", None)]
    while waiting:
        code = waiting.pop()
        if isinstance(code, CodeType):
            yield code
            waiting += code.co_consts
