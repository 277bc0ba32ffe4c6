"""Which words a pattern may use and what a guard may read: what the classes of ops, recipes and keys that exist declare.

A kind is known once its op's class exists. So the words of a rule are checked when it enters a rule set, and a rule for an op of
one's own is registered after the class.

So a mistyped word, or a guard on an unknown field, is an error with the nearest name, and never a rule that does not fire.
There is no second list of words: the classes are asked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

from opfuse.compiler.graph import CAST_WORDS, QUANTIZE_GROUPS, CastSpec, Node
from opfuse.compiler.rules import Fusion, Guard, Term
from opfuse.core.operation import BasicOperation
from opfuse.core.signature import Env, TensorSig
from opfuse.core.spec import NoSpec, annotations_of, spec_of
from opfuse.errors import FusionError, describe, nearest
from opfuse.recipes import Recipe
from opfuse.recipes.recipe import TENSOR_TYPES

Base = TypeVar("Base")

PARAMETERS = ("weight", "bias")
"""Parameters of the built-in ops; grouped ones number theirs."""

DERIVED: Mapping[type, tuple[str, ...]] = {Env: ("backward_override", "rounding"), Recipe: ("kind",)}
"""Properties that guards may read of a part of the key beside its fields, from which they follow."""

SEVERAL: Mapping[str, str] = {"linear": "basic_linear bias?"}
"""Names of ops in pipelines that are several basic ops, and the pattern for these."""


class NodeKind(NamedTuple):
    """A kind of node: the words that match it, the spec of its nodes (NoSpec: none is declared), and names of parameters."""

    words: frozenset[str]
    spec: type
    parameters: tuple[str, ...] = PARAMETERS


def with_subclasses(cls: type[Base]) -> Iterator[type[Base]]:
    """Every class that derives from ``cls``, and itself."""
    yield cls
    for child in cls.__subclasses__():
        yield from with_subclasses(child)


def declared_traits(cls: type[BasicOperation]) -> frozenset[str]:
    """The traits of a class; where they depend on the spec, those of the class it derives from."""
    return next(traits for base in cls.__mro__ if isinstance(traits := vars(base).get("traits"), frozenset))


def _kind(cls: type[BasicOperation]) -> NodeKind:
    annotated = (name for name, hint in annotations_of(cls).items() if "Parameter" in str(hint))
    return NodeKind(frozenset((cls.kind, *declared_traits(cls))), spec_of(cls), (*PARAMETERS, *annotated))


_declared: WeakKeyDictionary[type, NodeKind] = WeakKeyDictionary()
"""What each class that lives declares, asked once: rule sets are made often."""


def kinds() -> tuple[NodeKind, ...]:
    """Every kind of node that there can be now."""
    casts = (NodeKind(frozenset(words), CastSpec) for words in (CAST_WORDS, (QUANTIZE_GROUPS,)))
    for cls in with_subclasses(BasicOperation):
        if cls.kind and cls not in _declared:
            _declared[cls] = _kind(cls)
    return (*casts, *_declared.values())


def classes_named(word: str) -> list[type[BasicOperation]]:
    """Every class of ops whose kind is ``word``; none for a trait, and for what ops are called that share a kind."""
    return [cls for cls in with_subclasses(BasicOperation) if cls.kind == word]


def check_rules(rules: Iterable[Fusion]) -> None:
    """FusionError for a rule with a word that no op has, or with a guard on what cannot be read."""
    known = kinds()
    for rule in rules:
        for term in rule.pattern:
            _check_term(rule, term, known)
        for guard in rule.when:
            _check_guard(rule, guard, known)


def _check_term(rule: Fusion, term: Term, known: Sequence[NodeKind]) -> None:
    words = frozenset().union(*(kind.words for kind in known))
    if unknown := [word for word in term.words if word not in words]:
        where, got = f"fusion {rule.name!r} place {term.name!r}", f"{unknown[0]!r}{nearest(unknown[0], words)}"
        written = SEVERAL.get(unknown[0])
        cure = "mend the word, or define (import) the class of your op before its rule is registered"
        cure = f"write {written!r}: it is several ops" if written else cure
        raise FusionError(describe(where, wanted="a kind or a trait of an op", got=got, cure=cure))


def _check_guard(rule: Fusion, guard: Guard, known: Sequence[NodeKind]) -> None:
    root, *steps = guard.reads.split(".")
    term = next((term for term in rule.pattern if term.name == root), None)
    read = _of_env if term is None else _of_node([kind for kind in known if not kind.words.isdisjoint(term.words)])
    for of, step in zip((root, *steps), steps):
        found = read(step)
        if found is None:
            return
        names, read = found
        if step not in names:
            where, got = f"fusion {rule.name!r} guard {guard.reads!r}", f"{step!r}{nearest(step, names)}"
            cure = f"read one of {', '.join(sorted(names))}" if names else f"read {of} itself"
            raise FusionError(describe(where, wanted=f"what {of} has", got=got, cure=cure))


Lookup = tuple[Collection[str], "PathReader"] | None
PathReader = Callable[[str], Lookup]
"""From a step of a path to the names that it can be, and how to read on; None where anything can be."""


def _names(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls) if field.compare) if is_dataclass(cls) else ()


def _of_env(step: str) -> Lookup:
    return (*Env._fields, *DERIVED[Env]), _of_recipe if step == "recipe" else _of_value


def _of_recipe(step: str) -> Lookup:
    """Fields of every recipe that there is, and what a custom one's factory answered."""
    answers = (f"{tensor}_quantizer" for tensor in TENSOR_TYPES)
    return {
        *DERIVED[Recipe],
        *answers,
        *(name for cls in with_subclasses(cast(Any, Recipe)) for name in _names(cls)),
    }, _of_anything


def _of_node(kinds: Sequence[NodeKind]) -> PathReader:
    """A reader of paths into a node: its fields, the fields of its spec, its parameters."""
    own = {name for kind in kinds for name in (*_names(kind.spec), *kind.parameters)} | {*_names(Node)}
    undeclared = any(kind.spec is NoSpec for kind in kinds)

    def read(step: str) -> Lookup:
        if re.sub(r"\d+$", "", step) in PARAMETERS or (undeclared and step not in own):
            return {step}, _of_tensor
        return own, _of_anything

    return read


def _of_tensor(step: str) -> Lookup:
    return TensorSig._fields, _of_value


def _of_value(step: str) -> Lookup:
    return (), _of_value


def _of_anything(step: str) -> Lookup:
    return None
