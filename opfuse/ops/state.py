"""Checkpointing of what casts remember: delayed-scaling states, as plain tensors, under keys that no recipe changes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from opfuse.recipes.delayed import DelayedScalingStates


class QuantizerStateMixin:
    """Extra state of a module with ``quantizer_states``: a dictionary of tensors, empty where scaling was never delayed."""

    quantizer_states: DelayedScalingStates

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        """Every state tensor under ``role/field``."""
        return self.quantizer_states.to_dict()

    def set_extra_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take :meth:`get_extra_state` back; may come before the first call."""
        device = next((p.device for p in self.parameters()), None)  # type: ignore[attr-defined]
        self.quantizer_states.load_dict(state, device=device)
