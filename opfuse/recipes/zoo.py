"""Ready-made factories for :class:`~opfuse.recipes.CustomRecipe`: formats that differ between passes, tensors or modules.

``CustomRecipe(qfactory=zoo.mxfp8_fwd_nvfp4_bwd)``, or by name: ``CustomRecipe(qfactory="mxfp8_fwd_nvfp4_bwd")``, which is how a
configuration writes it. Each is a function of a role, so one's own begins as a copy of one of these. In a hybrid, the first
quantizer is read by the forward product and the second one by the backward products.

Those whose name, with ``_factory`` behind it, is one of TransformerEngine's zoo compute what that one computes. NVFP4 is used as
its recipe uses it: activations and gradients rotated in their columnwise plane, which takes bf16, gradients rounded
stochastically, weights under 16x16 tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from opfuse.formats import E4M3, E5M2
from opfuse.recipes.recipe import QuantizerRole, for_tensor_type
from opfuse.tensors.quantizers import (
    Float8CurrentScalingQuantizer,
    Float8RowQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)

ATTENTION = ("attention", "dpa")
"""Module types whose tensors :func:`nvfp4_linear_fp8_attention` casts to FP8."""

_IDENTITY = IdentityQuantizer()
_FP8_ROWS = Float8RowQuantizer(E4M3.dtype)
_MXFP8 = MXFP8Quantizer()
_NVFP4_INPUT = NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)
_NVFP4_WEIGHT = NVFP4Quantizer(with_2d_quantization=True)
_NVFP4_GRADIENT = NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, stochastic_rounding=True)
_NVFP4_ROWS = NVFP4Quantizer(row_scaled_nvfp4=True)
_NVFP4_PLAIN = NVFP4Quantizer()


def _then(forward: Quantizer, backward: Quantizer) -> Quantizer:
    """Backward products read the cast of what the forward product read."""
    return HybridQuantizer(forward, backward.copy(), columnwise_source="rowwise_dequantized")


def fp8_row_scaled(role: QuantizerRole) -> Quantizer:
    """FP8 with a scale for each row of both operands in every product: for tokens and output channels in the forward one."""
    return _of(role, input=_FP8_ROWS, weight=_FP8_ROWS, grad_output=_FP8_ROWS)


def mxfp8_fwd_high_precision_bwd(role: QuantizerRole) -> Quantizer:
    """MXFP8 forward; backward in high precision from what it multiplied, as under ``backward_override="dequantized"``."""
    operand = _then(_MXFP8, _IDENTITY)
    return _of(role, input=operand, weight=operand, grad_output=_IDENTITY)


def mxfp8_fwd_original_bwd(role: QuantizerRole) -> Quantizer:
    """MXFP8 forward; backward in high precision from the original tensors, as under ``backward_override="high_precision"``."""
    operand = HybridQuantizer(_MXFP8, _IDENTITY)
    return _of(role, input=operand, weight=operand, grad_output=_IDENTITY)


def high_precision_fwd_mxfp8_bwd(role: QuantizerRole) -> Quantizer:
    """High precision forward, MXFP8 in both backward products."""
    operand = HybridQuantizer(_IDENTITY, _MXFP8)
    return _of(role, input=operand, weight=operand, grad_output=_MXFP8)


def mxfp8_fwd_nvfp4_bwd(role: QuantizerRole) -> Quantizer:
    """MXFP8 forward, NVFP4 in both backward products: weights in blocks of 1x16, from what the forward product read."""
    x, w = HybridQuantizer(_MXFP8, _NVFP4_INPUT), _then(_MXFP8, _NVFP4_PLAIN)
    return _of(role, input=x, weight=w, grad_output=_NVFP4_GRADIENT)


def nvfp4_1d_weights(role: QuantizerRole) -> Quantizer:
    """NVFP4 with weights in blocks of 1x16 as well: finer scales. Backward products read the cast of what was multiplied."""
    return _of(role, input=_NVFP4_INPUT, weight=_then(_NVFP4_PLAIN, _NVFP4_PLAIN), grad_output=_NVFP4_GRADIENT)


def nvfp4_row_scaled_fwd_mxfp8_bwd(role: QuantizerRole) -> Quantizer:
    """Experts of a grouped linear: NVFP4 forward with an amax for each row of the activations, MXFP8 backward; others MXFP8."""
    if role.module_type != "grouped_linear":
        return _of(role, input=_MXFP8, weight=_MXFP8, grad_output=_MXFP8)
    x, w = _then(_NVFP4_ROWS, _MXFP8), _then(_NVFP4_PLAIN, _MXFP8)
    return _of(role, input=x, weight=w, grad_output=_MXFP8)


def nvfp4_row_scaled_fwd_high_precision_bwd(role: QuantizerRole) -> Quantizer:
    """NVFP4 forward with an amax for each row of the activations; backward in high precision from what it multiplied."""
    x, w = _then(_NVFP4_ROWS, _IDENTITY), _then(_NVFP4_PLAIN, _IDENTITY)
    return _of(role, input=x, weight=w, grad_output=_IDENTITY)


def nvfp4_linear_fp8_attention(role: QuantizerRole) -> Quantizer:
    """NVFP4 in linears; per-tensor FP8 with current scaling in modules of type attention or dpa, E5M2 for gradients."""
    if role.module_type in ATTENTION:
        return Float8CurrentScalingQuantizer((E5M2 if role.is_gradient else E4M3).dtype)
    return _of(role, input=_NVFP4_INPUT, weight=_NVFP4_WEIGHT, grad_output=_NVFP4_GRADIENT)


def _of(role: QuantizerRole, **by_tensor: Quantizer) -> Quantizer:
    return for_tensor_type(by_tensor, role, where="preset", cure="write a factory that answers for it")


PRESETS: Mapping[str, Callable[[QuantizerRole], Quantizer]] = MappingProxyType(
    {
        preset.__name__: preset
        for preset in (
            fp8_row_scaled,
            mxfp8_fwd_high_precision_bwd,
            mxfp8_fwd_original_bwd,
            high_precision_fwd_mxfp8_bwd,
            mxfp8_fwd_nvfp4_bwd,
            nvfp4_1d_weights,
            nvfp4_row_scaled_fwd_mxfp8_bwd,
            nvfp4_row_scaled_fwd_high_precision_bwd,
            nvfp4_linear_fp8_attention,
        )
    }
)
"""The factories of this module by name."""
