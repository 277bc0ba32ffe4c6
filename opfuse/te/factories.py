"""The quantizer factories of ``transformer_engine.pytorch.custom_recipes``, by their names, for ``CustomRecipe(qfactory=...)``.

Those of ``quantizer_factories`` return the quantizers of a recipe at its defaults; those of ``quantizer_factory_zoo`` are presets
of :mod:`opfuse.recipes.zoo`.
"""

from __future__ import annotations

from opfuse.recipes import (
    DelayedScalingRequest,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRole,
)
from opfuse.recipes.zoo import high_precision_fwd_mxfp8_bwd as high_precision_fwd_mxfp8_bwd_factory
from opfuse.recipes.zoo import mxfp8_fwd_high_precision_bwd as mxfp8_fwd_high_precision_bwd_factory
from opfuse.recipes.zoo import mxfp8_fwd_nvfp4_bwd as mxfp8_fwd_nvfp4_bwd_factory
from opfuse.recipes.zoo import nvfp4_1d_weights as nvfp4_1d_weight_factory
from opfuse.recipes.zoo import nvfp4_row_scaled_fwd_high_precision_bwd as nvfp4_row_scaled_fwd_high_precision_bwd_factory
from opfuse.recipes.zoo import nvfp4_row_scaled_fwd_mxfp8_bwd as nvfp4_row_scaled_fwd_mxfp8_bwd_factory
from opfuse.tensors.quantizers import IdentityQuantizer, Quantizer

__all__ = [
    "current_scaling_factory",
    "delayed_scaling_factory",
    "float8_block_scaling_factory",
    "high_precision_factory",
    "high_precision_fwd_mxfp8_bwd_factory",
    "mxfp8_factory",
    "mxfp8_fwd_high_precision_bwd_factory",
    "mxfp8_fwd_nvfp4_bwd_factory",
    "nvfp4_1d_weight_factory",
    "nvfp4_factory",
    "nvfp4_row_scaled_fwd_high_precision_bwd_factory",
    "nvfp4_row_scaled_fwd_mxfp8_bwd_factory",
]


def high_precision_factory(role: QuantizerRole) -> Quantizer:
    """High precision in every product."""
    return IdentityQuantizer()


def delayed_scaling_factory(role: QuantizerRole) -> DelayedScalingRequest:
    """As ``DelayedScaling()``."""
    return DelayedScalingRequest()


def current_scaling_factory(role: QuantizerRole) -> Quantizer:
    """As ``Float8CurrentScaling()``."""
    return Float8CurrentScaling(use_power_2_scales=False).quantizer(role)


def float8_block_scaling_factory(role: QuantizerRole) -> Quantizer:
    """As ``Float8BlockScaling()``."""
    return Float8BlockScaling(use_f32_scales=False).quantizer(role)


def mxfp8_factory(role: QuantizerRole) -> Quantizer:
    """As ``MXFP8BlockScaling()``."""
    return MXFP8BlockScaling().quantizer(role)


def nvfp4_factory(role: QuantizerRole) -> Quantizer:
    """As ``NVFP4BlockScaling()``."""
    return NVFP4BlockScaling().quantizer(role)
