"""How far gradients of one call are from those without a recipe: what a setting that saves bytes costs."""

from __future__ import annotations

import math

import torch
from torch import nn

from opfuse.inspect.observe import CallInputs, copied_call
from opfuse.torch_private.operations import tree_leaves


def gradients_of(model: nn.Module, given: CallInputs) -> list[torch.Tensor | None]:
    """The gradients of all trained parameters under the active recipe, for gradients of the outputs that are drawn from one seed.

    The call runs on copies, and neither ``.grad`` nor ``main_grad`` of the caller is written.
    """
    generator = torch.Generator().manual_seed(0)
    with copied_call(model, given) as call:
        outputs = [output for output in tree_leaves(call()) if isinstance(output, torch.Tensor) and output.requires_grad]
        wanted = [p for p in model.parameters() if p.requires_grad]
        if not (outputs and wanted):
            return []
        drawn = [torch.randn(output.shape, generator=generator).to(output) for output in outputs]
        grads = torch.autograd.grad(outputs, wanted, drawn, allow_unused=True)
        return [getattr(p, "main_grad", None) if grad is None else grad for p, grad in zip(wanted, grads)]


def error_of(found: list[torch.Tensor | None], exact: list[torch.Tensor | None]) -> float:
    """The norm of the difference of all gradients together, as a share of that of ``exact``; nan where there is none."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, exact) if a is not None and b is not None]
    off, whole = (
        math.fsum(float(each.square().sum()) for each in those) for those in ([a - b for a, b in pairs], [b for _, b in pairs])
    )
    return math.sqrt(off / whole) if whole else math.nan
