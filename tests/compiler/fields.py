"""Values for every field of every recipe: what key tests flip, and what random recipes are made of."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

from opfuse.errors import RecipeError
from opfuse.recipes import RECIPES, CustomRecipe, Format, QuantizerRole, Recipe
from opfuse.tensors.quantizers import (
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    Quantizer,
)


def current_forward(role: QuantizerRole) -> Quantizer:
    """Per-tensor FP8 forward, high precision back."""
    return IdentityQuantizer() if role.is_gradient else Float8CurrentScalingQuantizer(Format.E4M3.element(role).dtype)


def mixed(role: QuantizerRole) -> Quantizer:
    """MXFP8 forward, per-tensor FP8 in both backward products."""
    current = Float8CurrentScalingQuantizer(Format.HYBRID.element(role).dtype)
    return current if role.is_gradient else HybridQuantizer(MXFP8Quantizer(), current)


MOOD = [0]
"""What :func:`impure` reads beside its role."""


def impure(role: QuantizerRole) -> Quantizer:
    """Another answer in another mood."""
    return mixed(role) if MOOD[0] % 2 else current_forward(role)


VALUES: dict[str, tuple[Any, ...]] = {
    "backward_override": (None, "dequantized", "high_precision"),
    "rounding": ("per_op", "single"),
    "on_recipe_change": ("error", "dequantize", "keep"),
    "allow_mixed_emulation": (False, True),
    "split_accumulator": ("backward", "all", "none"),
    "batch_invariant": (False, True),
    "keep": (None, "all", "recompute", "quantized"),
    "fp8_format": (Format.HYBRID, Format.E4M3),
    "margin": (0, 2),
    "amax_history_len": (4, 1, 2),
    "amax_compute_algo": ("max", "most_recent"),
    "reduce_amax": (True, False),
    "use_power_2_scales": (False, True),
    "amax_epsilon": (0.0, 8.0),
    "use_f32_scales": (False, True),
    "x_block_scaling_dim": (1, 2),
    "w_block_scaling_dim": (2, 1),
    "grad_block_scaling_dim": (1, 2),
    "enable_2d_quantization": (False, True),
    "scale_rule": ("te", "torchao_pow2", "deepgemm", "ocp_floor"),  # a class takes those of its formats
    "disable_rht": (False, True),
    "disable_stochastic_rounding": (False, True),
    "disable_2d_quantization": (False, True),
    "row_scaled_activation": (False, True),
    "nvfp4_4over6": (None, "weights", "activations", "all"),
    "nvfp4_4over6_e4m3_use_256": ("all", "weights", "activations", None),
    "nvfp4_4over6_err_mode": ("MAE", "MSE"),
    "qfactory": (mixed, current_forward, impure),
}
"""The first value is a default of the class, or close to it."""


def names_of(cls: type[Recipe]) -> list[str]:
    """The fields of a recipe class that it takes."""
    return [field.name for field in fields(cls) if cls.takes_backward_override or field.name != "backward_override"]


def random_recipe(rng: random.Random) -> Recipe:
    """Any recipe with a few fields drawn at random, among those that agree with each other."""
    cls = rng.choice(list(RECIPES.values()))
    while True:
        drawn = rng.sample(names_of(cls), k=rng.randint(0, 3))
        required = {"qfactory"} if cls is CustomRecipe else set()
        try:
            return cls(**{name: rng.choice(VALUES[name]) for name in dict.fromkeys((*drawn, *required))})
        except RecipeError:
            continue


def changed(recipe: Recipe, rng: random.Random) -> Recipe:
    """``recipe`` with one field changed, the override more often than others, as it changes what a plan does most."""
    names = names_of(type(recipe))
    often = ["backward_override"] * (len(names) // 2) if "backward_override" in names else []
    while True:
        name = rng.choice(names + often)
        others = [value for value in VALUES[name] if value != getattr(recipe, name)]
        try:
            return recipe.replace(**{name: rng.choice(others)})
        except RecipeError:
            continue
