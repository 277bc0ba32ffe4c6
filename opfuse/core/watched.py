"""Modules that pipelines run without calling them, and the roll of all that live: changes that pipelines must see are told.

So a call that changes nothing pays for one comparison with a number, :attr:`WatchedModule.epoch`.

The number rises with each change of what an op's class says, of its parameters' names and of its submodules; the metaclass
passes a write to a class on to the objects that exist. Code that is written into a class later counts as a subclass's: no
fusion replaces it. Two things are compared at each call instead: the list of a ``Sequential``, and the modules inside a user's
op. A plain mixin has no such metaclass, so a write to one ends no fusion, although the new method is called.

What a class declares of its methods holds for those methods, and ends where a subclass or an instance replaces one. A fusion
computes what an op's traits say, and calls none of the op's protocol methods. So once a class replaces one, directly or by a
mixin, what its bases declared about the methods no longer holds: it has the traits that it declares itself, and no others.

Such an op matches no built-in pattern and runs by itself. It gets its tensors uncast; the methods of its base cast, by
``ctx.cast``, as quantize nodes would. A class that declares the traits again promises that fusions may take it. An op with its
own ``forward`` is called as a module, outside of pipelines.

Helpers that fused implementations call as well (``produce``, ``forward_stage``, ``input_gradient``, ``make_quantizer`` ...) may
be replaced without losing fusions. Helpers that a fusion would skip (``compute_dtype`` of an elementwise op, ``produce`` of a
norm) count as protocol methods.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from abc import ABCMeta
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch import nn

from opfuse.core.tracers import check_constructed_outside
from opfuse.errors import OpfuseWarning, UnsupportedError, describe
from opfuse.sources import class_code, package_code
from opfuse.torch_private.compiler import constant_when_traced, in_body
from opfuse.torch_private.dispatch import without_modes

# -- the roll of pipelines, ops and converted modules that are alive: graphs of torch.compile know them by number ----------------

_enrolled: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers, _sites = itertools.count(1), itertools.count(1)


def enroll(thing: Any) -> torch.Tensor:
    """A ticket by which a graph knows an object of this process: an int64 tensor () that holds the object's number.

    Dynamo treats a number or a name as a constant and compiles anew for each object; a tensor is an input of the graph.
    """
    number = next(_numbers)
    _enrolled[number] = thing
    with torch.inference_mode(False), without_modes():
        return torch.tensor(number, dtype=torch.int64, device="cpu")


def enrolled(number: int) -> Any:
    """The object of that number; UnsupportedError if there is none."""
    thing = _enrolled.get(number)
    if thing is None:
        where, wanted = f"pipeline {number} in a graph of torch.compile", "a model that is alive"
        raise UnsupportedError(describe(where, wanted=wanted, got="a graph that outlived it", cure="compile the model anew"))
    return thing


def all_enrolled() -> list[Any]:
    """The objects that are alive, oldest first."""
    # ``values()`` runs Python code, in which another thread, or a finalizer, may change what is iterated over.
    return [thing for ref in _enrolled.valuerefs() if (thing := ref()) is not None]


@constant_when_traced
def prepared(ticket: torch.Tensor, form: str = "") -> tuple[int, ...]:
    """Get the object of a ticket ready to be traced; returns its number, one for the place of the call, whether that is in a
    checkpoint, and those that keep files of compilers apart: for the object's code, or that of its ops, for its form, and for the
    code of this package.

    Dynamo runs this function while it traces, without looking into it. The result becomes a constant of the graph, guarded by
    ``form``: objects of one form share the graph. They all get ready now, since what is made later fails a guard.
    """
    number = int(ticket)
    thing = enrolled(number)
    thing.get_ready()
    for other in all_enrolled():
        if type(other) is type(thing) and hasattr(thing, "resembles") and other.resembles(thing):
            other.get_ready()
    code = getattr(thing, "code", None) or class_code(type(op) for op in getattr(thing, "ops", ()))
    return number, next(_sites), int(in_body()), code, crc32(form.encode()), package_code()


class Enrolled(nn.Module):
    """A module that graphs of torch.compile know by ``ticket``, which a copy has anew."""

    ticket: torch.Tensor

    def __new__(cls, *_: object, **__: object) -> Self:
        check_constructed_outside(cls.__name__)
        made = super().__new__(cls)
        made.__dict__["ticket"] = enroll(made)
        return made

    def get_ready(self) -> Any:
        """Make what dynamo reads but must not follow the making of."""

    def resembles(self, other: Any) -> bool:
        """Whether a graph that was made for ``other``, of the same class, may do for this one."""
        mine, others = self.__dict__.get("spec"), other.__dict__.get("spec")
        return bool(mine == others)


# -- changes -------------------------------------------------------------------------------------------------------------------


class ParameterSlot(NamedTuple):
    """name: of a parameter, dotted. held, key: the dictionary that holds it, and its name there."""

    name: str
    held: dict[str, nn.Parameter | None]
    key: str


class ParameterSlots(tuple[ParameterSlot, ...]):
    """Those of a module. No plain tuple, of which torch.export puts a copy in its place, over copies of the dictionaries."""


ParameterPlaces = tuple[tuple[dict[str, nn.Parameter | None], str], ...]
"""The dictionary that holds each parameter, and its name there: a form that every call reads fast."""


class Tree(NamedTuple):
    """The modules inside a module and the names of their parameters, as they were, to be compared with what is there now."""

    modules: tuple[tuple[dict[str, nn.Module | None], list[nn.Module | None]], ...]
    parameters: tuple[tuple[dict[str, nn.Parameter | None], list[str]], ...]

    @classmethod
    def of(cls, module: nn.Module) -> Tree:
        """As it is now."""
        parts = list(module.modules())
        return cls(
            tuple((part._modules, list(part._modules.values())) for part in parts),
            tuple((part._parameters, list(part._parameters)) for part in parts),
        )

    @property
    def stands(self) -> bool:
        """Whether nothing has been replaced, added or removed."""
        for modules, then in self.modules:
            if [*modules.values()] != then:
                return False
        for parameters, names in self.parameters:  # noqa: SIM110 - a generator is a function more for each, at every call
            if [*parameters] != names:
                return False
        return True


class WatchedClass(ABCMeta):
    """The metaclass of ops: a write to a class is a change of its objects, as a write to an object is.

    A class remembers the attributes that it was made with. So a method that was written into it later, by hand or by
    ``unittest.mock``, is known as one that the class's declarations do not speak of; one that is put back is as it was.

    rewritten: a cache of :func:`rewritten`, emptied by each write to a class.
    """

    rewritten: ClassVar[WeakKeyDictionary[type, frozenset[str]]] = WeakKeyDictionary()

    def __init__(cls, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        type.__setattr__(cls, _MADE_WITH, {})

    def __setattr__(cls, name: str, value: Any) -> None:
        cls._write(name, partial(super().__setattr__, name, value))

    def __delattr__(cls, name: str) -> None:
        cls._write(name, partial(super().__delattr__, name))

    def _write(cls, name: str, write: Callable[[], None]) -> None:
        """Write an attribute, and tell the objects of the class that it changed."""
        was = vars(cls).get(name)
        write()
        made = None if name == _MADE_WITH else vars(cls).get(_MADE_WITH)
        if made is not None:
            made.setdefault(name, was)
        WatchedClass.rewritten = WeakKeyDictionary()  # a new one: another thread may be filling the old one from before the write
        if made is None:  # it is being made, here or in another process
            return
        for op in all_enrolled():
            if isinstance(op, cls) and op._is_said(name):
                op.changed()


_MADE_WITH = "_made_with"
"""The attribute of a class that holds the first value of each attribute that was written since."""


def rewritten(cls: type) -> frozenset[str]:
    """The attributes of a class and its bases that are not what the class was made with."""
    known = WatchedClass.rewritten
    found = known.get(cls)
    if found is None:
        made = ((base, vars(base).get(_MADE_WITH, {})) for base in cls.__mro__)
        changed = (name for base, those in made for name, was in those.items() if vars(base).get(name) is not was)
        found = known[cls] = frozenset(changed)
    return found


class WatchedModule(Enrolled):
    """A module that counts the changes of what its class says, of its parameters' names and of its submodules.

    epoch: the changes of all modules that a pipeline runs. revision: those of this one. Before a pipeline has it, nothing counts.
    """

    epoch: ClassVar[int] = 0
    revision: int = 0
    label: Any
    _captured: bool = False
    _member: bool = False

    def capture(self, *, member: bool = False) -> None:
        """A pipeline takes this op in. member: and runs it without calling it as a module, so that its hooks do not run."""
        self.__dict__["_captured"] = True
        if member:
            self.__dict__["_member"] = True

    def changed(self) -> None:
        """Have pipelines look at this op again."""
        self.__dict__.pop("_slots", None)
        if self._captured:
            self.__dict__["revision"] = self.revision + 1
            WatchedModule.epoch += 1

    def patches(self, methods: Collection[str]) -> bool:
        """Whether one of ``methods`` was replaced on this very object, or written into its class after that was made."""
        return not self.__dict__.keys().isdisjoint(methods) or not rewritten(type(self)).isdisjoint(methods)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module) or name == "__class__" or self._is_said(name):
            self.changed()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self.changed()

    def _is_said(self, name: str) -> bool:
        """Whether the classes of opfuse have such an attribute, which an object's own stands for."""
        return any(name in vars(base) for base in type(self).__mro__ if base.__module__.startswith("opfuse."))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        known = name in self._parameters
        super().register_parameter(name, param)
        if not known:
            self.changed()

    def add_module(self, name: str, module: nn.Module | None) -> None:
        super().add_module(name, module)
        self.changed()

    def __getstate__(self) -> dict[str, Any]:
        # Plans hold live ops, and a copy is in no pipeline yet.
        own = ("ticket", "_fuser", "_slots", "_captured", "_member", "_shown", "_shown_unused", "revision")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    # -- hooks -------------------------------------------------------------------------------------------------------------

    def _register_with_warning(self, register: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._member:
            cure = "register it on the Sequential, or on an nn.Module around the op"
            got = "one registered after the first call"
            message = describe(f"{self.label} hooks", wanted="none on an op of a pipeline, which never run", got=got, cure=cure)
            warnings.warn(message, OpfuseWarning, stacklevel=3)
        return register(*args, **kwargs)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self._register_with_warning(super().register_forward_pre_hook, *args, **kwargs)

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self._register_with_warning(super().register_forward_hook, *args, **kwargs)

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self._register_with_warning(super().register_full_backward_pre_hook, *args, **kwargs)

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self._register_with_warning(super().register_full_backward_hook, *args, **kwargs)

    def register_backward_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self._register_with_warning(super().register_backward_hook, *args, **kwargs)


# -- what classes declare ------------------------------------------------------------------------------------------------------

METHODS = ("op_forward", "op_backward", "fuser_forward", "fuser_backward")
"""What the compiler calls to run a basic op."""

CALLS = ("forward", "__call__")
"""What torch calls to run a module; a pipeline calls neither."""

WITHOUT: Mapping[str, Any] = {"traits": frozenset(), "is_cast": False, "accepts_quantized": False}
"""What classes declare about their protocol methods, with the values that hold where nothing is declared."""

_WORDS: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
"""The class that each word of patterns means."""


def place(cls: type, names: Collection[str]) -> int:
    """How far up the bases of ``cls`` the first class that has one of these names is: 0 for ``cls`` itself."""
    for i, base in enumerate(cls.__mro__):
        if not vars(base).keys().isdisjoint(names):
            return i
    return len(cls.__mro__)


def is_unchanged(cls: type, declared: Collection[str], methods: Collection[str]) -> bool:
    """Whether none of ``methods`` is overridden below the nearest class that has one of ``declared``."""
    return place(cls, declared) <= place(cls, methods)


def adds_code(cls: type) -> bool:
    """Whether ``cls``, or a mixin of it, comes from outside of opfuse and has methods or properties that no op speaks for."""
    nearest = next((i for i, base in enumerate(cls.__mro__[1:], 1) if "reads_training" in vars(base)), len(cls.__mro__))
    return any(
        not base.__module__.startswith("opfuse.")
        and any(callable(part) or isinstance(part, property) for part in vars(base).values())
        for base in cls.__mro__[:nearest]
    )


def word_of(cls: type, kind: str, *, declared: bool) -> str:
    """What patterns call ``cls``: its kind, behind the name of its module where another class has that kind.

    declared: the class says itself that patterns which name the kind mean it, too.
    """
    first = _WORDS.setdefault(kind, cls)
    if first is cls or declared:
        return kind
    if (first.__module__, first.__name__) == (cls.__module__, cls.__name__):  # defined once more
        _WORDS[kind] = cls
        return kind
    return f"{cls.__module__}.{kind}"


def calls(cls: type, method: str, other: str) -> bool:
    """Whether ``method`` of ``cls`` leads to ``other``, as far as its code and that of the bases that it calls tell."""
    for base in cls.__mro__:
        code = getattr(vars(base).get(method), "__code__", None)
        if code is None and method in vars(base):
            return True
        if code is not None and (other in code.co_names or method not in code.co_names):
            return other in code.co_names
    return True


def kind_of(name: str) -> str:
    """The kind of an op whose class has this name and declares none: ``MyLinear`` is ``my_linear``."""
    out = ""
    for i, char in enumerate(name):
        after_lower = i and name[i - 1].islower() and char.isupper()
        before_lower = i and char.isupper() and i + 1 < len(name) and name[i + 1].islower() and name[i - 1] != "_"
        out += ("_" if after_lower or before_lower else "") + char.lower()
    return out
