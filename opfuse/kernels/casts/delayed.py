"""The update of delayed scaling: one launch for many states."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from opfuse.kernels.casts import trials
from opfuse.kernels.engine.compiling import Variant
from opfuse.kernels.engine.launch import Grid
from opfuse.kernels.engine.parameters import parameter_of
from opfuse.kernels.engine.registry import BITWISE, Launcher, kernel
from opfuse.kernels.engine.variants import variant_of
from opfuse.numerics import delayed as definition
from opfuse.numerics.delayed import UpdateRule, check_states

_STATE = parameter_of("delayed.cu", "State")
MOST = 100  # states of one launch: their addresses fill the 4000 bytes of its parameter
_THREADS = 256


@kernel("delayed.cu", reference=definition.delayed_update, tolerance=BITWISE, trials=trials.updates)
def delayed_update(
    launch: Launcher,
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    left_out: Sequence[torch.Tensor],
    rules: Sequence[UpdateRule],
) -> None:
    """One launch for every 100 states, with one block of threads for each state."""
    check_states(histories, scales, left_out, rules)
    variant, device = updating(), histories[0].get_device()
    states = [
        _STATE(
            history=history.data_ptr(),
            scale=scale.data_ptr(),
            left_out=count.data_ptr(),
            length=history.numel(),
            fp8_max=rule.fp8_max,
            margin=rule.margin,
            most_recent=rule.algorithm == "most_recent",
        )
        for history, scale, count, rule in zip(histories, scales, left_out, rules)
    ]
    for chunk in (states[i : i + MOST] for i in range(0, len(states), MOST)):
        part = parameter_of("delayed.cu", MOST=len(chunk))  # a shorter parameter: the kernel reads only the states of its blocks
        fields = part(state=chunk)
        launch(variant, "delayed_update", Grid(len(chunk), _THREADS), part.layout, *fields, device=device)


def updating() -> Variant:
    """The one variant for updates of any number of states."""
    return variant_of("delayed.cu", parameter_of("delayed.cu", MOST=MOST).layout, MOST=MOST)
