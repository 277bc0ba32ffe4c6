"""Weight gradients that are added to a buffer of the parameter, as Megatron-LM keeps them.

``weight.main_grad`` is the caller's: fp32, in the shape and on the device of the weight. Attributes have the names of te.ops.
Gradients of groups are added by the product itself where it can.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from opfuse.errors import DtypeError, PipelineError, ShapeError, describe
from opfuse.numerics.pointwise import compute_dtype
from opfuse.tensors.gemm import Operand
from opfuse.tensors.gemm_grouped import Groups, add_wgrads, add_wgrads_of_runs, grouped_wgrad
from opfuse.torch_private.autograd import current_node, will_run


def main_grad_of(weight: nn.Parameter, *, where: str) -> torch.Tensor:
    """The buffer of a weight; PipelineError, DtypeError, ShapeError if there is none, or another than :func:`added` can write."""
    where = f"{where}.main_grad"
    cure = "before the backward pass, weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)"
    buffer = getattr(weight, "main_grad", None)
    if not isinstance(buffer, torch.Tensor):
        raise PipelineError(describe(where, wanted="a tensor to add the gradient to", got=buffer, cure=cure))
    if buffer.dtype != torch.float32:
        raise DtypeError(describe(where, wanted="torch.float32", got=buffer.dtype, cure=cure))
    if buffer.shape != weight.shape:
        raise ShapeError(describe(where, wanted=f"shape {tuple(weight.shape)}", got=tuple(buffer.shape), cure=cure))
    if buffer.device != weight.device:
        wanted = f"the weight's device {weight.device}"
        raise PipelineError(describe(where, wanted=wanted, got=str(buffer.device), cure=cure))
    return buffer


@torch.no_grad()
def added(weight: nn.Parameter, grad: torch.Tensor, *, where: str) -> torch.Tensor | None:
    """Add ``grad``, fp32, to the buffer; returns what autograd gets in its place.

    Where the weight has an attribute ``overwrite_main_grad`` that is true, the buffer is overwritten. Where it has an attribute
    ``grad_added_to_main_grad``, that becomes True, and autograd gets zeros without memory of their own, so that hooks of the
    weight run; else it gets None.
    """
    buffer = main_grad_of(weight, where=where).detach()
    if overwrites(weight):
        buffer.copy_(grad)
    else:
        buffer.add_(grad)
    return grad_for_autograd(weight)


with torch.inference_mode(False):
    LEAF: Any = type(get_gradient_edge(torch.zeros((), device="cpu", requires_grad=True)).node)
"""autograd's node of a parameter: adds to its ``grad``."""


def is_reached(leaf: Any) -> bool:
    """Whether the running backward pass runs ``leaf``; torch raises a RuntimeError if it only captures its gradient."""
    return will_run(leaf)


def is_asked_for(weight: nn.Parameter) -> bool:
    """Whether the running backward pass is asked for the gradient of a weight; not if it has other ``inputs=[x]`` alone.

    True also if the weight is no leaf of the node that runs, as in compiled code, where torch cannot tell.
    """
    node = current_node()
    leaves = [edge for edge, _ in node.next_functions if isinstance(edge, LEAF) and edge.variable is weight] if node else []
    try:
        return all(map(is_reached, leaves))
    except RuntimeError:  # torch.autograd.grad for the weight itself
        return True


def overwrites(weight: nn.Parameter) -> bool:
    """Whether the buffer of a weight is overwritten."""
    return bool(getattr(weight, "overwrite_main_grad", False))


def grad_for_autograd(weight: nn.Parameter) -> torch.Tensor | None:
    """What autograd gets in place of a gradient that is in the buffer, as :func:`added` says."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape)


def add_gradients_of_groups(
    weights: Mapping[str, nn.Parameter],
    names: tuple[str, ...],
    dy: Operand,
    x: Operand,
    groups: Groups,
    *,
    where: str,
    dtype: torch.dtype,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Add dW of groups to the buffers of ``weights``; returns what autograd gets in place of gradients, by name.

    names: those of all groups' weights, or of the one parameter (G, N, K) that holds them. groups: without sizes only if ``dy``
    and ``x`` were cast by sizes that stay on the device.
    """
    buffers = {name: main_grad_of(weight, where=f"{where} {name}").detach() for name, weight in weights.items()}
    whole = next((buffer for buffer in buffers.values() if buffer.ndim == 3), None)
    owners = dict(enumerate(names if whole is None else names * len(whole)))
    into = {i: buffers[name] if whole is None else whole[i] for i, name in owners.items() if name in buffers}
    new = {i for i in into if overwrites(weights[owners[i]])}
    kept = {i: into[i] for i in into if i not in new}
    fast = options.get("fast", False)
    if groups.sizes is None:
        add_wgrads_of_runs(dy, x, kept, {i: into[i] for i in new}, fast=fast)
    else:
        done = add_wgrads(dy, x, groups.sizes, kept, whole=whole, fast=fast)
        rest = [i for i in into if i not in done]
        grads = grouped_wgrad(dy, x, groups, wanted=rest, dtype=dtype, out_dtype=compute_dtype(dtype), **options) if rest else []
        for i in rest:
            grad = cast(torch.Tensor, grads[i])
            into[i].copy_(grad) if i in new else into[i].add_(grad)
    found = {name: grad_for_autograd(weight) for name, weight in weights.items()}
    return {name: grad for name, grad in found.items() if grad is not None}
