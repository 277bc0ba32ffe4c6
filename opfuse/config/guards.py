"""Guards as a file writes them: a dotted path and a value, or a value with a word before it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_type_hints

import torch

from opfuse.compiler.graph import CAST_WORDS
from opfuse.compiler.rules import TESTS, Guard
from opfuse.compiler.vocabulary import PARAMETERS
from opfuse.config.document import meaning
from opfuse.config.fields import read
from opfuse.config.findings import Problem, Refused, shown, similar
from opfuse.config.operations import OPS
from opfuse.core.signature import Env
from opfuse.core.spec import domains, spec_of
from opfuse.domains import BOOLEAN, Domain, domain_of, one_of
from opfuse.formats import DTYPES
from opfuse.fusions.declared import KINDS
from opfuse.recipes import RECIPES
from opfuse.recipes.settings import settings_of

WORDS = {word.text.removesuffix(" {!r}"): test for test, word in TESTS.items() if test not in ("is", "one_of")}
"""Words before a value and the guard test each stands for; a value without a word is ``is``, a list ``one_of``."""

_WORD = re.compile(f"({'|'.join(WORDS)}) +(.+)")


def _version(value: Any) -> tuple[int, int]:
    """``9.0`` as (9, 0)."""
    found = re.fullmatch(r"(\d+)(?:\.(\d+))?", str(value))
    if found is None or isinstance(value, bool):
        raise ValueError
    return int(found[1]), int(found[2] or 0)


def _dtype(value: Any) -> torch.dtype | None:
    if value is None:
        return None
    if not isinstance(value, str) or value not in DTYPES:
        raise ValueError
    return DTYPES[value]


def _scalar(value: Any) -> Any:
    if isinstance(value, list | dict):
        raise ValueError
    return value


VERSION = Domain("a compute capability such as 9.0", _version)
DTYPE = Domain("the name of a torch dtype", _dtype)
ANYTHING = Domain("a single value", _scalar)

RECIPE = {
    **{name: rule.domain for cls in RECIPES.values() for name, (_, rule) in settings_of(cls).items() if rule is not None},
    "kind": one_of(*RECIPES),
}
ENVIRONMENT = {
    **{name: domain_of(hint) or ANYTHING for name, hint in get_type_hints(Env).items()},
    **{name: RECIPE[name] for name in ("backward_override", "rounding")},
    "arch": VERSION,
    "autocast": DTYPE,
}
TENSOR = {"dtype": DTYPE, "requires_grad": BOOLEAN}
CAST = {"role": one_of("input", "grad_output")}
"""What may be read of the recipe, of a call's environment, of a parameter and of a cast."""

Places = Mapping[str, tuple[str, ...]]
"""Names of a pattern's places, each with its words."""


def _attributes(words: Sequence[str]) -> dict[str, Domain]:
    """What may be read of an op at a place: its hyper-parameters."""
    classes = [cls for cls in OPS.values() for word in words if word in KINDS.get(cls.kind, ())]
    found = {name: domain for cls in classes for name, domain in domains(spec_of(cls)).items()}
    return {**found, **(CAST if not set(CAST_WORDS).isdisjoint(words) else {})}


def _lookup(step: str, known: Mapping[str, Any], of: str) -> Any:
    if step not in known:
        cure = similar(step, known) or (f"it has {', '.join(sorted(known))}" if known else "")
        raise Refused(Problem("unknown-path", f"{of} has no {shown(step)} to read", cure, on="key"))
    return known[step]


def readable_at(path: str, places: Places) -> Domain:
    """What the value at ``path`` can be; Refused if there is nothing to read."""
    root, *steps = path.split(".")
    known: dict[str, Any] = {"env": {**ENVIRONMENT, "recipe": RECIPE}, "recipe": RECIPE}
    found = known.get(root) or {**_attributes(places.get(root, ())), **dict.fromkeys(PARAMETERS, TENSOR)}
    _lookup(root, {**known, **places}, "a guard")
    for of, step in zip((root, *steps), steps):
        found = _lookup(step, found, of) if isinstance(found, dict) else _lookup(step, {}, of)
    if not isinstance(found, Domain):
        raise Refused(Problem("unknown-path", f"a guard reads a part of {path}", f"write {path}.{next(iter(found))}", on="key"))
    return found


def to_guard(path: str, written: Any, places: Places) -> Guard:
    """The guard that ``path: written`` stands for. Refused if the path or the value cannot be."""
    domain = readable_at(path, places)
    reads = f"env.{path}" if path.startswith("recipe.") else path
    if isinstance(written, list):
        if not written:
            raise Refused(Problem("bad-value", f"{path} wants at least one value", "list what it may be"))
        return Guard(reads, "one_of", tuple(read(path, domain, value) for value in written))
    word = _WORD.fullmatch(written) if isinstance(written, str) else None
    test = WORDS[word[1]] if word else "is"
    value = meaning(word[2]) if word else written
    if TESTS[test].integers:
        return Guard(reads, test, _integer(path, domain, test, value))
    if word and TESTS[test].end and not (domain.ordered or domain is VERSION):
        message = f"{path} has no order, so {word[1]!r} cannot be asked of it"
        raise Refused(Problem("bad-value", message, "list the values it may have"))
    return Guard(reads, test, read(path, domain, value))


def _integer(path: str, domain: Domain, test: str, value: Any) -> int:
    asked = TESTS[test]
    if domain.schema.get("type") != "integer" or type(value) is not int or not asked.takes(value):
        told = asked.text.removesuffix(" {!r}")
        raise Refused(Problem("bad-value", f"{path} wants {told!r} {asked.wanted}, got {shown(value)}"))
    return value


def to_guards(when: Mapping[str, Any], places: Places) -> tuple[Guard, ...]:
    """The guards of one ``when``; Refused with everything wrong in it."""
    guards: list[Guard] = []
    problems: list[Problem] = []
    for path, written in when.items():
        try:
            guards.append(to_guard(path, written, places))
        except Refused as refused:
            problems += [replace(problem, loc=(path, *problem.loc)) for problem in refused.problems]
    if problems:
        raise Refused(*problems)
    return tuple(guards)
