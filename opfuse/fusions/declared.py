"""Rules that are written down, not programmed: a sequence of kinds that a known implementation can run in one piece."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from opfuse.compiler.graph import QUANTIZE
from opfuse.compiler.patterns import Term, printed, terms_of
from opfuse.compiler.rules import Fusion, Guard, fusion, is_
from opfuse.compiler.vocabulary import declared_traits
from opfuse.core.context import Context, Value
from opfuse.core.operation import BasicOperation
from opfuse.errors import FusionError, describe, nearest
from opfuse.fusions.epilogue import epilogue
from opfuse.ops import OPS

PRODUCER, ELEMENTWISE = "producer", "elementwise"


KINDS = {cls.kind: frozenset((cls.kind, *declared_traits(cls))) for cls in OPS.values() if issubclass(cls, BasicOperation)}
"""Every kind of node that built-in ops become, with the pattern words that mean it."""

WORDS = frozenset().union(*KINDS.values())
"""Every word that a pattern may use."""

FORMS = {"add_extra_input": ("in_place", False)}
"""Ops that are elementwise in one form only: the hyper-parameter, and its value in that form."""


class Misfit(NamedTuple):
    """The place of a pattern that an implementation cannot run, and why."""

    place: int
    reason: str


class Emitter(NamedTuple):
    """An implementation that rules can be composed of: which patterns it runs, and the keyword function that runs one."""

    misfit: Callable[[Sequence[Term]], Misfit | None]
    forward: Callable[[tuple[Term, ...]], Callable[..., Any]]


def _means_only(words: Iterable[str], trait: str) -> bool:
    """Whether every node that one of ``words`` means has ``trait``."""
    return all(trait in known for word in words for known in KINDS.values() if word in known)


def _is_cast(term: Term) -> bool:
    return term.words == (QUANTIZE,)


def _epilogue_misfit(pattern: Sequence[Term]) -> Misfit | None:
    first, *others = pattern
    if not _means_only(first.words, PRODUCER) or (first.low, first.high) != (1, 1):
        return Misfit(0, f"an epilogue begins with one matrix product or normalisation, not with {str(first)!r}")
    if not others:
        return Misfit(0, "one op alone is no fusion")
    for place, term in enumerate(others, 1):
        if (misfit := _chain_misfit(term, pattern[place - 1], last=place == len(others))) is not None:
            return Misfit(place, misfit)
    return None


def _chain_misfit(term: Term, before: Term, *, last: bool) -> str | None:
    """Why ``term`` cannot stand in a chain of elementwise ops behind ``before``."""
    if _is_cast(term):
        if not last:
            return f"nothing can follow {QUANTIZE!r} in an epilogue"
        return None if term.high == 1 else f"an epilogue ends with one {QUANTIZE!r}, not with {str(term)!r}"
    if not _means_only(term.words, ELEMENTWISE):
        return f"{str(term)!r} is not elementwise, so it cannot follow {str(before)!r} in an epilogue"
    if len(term.words) > 1 and (formed := [word for word in term.words if word in FORMS]):
        return f"{formed[0]!r} is elementwise in one form only, so it needs a place of its own"
    return None


@cache
def _epilogue_forward(pattern: tuple[Term, ...]) -> Callable[..., Any]:
    """:func:`~opfuse.fusions.epilogue.epilogue` over the places of a pattern; one function for each pattern."""
    places = tuple(term.name for term in pattern)
    ends_in_cast = _is_cast(pattern[-1])

    def declared_epilogue(x: Value, /, **bound: Any) -> Any:
        cast = bound.pop(places[-1]) if ends_in_cast else None
        producer, *chain = contexts_of(bound[place] for place in places if place in bound)
        return epilogue(x, producer=producer, chain=chain, quantize=cast)

    return _with_places(declared_epilogue, places)


def contexts_of(bound: Iterable[Any]) -> Iterator[Context]:
    """The contexts that the places of a pattern are bound to, in order."""
    for found in bound:
        yield from found if isinstance(found, tuple) else () if found is None else (found,)


def _with_places(function: Callable[..., Any], places: Sequence[str]) -> Callable[..., Any]:
    """``function``, which now tells that its keyword parameters are ``places``."""
    first = inspect.Parameter(f"{'_'.join(places)}_", inspect.Parameter.POSITIONAL_ONLY)  # a name that is no place
    keywords = [inspect.Parameter(place, inspect.Parameter.KEYWORD_ONLY) for place in places]
    function.__signature__ = inspect.Signature([first, *keywords])  # type: ignore[attr-defined]
    return function


EMITTERS = {"epilogue": Emitter(_epilogue_misfit, _epilogue_forward)}
"""What a declared rule can emit."""


def unknown_word(term: Term) -> str | None:
    """The first word of ``term`` that no built-in op has."""
    return next((word for word in term.words if word not in WORDS), None)


def forms_of(pattern: Sequence[Term]) -> tuple[Guard, ...]:
    """What is asked of ops that are elementwise in one form only."""
    formed = ((term, *FORMS[word]) for term in pattern for word in term.words if word in FORMS)
    return tuple(is_(f"{term.name}.{field}", value) for term, field, value in formed)


def declared(name: str, pattern: object, *, when: Sequence[Guard] = (), emit: str = "epilogue", priority: int = 0) -> Fusion:
    """The rule that runs ``pattern`` as one ``emit``.

    pattern: as :func:`~opfuse.compiler.patterns.terms_of` reads it, in :data:`WORDS`; a Linear is ``linear`` followed by
    ``bias``. FusionError for an unknown word or emitter, and for a pattern that ``emit`` cannot run.
    """
    where = f"fusion {name!r}"
    if emit not in EMITTERS:
        got = f"{emit!r}{nearest(str(emit), EMITTERS)}"
        raise FusionError(describe(where, wanted=f"an emitter of {tuple(EMITTERS)}", got=got, cure="name one of them"))
    terms = terms_of(pattern, where)
    if not terms or len({term.name for term in terms}) < len(terms):
        raise FusionError(describe(where, wanted="places of different names", got=repr(pattern), cure="write ['linear', 'gelu']"))
    if unknown := [word for term in terms if (word := unknown_word(term)) is not None]:
        got, cure = f"{unknown[0]!r}{nearest(unknown[0], WORDS)}", f"use words of {sorted(WORDS)}"
        raise FusionError(describe(where, wanted="kinds or traits of built-in ops", got=got, cure=cure))
    if misfit := EMITTERS[emit].misfit(terms):
        cure = f"{misfit.reason}: mend place {misfit.place} of the pattern, or write the implementation and use fusion()"
        raise FusionError(describe(where, wanted=f"a pattern that {emit} can run", got=printed(terms), cure=cure))
    return fusion(
        name,
        terms,
        when=(*forms_of(terms), *when),
        forward=EMITTERS[emit].forward(terms),
        priority=priority,
        doc=f"{printed(terms)} as one {emit}.",
    )
