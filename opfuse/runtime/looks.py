"""What a program depends on beside the key of its plan: how the tensors lie that come in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from opfuse.kernels.engine.variants import VECTOR
from opfuse.tensors.tensor import QuantizedTensor

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def look_of(tensors: Sequence[Any]) -> tuple[Any, ...] | None:
    """What a program depends on besides the plan's key: how tensors lie, and which of them are one.

    None if there is a tensor of a class that is not known, or two tensors for the same memory: each counts its own writes.
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
    """Those that there are, and after them the tensors of quantized ones."""
    there = [tensor for tensor in tensors if tensor is not None]
    planes = [plane for tensor in there if type(tensor) is QuantizedTensor for plane in tensor.held.tensors()]
    return [*there, *planes]
