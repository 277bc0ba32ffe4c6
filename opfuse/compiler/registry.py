"""Which rules are active: an ordered tuple of them, functions registered beside them, and the level.

Functions run before rules, since a user who registers one means it to win. A function sees live modules and not keys, so its
plans are marked opaque.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, takewhile
from pkgutil import resolve_name
from typing import Any

from opfuse.compiler.graph import BACKWARD, FORWARD
from opfuse.compiler.rules import JOINT, PASSES, Fusion, contradiction
from opfuse.compiler.vocabulary import check_rules
from opfuse.domains import checked_arguments, uncallable
from opfuse.errors import FusionError, describe, nearest
from opfuse.keys import REGISTERED, Digest, digest, key_fields
from opfuse.sources import caller

LEVELS = (0, 1, 2)
"""Fusion levels, as :class:`RuleSet` says."""

_CURE = "register a function (ops, *, recipe) -> ops; **unused takes what it does not read"


@dataclass(frozen=True)
class FusionFunction:
    """A function ``func(ops, *, recipe) -> ops`` that replaces runs of live ops by FusedOperations.

    It sees modules, not keys, so plans it takes part in are marked opaque; it is asked again for every new key. Any callable
    will do, and counts by identity; FusionError for anything else, KeyValueError for a callable that has no identity.
    source: where it was registered.
    """

    name: str
    direction: str
    func: Callable[..., Sequence[Any]]
    source: str = field(default_factory=caller, compare=False, repr=False)

    def __post_init__(self) -> None:
        where = f"fusion function {self.name!r}"
        if self.direction not in PASSES:
            got = f"{self.direction!r}{nearest(str(self.direction), PASSES)}"
            raise FusionError(describe(where, wanted=f"a direction of {tuple(PASSES)}", got=got, cure="name one of them"))
        if got := uncallable(self.func, [], recipe=None):
            raise FusionError(describe(where, wanted="a function of (ops, *, recipe)", got=got, cure=_CURE))
        digest(self, where)


@dataclass(frozen=True)
class RuleSet:
    """Rules in the order in which they claim, registered functions, and the level: 0 none, 1 bitwise-equal only, 2 all.

    FusionError for words of a pattern that no op has, and for guards on what cannot be read; ``vocabulary.py``
    says which those are. source: where the set was made.
    """

    rules: tuple[Fusion, ...] = ()
    functions: tuple[FusionFunction, ...] = ()
    level: int = 2
    source: str = field(default_factory=caller, compare=False, repr=False)

    def __post_init__(self) -> None:
        for what, held, kind in (("rules", self.rules, Fusion), ("functions", self.functions, FusionFunction)):
            if not isinstance(held, tuple) or not all(isinstance(each, kind) for each in held):
                cure = "make rules with fusion(), and register functions with register_forward_fusion() and its sisters"
                raise FusionError(describe(f"RuleSet.{what}", wanted=f"a tuple of {kind.__name__}", got=repr(held), cure=cure))
        if type(self.level) is not int or self.level not in LEVELS:
            raise FusionError(describe("RuleSet.level", wanted=f"one of {LEVELS}", got=repr(self.level), cure="pass level=2"))
        check_rules(self.rules)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join((*self.names, f'level={self.level}'))})"

    @cached_property
    def digest(self) -> Digest:
        """Value identity, for keys; its parts are the rules and functions by name."""
        sources = {rule.name: rule.source for rule in self.rules} | {
            function.name: function.source for function in self.functions
        }
        return Digest(digest((self.rules, self.functions, self.level)), self._parts, f"({', '.join(self.names)})", sources)

    @cached_property
    def unfused(self) -> RuleSet:
        """A copy of the set at level 0."""
        return replace(self, level=0)

    def _parts(self) -> Mapping[str, Digest]:
        def rule_digest(rule: Fusion | FusionFunction) -> Digest:
            return Digest(digest(rule), lambda: key_fields(rule) or {}, REGISTERED)

        return {rule.name: rule_digest(rule) for rule in self.rules} | {
            function.name: rule_digest(function) for function in self.functions
        }

    def of(self, direction: str) -> tuple[Fusion, ...]:
        """The rules of one direction, higher priority first, in order otherwise. The level is checked like a guard."""
        return self._by_direction[direction]

    @cached_property
    def _by_direction(self) -> Mapping[str, tuple[Fusion, ...]]:
        ordered = sorted(self.rules, key=lambda rule: -rule.priority)
        return {direction: tuple([rule for rule in ordered if rule.direction == direction]) for direction in PASSES}

    def without(self, *names: str) -> RuleSet:
        """A copy of the set without the named rules and functions; FusionError for a name that the set lacks."""
        self._check(names)
        return replace(
            self,
            rules=tuple(r for r in self.rules if r.name not in names),
            functions=tuple(f for f in self.functions if f.name not in names),
        )

    def with_rule(self, rule: Fusion, *, first: bool = False) -> RuleSet:
        """A copy of the set with one more rule, last or first.

        FusionError if the name is taken, and for a rule that can never fire: its guards exclude each other, or a rule that it
        extends claims before it and leaves it nothing.
        """
        self._free(rule, Fusion)
        if path := contradiction(rule.when):
            got, cure = f"guards on {path} that exclude each other", "leave one of them out"
            raise FusionError(describe(f"fusion {rule.name!r}", wanted="a rule that can fire", got=got, cure=cure))
        made = replace(self, rules=(rule, *self.rules) if first else (*self.rules, rule))
        earlier = takewhile(lambda other: other is not rule, made.of(rule.direction))
        if base := next((other for other in earlier if extends(rule, other)), None):
            got = f"one that claims after {base.name!r}, which it extends and which takes the same ops under no more guards"
            cure = f"pass prepend=True (first=True of a RuleSet), or a priority above {base.priority}"
            raise FusionError(describe(f"fusion {rule.name!r}", wanted="a rule that can fire", got=got, cure=cure))
        return made

    def with_function(self, function: FusionFunction, *, first: bool = False) -> RuleSet:
        """A copy of the set with one more function."""
        self._free(function, FusionFunction)
        return replace(self, functions=(function, *self.functions) if first else (*self.functions, function))

    def replaced(self, rule: Fusion) -> RuleSet:
        """A copy of the set with the rule of that name replaced."""
        self._check((_typed(rule, Fusion).name,))
        return replace(self, rules=tuple(rule if r.name == rule.name else r for r in self.rules))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all rules and functions."""
        return tuple(r.name for r in self.rules) + tuple(f.name for f in self.functions)

    def _check(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self.names:
                wanted, cure = f"one of {self.names}", "name a registered fusion" + nearest(name, self.names)
                raise FusionError(describe(f"fusion {name!r}", wanted=wanted, got=repr(name), cure=cure))

    def _free(self, fusion: object, kind: type) -> None:
        name = _typed(fusion, kind).name
        if name in self.names:
            got, cure = "one that is registered", "choose another name or unregister the old rule"
            raise FusionError(describe(f"fusion {name!r}", wanted="a new name", got=got, cure=cure))


def extends(rule: Fusion, base: Fusion) -> bool:
    """Whether ``base`` takes, under no more guards, part of all that ``rule`` matches, as one that extends it."""
    roots = ("env", *(term.name for term in rule.pattern))
    asked = {guard for guard in base.when if guard.reads.split(".")[0] in roots}  # of a place that is empty nothing is asked
    return base.name in rule.extends and asked <= set(rule.when)


def _typed(given: object, kind: type) -> Any:
    """``given`` itself; FusionError unless it is of ``kind``."""
    if not isinstance(given, kind):
        cure = "pass what fusion() returns; functions go to register_forward_fusion() and its sisters"
        raise FusionError(describe("fusion", wanted=f"a {kind.__name__}", got=repr(given), cure=cure))
    return given


_defaults: RuleSet | None = None
_scoped: ContextVar[RuleSet | None] = ContextVar("opfuse_rules", default=None)


def default_rules() -> RuleSet:
    """The process-wide rule set: at first the table that the package names."""
    if _defaults is None:
        set_default_rules(resolve_name(sys.modules["opfuse"].RULE_TABLE))
    return _defaults  # type: ignore[return-value]


def checked_rules(rules: object) -> RuleSet:
    """``rules`` itself; FusionError unless it is a rule set."""
    if not isinstance(rules, RuleSet):
        raise FusionError(describe("rules", wanted="a RuleSet", got=repr(rules), cure="pass RuleSet((rule,))"))
    return rules


def active_rules() -> RuleSet:
    """The rule set that is used for plans here."""
    return _scoped.get() or _defaults or default_rules()


def set_default_rules(rules: RuleSet) -> None:
    """Replace the process-wide rule set."""
    global _defaults  # noqa: PLW0603 - one process-wide table, replaced as a whole
    _defaults = checked_rules(rules)


@contextmanager
def use_rules(rules: RuleSet) -> Iterator[RuleSet]:
    """Use ``rules`` for plans made inside the block."""
    token = _scoped.set(checked_rules(rules))
    try:
        yield rules
    finally:
        _scoped.reset(token)


class Registration:
    """A registered fusion. As a context manager it unregisters on exit; ``unregister()`` does so at once."""

    def __init__(self, name: str) -> None:
        self.name = name

    def unregister(self) -> None:
        """Remove the fusion from the process-wide rule set; does nothing the second time."""
        if self.name in default_rules().names:
            set_default_rules(default_rules().without(self.name))

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *exc: object) -> None:
        self.unregister()


@checked_arguments(FusionError)
def register_fusion(rule: Fusion, *, prepend: bool = False) -> Registration:
    """Add a declarative rule to the process-wide set; errors as of :meth:`RuleSet.with_rule`."""
    set_default_rules(default_rules().with_rule(rule, first=prepend))
    return Registration(rule.name)


def _register(direction: str, func: Callable[..., Any], prepend: bool, wanted: str | None) -> Registration:
    name: str = str(wanted or getattr(func, "__name__", type(func).__name__))
    taken = default_rules().names
    if name in taken:
        name = next(candidate for i in count(2) if (candidate := f"{name}_{i}") not in taken)
    set_default_rules(default_rules().with_function(FusionFunction(name, direction, func), first=prepend))
    return Registration(name)


@checked_arguments(FusionError, but="func")
def register_forward_fusion(func: Callable[..., Any], prepend: bool = False, *, name: str | None = None) -> Registration:
    """Register ``func(ops, *, recipe) -> ops``, whose FusedOperations bring their own ``fuser_forward``.

    Functions see the pipeline before the declarative rules do, in the order of registration (``prepend``: first).
    """
    return _register(FORWARD, func, prepend, name)


@checked_arguments(FusionError, but="func")
def register_backward_fusion(func: Callable[..., Any], prepend: bool = False, *, name: str | None = None) -> Registration:
    """Like :func:`register_forward_fusion`, for ``fuser_backward``."""
    return _register(BACKWARD, func, prepend, name)


@checked_arguments(FusionError, but="func")
def register_forward_backward_fusion(func: Callable[..., Any], prepend: bool = False, *, name: str | None = None) -> Registration:
    """Like :func:`register_forward_fusion`, for ops that bring both and keep their own saved state."""
    return _register(JOINT, func, prepend, name)
