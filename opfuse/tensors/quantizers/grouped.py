"""A quantizer for tensors whose groups of rows are cast apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

import torch
import torch.nn.functional as F

from opfuse.errors import QuantizerError, ShapeError, describe
from opfuse.formats import IDENTITY, MULTIPLES, NumberFormat, shared_format
from opfuse.numerics.layouts import Layout, round_up
from opfuse.tensors.groups import GroupedPlane, Sizes, check_sizes, groups_of, sizes_of
from opfuse.tensors.quantizers.base import Quantizer
from opfuse.tensors.storage import Plane, QuantizedStorage, matrix_shape

PADDING = math.lcm(16, *MULTIPLES.values())
"""Rows of a padded group are a multiple of this: of the 16 that native products want, and of the blocks of all formats.

One for all, since the two operands of a product were cast by quantizers that know nothing of each other.
"""


@dataclass(frozen=True, repr=False)
class GroupedQuantizer(Quantizer):
    """Casts consecutive groups of rows, each with a quantizer of its own, into one record: no scale reaches over two groups.

    quantizers: one for each group, of equal formats. sizes: rows of each group of a tensor of shape (..., K); None: as many in
    each. padded: rows of zeros follow a group up to the next multiple of :data:`PADDING`. High precision is not cut into
    groups: such a plane is the caller's tensor itself.
    """

    quantizers: tuple[Quantizer, ...]
    sizes: Sizes | None = None
    padded: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        distinct = {id(q): q for q in self.quantizers}
        formats = [tuple(fmt.as_stored for fmt in q.formats) for q in distinct.values()]
        if not formats or any(formats_of_group != formats[0] for formats_of_group in formats):
            cure = "give every group a quantizer of the same class and settings"
            raise QuantizerError(describe("GroupedQuantizer", wanted="quantizers of equal formats", got=formats, cure=cure))
        pinned = {key: self._pinned(q) for key, q in distinct.items()}
        object.__setattr__(self, "quantizers", tuple(pinned[id(q)] for q in self.quantizers))

    def _pinned(self, quantizer: Quantizer) -> Quantizer:
        """``quantizer`` for the directions of this one."""
        optimize = quantizer.optimize_for_gemm or self.optimize_for_gemm
        return replace(quantizer, rowwise=self.rowwise, columnwise=self.columnwise, optimize_for_gemm=optimize)

    @cached_property
    def formats(self) -> tuple[NumberFormat, NumberFormat]:
        rowwise, columnwise = zip(*(quantizer.formats for quantizer in self.quantizers))
        return shared_format(rowwise), shared_format(columnwise)

    def of_groups(self, start: int, stop: int) -> Quantizer:
        numbers = [number % len(self.quantizers) for number in range(start, stop)]
        sizes = self.sizes and tuple([self.sizes[number] for number in numbers])
        return replace(self, quantizers=tuple([self.quantizers[number] for number in numbers]), sizes=sizes)

    @property
    def row_local(self) -> bool:
        return all(quantizer.row_local for quantizer in self.quantizers)

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        return tuple(chain.from_iterable(q.state for q in self.quantizers))

    @property
    def multiple(self) -> int:
        """What padded groups have a multiple of, in rows."""
        return PADDING if self.padded else 1

    def check(
        self,
        shape: Sequence[int],
        dtype: torch.dtype | None = None,
        *,
        where: str | None = None,
        cure: Callable[[Layout], str] | None = None,
    ) -> None:
        where = where or type(self).__name__
        if not shape:
            raise ShapeError(describe(where, wanted="at least one dimension", got="a scalar", cure="pass x.reshape(1)"))
        columns = shape[-1]
        multiple = self.multiple
        for i, (quantizer, size) in enumerate(zip(self.quantizers, self._sizes(shape))):
            quantizer.check((round_up(size, multiple), columns), dtype, where=f"{where}, group {i}", cure=cure)

    def _sizes(self, shape: Sequence[int]) -> Sizes:
        rows, groups = matrix_shape(shape)[0], len(self.quantizers)
        return check_sizes(self.sizes or (rows // groups,) * groups, rows, where=type(self).__name__)

    def _planes(self, x: torch.Tensor) -> list[Plane]:
        sizes = self._sizes(x.shape)
        pieces = self._padded_groups(x, sizes)
        made = [quantizer.quantize(piece) for quantizer, piece in zip(self.quantizers, pieces)]
        return [self._joined(x, [storage.plane(usage) for storage in made], pieces, sizes) for usage in self.usages]

    def _padded_groups(self, x: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
        """The rows of each group, with those that pad it."""
        multiple = self.multiple
        pieces = x.reshape(matrix_shape(x.shape)).split(sizes)
        return [F.pad(piece, (0, 0, 0, -size % multiple)) if size % multiple else piece for piece, size in zip(pieces, sizes)]

    @staticmethod
    def _joined(x: torch.Tensor, members: list[Plane], pieces: list[torch.Tensor], sizes: Sizes) -> Plane:
        first = members[0]
        if first.format.family != IDENTITY.family:
            return GroupedPlane(members, sizes)
        kept = all(member.data is piece for member, piece in zip(members, pieces))
        data = x if kept else torch.cat([member.data[:size] for member, size in zip(members, sizes)])
        return Plane(first.usage, first.format, matrix_shape(x.shape), data)

    def _empty_planes(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None) -> list[Plane]:
        x = torch.zeros(tuple(shape), dtype=dtype, device=device)
        sizes = self._sizes(shape)
        pieces = self._padded_groups(x, sizes)
        made = [q.make_empty(piece.shape, dtype=dtype, device=device) for q, piece in zip(self.quantizers, pieces)]
        return [self._joined(x, [storage.plane(usage) for storage in made], pieces, sizes) for usage in self.usages]

    def _check_update(self, src: torch.Tensor, dst: QuantizedStorage) -> None:
        super()._check_update(src, dst)
        sizes, there = self._sizes(src.shape), sizes_of(dst)
        if there not in (None, sizes):
            where, cure = f"{type(self).__name__}.update_quantized", "update with the quantizer that made the storage"
            raise ShapeError(describe(where, wanted=f"groups of {there} rows", got=sizes, cure=cure))
        pieces = src.reshape(matrix_shape(src.shape)).split(sizes)
        for quantizer, piece, group in zip(self.quantizers, pieces, groups_of(dst, sizes)):
            quantizer._check_update(piece, group)

    @property
    def input_dtypes(self) -> tuple[torch.dtype, ...] | None:
        """Those of one group."""
        return self.quantizers[0].input_dtypes
