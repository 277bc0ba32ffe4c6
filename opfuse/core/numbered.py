"""The protocol of te.ops, in which contexts, extra tensors and keyword arguments come in lists with a place for each basic op.

opfuse's own ops have ``op_forward`` and ``op_backward`` alone, and find everything else in their context. An op written for
te.ops overrides ``fuser_forward`` and ``fuser_backward``, and may take the quantizers of its neighbours, which are always None
here: casts are nodes of their own. A :class:`~opfuse.core.fused.FusedOperation`, which stands for several ops, has this protocol
alone.

This module is in core/ and not in te/ because the interpreter has to call such ops, and because a fused op that a user
registers has te.ops' protocol alone. A fused op of opfuse's own is a rule, whose function gets contexts by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from opfuse.core.context import Context
from opfuse.core.protocol import NEIGHBOURS, check_tensor, checked_gradients, checked_lists, checked_outputs, takes_neighbours


class NumberedMixin:
    """The methods of te.ops for one op, over its own."""

    op_forward: Callable[..., Any]
    op_backward: Callable[..., Any]

    def fuser_forward(
        self,
        basic_op_ctxs: list[Context],
        input_: Any,
        *,
        basic_op_extra_inputs: Sequence[tuple[torch.Tensor, ...]] | None = None,
        prev_op_grad_output_quantizer: Any = None,
        next_op_input_quantizer: Any = None,
        basic_op_kwargs: Sequence[Mapping[str, Any]] = ({},),
    ) -> tuple[Any, Sequence[Sequence[torch.Tensor | None]]]:
        """Output and, per basic op, its extra outputs."""
        (ctx,) = basic_op_ctxs
        if basic_op_extra_inputs is not None:
            ctx.extras = tuple(basic_op_extra_inputs[0])
        forward, given = self.op_forward, (prev_op_grad_output_quantizer, next_op_input_quantizer)
        neighbours = dict(zip(NEIGHBOURS, given)) if takes_neighbours(forward) else {}
        output, extras = checked_outputs(self, forward(ctx, input_, **neighbours, **basic_op_kwargs[0]))
        return output, [extras]

    def fuser_backward(
        self,
        basic_op_ctxs: list[Context],
        grad_output: Any,
        *,
        basic_op_grad_extra_outputs: Sequence[tuple[torch.Tensor | None, ...]] | None = None,
    ) -> tuple[Any, Sequence[Any], Sequence[Any]]:
        """Gradient of the input and, per basic op, of its parameters and of its extra inputs."""
        (ctx,) = basic_op_ctxs
        if basic_op_grad_extra_outputs is not None:
            ctx.grad_extras = tuple(basic_op_grad_extra_outputs[0])
        dx, params, extras = checked_gradients(self, ctx, self.op_backward(ctx, grad_output))
        return dx, [params], [extras]


def run_forward(op: Any, ctx: Context, x: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Sequence[Any]]:
    """The output of one op and its extra outputs, by the protocol that it was written for."""
    if not _is_numbered(op, "fuser_forward"):
        forward = op.op_forward
        return checked_outputs(op, forward(ctx, x, **(NEIGHBOURS if takes_neighbours(forward) else {}), **kwargs))
    found = op.fuser_forward([ctx], x, basic_op_extra_inputs=[ctx.extras], **NEIGHBOURS, basic_op_kwargs=[kwargs])
    y, (extras,) = checked_lists(op, "fuser_forward", found, 1)
    check_tensor(op, "fuser_forward", y, "return the output, then a list with a tuple of the extra outputs")
    return y, extras


def run_backward(op: Any, ctx: Context, dy: Any) -> tuple[Any, Any, Any]:
    """Gradients of one op's input, of its parameters, and of its extra inputs, by the protocol that it was written for."""
    if not _is_numbered(op, "fuser_backward"):
        return checked_gradients(op, ctx, op.op_backward(ctx, dy))
    found = op.fuser_backward([ctx], dy, basic_op_grad_extra_outputs=[ctx.grad_extras])
    dx, (params,), (extras,) = checked_lists(op, "fuser_backward", found, 1)
    return dx, params, extras


def _is_numbered(op: Any, method: str) -> bool:
    """Whether an op brings this method of te.ops itself."""
    return method in vars(op) or getattr(type(op), method) is not getattr(NumberedMixin, method)
