"""The fusions section: rules that are narrowed, disabled, extended or declared. A file can only add guards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, WithJsonSchema

from opfuse.compiler.graph import BACKWARD
from opfuse.compiler.registry import RuleSet, default_rules
from opfuse.compiler.rules import Fusion, Guard, Term, contradiction, is_, is_name, printed, split, terms_of
from opfuse.compiler.vocabulary import SEVERAL
from opfuse.config.findings import Loc, Problem, Refused, sentence, shown, similar
from opfuse.config.guards import Places, to_guards
from opfuse.config.models import FileSection
from opfuse.config.operations import MAX_OPS
from opfuse.config.order import RuleChange, changed, check_changes
from opfuse.config.plugins import FUNCTION_PLUGINS, plugin_functions
from opfuse.errors import FusionError
from opfuse.fusions.declared import EMITTERS, WORDS, declared, extended, learn_function, misfit, unknown_word, unlike

MAX_RULES = 100
MAX_PLACES = 32

LEVELS = {"O0": 0, "O1": 1, "O2": 2}


def _known_rule(name: str) -> str:
    names = default_rules().names
    if name not in names:
        raise Refused(Problem("unknown-rule", f"there is no rule {shown(name)}", similar(name, names)))
    return name


def _places(written: Any) -> tuple[Term, ...]:
    """The places of a pattern; Refused with everything wrong in them, each where it stands."""
    parts = _parts(written)
    problems = [problem for loc, part in parts for problem in _problems(loc, part)]
    if not problems and not 1 <= len(parts) <= MAX_PLACES:
        problems.append(Problem("bad-value", f"pattern wants 1 to {MAX_PLACES} places, got {len(parts)}"))
    found = () if problems else terms_of(written)
    names = [term.name for term in found]
    for (loc, _), (i, name) in zip(parts, enumerate(names)):
        if name in names[:i]:
            problems.append(Problem("bad-value", f"two places are called {shown(name)}", "rename one of the two", loc))
    if problems:
        raise Refused(*problems)
    return found


def _parts(written: Any) -> list[tuple[Loc, Any]]:
    """Each place of a pattern as it is written, and where."""
    if isinstance(written, Mapping):
        return [((name,), {name: place}) for name, place in written.items()]
    if isinstance(written, list):
        return [((i,), place) for i, place in enumerate(written)]
    return [((), place) for place in split(written)] if isinstance(written, str) else [((), written)]


def _problems(loc: Loc, part: Any) -> Iterator[Problem]:
    try:
        (term,) = terms_of([part])
    except FusionError as error:
        yield Problem("bad-value", *sentence(str(error)), loc)
        return
    if (word := unknown_word(term)) is not None:
        help = f"write {SEVERAL[word]!r}: what pipelines call {word} is several ops" if word in SEVERAL else similar(word, WORDS)
        yield Problem("unknown-op", f"pattern has no operation {shown(word)}", help, loc)
    if max(term.low, term.high or 0) > MAX_OPS:
        yield Problem("bad-value", f"{str(term)!r} counts beyond the {MAX_OPS} ops that a file has at most", "count less", loc)
    if term.name == "recipe" or not is_name(term.name):
        yield Problem("bad-value", f"a place cannot be called {shown(term.name)}", "choose another name", loc, on="key")


_SCALAR = {"type": ["string", "number", "boolean", "null"]}
_CONDITION = {"anyOf": [_SCALAR, {"type": "array", "items": _SCALAR, "minItems": 1}]}
Conditions = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "additionalProperties": _CONDITION})]
RuleName = Annotated[str, AfterValidator(_known_rule)]
NewName = Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$", max_length=100)]
_EMIT = {"anyOf": [{"enum": list(EMITTERS)}, {"type": "string", "minLength": 1}]}
OFFERED = f"write `emit: NAME` of a function that an installed package offers as an entry point of {FUNCTION_PLUGINS}"

for _name, _function in plugin_functions().items():
    learn_function(_name, _function)


def _known_emitter(name: str) -> str:
    if name not in EMITTERS:
        known = " or ".join(map(repr, EMITTERS))
        raise Refused(Problem("bad-value", f"emit wants {known}, got {shown(name)}", similar(name, EMITTERS) or OFFERED))
    return name


Emit = Annotated[str, AfterValidator(_known_emitter), WithJsonSchema(_EMIT)]
_WORD = {"anyOf": [{"enum": sorted(WORDS)}, {"type": "string", "minLength": 1}]}
_OTHERS = [{"type": "string", "minLength": 1}, {"type": "object", "additionalProperties": _WORD, "minProperties": 1}]
_PATTERN = {"anyOf": [{"type": "array", "items": {"anyOf": [*_WORD["anyOf"], {"type": "object"}]}, "minItems": 1}, *_OTHERS]}
Pattern = Annotated[Any, BeforeValidator(_places), WithJsonSchema(_PATTERN)]


Count = Annotated[int, Field(ge=0)]


class Expect(FileSection):
    """How often a rule shall have each outcome."""

    fused: Count | None = None
    shadowed: Count | None = None
    missed: Count | None = None
    absent: Count | None = None


class Placed(FileSection):
    """What an entry says of a rule that shall fuse: when it may, and when it claims.

    priority: higher ones claim first; 0 by default. before, after: next to another rule of the same direction. expect: how often
    the file's pipeline shall have each outcome, which `opfuse check` counts on a CPU.
    """

    when: Conditions = {}
    priority: int | None = None
    before: str | None = None
    after: str | None = None
    expect: Expect | None = None


class Use(Placed):
    """A rule that is there already, with more guards, or at another place in the order in which rules claim."""

    use: RuleName


class Disable(FileSection):
    """A rule that shall not fuse anything."""

    disable: RuleName


class Declare(Placed):
    """A new rule: ops of the lowered pipeline in a row, and the implementation that runs them as one.

    emit: epilogue, a product or a normalisation with what follows it, or chain, elementwise ops alone; chain is the one that
    runs backward as well, and in both passes, which is joint. Or a function of an installed package, by its entry point; its
    keyword parameters are the names of the places, and it runs in the direction that the rule says.
    """

    not_here = dict.fromkeys(("forward", "backward", "function"), OFFERED)

    name: NewName
    pattern: Pattern
    direction: Literal["forward", "backward", "joint"] = "forward"
    emit: Emit | None = None


class Extend(Placed):
    """A new rule that runs as one that is there, with more guards, or of a part of what that matches.

    pattern: places by the names that the other rule gives them, each with what that takes there or less; a place that need not be
    there may be left out. Without a pattern, that of the other rule.
    """

    name: NewName
    extends: RuleName
    pattern: Pattern = None


ENTRIES: Mapping[str, type[FileSection]] = {"use": Use, "disable": Disable, "extends": Extend, "name": Declare}
"""The model of a rule entry by the key that tells it."""


IMPLIED: Mapping[str, tuple[Guard, ...]] = {BACKWARD: (is_("env.grad", True),)}
"""What holds wherever a rule of a direction is asked."""


def _entry_key(value: Any) -> str | None:
    given = value if isinstance(value, Mapping) else vars(value) if isinstance(value, FileSection) else {}
    return next((key for key in ENTRIES if key in given), None)


def to_change(section: Any) -> RuleChange:
    """What ``section`` asks for. Refused if its guards or its pattern cannot be."""
    if isinstance(section, Disable):
        return RuleChange(section.disable)
    orders = [key for key in ("priority", "before", "after") if getattr(section, key) is not None]
    if len(orders) > 1:
        message = f"{orders[0]!r} and {orders[1]!r} both say when rule {getattr(section, 'use', None) or section.name!r} claims"
        raise Refused(Problem("bad-value", message, "keep one of the two", (orders[1],)))
    rule = _MADE[type(section)](section)
    if path := contradiction((*rule.when, *IMPLIED.get(rule.direction, ()))):
        message = f"rule {rule.name!r} can never match: its guards on {path} exclude each other"
        raise Refused(Problem("never-matches", message, loc=("when",)))
    expected = None if section.expect is None else section.expect.model_dump(exclude_none=True)
    if expected == {}:
        raise Refused(Problem("bad-value", "expect names no outcome", "write `expect: {fused: 1}`", ("expect",)))
    order = {"before": section.before, "after": section.after}
    return RuleChange(rule.name, rule, new=not isinstance(section, Use), expect=expected, **order)


def _guards(section: Any, places: Places) -> tuple[Guard, ...]:
    try:
        return to_guards(section.when, places)
    except Refused as refused:
        raise Refused(*(replace(problem, loc=("when", *problem.loc)) for problem in refused.problems)) from None


def _rule(name: str, key: str) -> Fusion:
    rule = next((rule for rule in default_rules().rules if rule.name == name), None)
    if rule is None:
        message = f"{name!r} is a registered function, which has no pattern and no guards"
        raise Refused(Problem("bad-value", message, "disable it, or leave it as it is", (key,)))
    return rule


def _narrowed(section: Use) -> Fusion:
    rule = _rule(section.use, "use")
    guards = _guards(section, {term.name: term.words for term in rule.pattern})
    narrowed = rule.narrowed(*guards)
    return narrowed if section.priority is None else replace(narrowed, priority=section.priority)


def _extended(section: Extend) -> Fusion:
    base = _rule(section.extends, "extends")
    pattern = base.pattern if section.pattern is None else section.pattern
    if unfit := unlike(base, pattern):
        message = f"pattern is not within that of rule {section.extends!r}: {unfit.reason}"
        raise Refused(Problem("never-matches", message, f"its pattern is `{printed(base.pattern)}`", ("pattern", unfit.place)))
    guards = _guards(section, {term.name: term.words for term in pattern})
    return extended(base, section.name, pattern, when=guards, priority=section.priority or 0)


def _declared(section: Declare) -> Fusion:
    emit = section.emit or ("epilogue" if section.direction == "forward" else "chain")
    if unfit := misfit(emit, section.pattern, section.direction):
        help = "write `emit: chain`" if misfit("chain", section.pattern, section.direction) is None else ""
        raise Refused(Problem("never-matches", f"pattern can never match: {unfit.reason}", help, ("pattern", unfit.place)))
    guards = _guards(section, {term.name: term.words for term in section.pattern})
    try:
        return declared(
            section.name, section.pattern, when=guards, emit=emit, direction=section.direction, priority=section.priority or 0
        )
    except FusionError as error:
        raise Refused(Problem("bad-value", *sentence(str(error)), ("pattern",))) from error


_MADE: Mapping[type[FileSection], Callable[[Any], Fusion]] = {Use: _narrowed, Extend: _extended, Declare: _declared}


if TYPE_CHECKING:
    RuleSection = RuleChange
else:
    RuleSection = Annotated[
        Annotated[Use, Tag("use")]
        | Annotated[Disable, Tag("disable")]
        | Annotated[Extend, Tag("extends")]
        | Annotated[Declare, Tag("name")],
        Discriminator(_entry_key),
        AfterValidator(to_change),
    ]
"""One entry of ``fusions.rules``; validates to a :class:`RuleChange`."""


class Fusions(FileSection):
    """Which rules fuse. level: O0 none, O1 those that are equal bit for bit, O2 also those that round once."""

    level: Literal["O0", "O1", "O2"] = "O2"
    rules: Annotated[list[RuleSection], Field(max_length=MAX_RULES), AfterValidator(check_changes)] = []

    def apply(self) -> RuleSet:
        """The rule set in force with this section's changes: declared rules first, where they name no other place."""
        return replace(changed(self.rules), level=LEVELS[self.level])
