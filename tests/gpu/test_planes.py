"""Block casts and dequantize of more than 2^31 elements, compared on the GPU, part by part."""

import pytest
import torch

from opfuse.formats import COLUMNWISE, E4M3, ROWWISE, USAGES, fp8_block, fp8_tensor, mxfp8
from opfuse.kernels.casts.block import cast_block
from opfuse.kernels.casts.dequantize import dequantize
from opfuse.numerics.layouts import Layout

PART = 2**27
SHAPES = [(2**21 + 32, 1024), (1040, 2**21 + 24), (1, 2**31 + 16), (2**31 + 16, 1)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_usage = pytest.mark.parametrize("usage", USAGES)


def repeated(pattern, shape):
    """4096 times the same values, which is fast to make, as a matrix."""
    return pattern.repeat(4096)[: shape[0] * shape[1]].view(shape)


def parts(shape):
    """Slices along the longer side, of about ``PART`` elements."""
    long = int(shape[1] > shape[0])
    step = PART // shape[1 - long]
    for start in range(0, shape[long], step):
        yield (slice(None),) * long + (slice(start, start + step),)


@pytest.mark.slow
@each_usage
@each_shape
@pytest.mark.parametrize("fmt", [fp8_tensor(E4M3), fp8_block(E4M3, 1), mxfp8(E4M3)], ids=str)
def test_r10_dequantize_past_2_31(fmt, shape, usage, device):
    layout = Layout(fmt, usage, shape)
    codes = torch.randint(0, 120, (shape[0] * shape[1] // 4096 + 1,), dtype=torch.uint8, device=device)
    data = repeated(codes, layout.data_shape)
    data.view(-1)[-1] = 0x7E
    two = {"dtype": torch.uint8, "fill_value": 128} if layout.tiled else {"dtype": torch.float32, "fill_value": 2.0}
    scale = torch.full(layout.scale_shape, device=device, **two)
    out = dequantize(data, scale, None, layout=layout, dtype=torch.bfloat16)
    values = data.t() if usage == COLUMNWISE and not layout.across else data
    for part in parts(shape):
        assert torch.equal(out[part], values[part].contiguous().view(torch.float8_e4m3fn).to(torch.bfloat16) * 2)


@pytest.mark.slow
@each_usage
@each_shape
@pytest.mark.parametrize("dims", [1, 2])
def test_r10_block_cast_past_2_31(dims, shape, usage, device):
    """The first and the last block of each side are those of a small matrix."""
    pattern = torch.randn(shape[0] * shape[1] // 4096 + 1, device=device, dtype=torch.bfloat16)
    x = repeated(pattern, shape)
    ((data, scale),) = cast_block(x, [Layout(fp8_block(E4M3, dims), usage, shape)])
    for ends in ([slice(0, 128)] * 2, [slice((n - 1) // 128 * 128, n) for n in shape]):
        part = x[tuple(ends)].contiguous()
        ((codes, _),) = cast_block.reference(part, [Layout(fp8_block(E4M3, dims), usage, tuple(part.shape))])
        assert torch.equal(data[tuple(ends if usage == ROWWISE else ends[::-1])], codes)
    assert scale.isfinite().all()
