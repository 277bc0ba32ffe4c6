"""Rules that are written down, not programmed: a sequence of kinds that a known implementation can run in one piece."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from opfuse.compiler.graph import QUANTIZE
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

    misfit: Callable[[Sequence[str]], Misfit | None]
    forward: Callable[[tuple[str, ...]], Callable[..., Any]]


def _means_only(word: str, trait: str) -> bool:
    """Whether every node that ``word`` means has ``trait``."""
    return all(trait in words for words in KINDS.values() if word in words)


def _epilogue_misfit(kinds: Sequence[str]) -> Misfit | None:
    if not _means_only(kinds[0], PRODUCER):
        return Misfit(0, f"an epilogue begins with a matrix product or a normalisation, not with {kinds[0]!r}")
    if len(kinds) < 2:
        return Misfit(0, "one op alone is no fusion")
    for place, kind in enumerate(kinds[1:], 1):
        if kind == QUANTIZE and place < len(kinds) - 1:
            return Misfit(place, f"nothing can follow {QUANTIZE!r} in an epilogue")
        if kind != QUANTIZE and not _means_only(kind, ELEMENTWISE):
            return Misfit(place, f"{kind!r} is not elementwise, so it cannot follow {kinds[place - 1]!r} in an epilogue")
    return None


@cache
def _epilogue_forward(places: tuple[str, ...]) -> Callable[..., Any]:
    """:func:`~opfuse.fusions.epilogue.epilogue` over places of these names; one function for each tuple of them."""
    quantized = places[-1] == QUANTIZE

    def declared_epilogue(x: Value, **bound: Context) -> Any:
        producer, *chain = (bound[place] for place in places)
        cast = chain.pop() if quantized else None
        return epilogue(x, producer=producer, chain=chain, quantize=cast)

    return _with_places(declared_epilogue, places)


def _with_places(function: Callable[..., Any], places: Sequence[str]) -> Callable[..., Any]:
    """``function``, which now tells that its keyword parameters are ``places``."""
    first = inspect.Parameter("x", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    keywords = [inspect.Parameter(place, inspect.Parameter.KEYWORD_ONLY) for place in places]
    function.__signature__ = inspect.Signature([first, *keywords])  # type: ignore[attr-defined]
    return function


EMITTERS = {"epilogue": Emitter(_epilogue_misfit, _epilogue_forward)}
"""What a declared rule can emit."""


def place_names(kinds: Sequence[str]) -> tuple[str, ...]:
    """A name for each place of a pattern: its word, numbered from the second time on (``bias``, ``gelu``, ``bias_2``)."""
    counts = [list(kinds[: i + 1]).count(kind) for i, kind in enumerate(kinds)]
    return tuple(kind if count == 1 else f"{kind}_{count}" for kind, count in zip(kinds, counts))


def declared(name: str, kinds: Sequence[str], *, when: Sequence[Guard] = (), emit: str = "epilogue", priority: int = 0) -> Fusion:
    """The rule that runs ``kinds``, each exactly once and in this order, as one ``emit``.

    kinds: words of :data:`WORDS`; a Linear is ``linear`` followed by ``bias``. FusionError for an unknown word or emitter,
    and for a pattern that ``emit`` cannot run.
    """
    where = f"fusion {name!r}"
    if emit not in EMITTERS:
        got = f"{emit!r}{nearest(str(emit), EMITTERS)}"
        raise FusionError(describe(where, wanted=f"an emitter of {tuple(EMITTERS)}", got=got, cure="name one of them"))
    if isinstance(kinds, str) or not kinds:
        raise FusionError(describe(where, wanted="a list of words", got=repr(kinds), cure="write ['linear', 'gelu']"))
    if unknown := [kind for kind in kinds if kind not in WORDS]:
        got, cure = f"{unknown[0]!r}{nearest(str(unknown[0]), WORDS)}", f"use words of {sorted(WORDS)}"
        raise FusionError(describe(where, wanted="kinds or traits of built-in ops", got=got, cure=cure))
    if misfit := EMITTERS[emit].misfit(kinds):
        cure = f"{misfit.reason}: mend place {misfit.place} of the pattern, or write the implementation and use fusion()"
        raise FusionError(describe(where, wanted=f"a pattern that {emit} can run", got=tuple(kinds), cure=cure))
    places = place_names(kinds)
    forms = [is_(f"{place}.{FORMS[kind][0]}", FORMS[kind][1]) for place, kind in zip(places, kinds) if kind in FORMS]
    return fusion(
        name,
        dict(zip(places, kinds)),
        when=(*forms, *when),
        forward=EMITTERS[emit].forward(places),
        priority=priority,
        doc=f"{' '.join(kinds)} as one {emit}.",
    )
