"""Looks of tensors: shapes, strides, alignment and identity, on which a program depends beside the key of its plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from opfuse.kernels.engine.variants import VECTOR
from opfuse.tensors.tensor import QuantizedTensor

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def look_of(tensors: Sequence[Any]) -> tuple[Any, ...] | None:
    """The look of ``tensors``: how each lies in memory, and which of them are the same.

    None for a tensor of an unknown class, and for two tensors over the same memory, since each counts its own writes.
    """
    look: list[Any] = []
    addresses: list[int] = []
    seen: list[torch.Tensor] = []
    for tensor in tensors:
        kind = type(tensor)
        if kind in _PLAIN:
            leaves = (tensor,)
        elif kind is QuantizedTensor:
            look.append((tensor.shape, tensor.signature))
            leaves = tensor.held.tensors()
        elif tensor is None:
            look.append(None)
            continue
        else:
            return None
        for leaf in leaves:
            address = leaf.data_ptr()
            if address:  # a tensor without elements, as of a group without rows, lies nowhere
                addresses.append(address)
                seen.append(leaf)
            look.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device, address % VECTOR))
    if len(set(addresses)) < len(addresses):
        first = [addresses.index(address) for address in addresses]
        if any(seen[i] is not leaf for i, leaf in zip(first, seen)):
            return None
        look += first
    return tuple(look)


def given(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors that are not None, followed by the planes of quantized ones."""
    there = [tensor for tensor in tensors if tensor is not None]
    planes = [plane for tensor in there if type(tensor) is QuantizedTensor for plane in tensor.held.tensors()]
    return [*there, *planes]
