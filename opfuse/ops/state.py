"""Checkpointing of what casts remember: delayed-scaling states, as plain tensors, under keys that no recipe changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opfuse.recipes import QuantizerRole
from opfuse.recipes.delayed import DelayedScalingStates


class QuantizerStateMixin:
    """Extra state of a module with ``quantizer_states``: a dictionary of tensors."""

    quantizer_states: DelayedScalingStates

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """States follow the parameters to another device."""
        for state in self.quantizer_states:
            state.to(fn(state.scale).device)
        return super()._apply(fn, recurse)  # type: ignore[misc]

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        """Every state tensor under ``role/field``, also of states that nothing was cast with yet.

        Which there are, and their shapes, depend on the op alone, so a model that has not run can be loaded into in place.
        OpfuseWarning for amaxes that were not finite: this is where the host reads states.
        """
        self.quantizer_states.tell(self._name)
        return self.quantizer_states.to_dict(self._state_roles, device=self._device)

    def set_extra_state(self, state: object) -> None:
        """Take :meth:`get_extra_state` back, all of it or nothing; may come before the first call.

        QuantizerError for anything else: no dictionary of tensors, roles that the op does not have, scales that are not finite
        and positive, tensors that claim more memory than they have.
        """
        self.quantizer_states.load_dict(state, slots=self._state_roles, device=self._device, where=f"{self._name} _extra_state")

    @property
    def _name(self) -> str:
        return self.label  # type: ignore[attr-defined, no-any-return]

    @property
    def _state_roles(self) -> tuple[QuantizerRole, ...]:
        return tuple(role for op in self.basic_ops for role in op.state_roles())  # type: ignore[attr-defined]

    @property
    def _device(self) -> torch.device | None:
        return next((p.device for p in self.parameters()), None)  # type: ignore[attr-defined]
