"""Gradients of one backward pass: summed by value number, and checked when an implementation leaves them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from opfuse.compiler.graph import Node
from opfuse.compiler.plan import Plan
from opfuse.core.context import Context, Value, in_memory, plain
from opfuse.core.protocol import check_tensor
from opfuse.errors import PipelineError, describe


class Left(NamedTuple):
    """Whose gradients some groups have made: of values by number, of parameters, and of values whose gradients stay apart."""

    values: tuple[int, ...]
    params: tuple[tuple[int, str], ...]
    apart: tuple[int, ...]


class Gradients:
    """Gradients of values by number, and of parameters by op and name.

    apart: values whose gradients are not summed, but taken one by one, in the order in which they were added.
    """

    def __init__(self, plan: Plan, contexts: Mapping[int, Context], apart: Sequence[int] = ()) -> None:
        self.plan, self.graph = plan, plan.graph
        self.contexts = contexts
        self.apart: dict[int, list[Value]] = {value: [] for value in apart}
        self.values: dict[int, Value] = {}
        self.params: dict[tuple[int, str], torch.Tensor | None] = {}

    def add(self, value: int, grad: Value | None) -> None:
        """Sum ``grad`` into the gradient of ``value``; values that want no gradient and None are ignored."""
        if grad is None or value not in self.graph.grads:
            return
        root, grad = self.graph.gradient_of(value), in_memory(grad)
        if root in self.apart:
            self.apart[root].append(grad)
            return
        earlier = self.values.get(root)
        self.values[root] = grad if earlier is None else plain(earlier) + plain(grad)

    def put(self, value: int, grad: Value | None) -> None:
        """Replace the gradient of ``value``."""
        if grad is not None:
            self.values[self.graph.gradient_of(value)] = in_memory(grad)

    def take(self, value: int) -> Value | None:
        """Remove and return the gradient of ``value``, or the next of its gradients if they are kept apart."""
        root = self.graph.gradient_of(value)
        if waiting := self.apart.get(root):
            return waiting.pop(0)
        return self.values.pop(root, None)

    def has(self, outputs: Sequence[int]) -> bool:
        """Whether any of these values received a gradient."""
        root = self.graph.root
        roots = [root.get(value, value) for value in outputs]
        return not self.values.keys().isdisjoint(roots)

    def rest(self) -> Gradients:
        """For the groups that follow: what is left of values, which are taken from here, and nothing of parameters yet."""
        rest = Gradients(self.plan, self.contexts, [*self.apart])
        rest.values, self.values = self.values, {}
        return rest

    def left(self) -> tuple[Left, list[Value]]:
        """Whose gradients these are, and the gradients, without those that are None."""
        params = {key: grad for key, grad in self.params.items() if grad is not None}
        apart = [(root, grad) for root, waiting in self.apart.items() for grad in waiting]
        left = Left((*self.values,), (*params,), tuple(root for root, _ in apart))
        return left, [*self.values.values(), *params.values(), *(grad for _, grad in apart)]

    def enter(self, left: Left, grads: Iterable[Any]) -> None:
        """Enter what groups have ``left``, after those of earlier groups."""
        each = iter(grads)
        self.values.update(zip(left.values, each))
        self.params.update(zip(left.params, each))
        for root, grad in zip(left.apart, each):
            self.apart[root].append(grad)

    def collect(self, node: Node) -> None:
        """File the parameter and extra gradients that the implementation left in the node's context."""
        context = self.contexts[node.index]
        if not (node.params or context.grad_params or len(node.inputs) > 1 or context.grad_inputs):
            return
        params = tuple((name, sig.shape) for name, sig in node.params if sig is not None)
        for (name, shape), grad in _paired(context, "parameters", params, context.grad_params):
            self.params[node.op, name] = needed = grad if name in node.needs else None
            if shape is not None and needed is not None and needed.shape != shape:
                _check_sums_to(f"{context.op.label} gradient of {name}", shape, needed.shape)
        for value, grad in _paired(context, "extra inputs", node.inputs[1:], context.grad_inputs):
            self.add(value, grad)


def _paired(context: Context, what: str, wanted: Sequence[Any], grads: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Pairs of ``wanted`` and ``grads``. PipelineError unless there are as many of both."""
    if len(grads) != len(wanted):
        cure = "return one gradient, or None, for each, in order"
        raise PipelineError(describe(f"{context.op.label} gradients of {what}", wanted=len(wanted), got=len(grads), cure=cure))
    return zip(wanted, grads)


def _check_sums_to(where: str, shape: torch.Size, got: torch.Size) -> None:
    """PipelineError unless autograd sums a gradient of shape ``got`` to ``shape``: over dimensions that were broadcast."""
    sizes = got[len(got) - len(shape) :]
    if len(got) < len(shape) or any(size not in (1, given) for size, given in zip(shape, sizes)):
        cure = "return gradients of parameters in their order, each in its parameter's shape"
        raise PipelineError(describe(where, wanted=f"shape {tuple(shape)}", got=tuple(got), cure=cure))


def check_input_gradient(context: Context | None, grad: Value | None) -> None:
    """PipelineError for a gradient that is no tensor, or of another shape than the input it belongs to."""
    if context is None or grad is None:
        return
    cure = "return a gradient of the input's shape from its backward"
    check_tensor(context.op, "gradient of the input", grad, cure)
    shape = context._input_shape
    if shape is not None and grad.shape != shape:
        where = f"{context.op.label} gradient of the input"
        raise PipelineError(describe(where, wanted=f"shape {tuple(shape)}", got=tuple(grad.shape), cure=cure))
