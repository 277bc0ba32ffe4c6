"""The fusions section: rules that are narrowed, disabled or declared. A file can only add guards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, WithJsonSchema

from opfuse.compiler.registry import RuleSet, default_rules
from opfuse.compiler.rules import Fusion, Guard, Term
from opfuse.config.findings import Problem, Refused, shown, similar
from opfuse.config.guards import Places, contradiction, to_guards
from opfuse.config.models import Section
from opfuse.fusions.declared import EMITTERS, KINDS, WORDS, declared, place_names

MAX_RULES = 100

LEVELS = {"O0": 0, "O1": 1, "O2": 2}


def _known_rule(name: str) -> str:
    names = default_rules().names
    if name not in names:
        raise Refused(Problem("unknown-rule", f"there is no rule {shown(name)}", similar(name, names)))
    return name


def _known_word(word: str) -> str:
    if word not in WORDS:
        raise Refused(Problem("unknown-op", f"pattern has no operation {shown(word)}", similar(word, WORDS)))
    return word


_SCALAR = {"type": ["string", "number", "boolean", "null"]}
_CONDITION = {"anyOf": [_SCALAR, {"type": "array", "items": _SCALAR, "minItems": 1}]}
Conditions = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "additionalProperties": _CONDITION})]
RuleName = Annotated[str, AfterValidator(_known_rule)]
Word = Annotated[str, AfterValidator(_known_word), Field(json_schema_extra={"enum": sorted(WORDS)})]


class Use(Section):
    """A rule that is there already, with more guards, or earlier than others (higher priority first; 0 by default)."""

    use: RuleName
    when: Conditions = {}
    priority: int | None = None


class Disable(Section):
    """A rule that shall not fuse anything."""

    disable: RuleName


class Declare(Section):
    """A new rule: ops of the lowered pipeline in a row, and the implementation that runs them as one."""

    name: str = Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$", max_length=100)
    pattern: list[Word] = Field(min_length=1, max_length=32)
    when: Conditions = {}
    emit: Literal["epilogue"] = "epilogue"
    priority: int = 0


ENTRIES: Mapping[str, type[Section]] = {"use": Use, "disable": Disable, "name": Declare}
"""The model of a rule entry by the key that tells it."""


def _entry_key(value: Any) -> str | None:
    given = value if isinstance(value, Mapping) else vars(value) if isinstance(value, Section) else {}
    return next((key for key in ENTRIES if key in given), None)


@dataclass(frozen=True)
class Change:
    """What an entry does to the rule set. rule: the one that is added, or put in place of its namesake; None: it is disabled."""

    name: str
    rule: Fusion | None = None
    new: bool = False


def to_change(section: Any) -> Change:
    """What ``section`` asks for. Refused if its guards or its pattern cannot be."""
    if isinstance(section, Disable):
        return Change(section.disable)
    rule = _narrowed(section) if isinstance(section, Use) else _declared(section)
    if path := contradiction(rule.when):
        message = f"rule {rule.name!r} can never match: its guards on {path} exclude each other"
        raise Refused(Problem("never-matches", message, loc=("when",)))
    return Change(rule.name, rule, new=isinstance(section, Declare))


def _guards(section: Any, places: Places) -> tuple[Guard, ...]:
    try:
        return to_guards(section.when, places)
    except Refused as refused:
        raise Refused(*(replace(problem, loc=("when", *problem.loc)) for problem in refused.problems)) from None


def _narrowed(section: Use) -> Fusion:
    rule = next((rule for rule in default_rules().rules if rule.name == section.use), None)
    if rule is None:
        message = f"{section.use!r} is a registered function, which has no guards"
        raise Refused(Problem("bad-value", message, "disable it, or leave it as it is", ("use",)))
    guards = _guards(section, {term.name: term.words for term in rule.pattern})
    narrowed = rule.narrowed(*guards)
    return narrowed if section.priority is None else replace(narrowed, priority=section.priority)


def _declared(section: Declare) -> Fusion:
    if misfit := EMITTERS[section.emit].misfit(section.pattern):
        raise Refused(Problem("never-matches", f"pattern can never match: {misfit.reason}", loc=("pattern", misfit.place)))
    guards = _guards(section, {place: (kind,) for place, kind in zip(place_names(section.pattern), section.pattern)})
    return declared(section.name, section.pattern, when=guards, emit=section.emit, priority=section.priority)


# -- entries among each other ------------------------------------------------------------------------------------------


def check_changes(changes: Sequence[Change]) -> Sequence[Change]:
    """Refused if two entries speak of one rule, or if a declared rule leaves nothing to a later one."""
    problems: list[Problem] = []
    first: dict[str, int] = {}
    for i, change in enumerate(changes):
        if change.new and change.name in default_rules().names:
            help = f"choose another name, or write `use: {change.name}`"
            problems.append(Problem("duplicate-rule", f"there is a rule {change.name!r} already", help, (i, "name")))
        elif first.setdefault(change.name, i) != i:
            message = f"rule {change.name!r} has an entry already, number {first[change.name] + 1}"
            problems.append(Problem("duplicate-rule", message, "make one entry of the two", (i,)))
        elif by := _shadow(changes, i):
            message = (
                f"rule {change.name!r} can never claim anything: {by!r} comes first and takes the same ops under no more guards"
            )
            problems.append(Problem("shadowed-rule", message, "put the more particular rule first", (i, "name")))
    if problems:
        raise Refused(*problems)
    return changes


def _shadow(changes: Sequence[Change], index: int) -> str | None:
    """The declared rule that claims all that the one at ``index`` could."""
    order = [change for change in changes if change.rule is not None and change.new]
    order.sort(key=lambda change: -change.rule.priority)  # type: ignore[union-attr]
    here = changes[index]
    earlier = order[: order.index(here)] if here in order else []
    return next((other.name for other in earlier if _covers(other.rule, here.rule)), None)  # type: ignore[arg-type]


def _covers(first: Fusion, later: Fusion) -> bool:
    """Whether ``first`` matches inside everything that ``later`` matches."""
    length = len(first.pattern)
    return any(_covers_at(first, later, later.pattern[i : i + length]) for i in range(len(later.pattern) - length + 1))


def _covers_at(first: Fusion, later: Fusion, part: Sequence[Term]) -> bool:
    names = {mine.name: other.name for mine, other in zip(first.pattern, part)}
    words = all(mine.words[0] in KINDS.get(other.words[0], other.words) for mine, other in zip(first.pattern, part))
    asked = {replace(guard, reads=_renamed(guard.reads, names)) for guard in first.when}
    return words and asked <= set(later.when)


def _renamed(path: str, names: Mapping[str, str]) -> str:
    root, dot, rest = path.partition(".")
    return names.get(root, root) + dot + rest


if TYPE_CHECKING:
    RuleSection = Change
else:
    RuleSection = Annotated[
        Annotated[Use, Tag("use")] | Annotated[Disable, Tag("disable")] | Annotated[Declare, Tag("name")],
        Discriminator(_entry_key),
        AfterValidator(to_change),
    ]
"""One entry of ``fusions.rules``; validates to a :class:`Change`."""


class Fusions(Section):
    """Which rules fuse. level: O0 none, O1 those that are equal bit for bit, O2 also those that round once."""

    level: Literal["O0", "O1", "O2"] = "O2"
    rules: Annotated[list[RuleSection], Field(max_length=MAX_RULES), AfterValidator(check_changes)] = []

    def apply(self) -> RuleSet:
        """The rule set in force with this section's changes: declared rules first."""
        rules = default_rules()
        for change in self.rules:
            if change.rule is None:
                rules = rules.without(change.name)
            elif not change.new:
                rules = rules.replaced(change.rule)
        new = tuple(change.rule for change in self.rules if change.new and change.rule is not None)
        return replace(rules, rules=(*new, *rules.rules), level=LEVELS[self.level])
