"""The exact gradient of a forward pass as it was computed, quantized and rounded: the chain rule in fp64, op by op."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from opfuse import ops
from opfuse.core.operation import FusibleOperation
from opfuse.errors import UnsupportedError, describe
from opfuse.ops.linear import BasicLinear
from opfuse.recipes import Recipe
from opfuse.tensors.tensor import QuantizedTensor
from opfuse.train.data import Batch
from opfuse.train.loop import region
from opfuse.train.model import ByteModel


class Flow(NamedTuple):
    """One tensor on its way: as the model computes it, quantized or not; and in fp64 with the same values and a gradient."""

    seen: torch.Tensor
    exact: torch.Tensor


def exact_gradients(model: ByteModel, batch: Batch, recipe: Recipe | None) -> list[torch.Tensor]:
    """fp64 gradients of the mean cross entropy for ``model.parameters()``, in their order, in evaluation mode.

    Each op is differentiated in fp64 at the values that it reads under ``recipe``; a cast, and any other rounding, has gradient 1
    (straight through). So a product y = Q(x) Q(w)^T has dx = dy Q(w) and dw = dy^T Q(x), whatever the recipe's backward does.

    UnsupportedError for an op with quantized operands that is no linear layer.
    """
    seen, exact = _apart(model), _apart(model).double()
    with torch.no_grad():
        columns = model.embedding(batch.context).flatten(1).to(model.dtype)
    flow = _flow(columns, exact.embedding(batch.context).flatten(1))
    channels: dict[str | None, Flow] = {}
    for op, seen_op, exact_op in zip(_ops(model), _ops(seen), _ops(exact)):
        extras = [channels[channel.name] for basic in op.basic_ops for channel in basic.extra_input_channels]
        with torch.no_grad(), region(recipe):
            made = _tuple(seen_op(flow.seen, *(extra.seen.clone() for extra in extras)))
        product = _product(seen_op)
        if product is None or recipe is None:
            outputs = _tuple(exact_op(flow.exact, *(extra.exact for extra in extras)))
        else:
            outputs = (_linear(product, exact_op, flow, recipe),)
        flow, *others = map(_flow, made, outputs)
        names = [channel.name for basic in op.basic_ops for channel in basic.extra_output_channels]
        channels.update(zip(names, others))
    value = nn.functional.cross_entropy(flow.exact, batch.target)
    return list(torch.autograd.grad(value, list(exact.parameters())))


def _ops(model: ByteModel) -> tuple[FusibleOperation, ...]:
    return tuple(cast(Iterable[FusibleOperation], model.pipeline))


def _apart(model: ByteModel) -> ByteModel:
    """A copy whose ops run one by one: extra tensors are given to each and returned by it."""
    model = copy.deepcopy(model).eval()
    for op in _ops(model):
        for basic in op.basic_ops:
            for i in range(basic.num_extra_inputs):
                basic.set_extra_input_channel(i, None)
            for i in range(basic.num_extra_outputs):
                basic.set_extra_output_channel(i, None)
    return model


def _product(op: FusibleOperation) -> BasicLinear | None:
    """The product of a linear layer; None if nothing that ``op`` reads is quantized."""
    for basic in op.basic_ops:
        if isinstance(basic, BasicLinear):
            return basic
        if basic.roles and not isinstance(basic, ops.Quantize):
            wanted, cure = "linear layers as the only ops with quantized operands", "study a pipeline without it"
            raise UnsupportedError(describe("exact gradient", wanted=wanted, got=op.label, cure=cure))
    return None


def _linear(product: BasicLinear, exact: Any, flow: Flow, recipe: Recipe) -> torch.Tensor:
    """Q(x) Q(w)^T + b in fp64, straight through both casts."""
    x = _flow(_cast(product, "input", flow.seen, recipe), flow.exact).exact
    weight = _flow(_cast(product, "weight", product.parameter("weight"), recipe), exact.weight).exact
    y = x @ weight.t()
    bias: torch.Tensor | None = getattr(exact, "bias", None)
    return y if bias is None else y + bias


@torch.no_grad()
def _cast(product: BasicLinear, role: str, value: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """What the forward product reads of an operand, fp32: its rowwise plane dequantized."""
    if not isinstance(value, QuantizedTensor):
        quantizer, _ = product.make_quantizer(role, recipe)
        value = quantizer.wanting(rowwise=True, columnwise=False)(value)
    return _values(value)


def _flow(seen: torch.Tensor, exact: torch.Tensor) -> Flow:
    """``exact`` with the values of ``seen`` and the gradient of what it was."""
    return Flow(seen, exact + (_values(seen).double() - exact).detach())


def _values(seen: torch.Tensor) -> torch.Tensor:
    """The values of a tensor: fp32 if it is quantized."""
    return seen.dequantize(dtype=torch.float32) if isinstance(seen, QuantizedTensor) else seen


def _tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
