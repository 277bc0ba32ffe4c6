"""Quantizers on a CUDA tensor store the bytes that they store on the CPU, and leave the same state."""

import pytest
import torch

from opfuse.tensors.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8RowQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
QUANTIZERS = {
    "delayed": lambda dtype, device: Float8Quantizer(torch.tensor([3.7], device=device), torch.zeros(1, device=device), dtype),
    "current": lambda dtype, device: Float8CurrentScalingQuantizer(dtype, force_pow_2_scales=True),
    "row": lambda dtype, device: Float8RowQuantizer(dtype),
    "block": lambda dtype, device: Float8BlockQuantizer(dtype, block_scaling_dim=1),
    "tile": lambda dtype, device: Float8BlockQuantizer(dtype, block_scaling_dim=2),
    "mxfp8": lambda dtype, device: MXFP8Quantizer(dtype),
    "mxfp8 for products": lambda dtype, device: MXFP8Quantizer(dtype, optimize_for_gemm=True),
    "mxfp8 tiles": lambda dtype, device: MXFP8Quantizer(dtype, with_2d_quantization=True),
    "nvfp4": lambda dtype, device: NVFP4Quantizer(),
}


@pytest.mark.parametrize("directions", [{}, {"columnwise": False}, {"rowwise": False}], ids=["both", "rowwise", "columnwise"])
@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_r1_device_and_cpu_store_the_same_bytes(name, dtype, directions, device):
    x = torch.randn(3, 32, 96).bfloat16() * torch.logspace(-5, 5, 96).bfloat16()
    stored = []
    for where in (torch.device("cpu"), device):
        quantizer = QUANTIZERS[name](dtype, where).wanting(**directions)
        storage = quantizer.quantize(x.to(where))
        back = [storage.dequantize(torch.float32, usage) for usage in storage.usages]
        stored.append([t.cpu() for t in (*storage.tensors(), *quantizer.state, *back)])
    for here, there in zip(*stored, strict=True):
        assert torch.equal(here.view(torch.uint8), there.view(torch.uint8))


@pytest.mark.parametrize("name", ["delayed", "current", "row", "mxfp8"])
def test_empty_tensors_and_zeros(name, device):
    quantizer = QUANTIZERS[name](FP8[0], device)
    for shape in ((0, 32), (32, 32)):
        assert torch.equal(quantizer.quantize(torch.zeros(shape, device=device)).dequantize(), torch.zeros(shape, device=device))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_pieces_from_the_cpu_make_the_whole_on_the_device(name, device):
    """A checkpoint is read on the CPU, shard by shard, into a tensor on the device."""
    x, y = torch.randn(2, 256, 96).bfloat16()
    source, target = QUANTIZERS[name](FP8[0], torch.device("cpu"))(x), QUANTIZERS[name](FP8[0], device)(y.to(device))
    for rows in (slice(128, 256), slice(0, 128)):
        target[rows].copy_(source[rows])
    for here, there in zip(source.record.tensors(), target.record.tensors(), strict=True):
        assert torch.equal(here.view(torch.uint8), there.cpu().view(torch.uint8))
