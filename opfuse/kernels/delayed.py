"""The update of delayed scaling: many histories and scales in one launch.

An update leaves out what is not finite: a history entry that is infinite or NaN counts as 0, and one in slot 0, the latest, is
counted in ``left_out``. It then takes ``amax`` = the maximum of the history, or its slot 0; shifts the history
(``new[i] = old[i+1]``, ``new[L-1] = old[0]``, slot 0 zero); and sets ``scale = (element max / amax) / 2^margin`` in fp32, in this
order of divisions, infinite quotients becoming the largest fp32. An ``amax`` of 0 keeps the old scale. So one overflow of a loss
costs one entry of the history, rather than freezing the scale for as long as the history is.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, get_args

import torch

from opfuse.errors import QuantizerError, describe
from opfuse.kernels.launch import Grid
from opfuse.kernels.registry import BITWISE, Arguments, Launcher, kernel
from opfuse.kernels.scalars import FLT_MAX
from opfuse.kernels.variants import variant_of

Algorithm = Literal["max", "most_recent"]

_ALGORITHMS = get_args(Algorithm)

_STATE = "PPPifiI"
_MOST = 100  # states of a launch, in a parameter of 4000 bytes
_THREADS = 256


class UpdateRule(NamedTuple):
    """How a scale follows from a history: the largest value of the element, powers of two to stay below it, which amax counts."""

    fp8_max: float
    margin: int
    algorithm: Algorithm


def _definition(
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    left_out: Sequence[torch.Tensor],
    rules: Sequence[UpdateRule],
) -> None:
    """Update contiguous fp32 histories (length,), of any lengths, fp32 scales (1,), int32 counts (1,), in place, on one device.

    QuantizerError if they are anything else, or not as many.
    """
    _check(histories, scales, left_out, rules)
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


def _check(
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
        if rule.algorithm not in _ALGORITHMS:
            raise _refused(f"one of {', '.join(_ALGORITHMS)}", rule.algorithm)


def _is_number(x: torch.Tensor, dtype: torch.dtype) -> bool:
    return x.dtype is dtype and x.numel() == 1


def _told(x: torch.Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)}, strides {x.stride()}, on {x.device}"


def _refused(wanted: str, got: object) -> QuantizerError:
    return QuantizerError(describe("delayed_update", wanted=wanted, got=got, cure="pass the states that the recipe made"))


def _cases() -> Iterator[tuple[str, functools.partial[Arguments]]]:
    for length, algorithm in itertools.product((1, 2, 9, 1024, 1025, 5000), _ALGORITHMS):
        yield f"{length} slots, {algorithm}", functools.partial(_case, (length,) * 40, algorithm)
    yield "more states than a launch has room for", functools.partial(_case, tuple(range(1, 2 * _MOST + 2)), "max")


def _case(lengths: Sequence[int], algorithm: Algorithm, device: torch.device) -> Arguments:
    """Histories that begin with a hard value, are nothing else, or have it in their midst; all are neighbours in memory."""
    generator = torch.Generator().manual_seed(len(lengths) + lengths[0])
    hard = (0.0, torch.inf, torch.nan, 1e-45, 1e-38, FLT_MAX, 448.0, -1.0)
    histories = torch.exp2(torch.rand(sum(lengths), generator=generator) * 240 - 120)
    for i, history in enumerate(histories.split(lengths)):
        middle = len(history) // 2
        history[(slice(1), slice(None), slice(middle, middle + 1))[i // len(hard) % 3]] = hard[i % len(hard)]
    scales = torch.exp2(torch.rand(len(lengths), generator=generator) * 20 - 10)
    rules = [UpdateRule((448.0, 57344.0)[i % 2], (0, 1, -2, 100, -100)[i % 5], algorithm) for i in range(len(lengths))]
    counts = torch.arange(len(lengths), dtype=torch.int32)
    states = (list(x.to(device).split(parts)) for x, parts in ((histories, lengths), (scales, 1), (counts, 1)))
    return Arguments((*states, rules))


@kernel("delayed.cu", reference=_definition, tolerance=BITWISE, cases=dict(_cases()))
def delayed_update(
    launch: Launcher,
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    left_out: Sequence[torch.Tensor],
    rules: Sequence[UpdateRule],
) -> None:
    """One launch for each 100 states; a block each."""
    _check(histories, scales, left_out, rules)
    variant, device = variant_of("delayed.cu", _layout(_MOST), MOST=_MOST), histories[0].get_device()
    states = [
        (
            *(history.data_ptr(), scale.data_ptr(), count.data_ptr()),
            *(history.numel(), rule.fp8_max, rule.margin, rule.algorithm == "most_recent"),
        )
        for history, scale, count, rule in zip(histories, scales, left_out, rules)
    ]
    for chunk in (states[i : i + _MOST] for i in range(0, len(states), _MOST)):
        fields = itertools.chain.from_iterable(chunk)
        launch(variant, "delayed_update", Grid(len(chunk), _THREADS), _layout(len(chunk)), *fields, device=device)


@functools.cache
def _layout(states: int) -> struct.Struct:
    """The parameter as far as ``states`` fill it: what lies behind belongs to blocks that a launch does not have."""
    return struct.Struct(_STATE * states)
