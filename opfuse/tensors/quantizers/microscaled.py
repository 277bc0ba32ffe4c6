"""Quantizers whose blocks are a few elements and whose scales are a byte: MXFP8, MXFP4 and NVFP4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch

from opfuse.errors import QuantizerError, describe
from opfuse.formats import COLUMNWISE, MXFP4, NVFP4, Element, NumberFormat, mxfp8
from opfuse.kernels.casts.encoding import EncodedArrays, Measured, Microscaled, Ruled
from opfuse.kernels.casts.nvfp4 import amaxes_nv, cast_nv
from opfuse.numerics.casts import ErrorMode
from opfuse.numerics.hadamard import NO_SIGNS, SIGNS
from opfuse.numerics.layouts import Layout
from opfuse.numerics.philox import draw_seed
from opfuse.tensors.quantizers.base import (
    CastingQuantizer,
    Float8RuledQuantizer,
    Quantizer,
    RuledQuantizer,
    SharedAmax,
    require,
)
from opfuse.tensors.quantizers.ranks import AmaxRanks, reduce_amax

_MX_BLOCK = 32
_NV_BLOCK = 16
_FOUR_OVER_SIX_MAX = 256  # leaves room above it for the block scales that are 1.5 times as large


@dataclass(frozen=True, repr=False)
class MXFP8Quantizer(Float8RuledQuantizer):
    """A power-of-two scale for each 32 elements of a line (OCP Microscaling).

    Args:
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        with_2d_quantization: one scale for each 32x32 tile, so that both planes hold the same values.
        scale_rule: how a scale follows from the amax of a block (numerics/rules.py): "te" and "rceil" round it up, so that
            nothing saturates, "ocp_floor" takes the exponent of amax, "compressed_tensors" one more from a mantissa of 1.75 on.
    """

    fp8_dtype: torch.dtype = torch.float8_e4m3fn
    with_2d_quantization: bool = field(default=False, kw_only=True)
    scale_rule: str = field(default="te", kw_only=True)

    @property
    def planes_agree(self) -> bool:
        return self.with_2d_quantization

    def _format(self, element: Element) -> NumberFormat:
        return mxfp8(element)

    def _encoding(self, layouts: Sequence[Layout]) -> Microscaled | Ruled:
        rows, options = _MX_BLOCK if self.with_2d_quantization else 1, self._options()
        return Microscaled(layouts, rows=rows, **options) if options else self._by_formula(layouts, rows=rows)


@dataclass(frozen=True, repr=False)
class MXFP4Quantizer(RuledQuantizer):
    """A power-of-two scale for each 32 elements of a line, which are E2M1 (OCP Microscaling): how weights of GPT-OSS are stored.

    No kernel and no matrix unit reads it: torch casts and decodes, and a product is one of the decoded values.

    Args:
        scale_rule: as of :class:`MXFP8Quantizer`. "ocp_floor" is that of the specification, under which values from 6/8 of the
            next power of two on saturate.
    """

    scale_rule: str = field(default="ocp_floor", kw_only=True)

    @cached_property
    def formats(self) -> tuple[NumberFormat, NumberFormat]:
        return MXFP4, MXFP4

    def _encoding(self, layouts: Sequence[Layout]) -> Microscaled | Ruled:
        options = self._options()
        return Microscaled(layouts, **options) if options else self._by_formula(layouts)


@dataclass(frozen=True, repr=False)
class NVFP4Quantizer(CastingQuantizer):
    """An E4M3 scale for each 16 elements of a line, under one fp32 amax of the tensor.

    Args:
        fp4_dtype: "e2m1".
        with_amax_reduction: take the largest amax over ``amax_reduction_group`` (None: all processes).
        with_rht: rotate the columnwise data (bf16 only) before its cast; needs ``with_post_rht_amax``.
        with_post_rht_amax: the columnwise amax is that of the rotated data.
        with_2d_quantization: one scale for each 16x16 tile, so that both planes hold the same values.
        stochastic_rounding: round with bits drawn from torch's default generator of the input's device.
        with_random_sign_mask: rotate with the fixed random signs; False: with none.
        row_scaled_nvfp4: one global amax per row (columnwise: per column).
        nvfp4_use_4over6: for each block, map the largest value to 4 or to 6, whichever errs less.
        nvfp4_4over6_err_mode: "MAE" or "MSE", the error that decides.
        nvfp4_e4m3_max: 448 or 256, what the largest block scale aims at; None: 448, or 256 where blocks map to 4 or to 6, which
            leaves room for scales that are 1.5 times as large.
        shared_amax: where casts of one tensor find its amax (:meth:`sharing`).
    """

    fp4_dtype: str = "e2m1"
    with_amax_reduction: bool = field(default=False, kw_only=True)
    amax_reduction_group: AmaxRanks = field(default=None, kw_only=True, compare=False)
    with_rht: bool = field(default=False, kw_only=True)
    with_post_rht_amax: bool = field(default=False, kw_only=True)
    with_2d_quantization: bool = field(default=False, kw_only=True)
    stochastic_rounding: bool = field(default=False, kw_only=True)
    with_random_sign_mask: bool = field(default=True, kw_only=True)
    row_scaled_nvfp4: bool = field(default=False, kw_only=True)
    nvfp4_use_4over6: bool = field(default=False, kw_only=True)
    nvfp4_4over6_err_mode: ErrorMode = field(default="MAE", kw_only=True)
    nvfp4_e4m3_max: int | None = field(default=None, kw_only=True)
    shared_amax: SharedAmax | None = field(default=None, kw_only=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        require(self.fp4_dtype, ("e2m1",), "NVFP4Quantizer fp4_dtype")
        require(self.nvfp4_4over6_err_mode, ("MAE", "MSE"), "NVFP4Quantizer nvfp4_4over6_err_mode")
        require(self.nvfp4_e4m3_max, (None, NVFP4.encode_max, _FOUR_OVER_SIX_MAX), "NVFP4Quantizer nvfp4_e4m3_max")
        for option, excluded in _EXCLUSIONS.items():
            for other in excluded:
                if getattr(self, option) and getattr(self, other):
                    where = f"NVFP4Quantizer({option}=True)"
                    raise QuantizerError(describe(where, wanted=f"{other}=False", got=True, cure="use one of the two"))
        if self.with_rht and not self.with_post_rht_amax:
            # The rotation can raise the largest value fourfold: under the amax of the input it would saturate.
            where, cure = "NVFP4Quantizer(with_rht=True)", "set with_post_rht_amax=True"
            raise QuantizerError(describe(where, wanted="with_post_rht_amax=True", got=False, cure=cure))

    @property
    def planes_agree(self) -> bool:
        return self.with_2d_quantization and not (self.stochastic_rounding or self.row_scaled_nvfp4)

    @property
    def follows_amax(self) -> bool:
        return not (self.with_rht or self.row_scaled_nvfp4)

    def reducing(self, group: AmaxRanks) -> Quantizer | None:
        return None if self.row_scaled_nvfp4 else super().reducing(group)

    def measured(self, shape: Sequence[int], dtype: torch.dtype) -> Measured | None:
        return None if self.with_rht else super().measured(shape, dtype)  # rotated data has an amax of its own

    @cached_property
    def formats(self) -> tuple[NumberFormat, NumberFormat]:
        encode_max = self.nvfp4_e4m3_max or (_FOUR_OVER_SIX_MAX if self.nvfp4_use_4over6 else NVFP4.encode_max)
        row = NVFP4.replace(encode_max=encode_max, per_row=self.row_scaled_nvfp4)
        if not self.with_rht:
            return row, row
        return row, row.replace(rht=SIGNS if self.with_random_sign_mask else NO_SIGNS)

    def _encoding(self, layouts: Sequence[Layout]) -> Measured:
        return Measured(layouts, partial(self._cast, layouts))

    def _cast(self, layouts: Sequence[Layout], x: torch.Tensor, amax: torch.Tensor | None) -> list[EncodedArrays]:
        shared = self.shared_amax or SharedAmax()
        amaxes = self._amaxes(x, amax if shared.amax is None else shared.amax, layouts)
        shared.amax = amaxes[0]
        encoded = cast_nv(
            x,
            amaxes,
            layouts,
            rows=_NV_BLOCK if self.with_2d_quantization else 1,
            seed=draw_seed(x.device) if self.stochastic_rounding else None,
            error=self.nvfp4_4over6_err_mode if self.nvfp4_use_4over6 else None,
        )
        return [(*planes, of_plane) for planes, of_plane in zip(encoded, amaxes)]

    def _amaxes(self, x: torch.Tensor, amax: torch.Tensor | None, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        """The global amax of each plane: one tensor for both, unless they hold rotated or row-scaled data."""
        own = self.with_rht or self.row_scaled_nvfp4
        needed = layouts if own else layouts[:1]
        known = {} if amax is None else {plane: amax for plane in needed if not (plane.format.rht or plane.format.per_row)}
        unknown = [layout for layout in needed if layout not in known]
        known |= zip(unknown, amaxes_nv(x, unknown) if unknown else ())
        amaxes = [known[layout] for layout in needed]
        if self.with_amax_reduction:
            amaxes = [reduce_amax(amax, self.amax_reduction_group) for amax in amaxes]
        return amaxes if own else amaxes * len(layouts)

    @property
    def input_dtypes(self) -> tuple[torch.dtype, ...] | None:
        """bf16 alone for rotated data, else as every cast."""
        return (torch.bfloat16,) if self.with_rht and COLUMNWISE in self.usages else super().input_dtypes


_EXCLUSIONS = {
    "row_scaled_nvfp4": ("with_rht", "with_2d_quantization", "stochastic_rounding", "with_amax_reduction"),
    "nvfp4_use_4over6": ("with_rht", "stochastic_rounding"),
    "with_2d_quantization": ("with_rht",),
}
"""Options of NVFP4Quantizer that contradict each other: the first needs one global scale, one rounding, or both planes alike."""
