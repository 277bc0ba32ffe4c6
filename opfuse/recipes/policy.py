"""What a backward override means for the three products of a linear layer, as a table. GEMMS says which plane a product reads."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from opfuse.formats import COLUMNWISE, IDENTITY, ROWWISE
from opfuse.tensors.gemm import GEMMS
from opfuse.tensors.quantizers import Float8BlockQuantizer, HybridQuantizer, IdentityQuantizer, Quantizer
from opfuse.tensors.storage import QuantizedStorage


@dataclass(frozen=True)
class OverridePolicy:
    """What a backward override keeps: ``saved`` operands, and the precision in which the backward products run."""

    saved: Literal["columnwise", "rowwise", "original"]
    backward: Literal["quantized", "high_precision"]


OVERRIDES: Mapping[str | None, OverridePolicy] = {
    None: OverridePolicy(saved="columnwise", backward="quantized"),
    "dequantized": OverridePolicy(saved="rowwise", backward="high_precision"),
    "high_precision": OverridePolicy(saved="original", backward="high_precision"),
}
"""By a recipe's ``backward_override``. Its ``keep`` is another matter: it says which saved operands are made anew instead."""

SPLIT: dict[str, frozenset[str]] = {
    "backward": frozenset(("dgrad", "wgrad")),
    "all": frozenset(GEMMS),
    "none": frozenset(),
}
"""The products whose partial sums are added in fp32, by a recipe's ``split_accumulator``."""

KEPT_INPUT = Float8BlockQuantizer(torch.float8_e4m3fn, rowwise=True, columnwise=False, block_scaling_dim=1)
"""How ``keep="quantized"`` saves the input of an activation or a norm. Blocks of a row have scales of their own: a residual
stream has few columns a thousand times larger than the others, no value depends on another token, and one kernel does it all.
"""


@functools.cache
def planes(role: str, gemms: tuple[str, ...]) -> frozenset[str]:
    """The planes of ``role`` that ``gemms`` read."""
    reads = [
        pair
        for gemm in gemms
        for pair in ((GEMMS[gemm].left, GEMMS[gemm].left_plane), (GEMMS[gemm].right, GEMMS[gemm].right_plane))
    ]
    return frozenset(plane for reader, plane in reads if reader == role)


def cast_quantizer(quantizer: Quantizer, role: str, override: str | None, backward_gemms: tuple[str, ...]) -> Quantizer | None:
    """``quantizer`` narrowed to the planes that the products of a linear layer read; None if they read none.

    Under ``high_precision`` the columnwise plane of a forward operand is the caller's tensor itself, so that what is saved
    for backward is the original and not a copy.
    """
    policy = OVERRIDES[override]
    forward = () if role == "grad_output" else ("fprop",)
    backward = planes(role, backward_gemms)
    if policy.backward == "quantized":
        wanted = planes(role, forward + backward_gemms)
        return quantizer.wanting(rowwise=ROWWISE in wanted, columnwise=COLUMNWISE in wanted) if wanted else None
    if not forward:
        return None
    rowwise = quantizer.wanting(rowwise=True, columnwise=False)
    if policy.saved == "original" and backward:
        return HybridQuantizer(rowwise, IdentityQuantizer())
    return rowwise


def saved_planes(operand: QuantizedStorage, override: str | None) -> QuantizedStorage | object:
    """The part of a forward operand that the backward products read under ``override``."""
    saved = OVERRIDES[override].saved
    if saved == "original":
        plane = operand.columnwise
        if plane is not None and plane.format.family == IDENTITY.family:
            return plane.data
        saved = "rowwise"  # the only original of an operand that came quantized is its dequantized value
    why = f"backward_override={override!r} saves the {saved} plane only"
    return operand.only(ROWWISE if saved == "rowwise" else COLUMNWISE, why=why)
