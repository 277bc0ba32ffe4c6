"""Whole records at once: map their tensors, compare their layouts, take them apart and put them together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from opfuse.formats import COLUMNWISE, ROWWISE, USAGES, NumberFormat
from opfuse.kernels.engine.launch import check_capture
from opfuse.numerics.layouts import Layout, layout_of, load_data, load_scale, store_data, store_scale
from opfuse.numerics.scales import are_pow2
from opfuse.tensors.groups import GroupedPlane
from opfuse.tensors.storage import INNER_NAMES, Plane, QuantizedStorage


def map_tensors(storage: QuantizedStorage, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedStorage:
    """A copy of the storage over changed tensors; a tensor that planes share is changed once and stays shared."""
    changed: dict[int, torch.Tensor] = {}
    for tensor in storage.tensors():
        if id(tensor) not in changed:
            changed[id(tensor)] = change(tensor)
    return storage.with_tensors([changed[id(tensor)] for tensor in storage.tensors()])


def decoded(storage: QuantizedStorage, dtype: torch.dtype | None = None, usage: str | None = None) -> torch.Tensor:
    """Dequantized values in memory of their own: an identity plane is copied."""
    plane = storage.plane(usage or storage.usages[0])
    values = storage.dequantize(dtype, plane.usage)
    return values.clone() if plane.format.family == "identity" and values.dtype == plane.data.dtype else values


def mirrored(rowwise: Plane) -> Plane:
    """The columnwise plane of the values of ``rowwise``, whose quantizer says ``planes_agree``: tiles of them share a scale."""
    if rowwise.is_mirror:
        return rowwise.transposed()
    source, layout = rowwise.layout, layout_of(rowwise.format, COLUMNWISE, rowwise.shape, rowwise.swizzled)
    step = source.block[1] // source.block[0]
    scale = load_scale(cast(torch.Tensor, rowwise.scale), source)[::step].t().repeat_interleave(step, 0)
    return replace(
        rowwise,
        usage=COLUMNWISE,
        data=store_data(load_data(rowwise.data, source).t(), layout),
        scale=store_scale(scale[: layout.blocks[0]], layout),
    )


def covers(source: QuantizedStorage, target: QuantizedStorage) -> bool:
    """Whether ``source`` holds, in the layout of ``target``, every plane that ``target`` holds, with scales as it says of them.

    The host reads scales of which ``target`` says more than ``source`` does; UnsupportedError while a CUDA graph is captured.
    """
    pairs = [(getattr(source, usage), target.plane(usage)) for usage in target.usages]
    alike = all(one is not None and _lies(one) == _lies(other) for one, other in pairs)
    return alike and all(_has_scales_of(*pair) for pair in pairs)


def _lies(plane: Plane) -> Layout:
    """The layout of a plane, whatever is known of its values."""
    return plane.with_format(plane.format.as_stored).layout


def _has_scales_of(source: Plane, target: Plane) -> bool:
    """Whether scales of ``source`` are powers of two wherever ``target`` says that its own are."""
    said = [(one, other.format.pow2 and not one.format.pow2) for (_, one), (_, other) in zip(source.parts(), target.parts())]
    return all(_has_powers(part) for part, unknown in said if unknown)


def _has_powers(plane: Plane) -> bool:
    scale = cast(torch.Tensor, plane.scale)
    if scale.is_meta:
        return True
    check_capture(f"a copy of {plane.format} scales", got="values that the host has to read", cure="copy before the capture")
    return are_pow2(scale)


def formats_of(storage: QuantizedStorage) -> dict[str, NumberFormat]:
    """The formats of the planes of ``storage``, by usage."""
    return {usage: storage.plane(usage).format for usage in storage.usages}


def known_format(plane: Plane) -> NumberFormat:
    """The format of ``plane``, with what its arrays say of their values, for which the host reads them."""
    scales = [cast(torch.Tensor, part.scale) for _, part in plane.parts() if plane.format.family == "block"]
    known = bool(scales) and all(not scale.is_meta and are_pow2(scale) for scale in scales)
    return plane.format.replace(pow2=known)


def with_formats(storage: QuantizedStorage, formats: Mapping[str, NumberFormat]) -> QuantizedStorage:
    """The same bytes, of whose values is known what ``formats``, by usage, say (``NumberFormat.pow2``): nothing without one."""
    old = formats_of(storage)
    new = {usage: fmt.as_stored for usage, fmt in old.items()}
    new |= {usage: fmt for usage, fmt in formats.items() if new.get(usage) == fmt.as_stored}
    rowwise, columnwise = (storage.plane(usage).with_format(new[usage]) if usage in new else None for usage in USAGES)
    unchanged = rowwise is storage.rowwise and columnwise is storage.columnwise
    return storage if unchanged else replace(storage, rowwise=rowwise, columnwise=columnwise)


def tensor_pairs(target: QuantizedStorage, source: QuantizedStorage) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor of ``target`` with its counterpart in ``source``, which :func:`covers` it."""
    return [
        pair for usage in target.usages for pair in zip(target.plane(usage).tensors(), source.plane(usage).tensors(), strict=True)
    ]


def with_shape(storage: QuantizedStorage, shape: Sequence[int]) -> QuantizedStorage:
    """A copy of the storage under another shape of as many elements."""
    return replace(storage, shape=torch.Size(shape))


def as_matrix(storage: QuantizedStorage) -> QuantizedStorage:
    """The same planes under the shape of the matrix that they encode, whatever view of it the record is."""
    return with_shape(storage, storage.plane(storage.usages[0]).shape)


def assemble(tensors: Mapping[str, torch.Tensor], made: tuple[Any, ...], shape: Sequence[int]) -> QuantizedStorage:
    """The storage whose ``named_tensors`` and ``structure`` these are."""
    dtype, why, described = made
    planes: dict[str, Plane] = {}
    for sizes, parts in described:
        built = []
        for i, (usage, fmt, matrix, swizzled) in enumerate(parts):
            number = "" if sizes is None else i
            data, scale, amax = (tensors.get(f"{name}{number}") for name, (owner, _) in INNER_NAMES.items() if owner == usage)
            built.append(Plane(usage, fmt, matrix, data, scale, amax, swizzled))  # type: ignore[arg-type]
        planes[built[0].usage] = built[0] if sizes is None else GroupedPlane(built, sizes)
    return QuantizedStorage(torch.Size(shape), dtype, planes.get(ROWWISE), planes.get(COLUMNWISE), why)
