"""The built-in recipes: one family of formats each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, cast

import torch

from opfuse.domains import BOOLEAN, NON_NEGATIVE, Domain, integers, one_of
from opfuse.errors import RecipeError, describe
from opfuse.numerics.delayed import UpdateRule
from opfuse.numerics.rules import RULES, rules_of
from opfuse.recipes.recipe import TENSOR_TYPES, Format, QuantizerRole, Recipe, ScaleHistory, for_tensor_type
from opfuse.recipes.settings import setting
from opfuse.tensors.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)

Scope = Literal["weights", "activations", "all"] | None


def _trainable_format(value: Any) -> Format:
    found = Format.__members__.get(value) if isinstance(value, str) else value
    if not isinstance(found, Format) or found.name not in _TRAINABLE:
        raise ValueError
    return found


_TRAINABLE = ("E4M3", "HYBRID")
FP8_FORMAT = Domain(
    "Format.E4M3 or Format.HYBRID (E5M2 is for gradients only)",
    _trainable_format,
    schema={"enum": list(_TRAINABLE)},
)
_HYBRID, _E4M3 = setting(Format.HYBRID, FP8_FORMAT), setting(Format.E4M3, FP8_FORMAT)

SCOPE = one_of(None, "weights", "activations", "all", renamed={"none": None})
_SCOPE = setting(cast(Scope, None), SCOPE, "NVTE_NVFP4_4OVER6")
_AIMS = setting(cast(Scope, "all"), SCOPE, "NVTE_NVFP4_4OVER6_E4M3_USE_256")


def _rule_for(family: str) -> Domain:
    """The scale rules for formats of ``family``."""
    return one_of(*rules_of(family), renamed={"ceil": "te", "floor": "ocp_floor"})


def _check_rule(recipe: Float8CurrentScaling | Float8BlockScaling, family: str, *, pow2: bool, cure: str) -> None:
    """RecipeError unless the recipe's scale rule has scales that are powers of two, or any, as the recipe asks for."""
    if pow2 not in RULES[recipe.scale_rule].ways[family].powers:
        where, kinds = f"{type(recipe).__name__} scale_rule={recipe.scale_rule!r}", ("any fp32 scales", "powers of two")
        raise RecipeError(describe(where, wanted=kinds[not pow2], got=kinds[pow2], cure=cure))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Float8Recipe(Recipe):
    """A recipe whose elements are FP8."""

    fp8_format: Format = _HYBRID

    def fp8_dtype(self, role: QuantizerRole) -> torch.dtype:
        """The element's dtype for ``role``; RecipeError for a tensor type this recipe does not know."""
        table = dict.fromkeys(TENSOR_TYPES, self.fp8_format.element(role).dtype)
        return for_tensor_type(table, role, where=f"{type(self).__name__}.quantizer")


MARGIN = integers("an integer from -126 to 126, so that fp32 holds 2^-margin", minimum=-126, maximum=126)
HISTORY = integers("a number of steps from 1 to 2**20", minimum=1, maximum=2**20)


@dataclass(frozen=True, kw_only=True, eq=False)
class DelayedScaling(_Float8Recipe):
    """One scale per tensor, computed from the amaxes of earlier steps (see :mod:`opfuse.recipes.delayed`).

    margin: the scale is divided by 2^margin. amax_history_len: steps remembered. amax_compute_algo: the largest amax of the
    history or the most recent one. reduce_amax: take the maximum over the amax reduction group.
    Takes no backward_override: an argument is refused, an environment variable ignored with a warning.
    """

    kind: ClassVar[str] = "delayed"
    takes_backward_override: ClassVar[bool] = False

    margin: int = setting(0, MARGIN)
    amax_history_len: int = setting(1024, HISTORY)
    amax_compute_algo: Literal["max", "most_recent"] = setting("max", one_of("max", "most_recent"))
    reduce_amax: bool = setting(True, BOOLEAN)

    def delayed_scaling(self, role: QuantizerRole) -> DelayedScaling:
        return self

    @cached_property
    def forward_rule(self) -> UpdateRule:
        """How the scales of activations and weights follow from their amaxes."""
        return UpdateRule(self.fp8_format.value[False].max, self.margin, self.amax_compute_algo)

    @cached_property
    def backward_rule(self) -> UpdateRule:
        """How the scales of gradients follow from their amaxes."""
        return UpdateRule(self.fp8_format.value[True].max, self.margin, self.amax_compute_algo)

    def known_quantizer(self) -> None:
        return None  # over a state, whose scale was there before the batch

    def quantizer(self, role: QuantizerRole, *, state: ScaleHistory | None = None) -> Quantizer:
        """A quantizer over ``state``, which stays as it is: what counts a cast makes it this recipe's."""
        if state is None:
            cure = "pass the state that the op keeps for this role"
            raise RecipeError(describe(f"DelayedScaling.quantizer({role})", wanted="a DelayedScalingState", got=None, cure=cure))
        return state.live_quantizer(self.fp8_dtype(role))


@dataclass(frozen=True, kw_only=True, eq=False)
class Float8CurrentScaling(_Float8Recipe):
    """One scale per tensor, from the amax of the tensor itself. amax_epsilon: a floor for the amax.

    scale_rule: how the scale follows from the amax; ``"torchao_pow2"`` goes with ``use_power_2_scales``.
    """

    kind: ClassVar[str] = "fp8_current"

    use_power_2_scales: bool = setting(False, BOOLEAN, "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES")
    amax_epsilon: float = setting(0.0, NON_NEGATIVE)
    scale_rule: str = setting("te", _rule_for("tensor"))

    def check(self) -> None:
        super().check()
        _check_rule(self, "tensor", pow2=self.use_power_2_scales, cure=f"set use_power_2_scales={not self.use_power_2_scales}")

    def quantizer(self, role: QuantizerRole, *, state: ScaleHistory | None = None) -> Quantizer:
        return Float8CurrentScalingQuantizer(
            self.fp8_dtype(role),
            force_pow_2_scales=self.use_power_2_scales,
            amax_epsilon=self.amax_epsilon,
            scale_rule=self.scale_rule,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Float8BlockScaling(_Float8Recipe):
    """fp32 scales over 1x128 blocks (dim 1) or 128x128 tiles (dim 2), powers of two unless use_f32_scales.

    scale_rule: how a scale follows from the amax of a block; ``"compressed_tensors"`` goes with ``use_f32_scales``.
    """

    kind: ClassVar[str] = "fp8_block"

    fp8_format: Format = _E4M3
    use_f32_scales: bool = setting(False, BOOLEAN, "NVTE_FP8_BLOCK_SCALING_FP32_SCALES")
    x_block_scaling_dim: Literal[1, 2] = setting(1, one_of(1, 2))
    w_block_scaling_dim: Literal[1, 2] = setting(2, one_of(1, 2))
    grad_block_scaling_dim: Literal[1, 2] = setting(1, one_of(1, 2))
    scale_rule: str = setting("te", _rule_for("block"))

    def check(self) -> None:
        super().check()
        _check_rule(self, "block", pow2=not self.use_f32_scales, cure=f"set use_f32_scales={not self.use_f32_scales}")
        # Every two of the three operands meet in one product (fprop x·w, dgrad grad·w, wgrad grad·x).
        if len(tiled := [name for name in _BLOCK_DIMS.values() if getattr(self, name) == 2]) > 1:
            got = " and ".join(f"{name}=2" for name in tiled)
            wanted = "at most one operand in 128x128 tiles, as no product takes two"
            raise RecipeError(describe(type(self).__name__, wanted=wanted, got=got, cure=f"set {tiled[0]}=1"))

    def quantizer(self, role: QuantizerRole, *, state: ScaleHistory | None = None) -> Quantizer:
        return Float8BlockQuantizer(
            self.fp8_dtype(role),
            force_pow_2_scales=not self.use_f32_scales,
            block_scaling_dim=getattr(self, _BLOCK_DIMS[role.tensor_type]),
            scale_rule=self.scale_rule,
        )


_BLOCK_DIMS = {"input": "x_block_scaling_dim", "weight": "w_block_scaling_dim", "grad_output": "grad_block_scaling_dim"}


@dataclass(frozen=True, kw_only=True, eq=False)
class MXFP8BlockScaling(_Float8Recipe):
    """E8M0 scales over 32 elements. enable_2d_quantization: weights share one scale over 32x32 tiles, so both planes agree.

    scale_rule: how a scale follows from the amax of a block. ``"te"`` and ``"rceil"`` round it up, so that nothing saturates;
    ``"ocp_floor"`` is the rule of the OCP MX specification, ``"compressed_tensors"`` that of the library.
    """

    kind: ClassVar[str] = "mxfp8"

    fp8_format: Format = _E4M3
    enable_2d_quantization: bool = setting(False, BOOLEAN)
    scale_rule: str = setting("te", _rule_for("mx"))

    def quantizer(self, role: QuantizerRole, *, state: ScaleHistory | None = None) -> Quantizer:
        return MXFP8Quantizer(
            self.fp8_dtype(role),
            with_2d_quantization=self.enable_2d_quantization and role.tensor_type == "weight",
            scale_rule=self.scale_rule,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class NVFP4BlockScaling(Recipe):
    """E2M1 in blocks of 16 with E4M3 scales under one fp32 amax.

    By default activations and gradients are rotated (random Hadamard transform, RHT) in their columnwise plane, gradients are
    rounded stochastically, weights share scales over 16x16 tiles. row_scaled_activation: one global amax per row of an
    activation, for the forward product only. nvfp4_4over6: scale the blocks of these tensors to 4 or to 6, whichever errs less
    by nvfp4_4over6_err_mode; nvfp4_4over6_e4m3_use_256: those of them whose block scales aim at 256, which leaves room for scales
    1.5 times as large; the others' aim at 448. row_scaled_activation and nvfp4_4over6 exclude the rotation.
    """

    kind: ClassVar[str] = "nvfp4"

    disable_rht: bool = setting(False, BOOLEAN, "NVTE_NVFP4_DISABLE_RHT")
    disable_stochastic_rounding: bool = setting(False, BOOLEAN, "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING")
    disable_2d_quantization: bool = setting(False, BOOLEAN, "NVTE_NVFP4_DISABLE_2D_QUANTIZATION")
    row_scaled_activation: bool = setting(False, BOOLEAN, "NVTE_NVFP4_ROW_SCALED_ACTIVATION")
    nvfp4_4over6: Scope = _SCOPE
    nvfp4_4over6_e4m3_use_256: Scope = _AIMS
    nvfp4_4over6_err_mode: Literal["MAE", "MSE"] = setting("MAE", one_of("MAE", "MSE"), "NVTE_NVFP4_4OVER6_ERR_MODE")

    def check(self) -> None:
        super().check()
        unrotated = {
            f"nvfp4_4over6={self.nvfp4_4over6!r}": self.nvfp4_4over6 in ("activations", "all"),
            "row_scaled_activation=True": self.row_scaled_activation,
        }
        if not self.disable_rht and (got := [text for text, on in unrotated.items() if on]):
            wanted = "activations that are not rotated (disable_rht=True)"
            cure = "pass disable_rht=True, or leave the activations' option out"
            raise RecipeError(describe(type(self).__name__, wanted=wanted, got=f"{got[0]} with disable_rht=False", cure=cure))

    def training_refusal(self) -> str | None:
        if not self.row_scaled_activation or self.backward_override is not None:
            return None
        return describe(
            type(self).__name__,
            wanted="a backward pass without row-scaled activations",
            got="row_scaled_activation=True with backward_override=None",
            cure="pass backward_override='dequantized' or 'high_precision', or a CustomRecipe of hybrid quantizers",
        )

    def quantizer(self, role: QuantizerRole, *, state: ScaleHistory | None = None) -> Quantizer:
        rotated = {"with_rht": not self.disable_rht, "with_post_rht_amax": not self.disable_rht}

        def four_or_six(tensors: str) -> dict[str, Any]:
            if self.nvfp4_4over6 not in (tensors, "all"):
                return {}
            aim = 256 if self.nvfp4_4over6_e4m3_use_256 in (tensors, "all") else 448
            return {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": aim}

        options: dict[str, dict[str, Any]] = {
            "input": {
                **rotated,
                "row_scaled_nvfp4": self.row_scaled_activation,
                **four_or_six("activations"),
            },
            "weight": {
                "with_2d_quantization": not self.disable_2d_quantization,
                **four_or_six("weights"),
            },
            "grad_output": {**rotated, "stochastic_rounding": not self.disable_stochastic_rounding},
        }
        chosen = for_tensor_type(options, role, where=f"{type(self).__name__}.quantizer")
        return NVFP4Quantizer("e2m1", nvfp4_4over6_err_mode=self.nvfp4_4over6_err_mode, **chosen)
