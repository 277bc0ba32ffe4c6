"""Ops that move rows to experts on other ranks and back, behind a :class:`~opfuse.ops.TokenPermute` or
:class:`~opfuse.ops.TokenDispatch` over all experts, and before the :class:`~opfuse.ops.TokenCombine`.

Between the two, each rank of the process group has an equal part of the experts, in order, and the rows of all ranks for them.
Under a recipe, what a grouped product casts travels as it is cast, in about half the bytes: rows to their experts, and gradients
of the experts' results. Their way back is in the dtype of the op.

What travels: row-wise codes, if the ranks can make those of a cast behind the collective. Where codes by rows and by columns are
the same values (per tensor), every product has the operands that it has on one rank. Where they are not (blocks, MX, rows), the
weights' gradient is of the codes by rows, decoded and cast by columns: another rounding, which is the same over any number of
ranks. Values travel under delayed scaling, NVFP4, a backward override that reads them, to an op that is no product, and with
``quantized=False``; casts are then those of one rank. ``explain`` says what travels and why.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from opfuse.compiler.collectives import why_values_go
from opfuse.compiler.graph import DISPATCHES, RETURNS, CastSpec
from opfuse.core.context import Context, Value, plain
from opfuse.core.spec import Size, hyper_parameters, spec_fields
from opfuse.errors import ShapeError, SpecError, describe, number_of
from opfuse.events import ValuesRead, emit, listeners
from opfuse.ops.collective import ProcessGroup, _Collective
from opfuse.tensors.expert_rows import Exchange, cast_for_experts, exchange_of, to_experts, to_tokens
from opfuse.tensors.groups import check_splits
from opfuse.tensors.quantizers import Quantizer


class _AllToAll(_Collective):
    """num_groups: all experts. quantized: whether codes travel where they can."""

    @hyper_parameters
    def __init__(self, num_groups: Size, process_group: ProcessGroup = None, *, quantized: bool = True) -> None:
        super().__init__(process_group)
        if num_groups % self.process_group_size:
            wanted, cure = f"a multiple of the {self.process_group_size} ranks", "spread the experts over fewer ranks"
            raise SpecError(describe(f"{type(self).__name__}.num_groups", wanted=wanted, got=num_groups, cure=cure))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        options = {name: getattr(self.spec, name) for name in spec_fields(self) if name != "process_group"}
        copy = type(self)(**options, process_group=self.process_group)
        copy.__dict__.update(name=self.name, _channels=tuple(map(list, self._channels)))
        return copy.train(self.training)

    def _exchange(self, own: torch.Tensor, counts: torch.Tensor, order: torch.Tensor) -> Exchange:
        if ValuesRead in listeners():  # in either pass, also of a segment that has one of the two ops alone
            emit(ValuesRead("how many rows go to other ranks"))
        sent, received = counts.tolist()
        rank = dist.get_rank(self.process_group) if self.process_group_size > 1 else 0
        return Exchange(own, sent, received, order, self.process_group, rank)

    def _quantizer(self, ctx: Context) -> Quantizer | None:
        """That of the operand of the product that reads what travels, if its codes do."""
        cast: CastSpec | None = ctx.cast_there
        return None if cast is None or why_values_go(cast, ctx.env, self.spec) else cast.quantizer


class AllToAllDispatch(_AllToAll):
    """y: the rows of this rank's experts, from all ranks, expert by expert, of x (rows, features), expert by expert on each rank.

    Extra input: ``splits``, int64 or int32 (num_groups,), the rows of each of all experts here. Extra outputs: ``own``, int64
    (num_groups / ranks,), the rows of each expert of this rank, of the last one with rows of zeros that a GPU has behind them;
    and for :class:`AllToAllReturn` ``counts``, int64 (2, ranks) on the CPU, the rows sent to each rank and received from each,
    and ``order``, int64 (rows received,), where each row was among them. The host waits for the device once. DtypeError or
    ShapeError for other splits.

    weighted: a second extra input, ``weights``, floating point (rows,), and a fourth extra output, those of the rows of y, in
    their dtype; of rows of zeros, 0.
    """

    traits = frozenset((DISPATCHES,))
    saves = ("own", "counts", "order")
    num_extra_inputs = 1
    most_extra_inputs = 2
    num_extra_outputs = 3

    @hyper_parameters
    def __init__(
        self, num_groups: Size, process_group: ProcessGroup = None, *, quantized: bool = True, weighted: bool = False
    ) -> None:
        if weighted:
            self.__dict__.update(num_extra_inputs=2, num_extra_outputs=4)
        super().__init__(num_groups, process_group, quantized=quantized)

    def op_forward(self, ctx: Context, input_: torch.Tensor, **_: Any) -> Any:
        return self.dispatch(ctx, input_, None, *ctx.extras)

    def dispatch(
        self,
        ctx: Context,
        x: torch.Tensor,
        index: torch.Tensor | None,
        splits: torch.Tensor,
        weights: torch.Tensor | None = None,
    ) -> Any:
        """The outputs for the rows ``x[index]``; None: those of ``x``."""
        if x.ndim != 2:
            cure = "flatten the leading dimensions"
            raise ShapeError(describe(f"{self.label} input", wanted="shape (rows, features)", got=tuple(x.shape), cure=cure))
        check_splits(splits, self.num_groups, where=self.label)
        ctx.input_dtype, x = x.dtype, x.to(ctx.dtype_of(x))
        own, counts, order = exchange_of(splits.to(x.device), self.process_group_size, self.process_group, where=self.label)
        exchange, quantizer = self._exchange(own, counts, order), self._quantizer(ctx)
        rows = len(x) if index is None else len(index)
        if sum(exchange.sent) != rows:
            wanted, cure = f"{number_of(rows, 'row')}, those of the input", "pass the splits of the op that sorted the rows"
            raise ShapeError(describe(f"{self.label} split sizes", wanted=wanted, got=sum(exchange.sent), cure=cure))
        y: Value
        if quantizer is None:
            y = to_experts(x if index is None else x.index_select(0, index), exchange)
        else:
            y = cast_for_experts(quantizer, x, splits, exchange, index)
        ctx.save(**dict.fromkeys(self.saves) if not ctx.needs else {"own": own, "counts": counts, "order": order})
        if weights is None:
            return y, own, counts, order
        self.checked_dtype("weights", weights.dtype)
        if weights.shape != (rows,):
            cure = "pass the weights that the op that sorted the rows has given"
            raise ShapeError(describe(f"{self.label} weights", wanted=(rows,), got=tuple(weights.shape), cure=cure))
        return y, own, counts, order, to_experts(weights, exchange)

    def op_backward(
        self, ctx: Context, grad_output: Value | None
    ) -> tuple[torch.Tensor | None, tuple[()], tuple[torch.Tensor | None, ...]]:
        exchange = self._exchange(ctx.saved.own, ctx.saved.counts, ctx.saved.order)
        dx = None if grad_output is None else to_tokens(plain(grad_output), exchange).to(ctx.input_dtype)
        d_weights = ctx.grad_extras[3] if self.spec.weighted else None
        return dx, (), (None, None if d_weights is None else to_tokens(d_weights, exchange))[: self.num_extra_inputs]


class AllToAllReturn(_AllToAll):
    """y: the results for this rank's rows, expert by expert; of x (rows, features), those of this rank's experts for all ranks.

    Extra inputs: ``splits``, int64 or int32 (num_groups,), the rows of each of all experts here; and ``own``, ``counts`` and
    ``order``, the extra outputs of the :class:`AllToAllDispatch`.
    """

    traits = frozenset((RETURNS,))
    saves = ("splits", "own", "counts", "order")
    num_extra_inputs = 4

    def op_forward(self, ctx: Context, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        splits, own, counts, order = ctx.extras
        ctx.input_dtype, x = input_.dtype, input_.to(ctx.dtype_of(input_))
        exchange = self._exchange(own, counts, order)
        if len(x) != exchange.room:
            cure = "pass what the AllToAllDispatch that made the rows has given"
            wanted = number_of(exchange.room, "row")
            raise ShapeError(describe(f"{self.label} input", wanted=wanted, got=tuple(x.shape), cure=cure))
        kept = dict.fromkeys(self.saves) if not ctx.needs else {"splits": splits, "own": own, "counts": counts, "order": order}
        ctx.save(**kept)
        return to_tokens(x, exchange)

    def op_backward(self, ctx: Context, grad_output: torch.Tensor) -> tuple[Value, tuple[()], tuple[None, ...]]:
        saved = ctx.saved
        exchange, quantizer = self._exchange(saved.own, saved.counts, saved.order), self._quantizer(ctx)
        dy = grad_output.to(ctx.input_dtype)
        if quantizer is None:
            return to_experts(dy, exchange), (), (None,) * 4
        return cast_for_experts(quantizer, dy, saved.splits, exchange), (), (None,) * 4
