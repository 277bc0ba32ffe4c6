"""Regions of code in which a recipe is active.

The active region lives in a context variable: threads and asynchronous tasks do not see each other's. A region is a frozen
record that knows the one around it, so one ``autocast`` object can be entered again, nested, or shared between threads.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Never, Self, TypeVar

import torch.distributed as dist

from opfuse.domains import BOOLEAN
from opfuse.errors import OpfuseWarning, RecipeError, describe, nearest
from opfuse.recipes.builtin import Float8CurrentScaling
from opfuse.recipes.recipe import Recipe
from opfuse.recipes.transformer_engine import as_recipe
from opfuse.sources import Site, site, site_text
from opfuse.tensors.quantizers.ranks import HAS_RANKS, checked_group
from opfuse.torch_private.stack import place_of_block

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Hook = TypeVar("Hook", bound=Callable[[bool], None])


class _Region(NamedTuple):
    """One ``with`` block: its recipe and group, and the block around it.

    site: where its ``autocast`` was written. Of the outermost block: hooks: what runs when it ends. scales: those that casts in
    it used, where a checkpoint will need them again. used: filled by the first op that runs under a recipe.
    """

    recipe: Recipe | None
    group: ProcessGroup | None
    outer: _Region | None
    site: Site
    hooks: dict[Hashable, Any]
    scales: dict[Hashable, Any]
    used: list[bool]


@dataclass(frozen=True)
class ModelInit:
    """How parameters are created inside :func:`quantized_model_init`."""

    recipe: Recipe
    preserve_high_precision_init_val: bool


_REGION: ContextVar[_Region | None] = ContextVar("opfuse_autocast", default=None)
_MODEL_INIT: ContextVar[ModelInit | None] = ContextVar("opfuse_model_init", default=None)


_ELSEWHERE = {
    "fp8_recipe": "name it recipe=..., or call opfuse.te.fp8_autocast, which has that signature",
    "fp8_group": "name it amax_reduction_group=..., or call opfuse.te.fp8_autocast, which has that signature",
    "calibrating": "leave it out: run some training steps under the recipe, whose states then hold what they counted",
}
"""Keywords of TransformerEngine's regions, and what to write here."""


def _check_keywords(where: str, known: tuple[str, ...], unknown: Mapping[str, object]) -> None:
    """RecipeError for keywords that are not ``known``."""
    for name in unknown:
        cure = _ELSEWHERE.get(name, "leave it out")
        got = f"{name!r}{'' if name in _ELSEWHERE else nearest(name, known)}"
        raise RecipeError(describe(where, wanted=f"keywords of {known}", got=got, cure=cure))


def _chosen(where: str, enabled: object, recipe: object) -> Recipe | None:
    if not isinstance(enabled, bool):
        cure = f"write {where}(recipe=...), which names the recipe, or pass a bool"
        raise RecipeError(describe(where, wanted="enabled to be True or False", got=repr(enabled), cure=cure))
    if not enabled:
        return None
    return Float8CurrentScaling() if recipe is None else as_recipe(recipe)


class autocast(contextlib.ContextDecorator):
    """Compute under ``recipe`` inside a region: a context manager, or a decorator of functions.

    recipe: an opfuse recipe, or one of TransformerEngine, which is converted; None is ``Float8CurrentScaling()``, which has no
    state, takes any shape and is native on Hopper. enabled: False computes in high precision whatever the recipe, also inside
    another region. amax_reduction_group: the ranks that share the amaxes of delayed scaling; None is the default group.

    The innermost region counts. Delayed scales are updated when the outermost region ends. If it ends by an exception, they stay
    as they are, and the amaxes that its casts recorded are dropped. RecipeError for another keyword, or for no group.
    """

    def __init__(
        self,
        enabled: bool = True,
        *,
        recipe: object = None,
        amax_reduction_group: ProcessGroup | None = None,
        **unknown: Never,
    ) -> None:
        _check_keywords("autocast", ("enabled", "recipe", "amax_reduction_group"), unknown)
        self.recipe = _chosen("autocast", enabled, recipe)
        if amax_reduction_group is not None:  # a region for each call is usual, and each function counts in its host time
            checked_group("autocast(amax_reduction_group=)", amax_reduction_group, RecipeError)
        self.amax_reduction_group = amax_reduction_group
        self.site = site()

    def __enter__(self) -> Self:
        outer = _REGION.get()
        shared: Any = ({}, {}, []) if outer is None else (outer.hooks, outer.scales, outer.used)
        recipe = None if self.recipe is None else self.recipe.current()
        _REGION.set(_Region(recipe, self.amax_reduction_group, outer, self.site, *shared))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        region = _REGION.get()
        if region is None:
            cure = "enter it first, in the same thread: with opfuse.autocast(...)"
            raise RecipeError(describe("autocast.__exit__", wanted="an entered region", got=None, cure=cure))
        _REGION.set(region.outer)
        if region.outer is None:
            for hook in region.hooks.values():
                hook(kind is None)
            if kind is None and region.recipe is not None and not region.used:
                self._tell_unused(region.recipe)

    def _tell_unused(self, recipe: Recipe) -> None:
        """An OpfuseWarning at the region that ends now, in which nothing ran under ``recipe``, once for each place."""
        file, line, level = place_of_block(contextlib.__file__)  # which calls it for a decorator
        place = file, line
        if place not in _warned:
            _warned.add(place)
            cure = "call a module that is made of opfuse.ops, such as ops.Linear, inside; or leave out the region"
            where, wanted = f"autocast region of {recipe!r}", "ops of opfuse that run under the recipe"
            warnings.warn(describe(where, wanted=wanted, got="none", cure=cure), OpfuseWarning, stacklevel=level)


def under(recipe: Recipe | None) -> autocast:
    """The region in which ``recipe`` is active; None: high precision, also inside another region."""
    return autocast(enabled=recipe is not None, recipe=recipe)


_warned: set[tuple[str, int]] = set()
"""Places of regions that were warned of."""


def mark_region_used() -> None:
    """Something of opfuse runs in the active region, if there is one."""
    region = _REGION.get()
    if region is not None and not region.used:
        region.used.append(True)


def current_recipe() -> Recipe | None:
    """The recipe of the innermost enabled region; None outside, and where the innermost region is disabled."""
    region = _REGION.get()
    return None if region is None else region.recipe


def current_amax_group() -> ProcessGroup | None:
    """The amax reduction group of the innermost region; None is torch's default group."""
    region = _REGION.get()
    return None if region is None else region.group


def amax_group_here() -> ProcessGroup | None:
    """The group whose ranks share amaxes: that of the region, or torch's default group; None before there is one."""
    region = _REGION.get()
    return (None if region is None else region.group) or (dist.group.WORLD if HAS_RANKS else None)


def region_source() -> str | None:
    """Where the innermost region was written, ``train.py:88``; None outside."""
    region = _REGION.get()
    return None if region is None else site_text(region.site)


def in_region() -> bool:
    """Whether a region is active, enabled or not."""
    return _REGION.get() is not None


def scales_of_region() -> dict[Hashable, Any] | None:
    """Scales that the outermost region around keeps for recomputations; None outside any region."""
    region = _REGION.get()
    return None if region is None else region.scales


def at_outermost_exit(key: Hashable, make: Callable[[], Hook]) -> Hook:
    """The hook of ``key`` that runs when the outermost region ends, made by ``make`` when there is none yet.

    It gets whether the region ended without an exception. RecipeError outside any region.
    """
    region = _REGION.get()
    if region is None:
        raise RecipeError(
            describe(str(key), wanted="an active autocast region", got=None, cure="call it inside opfuse.autocast(...)")
        )
    hook: Hook | None = region.hooks.get(key)
    if hook is None:
        hook = region.hooks[key] = make()
    return hook


@contextlib.contextmanager
def quantized_model_init(
    *, enabled: bool = True, recipe: object = None, preserve_high_precision_init_val: bool = False, **unknown: Never
) -> Iterator[ModelInit | None]:
    """Create parameters quantized under ``recipe`` (None: ``Float8CurrentScaling()``).

    An optimizer that updates them casts every result: updates below half a step of the format are lost, and training stalls
    at small learning rates. Update high-precision masters instead: ``opfuse.with_masters(optimizer)``.

    Every write, such as an optimizer's step, casts with a scale found from the written values. That holds under delayed scaling
    too, where the scale of an earlier step would clip what has grown since; margin and history apply to other tensors. On the
    meta device parameters are quantized as well; ``to_empty`` and ``reset_parameters`` give them bytes and values.

    preserve_high_precision_init_val: also keep the initial value in high precision, on the CPU, for an optimizer's master
    weights: ``parameter.get_high_precision_init_val()``. RecipeError for another keyword.
    """
    _check_keywords("quantized_model_init", ("enabled", "recipe", "preserve_high_precision_init_val"), unknown)
    chosen = _chosen("quantized_model_init", enabled, recipe)
    kept = preserve_high_precision_init_val
    BOOLEAN.checked("quantized_model_init preserve_high_precision_init_val", kept, RecipeError)
    if chosen is not None:
        mark_region_used()
    token = _MODEL_INIT.set(None if chosen is None else ModelInit(chosen.current(), preserve_high_precision_init_val))
    try:
        yield _MODEL_INIT.get()
    finally:
        _MODEL_INIT.reset(token)


def current_model_init() -> ModelInit | None:
    """What :func:`quantized_model_init` asks of parameters that are created now; None: ordinary parameters."""
    return _MODEL_INIT.get()
