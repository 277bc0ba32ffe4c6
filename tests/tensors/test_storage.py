"""Records of planes: self-sufficiency, missing planes, tensors in and out, bytes counted once."""

import copy
import io
import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opfuse.errors import MissingPlaneError
from opfuse.formats import COLUMNWISE, E4M3, ROWWISE, USAGES, mxfp8
from opfuse.tensors.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from opfuse.tensors.storage import matrix_shape

FP8 = torch.float8_e4m3fn
MAKERS = {
    "current": lambda: Float8CurrentScalingQuantizer(FP8),
    "block": lambda: Float8BlockQuantizer(FP8, block_scaling_dim=1),
    "mxfp8": lambda: MXFP8Quantizer(optimize_for_gemm=True),
    "nvfp4": lambda: NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
    "identity": IdentityQuantizer,
    "hybrid": lambda: HybridQuantizer(NVFP4Quantizer(), IdentityQuantizer()),
}
each = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def sample():
    return torch.randn(2, 32, 64).bfloat16()


@pytest.mark.row("U07")
@each
def test_u07_dequantize_without_quantizer(make):
    """After a trip through bytes nothing is left of the quantizer, and formats are equal, not identical."""
    storage = make().quantize(sample())
    buffer = io.BytesIO()
    pickle.dump(storage, buffer)
    buffer.seek(0)
    loaded = pickle.load(buffer)
    for usage in USAGES:
        assert torch.equal(loaded.dequantize(usage=usage), storage.dequantize(usage=usage))
        assert loaded.plane(usage).format == storage.plane(usage).format
    assert torch.equal(copy.deepcopy(storage).dequantize(), storage.dequantize())


@each
def test_tensors_go_out_and_in_again(make):
    storage = make().quantize(sample())
    clones = [tensor.clone() for tensor in storage.tensors()]
    other = storage.with_tensors(clones)
    assert all(a is b for a, b in zip(other.tensors(), clones, strict=True))
    assert torch.equal(other.dequantize(), storage.dequantize())
    assert [other.plane(usage).layout for usage in USAGES] == [storage.plane(usage).layout for usage in USAGES]


@pytest.mark.row("D09")
@each
def test_d09_what_dequantize_multiplies_by_is_in_the_planes_alone(make):
    """No copy of a scale or an amax is kept beside the tensor: a write to it shows at once, a copy of the tensors has its own."""
    storage = make().quantize(sample())
    for usage in USAGES:
        plane, before = storage.plane(usage), storage.dequantize(torch.float32, usage)
        moved = storage.with_tensors([tensor.clone() for tensor in storage.tensors()])
        if plane.amax is not None:
            plane.amax.mul_(2)
        elif plane.format.scale == "e8m0":
            plane.scale.add_(1)
        elif plane.scale is not None:
            plane.scale.mul_(2)
        else:
            plane.data.mul_(2)
        assert torch.equal(storage.dequantize(torch.float32, usage), 2 * before)
        assert torch.equal(moved.dequantize(torch.float32, usage), before)
        assert all(isinstance(getattr(plane, field), torch.Tensor | None) for field in ("data", "scale", "amax"))
        storage = moved


@pytest.mark.row("D09")
@each
def test_d09_casting_and_dequantizing_bring_nothing_to_the_host(make):
    quantizer, x = make(), sample()
    with Stayed():
        quantizer.quantize(x).dequantize()


class Stayed(TorchDispatchMode):
    """Inside it, no tensor's value becomes a Python number."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default), func
        return func(*args, **(kwargs or {}))


@each
def test_only_keeps_a_plane_and_says_why_the_other_is_gone(make):
    storage = make().quantize(sample())
    for usage, other in (USAGES, USAGES[::-1]):
        kept = storage.only(usage, why="backward runs in high precision")
        assert kept.usages == (usage,)
        assert torch.equal(kept.dequantize(), storage.dequantize(usage=usage))
        assert kept.format == storage.plane(usage).format
        assert kept.device == storage.device
        with pytest.raises(
            MissingPlaneError, match=f"{other} data of a .* was not made: backward runs in high precision"
        ) as info:
            kept.plane(other)
        assert f"quantize with {other}=True, or read the {usage} plane" in str(info.value)
        with pytest.raises(MissingPlaneError):
            kept.dequantize(usage=other)


def test_dequantize_prefers_rowwise_and_takes_a_dtype():
    x = sample()
    storage = HybridQuantizer(MXFP8Quantizer(), NVFP4Quantizer()).quantize(x)
    assert torch.equal(storage.dequantize(), storage.dequantize(usage=ROWWISE))
    assert not torch.equal(storage.dequantize(), storage.dequantize(usage=COLUMNWISE))
    assert storage.dequantize().dtype == torch.bfloat16
    assert storage.dequantize(torch.float32).dtype == torch.float32
    assert torch.equal(storage.dequantize(torch.float32).bfloat16(), storage.dequantize())
    assert storage.format == mxfp8(E4M3)


def test_nbytes_counts_a_shared_tensor_once():
    x = torch.randn(32, 64)
    assert Float8CurrentScalingQuantizer(FP8).quantize(x).nbytes == 2 * 32 * 64 + 4
    assert IdentityQuantizer().quantize(x).nbytes == x.nbytes
    assert MXFP8Quantizer(columnwise=False).quantize(x).nbytes == 32 * 64 + 128 * 4
    assert NVFP4Quantizer().quantize(x).nbytes == 32 * 64 + 2 * 128 * 4 + 4


def test_swizzle_of_a_plane_round_trips():
    x = sample()
    storage, swizzled = NVFP4Quantizer().quantize(x), NVFP4Quantizer(optimize_for_gemm=True).quantize(x)
    for usage in USAGES:
        plane = storage.plane(usage)
        tiles = plane.with_swizzle(swizzled=True)
        assert tiles.swizzled
        assert tiles.data is plane.data
        assert tiles.with_swizzle(swizzled=True) is tiles
        assert torch.equal(tiles.with_swizzle(swizzled=False).scale, plane.scale)
        assert torch.equal(tiles.scale, swizzled.plane(usage).scale)
    block = Float8BlockQuantizer(FP8).quantize(sample()).plane(ROWWISE)
    assert block.with_swizzle(swizzled=True) is block


def test_matrix_shape_flattens_leading_dimensions():
    assert matrix_shape((5,)) == (1, 5)
    assert matrix_shape((2, 3, 5)) == (6, 5)
    assert matrix_shape((0, 3, 5)) == (0, 5)
    assert MXFP8Quantizer().quantize(sample()).matrix_shape == (64, 64)
