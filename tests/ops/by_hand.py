"""The loop over masters written out: what ``with_masters`` is to be equal to."""

import torch


@torch.no_grad()
def step_by_hand(optimizer: torch.optim.Optimizer, masters: dict[torch.Tensor, torch.Tensor]) -> None:
    """One step of an optimizer over ``masters``, by the parameter: gradients in, casts out."""
    for p, master in masters.items():
        master.grad, p.grad = p.grad.float(), None
    optimizer.step()
    optimizer.zero_grad()
    for p, master in masters.items():
        p.copy_(master)
