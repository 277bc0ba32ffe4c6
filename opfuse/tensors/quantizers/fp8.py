"""FP8 quantizers with fp32 scales: delayed and current scaling of a whole tensor, rows, and blocks of 128."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from opfuse.formats import Element, NumberFormat, fp8_block, fp8_row, fp8_tensor
from opfuse.kernels.casts.encoding import Blocks, Current, EncodedArrays, Measured, RecordingScale, RowScaled, Ruled
from opfuse.kernels.casts.tensor import tensor_amax
from opfuse.numerics.layouts import Layout, require_number
from opfuse.tensors.quantizers.base import (
    Float8CastingQuantizer,
    Float8RuledQuantizer,
    SharedAmax,
    casts_itself,
    require,
)
from opfuse.tensors.quantizers.ranks import AmaxRanks, reduce_amax


@dataclass(frozen=True, repr=False)
class Float8Quantizer(Float8CastingQuantizer):
    """Delayed scaling: casts with a scale found earlier, and records the amax that the next scale will come from.

    Args:
        scale: fp32 (1,), what values are multiplied by; read at each cast.
        amax: fp32 (1,), raised in place to the largest magnitude cast; on the device of ``scale``.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.

    QuantizerError if they are anything else.
    """

    scale: torch.Tensor = field(compare=False, repr=False)
    amax: torch.Tensor = field(compare=False, repr=False)
    fp8_dtype: torch.dtype

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("scale", self.scale), ("amax", self.amax)):
            require_number(value, self.scale.device, where=f"{type(self).__name__} {name}")

    @property
    def planes_agree(self) -> bool:
        return True

    @property
    def row_local(self) -> bool:
        return True  # its scale was there before the tensor

    def _format(self, element: Element) -> NumberFormat:
        return fp8_tensor(element)

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        return (self.amax,)

    def _encoding(self, layouts: Sequence[Layout]) -> RecordingScale:
        return RecordingScale(self.scale, self.amax, layouts)


@dataclass(frozen=True, repr=False)
class Float8CurrentScalingQuantizer(Float8RuledQuantizer):
    """One scale for the whole tensor, from its own amax.

    Args:
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        device: accepted for compatibility; the input says the device.
        with_amax_reduction: take the largest amax over ``amax_reduction_group`` (None: all processes).
        force_pow_2_scales: round the scale down to a power of two.
        amax_epsilon: the least amax to scale for.
        scale_rule: "te" or "torchao_pow2", how the scale follows from the amax (numerics/rules.py).
        shared_amax: where casts of one tensor find its amax (:meth:`sharing`).
    """

    fp8_dtype: torch.dtype
    device: torch.device | str | None = field(default=None, compare=False)
    with_amax_reduction: bool = field(default=False, kw_only=True)
    amax_reduction_group: AmaxRanks = field(default=None, kw_only=True, compare=False)
    force_pow_2_scales: bool = field(default=False, kw_only=True)
    amax_epsilon: float = field(default=0.0, kw_only=True)
    scale_rule: str = field(default="te", kw_only=True)
    shared_amax: SharedAmax | None = field(default=None, kw_only=True, compare=False, repr=False)
    follows_amax = True

    @property
    def planes_agree(self) -> bool:
        return True

    def _format(self, element: Element) -> NumberFormat:
        return fp8_tensor(element)

    def _encoding(self, layouts: Sequence[Layout]) -> Measured | Current:
        known = None if self.shared_amax is None else self.shared_amax.amax
        if known is not None:
            return self._under(layouts, known)
        return Measured(layouts, partial(self._cast, layouts), partial(self._under, layouts))

    def _cast(self, layouts: Sequence[Layout], x: torch.Tensor, amax: torch.Tensor | None) -> list[EncodedArrays]:
        return self._under(layouts, tensor_amax(x) if amax is None else amax)(x)

    def _under(self, layouts: Sequence[Layout], amax: torch.Tensor) -> Current:
        if self.with_amax_reduction:
            amax = reduce_amax(amax, self.amax_reduction_group)
        if self.shared_amax is not None:
            self.shared_amax.amax = amax
        return Current(amax, layouts, **(self._options(self.amax_epsilon) or {}))


@dataclass(frozen=True, repr=False)
class Float8RowQuantizer(Float8RuledQuantizer):
    """One fp32 scale for each row, from its own amax; in the columnwise plane, for each column.

    In the rowwise plane no value depends on another row: rows may be tokens of different sequences.

    Args:
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        force_pow_2_scales: round scales down to powers of two.
        amax_epsilon: the least amax to scale for.
        scale_rule: "te", "compressed_tensors" or "torchao_pow2", how a scale follows from the amax (numerics/rules.py).
    """

    fp8_dtype: torch.dtype
    force_pow_2_scales: bool = field(default=False, kw_only=True)
    amax_epsilon: float = field(default=0.0, kw_only=True)
    scale_rule: str = field(default="te", kw_only=True)

    def _format(self, element: Element) -> NumberFormat:
        return fp8_row(element)

    def _encoding(self, layouts: Sequence[Layout]) -> RowScaled | Ruled:
        options = self._options(self.amax_epsilon)
        return RowScaled(layouts, **options) if options else self._by_formula(layouts, eps=self.amax_epsilon)


@dataclass(frozen=True, repr=False)
class Float8BlockQuantizer(Float8RuledQuantizer):
    """One fp32 scale for each 128 elements of a line, or for each 128x128 tile; edge blocks are partial.

    Args:
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        amax_epsilon: the least amax to scale for.
        force_pow_2_scales: round scales down to powers of two.
        block_scaling_dim: 1 for 1x128 blocks, 2 for 128x128 tiles.
        scale_rule: "te", "deepgemm" or "compressed_tensors", how a scale follows from the amax (numerics/rules.py).
    """

    fp8_dtype: torch.dtype
    amax_epsilon: float = field(default=0.0, kw_only=True)
    force_pow_2_scales: bool = field(default=True, kw_only=True)
    block_scaling_dim: int = field(default=2, kw_only=True)
    scale_rule: str = field(default="te", kw_only=True)

    def __post_init__(self) -> None:
        require(self.block_scaling_dim, (1, 2), "Float8BlockQuantizer block_scaling_dim")
        super().__post_init__()

    @property
    def planes_agree(self) -> bool:
        return self.block_scaling_dim == 2

    def _format(self, element: Element) -> NumberFormat:
        return fp8_block(element, self.block_scaling_dim, pow2=bool(self.force_pow_2_scales) and casts_itself(self))

    def _encoding(self, layouts: Sequence[Layout]) -> Blocks | Ruled:
        options = self._options(self.amax_epsilon)
        return Blocks(layouts, **options) if options else self._by_formula(layouts, eps=self.amax_epsilon)
