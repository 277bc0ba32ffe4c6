"""What pydantic refuses, as findings."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

from opfuse.config.document import Document
from opfuse.config.findings import Loc, Problem, Refused, guesses, sentence, shown, similar
from opfuse.errors import closest

Sections = Mapping[tuple[str, ...], type[BaseModel]]
ReportLine = Mapping[str, Any]
"""One error of pydantic: ``type``, ``loc``, ``msg``, ``input`` and ``ctx``."""

CHOICES = {"kind": "recipe", "op": "op"}
"""Keys whose value chooses one of several models, and what a message calls that value."""

OTHERS: Mapping[tuple[str, ...], str] = {("data",): "text"}
"""Places where a message calls it something else."""

CHOOSERS = {"kind": ("recipe",), "op": ("pipeline", "ops")}
"""Places where a word may have been written in place of the mapping that it chooses."""

NAMED = {"list_type": "a list", "model_type": "a mapping", "model_attributes_type": "a mapping", "dict_type": "a mapping"}
"""Types that are called otherwise in YAML than in Python."""


def report(document: Document, error: ValidationError, sections: Sections, skip: Collection[Loc] = ()) -> None:
    """Add what ``error`` says to the findings of ``document``.

    sections: the model of each place, tags included. skip: places of which nothing is said.
    """
    wanted: dict[Loc, list[str]] = {}
    found = [line for line in error.errors(include_url=False) if line["loc"] not in skip]
    lines = [each for line in found for each in (line, *_hidden(line, sections))]
    for line in lines:
        place = address(line["loc"], document, sections)
        make = PROBLEMS.get(line["type"])
        if make is None:
            wanted.setdefault(place, []).append(_expected(line))
            continue
        for problem in make(line, sections):
            _add(document, place, problem)
    inputs = {address(line["loc"], document, sections): line["input"] for line in lines}
    for place, options in wanted.items():
        message = f"{_name(place)} wants {' or '.join(dict.fromkeys(options))}, got {shown(inputs[place])}"
        _add(
            document,
            place,
            Problem("bad-value", message, _like(inputs[place], options) or _mapping(place, inputs[place], sections)),
        )


def _hidden(line: Any, sections: Sections) -> Iterator[Any]:
    """What an unknown word that chooses a model hides: keys that no model has, and values that no model takes which has the key.

    Nothing is said that follows from the guess which model was meant, and nothing at all where there is none.
    """
    if line["type"] != "union_tag_invalid":
        return
    key, tag, known = _choice(line, sections)
    guess = closest(tag[:100], known)
    if guess is None:
        return
    models = {name: sections[*_names(line["loc"]), name] for name in known}
    errors = {name: [*_refusals(model, {**line["input"], key: name})] for name, model in models.items()}
    refused = {name: {each["loc"][0] for each in found} for name, found in errors.items()}
    for each in errors[guess]:
        step = each["loc"][0]
        if all(step in refused[name] for name, model in models.items() if step in model.model_fields):
            unknown = {"type": "no_model_has_it"} if each["type"] == "extra_forbidden" else {}
            yield {**each, **unknown, "loc": (*line["loc"], guess, *each["loc"])}


def _refusals(model: type[BaseModel], given: Mapping[str, Any]) -> list[Any]:
    """What a model refuses of what is given; not what it misses."""
    try:
        model.model_validate(given)
    except ValidationError as error:
        return [each for each in error.errors(include_url=False) if each["type"] != "missing"]
    return []


def _choice(line: ReportLine, sections: Sections) -> tuple[str, str, list[str]]:
    """The key that chooses a model, its value, and the values that it can have."""
    known = [names[-1] for names in sections if names[:-1] == _names(line["loc"]) and names[:-1] not in sections]
    return line["ctx"]["discriminator"].strip("'"), line["ctx"]["tag"], known


def _add(document: Document, place: Loc, problem: Problem) -> None:
    document.report(document.find((*place, *problem.loc), on=problem.on), problem.code, problem.message, problem.help)


def _names(loc: Loc) -> tuple[str, ...]:
    return tuple(step for step in loc if isinstance(step, str))


def address(loc: Loc, document: Document, sections: Sections) -> Loc:
    """The steps of ``loc`` that exist in ``document``, without the names of models that pydantic puts between them."""
    place: list[str | int] = []
    node = document.root
    for i, step in enumerate(loc):
        before = _names(loc[:i])
        is_tag = before not in sections and (*before, step) in sections
        below = None if is_tag else node.child(step)
        if below is not None:
            place.append(step)
            node = below
    return tuple(place)


def _name(place: Loc) -> str:
    """How a message calls the value at ``place``: ``in_features``, ``ops[2]``."""
    if not place:
        return "the file"
    return f"{_name(place[:-1])}[{place[-1]}]" if isinstance(place[-1], int) else str(place[-1])


def _expected(line: ReportLine) -> str:
    return NAMED.get(line["type"]) or re.sub(r"^\w+ should (be|have|match) ", "", line["msg"])


def _like(value: object, options: list[str]) -> str:
    return similar(value, re.findall("'([^']+)'", " ".join(options))) if isinstance(value, str) else ""


def _mapping(place: Loc, value: object, sections: Sections) -> str:
    """How to write a word that stands where a mapping does, if it is one that chooses what the mapping holds."""
    key = next((key for key, at in CHOOSERS.items() if at == _names(place)), None)
    known = isinstance(value, str) and (*_names(place), value) in sections
    return f"write `{{{key}: {value}}}`" if key and known else ""


# -- kinds of errors that need more than a sentence about the value ----------------------------------------------------


def _unknown_key(line: ReportLine, sections: Sections) -> list[Problem]:
    *above, key = line["loc"]
    section = sections.get(_names(tuple(above)))
    known, not_here = getattr(section, "model_fields", {}), getattr(section, "not_here", {})
    help = not_here.get(key) or similar(str(key), known) or (f"its keys are {', '.join(known)}" if known else "")
    return [Problem("unknown-key", f"unknown key {shown(key)}", help, on="key")]


def _key_of_no_model(line: ReportLine, sections: Sections) -> list[Problem]:
    *above, _, key = line["loc"]
    known = {field for names, model in sections.items() if names[:-1] == _names(tuple(above)) for field in model.model_fields}
    return [Problem("unknown-key", f"unknown key {shown(key)}", similar(str(key), sorted(known)), on="key")]


def _missing_key(line: ReportLine, sections: Sections) -> list[Problem]:
    *above, key = line["loc"]
    section = sections.get(_names(tuple(above)))
    known, not_here = getattr(section, "model_fields", {}), getattr(section, "not_here", {})
    if key in guesses(line["input"].keys() - not_here.keys(), known).values():
        return []  # the misspelt one is told
    names = _names(tuple(above))
    where = f"'{names[-1]}'" if names else "the file"
    return [Problem("missing-key", f"{where} needs a key {shown(key)}", f"add `{key}: ...`", on="key")]


def _unknown_choice(line: ReportLine, sections: Sections) -> list[Problem]:
    key, tag, known = _choice(line, sections)
    what = OTHERS.get(_names(line["loc"]), CHOICES[key])
    help = similar(tag, known) or f"one of {', '.join(known)}"
    if what == "op" and not get_close_matches(tag[:100], known, cutoff=0.75):  # no slip of the pen
        end = "" if help.endswith("?") else "."
        help += f"{end} An op of your own comes from an installed package, by its entry point in opfuse.ops"
    return [Problem(f"unknown-{what}", f"there is no {what} {shown(tag)}", help, (key,))]


def _no_choice(line: ReportLine, sections: Sections) -> list[Problem]:
    key = line["ctx"]["discriminator"].strip("'")
    if not isinstance(line["input"], Mapping):
        return [Problem("bad-value", f"{_name(line['loc'])} wants a mapping, got {shown(line['input'])}")]
    keys = [key] if key in CHOICES else [names[-1] for names in sections if names[:-1] == _names(line["loc"])]
    return [Problem("missing-key", f"{_name(line['loc'])} needs a key {' or '.join(map(shown, keys))}", f"add `{keys[0]}: ...`")]


def _refused(line: ReportLine, sections: Sections) -> list[Problem]:
    error = line["ctx"]["error"]
    return list(error.problems) if isinstance(error, Refused) else [Problem("refused-recipe", *sentence(str(error)))]


PROBLEMS: Mapping[str, Callable[[ReportLine, Sections], list[Problem]]] = {
    "extra_forbidden": _unknown_key,
    "no_model_has_it": _key_of_no_model,
    "missing": _missing_key,
    "union_tag_invalid": _unknown_choice,
    "union_tag_not_found": _no_choice,
    "value_error": _refused,
}
