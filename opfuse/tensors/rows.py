"""Cutting a storage along the rows of its matrix and joining the pieces: slices, shards, gathered parameters.

A cut is exact or refused: every plane must come apart between blocks, so that each piece decodes to the rows it holds.
A *row part* is one tensor of a plane with matrix rows, or blocks of rows, along dimension 0 and without padding: the row
parts of consecutive pieces, concatenated, are the row parts of the whole. What all rows share (the scale of a per-tensor
format, the amax of NVFP4) is no row part.

A stack of matrices that were cast apart, as those of experts, comes apart between them: its row parts have a matrix each entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from opfuse.formats import ROWWISE, USAGES
from opfuse.numerics.layouts import ceil_div, load_scale, store_scale
from opfuse.tensors.groups import GroupedPlane
from opfuse.tensors.planes import map_tensors
from opfuse.tensors.storage import Plane, QuantizedStorage
from opfuse.torch_private.tensors import share_memory


def row_unit(storage: QuantizedStorage) -> int:
    """Rows come apart only at multiples of this number (1: anywhere), or at the end of the matrix."""
    return math.lcm(*(_rows_per_block(storage.plane(usage)) for usage in storage.usages))


def slice_rows(storage: QuantizedStorage, start: int, stop: int) -> QuantizedStorage | None:
    """Entries [start, stop) of the first dimension of ``storage``, or None where the format cannot be cut there.

    The bytes are those of ``storage``, or all are copies, so that a later write to it leaves no codes beside scales of before:
    copies where blocks of rows have scales, or where data is stored transposed.
    """
    if start >= stop or not _has_rows(storage):
        return None
    inner = math.prod(storage.shape[1:-1])
    first, last, unit = start * inner, stop * inner, row_unit(storage)
    if first % unit or (last % unit and last != storage.matrix_shape[0]):
        return None

    def cut(plane: Plane) -> Plane:
        if isinstance(plane, GroupedPlane):
            return GroupedPlane(plane.members[start:stop], plane.sizes[start:stop])
        entries = {field: _rows_per_entry(plane, field) for field in _row_fields(plane)}
        parts = {field: _row_part(plane, field)[first // n : ceil_div(last, n)] for field, n in entries.items()}
        return _from_parts(plane, parts, last - first)

    piece = _with_planes(storage, (stop - start, *storage.shape[1:]), cut)
    same = all(map(share_memory, storage.tensors(), piece.tensors()))
    return piece if same else map_tensors(piece, torch.clone)


def zero_rows(storage: QuantizedStorage, shape: Sequence[int]) -> QuantizedStorage | None:
    """A storage like ``storage`` that holds zeros of ``shape``, or None where it cannot have such rows.

    Zero bytes, with the scales that all rows share left as they are, decode to zero in every format, unless such a scale is NaN.
    """
    rows = math.prod(shape[:-1])
    if len(shape) < 2 or shape[-1] != storage.shape[-1] or not _has_rows(storage) or not rows or rows % row_unit(storage):
        return None

    def zeros(plane: Plane) -> Plane:
        parts = {}
        for field in _row_fields(plane):
            part = _row_part(plane, field)
            parts[field] = part.new_zeros((ceil_div(rows, _rows_per_entry(plane, field)), *part.shape[1:]))
        return _from_parts(plane, parts, rows)

    return _with_planes(storage, shape, zeros)


def paste_rows(storage: QuantizedStorage, start: int, piece: QuantizedStorage) -> None:
    """Write the bytes of ``piece`` into ``storage``, from entry ``start`` of the first dimension on, where it can be cut.

    What all rows share becomes that of ``piece``: pieces of one tensor have it in common.
    """
    first = start * math.prod(storage.shape[1:-1])
    for usage in storage.usages:
        plane, source = storage.plane(usage), piece.plane(usage)
        parts = {field: _row_part(plane, field).clone() for field in _row_fields(plane)}
        for field, part in parts.items():
            new = _row_part(source, field)
            at = first // _rows_per_entry(plane, field)
            part[at : at + len(new)] = new
        for target, value in zip(plane.tensors(), _from_parts(source, parts, plane.shape[0]).tensors(), strict=True):
            target.copy_(value)


def row_parts(storage: QuantizedStorage) -> list[torch.Tensor]:
    """All row parts of ``storage``, contiguous, rowwise plane first."""
    planes = [storage.plane(usage) for usage in storage.usages]
    return [_row_part(plane, field).contiguous() for plane in planes for field in _row_fields(plane)]


def join_rows(piece: QuantizedStorage, parts: Sequence[torch.Tensor], shape: Sequence[int]) -> QuantizedStorage:
    """The storage of ``shape`` whose consecutive pieces look like ``piece``, from their concatenated :func:`row_parts`.

    What all rows share is taken from ``piece``.
    """
    source = iter(parts)
    rows = math.prod(shape[:-1])
    return _with_planes(piece, shape, lambda plane: _from_parts(plane, {f: next(source) for f in _row_fields(plane)}, rows))


def may_join(storages: Sequence[QuantizedStorage]) -> bool:
    """Whether the rows of ``storages``, one below the other, are a storage of the same bytes: formats, columns and what all rows
    share are alike, and blocks end where each but the last does.
    """
    alike = len({_joining(storage) for storage in storages}) == 1
    if not alike or not all(_has_rows(storage) and not shared_by_rows(storage) for storage in storages):
        return False
    return all(storage.matrix_shape[0] % row_unit(storage) == 0 for storage in storages[:-1])


def _joining(storage: QuantizedStorage) -> tuple[object, ...]:
    """What storages have in common whose rows are to be joined."""
    planes = [storage.plane(usage) for usage in storage.usages]
    return storage.dtype, storage.device, storage.shape[1:], *((plane.usage, plane.format, plane.swizzled) for plane in planes)


def cat_rows(storages: Sequence[QuantizedStorage]) -> QuantizedStorage | None:
    """The rows of ``storages``, one below the other, in new memory; None where they are no storage (:func:`may_join`)."""
    if not may_join(storages):
        return None
    parts = [torch.cat(parts) for parts in zip(*map(row_parts, storages))]
    rows = sum(storage.shape[0] for storage in storages)
    return join_rows(storages[0], parts, (rows, *storages[0].shape[1:]))


def packed_rows(storages: Sequence[QuantizedStorage]) -> Sequence[QuantizedStorage]:
    """The same storages with the codes of all in one new array and the scales in another, where :func:`over_rows` finds them; as
    they are if they cannot be joined, or where rows do not lie one below the other: of columnwise planes and of scales in tiles.
    """
    if not may_join(storages) or storages[0].usages != (ROWWISE,) or storages[0].format.family != "block":
        return storages
    planes = [storage.plane(ROWWISE) for storage in storages]
    if planes[0].in_groups:
        return storages
    arrays = [torch.cat(parts).split([*map(len, parts)]) for parts in zip(*[plane.tensors() for plane in planes])]
    packed = [plane.with_tensors(parts) for plane, parts in zip(planes, zip(*arrays))]
    return [replace(storage, rowwise=plane) for storage, plane in zip(storages, packed)]


def over_rows(storage: QuantizedStorage, arrays: Sequence[torch.Tensor]) -> QuantizedStorage:
    """The storage whose first rows are ``storage``, one of those that :func:`packed_rows` gave, over their arrays."""
    plane, rows = storage.plane(ROWWISE), len(arrays[0])
    whole = replace(plane.with_tensors(arrays), shape=(rows, plane.shape[1]))
    return replace(storage, shape=torch.Size((rows, *storage.shape[1:])), rowwise=whole)


def shared_by_rows(storage: QuantizedStorage) -> list[torch.Tensor]:
    """The scales and amaxes that rows share beyond their block: where pieces differ in them, they do not make one tensor."""
    planes = [plane for usage in storage.usages if not (plane := storage.plane(usage)).in_groups]
    shared = (getattr(plane, field) for plane in planes for field in ("scale", "amax") if field not in _row_fields(plane))
    return [value for value in shared if value is not None]


def _with_planes(storage: QuantizedStorage, shape: Sequence[int], change: Callable[[Plane], Plane]) -> QuantizedStorage:
    rowwise, columnwise = (change(storage.plane(usage)) if usage in storage.usages else None for usage in USAGES)
    return replace(storage, shape=torch.Size(shape), rowwise=rowwise, columnwise=columnwise)


def _has_rows(storage: QuantizedStorage) -> bool:
    """Whether the leading dimensions of the shape are the rows of every plane (not so for a flat view), and in one array, or in
    one for each entry of the first dimension.
    """
    planes = [storage.plane(usage) for usage in storage.usages]
    groups = (math.prod(storage.shape[1:-1]),) * storage.shape[0]
    whole = all(plane.shape == storage.matrix_shape for plane in planes)
    apart = all(isinstance(plane, GroupedPlane) and plane.sizes == groups for plane in planes if plane.in_groups)
    return len(storage.shape) > 1 and whole and apart


def _rows_per_block(plane: Plane) -> int:
    return plane.sizes[0] if isinstance(plane, GroupedPlane) else _block_rows(plane) or 1


def _block_rows(plane: Plane) -> int:
    """Rows that share a scale; 0: all of them."""
    return 0 if plane.format.block is None else plane.format.block[plane.usage != ROWWISE]


def _row_fields(plane: Plane) -> list[str]:
    """The fields of ``plane`` that are row parts."""
    if isinstance(plane, GroupedPlane):
        return [field for field in _FIELDS if getattr(plane.members[0], field) is not None]
    by_row = plane.format.per_row and plane.usage == ROWWISE
    has = True, plane.scale is not None and _block_rows(plane) > 0, plane.amax is not None and by_row
    return [field for field, present in zip(_FIELDS, has) if present]


_FIELDS = "data", "scale", "amax"


def _is_transposed(plane: Plane) -> bool:
    return plane.usage != ROWWISE and plane.format.transposed


def _rows_per_entry(plane: Plane, field: str) -> int:
    """Matrix rows in one entry of a row part."""
    if isinstance(plane, GroupedPlane):
        return plane.sizes[0]
    if field == "data" and _is_transposed(plane):
        return 8 // plane.layout.element.bits
    return _rows_per_block(plane) if field == "scale" else 1


def _row_part(plane: Plane, field: str) -> torch.Tensor:
    if isinstance(plane, GroupedPlane):
        return torch.stack([getattr(member, field) for member in plane.members])
    tensor: torch.Tensor = getattr(plane, field)
    if field == "data" and plane.format.family == "identity":
        return tensor.reshape(plane.shape)
    if field == "scale":
        lines = load_scale(tensor, plane.layout)
        return lines if plane.usage == ROWWISE else lines.t()
    return tensor.t() if field == "data" and _is_transposed(plane) else tensor


def _from_parts(plane: Plane, parts: dict[str, torch.Tensor], rows: int) -> Plane:
    """A plane like ``plane`` with ``rows`` rows, made of ``parts`` by field."""
    if isinstance(plane, GroupedPlane):
        like = plane.members[0].with_format(plane.format)
        members = [replace(like, **dict(zip(parts, entry))) for entry in zip(*parts.values())]
        return GroupedPlane(members, plane.sizes[:1] * len(members))
    shape = (rows, plane.shape[1])
    data = parts["data"].t().contiguous() if _is_transposed(plane) else parts["data"]
    made = replace(plane, shape=shape, data=data, amax=parts.get("amax", plane.amax))
    if "scale" not in parts:
        return made
    lines = parts["scale"] if plane.usage == ROWWISE else parts["scale"].t()
    return replace(made, scale=store_scale(lines, made.layout))
