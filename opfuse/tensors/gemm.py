"""The three products of a linear layer over plain or quantized operands, and which of them may meet.

    fprop   y  = x W^T       x (..., K), W (N, K)
    dgrad   dx = dy W        dy (..., N)
    wgrad   dW = dy^T x

Two quantized operands are multiplied in their formats, which must meet (:func:`clash`); as soon as one operand is high
precision, so is the product, and the other one is dequantized to its dtype.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch

from opfuse.errors import Described, GemmError, ShapeError, describe
from opfuse.events import ProductChosen, emit, listeners
from opfuse.formats import COLUMNWISE, ROWWISE, NumberFormat
from opfuse.kernels.casts.encoding import Encoding
from opfuse.kernels.engine.launch import as_on_gpu
from opfuse.kernels.engine.variants import on_bytes
from opfuse.kernels.products.chained import UNROUNDED, ProductResult, product_chain, why_apart
from opfuse.kernels.products.native import accumulate, multiply, multiply_groups, multiply_over_rows, multiply_rows
from opfuse.kernels.products.runs import products_into
from opfuse.kernels.products.stored import Stored
from opfuse.kernels.products.tiles import in_tiles
from opfuse.numerics.chain import Rounding, Stage
from opfuse.numerics.row_groups import RowGroups
from opfuse.tensors.storage import Plane, QuantizedStorage, matrix_shape
from opfuse.torch_private.tensors import share_memory

Operand = torch.Tensor | QuantizedStorage


class Gemm(NamedTuple):
    """Roles, planes and summed dimensions of the operands of one product."""

    left: str
    left_plane: str
    right: str
    right_plane: str
    summed: tuple[int, int]


GEMMS = {
    "fprop": Gemm("input", ROWWISE, "weight", ROWWISE, (1, 1)),
    "dgrad": Gemm("grad_output", ROWWISE, "weight", COLUMNWISE, (1, 0)),
    "wgrad": Gemm("grad_output", COLUMNWISE, "input", COLUMNWISE, (0, 0)),
}


def gemm(
    name: str,
    left: Operand,
    right: Operand,
    *,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None = None,
    mixed: bool = False,
    fast: bool = False,
    invariant: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product ``name`` of :data:`GEMMS`.

    dtype: what a high-precision product computes in. out_dtype: of the result, default ``dtype``; fp32 keeps the sums
    unrounded. torch.autocast, which would round them, is switched off: the op chose its dtype. mixed: emulate a product of
    formats that do not meet, in fp32 on dequantized values. fast: let the matrix unit keep its sums, in fewer bits than fp32,
    where it can (:mod:`opfuse.kernels.products.native`). invariant: rows of the result have the same bits whatever other rows
    ``left`` has. out: a matrix of the result's shape and dtype to write it into.
    GemmError if two formats do not meet and must, ShapeError if the shapes do not.
    """
    out_dtype = out_dtype or dtype
    _check_shapes(name, left, right)
    planes = _planes(name, left, right)
    with _without_autocast(left.device.type):
        if planes is None:
            what = GEMMS[name]
            operands = _matrix(left, what.left_plane, dtype), _matrix(right, what.right_plane, dtype)
            result = _high_precision(name, *operands, out_dtype, out, invariant=invariant)
        elif (reason := clash(name, planes[0].format, planes[1].format)) is None:
            result = multiply(*map(_stored, planes), out_dtype=out_dtype, fast=fast, invariant=invariant, out=out)
        elif mixed:
            one, other = (plane.dequantize(torch.float32) for plane in planes)
            result = _high_precision(name, one, other, torch.float32, invariant=invariant).to(out_dtype)
        else:
            raise GemmError(reason)
    if name != "wgrad" and result.shape[0] != (rows := matrix_shape(left.shape)[0]):
        result = result[:rows]
    if out is not None:
        return out if share_memory(out, result) else out.copy_(result)
    return result if name == "wgrad" or len(left.shape) == 2 else result.reshape(*left.shape[:-1], result.shape[-1])


class PendingProduct(NamedTuple):
    """An fprop that is yet to be made, by :func:`gemm` or in one launch with the ops that follow it.

    out_dtype: of the result of :meth:`made`. options: further arguments of :func:`gemm`.
    """

    left: Operand
    right: Operand
    dtype: torch.dtype
    out_dtype: torch.dtype | None
    options: Mapping[str, Any]

    @property
    def shape(self) -> torch.Size:
        """The shape of the result."""
        return torch.Size((*self.left.shape[:-1], self.right.shape[0]))

    @property
    def device(self) -> torch.device:
        return self.left.device

    def compute(self) -> torch.Tensor:
        """The result."""
        return gemm("fprop", self.left, self.right, dtype=self.dtype, out_dtype=self.out_dtype, **self.options)

    def chained(
        self, stages: Sequence[Stage], encode: Encoding | None, *, dtype: torch.dtype, rounding: Rounding, keep: Collection[int]
    ) -> ProductResult | None:
        """The elementwise ops over the result, and its cast, in one launch with it; None where that saves no time.

        Rows of an invariant product keep their bits, however many there are: one launch sums as the product alone does there.
        """
        _check_shapes("fprop", self.left, self.right)
        planes = _planes("fprop", self.left, self.right)
        if planes is None or clash("fprop", planes[0].format, planes[1].format) is not None:
            return None
        left, right = map(_stored, planes)
        how = {"fast": self.options.get("fast", False), "invariant": self.options.get("invariant", False)}
        if rounding != "per_op":
            why = UNROUNDED
        elif left.layout.lines[0] != matrix_shape(self.left.shape)[0]:
            why = "rows fill a block"
        else:
            why = why_apart(left, right, stages, encode, shape=self.shape, dtype=dtype, fast=how["fast"], keep=keep)
        if ProductChosen in listeners():
            emit(ProductChosen(self.shape, tuple(stage.math.name for stage in stages), why))
        if why:
            return None
        return product_chain(left, right, stages, encode, shape=self.shape, dtype=dtype, keep=keep, **how)


def add_product(name: str, left: Operand, right: Operand, out: torch.Tensor, *, fast: bool = False) -> bool:
    """Add the product ``name`` to ``out``, fp32, in one launch; False, and nothing is done, where that saves no time."""
    return add_products(name, [left], [right], out, fast=fast)


def add_products(
    name: str, lefts: Sequence[Operand], rights: Sequence[Operand], out: torch.Tensor, *, fast: bool = False
) -> bool:
    """:func:`add_product` of groups, whose results lie one below the other in ``out``."""
    found = _planes_of_groups(name, lefts, rights)
    return found is not None and accumulate(*found, out, fast=fast)


def gemm_of_groups(
    name: str,
    lefts: Sequence[Operand],
    rights: Sequence[Operand],
    lines: Sequence[int],
    *,
    out_dtype: torch.dtype,
    mixed: bool = False,
    fast: bool = False,
    invariant: bool = False,
) -> torch.Tensor | None:
    """The products ``name`` of several groups in one launch, one result below the other; None if that is not possible.

    lines: rows of each result, at least one. The other arguments are those of :func:`gemm`, and so are the bits.
    """
    if len(lefts) < 2:
        return None
    found = _planes_of_groups(name, lefts, rights)
    if found is None:
        return None
    for pair in zip(lefts, rights):
        _check_shapes(name, *pair)
    with _without_autocast(lefts[0].device.type):
        return multiply_groups(*found, lines, out_dtype=out_dtype, fast=fast, invariant=invariant)


def _planes_of_groups(name: str, lefts: Sequence[Operand], rights: Sequence[Operand]) -> tuple[list[Stored], list[Stored]] | None:
    """The planes of both sides that the products read, if they are of one format on each, and these meet."""
    pairs = [planes for left, right in zip(lefts, rights, strict=True) if (planes := _planes(name, left, right)) is not None]
    formats = {tuple(plane.format.as_stored for plane in pair) for pair in pairs}
    if len(pairs) < len(lefts) or len(formats) > 1 or clash(name, *formats.pop()) is not None:
        return None
    return [_stored(left) for left, _ in pairs], [_stored(right) for _, right in pairs]


def gemm_of_runs(
    name: str,
    left: QuantizedStorage,
    rights: Sequence[QuantizedStorage],
    groups: RowGroups,
    *,
    out_dtype: torch.dtype,
    fast: bool,
) -> torch.Tensor:
    """fprop or dgrad of the groups of ``left``, whose sizes only the device knows, in one launch."""
    what = GEMMS[name]
    stored = [_stored(right.derived(what.right_plane)).moved_in_place() for right in rights]
    return multiply_rows(_stored(left.derived(what.left_plane)), stored, groups, out_dtype=out_dtype, fast=fast)


def wgrad_of_runs(
    left: QuantizedStorage, right: QuantizedStorage, groups: RowGroups, *, out_dtype: torch.dtype, fast: bool
) -> torch.Tensor:
    """wgrad of groups whose sizes only the device knows, in one launch, as one (G, N, K)."""
    one, other = (_stored(each.derived(COLUMNWISE)) for each in (left, right))
    return multiply_over_rows(one, other, groups, out_dtype=out_dtype, fast=fast)


def wgrad_into(
    left: QuantizedStorage,
    right: QuantizedStorage,
    groups: RowGroups,
    buffers: Mapping[int, torch.Tensor],
    *,
    accumulate: bool,
    fast: bool,
) -> None:
    """As :func:`wgrad_of_runs`, added to the ``buffers`` of some groups, (N, K) in fp32, or written there; sums are in fp32."""
    one, other = (_stored(each.derived(COLUMNWISE)) for each in (left, right))
    results = {i: _in_place(buffer) for i, buffer in buffers.items()}
    products_into(one, other, groups, results, fast=fast, accumulate=accumulate)
    for i, buffer in buffers.items():
        if results[i] is not buffer:
            buffer.copy_(results[i])
        elif buffer.is_cuda:
            torch.autograd.graph.increment_version(buffer)


def _in_place(buffer: torch.Tensor) -> torch.Tensor:
    """Itself, or a copy that a kernel can write."""
    is_in_place = buffer.is_contiguous() and on_bytes(buffer, 16)
    return buffer if is_in_place else buffer.clone(memory_format=torch.contiguous_format)


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    active = torch.amp.autocast_mode.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if active else nullcontext()


def _planes(name: str, left: Operand, right: Operand) -> tuple[Plane, Plane] | None:
    """The planes that the product reads, or None if it runs in high precision."""
    what = GEMMS[name]
    if not isinstance(left, QuantizedStorage) or not isinstance(right, QuantizedStorage):
        return None
    planes = left.derived(what.left_plane), right.derived(what.right_plane)
    return None if "identity" in (planes[0].format.family, planes[1].format.family) else planes


def clash(name: str, left: NumberFormat | None, right: NumberFormat | None) -> Described | None:
    """Why operands of these formats cannot meet in the product ``name``; None: they can.

    High precision, or None, meets anything. Else both are of one family, rotated alike, FP8 blocks have one length, at most one
    of them has scales over 128x128 tiles, and those of dgrad and wgrad have no amax for each row, as row-scaled NVFP4 has.
    """
    if left is None or right is None or "identity" in (left.family, right.family):
        return None
    cure = "give both roles formats that meet, or IdentityQuantizer to one"
    if name != "fprop" and (left.per_row or right.per_row):
        wanted = "formats without an amax for each row, which only fprop reads"
        cure = "read another format here through a HybridQuantizer, set a backward_override"
    elif left.family != right.family or left.rht != right.rht:
        wanted = "two formats of one family, both rotated or neither"
    elif left.family == "block" and _length(left) != _length(right):
        wanted = "blocks of one length"
    elif left.family == "block" and left.block == right.block == (128, 128):
        wanted = "at most one operand with 128x128 blocks"
    else:
        return None
    what = GEMMS[name]
    return describe(
        f"{name} of {what.left} and {what.right}",
        wanted=wanted,
        got=f"{what.left} {what.left_plane} {left}, {what.right} {what.right_plane} {right}",
        cure=f"{cure}, or set the recipe's allow_mixed_emulation=True",
    )


def _length(fmt: NumberFormat) -> int:
    """Elements of a line under one scale; 0: all of them."""
    return fmt.block[1] if fmt.block else 0


def _stored(plane: Plane) -> Stored:
    return Stored(plane.data, cast(torch.Tensor, plane.scale), plane.amax, plane.layout)


def _matrix(operand: Operand, plane: str, dtype: torch.dtype) -> torch.Tensor:
    """(M, K) in ``dtype``: from the plane that the product reads, or from the only one that was kept."""
    if isinstance(operand, QuantizedStorage):
        operand = operand.dequantize(dtype, plane if plane in operand.usages else None)
    matrix = operand.to(dtype).reshape(-1, operand.shape[-1])
    return matrix.contiguous() if _is_misread(matrix) else matrix


def _is_misread(matrix: torch.Tensor) -> bool:
    """Whether rows have gaps that a CPU's product of 16-bit operands reads, times 0: a NaN there would reach the result (oneDNN,
    as of torch 2.13 and 2.15). cuBLAS takes any distance between rows.
    """
    return matrix.element_size() == 2 and matrix.stride(0) > matrix.shape[1] and not as_on_gpu(matrix)


def _high_precision(
    name: str,
    left: torch.Tensor,
    right: torch.Tensor,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
    *,
    invariant: bool = False,
) -> torch.Tensor:
    if invariant:
        return in_tiles(len(left), left.device.type, lambda cut: _high_precision(name, cut(left), right, out_dtype))
    left, right = left.t() if name == "wgrad" else left, right.t() if name == "fprop" else right
    if out_dtype == torch.float32 and as_on_gpu(left) and left.dtype in (torch.bfloat16, torch.float16):
        sums = torch.mm(left, right, out_dtype=torch.float32)  # the sums themselves, without wider operands
        return sums if out is None else out.copy_(sums)
    if out_dtype != left.dtype:
        left, right = left.to(out_dtype), right.to(out_dtype)
    return left @ right if out is None else torch.mm(left, right, out=out)


def _check_shapes(name: str, left: Operand, right: Operand) -> None:
    what = GEMMS[name]
    sums = matrix_shape(left.shape)[what.summed[0]], matrix_shape(right.shape)[what.summed[1]]
    if sums[0] != sums[1]:
        where = f"{name} of {what.left} {tuple(left.shape)} and {what.right} {tuple(right.shape)}"
        got, cure = f"{sums[0]} and {sums[1]}", "check in_features and out_features"
        raise ShapeError(describe(where, wanted="equal summed dimensions", got=got, cure=cure))
