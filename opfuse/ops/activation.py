"""Activations and gated activations: a table of declared math, one small class each."""

from __future__ import annotations

from typing import Literal

import torch

from opfuse.core.context import Context
from opfuse.core.spec import Positive, Size, hyper_parameters
from opfuse.numerics import activations
from opfuse.numerics.chain import Stage
from opfuse.ops.pointwise import PointwiseOperation
from opfuse.recipes.recipe import OVERRIDES
from opfuse.tensors.quantizers import Float8CurrentScalingQuantizer

_INPUT_CACHE = Float8CurrentScalingQuantizer(torch.float8_e4m3fn, rowwise=True, columnwise=False)


class Activation(PointwiseOperation):
    """y = f(x) for a declared ``math``; subclass it with five lines to make an activation of your own.

    cache_quantized_input: the input is saved quantized (E4M3, per-tensor current scaling), one byte an element; the gradient is
    then that of the dequantized input. Under a backward override it is saved as it is, for gradients are then those of what the
    forward pass read. Without it, a recipe with ``keep="quantized"`` has the input saved in E4M3 as well (``KEPT_INPUT``).
    """

    traits = frozenset(("elementwise", "activation"))

    @hyper_parameters
    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()

    def save_stage(self, ctx: Context, stage: Stage, x: torch.Tensor | None) -> None:
        exact = OVERRIDES[ctx.env.backward_override].backward == "high_precision"
        if x is not None and not exact:
            x = _INPUT_CACHE.quantize(x) if self._caches_input else ctx.kept_input(x)  # type: ignore[assignment]
        super().save_stage(ctx, stage, x)

    @property
    def _caches_input(self) -> bool:
        return bool(getattr(self.spec, "cache_quantized_input", False))

    def remakes(self, ctx: Context) -> Literal["", "saved", "input"]:
        """Not from codes of the input, which are not what the forward pass read, unless the recipe asks for that."""
        return "" if self._caches_input and ctx.env.keep != "quantized" else super().remakes(ctx)


class GELU(Activation):
    """x * sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3): the tanh form of GELU."""

    math = activations.GELU


class GELUErf(Activation):
    """x * Phi(x), Phi the normal distribution: GELU as nn.GELU() and BERT have it."""

    math = activations.GELU_ERF


class QGELU(Activation):
    """x * sigmoid(1.702 x)."""

    math = activations.QGELU


class ReLU(Activation):
    """max(x, 0); NaN stays NaN."""

    kind = "relu"
    math = activations.RELU


class SReLU(Activation):
    """x^2 for x > 0, else 0."""

    kind = "srelu"
    math = activations.SRELU


class SiLU(Activation):
    """x * sigmoid(x)."""

    kind = "silu"
    math = activations.SILU


# -- gated units: the first half of the last dimension is gated, the second half multiplies -----------------------------


class GatedActivation(Activation):
    """y = act(a) * b for x = (a | b) of shape (..., 2n); y has shape (..., n).

    glu_interleave_size: None, or halves alternate in groups of that many columns.
    """

    traits = frozenset(("elementwise", "activation", "gated"))

    @hyper_parameters
    def __init__(self, *, cache_quantized_input: bool = False, glu_interleave_size: Size | None = None) -> None:
        super().__init__()


class GLU(GatedActivation):
    """sigmoid(a) * b."""

    math = activations.GATED["glu"]


class GEGLU(GatedActivation):
    """GELU(a) * b."""

    math = activations.GATED["geglu"]


class GEGLUErf(GatedActivation):
    """GELUErf(a) * b."""

    kind = "geglu_erf"
    math = activations.GATED["geglu_erf"]


class QGEGLU(GatedActivation):
    """QGELU(a) * b."""

    math = activations.GATED["qgeglu"]


class ReGLU(GatedActivation):
    """max(a, 0) * b."""

    kind = "reglu"
    math = activations.GATED["reglu"]


class SReGLU(GatedActivation):
    """max(a, 0)^2 * b."""

    kind = "sreglu"
    math = activations.GATED["sreglu"]


class SwiGLU(GatedActivation):
    """SiLU(a) * b."""

    kind = "swiglu"
    math = activations.GATED["swiglu"]


class ClampedSwiGLU(GatedActivation):
    """a' sigmoid(alpha a') * (clamp(b, -limit, limit) + glu_linear_offset), a' = min(a, limit); no gradient where clamped."""

    kind = "clamped_swiglu"
    math = activations.CLAMPED_SWIGLU

    @hyper_parameters
    def __init__(
        self,
        *,
        limit: Positive = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: Size | None = None,
    ) -> None:
        super().__init__()


class SiTUGLU(GatedActivation):
    """beta1 tanh(a / beta1) sigmoid(a) * beta2 tanh(b / beta2)."""

    kind = "situglu"
    math = activations.SITUGLU

    @hyper_parameters
    def __init__(
        self,
        *,
        beta1: Positive = 4.0,
        beta2: Positive = 25.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: Size | None = None,
    ) -> None:
        super().__init__()


# -- scaled: one differentiable scale a row, an extra input of shape x.shape[:-1] ----------------------------------------


class ScaledSwiGLU(SwiGLU):
    """SwiGLU(x) * s[..., None] with extra input s; ds is summed over the last dimension."""

    kind = "scaled_swiglu"
    math = activations.SCALED["scaled_swiglu"]
    sources = {"scale": "extra0"}


class ScaledGEGLU(GEGLU):
    """GEGLU(x) * s[..., None] with extra input s."""

    kind = "scaled_geglu"
    math = activations.SCALED["scaled_geglu"]
    sources = {"scale": "extra0"}


class ScaledSiTUGLU(SiTUGLU):
    """SiTUGLU(x) * s[..., None] with extra input s."""

    kind = "scaled_situglu"
    math = activations.SCALED["scaled_situglu"]
    sources = {"scale": "extra0"}


class ScaledClampedQGeGLU(ClampedSwiGLU):
    """ClampedSwiGLU(x) * s[..., None] with extra input s."""

    kind = "scaled_clamped_qgeglu"
    math = activations.SCALED["scaled_clamped_qgeglu"]
    sources = {"scale": "extra0"}


class ScaledSReLU(SReLU):
    """SReLU(x) * s[..., None] with extra input s."""

    kind = "scaled_srelu"
    math = activations.SCALED["scaled_srelu"]
    sources = {"scale": "extra0"}


class ScaledTanhSReLU(Activation):
    """(c tanh(x / c))^2 * s[..., None] for x > 0, else 0, with c the tanh_clamp_scale and extra input s."""

    kind = "scaled_tanh_srelu"
    math = activations.SCALED["scaled_tanh_srelu"]
    sources = {"scale": "extra0"}

    @hyper_parameters
    def __init__(self, *, tanh_clamp_scale: Positive, cache_quantized_input: bool = False) -> None:
        super().__init__()
