"""What a converted module was made from, and whether that has changed since.

Attributes that a forward reads were read when the module was converted. A later change of one would have no effect, so it is an
error.
"""

from __future__ import annotations

import dis
import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import nn

from opfuse.errors import ConversionError, OpfuseWarning, describe

CONSTANTS = (bool, int, float, str, type(None), torch.dtype)
"""Types of attributes that are compared, on the module itself or on its class."""

SIMPLE = (*CONSTANTS, FunctionType, BuiltinFunctionType, MethodType, partial)
"""Types of attributes that are compared if the module itself has them."""

SIZES = ("in_features", "out_features")
"""Attributes that are compared even if no forward reads them: code that resizes a module sets them."""


class Settings(NamedTuple):
    """Attributes by name, the names of the parameters and the submodules that a module has, and the forward of its class."""

    attributes: tuple[tuple[str, Any], ...]
    parameters: tuple[str, ...]
    submodules: tuple[str, ...]
    of_class: Any

    def hold(self, module: nn.Module, *, wrapped: bool = False) -> bool:
        """Whether ``module`` is unchanged. Asked at every call, so identical objects are not compared further.

        wrapped: its class may be another one whose forward wraps the former, as FSDP2 makes of a layer of transformers.
        """
        own, kind = vars(module), type(module)
        if kind.forward is not self.of_class and not (wrapped and _wraps(kind.forward, self.of_class)):
            return False
        for name, before in self.attributes:
            now = own[name] if name in own else _default(kind, name)
            if now is not before and (type(now) is not type(before) or now != before):
                return False
        return _there(own["_parameters"]) == self.parameters and tuple(own["_modules"]) == self.submodules

    @property
    def named(self) -> dict[str, Any]:
        """All of them by name, for messages."""
        told = {"parameters": self.parameters, "submodules": self.submodules, "forward of its class": self.of_class}
        return {**dict(self.attributes), **told}


def settings_of(module: nn.Module, *, member: bool) -> Settings:
    """What a module computes depends on, beside tensors: simple attributes that its forward reads, and which parts it has.

    Not its mode: a module whose chain depends on that is not converted, and dropout follows it. member: it is a part of another
    converted module, and must not get a forward of its own.
    """
    own, kind = vars(module), type(module)
    theirs = {name for base in _bases(kind) for name in vars(base)}
    read = {*_read(kind), *SIZES}  # type: ignore[arg-type]
    names = [name for name in sorted(read) if (isinstance(own[name], SIMPLE) if name in own else name in theirs)]
    return _now(module, (*names, *(["forward"] if member else [])))


def check_settings(module: nn.Module, where: str, before: Settings) -> None:
    """ConversionError if the settings ``before`` do not hold any more."""
    if not before.hold(module):
        one, other = before.named, _now(module, [name for name, _ in before.attributes]).named
        wanted, got = ({name: each[name] for name in one if one[name] != other[name]} for each in (one, other))
        cure = "call opfuse.fuse_ again"
        raise ConversionError(describe(where, wanted=f"what it was when fuse_ ran, {wanted}", got=got, cure=cure))


def check_place(module: nn.Module, path: str, member: nn.Module, label: str) -> None:
    """ConversionError if the submodule at ``path`` is another one."""
    holder, _, name = path.rpartition(".")
    found = module.get_submodule(holder)._modules.get(name) if holder else module._modules.get(name)
    if found is not member:
        where, wanted = f"{label}.{path}", f"the {type(member).__name__} that was there when fuse_ ran"
        cure = "call opfuse.unfuse_ before submodules are replaced, and opfuse.fuse_ afterwards"
        raise ConversionError(describe(where, wanted=wanted, got=f"a {type(found).__name__}", cure=cure))


def warn_of_hooks(where: str, label: str, *, of_all: bool = False) -> None:
    """An OpfuseWarning that hooks of the module at ``where`` do not run. of_all: hooks that torch has for all modules."""
    wanted, got = "none on a module that runs as a part of another", "hooks that do not run under a recipe"
    cure = f"register them on {label}, or before opfuse.fuse_"
    if of_all:
        got, cure = (
            f"hooks of all modules, which run for {label} alone under a recipe",
            "opfuse.unfuse_ the model to have them all",
        )
    warnings.warn(describe(f"{where} hooks", wanted=wanted, got=got, cure=cure), OpfuseWarning, stacklevel=3)


HOOKS_OF_RESULTS = ("_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
HOOKS = ("_forward_pre_hooks", *HOOKS_OF_RESULTS)


def has_hooks(module: nn.Module, kinds: Sequence[str] = HOOKS) -> bool:
    """Whether a call of the module runs more than its forward."""
    own = vars(module)
    return any(own.get(hooks) for hooks in kinds)


def has_global_hooks(kinds: Sequence[str] = HOOKS) -> bool:
    """Whether a call of any module runs hooks that torch has for all of them."""
    own = vars(nn.modules.module)
    return any(own.get(f"_global{hooks}") for hooks in kinds)


def _now(module: nn.Module, names: Sequence[str]) -> Settings:
    own, kind = vars(module), type(module)
    attributes = tuple((name, _told(own[name]) if name in own else _default(kind, name)) for name in names)
    return Settings(attributes, _there(own["_parameters"]), tuple(own["_modules"]), kind.forward)


def _default(kind: type[nn.Module], name: str) -> Any:
    """The class's value of an attribute that the module itself does not have; None for a method, which nothing may override."""
    value = getattr(kind, name, None)
    return value if isinstance(value, CONSTANTS) else None


def _told(value: Any) -> Any:
    return value if isinstance(value, SIMPLE) else type(value).__name__


def _there(parameters: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple([name for name, value in parameters.items() if value is not None])


@cache
def _read(kind: type[nn.Module]) -> frozenset[str]:
    """Attributes that the forward of a class reads, with the methods and properties that it names."""
    steps = (step for code in _codes(kind) for step in dis.get_instructions(code))
    return frozenset(step.argval for step in steps if step.opname in READS) - _OF_TORCH


_OF_TORCH = {*vars(nn.Module()), "forward"}
"""What torch and opfuse themselves assign in every module."""


READS = ("LOAD_ATTR", "LOAD_METHOD")


def _codes(kind: type[nn.Module]) -> set[CodeType]:
    """The code of a class's forward, and of everything in the class and its bases that it names."""
    bases = _bases(kind)
    waiting, seen = ["forward"], set[CodeType]()
    while waiting:
        name = waiting.pop()
        found = {code for base in bases for code in _nested(_function(vars(base).get(name)))} - seen
        seen |= found
        waiting += [each for code in found for each in code.co_names]
    return seen


def code_of(kinds: Iterable[type[nn.Module]]) -> int:
    """A number for what the forwards of classes do, the same in every process."""
    return crc32("".join([_text(kind) for kind in dict.fromkeys(kinds)]).encode())  # type: ignore[arg-type]


@cache
def _text(kind: type[nn.Module]) -> str:
    parts = [(code.co_code, code.co_names, [c for c in code.co_consts if isinstance(c, CONSTANTS)]) for code in _codes(kind)]
    return repr(sorted(map(repr, parts)))


def _bases(kind: type[nn.Module]) -> Sequence[type]:
    """The class and its bases below ``nn.Module``."""
    return kind.__mro__[: kind.__mro__.index(nn.Module)]


def _function(value: Any) -> Any:
    """The function behind a method, a property or a decorated function."""
    return inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", value))


@cache
def _wraps(function: Any, inner: Any) -> bool:
    """Whether ``function`` is ``inner`` behind decorators."""
    while function is not None and function is not inner:
        function = getattr(function, "__wrapped__", None)
    return function is inner


def forward_code(module: nn.Module) -> CodeType | None:
    """Of the forward that a module runs, without decorators; None if that is no function of Python."""
    forward = module.forward
    return _code(getattr(forward, "__func__", forward))


@cache
def _code(function: Any) -> CodeType | None:
    code = getattr(_function(function), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _nested(function: Any) -> Iterator[CodeType]:
    """The code of a function, and of functions inside of it."""
    waiting = [getattr(function, "__code__", None)]
    while waiting:
        code = waiting.pop()
        if isinstance(code, CodeType):
            yield code
            waiting += code.co_consts
