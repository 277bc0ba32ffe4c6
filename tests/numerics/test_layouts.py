"""Where bytes lie: shapes of the specification, tile order by formula and by permutation, padding."""

import numpy as np
import pytest
import torch

from opfuse.errors import QuantizerError
from opfuse.formats import E4M3, IDENTITY, NVFP4, fp8_block, fp8_row, fp8_tensor, mxfp8
from opfuse.numerics.layouts import Layout, from_tiles, load_scale, relayout_scale, store_scale, swizzle, to_tiles, unswizzle
from tests.oracles import casts

MX, BLOCK_1D, BLOCK_2D = mxfp8(E4M3), fp8_block(E4M3, 1), fp8_block(E4M3, 2)


@pytest.mark.parametrize(
    ("fmt", "usage", "shape", "data", "scale"),
    [
        (fp8_tensor(E4M3), "rowwise", (130, 200), (130, 200), (1,)),
        (fp8_tensor(E4M3), "columnwise", (130, 200), (200, 130), (1,)),
        (fp8_row(E4M3), "rowwise", (130, 200), (130, 200), (130,)),
        (fp8_row(E4M3), "columnwise", (130, 200), (200, 130), (200,)),
        (fp8_row(E4M3), "columnwise", (0, 200), (200, 0), (200,)),
        (BLOCK_1D, "rowwise", (130, 200), (130, 200), (2, 132)),
        (BLOCK_1D, "columnwise", (130, 200), (200, 130), (2, 200)),
        (BLOCK_2D, "rowwise", (130, 200), (130, 200), (2, 4)),
        (BLOCK_2D, "columnwise", (130, 700), (700, 130), (6, 4)),
        (MX, "rowwise", (160, 96), (160, 96), (256, 4)),
        (MX, "columnwise", (160, 96), (160, 96), (8, 128)),
        (NVFP4, "rowwise", (160, 96), (160, 48), (256, 8)),
        (NVFP4, "columnwise", (160, 96), (96, 80), (128, 12)),
        (MX, "rowwise", (0, 96), (0, 96), (0, 4)),
        (NVFP4, "columnwise", (0, 96), (96, 0), (128, 0)),
    ],
)
def test_shapes(fmt, usage, shape, data, scale):
    layout = Layout(fmt, usage, shape)
    assert layout.data_shape == data
    assert layout.scale_shape == scale


def test_amax_shapes():
    assert Layout(NVFP4, "rowwise", (32, 48)).amax_shape == (1,)
    assert Layout(NVFP4.replace(per_row=True), "rowwise", (32, 48)).amax_shape == (32,)
    assert Layout(NVFP4.replace(per_row=True), "columnwise", (32, 48)).amax_shape == (48,)
    assert Layout(MX, "rowwise", (32, 48)).amax_shape is None


def test_identity_has_no_codes():
    with pytest.raises(QuantizerError, match="identity data is the caller's own tensor"):
        _ = Layout(IDENTITY, "rowwise", (2, 2)).element


@pytest.mark.parametrize("shape", [(128, 4), (128, 12), (384, 8), (0, 4)])
def test_swizzle_permutation_is_the_offset_formula(shape):
    rows, cols = shape
    scale = torch.randint(0, 256, shape, dtype=torch.uint8)
    flat = swizzle(scale)
    assert flat.shape == (rows * cols,)
    for i in range(rows):
        for j in range(cols):
            offset = ((i // 128) * (cols // 4) + j // 4) * 512 + (i % 32) * 16 + (i % 128 // 32) * 4 + j % 4
            assert flat[offset] == scale[i, j]
    assert torch.equal(unswizzle(flat, shape), scale)


@pytest.mark.parametrize("fmt", [MX, NVFP4], ids=str)
@pytest.mark.parametrize("usage", ["rowwise", "columnwise"])
@pytest.mark.parametrize("shape", [(64, 64), (160, 416), (32, 96), (0, 128)])
def test_stored_scales_lie_where_the_formula_says(fmt, usage, shape):
    layout = Layout(fmt, usage, shape)
    scale = torch.randint(1, 256, layout.blocks, dtype=torch.uint8)
    for swizzled in (False, True):
        stored = store_scale(scale, layout.replace(swizzled=swizzled))
        assert stored.is_contiguous()
        assert stored.shape == layout.scale_shape
        assert np.array_equal(stored.numpy(), casts.store_tiled(scale.numpy(), across=layout.across, swizzled=swizzled))
        assert torch.equal(load_scale(stored, layout.replace(swizzled=swizzled)), scale)


@pytest.mark.row("D06")
@pytest.mark.parametrize("fmt", [MX, NVFP4], ids=str)
@pytest.mark.parametrize("usage", ["rowwise", "columnwise"])
def test_d06_swizzle_zeroes_poisoned_padding(fmt, usage):
    layout = Layout(fmt, usage, (64, 64))
    scale = torch.randint(1, 256, layout.blocks, dtype=torch.uint8)
    compact = store_scale(scale, layout)
    for poison in (torch.full_like(compact, 0xFF), torch.randint(1, 256, compact.shape, dtype=torch.uint8)):
        poisoned = torch.where(compact == 0, poison, compact)
        assert torch.equal(load_scale(poisoned, layout), scale)
        swizzled = relayout_scale(poisoned, layout, swizzled=True)
        assert torch.equal(swizzled, store_scale(scale, layout.replace(swizzled=True)))
        assert torch.equal(relayout_scale(swizzled, layout.replace(swizzled=True), swizzled=False), compact)


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("usage", ["rowwise", "columnwise"])
def test_block_scales_round_trip(dims, usage):
    layout = Layout(fp8_block(E4M3, dims), usage, (130, 300))
    scale = torch.rand(layout.blocks)
    stored = store_scale(scale, layout)
    assert np.array_equal(stored.numpy(), casts.store_blocks(scale.numpy(), dims=dims))
    assert torch.equal(load_scale(stored, layout), scale)


@pytest.mark.parametrize("shape", [(5, 7), (4, 6), (0, 6), (4, 0)])
def test_tiles_round_trip(shape):
    x = torch.randn(shape)
    tiles = to_tiles(x, (2, 3))
    assert tiles.shape == (-(-shape[0] // 2), 2, -(-shape[1] // 3), 3)
    assert torch.count_nonzero(tiles) == torch.count_nonzero(x)
    assert torch.equal(from_tiles(tiles, shape), x)
