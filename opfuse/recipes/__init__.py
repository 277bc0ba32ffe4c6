"""Recipes: in which formats a model computes, where that is in force, and what delayed scaling remembers."""

from typing import TYPE_CHECKING

from opfuse.errors import UnknownFieldError, only_names
from opfuse.recipes import zoo
from opfuse.recipes.autocast import (
    ModelInit,
    autocast,
    current_recipe,
    quantized_model_init,
)
from opfuse.recipes.availability import (
    Support,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    support,
    support_matrix,
)
from opfuse.recipes.builtin import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from opfuse.recipes.custom import CustomRecipe, DelayedScalingRequest
from opfuse.recipes.delayed import DelayedScalingState, DelayedScalingStates
from opfuse.recipes.kinds import RECIPES, recipe_of
from opfuse.recipes.recipe import TENSOR_TYPES, BackwardOverride, Format, QuantizerRole, Recipe
from opfuse.recipes.transformer_engine import as_recipe

__all__ = [
    "RECIPES",
    "TENSOR_TYPES",
    "BackwardOverride",
    "CustomRecipe",
    "DelayedScaling",
    "DelayedScalingRequest",
    "DelayedScalingState",
    "DelayedScalingStates",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MXFP8BlockScaling",
    "ModelInit",
    "NVFP4BlockScaling",
    "QuantizerRole",
    "Recipe",
    "Support",
    "UnknownFieldError",
    "as_recipe",
    "autocast",
    "current_recipe",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantized_model_init",
    "recipe_of",
    "support",
    "support_matrix",
    "zoo",
]

if not TYPE_CHECKING:  # with which any name would pass
    __getattr__, __dir__ = only_names(__name__, __all__)
