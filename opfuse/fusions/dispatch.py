"""The rules that cast rows for experts, and gradients of their results, as they read them, instead of copying them first."""

from __future__ import annotations

from typing import Any, cast

import torch

from opfuse.compiler.rules import fusion, is_, one_of
from opfuse.core.context import Context


def dispatch_cast(x: torch.Tensor, *, dispatch: Context, quantize: Context) -> Any:
    """The cast of the rows of each group, which the kernel reads through their index; they are not copied in high precision."""
    route = dispatch.op.route(dispatch, x)
    dispatch.set_extra_outputs(*route.extra_outputs)
    return quantize.op(route.x, route.extra_outputs[0], route.rows)


DISPATCH_CAST = fusion(
    "dispatch_cast",
    {"dispatch": "token_dispatch|token_permute", "quantize": "quantize_groups"},
    when=(one_of("quantize.ragged.inputs.family", "block", "row", "tensor"),),
    forward=dispatch_cast,
    extra_outputs=True,
)


def dispatch_exchange(x: torch.Tensor, *, dispatch: Context, exchange: Context) -> Any:
    """Rows for experts on other ranks, cast as they are read where codes travel; else copied in the order in which they go."""
    route = dispatch.op.route(dispatch, x)
    dispatch.set_extra_outputs(*route.extra_outputs)
    given = [route.extra_outputs[0], route.weights][: exchange.op.num_extra_inputs]
    of_dispatch = (made if extra is None else extra for extra, made in zip(exchange.extras, given))
    y, *extra_outputs = exchange.op.dispatch(exchange, route.x, route.rows, *of_dispatch)
    exchange.set_extra_outputs(*extra_outputs)
    return y


def backward_combine(dy: torch.Tensor, *, quantize: Context, combine: Context) -> Any:
    """The cast of the gradients of the rows that a token sums: each is the token's, which the kernel reads through an index."""
    rows, index = combine.op.gradient_rows(combine, dy)
    reader = cast(Context, quantize.reader)
    if reader.op.reads_gradient(reader.needs):
        reader.grad_output = rows.index_select(0, index)
    combine.set_grads(extras=(None,) * combine.op.num_extra_inputs)
    return quantize.op(rows, *quantize.extras, index)


BACKWARD_COMBINE = fusion(
    "backward_combine",
    {"quantize": "quantize_groups", "combine": "token_combine"},
    when=(one_of("quantize.ragged.gradients.family", "block", "row", "tensor"), is_("combine.weighted", False)),
    backward=backward_combine,
)

DISPATCH_EXCHANGE = fusion(
    "dispatch_exchange",
    {"dispatch": "token_dispatch|token_permute", "exchange": "all_to_all_dispatch"},
    forward=dispatch_exchange,
    extra_outputs=True,
)
