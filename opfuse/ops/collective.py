"""Collectives as ops: a pipeline that is cut over ranks says itself where they meet.

They act along the first dimension, over a process group (None: all ranks); outside of a distributed run, and over one rank,
each is a copy. The ranks of a group run the same pipeline, one call after the other. Rows that a quantized product reads travel
as they are cast where the format can (:mod:`opfuse.compiler.collectives`), all others in high precision.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist

from opfuse.core.context import Context, Value, plain
from opfuse.core.operation import BasicOperation
from opfuse.core.spec import hyper_parameters
from opfuse.errors import ShapeError, describe
from opfuse.tensors.quantizers.ranks import in_distributed_run
from opfuse.tensors.row_collectives import PlaneTransfer, gathered, gathered_rows, scattered, summed, with_mirror
from opfuse.tensors.storage import QuantizedStorage

ProcessGroup = Any
"""A ``torch.distributed.ProcessGroup``; None for all ranks."""

_WHY = "it does not travel in this pass"
"""Why a plane is missing, for errors."""


class _Collective(BasicOperation):
    """An op over the ranks of ``process_group``, with what its subclasses do in either pass: gather, scatter, sum."""

    saves: ClassVar[tuple[str, ...]] = ()
    forward_kwargs = ()

    @hyper_parameters
    def __init__(self, process_group: ProcessGroup = None) -> None:
        super().__init__()
        self.process_group = process_group

    @property
    def process_group_size(self) -> int:
        """Ranks that meet."""
        return dist.get_world_size(self.process_group) if in_distributed_run() else 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy meets the same ranks: a group belongs to the process."""
        return type(self)(self.process_group)

    def _gathered(self, ctx: Context, x: Value) -> Value:
        """The rows of all ranks, in their order; of a cast, the planes that travel in this pass."""
        x, ranks = _values(ctx, x), self.process_group_size
        if isinstance(x, QuantizedStorage):
            transfer = cast(PlaneTransfer, ctx.transfer)
            if ranks > 1:
                x = gathered_rows(x.only(*transfer.now, why=_WHY), ranks, self.process_group)
            return with_mirror(x) if transfer.mirror else x
        if ranks == 1:
            return x.clone()
        if not x.dim():
            raise ShapeError(describe(self.label, wanted="at least one dimension", got="a scalar", cure="pass x.reshape(1)"))
        return gathered(x, ranks, self.process_group)

    def _scattered(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the rows of the sum over the ranks."""
        ranks = self.process_group_size
        if not x.dim() or x.shape[0] % ranks:
            wanted = f"a first dimension divisible by the {ranks} ranks"
            raise ShapeError(describe(self.label, wanted=wanted, got=tuple(x.shape), cure="pad the rows, or change their number"))
        if ranks == 1:
            return x.clone()
        return scattered(x, ranks, self.process_group)

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks."""
        return x.clone() if self.process_group_size == 1 else summed(x, self.process_group)


class AllReduce(_Collective):
    """y = the sum of x over the ranks. What follows is computed alike on each of them, so their gradients are equal: dx = dy."""

    traits = frozenset(("sums",))
    accepts_quantized = True

    def op_forward(self, ctx: Context, input_: Value, **_: Any) -> torch.Tensor:
        return self._summed(plain(input_))

    def op_backward(self, ctx: Context, grad_output: Value) -> tuple[Value, tuple[()]]:
        return _values(ctx, grad_output), ()


class SumGradients(_Collective):
    """y = x; dx = the sum of dy over the ranks, of which each has computed a part of what follows."""

    traits = frozenset(("spreads",))
    accepts_quantized = True

    def op_forward(self, ctx: Context, input_: Value, **_: Any) -> Value:
        return _values(ctx, input_)

    def op_backward(self, ctx: Context, grad_output: Value) -> tuple[torch.Tensor, tuple[()]]:
        return self._summed(plain(grad_output)), ()


class AllGather(_Collective):
    """y = the rows of all ranks, one rank's after the other's; dx = this rank's part of the rows of the sum of dy.

    A plane that only the backward pass reads stays where it was cast until then, so that each rank saves its own rows alone.
    """

    traits = frozenset(("gathers",))
    accepts_quantized = True
    saves = ("rows",)

    def op_forward(self, ctx: Context, input_: Value, **_: Any) -> Value:
        later = () if ctx.transfer is None else ctx.transfer.later
        stays = isinstance(input_, QuantizedStorage) and later
        ctx.save(rows=cast(QuantizedStorage, input_).only(*later, why=_WHY) if stays else None)
        return self._gathered(ctx, input_)

    def op_backward(self, ctx: Context, grad_output: Value) -> tuple[torch.Tensor, tuple[()]]:
        return self._scattered(plain(grad_output)), ()

    def reads_saved(self, ctx: Context) -> Collection[str]:
        return ()

    def remake(self, contexts: Sequence[Context], cast: Any) -> Value:
        (ctx,) = contexts
        return gathered_rows(ctx.saved.rows, self.process_group_size, self.process_group)


class ReduceScatter(_Collective):
    """y = this rank's part of the rows of the sum of x over the ranks; dx = dy of all ranks. ShapeError where there is none."""

    traits = frozenset(("scatters",))
    accepts_quantized = True

    def op_forward(self, ctx: Context, input_: Value, **_: Any) -> torch.Tensor:
        return self._scattered(plain(input_))

    def op_backward(self, ctx: Context, grad_output: Value) -> tuple[Value, tuple[()]]:
        return self._gathered(ctx, grad_output), ()


def _values(ctx: Context, x: Value) -> Value:
    """``x`` quantized if its cast travels in this plan, else in high precision."""
    return x if ctx.transfer is not None else plain(x)
