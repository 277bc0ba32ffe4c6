"""The recipes of :mod:`opfuse.recipes` with the constructors of ``transformer_engine.common.recipe``.

They return opfuse's own recipes: ``te.recipe.MXFP8BlockScaling() == opfuse.recipes.MXFP8BlockScaling()``.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Mapping
from typing import Any

from opfuse import recipes
from opfuse.recipes import Recipe
from opfuse.recipes.transformer_engine import spelled
from opfuse.te.keywords import Keywords, names_over, without

_ATTENTION: Keywords = {
    "fp8_dpa": (False, "leave it out: attention is not quantized here"),
    "fp8_mha": (False, "leave it out: attention is not quantized here"),
}

KEYWORDS: Mapping[str, Keywords] = {
    "DelayedScaling": {
        **_ATTENTION,
        "scaling_factor_compute_algo": (None, "leave it out: scales follow from amaxes by one rule"),
        "override_linear_precision": ((False, False, False), "write backward_override, of another recipe"),
        "interval": (1, "leave it out: scales are updated at every step"),
    },
    "Float8CurrentScaling": _ATTENTION,
    "Float8BlockScaling": _ATTENTION,
    "MXFP8BlockScaling": {**_ATTENTION, "margin": (0, "leave it out: scales of blocks have no margin")},
    "NVFP4BlockScaling": {
        **_ATTENTION,
        "fp4_format": ("E2M1", "leave it out: there is no other"),
        "fp8_format": ("E4M3", "leave it out: scales of blocks are E4M3"),
    },
    "CustomRecipe": {**_ATTENTION, "quantization_alignment": (128, "leave it out: ops.GroupedLinear has pad_splits=True")},
}
"""By recipe: keywords of TransformerEngine that opfuse lacks, their defaults, and the cure for any other value."""


class _Taking(ABCMeta):
    """A call returns opfuse's own recipe of the same name, which counts as an instance; subclasses are ordinary recipes."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        base = _BASES.get(cls)
        if base is None:
            return super().__call__(*args, **given)
        known = without(f"te.recipe.{cls.__name__}", KEYWORDS[cls.__name__], given)
        return base(*args, **{name: spelled(name, value) for name, value in known.items()})

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _BASES[cls]) if cls in _BASES else super().__instancecheck__(instance)


_BASES: dict[Any, type[Recipe]] = {}


def _taking(name: str) -> Any:
    base = getattr(recipes, name)
    made = _Taking(name, (base,), {"__module__": __name__, "__doc__": base.__doc__})
    _BASES[made] = base
    return made


_ADAPTED = {name: _taking(name) for name in KEYWORDS}

__getattr__, __dir__ = names_over(recipes, _ADAPTED)
