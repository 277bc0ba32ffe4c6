"""Whole records at once: map their tensors, compare their layouts, copy their bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from opfuse.tensors.storage import QuantizedStorage


def map_tensors(storage: QuantizedStorage, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedStorage:
    """The same storage over changed tensors; a tensor that planes share is changed once and stays shared."""
    changed: dict[int, torch.Tensor] = {}
    for tensor in storage.tensors():
        if id(tensor) not in changed:
            changed[id(tensor)] = change(tensor)
    return storage.with_tensors([changed[id(tensor)] for tensor in storage.tensors()])


def decoded(storage: QuantizedStorage, dtype: torch.dtype | None = None, usage: str | None = None) -> torch.Tensor:
    """Dequantized values in memory of their own: an identity plane is copied."""
    values = storage.dequantize(dtype, usage)
    own = all(values.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() for tensor in storage.tensors())
    return values if own else values.clone()


def covers(source: QuantizedStorage, target: QuantizedStorage) -> bool:
    """Whether ``source`` holds, in the layout of ``target``, every plane that ``target`` holds."""
    return all(
        getattr(source, usage) is not None and source.plane(usage).layout == target.plane(usage).layout for usage in target.usages
    )


def tensor_pairs(target: QuantizedStorage, source: QuantizedStorage) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor of ``target`` with its counterpart in ``source``, which :func:`covers` it."""
    return [
        pair for usage in target.usages for pair in zip(target.plane(usage).tensors(), source.plane(usage).tensors(), strict=True)
    ]


def with_shape(storage: QuantizedStorage, shape: Sequence[int]) -> QuantizedStorage:
    """The same planes under another shape of as many elements."""
    return replace(storage, shape=torch.Size(shape))


def as_matrix(storage: QuantizedStorage) -> QuantizedStorage:
    """The same planes under the shape of the matrix that they encode, whatever view of it the record is."""
    return with_shape(storage, storage.plane(storage.usages[0]).shape)
