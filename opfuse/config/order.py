"""Entries of a file among each other: what they make of the rule set, in which order, and what they leave to each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from opfuse.compiler.registry import RuleSet, default_rules, extends
from opfuse.compiler.rules import PASSES, Fusion
from opfuse.config.findings import Problem, Refused, shown, similar
from opfuse.config.shadows import covers


@dataclass(frozen=True)
class RuleChange:
    """What an entry does to the rule set.

    rule: the one that is added, or put in place of its namesake; None: it is disabled. before, after: the rule that it shall
    claim next to. expect: how often each outcome shall be counted.
    """

    name: str
    rule: Fusion | None = None
    new: bool = False
    before: str | None = None
    after: str | None = None
    expect: Mapping[str, int] | None = None

    @property
    def anchor(self) -> tuple[str, str] | None:
        """The key and the name of the rule that it stands next to."""
        return next(((key, name) for key in ("before", "after") if (name := getattr(self, key)) is not None), None)


def changed(changes: Sequence[RuleChange]) -> RuleSet:
    """The rule set in force with ``changes``."""
    rules = default_rules()
    for change in changes:
        if change.rule is None:
            rules = rules.without(change.name)
        elif not change.new:
            rules = rules.replaced(change.rule)
    new = tuple(change.rule for change in changes if change.new and change.rule is not None)
    order = [*new, *rules.rules]
    moves = [(change.name, *change.anchor) for change in changes if change.anchor is not None]
    for _ in moves:  # as often as one can put another astray that went before
        before = list(order)
        for move in moves:
            _move(order, *move)
        if all(rule is other for rule, other in zip(order, before)):
            break
    return replace(rules, rules=tuple(order))


def _move(order: list[Fusion], name: str, key: str, anchor: str) -> None:
    """Put a rule right before or after another, among those of its priority."""
    rule = order.pop(_place(order, name))
    at = _place(order, anchor)
    priority = order[at].priority
    order.insert(at + (key == "after"), rule if rule.priority == priority else replace(rule, priority=priority))


def _place(order: Sequence[Fusion], name: str) -> int:
    return next(i for i, rule in enumerate(order) if rule.name == name)


def check_changes(changes: Sequence[RuleChange]) -> Sequence[RuleChange]:
    """Refused if entries speak of one rule, stand next to none, or leave nothing to a declared rule."""
    for check in (_twice, _astray):
        _refuse(check(changes, i) for i in range(len(changes)))
    rules = changed(changes)
    order = {direction: rules.of(direction) for direction in PASSES}
    for late in (_contrary, _shadowed):
        _refuse(late(change, i, order[change.rule.direction]) for i, change in enumerate(changes) if change.rule is not None)
    return changes


def _refuse(found: Iterable[Problem | None]) -> None:
    if problems := [problem for problem in found if problem is not None]:
        raise Refused(*problems)


def _twice(changes: Sequence[RuleChange], index: int) -> Problem | None:
    change = changes[index]
    if change.new and change.name in default_rules().names:
        help = f"choose another name, or write `use: {change.name}`"
        return Problem("duplicate-rule", f"there is a rule {change.name!r} already", help, (index, "name"))
    first = next(i for i, other in enumerate(changes) if other.name == change.name)
    if first == index:
        return None
    message = f"rule {change.name!r} has an entry already, number {first + 1}"
    return Problem("duplicate-rule", message, "make one entry of the two", (index,))


def _astray(changes: Sequence[RuleChange], index: int) -> Problem | None:
    change = changes[index]
    if change.anchor is None or change.rule is None:
        return None
    key, anchor = change.anchor
    known = {rule.name: rule for rule in default_rules().rules} | {other.name: other.rule for other in changes}
    others = {name: rule for name, rule in known.items() if rule is not None and name != change.name}
    if anchor not in others:
        message = f"there is no other rule {shown(anchor)} to claim {key}"
        return Problem("unknown-rule", message, similar(anchor, others), (index, key))
    if others[anchor].direction != change.rule.direction:
        message = f"{anchor!r} is a {others[anchor].direction} rule, {change.name!r} a {change.rule.direction} one"
        return Problem("bad-value", message, "they never ask for the same nodes in one pass: leave it out", (index, key))
    return None


def _contrary(change: RuleChange, index: int, order: Sequence[Fusion]) -> Problem | None:
    """The problem of an entry whose place in the order the other entries rule out."""
    if change.anchor is None:
        return None
    key, anchor = change.anchor
    if (_place(order, change.name) < _place(order, anchor)) == (key == "before"):
        return None
    message = f"{change.name!r} cannot claim {key} {anchor!r}: other entries say the contrary"
    return Problem("bad-value", message, "drop one of them", (index, key))


def _shadowed(change: RuleChange, index: int, order: Sequence[Fusion]) -> Problem | None:
    """The problem of a declared rule to which an earlier rule leaves nothing."""
    if not change.new:
        return None
    at = _place(order, change.name)
    by = next((other.name for other in order[:at] if extends(order[at], other) or covers(other, order[at])), None)
    if by is None:
        return None
    message = f"rule {change.name!r} can never claim anything: {by!r} comes first and takes the same ops under no more guards"
    return Problem("shadowed-rule", message, "put the more particular rule first", (index, "name"))
