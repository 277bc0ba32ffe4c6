"""Records whose groups of rows were cast apart: what they decode to knows nothing of the rows that pad a group."""

from __future__ import annotations

import pytest
import torch

from opfuse.tensors import GroupedPlane
from opfuse.tensors.quantizers import Float8BlockQuantizer, Float8CurrentScalingQuantizer, GroupedQuantizer, MXFP8Quantizer
from opfuse.tensors.quantizers.grouped import PADDING

E4M3 = torch.float8_e4m3fn
QUANTIZERS = {"mxfp8": MXFP8Quantizer(), "fp8_current": Float8CurrentScalingQuantizer(E4M3), "blocks": Float8BlockQuantizer(E4M3)}
SIZES = (33, 0, PADDING, 7)


@pytest.mark.row("B28")
@pytest.mark.parametrize("usage", ["rowwise", "columnwise"])
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_b28_padded_groups_decode_to_their_own_rows(kind, usage):
    x = torch.randn(sum(SIZES), 64, generator=torch.Generator("cpu").manual_seed(0), device="cpu").to(torch.get_default_device())
    padded = GroupedQuantizer((QUANTIZERS[kind],) * len(SIZES), SIZES, padded=True)(x)
    plane = padded.record.plane(usage)
    assert isinstance(plane, GroupedPlane)
    rows = [member.shape[0] for member in plane.members]
    assert rows == [-(-size // PADDING) * PADDING for size in SIZES]
    pieces = [torch.cat((piece, piece.new_zeros(row - len(piece), 64))) for piece, row in zip(x.split(SIZES), rows)]
    alone = [QUANTIZERS[kind](piece).dequantize(usage=usage)[:size] for piece, size in zip(pieces, SIZES) if size]
    assert plane.dequantize(torch.float32).shape == x.shape
    assert torch.equal(plane.dequantize(torch.float32), torch.cat(alone))
    assert torch.equal(padded.dequantize(usage=usage), torch.cat(alone))
