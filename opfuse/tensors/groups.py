"""A tensor whose groups of rows were quantized apart, as one record; and the sizes of such groups.

A group may be followed by rows of zeros that fill its last blocks. Only its own planes know of them: the record's shape, and what
it dequantizes to, do not.
"""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Integral
from typing import Any, NoReturn

import torch

from opfuse.errors import DtypeError, QuantizedTensorError, ShapeError, describe, number_of
from opfuse.events import ValuesRead, emit, listeners
from opfuse.formats import USAGES, NumberFormat, shared_format
from opfuse.kernels.casts.dequantize import dequantize_groups
from opfuse.kernels.engine.launch import check_capture
from opfuse.tensors.storage import Plane, QuantizedStorage

Sizes = tuple[int, ...]
"""Rows of consecutive groups, padding not counted."""


class GroupedPlane(Plane):
    """One direction of a matrix whose groups of rows are planes of their own.

    members: the plane of each group, stored alike. sizes: rows of each group. There is no array of the whole: ``data``,
    ``scale`` and ``amax`` are those of the members.
    """

    in_groups = True
    members: tuple[Plane, ...]
    sizes: Sizes

    def __init__(self, members: Sequence[Plane], sizes: Sizes) -> None:
        first = members[0]
        shape = sum(sizes), first.shape[1]
        fmt = shared_format(member.format for member in members)
        own = {"usage": first.usage, "format": fmt, "shape": shape, "swizzled": first.swizzled}
        vars(self).update(own, members=tuple(members), sizes=tuple(sizes))

    def _no_array(self) -> NoReturn:
        got, cure = number_of(len(self.members), "group"), "read the planes of its groups, plane.members"
        raise QuantizedTensorError(describe(f"{self!r}", wanted="one array", got=got, cure=cure))

    data = scale = amax = property(_no_array)

    def __repr__(self) -> str:
        return f"GroupedPlane({self.usage} {self.format}, sizes={self.sizes})"

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for member in self.members for tensor in member.tensors())

    def with_tensors(self, tensors: Iterable[torch.Tensor]) -> GroupedPlane:
        source = iter(tensors)
        return self._mapped(member.with_tensors(source) for member in self.members)

    def parts(self) -> Iterable[tuple[int | str, Plane]]:
        return enumerate(self.members)

    @property
    def description(self) -> tuple[Any, ...]:
        return self.sizes, tuple([part for member in self.members for part in member.description[1]])

    @property
    def layout(self) -> Any:
        """The layouts of the members."""
        return tuple(member.layout for member in self.members)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The (M, K) matrix in ``dtype``, without padding."""
        stored = [(m.data, m.scale, m.amax, m.layout) for m in self.members if m.scale is not None]
        if len(stored) == len(self.members) and self.sizes == tuple(member.shape[0] for member in self.members):
            return dequantize_groups(stored, dtype=dtype)
        return torch.cat([member.dequantize(dtype)[:size] for member, size in zip(self.members, self.sizes)])

    def shaped(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """As of any plane. A stack of matrices whose columns are stored as lines is decoded in the order of its bytes: it is mT
        of a contiguous tensor, and products that read it transposed have nothing to turn.
        """
        stacked = len(shape) == 3 and self.sizes == (shape[1],) * shape[0]
        rows = self.as_rows() if stacked else None
        if rows is None:
            return super().shaped(shape, dtype)
        return rows.dequantize(dtype).view(shape[0], shape[2], shape[1]).mT

    def as_rows(self) -> GroupedPlane | None:
        """A rowwise plane of the transposed groups, one below the other, over the same bytes; None where they do not lie so."""
        rows = [row for row in (member.as_rows() for member in self.members) if row is not None]
        padded = self.sizes != tuple(member.shape[0] for member in self.members)
        return None if padded or len(rows) < len(self.members) else GroupedPlane(rows, tuple(row.shape[0] for row in rows))

    @property
    def is_mirror(self) -> bool:
        return all(member.is_mirror for member in self.members)

    def transposed(self) -> GroupedPlane:
        return self._mapped(member.transposed() for member in self.members)

    def with_format(self, fmt: NumberFormat) -> GroupedPlane:
        changed = [member.with_format(fmt) for member in self.members]
        return self if all(new is old for new, old in zip(changed, self.members)) else self._mapped(changed)

    def with_swizzle(self, *, swizzled: bool) -> GroupedPlane:
        return self._mapped(member.with_swizzle(swizzled=swizzled) for member in self.members)

    def _mapped(self, members: Iterable[Plane]) -> GroupedPlane:
        return GroupedPlane(tuple(members), self.sizes)


def sizes_of(storage: QuantizedStorage) -> Sizes | None:
    """Rows of the groups that were cast apart; None if the record is cast as one."""
    planes = (storage.plane(usage) for usage in storage.usages)
    return next((plane.sizes for plane in planes if isinstance(plane, GroupedPlane)), None)


def groups_of(storage: QuantizedStorage, sizes: Sizes) -> list[QuantizedStorage]:
    """The record of each group: its members of grouped planes, and its rows of an identity plane.

    QuantizedTensorError for planes whose groups were not cast apart, or whose sizes only the device knows.
    """
    parts = {usage: _members(storage.plane(usage), sizes) for usage in storage.usages}
    columns = storage.shape[-1]
    return [
        QuantizedStorage(torch.Size((size, columns)), storage.dtype, row, column, storage.why)
        for size, row, column in zip(sizes, *(parts.get(usage, (None,) * len(sizes)) for usage in USAGES))
    ]


def _members(plane: Plane, sizes: Sizes) -> Sequence[Plane]:
    if isinstance(plane, GroupedPlane):
        return plane.members
    if plane.scale is not None:
        where, cure = f"groups of {plane!r}", "dequantize() it first, or cast each group by itself"
        raise QuantizedTensorError(describe(where, wanted="groups that were cast apart", got="one cast for all", cure=cure))
    pieces = plane.data.reshape(plane.shape).split(sizes)
    return [Plane(plane.usage, plane.format, (size, plane.shape[1]), piece) for size, piece in zip(sizes, pieces)]


def offsets(sizes: Sizes) -> Iterator[tuple[int, int]]:
    """First row and end of each group."""
    start = 0
    for size in sizes:
        yield start, start + size
        start += size


_READ: ContextVar[dict[int, tuple[torch.Tensor, Sizes]] | None] = ContextVar("opfuse_sizes_read", default=None)
"""Sizes that the host has read in the running call, by the identity of the tensor: layers that share splits wait for them once.

A program is chosen by sizes that were read before it runs; a recording inside of which sizes are read is refused.
"""


@contextmanager
def sizes_read_once() -> Iterator[None]:
    """Inside, a tensor of sizes is read once. It must not change meanwhile: no longer than a call of a pipeline."""
    reset = _READ.set({})
    try:
        yield
    finally:
        _READ.reset(reset)


def read_sizes(splits: torch.Tensor, rows: int, *, where: str) -> Sizes:
    """The values of an integer tensor. The host waits for those on a device, once in :func:`sizes_read_once`.

    A tensor on the meta device stands for groups of equal size among the ``rows``. UnsupportedError while a CUDA graph is
    captured, which would not see new values. where: the op that reads them, for the error.
    """
    known = known_sizes(splits, rows)
    if known is not None:
        return known
    check_capture(f"{where} split sizes", got="values on a device that the host has to know", cure=_CAPTURED)
    return _values(splits)


_CAPTURED = (
    "pass a list of ints where they are the same at every replay; else capture without this op, or, with splits on the device "
    "and no bias that trains, in bf16 without a recipe and main_grad, or in FP8 on compute capability 9.0, or in MXFP8 on 10.x"
)


def known_sizes(splits: torch.Tensor, rows: int) -> Sizes | None:
    """The values of ``splits``, as :func:`read_sizes` gives them, if the host has them without waiting for a device."""
    if getattr(splits, "fake_mode", None) is not None:  # a compiler asks how results look: no condition on the rows is wanted
        return (rows, *[0] * (len(splits) - 1))
    if splits.is_meta:
        return tuple(map(len, torch.empty(rows, device="meta").tensor_split(len(splits))))
    read = (_READ.get() or {}).get(id(splits))
    if read is not None:
        return read[1]
    return None if splits.is_cuda else _values(splits)


def _values(splits: torch.Tensor) -> Sizes:
    if ValuesRead in listeners():
        emit(ValuesRead("how many rows groups have"))
    sizes = tuple(map(int, splits.tolist()))
    read = _READ.get()
    if read is not None:
        read[id(splits)] = splits, sizes
    return sizes


def listed_splits(sizes: Sequence[Any], *, where: str) -> torch.Tensor:
    """int64 tensor of a list of ints. DtypeError for anything else in it: numbers are not rounded, nested lists not flattened."""
    kinds = set(map(type, sizes))
    known = kinds == {int} and max(map(abs, sizes)) < 1 << 63
    wrong = [] if known else [size for size in sizes if not _is_int64(size)]
    if wrong:
        wanted, got = "a tensor, or a list of ints", f"a {type(sizes).__name__} with {reprlib.repr(wrong[0])}"
        raise DtypeError(describe(f"{where} split sizes", wanted=wanted, got=got, cure="pass one whole number for each group"))
    listed = torch.tensor([*map(int, sizes)], dtype=torch.int64, device="cpu")
    setattr(listed, _CONSTANT, True)
    return listed


def _is_int64(size: Any) -> bool:
    return isinstance(size, Integral) and not isinstance(size, bool) and int(size).bit_length() <= 63


_CONSTANT = "opfuse_constant"
"""Marks a tensor that was made of a list of ints: no one else holds it, so its values do not change."""


def is_constant(splits: torch.Tensor) -> bool:
    """Whether the sizes were given as a list of ints, and stay."""
    return hasattr(splits, _CONSTANT)


def written(sizes: Iterable[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(G,) on ``device``: numbers of the host, which kernels write, so that nothing is copied from there."""
    alike = ((size, len([*same])) for size, same in itertools.groupby(sizes))
    return torch.cat([torch.full((count,), size, dtype=dtype, device=device) for size, count in alike])


def check_splits(splits: torch.Tensor, groups: int, *, where: str) -> None:
    """ShapeError or DtypeError unless ``splits`` is an integer tensor (groups,).

    UnsupportedError for a tensor on a CPU while a CUDA graph is captured, which would keep the values of the moment; those that
    were given as a list of ints are meant to stay.
    """
    if splits.dtype not in (torch.int64, torch.int32):
        cure = "pass splits.to(torch.int64)"
        raise DtypeError(describe(f"{where} split sizes", wanted="int64 or int32", got=splits.dtype, cure=cure))
    if tuple(splits.shape) != (groups,):
        cure = "pass one number of rows for each group"
        raise ShapeError(describe(f"{where} split sizes", wanted=f"shape ({groups},)", got=tuple(splits.shape), cure=cure))
    if splits.device.type == "cpu" and not is_constant(splits):
        check_capture(f"{where} split sizes", got="a tensor on the CPU", cure=_CAPTURED)


def check_copied(splits: torch.Tensor, rows: int, *, where: str) -> None:
    """:func:`check_sizes` of ``splits`` on the CPU, before they are copied to a device, where the host could no longer check."""
    if splits.device.type == "cpu":
        check_sizes(tuple(splits.tolist()), rows, where=where)


def check_sizes(sizes: Sizes, rows: int, *, where: str) -> Sizes:
    """``sizes`` themselves; ShapeError unless they are numbers of rows that add up to ``rows``."""
    if min(sizes, default=0) < 0 or sum(sizes) != rows:
        wanted = f"numbers of rows, none below 0, with the sum {rows}"
        cure = "count the rows of the input that belong to each group"
        raise ShapeError(describe(f"{where} split sizes", wanted=wanted, got=f"{sizes} with the sum {sum(sizes)}", cure=cure))
    return sizes
