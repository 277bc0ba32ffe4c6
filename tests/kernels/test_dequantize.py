"""Dequantize as it is launched: where it looks for scales, and what it leaves to the definition."""

import math

import pytest
import torch

from opfuse.errors import QuantizerError
from opfuse.formats import COLUMNWISE, E4M3, MXFP4, NVFP4, ROWWISE, USAGES, fp8_block, fp8_row, fp8_tensor, mxfp8
from opfuse.kernels.casts import block as cast_block
from opfuse.kernels.casts import dequantize as decode
from opfuse.numerics import dequantize
from opfuse.numerics.casts import amax_nv, cast_nv, cast_tensor
from opfuse.numerics.hadamard import SIGNS
from opfuse.numerics.layouts import Layout, lines_of, load_scale, relayout_scale
from tests.kernels.catalogue import CASES
from tests.numerics.matrices import within

CPU, FP32 = torch.device("cpu"), torch.float32
FP8 = (fp8_tensor(E4M3), fp8_row(E4M3), fp8_block(E4M3, 1), fp8_block(E4M3, 2), mxfp8(E4M3))


def scale_index(layout, row, column):
    """The kernel's formula for the scale of an element, in torch."""
    scales = decode._scales(layout)
    r, c = row >> scales.row_shift, column >> scales.column_shift
    if not scales.tiles_across:
        return r * scales.row_stride + c * scales.column_stride
    line, block = (c, r) if scales.row_shift else (r, c)
    tile = line // 128 * scales.tiles_across + block // 4
    return tile * 512 + line % 32 * 16 + line % 128 // 32 * 4 + block % 4


@pytest.mark.row("D03")
@pytest.mark.parametrize("shape", [(1, 16), (65, 96), (259, 68), (300, 1040)], ids=str)
@pytest.mark.parametrize("usage", USAGES)
@pytest.mark.parametrize("fmt", FP8, ids=str)
def test_d03_every_element_finds_its_scale(fmt, usage, shape):
    rows, columns = torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij")
    for layout in {Layout(fmt, usage, shape), Layout(fmt, usage, shape, swizzled=fmt.family in ("mx", "nv"))}:
        compact = torch.arange(math.prod(layout.scale_shape))
        stored = compact.view(layout.scale_shape)
        if layout.swizzled:
            stored = relayout_scale(stored, layout.replace(swizzled=False), swizzled=True)
        found = stored.flatten()[scale_index(layout, rows, columns)]
        if fmt.block is None:
            assert (found == 0).all()
            continue
        blocks = load_scale(stored, layout)
        spread = blocks.repeat_interleave(layout.block[0], 0).repeat_interleave(layout.block[1], 1)
        assert torch.equal(found, lines_of(spread[: layout.lines[0], : layout.lines[1]], usage))


def launched(*args, **kwargs):
    """What dequantize launches for these arguments, and what it returns."""
    entries = []
    result = decode.dequantize.run(lambda variant, entry, *_, **__: entries.append(entry), *args, **kwargs)
    return entries, result


@pytest.mark.row("D02")
def test_d02_misfits_take_the_definition():
    x = within(64, 48, torch.bfloat16)
    layout = Layout(NVFP4.replace(rht=SIGNS), COLUMNWISE, (64, 48))
    amax = amax_nv(x, layout)
    ((data, scale),) = cast_nv(x, [amax], [layout])
    assert launched(data, scale, amax, layout=layout, dtype=torch.bfloat16)[0] == ["decode_columns"]

    plain = layout.replace(format=NVFP4)
    assert launched(data, scale, amax, layout=plain, dtype=torch.bfloat16)[0] == ["decode_columns"]
    assert launched(data, scale, amax, layout=plain.replace(usage=ROWWISE, shape=(48, 64)), dtype=FP32)[0] == ["decode_rows"]
    turned = scale.t().contiguous().t()
    for misfit in ((data, turned, amax), (data.t().contiguous().t(), scale, amax)):
        entries, got = launched(*misfit, layout=plain, dtype=torch.bfloat16)
        assert entries == []
        assert torch.equal(got, dequantize.dequantize(data, scale, amax, layout=plain, dtype=torch.bfloat16))
    assert launched(data, scale, amax, layout=plain, dtype=torch.float64)[0] == []


@pytest.mark.row("D01")
def test_d01_orientation_decides_the_entry():
    shape = (32, 64)
    for fmt in FP8:
        for usage in USAGES:
            layout = Layout(fmt, usage, shape)
            data = torch.zeros(layout.data_shape, dtype=torch.uint8)
            scale = torch.zeros(layout.scale_shape, dtype=torch.uint8 if layout.tiled else torch.float32)
            entries, out = launched(data, scale, None, layout=layout, dtype=torch.float16)
            turned = usage == COLUMNWISE and fmt.family != "mx"
            assert entries == ["dequantize_tile" if turned else "dequantize_rows"]
            assert (out.shape, out.dtype) == (shape, torch.float16)


@pytest.mark.row("D04")
def test_d04_an_empty_plane_launches_nothing():
    layout = Layout(fp8_tensor(E4M3), ROWWISE, (0, 128))
    (data,) = cast_tensor(torch.empty(0, 128), torch.ones(1), [layout])
    out = decode.dequantize(data, torch.ones(1), None, layout=layout, dtype=torch.bfloat16)
    assert (out.shape, out.dtype) == ((0, 128), torch.bfloat16)


def test_blocks_of_two_formats_are_refused():
    x = torch.randn(8, 8)
    layouts = [Layout(fp8_block(E4M3, dims), usage, (8, 8)) for dims, usage in zip((1, 2), USAGES)]
    with pytest.raises(QuantizerError, match=r"cast_block: wants planes of one format .*, got fp8_block_1d_e4m3 and fp8_block"):
        cast_block.cast_block.run(lambda *_, **__: None, x, layouts)


def test_planes_of_the_cases_are_of_random_bytes_with_random_padding():
    case = CASES[decode.dequantize]["MX e4m3, rowwise, compact, odd, fp32"](CPU)
    data, scale, _ = case.args
    assert data.unique().numel() == scale.unique().numel() == 256
    assert scale.shape == (128, 12)  # 67 x 9 are read


@pytest.mark.parametrize("usage", USAGES)
def test_a_kernel_decodes_mxfp4_although_none_casts_it(usage):
    layout = Layout(MXFP4, usage, (64, 96))
    assert (layout.is_decoded, layout.is_known) == (True, False)
    data, scale = (torch.zeros(shape, dtype=torch.uint8) for shape in (layout.data_shape, layout.scale_shape))
    entries, _ = launched(data, scale, None, layout=layout, dtype=torch.bfloat16)
    assert entries == ["decode_columns" if usage == COLUMNWISE else "decode_rows"]
