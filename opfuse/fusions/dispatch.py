"""The forward rules that cast rows for experts as they read them, instead of copying them first."""

from __future__ import annotations

from typing import Any

import torch

from opfuse.compiler.rules import fusion, one_of
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


DISPATCH_EXCHANGE = fusion(
    "dispatch_exchange",
    {"dispatch": "token_dispatch|token_permute", "exchange": "all_to_all_dispatch"},
    forward=dispatch_exchange,
    extra_outputs=True,
)
