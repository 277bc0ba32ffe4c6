"""Weight gradients of groups, added to ``main_grad`` (main_grad.py): by the product itself where it can add."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from opfuse.numerics.pointwise import compute_dtype
from opfuse.ops.main_grad import grad_for_autograd, main_grad_of, overwrites
from opfuse.tensors.gemm import Operand
from opfuse.tensors.gemm_grouped import Groups, add_wgrads, add_wgrads_of_runs, grouped_wgrad


def add_gradients(
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
    """Add dW to the buffers of ``weights``; returns what autograd gets in place of gradients, by name.

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
        added = add_wgrads(dy, x, groups.sizes, kept, whole=whole, fast=fast)
        rest = [i for i in into if i not in added]
        grads = grouped_wgrad(dy, x, groups, wanted=rest, dtype=dtype, out_dtype=compute_dtype(dtype), **options) if rest else []
        for i in rest:
            grad = cast(torch.Tensor, grads[i])
            into[i].copy_(grad) if i in new else into[i].add_(grad)
    found = {name: grad_for_autograd(weight) for name, weight in weights.items()}
    return {name: grad for name, grad in found.items() if grad is not None}
