"""Records of quantized data: a plane is one direction of a matrix, a storage holds up to two planes of one tensor.

A storage describes itself: it is dequantized from its own fields, whatever became of the quantizer that made it. Structure is
frozen; the bytes of a plane may be rewritten in place (optimizers, gathers), which bumps their autograd version.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import torch

from opfuse.errors import MissingPlaneError, ShapeError, describe
from opfuse.formats import COLUMNWISE, ROWWISE, USAGES, NumberFormat, Usage
from opfuse.kernels.casts.dequantize import dequantize
from opfuse.kernels.casts.tensor import transposed
from opfuse.numerics.layouts import Layout, layout_of, load_scale, relayout_scale, store_scale

INNER_NAMES = {f"_{usage}_{field}": (usage, field) for usage in USAGES for field in ("data", "scale", "amax")}
"""Names for the tensors of a record, of which a plane need not have all: usage and field."""


@dataclass(frozen=True, eq=False)
class Plane:
    """One direction of a quantized matrix of logical shape ``shape`` = (M, K).

    data: bytes in the layout of ``format`` (identity: the caller's tensor itself, of any shape with M * K elements).
    scale: decode scale, what dequantize multiplies by (fp32, or E8M0 / E4M3 bytes in a padded array), or None.
    amax: fp32 global amax of NVFP4, shape (1,), or one per row or column; else None.
    swizzled: whether ``scale`` is in the 128x4 tile layout that matrix products read.
    in_groups: whether groups of its rows were cast apart, so that other rows cannot be cut out of it.
    """

    in_groups: ClassVar[bool] = False
    usage: Usage
    format: NumberFormat
    shape: tuple[int, int]
    data: torch.Tensor
    scale: torch.Tensor | None = None
    amax: torch.Tensor | None = None
    swizzled: bool = False

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors of this plane, in a fixed order."""
        return tuple([t for t in (self.data, self.scale, self.amax) if t is not None])

    def parts(self) -> Iterable[tuple[int | str, Plane]]:
        """The planes of one array each, with what stands behind the names of their tensors: itself, or those of its groups."""
        return [("", self)]

    @property
    def description(self) -> tuple[Any, ...]:
        """All of it but its tensors. QuantizedTensorError for groups whose sizes no value of the host tells."""
        return None, ((self.usage, self.format, self.shape, self.swizzled),)

    def with_tensors(self, tensors: Iterable[torch.Tensor]) -> Plane:
        """A copy of the plane over other ``tensors``, in the order of :meth:`tensors`."""
        source = iter(tensors)
        data = next(source)
        scale = None if self.scale is None else next(source)
        amax = None if self.amax is None else next(source)
        return Plane(self.usage, self.format, self.shape, data, scale, amax, self.swizzled)

    def with_format(self, fmt: NumberFormat) -> Plane:
        """The same bytes under a format in which they lie and mean the same."""
        return self if fmt == self.format else replace(self, format=fmt)

    @property
    def layout(self) -> Layout:
        """Where the bytes lie: shapes, orientation, padding."""
        return layout_of(self.format, self.usage, self.shape, self.swizzled)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The (M, K) matrix in ``dtype``. Identity data of that dtype is returned as it is, only reshaped."""
        if self.scale is None:
            return self.data.reshape(self.shape).to(dtype)
        return dequantize(self.data, self.scale, self.amax, layout=self.layout, dtype=dtype)

    def shaped(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """The values as a tensor of ``shape``, whose rows may be fewer."""
        values = self.dequantize(dtype)
        if values.numel() != shape.numel():
            values = values[: matrix_shape(shape)[0]]
        return values.reshape(shape)

    def as_rows(self) -> Plane | None:
        """The rowwise plane of the transposed matrix over the same bytes; None where columns are not stored as lines."""
        if self.usage != COLUMNWISE or self.layout.across or self.format.rht:
            return None
        return replace(self, usage=ROWWISE, shape=self.shape[::-1])

    @property
    def is_mirror(self) -> bool:
        """Whether the rowwise bytes, transposed, are the columnwise plane: all share a scale, or those of square blocks."""
        block = self.format.block
        return self.format.family == "tensor" or (self.format.family == "block" and block is not None and block[0] == block[1])

    def transposed(self) -> Plane:
        """The columnwise plane of the same values, of a rowwise one that :attr:`is_mirror`."""
        data, layout = transposed(self.data), layout_of(self.format, COLUMNWISE, self.shape)
        if self.scale is None or self.format.family == "tensor":
            return replace(self, usage=COLUMNWISE, data=data)
        return replace(self, usage=COLUMNWISE, data=data, scale=store_scale(load_scale(self.scale, self.layout).t(), layout))

    def with_swizzle(self, *, swizzled: bool) -> Plane:
        """The same values with scales in the tile layout or compact; itself if they are so, or if the format has no tiles."""
        if swizzled == self.swizzled or not self.layout.tiled or self.scale is None:
            return self
        return replace(self, scale=relayout_scale(self.scale, self.layout, swizzled=swizzled), swizzled=swizzled)


@dataclass(frozen=True, eq=False)
class QuantizedStorage:
    """A tensor of logical ``shape`` and nominal ``dtype`` as quantized planes; ``why`` says why a plane is missing.

    A plane may hold more rows than the shape says: zeros that fill its last block. What follows from the fields is kept once it
    was asked for, since each call of a pipeline, and of compiled code, asks it of every weight.
    """

    shape: torch.Size
    dtype: torch.dtype
    rowwise: Plane | None
    columnwise: Plane | None
    why: str = "it was not asked for"

    def __getstate__(self) -> dict[str, object]:
        """The fields: of what is kept beside them, a copy makes its own."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def usages(self) -> tuple[str, ...]:
        """The directions that hold data."""
        return tuple([plane.usage for plane in (self.rowwise, self.columnwise) if plane is not None])

    @cached_property
    def signature(self) -> tuple[str, ...]:
        """Usage and format of every plane, as text."""
        return tuple([f"{usage}={self.plane(usage).format}" for usage in self.usages])

    @property
    def format(self) -> NumberFormat:
        """The rowwise format, or the columnwise one if only that exists."""
        return (self.rowwise or self.plane(COLUMNWISE)).format

    @property
    def device(self) -> torch.device:
        """Where the bytes are."""
        return (self.rowwise or self.plane(COLUMNWISE)).tensors()[0].device

    @property
    def nbytes(self) -> int:
        """Bytes of all planes, counting a tensor that two planes share once."""
        return sum({id(t): t.nbytes for t in self.tensors()}.values())

    def plane(self, usage: str) -> Plane:
        """The plane of ``usage``; MissingPlaneError says why it was not made."""
        plane: Plane | None = getattr(self, usage)
        if plane is None:
            other = ROWWISE if usage == COLUMNWISE else COLUMNWISE
            raise MissingPlaneError(
                f"{usage} data of a {tuple(self.shape)} tensor was not made: {self.why}. "
                f"Cure: quantize with {usage}=True, or read the {other} plane."
            )
        return plane

    def derived(self, usage: str) -> Plane:
        """The plane of ``usage``; a columnwise one may be the rowwise bytes, transposed. Else MissingPlaneError."""
        plane: Plane | None = getattr(self, usage)
        if plane is None and self.rowwise is not None and self.rowwise.is_mirror:
            return self.rowwise.transposed()
        return plane or self.plane(usage)

    def completed(self, usages: Iterable[str]) -> QuantizedStorage:
        """A storage with the planes of ``usages`` beside its own, if the bytes that it has are theirs as well; else itself."""
        lacks = COLUMNWISE in usages and self.columnwise is None
        mirror = lacks and self.rowwise is not None and self.rowwise.is_mirror
        return replace(self, columnwise=self.derived(COLUMNWISE)) if mirror else self

    def only(self, *usages: str, why: str) -> QuantizedStorage:
        """A storage with only the planes of ``usages``, derived where they can be."""
        rowwise = self.derived(ROWWISE) if ROWWISE in usages else None
        columnwise = self.derived(COLUMNWISE) if COLUMNWISE in usages else None
        return QuantizedStorage(self.shape, self.dtype, rowwise, columnwise, why)

    def dequantize(self, dtype: torch.dtype | None = None, usage: str | None = None) -> torch.Tensor:
        """High-precision values in the logical shape; from the rowwise plane unless ``usage`` says otherwise."""
        plane = self.plane(usage or (ROWWISE if self.rowwise is not None else COLUMNWISE))
        if plane.format.family == "identity" and plane.data.shape == self.shape:
            return plane.data.to(dtype or self.dtype)
        return plane.shaped(self.shape, dtype or self.dtype)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors, rowwise first; what autograd saves and what a checkpoint holds."""
        return self._tensors

    @cached_property
    def _tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple([t for plane in (self.rowwise, self.columnwise) if plane is not None for t in plane.tensors()])

    @cached_property
    def named_tensors(self) -> Mapping[str, torch.Tensor]:
        """Its tensors by name, from :data:`INNER_NAMES`; those of a group with its number behind."""
        found = {
            f"{name}{number}": getattr(part, field)
            for name, (usage, field) in INNER_NAMES.items()
            if (plane := getattr(self, usage)) is not None
            for number, part in plane.parts()
        }
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @cached_property
    def structure(self) -> tuple[Any, ...]:
        """All of it but its tensors and its shape, to compare. QuantizedTensorError as :attr:`Plane.description`."""
        return self.dtype, self.why, tuple([self.plane(usage).description for usage in self.usages])

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> QuantizedStorage:
        """A copy of the storage over other tensors, in the order of :meth:`tensors`."""
        source = iter(tensors)
        rowwise = None if self.rowwise is None else self.rowwise.with_tensors(source)
        columnwise = None if self.columnwise is None else self.columnwise.with_tensors(source)
        return QuantizedStorage(self.shape, self.dtype, rowwise, columnwise, self.why)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(M, K): leading dimensions flattened."""
        return matrix_shape(self.shape)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(M, K) of a tensor: leading dimensions flattened; a vector is one row. ShapeError for a scalar."""
    if not shape:
        raise ShapeError(describe("a matrix", wanted="at least one dimension", got="a scalar", cure="pass x.reshape(1)"))
    return math.prod(shape[:-1]), shape[-1]
