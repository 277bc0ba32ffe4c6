"""Recipes whose formats a function chooses, role by role."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property
from itertools import count
from typing import Any, ClassVar, TypeGuard, cast
from weakref import WeakValueDictionary

from opfuse.domains import Domain, uncallable
from opfuse.errors import RecipeError, describe
from opfuse.recipes.builtin import DelayedScaling
from opfuse.recipes.recipe import TENSOR_TYPES, QuantizerRole, Recipe, ScaleHistory
from opfuse.recipes.settings import setting
from opfuse.recipes.zoo import PRESETS
from opfuse.tensors.quantizers import ForeignQuantizer, GroupedQuantizer, Quantizer
from opfuse.tensors.quantizers.composite import QuantizerRequest


@dataclass(frozen=True, init=False)
class DelayedScalingRequest(QuantizerRequest):
    """What a factory answers for a role under delayed scaling: the op keeps the state and makes the quantizer.

    Takes as keywords the fields of :class:`DelayedScaling` itself; those of every :class:`Recipe` are set on the custom recipe.
    Scales are updated as under :class:`DelayedScaling`.
    """

    recipe: DelayedScaling

    def __init__(self, **scaling: Any) -> None:
        if others := scaling.keys() & {field.name for field in fields(Recipe)}:
            cure = "set it on the CustomRecipe"
            raise RecipeError(describe("DelayedScalingRequest", wanted="fields of scaling", got=sorted(others), cure=cure))
        object.__setattr__(self, "recipe", DelayedScaling(**scaling))


Answer = Quantizer | DelayedScalingRequest
QFactory = Callable[[QuantizerRole], Answer]
_AskedFactory = Callable[[QuantizerRole], Answer | None]


def _is_answer(made: object) -> TypeGuard[Answer]:
    """Whether a factory may answer this. A GroupedQuantizer it may not: ops make that, of one quantizer for each group."""
    return isinstance(made, Answer) and not isinstance(made, GroupedQuantizer)


def _adapted(made: Any) -> Any:
    """An answer as it is; a quantizer of a plain class, an instance with ``quantize``, in the form that ops take."""
    plain = not isinstance(made, (Quantizer, type)) and callable(getattr(made, "quantize", None))
    return ForeignQuantizer(made) if plain else made


def _factory(value: Any) -> QFactory:
    found: Any = PRESETS.get(value) if isinstance(value, str) else value
    if uncallable(found, None):  # the role
        raise ValueError
    return found  # type: ignore[no-any-return]


QFACTORY = Domain(
    "a function of a QuantizerRole, or the name of a preset of opfuse.recipes.zoo",
    _factory,
    text=PRESETS,
    names=PRESETS,
    schema={"enum": list(PRESETS)},
)

_REQUIRED = setting(cast(QFactory, None), QFACTORY)


class _Answers(dict[QuantizerRole, Answer]):
    """What a factory answered, role by role."""


_ANSWERS: WeakValueDictionary[str, _Answers] = WeakValueDictionary()
"""The answers shared by equal custom recipes, by digest, while one of them lives."""


def _shown(asked: _AskedFactory, number: int) -> dict[str, Any]:
    """What a key shows of a factory: its answers for a linear layer without a name, and their number."""
    return {**{f"{name}_quantizer": asked(QuantizerRole(tensor_type=name)) for name in TENSOR_TYPES}, "answers": number}


@dataclass(frozen=True, kw_only=True, eq=False)
class CustomRecipe(Recipe):
    """Asks ``qfactory(role)`` for each quantizer.

    qfactory: a function of a :class:`QuantizerRole` (module type, tensor type, the name of the op) that returns a quantizer,
    also one of a plain class with ``quantize(x)`` (:class:`ForeignQuantizer`), or a :class:`DelayedScalingRequest`; or the name
    of a preset of :mod:`opfuse.recipes.zoo`. A recipe that is pickled needs one that another process can import.

    The function's identity, and what it answers at construction for the nameless linear roles of TENSOR_TYPES, are part of the
    recipe's; a role that it refuses there has no part in it. Recipes that are equal share the answers, so that under equal
    recipes a role has one quantizer for ever. Whenever a region begins, the function is asked again for the roles that it has
    answered: where it now answers otherwise, because what it reads has changed, the region has another recipe.
    """

    kind: ClassVar[str] = "custom"

    qfactory: QFactory = _REQUIRED

    @cached_property
    def key_extras(self) -> Mapping[str, Any]:
        """The quantizers answered at construction: ``input_quantizer`` and so on, None where the factory refused.

        answers: which of the factory's answers to all other roles they are, counted from 0.
        """
        return _shown(self._probed, 0)

    @cached_property
    def _answers(self) -> _Answers:
        probed = {QuantizerRole(tensor_type=name): self.key_extras[f"{name}_quantizer"] for name in TENSOR_TYPES}
        return _ANSWERS.setdefault(self.digest, _Answers({role: made for role, made in probed.items() if made is not None}))

    def current(self) -> CustomRecipe:
        """The recipe of what the factory answers now: itself, or one with the same fields that has not answered otherwise.

        Each role is asked once, so that a factory that never answers twice alike has one recipe for each region.
        """
        today = cache(self._probed)
        versions = (self._with_version(number, today) for number in count())
        return self if self._agrees(today) else next(version for version in versions if version._agrees(today))

    def _agrees(self, today: _AskedFactory) -> bool:
        """Whether the answers of today are those that the factory has given."""
        return all(today(role) == answer for role, answer in self._answers.items())

    def _with_version(self, number: int, today: _AskedFactory) -> CustomRecipe:
        """A recipe with today's answers for the roles that the key shows; ``number`` tells apart recipes that agree in these."""
        made = object.__new__(type(self))
        vars(made).update(self.values(), key_extras=_shown(today, number))
        made.__post_init__()
        return made.with_sources(self.sources)

    def _probed(self, role: QuantizerRole) -> Answer | None:
        try:
            made = _adapted(self.qfactory(role))
        except Exception:
            return None
        return made if _is_answer(made) else None

    def check(self) -> None:
        super().check()
        if self.qfactory is None:
            cure = f"pass qfactory={QFACTORY.wanted}"
            raise RecipeError(describe("CustomRecipe", wanted="a qfactory", got=None, cure=cure))

    def known_quantizer(self) -> None:
        return None  # the factory may answer by the op's name

    def _answer(self, role: QuantizerRole) -> Answer:
        if (known := self._answers.get(role)) is not None:
            return known
        answer = _adapted(self.qfactory(role))
        if not _is_answer(answer):
            cure_of_objects = (
                "return one of opfuse.tensors.quantizers, such as IdentityQuantizer(), or an object with quantize(x)"
            )
            cure = f"return an object, {answer.__name__}()" if isinstance(answer, type) else cure_of_objects
            wanted = "a Quantizer or a DelayedScalingRequest"
            raise RecipeError(describe(f"CustomRecipe.qfactory({role})", wanted=wanted, got=repr(answer), cure=cure))
        return self._answers.setdefault(role, answer)

    def delayed_scaling(self, role: QuantizerRole) -> DelayedScaling | None:
        answer = self._answer(role)
        if not isinstance(answer, DelayedScalingRequest):
            return None
        if self.backward_override is not None:
            wanted = f"a quantizer without state under backward_override={self.backward_override!r}"
            cure = "return a Float8CurrentScalingQuantizer for this role, or leave the override out"
            raise RecipeError(describe(f"CustomRecipe.qfactory({role})", wanted=wanted, got=repr(answer), cure=cure))
        return answer.recipe

    def quantizer(self, role: QuantizerRole, *, state: ScaleHistory | None = None) -> Quantizer:
        answer = self._answer(role)
        return answer if isinstance(answer, Quantizer) else answer.recipe.quantizer(role, state=state)

    def __deepcopy__(self, memo: dict[int, Any]) -> CustomRecipe:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        name = getattr(self.qfactory, "__qualname__", "")
        if "<" in name:  # <locals> or <lambda>
            wanted, cure = "a factory that another process can import", "define the function at the top of a module"
            raise RecipeError(describe("pickling CustomRecipe.qfactory", wanted=wanted, got=name, cure=cure))
        return super().__reduce__()
