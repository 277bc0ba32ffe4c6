"""One quantizer of every kind, for the tests of quantized tensors, and one of a user's own."""

from dataclasses import dataclass

import torch

from opfuse import formats
from opfuse.kernels.casts.encoding import Blocks
from opfuse.tensors import quantizers
from opfuse.tensors.quantizers.base import CastingQuantizer

E4M3 = torch.float8_e4m3fn
QUANTIZERS = {
    "current": lambda: quantizers.Float8CurrentScalingQuantizer(E4M3),
    "delayed": lambda: quantizers.Float8Quantizer(torch.ones(1), torch.zeros(1), E4M3),
    "row": lambda: quantizers.Float8RowQuantizer(E4M3),
    "block1d": lambda: quantizers.Float8BlockQuantizer(E4M3, block_scaling_dim=1),
    "block2d": lambda: quantizers.Float8BlockQuantizer(E4M3),
    "mxfp8": quantizers.MXFP8Quantizer,
    "mxfp8_swizzled": lambda: quantizers.MXFP8Quantizer(optimize_for_gemm=True),
    "mxfp4": quantizers.MXFP4Quantizer,
    "nvfp4": quantizers.NVFP4Quantizer,
    "nvfp4_rows": lambda: quantizers.NVFP4Quantizer(row_scaled_nvfp4=True),
    "nvfp4_rotated": lambda: quantizers.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
    "hybrid": lambda: quantizers.HybridQuantizer(quantizers.MXFP8Quantizer(), quantizers.IdentityQuantizer()),
    "identity": quantizers.IdentityQuantizer,
}
SHAPE = (64, 96)


@dataclass(frozen=True, repr=False)
class Blocks64(CastingQuantizer):
    """A format of a user's own: fp32 scales over 1x64 blocks."""

    @property
    def formats(self):
        fmt = formats.fp8_block(formats.E4M3, 1).replace(name="blocks64", block=(1, 64))
        return fmt, fmt

    def _encoding(self, layouts):
        return Blocks(layouts)


def values(shape=SHAPE, seed=0, dtype=torch.bfloat16):
    """Normal values that depend on shape and seed only, on the default device."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return made.to(torch.get_default_device(), dtype)


def make(kind, shape=SHAPE, **kwargs):
    """The quantized tensor of :func:`values`."""
    return QUANTIZERS[kind]()(values(shape, **kwargs))


def parameter(kind, **kwargs):
    return torch.nn.Parameter(make(kind, **kwargs))


def planes(tensor):
    """A copy of the tensors of all planes."""
    return [t.detach().clone() for t in tensor.record.tensors()]


def same_bytes(a, b):
    return len(a) == len(b) and all(
        x.shape == y.shape and torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b)
    )
