"""What a pipeline was proven on, and whether a call still has it.

A converted module runs its pipeline only if everything holds that the forward was read with: the attributes that it reads, its
submodules and their forwards, no hooks on modules that the pipeline runs without calling them, and inputs like those that the
forward was tried on. Otherwise its own forward runs, over its converted submodules.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from types import MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from opfuse.convert.code import CONSTANTS, FUNCTIONS, names_read, reach_of
from opfuse.convert.pipeline import is_matrix
from opfuse.errors import Described, notice
from opfuse.runtime.compile.saved_call import autocast_dtype
from opfuse.runtime.weights.cast_cache import sharded_part
from opfuse.torch_private.modules import has_global_hooks, has_hooks
from opfuse.torch_private.sharding import is_flat_parameter
from opfuse.torch_private.tensors import base_of, no_torch_function

SHOWN = 100
"""Characters of a value that a message shows."""

FLAT = "its parameters are views into a flat one, as FullyShardedDataParallel makes them"
FULLY_SHARD = "shard the model with torch.distributed.fsdp.fully_shard, which keeps parameters as they are"
"""What a message says of a module in FSDP1, whose pipelines would not find their parameters."""

SHARD_WHOLE = "convert the model as it was built, and then call fully_shard on modules that run as a whole: layers, or the model"
"""What to do where parts of a pipeline were sharded."""

# -- the call --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proven:
    """The calls for which a pipeline was proven to compute what the forward does, by types, dtypes and shapes of their arguments.

    linear: the pipeline is that of one linear layer, which takes what a linear layer takes. ranks: numbers of dimensions of
    the input. dtypes: of inputs and parameters; empty: any. in_autocast: also under torch.autocast. columns: of each further
    argument, which has the rows of the first. views: only those whose arguments can be viewed as a matrix. in_graph: also in a
    graph of torch.compile.
    """

    linear: bool = False
    ranks: Container[int] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    in_autocast: bool = False
    columns: tuple[int, ...] = ()
    views: bool = False
    in_graph: bool = True

    def covers(self, x: Any, extras: Sequence[Any], parameters: Sequence[torch.Tensor | None]) -> bool:
        """Whether a call with these arguments is one of them."""
        dense = _runs_as_torch(x)
        for parameter in parameters:  # of which few calls of Python are made: this is asked at every call
            if parameter is not None and (type(parameter) not in _PLAIN or parameter.layout is not torch.strided):
                dense = dense and _runs_as_torch(parameter)
        if not dense or type(x) is not torch.Tensor:
            return dense and self.linear
        cast = autocast_dtype(x)
        dtype = x.dtype if cast is None else cast
        if cast is None and not all(p is None or p.dtype == dtype for p in parameters):
            return False
        if cast is not None and torch.float64 in (x.dtype, *[p.dtype for p in parameters if p is not None]):
            return False  # which torch.autocast leaves alone
        suits = not self.views or all(is_matrix(each) for each in (x, *extras) if isinstance(each, torch.Tensor))
        if self.linear or not suits or (not self.in_graph and torch.compiler.is_compiling()):
            return self.linear and suits
        if x.dim() not in self.ranks or 0 in x.shape or (cast is not None and not self.in_autocast) or _is_tagged(x):
            return False
        fits = not self.dtypes or dtype in self.dtypes
        return fits and all(self._adds(x, dtype, *pair) for pair in zip(extras, self.columns))

    def _adds(self, x: torch.Tensor, dtype: torch.dtype, extra: Any, columns: int) -> bool:
        plain = type(extra) is torch.Tensor and extra is not x
        return plain and extra.dtype == dtype and extra.shape == (*x.shape[:-1], columns) and not _is_tagged(extra)


def _runs_as_torch(value: Any) -> bool:
    """Whether a tensor is dense, and its class hears of no functions, of which it could make something else."""
    if not isinstance(value, torch.Tensor):
        return True
    hears = type(value) not in _PLAIN and type(value).__torch_function__ is not no_torch_function
    return not hears and value.layout is torch.strided and not value.is_nested


_PLAIN = (nn.Parameter, torch.Tensor)


def _is_tagged(x: torch.Tensor) -> bool:
    """Whether somebody has assigned attributes to a tensor, which code that a pipeline stands for may read."""
    return not torch.compiler.is_compiling() and any(not name.startswith("_dynamo") for name in vars(x))


# -- the module as it was --------------------------------------------------------------------------------------------------------


class OfClass:
    """A function or a property that a class has under a name. A pickle has both, by which another process finds its own."""

    def __init__(self, kind: type, name: str) -> None:
        self.kind, self.name, self.value = kind, name, getattr(kind, name, None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OfClass) and _is_same(self.value, other.value)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.value)

    def __deepcopy__(self, memo: Any) -> OfClass:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return OfClass, (self.kind, self.name)


COMPARED = (*CONSTANTS, *FUNCTIONS, property)
"""Types of attributes that are compared, on the module itself or on its class."""

DEPTH = 4
"""How deep configs in configs, and lists in lists, are compared."""

ALWAYS = ("in_features", "out_features", "_apply_gate")
"""Attributes that are compared even if no forward reads them: code that resizes a module sets the first two, and the grouped
products of transformers' experts call the last, where the forward of the class does not.
"""


_SAVED = frozenset({"architectures", "dtype", "quantization_config", "transformers_version"})
"""Fields of a config of transformers that ``save_pretrained`` writes, or a user for it: what the file says of the weights, which
forwards read of the weights themselves."""


class Settings(NamedTuple):
    """What forwards read of a module beside tensors.

    readers: the classes whose forwards may. attributes: by name; of an object, such as a config, its fields that they may read.
    parameters: names and shapes, None of those that are None. submodules: by name. of_class: the forward of its class. call: its
    ``__call__``, which runs the forward. Not the mode: a chain is the same in all.
    """

    readers: tuple[type[nn.Module], ...]
    attributes: tuple[tuple[str, Any], ...]
    parameters: tuple[Any, ...]
    submodules: tuple[Any, ...]
    of_class: Any
    call: Any

    def hold(self, module: nn.Module) -> bool:
        """Whether ``module`` is unchanged. Asked at every call, so identical objects are not compared further."""
        own, kind = vars(module), type(module)
        if kind.forward is not self.of_class or kind.__call__ is not self.call:
            return False
        for name, before in self.attributes:
            now = own[name] if name in own else getattr(kind, name, None)
            then = before.value if type(before) is OfClass else before
            if now is not then and not _is_same(_seen(now, names_read(self.readers)), then):
                return False
        if _present(own["_parameters"]) != self.parameters:
            return False
        modules: Mapping[str, Any] = own["_modules"]
        if not modules and not self.submodules:
            return True
        names, then = zip(*self.submodules) if self.submodules else ((), ())
        return (*modules,) == names and all(map(is_, modules.values(), then))

    @property
    def named(self) -> dict[str, Any]:
        """All of them by name, for messages."""
        rest = {"parameters": self.parameters, "forward of its class": self.of_class, "__call__ of its class": self.call}
        return {**dict(self.attributes), **dict(self.submodules), **rest}


def settings_of(module: nn.Module, readers: tuple[type[nn.Module], ...]) -> Settings:
    """The settings of a module as it is now."""
    own, kind, read = vars(module), cast(Any, type(module)), names_read(readers)
    of_classes = {name for base in kind.__mro__[: kind.__mro__.index(nn.Module)] for name in vars(base)}
    names = [name for name in sorted({*read, *ALWAYS}) if name in own or name in of_classes]
    attributes = tuple((name, _seen(own[name], read) if name in own else _seen_in_class(kind, name, read)) for name in names)
    parameters = _present(own["_parameters"])
    return Settings(readers, attributes, parameters, tuple(own["_modules"].items()), kind.forward, kind.__call__)


def _reached(
    module: nn.Module, inlined: Container[str], path: str = "", above: tuple[type[nn.Module], ...] = ()
) -> Iterator[tuple[str, nn.Module, tuple[type[nn.Module], ...]]]:
    """A module and those in it whose attributes its forward may read, by path, with the classes whose forwards may.

    inlined: the paths of those whose forwards are a part of it. Of the others, it reads those that it names.
    """
    readers = (*above, type(module))
    yield path, module, readers
    above = readers if not path or path in inlined else above
    for name, part in module._modules.items():
        below = f"{path}.{name}".lstrip(".")
        if part is not None and (below in inlined or name.isdigit() or name in names_read(above)):
            yield from _reached(part, inlined, below, above)


def _seen(value: Any, read: frozenset[str], depth: int = DEPTH) -> Any:
    """What is compared of an attribute's value. A tuple stands for what has parts or fields, which may change.

    read: names of the fields that forwards may read.
    """
    of = type(value)  # isinstance would read __class__ of an object once for each type, and configs compute what is read of them
    if issubclass(of, COMPARED):
        return value
    if issubclass(of, (nn.Module, torch.Tensor, type)) or not depth:
        return of
    if issubclass(of, (tuple, list)):
        return (of, *(_seen(each, read, depth - 1) for each in value))
    if issubclass(of, dict):
        return (dict, *((key, _seen(each, read, depth - 1)) for key, each in value.items()))
    if issubclass(of, partial):
        return (value.func, *_seen(value.args, read, depth - 1), *_seen(value.keywords, read, depth - 1))
    fields, names = getattr(value, "__dict__", None) or {}, read
    of_class = {name: found for name in names - fields.keys() if (found := getattr(of, name, None)) is not None}
    if any(isinstance(found, property) for found in of_class.values()):  # which may read any field
        names |= fields.keys()
    names = names - _SAVED if hasattr(of, "save_pretrained") else names
    own = [(name, _seen(fields[name], read, depth - 1)) for name in sorted(names & fields.keys())]
    return (
        of,
        *own,
        *((name, _seen_in_class(of, name, read)) for name in sorted(of_class) if isinstance(of_class[name], COMPARED)),
    )


def _seen_in_class(kind: Any, name: str, read: frozenset[str]) -> Any:
    value = getattr(kind, name, None)
    return OfClass(kind, name) if isinstance(value, (*FUNCTIONS, property)) else _seen(value, read)


def _is_same(now: Any, before: Any) -> bool:
    """Whether two values are one, or equal constants; tuples part by part."""
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if type(now) is tuple:
        return len(now) == len(before) and all(map(_is_same, now, before))
    return isinstance(now, (*CONSTANTS, MethodType, OfClass)) and bool(now == before)


def _present(parameters: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple([(name, None if value is None else value.shape) for name, value in parameters.items()])


class Outside:
    """What the forwards of classes read beside arguments and attributes: globals, variables of functions around, functions of
    modules.

    places: of each, how it is read, and what it was. parts: of each function, its code and defaults, which autoreloaders replace.
    A copy reads the same; in another process constants are what they were here.
    """

    def __init__(self, kinds: Iterable[type[nn.Module]], constants: Sequence[Any] = ()) -> None:
        self.kinds = tuple(dict.fromkeys(kinds))
        reach = reach_of(self.kinds)
        found = [(get, key, get(key)) for get, key in reach.places.values()]
        if len(constants) == len(found):
            found = [(get, key, then if isinstance(now, CONSTANTS) else now) for (get, key, now), then in zip(found, constants)]
        self.places = tuple(found)
        self.parts = tuple([(each, each.__code__, each.__defaults__, each.__kwdefaults__) for each in reach.functions])

    def __deepcopy__(self, memo: Any) -> Outside:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Outside, (self.kinds, [then if isinstance(then, CONSTANTS) else None for _, _, then in self.places])

    def change(self) -> str | None:
        """What was read and what is there now, of something that is another one; None: nothing."""
        for get, key, then in self.places:
            now = get(key)
            if now is not then and not _is_same(now, then):
                name = key if isinstance(key, str) else "a variable of a function around it"
                return f"{name} was {then!r:.80}, is {now!r:.80}"
        for function, code, defaults, named in self.parts:
            if function.__code__ is not code or function.__defaults__ is not defaults or function.__kwdefaults__ is not named:
                return f"the code or the defaults of {function.__qualname__} were replaced"
        return None


class ModuleGuard:
    """What must hold of a module: what its forward reads is what it was.

    label: how messages call it. members: if a pipeline stands for submodules, all that the module has, by path. forwards: by
    path, what :func:`opfuse.fuse_` has put in the place of a member's forward; None: nothing, so it has that of its class.
    settings: of the module and of those in it that are read, by path.
    """

    def __init__(self, module: nn.Module, label: str, members: Mapping[str, nn.Module]) -> None:
        self.module, self.label = module, label
        self.members = dict(members) and {path: part for path, part in module.named_modules() if path}
        self.forwards: dict[str, Any] = {}
        self.inlined = {path for path in self.members if any(f"{member}.".startswith(f"{path}.") for member in members)}
        reached = _reached(module, self.inlined)
        self.settings = {path: (part, settings_of(part, readers)) for path, part, readers in reached}
        self.outside = Outside(map(type, (module, *self.members.values())))

    @property
    def of_class(self) -> Any:
        """The forward that the module's class had."""
        return self.settings[""][1].of_class

    def change(self) -> Described | None:
        """What has changed since the module was converted; None: nothing."""
        for path, (part, settings) in self.settings.items():
            if not settings.hold(part):
                wanted, got = settings.named, settings_of(part, settings.readers).named
                if _is_flattened(part):
                    return self._told(path, FLAT, FULLY_SHARD)
                return self._told(path, ", ".join(_changes(wanted, got)))
            if path not in self.inlined:
                continue
            if has_hooks(part):
                hooked = "a hook was added to a module that is fused into another; it is called by itself now"
                return self._told(path, hooked, SHARD_WHOLE if sharded_part(part) else None)
            own = vars(part).get("forward")
            if getattr(own, "__self__", own) is not self.forwards.get(path):
                return self._told(path, "its forward was replaced")
        outside = self.outside.change()
        if outside is None and self.members and has_global_hooks():
            outside = "hooks for all modules were registered; its submodules are called for them"
        return None if outside is None else self._told("", outside)

    def _told(self, path: str, got: str, cure: str | None = None) -> Described:
        rest = "until then the module's own forward runs, over its converted submodules"
        cure = f"{cure or 'call opfuse.fuse_ again if this is to stay'}; {rest}"
        return notice(f"{self.label}.{path}".rstrip(".") + " has changed since fuse_", got=got, cure=cure)


def _is_flattened(module: nn.Module) -> bool:
    """Whether ``FullyShardedDataParallel`` has taken a module's parameters into a flat one, or the module holds that one."""
    held = (*module._parameters.values(), *(each for each in [*vars(module).values()] if isinstance(each, torch.Tensor)))
    return any(is_flat_parameter(each) or is_flat_parameter(base_of(each)) for each in held if each is not None)


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What differs between settings, by name."""
    for name in {**before, **now}:
        if not _is_same(before.get(name), now.get(name)):
            values = before.get(name, MISSING), now.get(name, MISSING)
            was, became = map(_shortened, _apart(*values))
            yield f"{name!r} was {was}, is {became}"


class _Missing:
    def __repr__(self) -> str:
        return "missing"


MISSING = _Missing()


def _apart(one: Any, other: Any) -> tuple[Any, Any]:
    """What differs between two values: of tuples, such as the fields of a config, the elements that do."""
    while type(one) is tuple is type(other) and len(one) == len(other):
        if one and isinstance(one[0], str) and one[0] == other[0]:
            break  # a name and its value
        pairs = [(before, now) for before, now in zip(one, other) if not _is_same(before, now)]
        if len(pairs) != 1:
            return tuple([before for before, _ in pairs]), tuple([now for _, now in pairs])
        ((one, other),) = pairs
    return one, other


def _shortened(value: object) -> str:
    """A value in at most :data:`SHOWN` characters; of a module that holds others its class alone, and of a method its name, since
    the module that it is bound to may be asked here how it shows itself.
    """
    if isinstance(value, nn.Module) and [*value.children()]:
        return f"a {type(value).__qualname__} of {type(value).__module__}"
    if isinstance(value, MethodType):
        return f"the method {value.__qualname__} of {type(value.__self__).__qualname__}"
    text = " ".join(repr(value).split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
