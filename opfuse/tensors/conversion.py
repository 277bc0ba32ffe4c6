"""``Module.to``, ``.cuda()``, ``.half()`` and ``.to_empty`` on parameters that live quantized: each is converted in place.

torch alone would replace a parameter of a tensor subclass by another tensor, without the attributes and hooks of the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from opfuse.tensors.tensor import QuantizedTensor
from opfuse.torch_private.tensors import can_be_assigned, give_hooks, hooks_of

TensorChange = Callable[[torch.Tensor], torch.Tensor]


@contextmanager
def converted(parameters: dict[str, Any], change: TensorChange) -> Iterator[None]:
    """Apply ``change`` to the quantized ones among ``parameters``, in place; inside the block there is None in their places."""
    stored = {name: p for name, p in parameters.items() if isinstance(p, QuantizedTensor)}
    for parameter in stored.values():
        _convert(parameter, change)
    parameters.update(dict.fromkeys(stored))
    try:
        yield
    finally:
        parameters.update(stored)


@torch.no_grad()
def _convert(parameter: QuantizedTensor, change: TensorChange) -> None:
    new, grad = change(parameter), parameter.grad
    new_grad = None if grad is None else change(grad)
    if new is not parameter:
        parameter.grad = None
        _replace(parameter, new if isinstance(new, QuantizedTensor) else parameter.moved_to(new))
    if grad is not None and new_grad is not grad and can_be_assigned(grad, new_grad):
        grad.data = new_grad  # type: ignore[assignment]
        new_grad = grad
    parameter.grad = new_grad


def _replace(parameter: QuantizedTensor, new: QuantizedTensor) -> None:
    """Put what ``new`` holds into ``parameter``. To and from the meta device its autograd state is new, with the old hooks."""
    if can_be_assigned(parameter, new):
        parameter.data = new
        return
    others, hooks = parameter.other_attributes(), hooks_of(parameter)
    torch.utils.swap_tensors(parameter, nn.Parameter(new, requires_grad=parameter.requires_grad))
    parameter.__dict__.update(others)
    give_hooks(parameter, hooks)
