"""Records whose groups of rows were cast apart: what they decode to knows nothing of the rows that pad a group."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from opfuse.tensors import GroupedPlane, QuantizedTensor
from opfuse.tensors.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    GroupedQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
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


@pytest.mark.parametrize("kind", QUANTIZERS)
@pytest.mark.parametrize("padded", [False, True])
def test_groups_are_taken_apart_and_put_together_again(kind, padded):
    sizes = SIZES if padded else (64, 32, 0, 128)
    made = GroupedQuantizer((QUANTIZERS[kind],) * len(sizes), sizes, padded=padded)(torch.randn(sum(sizes), 64))
    names, context = made.__tensor_flatten__()
    twin = QuantizedTensor.__tensor_unflatten__({name: getattr(made, name) for name in names}, context, made.shape, made.stride())
    for usage in made.record.usages:
        plane = twin.record.plane(usage)
        assert isinstance(plane, GroupedPlane)
        assert plane.sizes == sizes
        assert torch.equal(twin.dequantize(usage=usage), made.dequantize(usage=usage))
    assert twin.record.structure == made.record.structure


@pytest.mark.few
@pytest.mark.parametrize("kind", [*QUANTIZERS, "rotated"])
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize("rows", [33, 128])
def test_groups_of_rows_of_a_stack_decode_in_its_shape(rows, groups, kind):
    """Whether each matrix was cast apart, a part of it, or several as one; some are padded."""
    quantizer = {**QUANTIZERS, "rotated": NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)}[kind]
    x = torch.randn(3, rows, 64).bfloat16()
    at = [*range(0, 3 * rows, -(-3 * rows // groups)), 3 * rows]
    sizes = tuple(end - start for start, end in pairwise(at))
    made = GroupedQuantizer((quantizer,) * len(sizes), sizes, padded=rows == 33)(x)
    pieces = x.reshape(-1, 64).split(sizes)
    for usage in made.record.usages:
        full = [torch.cat((piece, piece.new_zeros(-len(piece) % (PADDING if rows == 33 else 1), 64))) for piece in pieces]
        alone = [quantizer(whole).dequantize(usage=usage)[: len(piece)] for whole, piece in zip(full, pieces)]
        assert torch.equal(made.dequantize(usage=usage), torch.cat(alone).view(x.shape)), usage
