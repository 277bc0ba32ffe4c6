"""The cast that a quantize node runs on groups of rows, each group by itself.

An op says how its rows are in groups (``grouping``: how many there are, and which extra input has their sizes) and whether its
casts can leave the sizes on the device (``ragged_products``). ``stays`` decides at the call. The host still reads sizes in five
cases: the gradient of a bias, which sums the rows of one group in a fixed order; an emulated product, one of torch's for each
group; gradients for an fp32 ``main_grad`` in high precision or MXFP8; amaxes over ranks, which are reduced group by group; and
more than 128 groups, or groups in tiles of one scale or under a scale rule of torch alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from opfuse.core.cast import Cast, Fused, fixed
from opfuse.core.context import Value, plain
from opfuse.errors import ShapeError, describe
from opfuse.formats import ROWWISE
from opfuse.recipes.delayed import DelayedScalingState
from opfuse.tensors.expert_rows import in_parts, mirrored_parts
from opfuse.tensors.groups import Sizes, check_copied, check_sizes, check_splits, read_sizes, sizes_of
from opfuse.tensors.quantizers import Float8Quantizer, GroupedQuantizer, Quantizer
from opfuse.tensors.quantizers.base import SharedAmax
from opfuse.tensors.ragged import RaggedPlane, RaggedProducts, cast_in_groups, encoding_in_groups, groups_in
from opfuse.tensors.storage import Plane, QuantizedStorage, matrix_shape
from opfuse.tensors.tensor import QuantizedTensor


@dataclass(frozen=True, eq=False)
class GroupedCast(Cast):
    """Quantizes each of ``groups`` groups of rows as a tensor of its own. A tensor that is quantized as a whole is cast again.

    states: delayed-scaling states of the groups, or none. padded: whether rows of zeros fill the last blocks of a group. ragged:
    the products of the op, if with its casts the sizes of groups may stay on the device; else None. each: quantizers of the
    groups, or none, where a backward pass repeats a cast under its scales. splits: by which a call that passes none casts.
    amaxes: of the groups, where casts share them.
    """

    groups: int = 1
    states: tuple[DelayedScalingState, ...] = ()
    padded: bool = False
    ragged: RaggedProducts | None = None
    each: tuple[Quantizer, ...] = ()
    splits: torch.Tensor | Sizes | None = None
    amaxes: SharedAmax | None = None

    @property
    def live_states(self) -> tuple[DelayedScalingState, ...]:
        return self.states

    def __call__(
        self, x: Value, splits: torch.Tensor | Sizes | None = None, index: torch.Tensor | None = None
    ) -> QuantizedStorage:
        """Planes of ``x`` (..., K), or of the rows ``x[index]`` of ``x`` (M, K).

        splits: how many rows each group has; None: those of the cast, and without any all the same. index: int64. The host reads
        a tensor of splits, unless sizes stay on the device. There, a kernel reads rows through ``index``; elsewhere they are
        copied first.
        """
        if isinstance(x, QuantizedTensor) and groups_in(x.held) is not None:  # of another segment
            x = x.held
        if isinstance(x, QuantizedStorage) and (sizes_of(x) is not None or groups_in(x) is not None):
            return x if x.usages != (ROWWISE,) else self._completed(x, self.splits if splits is None else splits)
        x = x.detach().dequantize() if isinstance(x, QuantizedTensor) else plain(x)
        shape = x.shape if index is None else torch.Size((len(index), *x.shape[1:]))
        rows = matrix_shape(shape)[0]
        splits = self.splits if splits is None else splits
        if isinstance(splits, torch.Tensor):
            if self._stay(splits, shape):
                return self._on_device(x, splits, index, shape)
            splits = read_sizes(splits, rows, where=self.op.label)
        sizes = check_sizes(splits or (rows // self.groups,) * self.groups, rows, where=self.where)
        apart = () if self.amaxes is None else self.amaxes.apart(self.groups)
        quantizer = self._grouped(sizes, tuple(map(self._sharing, apart)) or self._quantizers_of_groups(x.device))
        x = x if index is None else x.index_select(0, index)
        dtype = self.op.compute_dtype(self.env, x)
        self.check(shape, dtype, quantizer if self.whole is None else self._grouped(sizes, (self.whole,) * self.groups))
        storage = quantizer.quantize(x.to(dtype))
        return storage if storage.dtype == x.dtype else replace(storage, dtype=x.dtype)

    def _completed(self, x: QuantizedStorage, splits: torch.Tensor | Sizes | None) -> QuantizedStorage:
        """``x``, whose groups were cast by rows before they came from other ranks, as this cast would make it: its rowwise plane
        as it is, the columnwise one of the values in that. If it has another format than the cast makes, its values are cast.
        """
        rowwise = x.plane(ROWWISE)
        if not isinstance(rowwise, RaggedPlane):
            return x
        if rowwise.format.as_stored != self.quantizer.formats[0].as_stored:
            return self(x.dequantize(x.dtype), splits)
        if not isinstance(splits, torch.Tensor) or not self._stay(splits, x.shape):
            return self._completed_on_host(x, rowwise, splits)
        if not self.quantizer.columnwise:
            return x
        if rowwise.is_mirror:
            return replace(x, columnwise=rowwise.transposed())
        columns = self.quantizer.wanting(rowwise=False, columnwise=True)
        return replace(x, columnwise=cast_in_groups(columns, x.dequantize(x.dtype), splits).columnwise)

    def _completed_on_host(
        self, x: QuantizedStorage, rowwise: RaggedPlane, splits: torch.Tensor | Sizes | None
    ) -> QuantizedStorage:
        rows = x.shape[0]
        sizes = read_sizes(splits, rows, where=self.op.label) if isinstance(splits, torch.Tensor) else splits or ()
        quantizer = self._grouped(check_sizes(sizes, rows, where=self.where), self._quantizers_of_groups(x.device))
        parts = in_parts(rowwise, sizes)
        columnwise: Plane | None = None
        if self.quantizer.columnwise and rowwise.is_mirror:
            columnwise = mirrored_parts(parts, quantizer.multiple)
        elif self.quantizer.columnwise:
            columnwise = quantizer.wanting(rowwise=False, columnwise=True).quantize(x.dequantize(x.dtype)).columnwise
        return replace(x, rowwise=parts, columnwise=columnwise)

    def by(self, splits: torch.Tensor | Sizes | None = None) -> GroupedCast:
        """A copy of the cast for groups of ``splits`` rows."""
        return self if splits is None else replace(self, splits=splits)

    def fused(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Fused | None:
        """The cast of a tensor in groups of the cast's own ``splits``; None, too, where the host has to know these."""
        splits = self.splits
        if not isinstance(splits, torch.Tensor) or not self._takes(dtype):
            return None
        if not self._stay(splits, shape):
            return None
        self._check_on_tiles(shape, dtype)
        return encoding_in_groups(self.quantizer, shape, dtype, splits, device)

    def scale_of_call(self) -> torch.Tensor:
        """A copy of the delayed scales of the groups that the running call casts with, fp32 (G,)."""
        scales = [cast(Float8Quantizer, self._delayed(state, state.scale.device)).scale for state in self.states]
        return torch.cat(scales)

    def under(self, scale: torch.Tensor) -> GroupedCast:
        """A copy of the cast with given scales, fp32 (G,); it counts no amax."""
        each = tuple(fixed(cast(Float8Quantizer, self.quantizer), one) for one in scale.split(1))
        return replace(self, each=each, states=())

    def sharing(self, amax: SharedAmax) -> GroupedCast | None:
        return None if self.quantizer.sharing(amax) is None else replace(self, amaxes=amax)

    def _sharing(self, amax: SharedAmax) -> Quantizer:
        """The quantizer of a group, or of all, with this amax or these."""
        return cast(Quantizer, self.quantizer.sharing(amax))

    def _quantizers_of_groups(self, device: torch.device) -> tuple[Quantizer, ...]:
        """The quantizer of each group."""
        own = self.each or tuple(self._delayed(state, device) for state in self.states)
        return own or (self.quantizer,) * self.groups

    def stays(self, splits: torch.Tensor, shape: Sequence[int]) -> bool:
        """Whether the sizes in ``splits`` may stay on the device; not without rows. shape: of the tensor that is cast."""
        if self.ragged is None or not math.prod(shape):
            return False
        weight = self.op.parameter(self.op.parameter_names[0])
        return self.ragged.supported_on(weight.device, self.op.compute_dtype(self.env, weight))

    def _stay(self, splits: torch.Tensor, shape: torch.Size) -> bool:
        """Whether the sizes in ``splits``, which are checked here, stay on the device."""
        check_splits(splits, self.groups, where=self.op.label)
        stay = self.stays(splits, shape)
        if stay:
            check_copied(splits, matrix_shape(shape)[0], where=self.op.label)
        return stay

    def _on_device(
        self, x: torch.Tensor, splits: torch.Tensor, index: torch.Tensor | None, shape: torch.Size
    ) -> QuantizedStorage:
        dtype = self.op.compute_dtype(self.env, x)
        self._check_on_tiles(shape, dtype)
        if self.amaxes is None:
            storage = cast_in_groups(self.quantizer, x.to(dtype), splits, index, each=self._quantizers_of_groups(x.device))
        else:
            storage = cast_in_groups(self._sharing(self.amaxes), x.to(dtype), splits, index)
        return storage if storage.dtype == x.dtype else replace(storage, dtype=x.dtype)

    def _check_on_tiles(self, shape: torch.Size, dtype: torch.dtype) -> None:
        """:meth:`check` of groups that begin on tiles in a columnwise plane, where any number of rows has whole blocks."""
        self.check(shape, dtype, self.quantizer.wanting(columnwise=False))

    def _grouped(self, sizes: Sizes, each: tuple[Quantizer, ...]) -> GroupedQuantizer:
        first = each[0]
        quantizer = GroupedQuantizer(each, sizes, padded=self.padded, rowwise=first.rowwise, columnwise=first.columnwise)
        multiple = first.formats[1].multiple if first.columnwise and not self.padded else 1
        if any(size % multiple for size in sizes):
            wanted = f"groups with a multiple of {multiple} rows for columnwise {first.formats[1]} data"
            cure = f"build the op with pad_splits=True, pad each group to a multiple of {multiple}, or set a backward_override"
            raise ShapeError(describe(self.where, wanted=wanted, got=f"splits {sizes}", cure=cure))
        return quantizer
