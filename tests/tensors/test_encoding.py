"""A cast as a value: what a quantizer hands out casts as the quantizer does, and is withheld where it would not."""

import pytest
import torch

from opfuse import formats
from opfuse.errors import DtypeError, QuantizerError, ShapeError
from opfuse.formats import USAGES, fp8_block
from opfuse.kernels.casts.encoding import Blocks, Measured, Microscaled, RecordingScale, WithOriginal
from opfuse.numerics.layouts import Layout
from opfuse.tensors.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


def delayed():
    return Float8Quantizer(torch.full((1,), 3.7), torch.zeros(1), E4M3)


QUANTIZERS = {
    "delayed": (delayed, RecordingScale),
    "current": (lambda: Float8CurrentScalingQuantizer(E4M3, amax_epsilon=0.5, force_pow_2_scales=True), Measured),
    "1x128": (lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=1, force_pow_2_scales=False), Blocks),
    "128x128": (lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=2), Blocks),
    "MX": (MXFP8Quantizer, Microscaled),
    "MX swizzled": (lambda: MXFP8Quantizer(optimize_for_gemm=True, scale_rule="ocp_floor"), Microscaled),
    "NVFP4": (NVFP4Quantizer, Measured),
    "NVFP4 rotated": (lambda: NVFP4Quantizer(with_rht=True, with_post_rht_amax=True), Measured),
    "NVFP4 by rows": (lambda: NVFP4Quantizer(row_scaled_nvfp4=True), Measured),
}


def same(left, right):
    assert (left.shape, left.dtype, left.why, left.usages) == (right.shape, right.dtype, right.why, right.usages)
    for usage in left.usages:
        mine, wanted = left.plane(usage), right.plane(usage)
        assert (mine.format, mine.shape, mine.swizzled) == (wanted.format, wanted.shape, wanted.swizzled)
        for got, expected in zip(mine.tensors(), wanted.tensors(), strict=True):
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("usages", [USAGES, USAGES[:1], USAGES[1:]])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_an_encoding_is_the_cast_of_its_quantizer(name, usages):
    make, kind = QUANTIZERS[name]
    ours, other = (make().wanting(**{usage: usage in usages for usage in USAGES}) for _ in range(2))
    x = torch.randn(3, 64, 96).to(BF16)
    encoding = ours.encoding(x.shape, x.dtype)
    assert isinstance(encoding, kind)
    same(ours.storage(x.shape, x.dtype, encoding, encoding(x)), other.quantize(x))
    assert [tensor.item() for tensor in ours.state] == [tensor.item() for tensor in other.state]


@pytest.mark.parametrize("name", ["current", "NVFP4", "NVFP4 rotated", "NVFP4 by rows"])
def test_a_given_amax_changes_nothing(name):
    quantizer = QUANTIZERS[name][0]()
    x = torch.randn(64, 96).to(BF16)
    encoding = quantizer.encoding(x.shape, x.dtype)
    encoded = encoding.given(x, x.float().abs().max().reshape(1))
    same(quantizer.storage(x.shape, x.dtype, encoding, encoded), quantizer.quantize(x))


def test_quantizers_of_others_and_with_a_cast_of_their_own_have_no_encoding():
    class Halved(Float8CurrentScalingQuantizer):
        def quantize(self, x):
            return super().quantize(x / 2)

    class Doubled(HybridQuantizer):
        def quantize(self, x):
            return super().quantize(2 * x)

    rows, kept = MXFP8Quantizer(), IdentityQuantizer()
    others = [
        Doubled(rows, kept),
        HybridQuantizer(kept, IdentityQuantizer()),
        HybridQuantizer(Halved(E4M3), kept),
        HybridQuantizer(rows, MXFP8Quantizer()),
        HybridQuantizer(rows, IdentityQuantizer(dtype=torch.float32)),
        HybridQuantizer(rows, kept, columnwise_source="rowwise_dequantized"),
        HybridQuantizer(rows, kept).wanting(rowwise=False),
        HybridQuantizer(rows, kept).wanting(columnwise=False),
    ]
    for quantizer in (*others, kept, Halved(E4M3)):
        assert quantizer.encoding((64, 64), BF16) is None


@pytest.mark.row("B10")
@pytest.mark.parametrize("name", QUANTIZERS)
def test_b10_the_original_beside_a_cast_of_rows_is_the_tensor_itself(name):
    make, kind = QUANTIZERS[name]
    ours, other = (HybridQuantizer(make(), IdentityQuantizer()) for _ in range(2))
    x = torch.randn(2, 64, 96).to(BF16)
    encoding = ours.encoding(x.shape, x.dtype)
    assert isinstance(encoding, WithOriginal)
    assert isinstance(encoding.encode, kind)
    made = ours.storage(x.shape, x.dtype, encoding, encoding(x))
    assert made.columnwise.data is x
    same(made, other.quantize(x))


@pytest.mark.parametrize("make", [Blocks, lambda layouts: Measured(layouts, lambda x, amax: [])])
def test_an_encoding_of_another_matrix_is_refused(make):
    layouts = [Layout(fp8_block(formats.E4M3, 1), usage, (32, 64)) for usage in USAGES]
    with pytest.raises(QuantizerError, match=r"wants planes of \(64, 64\), got a layout of \(32, 64\)"):
        make(layouts)(torch.zeros(2, 32, 64))


def test_an_encoding_is_refused_where_a_cast_would_be():
    with pytest.raises(ShapeError, match="divisible by 32"):
        MXFP8Quantizer().encoding((64, 40), BF16)
    with pytest.raises(DtypeError):
        delayed().encoding((64, 64), torch.float64)
    with pytest.raises(QuantizerError, match="wants a direction"):
        delayed().wanting(rowwise=False, columnwise=False).encoding((64, 64), BF16)
