"""The forward rule that casts rows for experts as it reads them, instead of copying them first."""

from __future__ import annotations

from typing import Any

import torch

from opfuse.compiler.rules import fusion, one_of
from opfuse.core.context import Context


def dispatch_cast(x: torch.Tensor, *, dispatch: Context, quantize: Context) -> Any:
    """The cast of the rows of each group, which the kernel reads through their index; they are not copied in high precision."""
    route = dispatch.op.route(dispatch, x)
    dispatch.set_extra_outputs(*route.extra_outputs)
    return quantize.op(route.x, route.extra_outputs[0], route.rows)


DISPATCH_CAST = fusion(
    "dispatch_cast",
    {"dispatch": "token_dispatch|token_permute", "quantize": "quantize_groups"},
    when=(one_of("quantize.ragged.inputs.family", "block", "row", "tensor"),),
    forward=dispatch_cast,
    extra_outputs=True,
)
