"""Ops that stand for a run of basic ops, as a user writes them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any

import torch
from torch import nn

from opfuse.core.context import Context, plain, plain_or_none
from opfuse.core.numbered import run_backward, run_forward
from opfuse.core.operation import BasicOperation, FusibleOperation, OptionalTensors
from opfuse.errors import PipelineError, describe


class FusedOperation(FusibleOperation):
    """An op that stands for a run of basic ops and runs them in its own way; it has no parameters of its own.

    Override ``fuser_forward``, ``fuser_backward`` or both; what is not overridden runs op by op. An extra input that another
    op of the same fused op produces arrives as None; an extra output that nobody outside reads may be None.
    """

    run_by = ("fuser_forward", "fuser_backward")

    def __init__(self, basic_ops: Iterable[BasicOperation]) -> None:
        super().__init__()
        ops = tuple(basic_ops)
        if not ops or not all(isinstance(op, BasicOperation) for op in ops):
            got, cure = [type(op).__name__ for op in ops], "pass the basic ops in forward order"
            raise PipelineError(describe(type(self).__name__, wanted="at least one BasicOperation", got=got, cure=cure))
        self._modules["basic_ops"] = nn.ModuleList(ops)

    @property
    def basic_ops(self) -> tuple[BasicOperation, ...]:
        return tuple(self._modules["basic_ops"])  # type: ignore[arg-type]

    def overrides(self, method: str) -> bool:
        """Whether it brings its own ``fuser_forward`` or ``fuser_backward``."""
        return method in self.__dict__ or getattr(type(self), method) is not getattr(FusedOperation, method)

    def fuser_forward(
        self,
        basic_op_ctxs: list[Context],
        input_: Any,
        *,
        basic_op_extra_inputs: Any,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: Any,
    ) -> tuple[Any, Any]:
        outputs: list[Any] = []
        channels: dict[str | None, Any] = {}
        for op, ctx, extras, kwargs in zip(self.basic_ops, basic_op_ctxs, basic_op_extra_inputs, basic_op_kwargs):
            ctx.extras = tuple(
                channels[channel.name] if extra is None else extra for extra, channel in zip(extras, op.extra_input_channels)
            )
            input_, given = run_forward(op, ctx, input_ if op.known.accepts_quantized else plain(input_), kwargs)
            outputs.append(given)
            channels |= zip((channel.name for channel in op.extra_output_channels), given)
        return input_, outputs

    def fuser_backward(
        self, basic_op_ctxs: list[Context], grad_output: Any, *, basic_op_grad_extra_outputs: Any
    ) -> tuple[Any, Any, Any]:
        params: list[OptionalTensors] = []
        extras: list[OptionalTensors] = []
        channels: dict[str | None, list[torch.Tensor]] = {}
        for op, ctx, given in reversed(list(zip(self.basic_ops, basic_op_ctxs, basic_op_grad_extra_outputs))):
            received = ((grad, *channels.pop(c.name, ())) for grad, c in zip(given, op.extra_output_channels))
            ctx.grad_extras = tuple(_sum(grads) for grads in received)
            grad_output, grad_params, grad_inputs = _backward(op, ctx, grad_output)
            for grad, channel in zip(grad_inputs, op.extra_input_channels):
                if channel.name is not None:
                    channels.setdefault(channel.name, []).append(grad)
            params.insert(0, grad_params)
            extras.insert(0, grad_inputs)
        return grad_output, params, extras


def _backward(op: BasicOperation, ctx: Context, grad_output: Any) -> tuple[Any, Any, Any]:
    """The gradients that one op of a fused op gives; None for everything where it wants or gets none."""
    if ctx.requires_grad and not all(grad is None for grad in (grad_output, *ctx.grad_extras)):
        grad_output = grad_output if op.known.accepts_quantized else plain_or_none(grad_output)
        return run_backward(op, ctx, grad_output)
    params = [parameter for parameter in op.parameter_values() if parameter is not None]
    return None, (None,) * len(params), (None,) * op.num_extra_inputs


def _sum(grads: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    present = [grad for grad in grads if grad is not None]
    return reduce(torch.add, present) if present else None
