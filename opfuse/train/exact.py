"""The exact gradient of a forward pass as it was computed, quantized and rounded: the chain rule in fp64, op by op."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from opfuse import ops
from opfuse.core.operation import BasicOperation, FusibleOperation
from opfuse.errors import UnsupportedError, describe
from opfuse.recipes import Recipe
from opfuse.recipes.autocast import under
from opfuse.tensors.quantizers import Quantizer
from opfuse.tensors.tensor import QuantizedTensor
from opfuse.train.data import Batch
from opfuse.train.model import ByteModel


class Flow(NamedTuple):
    """One tensor on its way.

    seen: as the model computes it, quantized or not. exact: in fp64 with the same values and a gradient. plain: seen, or what
    was quantized: a grouped layer casts that, group by group.
    """

    seen: torch.Tensor
    exact: torch.Tensor
    plain: torch.Tensor

    @classmethod
    def of(cls, seen: torch.Tensor, exact: torch.Tensor, source: torch.Tensor) -> Flow:
        """``exact`` with the values of ``seen`` and the gradient of what it was; integers have none.

        source: where ``seen`` comes from, if it is quantized: nothing but casts and copies gives quantized values.
        """
        plain = source if isinstance(seen, QuantizedTensor) else seen
        return cls(seen, exact + (_values(seen).double() - exact).detach() if seen.is_floating_point() else seen, plain)


class OpCall(NamedTuple):
    """One op at work: as the model has it, and in fp64; what goes in, extra inputs last; and what came out of the former."""

    op: Any
    exact: Any
    inputs: Sequence[Flow]
    outputs: Sequence[torch.Tensor]
    recipe: Recipe | None


def exact_gradients(model: ByteModel, batch: Batch, recipe: Recipe | None) -> list[torch.Tensor]:
    """fp64 gradients of the mean cross entropy for ``model.parameters()``, in their order, in evaluation mode.

    Each op is differentiated in fp64 at the values that it reads under ``recipe``; a cast, and any other rounding, has gradient 1
    (straight through), and a choice, such as an expert for a token, stays as it was made. So a product y = Q(x) Q(w)^T has
    dx = dy Q(w) and dw = dy^T Q(x), whatever the recipe's backward does; so has each group of a grouped one.

    UnsupportedError for an op with quantized operands that is no linear layer, grouped or not.
    """
    seen, exact = _apart(model), _apart(model).double()
    with torch.no_grad():
        columns = model.embedding(batch.context).flatten(1).to(model.dtype)
    flow = Flow.of(columns, exact.embedding(batch.context).flatten(1), columns)
    channels: dict[str | None, Flow] = {}
    for op, seen_op, exact_op in zip(_ops(model), _ops(seen), _ops(exact)):
        rule = _rule(seen_op)
        inputs = [flow, *(channels[channel.name] for channel in op.extra_input_channels)]
        x = flow.plain if rule is _grouped else flow.seen
        with torch.no_grad(), under(recipe):
            outputs = _tuple(seen_op(x, *(extra.seen.clone() for extra in inputs[1:])))
        made = rule(OpCall(seen_op, exact_op, inputs, outputs, recipe))
        flow, *others = (Flow.of(seen, exact, flow.plain) for seen, exact in zip(outputs, made))
        channels.update(zip((channel.name for channel in op.extra_output_channels), others))
    value = nn.functional.cross_entropy(flow.exact, batch.target)
    return list(torch.autograd.grad(value, list(exact.parameters()), materialize_grads=True))


def _ops(model: ByteModel) -> tuple[BasicOperation, ...]:
    return tuple(basic for op in cast(Iterable[FusibleOperation], model.pipeline) for basic in op.basic_ops)


def _apart(model: ByteModel) -> ByteModel:
    """A copy whose ops run one by one: extra tensors are given to each and returned by it."""
    model = copy.deepcopy(model).eval()
    for op in _ops(model):
        for i in range(op.num_extra_inputs):
            op.set_extra_input_channel(i, None)
        for i in range(op.num_extra_outputs):
            op.set_extra_output_channel(i, None)
    return model


# -- ops -----------------------------------------------------------------------------------------------------------------


def _itself(call: OpCall) -> tuple[torch.Tensor, ...]:
    """The op in fp64; what is nothing but a cast does nothing there."""
    return _tuple(call.exact(*(flow.exact for flow in call.inputs)))


def _linear(call: OpCall) -> tuple[torch.Tensor, ...]:
    """Q(x) Q(w)^T, straight through both casts."""
    return (_operand(call, "input") @ _operand(call, "weight").t(),)


def _grouped(call: OpCall) -> tuple[torch.Tensor, ...]:
    """Q(x_i) Q(w_i)^T + s b_i for each group i, where s are the scales of its rows; straight through all casts."""
    x, splits, *scales = call.inputs
    sizes = splits.seen.tolist()
    weights = [
        w for name in call.op.weight_names for w in _operand(call, name).reshape(-1, call.op.out_features, x.exact.shape[-1])
    ]
    rows = _operand(call, "input", sizes).reshape(-1, x.exact.shape[-1])
    y = torch.cat([piece @ weight.t() for piece, weight in zip(rows.split(sizes), weights)])
    if call.op.bias_names:
        biases = torch.cat([call.exact.parameter(name).reshape(-1, y.shape[-1]) for name in call.op.bias_names])
        terms = biases.repeat_interleave(splits.seen, 0)
        y = y + (terms * scales[0].exact.reshape(-1, 1) if scales else terms)
    return (y.reshape(*x.exact.shape[:-1], y.shape[-1]),)


def _dispatch(call: OpCall) -> tuple[torch.Tensor, ...]:
    """Rows and probabilities of the groups that were chosen: another rounding could choose others."""
    _, splits, _, places = call.outputs
    x, weight = call.inputs[0].exact, call.exact.parameter("weight")
    chosen = torch.bucketize(places, splits.cumsum(0), right=True)
    picked = (x @ weight.t()).softmax(-1).gather(1, chosen)
    order = places.flatten().argsort()
    return x.index_select(0, order // chosen.shape[1]), splits, picked.flatten().index_select(0, order), places


RULES: dict[type[BasicOperation], Callable[[OpCall], tuple[torch.Tensor, ...]]] = {
    ops.BasicLinear: _linear,
    ops.GroupedLinear: _grouped,
    ops.TokenDispatch: _dispatch,
}
"""What stands for an op in fp64; for others, the op itself."""


def _rule(op: BasicOperation) -> Callable[[OpCall], tuple[torch.Tensor, ...]]:
    for cls, rule in RULES.items():
        if isinstance(op, cls):
            return rule
    if op.quantized_roles() and not op.is_cast:
        wanted, cure = "linear layers as the only ops with quantized operands", "study a pipeline without it"
        raise UnsupportedError(describe("exact gradient", wanted=wanted, got=op.label, cure=cure))
    return _itself


# -- casts ---------------------------------------------------------------------------------------------------------------


def _operand(call: OpCall, role: str, sizes: Sequence[int] = ()) -> torch.Tensor:
    """An operand of the forward product in fp64. sizes: rows of each group of the input of a grouped layer."""
    x, *_ = call.inputs
    if role == "input":
        seen, exact = x.plain if call.op.cast_groups(role) else x.seen, x.exact
    else:
        seen, exact = call.op.parameter(role), call.exact.parameter(role)
    return Flow.of(_cast(call, role, seen, sizes), exact, seen).exact


@torch.no_grad()
def _cast(call: OpCall, role: str, value: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """What the forward product reads of an operand, fp32: its rowwise plane dequantized, of each group on its own."""
    if call.recipe is None or isinstance(value, QuantizedTensor):
        return _values(value)
    quantizer, states = call.op.make_quantizer(role, call.recipe)
    groups = call.op.cast_groups(role)
    if not groups:
        return _rowwise(quantizer, value)
    each = [state.quantizer(quantizer.fp8_dtype) for state in states] or [quantizer] * groups
    rows = value.reshape(-1, value.shape[-1])
    pieces = rows.split(list(sizes) or len(rows) // groups)
    return torch.cat([_rowwise(one, piece) if len(piece) else piece for one, piece in zip(each, pieces)]).view(value.shape)


def _rowwise(quantizer: Quantizer, x: torch.Tensor) -> torch.Tensor:
    return _values(quantizer.wanting(rowwise=True, columnwise=False)(x))


def _values(seen: torch.Tensor) -> torch.Tensor:
    """The values of a tensor: fp32 if it is quantized."""
    return seen.dequantize(dtype=torch.float32) if isinstance(seen, QuantizedTensor) else seen


def _tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
