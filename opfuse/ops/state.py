"""Checkpointing of what casts remember: delayed-scaling states, as plain tensors, under keys that no recipe changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from opfuse.recipes.delayed import DelayedScalingStates


class QuantizerStateMixin:
    """Extra state of a module with ``quantizer_states``: a dictionary of tensors, empty where scaling was never delayed."""

    quantizer_states: DelayedScalingStates

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """States follow the parameters to another device."""
        for state in self.quantizer_states:
            state.to(fn(state.scale).device)
        return super()._apply(fn, recurse)  # type: ignore[misc]

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        """Every state tensor under ``role/field``."""
        return self.quantizer_states.to_dict()

    def set_extra_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take :meth:`get_extra_state` back; may come before the first call."""
        device = next((p.device for p in self.parameters()), None)  # type: ignore[attr-defined]
        self.quantizer_states.load_dict(state, device=device)
