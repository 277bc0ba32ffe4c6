"""What a field may hold: one value that reads, words and describes it, for arguments of functions and ops, recipes, guards and
files alike.

A field's domain follows from its type (``bool``, ``int``, ``float``, ``str``, a ``Literal``, any of these or None); where it is
narrower, the type says so: ``eps: Annotated[float, NON_NEGATIVE]``.

Constructors, guards, configuration files and the editor schema derive their checks from the domain. So a range is stated once,
and what a file reports at a line and a column is the constructor's error.
"""

from __future__ import annotations

import functools
import inspect
import operator
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from opfuse.errors import OpfuseError, describe, nearest


@dataclass(frozen=True, eq=False)
class Domain:
    """What a field may hold.

    ``read`` returns the normal form of a value or raises ValueError; ``text`` turns the text of an environment variable into
    such a value; ``renamed`` maps values of older interfaces to what they are called now. ``names`` are texts among the values,
    for a word that comes close to one. ``listed``: ``wanted`` lists them already. ``schema``: the values in JSON schema.
    ``each``: of a list, the domain of its parts.
    """

    wanted: str
    read: Callable[[Any], Any]
    text: Mapping[str, object] | None = None
    renamed: Mapping[str, object] | None = None
    names: Collection[str] = ()
    listed: bool = False
    schema: Mapping[str, Any] = field(default_factory=dict)
    each: Domain | None = None

    @property
    def ordered(self) -> bool:
        """Whether its values are numbers."""
        return self.schema.get("type") in ("integer", "number")

    def __contains__(self, value: object) -> bool:
        try:
            self.read(value)
        except ValueError:
            return False
        return True

    def checked(self, where: str, value: object, error: type[OpfuseError]) -> Any:
        """The normal form of ``value``; ``error``, which speaks of ``where``, if it lies outside."""
        try:
            return self.read(value)
        except ValueError:
            word = value if isinstance(value, str) else ""
            renamed = self.renamed or {}
            among = f" ({', '.join(self.names)})" if self.names and not self.listed else ""
            cure = f"write {renamed[word]!r}, its present name" if word in renamed else f"pass {self.wanted}{among}"
            cure = "put it into a list, [x]" if self.each is not None and value in self.each else cure
            got = f"{_shown(value)}{nearest(word, self.names)}"
            raise error(describe(where, wanted=self.wanted, got=got, cure=cure)) from None


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def _shown(value: object) -> str:
    """A value in one line: of an array its class and shape, of what else takes several lines, such as a model, its class."""
    if isinstance(shape := getattr(value, "shape", None), tuple):
        return f"one {type(value).__name__} of shape {tuple(shape)}"
    text = _SHORT.repr(value)
    return f"one {type(value).__name__}" if "\n" in text else text


# -- numbers -----------------------------------------------------------------------------------------------------------------


def _boolean(value: object) -> bool:
    if type(value) is not bool:
        raise ValueError
    return value


def _is_boolean(value: object) -> bool:
    """Whether it is a truth value, which Python, numpy and torch would take for a number."""
    return "bool" in str(getattr(value, "dtype", type(value).__name__))


def _integer(value: Any) -> int:
    """Of anything that counts: ints of Python, numpy and torch."""
    if _is_boolean(value):
        raise ValueError
    try:
        return operator.index(value)
    except (TypeError, RuntimeError) as error:
        raise ValueError from error


def _number(value: Any) -> float:
    """Of any real number, integers included."""
    if _is_boolean(value) or isinstance(value, (str, bytes, bytearray)):
        raise ValueError
    try:
        return float(value)
    except (TypeError, RuntimeError, OverflowError) as error:
        raise ValueError from error


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


_BOUNDS: Mapping[str, Callable[[Any, Any], bool]] = {
    "minimum": operator.ge,
    "exclusiveMinimum": operator.gt,
    "maximum": operator.le,
    "exclusiveMaximum": operator.lt,
}
"""Limits of a number, by their name in JSON schema."""


def _bounded(kind: str, read: Callable[[Any], Any], wanted: str, bounds: Mapping[str, float]) -> Domain:
    def within(value: object) -> Any:
        found = read(value)
        if not all(_BOUNDS[name](found, bound) for name, bound in bounds.items()):
            raise ValueError
        return found

    return Domain(wanted, within, schema={"type": kind, **bounds})


def integers(wanted: str, **bounds: int) -> Domain:
    """Integers within ``bounds``, which are named as in JSON schema: ``minimum=1``."""
    return _bounded("integer", _integer, wanted, bounds)


def numbers(wanted: str, **bounds: float) -> Domain:
    """Real numbers within ``bounds``, of which there is at least one, so that NaN is none of them."""
    return _bounded("number", _number, wanted, bounds)


_LARGEST, _SMALLEST = (2 - 2**-23) * 2.0**127, 2.0**-126
"""Normal numbers of fp32, in which ops compute."""

BOOLEAN = Domain("True or False", _boolean, text={"0": False, "1": True}, schema={"type": "boolean"})
INTEGER = integers("an integer")
TEXT = Domain("text", _text, schema={"type": "string"})
NUMBER = numbers("a finite number of fp32", minimum=-_LARGEST, maximum=_LARGEST)
NON_NEGATIVE = numbers("a finite number >= 0 of fp32", minimum=0, maximum=_LARGEST)
POSITIVE = numbers("a finite number > 0 of fp32", minimum=_SMALLEST, maximum=_LARGEST)
SIZE = integers("a positive integer, at most 2**31", minimum=1, maximum=2**31)


# -- others ------------------------------------------------------------------------------------------------------------------


def one_of(*choices: object, renamed: Mapping[str, object] | None = None) -> Domain:
    """Exactly these values, compared with their types (``True`` is not 1). ``none`` in an environment variable is None."""

    def read(value: object) -> object:
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise ValueError
        return value

    names = tuple(choice for choice in choices if isinstance(choice, str))
    text = {"none": None, **{name: name for name in names}}
    wanted = f"one of {', '.join(map(repr, choices))}"
    return Domain(wanted, read, text, renamed, names, listed=True, schema={"enum": list(choices)})


def optional(domain: Domain) -> Domain:
    """None as well."""
    schema = {"anyOf": [dict(domain.schema), {"type": "null"}]}
    return replace(domain, wanted=f"None or {domain.wanted}", read=lambda v: None if v is None else domain.read(v), schema=schema)


def _as_tuple(domain: Domain, value: Any) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes, Mapping, Set)):
        raise ValueError
    try:
        parts = tuple(value)
    except (TypeError, RuntimeError) as error:
        raise ValueError from error
    return tuple(map(domain.read, parts))


def _sizes(value: Any) -> tuple[int, ...]:
    found = (SIZE.read(value),) if value in SIZE else _as_tuple(SIZE, value)
    if not found:
        raise ValueError
    return found


def _shape(value: Any) -> tuple[int, ...]:
    found = _as_tuple(_DIMENSION, value)
    if found.count(-1) > 1:
        raise ValueError
    return found


_DIMENSION = integers("-1 or a size", minimum=-1, maximum=2**31)

_SIZE_LIST = {"type": "array", "items": SIZE.schema, "minItems": 1}
SIZES = Domain("a positive integer or a list of them", _sizes, schema={"anyOf": [SIZE.schema, _SIZE_LIST]})
"""Trailing dimensions; one number stands for a list of one."""

SHAPE = Domain("a list of sizes, one of which may be -1", _shape, schema={"type": "array", "items": _DIMENSION.schema})
"""What a tensor is reshaped to."""


_OF_TYPE = {bool: BOOLEAN, int: INTEGER, float: NUMBER, str: TEXT}


def uncallable(function: object, *given: object, **named: object) -> str:
    """What keeps ``function`` from being called with such arguments, as messages tell it; empty if nothing is known to.

    Its signature, or what it is in place of a function. Functions of C may hide their signatures, and are believed.
    """
    if not callable(function):
        return _shown(function)
    try:
        signature = inspect.signature(function)
    except ValueError:
        return ""
    try:
        signature.bind(*given, **named)
    except TypeError:
        return f"{getattr(function, '__name__', type(function).__name__)}{signature}"
    return ""


@functools.cache
def domain_of(hint: Any) -> Domain | None:
    """The domain of a field whose type is ``hint``; None for a type that says nothing of it."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return next((part for part in parts[1:] if isinstance(part, Domain)), None) or domain_of(parts[0])
    if origin is Literal:
        return one_of(*parts)
    if origin in (Union, UnionType):
        (inner, *others) = (domain_of(part) for part in parts if part is not NoneType)
        return optional(inner) if inner is not None and not others and NoneType in parts else None
    return _OF_TYPE.get(hint)


@functools.cache
def keywords(cls: type) -> frozenset[str] | None:
    """Keywords that the constructor of ``cls`` takes; None when it takes any."""
    parameters = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return None if takes_any else frozenset(p.name for p in parameters) - {"self"}


# -- arguments of public functions ---------------------------------------------------------------------------------------------

P = ParamSpec("P")
R = TypeVar("R")

_NAMES = {"Module": "an nn.Module", "Tensor": "a torch.Tensor", "dtype": "a torch.dtype", "str": "a text"}
"""Classes that are called otherwise."""


def checked_arguments(error: type[OpfuseError], *, but: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A public function whose arguments are checked before it runs; ``error`` for one that its annotation does not allow, and
    for a keyword that there is not. It gets them in their normal form. but: the argument that the function checks itself.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        where = function.__qualname__.removesuffix(".__init__")
        open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            unknown = [] if open_ended else [name for name in kwargs if name not in signature.parameters]
            if unknown:
                known = [name for name in signature.parameters if name != "self"]
                got, cure = f"{unknown[0]!r}{nearest(unknown[0], known)}", "mend the name"
                raise error(describe(where, wanted=f"arguments of {', '.join(known)}", got=got, cure=cure))
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                return function(*args, **kwargs)  # Python says it better
            for name, domain in _domains(function).items():
                if name in bound.arguments and name != but:
                    bound.arguments[name] = domain.checked(f"{where}({name}=)", bound.arguments[name], error)
            return function(*bound.args, **bound.kwargs)

        return call

    return decorate


@functools.cache
def _domains(function: Callable[..., Any]) -> dict[str, Domain]:
    """The domains of a function's arguments; those are left out whose annotation says nothing."""
    hints = get_type_hints(function, include_extras=True)
    kinds = {name: p.kind for name, p in inspect.signature(function).parameters.items()}
    found = {name: _argument(hint, kinds[name]) for name, hint in hints.items() if name in kinds}
    return {name: domain for name, domain in found.items() if domain is not None}


def _argument(hint: Any, kind: Any) -> Domain | None:
    if kind is inspect.Parameter.VAR_KEYWORD:
        return None
    domain = _of(hint)
    return (
        _several(domain, "arguments, each", tuple) if domain is not None and kind is inspect.Parameter.VAR_POSITIONAL else domain
    )


def _of(hint: Any) -> Domain | None:
    """The domain of an annotation: that of a field, or what is of its classes."""
    domain, origin, parts = domain_of(hint), get_origin(hint), get_args(hint)
    if domain is not None:
        return domain
    if origin in (Union, UnionType):
        kinds = [part for part in parts if part is not NoneType]
        inner = _of(kinds[0]) if len(kinds) == 1 else _instance(*kinds) if all(isinstance(k, type) for k in kinds) else None
        return inner if inner is None or NoneType not in parts else optional(inner)
    if origin is tuple and parts[1:] != (...,):
        return _row([_of(part) for part in parts])
    if isinstance(origin, type) and issubclass(origin, Iterable) and not issubclass(origin, Mapping):
        inner = _of(parts[0])
        return None if inner is None else _several(inner, "a list, each part", (tuple, list) if origin is tuple else origin)
    if isinstance(hint, TypeVar):
        return _of(hint.__bound__)
    kind = origin or hint
    return _instance(kind) if isinstance(kind, type) and kind not in (object, Any, NoneType) else None


def _instance(*kinds: type) -> Domain:
    wanted = " or ".join(_NAMES.get(kind.__name__, f"a {kind.__name__}") for kind in kinds)

    def read(value: Any) -> Any:
        if not isinstance(value, kinds):
            raise ValueError
        return value

    return Domain(wanted, read)


def _several(domain: Domain, what: str, kinds: Any) -> Domain:
    """Several values of a domain, as a tuple, out of an object of ``kinds``; a text is none."""

    def read(value: Any) -> tuple[Any, ...]:
        if isinstance(value, (str, bytes)) or not isinstance(value, kinds):
            raise ValueError
        return tuple(map(domain.read, value))

    return Domain(f"{what} {domain.wanted}", read, names=domain.names, each=domain)


def _row(domains: list[Domain | None]) -> Domain | None:
    """As many values as there are domains."""
    known = [domain for domain in domains if domain is not None]
    if len(known) < len(domains):
        return None

    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (tuple, list)) or len(value) != len(known):
            raise ValueError
        return tuple(domain.read(each) for domain, each in zip(known, value))

    return Domain(f"({', '.join(domain.wanted for domain in known)})", read)
