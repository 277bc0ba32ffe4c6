"""Refuses a stranger's forward, before it runs, that could do what others notice, or read what others may change.

A forward is run several times to see what it does, and seldom afterwards, since a pipeline replaces it. Whatever it changes it
has to reach first, and it reaches only its arguments, what it makes, and what its code names: globals, variables of functions
around it, and attributes. So each of these has to be a value that nobody can change, a part of torch, or code, which is read in
turn. Branches that a call does not take count as well. torch is trusted, for the recorder (``record.py``) sees its functions.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from enum import Enum
from functools import cache, lru_cache, partial
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.overrides import get_overridable_functions

from opfuse.core.operation import FusibleOperation
from opfuse.errors import with_article


class NotRecorded(BaseException):
    """A forward does what cannot be written down. got: what. wanted: what a forward that can be has there. cure: may be empty.

    No ``Exception``, which a forward may catch to do something else.
    """

    def __init__(self, got: str, wanted: str, cure: str = "") -> None:
        super().__init__(got, wanted)
        self.got, self.wanted, self.cure = got, wanted, cure


# -- what is safe ----------------------------------------------------------------------------------------------------------------

WRITES = {
    **dict.fromkeys(("STORE_GLOBAL", "DELETE_GLOBAL"), "a global variable"),
    **dict.fromkeys(("STORE_ATTR", "DELETE_ATTR"), "an attribute"),
    **dict.fromkeys(("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"), "a part of something"),
    **dict.fromkeys(("IMPORT_NAME", "IMPORT_STAR", "LOAD_BUILD_CLASS"), "what an import or a class makes"),
}
"""Instructions that change what others may have."""
GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")
CELLS = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")

CONSTANTS = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.Size, Enum)
"""Types of values that nobody can change."""

_NAMES = """
isinstance issubclass len int float bool str tuple list dict set frozenset slice type super min max abs sum zip enumerate all any
reversed sorted round callable NotImplemented Ellipsis
"""
BUILTINS = {name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)}
BUILTINS |= {*_NAMES.split()}
"""Functions and classes of Python that change nothing, and read nothing by a name that is a value."""

_NAMES = "is_tensor is_grad_enabled is_inference_mode_enabled arange empty full ones tensor zeros"
OF_TORCH = {getattr(torch, name) for name in _NAMES.split()}
OF_TORCH |= {each for functions in get_overridable_functions().values() for each in functions}
"""Functions of torch that the recorder sees, or that ask for what the modes of a recording decide: none asks for a dtype of
autocast, of which only one is tried."""

FIELDS = ("__dict__", "__globals__", "__setattr__", "__delattr__")
"""Attributes by which any other is reached."""

_NAMES = """
forward __call__ children named_children modules named_modules parameters named_parameters keys values items get_parameter
get_buffer get_submodule extra_repr
"""
METHODS = {*_NAMES.split(), *dir(torch.Tensor)} - {*FIELDS}
"""Methods of modules that change none; those that tensors have as well are the recorder's to see."""

_NAMES = """
init new setattr delattr init_subclass class_getitem post_init del eq hash repr str dir copy deepcopy reduce reduce_ex getstate
setstate
"""
UNCALLED = {f"__{name}__" for name in _NAMES.split()}
"""Methods that nothing calls without naming them, or that only look. Others with such names an operator may call."""

FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)


def _is_trusted(value: Any) -> bool:
    """Whether a function or a class is Python's or torch's and only calculates, or tells what something is."""
    name, module = getattr(value, "__name__", ""), getattr(value, "__module__", None) or ""
    if not isinstance(value, (type, *FUNCTIONS)):
        return False
    if module == "builtins":
        return name in BUILTINS
    if isinstance(value, type):
        return _is_of(value, "torch")
    only_looks = value is inspect.signature or getattr(math, name, None) is value
    return only_looks or value in OF_TORCH or module == nn.functional.__name__


def _is_of(value: Any, package: str) -> bool:
    return f"{getattr(value, '__module__', None)}.".startswith(f"{package}.")


def _has_fields(value: Any) -> bool:
    """Whether a value is an object with fields whose methods can be read: no container of Python's, and no object of torch."""
    bases = type(value).__mro__[:-1]
    return hasattr(value, "__dict__") and not any(_is_of(base, "builtins") or _is_of(base, "torch") for base in bases)


# -- code ------------------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def instructions(code: CodeType) -> tuple[tuple[str, Any, tuple[str, ...]], ...]:
    """Names of instructions with their argument; for those that read a global or a cell also the attributes that follow."""
    found: list[tuple[str, Any, tuple[str, ...]]] = []
    then: tuple[str, ...] = ()
    for each in reversed([*dis.get_instructions(code)]):
        found.append((each.opname, each.argval, then))
        then = (each.argval, *then) if each.opname in ATTRIBUTES[:2] else ()
    return (*reversed(found),)


def nested(function: Any) -> Iterator[CodeType]:
    """The code of a function, and of functions inside of it."""
    waiting = [getattr(function, "__code__", None)]
    while waiting:
        code = waiting.pop()
        if isinstance(code, CodeType):
            yield code
            waiting += code.co_consts


OutsideRead = tuple[Callable[[Any], Any], Any]
"""A function, and the name or the cell of which it returns the value."""


def contents(cell: CellType) -> Any:
    """The value of a variable of a function around; None if it has none."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


class CodeReach:
    """All that code reads beside its arguments, as far as it is written down.

    owners: classes and objects whose attributes may be read. names: those that are, each with the function that does. functions:
    those that are reached. of_torch: classes of torch whose methods may be called. places: of globals, variables of functions
    around, functions of modules. refused: what is not safe.
    """

    def __init__(self, known: Set[str] = BUILTINS, *, unwraps: bool = False, to_end: bool = False) -> None:
        self.known, self.unwraps, self.to_end = known, unwraps, to_end
        self.owners: dict[int, Any] = {}
        self.names = {"forward": "a call"}
        self.functions: dict[FunctionType, None] = {}
        self.places: dict[tuple[int, str], OutsideRead] = {}
        self.of_torch: dict[type, None] = {nn.Module: None}
        self.refused: list[str] = []

    def add_module(self, module: nn.Module) -> None:
        """A module and all in it may be called."""
        for part in module.modules():
            if id(part) not in self.owners and not isinstance(part, FusibleOperation):
                self.add_class(type(part))
                self._own(part)

    def add_class(self, kind: type) -> None:
        """Methods of a class and its bases may be called."""
        for base in kind.__mro__:
            if base in (object, SimpleNamespace, nn.Module) or (_is_trusted(base) and not self.to_end):
                self.of_torch[base] = None
            elif id(base) not in self.owners:
                self._own(base)
                for name, value in vars(base).items():
                    implicit = name.startswith("__") and name not in UNCALLED
                    if implicit and isinstance(value, (FunctionType, WrapperDescriptorType)):
                        self._value(value, name, kind.__qualname__)

    def read(self) -> None:
        """Read all code that is reached, or until something is not safe."""
        done = 0
        while len(self.functions) > done and (self.to_end or not self.refused):
            function = [*self.functions][done]
            done += 1
            cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
            for code in nested(function):
                for step in instructions(code):
                    self._step(function, cells, *step)
        for name in self.names.keys() - METHODS:
            if name in FIELDS or any(name in vars(kind) for kind in self.of_torch):
                self.refused.append(f"{self.names[name]}, which also reads {name}")

    def _step(self, function: FunctionType, cells: Mapping[str, Any], opname: str, name: Any, then: tuple[str, ...]) -> None:
        where = function.__qualname__
        if opname in ATTRIBUTES:
            self._name(name, where)
        elif opname in WRITES or (opname in ("STORE_DEREF", "DELETE_DEREF") and name in cells):
            what = WRITES.get(opname, "a variable of a function around it")
            self.refused.append(f"{where}, which also writes to {what}{f' ({name})' * isinstance(name, str)}")
        elif opname in GLOBALS and name in function.__globals__:
            self._follow(function.__globals__.get, name, name, then, where)
        elif opname in GLOBALS and name not in self.known:
            self.refused.append(f"{where}, which also reads {name}")
        elif opname in CELLS and name in cells and name != "__class__":
            self._follow(contents, cells[name], name, then, where)

    def _follow(self, get: Callable[[Any], Any], key: Any, name: str, then: tuple[str, ...], where: str) -> None:
        """A value that is no attribute of an object is read and, where it is a module or a class, ``then`` of it."""
        self.places[id(key if get is contents else getattr(get, "__self__", None)), name] = get, key
        value = get(key)
        if then and isinstance(value, (ModuleType, type)) and then[0] in vars(value):
            self._follow(vars(value).get, then[0], f"{name}.{then[0]}", then[1:], where)
        else:
            self._value(value, name, where)

    def _name(self, name: str, where: str) -> None:
        """An attribute of this name is read, of any owner."""
        if name not in self.names:
            self.names[name] = where
            for owner in [*self.owners.values()]:
                self._attribute(owner, name)

    def _own(self, owner: Any) -> None:
        self.owners[id(owner)] = owner
        for name in [*self.names]:
            self._attribute(owner, name)

    def _attribute(self, owner: Any, name: str) -> None:
        if name in vars(owner):
            self._value(vars(owner)[name], f"the attribute {name}", self.names[name], plain=True)

    def _value(self, value: Any, name: str, where: str, *, plain: bool = False) -> None:
        """A value is read. plain: objects with fields are safe, such as configs, as writes to fields are not, and their values
        are looked at.
        """
        inside: Iterable[Any] = ()
        match value:
            case _ if isinstance(value, (*CONSTANTS, torch.Tensor)) or value is NotImplemented or _is_trusted(value):
                pass
            case nn.Module():
                self.add_module(value)
            case tuple() | frozenset():
                inside = value
            case partial():
                inside = value.func, *value.args, *value.keywords.values()
            case MethodType():
                inside = value.__func__, value.__self__
            case staticmethod() | classmethod():
                inside = (value.__func__,)
            case property():
                inside = (value.fget,)
            case FunctionType() if not _is_of(value, "torch") or (self.to_end and _is_of(value, "torch.nn.modules")):
                self.functions[inspect.unwrap(value) if self.unwraps else value] = None
                inside = *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()
            case _ if plain and _has_fields(value):
                if id(value) not in self.owners:
                    self._own(value)
                    self.add_class(type(value))
            case _:
                what = "function" if isinstance(value, FUNCTIONS) else "class" if isinstance(value, type) else ""
                got = f"the {what} {value.__name__}" if what else with_article(type(value).__name__)
                self.refused.append(f"{where}, which also reads {name} ({got})")
        for each in inside:
            self._value(each, name, where, plain=plain)


def check_effects(module: nn.Module, known: Set[str] = BUILTINS, *, unwraps: bool = False) -> None:
    """NotRecorded if a forward of ``module``, or of a module in it, could do what others notice.

    known: functions of Python that it may call. unwraps: what is decorated runs without its decorators.
    """
    reach = CodeReach(known, unwraps=unwraps)
    reach.add_module(module)
    reach.read()
    if reach.refused:
        raise NotRecorded(reach.refused[0], "a forward that calculates from its arguments, parameters and constants")


def reach_of(kinds: Iterable[type[nn.Module]]) -> CodeReach:
    """All that the forwards of classes reach, but for what is in attributes of objects."""
    reach = CodeReach(to_end=True)
    for kind in kinds:
        reach.add_class(kind)
    reach.read()
    return reach


# -- the code of a class --------------------------------------------------------------------------------------------------


@cache
def names_read(kinds: tuple[Any, ...]) -> frozenset[str]:
    """Attributes that the forwards of classes read, with the methods and properties that they name."""
    return frozenset(reach_of(kinds).names) - _OF_TORCH


_OF_TORCH = {*vars(nn.Module()), "forward"}
"""What torch and opfuse themselves assign in every module."""


def codes_of(kind: type[nn.Module]) -> list[CodeType]:
    """The code of a class's forward, and of all functions and methods that it names."""
    return [code for function in reach_of([kind]).functions for code in nested(function)]


def code_of(kinds: Iterable[Any]) -> int:
    """A number for what the forwards of classes do, the same in every process."""
    return crc32("".join([_text(kind) for kind in dict.fromkeys(kinds)]).encode())


@cache
def _text(kind: type[nn.Module]) -> str:
    parts = [(code.co_code, code.co_names, [c for c in code.co_consts if isinstance(c, CONSTANTS)]) for code in codes_of(kind)]
    return repr(sorted(map(repr, parts)))
