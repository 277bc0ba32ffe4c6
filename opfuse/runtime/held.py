"""What a call in a graph of torch.compile keeps for its backward pass, and how tensors pass into the graph and out of it."""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.autograd.graph import GradientEdge

from opfuse.errors import SavedTensorError, describe
from opfuse.recipes.counting import count_in
from opfuse.tensors.storage import share_memory
from opfuse.tensors.tensor import QuantizedTensor


class HeldCall(ctypes.c_int64 * 1):  # type: ignore[misc]
    """What one call left for its backward pass, and the memory of the tensor that stands for it.

    ends: where the gradient of each output enters, a tensor of one element; None for an output without gradient. begins: where
    those of arguments leave.
    """

    ends: list[torch.Tensor | None]
    begins: list[GradientEdge]


_calls: weakref.WeakValueDictionary[int, HeldCall] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def held_calls() -> int:
    """How many calls of compiled pipelines hold something for a backward pass."""
    return len(_calls)


def token_of(held: HeldCall) -> torch.Tensor:
    """The tensor that stands for it. Its memory is ``held`` itself, which lives as long as any tensor in that memory."""
    held[0] = next(_numbers)
    _calls[held[0]] = held
    return torch.frombuffer(held, dtype=torch.int64)


def held_by(token: torch.Tensor) -> HeldCall | None:
    """What a tensor stands for; None for a copy that outlived it."""
    return _calls.get(int(token))


class SavedTensor(NamedTuple):
    """A tensor that an op saved, and the count of its writes: autograd counts none where there are hooks."""

    tensor: torch.Tensor
    version: int

    def unpacked(self) -> torch.Tensor:
        """Autograd's hook."""
        if self.tensor._version != self.version:
            where, wanted = "backward of a compiled pipeline", "saved tensors as the forward pass left them"
            cure = "change parameters after the backward pass"
            raise SavedTensorError(describe(where, wanted=wanted, got="one changed in place since", cure=cure))
        return self.tensor


class Keeper:
    """Keeps what a call saves: of what lies in the memory of ``given`` a copy."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        self.given = given
        self.kept: list[torch.Tensor] = []
        self._copies: dict[Any, torch.Tensor] = {}

    def pack(self, tensor: torch.Tensor) -> SavedTensor:
        """Autograd's hook."""
        if _overlaps(tensor, self.given):
            place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
            if place not in self._copies:
                self._copies[place] = tensor.detach().clone()
            tensor = self._copies[place]
        else:
            self.kept.append(tensor)
        return SavedTensor(tensor, tensor._version)


def _overlaps(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    return any(share_memory(tensor, other) for other in others)


def apart(results: Iterable[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``results`` in memory that neither ``others`` nor another of them has, for a compiler may write over each."""
    made: list[torch.Tensor] = []
    for result in results:
        whole = result.detach().contiguous()
        made.append(whole.clone() if _overlaps(whole, [*others, *made]) else whole)
    return made


class _ArgumentNode(torch.autograd.Function):
    """An argument as the pipeline's own graph sees it: its node is where the gradient leaves, and holds no memory.

    A parameter that lives quantized is read itself; what stands for it has the memory of one element.
    """

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, QuantizedTensor):
            return torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> NoReturn:
        raise RuntimeError("no gradient goes beyond the arguments of a compiled pipeline")


class _ResultNode(torch.autograd.Function):
    """What looks like an output and has the memory of one element: torch 2.11 takes no node of a Function for an end.

    A backward pass of the pipeline begins here. outer: the pass that it is run in, for delayed scales.
    """

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        ctx.outer = None
        return output.new_empty(()).expand(output.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        count_in(ctx.outer)
        return grads[0]


enter: Callable[..., torch.Tensor] = _ArgumentNode.apply
leave: Callable[..., torch.Tensor] = _ResultNode.apply
