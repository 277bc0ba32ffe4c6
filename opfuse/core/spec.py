"""The spec of an op: its hyper-parameters as a frozen dataclass, whose field types say what each may hold.

A built-in op writes them once, as the arguments of its constructor under :func:`hyper_parameters`. What is checked, turned into
its normal form, told in errors, printed by ``repr`` and written in configuration files follows from the fields and their domains
(see :mod:`opfuse.domains`).

The constructor declares the dataclass and not the other way round: a generated constructor would hide its arguments from type
checkers and editors.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass, replace
from itertools import takewhile
from typing import Annotated, Any, ParamSpec, TypeVar, cast, get_type_hints

import torch
from torch import nn

from opfuse.core.signature import checked_dtype
from opfuse.domains import NON_NEGATIVE, POSITIVE, SHAPE, SIZE, SIZES, Domain, domain_of, keywords
from opfuse.errors import SpecError, UnknownArgumentError, UnsupportedError, describe, nearest

Size = Annotated[int, SIZE]
SizesLike = Annotated[int | Iterable[int], SIZES]
Shape = Annotated[Iterable[int], SHAPE]
Positive = Annotated[float, POSITIVE]
NonNegative = Annotated[float, NON_NEGATIVE]
"""Types of arguments that take less than all integers, tuples or floats."""

AnySpec = TypeVar("AnySpec")
P = ParamSpec("P")


@dataclass(frozen=True)
class NoSpec:
    """Spec of an op that keeps its hyper-parameters to itself; no guard can read them."""


_ARGUMENTS = {"use_bias": "bias"}
"""Fields of specs that are called otherwise than their argument, since the op has a parameter of that name."""

_FIELDS = {name: field for field, name in _ARGUMENTS.items()}


def argument(field: str) -> str:
    """The argument of a constructor that a field of the spec holds."""
    return _ARGUMENTS.get(field, field)


PLACEMENT = ("device", "dtype", "owner", "process_group")
"""Arguments that say where an op's parameters are, or which ranks it meets, and not what it computes."""


def hyper_parameters(init: Callable[P, None]) -> Callable[P, None]:
    """An op's constructor whose arguments, but for :data:`PLACEMENT`, are the fields of the op's spec.

    The constructor gets them in their normal form; SpecError for a value that its annotation does not allow. So a
    hyper-parameter has its name, type and default in one place, which ``inspect.signature``, editors and type checkers read.
    SpecError for a class in place of its constructor.
    """
    if isinstance(init, type):
        cure = "write @hyper_parameters on the line above def __init__"
        raise SpecError(describe("hyper_parameters", wanted="the constructor of an op", got=repr(init), cure=cure))
    signature = inspect.signature(init)
    _, *arguments = signature.parameters.values()
    named = {_FIELDS.get(p.name, p.name): p for p in arguments if p.name not in PLACEMENT}
    defaults = {name: MISSING if p.default is p.empty else p.default for name, p in named.items()}
    cls = init.__qualname__.rpartition(".__init__")[0].rpartition(".")[2].lstrip("_")
    spec = make_dataclass(f"{cls}Spec", [(n, p.annotation, field(default=defaults[n])) for n, p in named.items()], frozen=True)
    spec.__module__, spec.__doc__ = init.__module__, f"Hyper-parameters of {cls}."
    init.__globals__.setdefault(spec.__name__, spec)  # where pickle looks for it

    @functools.wraps(init)
    def constructor(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return init(*args, **kwargs)  # Python says it better
        bound.apply_defaults()
        given, op = bound.arguments, cast(Any, args[0])
        owner = op if given.get("owner") is None else given["owner"]
        made = checked_spec(spec(**{name: given[p.name] for name, p in named.items()}), type(owner).__name__)
        given.update({p.name: getattr(made, name) for name, p in named.items()})
        if _declares(type(op)) is spec:  # a subclass with a spec of its own calls this with what its base takes
            op.__dict__["spec"] = made
        return init(*bound.args, **bound.kwargs)

    constructor.spec = spec  # type: ignore[attr-defined]
    return constructor


def annotations_of(op: type) -> dict[str, Any]:
    """The public annotations of an op's class and its bases up to ``nn.Module``, those of the class last.

    A text annotation is looked up as a name in its module and not evaluated, which would take ten times as long.
    """
    ours = takewhile(lambda base: base is not nn.Module, op.__mro__)
    found = (
        (name, _resolved(base, hint)) for base in ours for name, hint in inspect.get_annotations(base).items() if name[0] != "_"
    )
    return dict(reversed(list(found)))


def spec_of(op: type) -> type:
    """The spec that an op's class declares by its constructor or by the annotation ``spec``; NoSpec where there is none."""
    spec = _declares(op)
    return spec if isinstance(spec, type) and is_dataclass(spec) else NoSpec


def spec_fields(op: nn.Module) -> Collection[str]:
    """The names of an op's hyper-parameters; none before it has a spec."""
    return getattr(type(op.__dict__.get("spec")), "__dataclass_fields__", ())


def _declares(op: type) -> Any:
    """The spec of the nearest class that declares one; None if no class does."""
    for base in takewhile(lambda base: base is not nn.Module, op.__mro__):
        made = getattr(vars(base).get("__init__"), "spec", None)
        declared = inspect.get_annotations(base).get("spec")
        if made is not None or declared not in (None, "Any"):
            return made or _resolved(base, declared)
    return None


def _resolved(cls: type, hint: Any) -> Any:
    return getattr(sys.modules.get(cls.__module__), hint, hint) if isinstance(hint, str) else hint


def _hints(cls: type) -> dict[str, Any]:
    """The annotations of a class as types; none where a name in them leads nowhere, as that of a class in a function."""
    try:
        return get_type_hints(cls, include_extras=True)
    except (NameError, TypeError):
        return {}


@functools.cache
def domains(spec: type) -> dict[str, Domain]:
    """What each field of a spec may hold; a field whose type says nothing of it is left out."""
    hints = _hints(spec)
    found = {field.name: domain_of(hints.get(field.name)) for field in fields(spec)}
    return {name: domain for name, domain in found.items() if domain is not None}


def checked_spec(spec: AnySpec, where: str) -> AnySpec:
    """``spec`` with every field in its normal form; SpecError, which speaks of ``where``, for a value outside of its domain."""
    cls: type = type(spec)
    if not is_dataclass(cls):
        cure = "pass an instance of a class under @dataclass(frozen=True)"
        raise SpecError(describe(f"{where} spec", wanted="a frozen dataclass", got=repr(spec), cure=cure))
    given = ((name, domain, getattr(spec, name)) for name, domain in domains(cls).items())
    read = {name: (value, domain.checked(f"{where}.{argument(name)}", value, SpecError)) for name, domain, value in given}
    changed = {name: normal for name, (value, normal) in read.items() if normal is not value}
    return replace(spec, **changed) if changed else spec  # type: ignore[type-var]


def check_keywords(cls: type, given: Iterable[str]) -> None:
    """UnknownArgumentError for the first keyword that the constructor of ``cls`` does not take."""
    known = keywords(cls)
    unknown = () if known is None else [name for name in given if name not in known]
    if unknown:
        got = f"{unknown[0]!r}{nearest(unknown[0], known or ())}"
        cure = f"name one of {', '.join(sorted(known or ()))}" if known else f"write {cls.__name__}()"
        raise UnknownArgumentError(describe(cls.__name__, wanted="arguments that it has", got=got, cure=cure))


def new_parameter(where: str, shape: tuple[int, ...], *, device: Any, dtype: torch.dtype | None) -> nn.Parameter:
    """An uninitialised parameter of ``shape``. dtype: torch's default where it is None.

    DtypeError for a dtype that ops do not compute in, SpecError for what names no device, UnsupportedError for a device that is
    not here or cannot hold it.
    """
    dtype = checked_dtype(where, torch.get_default_dtype() if dtype is None else dtype)
    try:
        placed = None if device is None else torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        got = f"{device!r}{nearest(str(device), ('cpu', 'cuda', 'meta'))}"
        cure = "pass 'cpu', 'cuda', 'cuda:1' or a torch.device"
        raise SpecError(describe(f"{where}.device", wanted="a device of torch", got=got, cure=cure)) from error
    try:
        return nn.Parameter(torch.empty(shape, device=placed, dtype=dtype))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was compiled for CUDA
        wanted = f"a device that holds a parameter of shape {shape}"
        got = f"{placed or torch.get_default_device()}: {str(error).partition(chr(10))[0]}"
        cure = "pass device='cpu', or smaller sizes"
        raise UnsupportedError(describe(where, wanted=wanted, got=got, cure=cure)) from error


BEYOND_GRADIENTS: Mapping[str, str] = {
    "accumulate_into_main_grad": "adds gradients to tensors of the caller",
    "delay_wgrad_compute": "puts products off",
}
"""What a backward pass does beside returning gradients, by the hyper-parameter that asks for it; autograd does not know of it."""


def beyond_gradients(spec: object) -> list[str]:
    """What a backward pass of an op with this spec does beside returning gradients; a recording would not repeat it."""
    return [what for name, what in BEYOND_GRADIENTS.items() if getattr(spec, name, False) is True]
