"""The update of delayed scaling, for many histories and scales at once.

1. Nonfinite entries of the history become 0; one in slot 0, the latest, is counted in ``left_out``. So an overflow of the loss
   costs one entry, and does not freeze the scale for the length of the history.
2. ``amax`` is the maximum of the history, or its slot 0, as the rule says.
3. ``scale = (element max / amax) / 2^margin`` in fp32, in this order of divisions; an infinite quotient becomes the largest fp32.
   An ``amax`` of 0 keeps the old scale.
4. The history moves by one: ``new[i] = old[i+1]``, ``new[L-1] = old[0]``, and slot 0 is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch

from opfuse.errors import QuantizerError, describe
from opfuse.numerics.scalars import FLT_MAX

Algorithm = Literal["max", "most_recent"]

ALGORITHMS = get_args(Algorithm)


class UpdateRule(NamedTuple):
    """How a scale is found from a history.

    fp8_max: the largest value of the element. margin: powers of two to stay below that. algorithm: which amax counts.
    """

    fp8_max: float
    margin: int
    algorithm: Algorithm


def delayed_update(
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    left_out: Sequence[torch.Tensor],
    rules: Sequence[UpdateRule],
) -> None:
    """Update contiguous fp32 histories (length,), of any lengths, fp32 scales (1,), int32 counts (1,), in place, on one device.

    QuantizerError if they are anything else, or not as many.
    """
    check_states(histories, scales, left_out, rules)
    for history, scale, count, rule in zip(histories, scales, left_out, rules):
        count += ~history[:1].isfinite()
        history.copy_(torch.where(history.isfinite(), history, 0.0))
        amax = history.amax(0, keepdim=True) if rule.algorithm == "max" else history[:1]
        # full_like: torch divides a Python number by a tensor through a reciprocal, which rounds twice.
        quotient = torch.full_like(amax, rule.fp8_max) / amax / 2.0**rule.margin
        quotient = torch.where(quotient.isinf(), FLT_MAX, quotient)
        scale.copy_(torch.where(amax > 0, quotient, scale))
        history.copy_(history.roll(-1))
        history[0] = 0


def check_states(
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    left_out: Sequence[torch.Tensor],
    rules: Sequence[UpdateRule],
) -> None:
    """QuantizerError unless these can be updated: a kernel would misread what is stored in another way."""
    if not len(histories) == len(scales) == len(left_out) == len(rules):
        got = f"{len(histories)}, {len(scales)}, {len(left_out)} and {len(rules)}"
        raise _refused("as many histories as scales, counts and rules", got)
    device = histories[0].get_device() if histories else 0
    for history, scale, count, rule in zip(histories, scales, left_out, rules):
        is_history = history.dtype is torch.float32 and history.stride() == (1,) and history.numel()
        is_state = is_history and _is_number(scale, torch.float32) and _is_number(count, torch.int32)
        if not is_state or not history.get_device() == scale.get_device() == count.get_device() == device:
            wanted = "fp32 histories (length,), contiguous, fp32 scales (1,) and int32 counts (1,) on one device"
            raise _refused(wanted, f"{_told(history)}, {_told(scale)} and {_told(count)}")
        if rule.algorithm not in ALGORITHMS:
            raise _refused(f"one of {', '.join(ALGORITHMS)}", rule.algorithm)


def _is_number(x: torch.Tensor, dtype: torch.dtype) -> bool:
    return x.dtype is dtype and x.numel() == 1


def _told(x: torch.Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)}, strides {x.stride()}, on {x.device}"


def _refused(wanted: str, got: object) -> QuantizerError:
    return QuantizerError(describe("delayed_update", wanted=wanted, got=got, cure="pass the states that the recipe made"))
