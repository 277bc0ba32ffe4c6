"""Keys: values that can be compared, told apart by type, and explained.

A key is a tree of frozen dataclasses, named tuples and plain values. Three questions are answered here, and nowhere else:
does a value have an identity (:func:`digest` refuses what has none), where do two keys differ (:func:`diff`), and which
entry of a cache came closest to the one that was missed (:class:`Cache`).
"""

from __future__ import annotations

import enum
import hashlib
import math
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch

from opfuse.errors import KeyValueError, describe

_PLAIN = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout)
_FREEZE = "use @dataclass(frozen=True), a tuple or a plain value"
_CALLABLES = (type, types.FunctionType, types.BuiltinFunctionType)


class Digest(str):
    """A digest that can say what it was made of, so that two of them can be told apart.

    parts: what it was made of, by name, asked for when two differ. shown_as: how it is shown; None: as its digits. sources: where
    parts came from, by name.
    """

    parts: Callable[[], Mapping[str, Any]]
    shown_as: str | None
    sources: Mapping[str, str]

    def __new__(
        cls,
        digits: str,
        parts: Callable[[], Mapping[str, Any]],
        shown_as: str | None = None,
        sources: Mapping[str, str] = types.MappingProxyType({}),
    ) -> Digest:
        made = super().__new__(cls, digits)
        made.parts, made.shown_as, made.sources = parts, shown_as, sources
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)

    def __repr__(self) -> str:
        return super().__repr__() if self.shown_as is None else self.shown_as


class Record(tuple[Any, ...]):
    """A tuple whose parts have names that need be no identifiers; :func:`record` makes a type of them."""

    _fields: ClassVar[tuple[str, ...]]


def record(names: Iterable[str]) -> type[Record]:
    """The type of records with these names; one that repeats is numbered."""
    fields: list[str] = []
    known: set[str] = set()
    for name in names:
        fields.append(name if name not in known else f"{name} ({len(fields)})")
        known.add(name)
    return type("Record", (Record,), {"_fields": tuple(fields)})


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


_NOTHING = _Nothing()

_tokens: dict[int, tuple[weakref.ref[Any], str]] = {}
_names: dict[str, int] = {}


def token(thing: object, where: str = "") -> str:
    """A name for an object whose identity is itself (a class, a function, a process group).

    The first object of a name is ``module:qualname``; another object of the same name (a redefinition) gets ``#2`` and so on.
    A number is never given twice, so the name outlives the object. A bound method is named by its function and its object.
    KeyValueError, which speaks of ``where``, for an object that cannot be told from its successors: a number, a tuple.
    """
    if isinstance(thing, types.MethodType):  # made anew each time it is looked up
        return f"{token(thing.__func__, where)} of {token(thing.__self__, where)}"
    key = id(thing)
    if (known := _tokens.get(key)) is not None:
        return known[1]
    name = f"{getattr(thing, '__module__', None)}:{getattr(thing, '__qualname__', type(thing).__qualname__)}"
    try:
        alive = weakref.ref(thing, lambda _: _tokens.pop(key, None))
    except TypeError as error:
        wanted, cure = "an object that can be told from its successors", "use a frozen dataclass or a function"
        raise KeyValueError(describe(where or name, wanted=wanted, got=type(thing).__qualname__, cure=cure)) from error
    number = _names[name] = _names.get(name, 0) + 1
    return _tokens.setdefault(key, (alive, name if number == 1 else f"{name}#{number}"))[1]


def key_fields(value: object) -> dict[str, Any] | None:
    """Named parts of a composite value: compared dataclass fields or named-tuple fields; None for anything else.

    A dataclass whose identity is more than its fields has the rest in a mapping ``key_extras``.
    """
    if is_dataclass(value) and not isinstance(value, type):
        extras: Mapping[str, Any] = getattr(value, "key_extras", {})
        return {**{f.name: getattr(value, f.name) for f in fields(value) if f.compare}, **extras}
    names = getattr(value, "_fields", None)
    return dict(zip(names, value)) if isinstance(value, tuple) and names else None


def _canonical(value: object, path: str) -> Iterator[str]:
    kind = type(value).__qualname__
    if isinstance(value, enum.Enum):
        yield f"{token(type(value))}.{value.name};"
    elif isinstance(value, float):
        yield f"{kind}:{value.hex()};"
    elif isinstance(value, _PLAIN):
        yield f"{kind}:{str(value) if isinstance(value, Digest) else repr(value)};"
    elif isinstance(value, _CALLABLES):
        yield f"object:{token(value)};"
    elif (parts := key_fields(value)) is not None:
        if is_dataclass(value) and not getattr(type(value), "__dataclass_params__").frozen:  # noqa: B009 - typed stubs do not know it
            raise KeyValueError(describe(path, wanted="a frozen dataclass", got=f"{kind}, a mutable dataclass", cure=_FREEZE))
        yield f"{token(type(value))}("
        for name, part in parts.items():
            yield f"{name}="
            yield from _canonical(part, f"{path}.{name}")
        yield ")"
    elif isinstance(value, (tuple, frozenset, Mapping)):
        yield f"{kind}["
        yield from _canonical_items(value, path)
        yield "]"
    elif callable(value) and type(value).__weakrefoffset__:
        yield f"object:{token(value, path)};"
    else:
        raise KeyValueError(describe(path, wanted="a value with an identity", got=f"an object of {kind}", cure=_FREEZE))


def _canonical_items(value: tuple[Any, ...] | frozenset[Any] | Mapping[Any, Any], path: str) -> Iterator[str]:
    if isinstance(value, tuple):
        for i, part in enumerate(value):
            yield from _canonical(part, f"{path}[{i}]")
    elif isinstance(value, Mapping):
        for name in sorted(value, key=repr):
            yield from _canonical(name, path)
            yield from _canonical(value[name], f"{path}[{name!r}]")
    else:
        yield from sorted("".join(_canonical(part, path)) for part in value)


def digest(value: object, where: str = "key") -> str:
    """32 hex digits that are equal exactly for equal values of equal types.

    ``True``, ``1`` and ``1.0`` differ; nan equals itself; classes, functions and other callables count by identity.
    KeyValueError names the path, from ``where`` on, of a part that has no identity.
    """
    return hashlib.blake2b("".join(_canonical(value, where)).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Difference:
    """One leaf in which two keys differ, and where either value came from, if its owner knows."""

    path: str
    old: object
    new: object
    old_source: str | None = None
    new_source: str | None = None

    def __str__(self) -> str:
        text = f"{self.path}: {self.old!r} -> {self.new!r}"
        sources = [f"{when}: {source}" for when, source in (("was", self.old_source), ("now", self.new_source)) if source]
        return text if self.old_source == self.new_source else f"{text} ({', '.join(sources)})"


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _same(old: object, new: object) -> bool:
    return old is new or (type(old) is type(new) and (old == new or (_is_nan(old) and _is_nan(new))))


def _source(owner: object, name: str) -> str | None:
    sources = getattr(owner, "sources", None)
    return sources.get(name) if isinstance(sources, Mapping) else None


def _paired(old: object, new: object) -> list[tuple[str, object, object]] | None:
    """Parts of two composites that correspond, each with its step on the path; None if one of them is a leaf to the other."""
    if isinstance(old, Digest) and isinstance(new, Digest):
        return _by_name(old.parts(), new.parts()) or None
    if isinstance(old, Record) and isinstance(new, Record):
        return _by_name(key_fields(old) or {}, key_fields(new) or {})
    old_parts, new_parts = key_fields(old), key_fields(new)
    if old_parts is not None and new_parts is not None and type(old) is type(new):
        return [(f".{name}", old_parts[name], new_parts[name]) for name in old_parts]
    if type(old) is tuple and type(new) is tuple and len(old) == len(new):
        return [(f"[{i}]", left, right) for i, (left, right) in enumerate(zip(old, new))]
    return None


def _by_name(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, object, object]]:
    """What differs of two mappings; nothing where only one has a name."""
    pairs = ((name, old.get(name, _NOTHING), new.get(name, _NOTHING)) for name in {**old, **new})
    return [(f".{name}", left, right) for name, left, right in pairs if not _same(left, right)]


def diff(old: object, new: object, path: str = "") -> Iterator[Difference]:
    """The leaves in which ``new`` differs from ``old``, with dotted paths.

    A part with a mapping ``sources`` from field to origin (a recipe) lends its fields' origins to the differences.
    """
    if old is new or (isinstance(old, Digest) and old == new):
        return
    pairs = _paired(old, new)
    if pairs is None and not _same(old, new):
        yield Difference(path, old, new)
    for step, left, right in pairs or ():
        for found in diff(left, right, f"{path}{step}".lstrip(".")):
            name = step.lstrip(".")
            old_source, new_source = found.old_source or _source(old, name), found.new_source or _source(new, name)
            yield replace(found, old_source=old_source, new_source=new_source)


class Leaf(NamedTuple):
    """One value of a key that has no parts, under its dotted path, and where it came from, if its owner knows."""

    path: str
    value: object
    source: str | None


def leaves(value: object, path: str = "", source: str | None = None) -> Iterator[Leaf]:
    """Every leaf of a key, in order; a frozen dataclass is one itself, by its class, and has its fields behind it."""
    parts = _parts(value)
    if parts is None or (isinstance(value, Digest) and value.shown_as == REGISTERED):
        yield Leaf(path, value, source)
        return
    if is_dataclass(value):
        yield Leaf(path, type(value), source)
    for step, part in parts:
        yield from leaves(part, f"{path}{step}".lstrip("."), _source(value, step.lstrip(".")) or source)


REGISTERED = "registered"
"""How the digest of a rule is shown: its parts matter only where two rules of one name differ."""


def _parts(value: object) -> list[tuple[str, object]] | None:
    """The parts of a composite, each with its step on the path; None for a leaf."""
    if isinstance(value, Digest):
        return [(f".{name}", part) for name, part in value.parts().items()]
    if (fields := key_fields(value)) is not None:
        return [(f".{name}", part) for name, part in fields.items()]
    if not isinstance(value, tuple) or type(value) is not tuple or all(isinstance(part, _PLAIN) for part in value):
        return None
    return [(f"[{i}]", part) for i, part in enumerate(value)]


def plain(value: object) -> Any:
    """A leaf as JSON has it, the same in every process: nothing of addresses, objects by their :func:`token`."""
    if isinstance(value, Digest):
        return str(value)
    if isinstance(value, bool | int | float | str | None) and not isinstance(value, enum.Enum):
        return value if not isinstance(value, float) or math.isfinite(value) else repr(value)
    if isinstance(value, tuple):
        return [plain(part) for part in value]
    if isinstance(value, torch.device | torch.dtype):
        return str(value)
    return repr(value) if isinstance(value, enum.Enum) or not callable(value) else token(value)


def _distance(old: object, new: object) -> int:
    """In how many leaves two keys differ. Equal parts are not looked into, which makes it much cheaper than :func:`diff`."""
    if old == new:
        return 0
    pairs = _paired(old, new)
    return 1 if pairs is None else sum(_distance(left, right) for _, left, right in pairs)


@dataclass(frozen=True)
class Miss:
    """Why a key was not found: the nearest entry and every field in which it differs (none: the cache was empty).

    again: it had an entry, which was dropped.
    """

    key: object
    nearest: object | None
    differences: tuple[Difference, ...]
    again: bool = False

    def __str__(self) -> str:
        if self.nearest is None:
            return "first plan: the cache was empty"
        return "; ".join(("planned before, and dropped",) * self.again + tuple(map(str, self.differences)))


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass
class _CacheEntry(Generic[V]):
    value: V
    used: int


_REMEMBERED = 8
"""For each entry that a cache holds, keys of which it knows that they had one."""


class Cache(Generic[K, V]):
    """A dictionary of plans, least recently used dropped beyond ``size``, that counts hits and explains misses.

    A key is looked up by itself or by any equal value: a plain tuple finds the entry of a named one. before: the last key of a
    cache that this one replaces; the first miss is told from it.
    """

    def __init__(self, size: int, before: K | None = None) -> None:
        self.size = size
        self.before = before
        self.hits = 0
        self.misses = 0
        self.last_miss: Miss | None = None
        self._entries: dict[K, _CacheEntry[V]] = {}
        self._seen: dict[str, None] = {}  # digests of keys, oldest first

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> V | None:
        """The entry of ``key``, counted as a hit, or None."""
        entry = self._entries.get(key)  # type: ignore[arg-type]
        if entry is None:
            return None
        self.hits += 1
        entry.used = self.hits + self.misses
        return entry.value

    def use_of(self, value: V) -> Callable[[], object] | None:
        """What counts a hit of ``value``, for a caller that kept it from an earlier one; None if it was dropped since."""
        for key, entry in list(self._entries.items()):
            if entry.value is value:
                return partial(self.get, key)
        return None

    def put(self, key: K, value: V) -> Miss:
        """Insert after a miss; returns and records why it was one."""
        name = digest(key)
        # Another thread may have made the entry meanwhile, which then was not dropped.
        miss = replace(self.why(key), again=name in self._seen and key not in self._entries)
        self.misses += 1
        self._seen[name] = None
        if len(self._seen) > _REMEMBERED * self.size:
            self._seen.pop(next(iter(self._seen)))
        self._entries[key] = _CacheEntry(value, self.hits + self.misses)
        for old, _ in self.items()[: -self.size] if len(self._entries) > self.size else ():
            self._entries.pop(old, None)
        self.last_miss = miss
        return miss

    def why(self, key: K) -> Miss:
        """The nearest live entry to ``key`` and the fields in which it differs."""
        entries = [other for other, _ in reversed(self.items())] if self._entries else []
        if not entries and self.before is not None:
            entries = [self.before]
        if not entries:
            return Miss(key, None, ())
        nearest = min(entries, key=lambda other: _distance(other, key))
        return Miss(key, nearest, tuple(diff(nearest, key)))

    def items(self) -> tuple[tuple[K, V], ...]:
        """Live entries, least recently used first."""
        return tuple((key, entry.value) for key, entry in sorted(self._entries.items(), key=lambda item: item[1].used))

    def clear(self) -> None:
        """Drop every entry; counters stay. That a key had one is forgotten: nothing pushed it out."""
        self._entries.clear()
        self._seen.clear()
