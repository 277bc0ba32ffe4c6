"""Collectives as ops: a pipeline that is cut over ranks says itself where they meet.

They act along the first dimension, on high-precision values, over a process group (None: all ranks); outside of a distributed
run, and over one rank, each is a copy. The ranks of a group run the same pipeline, one call after the other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from opfuse.core.context import Context
from opfuse.core.operation import BasicOperation
from opfuse.core.spec import hyper_parameters
from opfuse.errors import ShapeError, describe

ProcessGroup = Any
"""A ``torch.distributed.ProcessGroup``; None for all ranks."""

_meetings: tuple[Any, ...] = tuple(  # names of torch 2.13 first
    getattr(dist, new, None) or getattr(dist, old, None)
    for new, old in (("all_gather_single", "all_gather_into_tensor"), ("reduce_scatter_single", "reduce_scatter_tensor"))
)
_GATHER, _SCATTER = _meetings


class _Collective(BasicOperation):
    saves = ()
    forward_kwargs = ()
    meets_ranks = True

    @hyper_parameters
    def __init__(self, process_group: ProcessGroup = None) -> None:
        super().__init__()
        self.process_group = process_group

    @property
    def process_group_size(self) -> int:
        """Ranks that meet."""
        is_distributed = dist.is_available() and dist.is_initialized()
        return dist.get_world_size(self.process_group) if is_distributed else 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy meets the same ranks: a group belongs to the process."""
        return type(self)(self.process_group)

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, in their order."""
        if (ranks := self.process_group_size) == 1:
            return x.clone()
        if not x.dim():
            raise ShapeError(describe(self.label, wanted="at least one dimension", got="a scalar", cure="pass x.reshape(1)"))
        rows = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
        _GATHER(rows, x.contiguous(), group=self.process_group)
        return rows

    def _scattered(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the rows of the sum over the ranks."""
        ranks = self.process_group_size
        if not x.dim() or x.shape[0] % ranks:
            wanted = f"a first dimension divisible by the {ranks} ranks"
            raise ShapeError(describe(self.label, wanted=wanted, got=tuple(x.shape), cure="pad the rows, or change their number"))
        if ranks == 1:
            return x.clone()
        rows = x.new_empty((x.shape[0] // ranks, *x.shape[1:]))
        _SCATTER(rows, x.contiguous(), group=self.process_group)
        return rows

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks."""
        total = x.clone(memory_format=torch.contiguous_format)
        if self.process_group_size > 1:
            dist.all_reduce(total, group=self.process_group)
        return total


class AllReduce(_Collective):
    """y = the sum of x over the ranks. What follows is computed alike on each of them, so their gradients are equal: dx = dy."""

    def op_forward(self, ctx: Context, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        return self._summed(input_)

    def op_backward(self, ctx: Context, grad_output: torch.Tensor) -> tuple[torch.Tensor, tuple[()]]:
        return grad_output, ()


class AllGather(_Collective):
    """y = the rows of all ranks, one rank's after the other's; dx = this rank's part of the rows of the sum of dy."""

    def op_forward(self, ctx: Context, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        return self._gathered(input_)

    def op_backward(self, ctx: Context, grad_output: torch.Tensor) -> tuple[torch.Tensor, tuple[()]]:
        return self._scattered(grad_output), ()


class ReduceScatter(_Collective):
    """y = this rank's part of the rows of the sum of x over the ranks; dx = dy of all ranks. ShapeError where there is none."""

    def op_forward(self, ctx: Context, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        return self._scattered(input_)

    def op_backward(self, ctx: Context, grad_output: torch.Tensor) -> tuple[torch.Tensor, tuple[()]]:
        return self._gathered(grad_output), ()
