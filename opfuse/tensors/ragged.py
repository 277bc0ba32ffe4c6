"""Tensors whose groups of rows are cast and multiplied apart, where only the device knows how many rows each has.

The host then does the same whatever the sizes are, so one program or CUDA graph serves all of them. Bits are those of the groups
cast and multiplied one by one.

Sizes that do not add up stop the device with an assertion, as torch's grouped product does: the host cannot know without
waiting, and gradients of rows that nobody counted would go unnoticed. Until then no kernel leaves its tensors. A CUDA graph
would repeat the copy of a list of sizes from memory that is gone, so while one is captured kernels write the numbers
themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn, cast

import torch

from opfuse.errors import QuantizedTensorError, describe
from opfuse.formats import COLUMNWISE, ROWWISE, USAGES, NumberFormat
from opfuse.kernels.casts.encoding import Blocks, BlocksOfGroups, EncodedArrays, Encoding, WithOriginal
from opfuse.kernels.casts.groups import cast_block_groups, row_groups
from opfuse.kernels.casts.scaled_groups import cast_current_groups, cast_recording_groups, cast_row_groups, group_amaxes
from opfuse.kernels.casts.tensor import cast_mx, transposed
from opfuse.kernels.engine.launch import is_capturing, stands_for_gpu
from opfuse.kernels.engine.registry import kernels_run_on
from opfuse.kernels.products import grouped
from opfuse.kernels.products.backends import Machine
from opfuse.kernels.products.native import adds_runs, machine_of, runs_are_right, runs_refusal
from opfuse.numerics.casts import Encoded
from opfuse.numerics.layouts import Layout, layout_of
from opfuse.numerics.row_groups import MOST_GROUPS, TILE, RowGroups, padded, rows_read
from opfuse.tensors.groups import written
from opfuse.tensors.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8RowQuantizer,
    HybridQuantizer,
    MXFP8Quantizer,
    Quantizer,
)
from opfuse.tensors.quantizers.base import SharedAmax
from opfuse.tensors.storage import Plane, QuantizedStorage, matrix_shape


@dataclass(frozen=True, eq=False, kw_only=True)
class RaggedPlane(Plane):
    """One direction of a matrix (M, K) in groups of rows, of sizes that only the device knows.

    A rowwise plane lies as that of any matrix. A columnwise plane is that of the padded matrix, in which each group begins on a
    tile of 128 rows, with zeros between the groups (numerics/row_groups.py).
    """

    in_groups = True
    groups: RowGroups

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return *super().tensors(), self.groups.table

    def with_tensors(self, tensors: Iterable[torch.Tensor]) -> RaggedPlane:
        source = iter(tensors)
        plain = super().with_tensors(source)
        return replace(self, data=plain.data, scale=plain.scale, groups=self.groups._replace(table=next(source)))

    @property
    def description(self) -> NoReturn:
        wanted, got = "planes that the host can describe", "groups of rows of sizes that only the device knows"
        raise QuantizedTensorError(describe(f"{self.usage} plane", wanted=wanted, got=got, cure="dequantize() it first"))

    @property
    def layout(self) -> Layout:
        return layout_in_groups(self.format, self.usage, self.shape, self.groups)

    @property
    def is_mirror(self) -> bool:
        return self.format.family == "tensor"

    def transposed(self) -> RaggedPlane:
        """The columnwise plane of the same values in a per-tensor format: the rowwise bytes of each group, transposed."""
        whole = not (self.shape[1] % 8 or self.data.storage_offset() % 8)
        words = self.data.view(torch.int64) if whole else self.data  # torch moves rows element by element
        return replace(self, usage=COLUMNWISE, data=transposed(padded(words, self.groups).view(self.data.dtype)))

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The (M, K) matrix in ``dtype``; nothing waits for the device."""
        layout, scale = self.layout, cast(torch.Tensor, self.scale)
        apart = scale.ndim > len(layout.scale_shape)  # of the groups, or of the columns of each
        given = torch.ones_like(scale[0]) if apart else scale
        rows = Plane(self.usage, self.format, layout.shape, self.data, given).dequantize(dtype)
        if self.usage == COLUMNWISE:
            rows = rows.index_select(0, self.groups.places())
        # Codes are exact, and torch multiplies in fp32. Rows are selected by number: no program repeats a tensor as an index.
        return rows.mul_(scale.index_select(0, self.groups.of_rows())) if apart else rows


def layout_in_groups(fmt: NumberFormat, usage: Any, shape: tuple[int, int], groups: RowGroups) -> Layout:
    """Where the bytes of a direction of a matrix in groups lie."""
    return layout_of(fmt, usage, (groups.padded_rows, shape[1]) if usage == COLUMNWISE else shape)


def groups_in(storage: QuantizedStorage) -> RowGroups | None:
    """The groups of a record that was cast in groups of sizes that only the device knows; None for any other record."""
    planes = (storage.rowwise, storage.columnwise)
    return next((plane.groups for plane in planes if isinstance(plane, RaggedPlane)), None)


# -- casts -----------------------------------------------------------------------------------------------------------------------


def copied_to(splits: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``splits`` on ``device`` as they are now, without a wait. A clone, since pinned memory would be read when the copy runs.

    A CUDA graph would copy from where the host had them, and has them no more: kernels write those of a list, which stay.
    """
    if splits.device == device:
        return splits
    if is_capturing():
        return written(splits.tolist(), splits.dtype, device)
    return splits.clone().to(device, non_blocking=True)


def cast_in_groups(
    quantizer: Quantizer,
    x: torch.Tensor,
    splits: torch.Tensor,
    index: torch.Tensor | None = None,
    *,
    each: Sequence[Quantizer] = (),
) -> QuantizedStorage:
    """Planes of ``x`` (..., K), whose groups of ``splits`` rows are cast apart, by a quantizer of :func:`casts_in_groups`.

    index: int64 (M,); then the planes are those of ``x[index]`` of a matrix ``x``; kernels read through the index, and do not
    make these rows. Splits on the CPU are copied. If they do not add up to the rows, the device stops with an assertion; nothing
    is read or written outside of ``x`` and its planes. each: the quantizers of the groups, if these have states of their own.
    """
    if isinstance(quantizer, HybridQuantizer):
        kept = x if index is None else x.index_select(0, index)
        storage = cast_in_groups(quantizer.rowwise_quantizer, kept, splits)
        return replace(storage, columnwise=quantizer.columnwise_quantizer.quantize(kept).columnwise)
    given = x.shape if index is None else torch.Size((len(index), *x.shape[1:]))
    groups = _groups_on(x.device, splits, given)
    matrix, layouts = x.detach().reshape(-1, x.shape[-1]), _layouts(quantizer, given, groups)
    encoded = _CASTS[type(quantizer)].cast(each or (quantizer,) * len(splits), matrix, groups, layouts, index)
    return _storage(quantizer, given, x.dtype, groups, encoded)


def _groups_on(device: torch.device, splits: torch.Tensor, shape: Sequence[int]) -> RowGroups:
    rows, _ = matrix_shape(shape)
    return RowGroups(row_groups(copied_to(splits, device), rows), rows, len(splits))


def _layouts(quantizer: Quantizer, shape: Sequence[int], groups: RowGroups) -> list[Layout]:
    """The layouts of the planes that a quantizer makes of a tensor (..., K) of this shape."""
    formats = dict(zip(USAGES, quantizer.formats))
    return [layout_in_groups(formats[usage], usage, matrix_shape(shape), groups) for usage in quantizer.usages]


def _storage(
    quantizer: Quantizer, shape: torch.Size, dtype: torch.dtype, groups: RowGroups, encoded: Sequence[EncodedArrays]
) -> QuantizedStorage:
    """The record of these planes, each its data and its scales, in the order of the quantizer's directions."""
    formats = dict(zip(USAGES, quantizer.formats))
    planes = {
        usage: RaggedPlane(usage=usage, format=formats[usage], shape=matrix_shape(shape), data=data, scale=scale, groups=groups)
        for usage, (data, scale) in zip(quantizer.usages, encoded, strict=True)
    }
    rowwise, columnwise = map(planes.get, USAGES)
    return QuantizedStorage(shape, dtype, rowwise, columnwise, quantizer._why)


class EncodingInGroups(NamedTuple):
    """:func:`cast_in_groups` as a value, for the kernel that makes the tensor, of ``shape`` and ``dtype``."""

    encoding: Encoding
    quantizer: Quantizer
    shape: torch.Size
    dtype: torch.dtype
    groups: RowGroups

    def storage(self, encoded: Sequence[EncodedArrays]) -> QuantizedStorage:
        """What the cast returns, from the results of the encoding."""
        if not isinstance(self.quantizer, HybridQuantizer):
            return _storage(self.quantizer, self.shape, self.dtype, self.groups, encoded)
        *rowwise, (kept,) = encoded
        storage = _storage(self.quantizer.rowwise_quantizer, self.shape, self.dtype, self.groups, rowwise)
        return replace(storage, columnwise=self.quantizer.columnwise_quantizer.quantize(kept).columnwise)


def encoding_in_groups(
    quantizer: Quantizer, shape: torch.Size, dtype: torch.dtype, splits: torch.Tensor, device: torch.device
) -> EncodingInGroups | None:
    """The cast of a tensor that a kernel is about to make on ``device``; None if no kernel that makes one casts it in groups."""
    hybrid = quantizer if isinstance(quantizer, HybridQuantizer) else None
    casts = quantizer if hybrid is None else hybrid.rowwise_quantizer
    make = _CASTS[type(casts)].encoding
    if make is None:
        return None
    groups = _groups_on(device, splits, shape)
    encoding = make(casts, groups, _layouts(casts, shape, groups))
    if hybrid is not None:
        encoding = WithOriginal((*encoding.layouts, *hybrid.columnwise_quantizer._layouts(shape)), encoding)
    return EncodingInGroups(encoding, quantizer, shape, dtype, groups)


def _encoded_blocks(quantizer: Any, groups: RowGroups, layouts: Sequence[Layout]) -> Encoding:
    """Rows depend on no groups, so the chain's own kernel takes them as those of any matrix."""
    options = _options([quantizer])
    if all(layout.usage == ROWWISE for layout in layouts):
        return Blocks(layouts, **options)
    return BlocksOfGroups(layouts, groups, **options)


_Index = torch.Tensor | None


def _blocks(
    each: Sequence[Any], x: torch.Tensor, groups: RowGroups, layouts: Sequence[Layout], index: _Index
) -> Sequence[Encoded]:
    return cast_block_groups(x, groups, layouts, index=index, **_options(each))


def _rows(each: Sequence[Any], x: torch.Tensor, groups: RowGroups, layouts: Sequence[Layout], index: _Index) -> Sequence[Encoded]:
    return cast_row_groups(x, groups, layouts, index=index, **_options(each))


def _current(
    each: Sequence[Any], x: torch.Tensor, groups: RowGroups, layouts: Sequence[Layout], index: _Index
) -> Sequence[Encoded]:
    shared = each[0].shared_amax or SharedAmax()
    amaxes = shared.amax = group_amaxes(x, groups, index=index) if shared.amax is None else shared.amax
    data, scales = cast_current_groups(x, groups, amaxes, layouts, index=index, **_options(each))
    return [(plane, scales) for plane in data]


def _microscaled(
    each: Sequence[Any], x: torch.Tensor, groups: RowGroups, layouts: Sequence[Layout], index: _Index
) -> Sequence[Encoded]:
    """Rows as those of any matrix; columns of one in which groups begin on tiles, so that no block has rows of two."""
    rows = rows_read(x, index)
    matrices = {ROWWISE: lambda: rows, COLUMNWISE: lambda: padded(rows, groups)}
    return [cast_mx(matrices[layout.usage](), [layout], **each[0]._options())[0] for layout in layouts]


def _delayed(
    each: Sequence[Any], x: torch.Tensor, groups: RowGroups, layouts: Sequence[Layout], index: _Index
) -> Sequence[Encoded]:
    data, scales = cast_recording_groups(x, groups, [(q.scale, q.amax) for q in each], layouts, index=index)
    return [(plane, scales) for plane in data]


def _options(each: Sequence[Any]) -> Mapping[str, Any]:
    """The options of the scale rule, which is the same for all groups and which kernels have."""
    return cast(Mapping[str, Any], each[0]._options(each[0].amax_epsilon))


class _CastOfGroups(NamedTuple):
    """How kernels cast groups by quantizers of one class. cast: takes a quantizer for each group. takes: whether kernels cast by
    the settings of a quantizer. encoding: the cast as a value; None if no kernel that makes a tensor casts it so.
    """

    cast: Callable[..., Sequence[Encoded]]
    takes: Callable[[Any], bool]
    encoding: Callable[[Any, RowGroups, Sequence[Layout]], Encoding] | None = None


_CASTS: Mapping[type[Quantizer], _CastOfGroups] = {
    Float8BlockQuantizer: _CastOfGroups(_blocks, lambda q: not q.runs_in_torch and q.block_scaling_dim == 1, _encoded_blocks),
    Float8RowQuantizer: _CastOfGroups(_rows, lambda q: not q.runs_in_torch),
    Float8CurrentScalingQuantizer: _CastOfGroups(_current, lambda q: not (q.runs_in_torch or q.with_amax_reduction)),
    Float8Quantizer: _CastOfGroups(_delayed, lambda _: True),
    MXFP8Quantizer: _CastOfGroups(_microscaled, lambda q: not (q.runs_in_torch or q.with_2d_quantization)),
}


def casts_in_groups(quantizer: Quantizer, groups: int) -> bool:
    """Whether kernels cast so many groups by such quantizers: the rule must be theirs, and amaxes those of this rank alone.

    Of two quantizers the columnwise one must keep the tensor as it is.
    """
    if isinstance(quantizer, HybridQuantizer):
        return quantizer.keeps_original and casts_in_groups(quantizer.rowwise_quantizer, groups)
    known = _CASTS.get(type(quantizer))
    return groups <= MOST_GROUPS and known is not None and known.takes(quantizer)


# -- products --------------------------------------------------------------------------------------------------------------------


class RaggedProducts(NamedTuple):
    """fprop, dgrad and wgrad of a layer with a weight (N, K) for each group: formats of the input, of the gradient of the output
    and of weights, and K and N. gradients: None where dgrad and wgrad are those of high precision. added: whether wgrad is added
    to buffers in fp32.
    """

    inputs: NumberFormat
    gradients: NumberFormat | None
    weights: NumberFormat
    widths: tuple[int, int]
    added: bool = False

    def supported_on(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether kernels of the device make all of them in one launch each, in ``dtype``, without the host knowing sizes."""
        if device.type == "meta":
            return stands_for_gpu() and _supported.__wrapped__(self, -1, dtype)
        index = device.index or 0
        return device.type == "cuda" and kernels_run_on(index) and _supported(self, index, dtype)

    def refusal(self, machine: Machine, dtype: torch.dtype) -> str:
        """Why kernels of a machine do not make all of them so; an empty string if they do, unless they are wrong there."""
        if self.added and self.gradients is not None and not adds_runs(self.gradients):
            return "wgrad: wants a result in bf16, got one that is added in fp32"
        return next((why for pair in self._pairs() if (why := runs_refusal(*pair, dtype, machine))), "")

    def _pairs(self) -> Iterator[tuple[Layout, Layout]]:
        """The layouts of operands for any number of rows: for one row, and for a whole tile where rows are summed."""
        (inputs, outputs), x, dy = self.widths, self.inputs, self.gradients
        yield Layout(x, ROWWISE, (1, inputs)), Layout(self.weights, ROWWISE, (outputs, inputs))
        if dy is not None:
            yield Layout(dy, ROWWISE, (1, outputs)), Layout(self.weights, ROWWISE, (inputs, outputs))
            yield Layout(dy, COLUMNWISE, (TILE, outputs)), Layout(x, COLUMNWISE, (TILE, inputs))


@functools.lru_cache(maxsize=256)
def _supported(products: RaggedProducts, device: int, dtype: torch.dtype) -> bool:
    """Whether the products are made, and known to be right, on a CUDA device."""
    backward = products.gradients is not None or grouped.takes_widths(products.widths, dtype, device)
    refused = not backward or products.refusal(machine_of(device), dtype)
    return not refused and runs_are_right(products.inputs, device)
