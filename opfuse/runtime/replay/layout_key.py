"""Looks of tensors: shapes, strides, alignment and identity, on which a program depends beside the key of its plan."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch

from opfuse.kernels.engine.variants import VECTOR
from opfuse.runtime.replay.recorder import PLAIN
from opfuse.tensors.tensor import QuantizedTensor

_PLAIN = frozenset(PLAIN)
_KNOWN = frozenset((*_PLAIN, QuantizedTensor, type(None)))

# Mapped over tensors, since every call of a pipeline looks at all that it reads: no function of Python runs for each.
_ADDRESS, _STRIDES, _SHOWN = torch.Tensor.data_ptr, torch.Tensor.stride, attrgetter("shape", "dtype", "device")
_OFFSET = (VECTOR - 1).__and__
"""An address modulo VECTOR, a power of two."""


def layout_key(tensors: Sequence[Any]) -> tuple[Any, ...] | None:
    """The layout of ``tensors``: how each lies in memory, and which of them are the same.

    None for a tensor of an unknown class, and for two tensors over the same memory, since each counts its own writes.
    """
    kinds = frozenset(map(type, tensors))
    plain = kinds <= _PLAIN
    if not plain and not kinds <= _KNOWN:
        return None
    leaves = tensors if plain else [leaf for tensor in tensors for leaf in _leaves(tensor)]
    addresses = [*map(_ADDRESS, leaves)]
    layout: list[Any] = [*map(_SHOWN, leaves), *map(_STRIDES, leaves), *map(_OFFSET, addresses)]
    if not plain:
        layout += [_structure(tensor) for tensor in tensors]
    if len(set(addresses)) < len(addresses):
        lying = [(leaf, address) for leaf, address in zip(leaves, addresses) if address]  # one without elements lies nowhere
        first = firsts([address for _, address in lying])
        if any(lying[i][0] is not leaf for i, (leaf, _) in zip(first, lying)):
            return None
        return (*layout, *first)
    return tuple(layout)


def firsts(values: Iterable[Hashable]) -> list[int]:
    """For each value the position of the first one that is equal: which of them are the same."""
    known: dict[Hashable, int] = {}
    return [known.setdefault(value, i) for i, value in enumerate(values)]


def _leaves(tensor: Any) -> Sequence[torch.Tensor]:
    """What lies in memory of a plain tensor, a quantized one or None."""
    if tensor is None:
        return ()
    return tensor.held.tensors() if type(tensor) is QuantizedTensor else (tensor,)


def _structure(tensor: Any) -> Any:
    """What a layout says of a tensor beside its leaves: which there are, and what they mean."""
    return (tensor.shape, tensor.signature) if type(tensor) is QuantizedTensor else tensor is None


def tensors_and_planes(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors that are not None, followed by the planes of quantized ones."""
    there = [tensor for tensor in tensors if tensor is not None]
    if QuantizedTensor in map(type, there):
        there += [plane for tensor in there if type(tensor) is QuantizedTensor for plane in tensor.held.tensors()]
    return there
