"""Steps of a causal language model on words of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def trained_on(words: torch.Tensor, model: nn.Module, optimizer: Any, steps: int) -> list[float]:
    """The loss before each step."""
    losses = []
    for _ in range(steps):
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
