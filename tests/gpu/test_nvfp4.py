"""NVFP4 on a device: quantizers store the bytes of the CPU, nothing waits, graphs replay; sizes past 2^31, every fp32."""

import pytest
import torch

from opfuse.formats import COLUMNWISE, NVFP4, ROWWISE, USAGES
from opfuse.kernels.casts.dequantize import dequantize
from opfuse.kernels.casts.nvfp4 import amaxes_nv, cast_nv
from opfuse.numerics.hadamard import SIGNS
from opfuse.numerics.layouts import Layout, load_data, load_scale
from opfuse.numerics.philox import STREAMS, philox
from opfuse.numerics.scalars import encode, encode_e2m1_stochastic
from opfuse.numerics.scales import nvfp4_global_scale, nvfp4_multiplier
from opfuse.tensors.quantizers import NVFP4Quantizer

OPTIONS = {
    "plain": {},
    "for products": {"optimize_for_gemm": True},
    "rotated": {"with_rht": True, "with_post_rht_amax": True},
    "rotated without signs": {"with_rht": True, "with_post_rht_amax": True, "with_random_sign_mask": False},
    "tiles": {"with_2d_quantization": True},
    "by row": {"row_scaled_nvfp4": True},
    "four or six": {"nvfp4_use_4over6": True},
    "four or six, tiles": {"nvfp4_use_4over6": True, "nvfp4_4over6_err_mode": "MSE", "with_2d_quantization": True},
}
STOCHASTIC = {**OPTIONS["rotated"], "stochastic_rounding": True}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
each_direction = pytest.mark.parametrize(
    "directions", [{}, {"columnwise": False}, {"rowwise": False}], ids=["both", "rowwise", "columnwise"]
)


def values(device, rows=144, columns=96, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.exp2(torch.randint(-12, 3, (rows, 1), generator=generator))
    return x.bfloat16().to(device)


def stored(quantizer, x):
    """Every byte, and what is read back."""
    storage = quantizer.quantize(x)
    back = [storage.dequantize(dtype, usage) for usage in storage.usages for dtype in (torch.float32, torch.bfloat16)]
    return [t.cpu().view(torch.uint8) for t in (*storage.tensors(), *back)]


@each_option
@each_direction
def test_r1_quantizers_store_the_bytes_of_the_cpu(options, directions, device):
    quantizer = NVFP4Quantizer(**options).wanting(**directions)
    for here, there in zip(stored(quantizer, values("cpu")), stored(quantizer, values(device)), strict=True):
        assert torch.equal(here, there)


@pytest.mark.parametrize("options", [OPTIONS["rotated"], OPTIONS["tiles"]], ids=["rotated", "tiles"])
def test_g21_stochastic_planes_follow_the_generator_and_average_to_the_values(options, device):
    x, quantizer = values(device, 512, 256), NVFP4Quantizer(stochastic_rounding=True, **options)
    torch.manual_seed(5)
    first = stored(quantizer, x)
    second = stored(quantizer, x)
    torch.manual_seed(5)
    assert all(torch.equal(a, b) for a, b in zip(stored(quantizer, x), first, strict=True))
    assert not torch.equal(first[0], second[0])
    for usage in USAGES:
        mean = sum(quantizer.quantize(x).dequantize(torch.float32, usage) for _ in range(64)) / 64
        nearest = NVFP4Quantizer(**options).quantize(x).dequantize(torch.float32, usage)
        assert (mean - x).norm() < 0.3 * (nearest - x).norm()


@pytest.mark.parametrize(
    "options", [{**OPTIONS["rotated"], "stochastic_rounding": True}, OPTIONS["by row"]], ids=["rotated", "by row"]
)
def test_r12_nothing_waits_and_a_captured_cast_replays_on_new_values(options, device):
    quantizer, x = NVFP4Quantizer(**options), values(device)
    quantizer.quantize(x).dequantize()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        quantizer.quantize(x).dequantize(usage=COLUMNWISE)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = quantizer.quantize(x)
    for seed in range(5):
        x.copy_(values(device, seed=seed))
        graph.replay()
        expected = quantizer.quantize(x)
        for usage in USAGES:
            got, wanted = captured.plane(usage), expected.plane(usage)
            assert torch.equal(got.amax, wanted.amax)
            assert torch.equal(got.scale, wanted.scale)
            assert quantizer.stochastic_rounding or torch.equal(got.data, wanted.data)


SHAPES = [(2**21 + 32, 1024), (1040, 2**21 + 32), (2, 2**30 + 16), (2**30 + 16, 2)]


def large(shape, device):
    """4096 times the same values, which is fast to make."""
    pattern = torch.randn(shape[0] * shape[1] // 4096 + 1, device=device, dtype=torch.bfloat16)
    return pattern.repeat(4096)[: shape[0] * shape[1]].view(shape)


def ends(shape):
    """The first and the last whole blocks of both sides."""
    return ([slice(0, min(n, 64)) for n in shape], [slice(max(n - 64, 0) // 16 * 16, n) for n in shape])


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("usage", USAGES)
@pytest.mark.parametrize("kind", ["lines", "tiles", "rotated"])
def test_r10_casts_and_dequantize_past_2_31(kind, usage, shape, device):
    if kind == "rotated" and (usage == ROWWISE or shape[0] % 16):
        shape = SHAPES[0]
    x, rows = large(shape, device), 16 if kind == "tiles" else 1
    fmt = NVFP4.replace(rht=SIGNS if kind == "rotated" and usage == COLUMNWISE else ())
    layout = Layout(fmt, usage, shape)
    ((amax,), ((data, scale),)) = (amaxes := amaxes_nv(x, [layout])), cast_nv(x, amaxes, [layout], rows=rows)
    out = dequantize(data, scale, amax, layout=layout, dtype=torch.bfloat16)
    for part in ends(shape):
        small = x[tuple(part)].contiguous()
        inner = Layout(fmt, usage, tuple(small.shape))
        ((codes, scales),) = cast_nv.reference(small, [amax], [inner], rows=rows)
        lines = part if usage == ROWWISE else part[::-1]
        blocks = [lines[0], slice(lines[1].start // 16, -(-lines[1].stop // 16))]
        assert torch.equal(data[lines[0], lines[1].start // 2 : lines[1].stop // 2], codes)
        assert torch.equal(scale[tuple(blocks)], load_scale(scales, inner))
        assert torch.equal(out[tuple(part)], dequantize.reference(codes, scales, amax, layout=inner, dtype=torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("usage", USAGES)
def test_r10_random_bytes_past_2_31(usage, device):
    """The last line's last block takes the bytes of its own counter."""
    shape = SHAPES[0] if usage == ROWWISE else SHAPES[1]
    x, seed = large(shape, device), torch.tensor([-77], device=device)
    layout = Layout(NVFP4, usage, shape)
    amaxes = amaxes_nv(x, [layout])
    ((data, scale),) = cast_nv(x, amaxes, [layout], seed=seed)
    block = torch.tensor([shape[0] * shape[1] // 16 - 1], device=device)
    counter = (block & 0xFFFFFFFF, block >> 32, torch.full_like(block, STREAMS[usage]), torch.zeros_like(block))
    words = torch.stack(philox(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)), -1)
    octets = torch.stack([words >> shift & 0xFF for shift in (0, 8, 16, 24)], -1).flatten()
    last = (x if usage == ROWWISE else x.t())[-1, -16:].float()
    line, blocks = layout.blocks[0] - 1, layout.blocks[1]
    multiplier = nvfp4_multiplier(scale[line, blocks - 1 : blocks], nvfp4_global_scale(amaxes[0], 448))
    expected = encode_e2m1_stochastic(last * multiplier, octets)
    assert torch.equal(data[-1, -8:], expected[0::2] | expected[1::2] << 4)


@pytest.mark.slow
def test_r2_every_fp32_magnitude_up_to_6_is_rounded_to_nearest_even(device):
    """Each bit pattern up to 6, in blocks whose scale and level are 1, since their first value is 6."""
    amax = torch.full((1,), 2688.0, device=device)  # encode_max 6: a first level of 1
    for start in range(0, 0x40C00001, 15 << 24):
        bits = torch.arange(start, min(start + (15 << 24), 0x40C00001), device=device)
        x = bits.to(torch.int32).view(torch.float32)
        x = torch.cat([x, x.new_zeros(-x.numel() % 15)]).view(-1, 15)
        x = torch.cat([x.new_full((x.shape[0], 1), 6.0), x], 1)
        layout = Layout(NVFP4, ROWWISE, tuple(x.shape))
        ((data, scale),) = cast_nv(x, [amax], [layout])
        assert (scale[: x.shape[0], 0] == 0x38).all()
        assert torch.equal(load_data(data, layout), encode(x, layout.element))
