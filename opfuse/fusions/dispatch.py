"""Rows on their way to experts, cast as they are read."""

from __future__ import annotations

from typing import Any

import torch

from opfuse.compiler.rules import fusion, is_
from opfuse.core.context import Context


def dispatch_cast(x: torch.Tensor, *, dispatch: Context, quantize: Context) -> Any:
    """The rows of each group, read through their index by the kernel that casts them; no copy of them in high precision."""
    route = dispatch.op.route(dispatch, x)
    dispatch.set_extra_outputs(*route.extra_outputs)
    return quantize.op(route.x, route.extra_outputs[0], route.rows)


DISPATCH_CAST = fusion(
    "dispatch_cast",
    {"dispatch": "token_dispatch", "quantize": "quantize_groups"},
    when=(is_("quantize.ragged.inputs.family", "block"),),
    forward=dispatch_cast,
    extra_outputs=True,
)
