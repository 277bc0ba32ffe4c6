"""Declared rules: patterns without code of their own, which one of the built-in implementations runs as one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from opfuse.compiler.graph import BACKWARD, CAST_WORDS, FORWARD, QUANTIZE
from opfuse.compiler.rules import PASSES, Fusion, Guard, Term, fusion, is_, is_single, printed, terms_of
from opfuse.compiler.vocabulary import declared_traits
from opfuse.core.context import Context, Value
from opfuse.core.operation import BasicOperation, FusibleOperation
from opfuse.errors import FusionError, describe, nearest
from opfuse.fusions.backward import backward_activation_bias
from opfuse.fusions.epilogue import elementwise, epilogue
from opfuse.ops import OPS

PRODUCER, ELEMENTWISE = "producer", "elementwise"
"""Traits of what an epilogue begins with, and of what a chain is made of."""

KINDS = {cls.kind: frozenset((cls.kind, *declared_traits(cls))) for cls in OPS.values() if issubclass(cls, BasicOperation)}
"""Every kind of node that built-in ops become, and those that :func:`learn` was told of, with the pattern words that mean it."""

KINDS[QUANTIZE] |= {*CAST_WORDS}

WORDS: set[str] = set().union(*KINDS.values())
"""Every word that a pattern may use."""


def learn(cls: type[FusibleOperation]) -> None:
    """Add an op of another package, and the words of patterns that match it, to what files may name."""
    if issubclass(cls, BasicOperation):
        KINDS[cls.kind] = frozenset((cls.kind, *declared_traits(cls)))
        WORDS.update(KINDS[cls.kind])


FORMS = {"add_extra_input": ("in_place", False)}
"""Ops that are elementwise in one form only: the hyper-parameter, and its value in that form."""


class Misfit(NamedTuple):
    """The place of a pattern that an implementation cannot run, and why."""

    place: int
    reason: str


class Emitter(NamedTuple):
    """Implementations that rules can be composed of, by direction, and which patterns they run.

    Each makes, for a pattern, the keyword function that runs it.
    """

    misfit: Callable[[Sequence[Term], str], Misfit | None]
    makes: Mapping[str, Callable[[tuple[Term, ...]], Callable[..., Any]]]


def _means_only(words: Iterable[str], trait: str) -> bool:
    """Whether every node that one of ``words`` means has ``trait``."""
    return all(trait in known for word in words for known in KINDS.values() if word in known)


def _is_cast(term: Term) -> bool:
    return len(term.words) == 1 and term.words[0] in CAST_WORDS


def _epilogue_misfit(pattern: Sequence[Term], _direction: str) -> Misfit | None:
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
    return _form_misfit(term)


def _form_misfit(term: Term) -> str | None:
    """Why a word cannot share its place with others: the op is elementwise in one form only."""
    formed = [word for word in term.words if word in FORMS]
    shares = bool(formed) and len(term.words) > 1
    return f"{formed[0]!r} is elementwise in one form only, so it needs a place of its own" if shares else None


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


# -- chains without a producer -------------------------------------------------------------------------------------------


def _elementwise_misfit(pattern: Sequence[Term], direction: str) -> Misfit | None:
    """A cast ends a chain in the pass in which it runs: it is the last place forward, the first backward, and none of both."""
    end = {FORWARD: len(pattern) - 1, BACKWARD: 0}.get(direction)
    for place, term in enumerate(pattern):
        if _is_cast(term) and (place != end or term.high != 1):
            where = {FORWARD: "as its last place", BACKWARD: "as its first place, for the gradient"}.get(direction, "nowhere")
            return Misfit(place, f"a {direction} chain has one {QUANTIZE!r} {where}, not {str(term)!r} here")
        if not _is_cast(term) and not _means_only(term.words, ELEMENTWISE):
            return Misfit(place, f"{str(term)!r} is not elementwise, so it cannot stand in a chain")
        if (reason := _form_misfit(term)) is not None:
            return Misfit(place, reason)
    if is_single(pattern) or all(map(_is_cast, pattern)):
        return Misfit(0, "one op alone is no fusion")
    return None


def _chained(run: Callable[..., Any], pattern: tuple[Term, ...]) -> Callable[..., Any]:
    """``run(value, chain=..., quantize=...)`` over the places of a pattern."""
    places = tuple(term.name for term in pattern)
    cast_at = next((term.name for term in pattern if _is_cast(term)), None)

    def declared_chain(value: Value, /, **bound: Any) -> Any:
        cast = bound.pop(cast_at) if cast_at else None
        return run(value, chain=tuple(contexts_of(bound[place] for place in places if place in bound)), quantize=cast)

    return _with_places(declared_chain, places)


@cache
def _chain_forward(pattern: tuple[Term, ...]) -> Callable[..., Any]:
    return _chained(elementwise, pattern)


@cache
def _chain_backward(pattern: tuple[Term, ...]) -> Callable[..., Any]:
    return _chained(backward_activation_bias, pattern)


EMITTERS: dict[str, Emitter] = {
    "epilogue": Emitter(_epilogue_misfit, {FORWARD: _epilogue_forward}),
    "chain": Emitter(_elementwise_misfit, {FORWARD: _chain_forward, BACKWARD: _chain_backward}),
}
"""What a declared rule can emit, and what :func:`learn_function` was told of."""


def learn_function(name: str, function: Callable[..., Any]) -> None:
    """Have declared rules emit ``function``: what runs a pattern whose places its keyword parameters name, in one direction."""
    EMITTERS[name] = Emitter(_one_direction, dict.fromkeys((FORWARD, BACKWARD), lambda pattern: function))


def _one_direction(pattern: Sequence[Term], direction: str) -> Misfit | None:
    one = direction in (FORWARD, BACKWARD)
    return None if one else Misfit(0, "a function runs forward or backward; register_fusion takes two of them")


def misfit(emit: str, pattern: Sequence[Term], direction: str) -> Misfit | None:
    """The place of ``pattern`` that ``emit`` cannot run in ``direction``, and why."""
    emitter = EMITTERS[emit]
    if missing := [side for side in PASSES[direction] if side not in emitter.makes]:
        return Misfit(0, f"{emit} has no {missing[0]} implementation, chain has one")
    return emitter.misfit(pattern, direction)


def unknown_word(term: Term) -> str | None:
    """The first word of ``term`` that no built-in op has."""
    return next((word for word in term.words if word not in WORDS), None)


def forms_of(pattern: Sequence[Term]) -> tuple[Guard, ...]:
    """Guards that let only the elementwise form of such ops match."""
    formed = ((term, *FORMS[word]) for term in pattern for word in term.words if word in FORMS)
    return tuple(is_(f"{term.name}.{field}", value) for term, field, value in formed)


def declared(
    name: str,
    pattern: object,
    *,
    when: Sequence[Guard] = (),
    emit: str = "epilogue",
    direction: str = FORWARD,
    priority: int = 0,
) -> Fusion:
    """The rule that runs ``pattern`` as one ``emit``.

    pattern: as :func:`~opfuse.compiler.rules.terms_of` reads it, in :data:`WORDS`; a Linear is ``basic_linear`` followed by
    ``bias``. direction: of ``PASSES``. FusionError for an unknown word, emitter or direction, and for a pattern that
    ``emit`` cannot run.
    """
    where = f"fusion {name!r}"
    for what, given, known in (("an emitter", emit, EMITTERS), ("a direction", direction, PASSES)):
        if given not in known:
            got = f"{given!r}{nearest(str(given), known)}"
            raise FusionError(describe(where, wanted=f"{what} of {tuple(known)}", got=got, cure="name one of them"))
    terms = terms_of(pattern, where)
    if not terms or len({term.name for term in terms}) < len(terms):
        cure = "write ['basic_linear', 'gelu']"
        raise FusionError(describe(where, wanted="places of different names", got=repr(pattern), cure=cure))
    if unknown := [word for term in terms if (word := unknown_word(term)) is not None]:
        got, cure = f"{unknown[0]!r}{nearest(unknown[0], WORDS)}", f"use words of {sorted(WORDS)}"
        raise FusionError(describe(where, wanted="kinds or traits of built-in ops", got=got, cure=cure))
    if unfit := misfit(emit, terms, direction):
        cure = f"{unfit.reason}: mend place {unfit.place} of the pattern, or write the implementation and use fusion()"
        raise FusionError(describe(where, wanted=f"a pattern that {emit} can run", got=printed(terms), cure=cure))
    return fusion(
        name,
        terms,
        when=(*forms_of(terms), *when),
        priority=priority,
        doc=f"{printed(terms)} as one {emit}.",
        **{side: EMITTERS[emit].makes[side](terms) for side in PASSES[direction]},
    )


# -- rules of others, extended ---------------------------------------------------------------------------------------------


def unlike(base: Fusion, pattern: Sequence[Term]) -> Misfit | None:
    """The place of ``pattern`` that could match what the place of this name in ``base`` does not, and why."""
    known = {term.name: term for term in base.pattern}
    for place, term in enumerate(pattern):
        own = known.get(term.name)
        if own is None:
            return Misfit(place, f"{base.name!r} has no place {term.name!r}, but {', '.join(known)}")
        if not _within(term, own):
            return Misfit(place, f"{str(term)!r} can match what {str(own)!r}, the place of {base.name!r}, does not")
    names = [term.name for term in pattern]
    if names != [name for name in known if name in names]:
        return Misfit(0, f"the places of {base.name!r} stand in the order {', '.join(known)}")
    if needed := [name for name, term in known.items() if term.low and name not in names]:
        return Misfit(0, f"{base.name!r} is nothing without {needed[0]!r}")
    if not base.single and is_single(pattern):
        return Misfit(0, "one op alone is no fusion")
    return None


def _within(term: Term, other: Term) -> bool:
    """Whether ``other`` can match all that ``term`` can."""
    most = other.high is None or (term.high is not None and term.high <= other.high)
    meant = (kind for word in term.words for kind in KINDS.values() if word in kind)
    return term.low >= other.low and most and not any(kind.isdisjoint(other.words) for kind in meant)


def extended(base: Fusion, name: str, pattern: Sequence[Term], *, when: Sequence[Guard] = (), priority: int = 0) -> Fusion:
    """A rule that runs as ``base`` does what ``pattern`` matches of it, under its guards and under ``when``.

    FusionError for a pattern that is :func:`unlike` it.
    """
    if unfit := unlike(base, pattern):
        cure = f"mend place {unfit.place}, or leave the pattern out"
        raise FusionError(describe(f"fusion {name!r}", wanted=unfit.reason, got=printed(pattern), cure=cure))
    places, known = tuple(term.name for term in pattern), {term.name: term for term in base.pattern}
    absent = tuple((name, () if _is_bound_as_tuple(term) else None) for name, term in known.items() if name not in places)
    alone = tuple(term.name for term in pattern if _is_bound_as_tuple(known[term.name]) and not _is_bound_as_tuple(term))
    sides = {"forward": base.forward, "backward": base.backward}
    same = not absent and not alone
    made = {side: run if run is None or same else _as_base(run, absent, alone, places) for side, run in sides.items()}
    held = tuple(guard for guard in base.when if guard.reads.split(".")[0] in ("env", *places))
    doc = f"{base.name} where {printed(pattern)}."
    options: dict[str, Any] = {"priority": priority, "extra_outputs": base.extra_outputs, "doc": doc}
    options["extends"] = (*base.extends, base.name)
    return fusion(name, tuple(pattern), when=(*held, *when), **options, **made)


def _is_bound_as_tuple(term: Term) -> bool:
    """Whether a rule gets what stands at this place in a tuple: there may be several."""
    return term.high != 1


@cache
def _as_base(
    run: Callable[..., Any], absent: tuple[tuple[str, Any], ...], alone: tuple[str, ...], places: tuple[str, ...]
) -> Callable[..., Any]:
    """``run`` where nothing stands at the places ``absent``, and one node at most at those ``alone``; one function for each."""

    def extended_rule(value: Any, /, **bound: Any) -> Any:
        several = {place: () if bound[place] is None else (bound[place],) for place in alone}
        return run(value, **{**bound, **several, **dict(absent)})

    return _with_places(extended_rule, places)
