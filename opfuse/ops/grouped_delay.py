"""Weight gradients that are put off: which weights they are owed to, and what they are later computed from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from opfuse.core.context import Value, versions
from opfuse.errors import SavedTensorError, UnsupportedError, describe
from opfuse.ops.main_grad import LEAF, is_reached
from opfuse.torch_private.autograd import current_node

NamedWeights = Mapping[str, nn.Parameter]


@dataclass(frozen=True)
class PutOff:
    """What one backward pass owes ``weights``. product: computes their gradients, by name, from nothing but ``kept``."""

    label: str
    weights: NamedWeights
    kept: Mapping[str, Value | None]
    product: Callable[[], Mapping[str, torch.Tensor]]
    before: Mapping[str, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "before", self._writes())

    def _writes(self) -> dict[str, list[int]]:
        return {name: versions(value) for name, value in self.kept.items()}

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add to the ``grad`` of the weights that still train. SavedTensorError if what was kept has been written since."""
        for name, now in self._writes().items():
            if now != self.before[name]:
                wanted, got = "a tensor that stays as the backward pass left it", "one changed in place since"
                cure = "call backward_dw() before it is changed, or pass a clone"
                raise SavedTensorError(describe(f"{self.label}.backward_dw() {name}", wanted=wanted, got=got, cure=cure))
        for name, grad in self.product().items():
            weight = self.weights[name]
            if weight.requires_grad:
                weight.grad = grad if weight.grad is None else weight.grad + grad


def owed(weights: NamedWeights, *, where: str) -> dict[str, nn.Parameter]:
    """Those of ``weights`` to whose ``grad`` the running backward pass adds: all of them, or those among its ``inputs``.

    UnsupportedError if it returns their gradients instead (``torch.autograd.grad``), or if the forward pass computed with other
    tensors (``torch.func.functional_call``, a parameter replaced since): nothing could be handed to them later.
    """
    edges = [edge for edge, _ in current_node().next_functions]
    leaves = {id(edge.variable): edge for edge in edges if isinstance(edge, LEAF)}
    wanted = "a parameter of its own, whose grad backward() adds to"
    cure = "build the op without delay_wgrad_compute"
    for name, weight in weights.items():
        if id(weight) not in leaves:
            got = "another tensor in the forward pass"
            raise UnsupportedError(describe(f"{where}.{name} with delay_wgrad_compute", wanted=wanted, got=got, cure=cure))
    try:
        return {name: weight for name, weight in weights.items() if is_reached(leaves[id(weight)])}
    except RuntimeError as error:
        got = "torch.autograd.grad for its weights"
        raise UnsupportedError(describe(f"{where} with delay_wgrad_compute", wanted=wanted, got=got, cure=cure)) from error
