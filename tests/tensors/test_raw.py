"""Pieces of masters cast into whole weights, and weights in buffers of one's own."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

import opfuse
from opfuse.errors import OpfuseError, QuantizedTensorError, QuantizerError, ShapeError
from opfuse.tensors import QuantizedTensor
from opfuse.tensors.quantizers import Float8CurrentScalingQuantizer, HybridQuantizer, MXFP8Quantizer
from tests.tensors.quantized_samples import QUANTIZERS, make, planes, same_bytes, values

SHAPE, E4M3, E5M2 = (64, 96), torch.float8_e4m3fn, torch.float8_e5m2
ONE_SCALE = {
    "current": Float8CurrentScalingQuantizer(E4M3),
    "rowwise": Float8CurrentScalingQuantizer(E4M3, columnwise=False),
    "powers": Float8CurrentScalingQuantizer(E4M3, force_pow_2_scales=True, amax_epsilon=0.5),
    "hybrid": HybridQuantizer(Float8CurrentScalingQuantizer(E4M3), Float8CurrentScalingQuantizer(E5M2)),
}


@pytest.fixture
def ranks(monkeypatch, tmp_path):
    """Two ranks, one after the other: the first call of a collective notes what it is given, the second one reduces."""
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    noted = []

    def maxima(tensor, op, group):
        noted.append(tensor.clone())
        tensor.copy_(torch.stack(noted).amax(0))

    monkeypatch.setattr(dist, "all_reduce", maxima)
    yield
    dist.destroy_process_group()


@pytest.mark.cpu
@pytest.mark.row("H18")
@pytest.mark.parametrize("kind", ONE_SCALE)
@pytest.mark.parametrize("at", [0, 1000, 96 * 32, 64 * 96], ids=str)
def test_h18_pieces_of_masters_make_the_cast_of_the_whole(ranks, kind, at):
    quantizer, master = ONE_SCALE[kind], values(SHAPE, seed=1, dtype=torch.float32)
    weight, want = (quantizer(values(SHAPE)) for _ in range(2))
    with torch.no_grad():
        want.copy_(master)
    version, flat = weight._version, master.reshape(-1)
    pieces = [(flat[:at], 0), (flat[at:] if at < len(flat) else None, at)]
    for _ in range(2):  # each rank writes its piece; in the second round both know the amaxes of all
        for piece, start in pieces:
            opfuse.tensors.quantize_master_weights([weight], [piece], [start])
    assert same_bytes(planes(weight), planes(want))
    assert weight._version > version


@pytest.mark.cpu
@pytest.mark.row("H18")
def test_h18_whole_masters_need_no_offsets_and_another_rank_may_have_all():
    weights = [make("current", SHAPE, seed=seed) for seed in range(2)]
    before, master = planes(weights[1])[0], values(SHAPE, seed=7, dtype=torch.float32)
    opfuse.tensors.quantize_master_weights(weights, [master, None])
    assert torch.equal(weights[0].dequantize(), weights[0].quantizer(master).dequantize().to(weights[0].dtype))
    assert torch.equal(planes(weights[1])[0], before)
    opfuse.tensors.quantize_master_weights([], [])


@pytest.mark.row("H18")
@pytest.mark.parametrize("kind", [kind for kind in QUANTIZERS if kind != "current"])
def test_h18_other_formats_are_refused_by_direction_before_anything_is_written(kind):
    weights = [make("current", SHAPE), make(kind, SHAPE)]
    before = [planes(weight) for weight in weights]
    with pytest.raises(QuantizerError, match="wants rowwise data in FP8 under one scale of its own amax"):
        opfuse.tensors.quantize_master_weights(weights, [torch.ones(SHAPE), torch.ones(SHAPE)])
    assert all(same_bytes(planes(weight), was) for weight, was in zip(weights, before))


@pytest.mark.row("H18")
def test_h18_a_hybrid_is_refused_for_its_columnwise_direction():
    weight = HybridQuantizer(Float8CurrentScalingQuantizer(E4M3), MXFP8Quantizer())(values(SHAPE))
    with pytest.raises(QuantizerError, match=r"wants columnwise data in FP8 under one scale.*got mxfp8_e4m3"):
        opfuse.tensors.quantize_master_weights([weight], [torch.ones(SHAPE)])


@pytest.mark.parametrize(
    ("masters", "starts"),
    [([], None), ([torch.ones(10)], []), ([torch.ones(10)], [64 * 96 - 9]), ([torch.ones(10)], [-1]), ([torch.ones(10)], [None])],
    ids=str,
)
def test_pieces_that_have_no_place_are_refused(masters, starts):
    with pytest.raises(ShapeError, match="quantize_master_weights"):
        opfuse.tensors.quantize_master_weights([make("current", SHAPE)], masters, starts)


@pytest.mark.row("H19")
@pytest.mark.parametrize("kind", ["current", "block2d"])
def test_h19_columnwise_planes_follow_raw_data_that_was_gathered(kind):
    weight, other = make(kind, (256, 128)), make(kind, (256, 128), seed=1)
    for mine, its in zip(weight.rowwise.tensors(), other.rowwise.tensors()):
        mine.copy_(its)
    opfuse.tensors.post_all_gather_processing([weight])
    assert same_bytes(planes(weight), planes(other))
    with pytest.raises(QuantizerError, match="wants planes that hold the same values"):
        opfuse.tensors.post_all_gather_processing([make("mxfp8", SHAPE)])


@pytest.mark.row("H19")
@pytest.mark.parametrize("kind", [kind for kind in QUANTIZERS if kind not in ("hybrid", "identity")])
def test_h19_raw_data_in_a_buffer_of_ones_own_keeps_the_values(kind):
    weight = torch.nn.Parameter(make(kind, SHAPE))
    before, n = planes(weight), weight.rowwise.data.numel()
    buffer = torch.zeros(n + 16, dtype=torch.uint8)
    opfuse.tensors.replace_raw_data(weight, buffer[16:].view(weight.rowwise.data.shape))
    assert same_bytes(planes(weight), before)
    assert weight.rowwise.data.data_ptr() == buffer[16:].data_ptr()
    with torch.no_grad():
        weight.mul_(-2)
    assert torch.equal(buffer[16:].view(weight.rowwise.data.shape), weight.rowwise.data)
    assert isinstance(copy.deepcopy(weight), QuantizedTensor)


@pytest.mark.row("H19")
def test_h19_buffers_of_another_shape_or_dtype_are_refused():
    weight = make("current", SHAPE)
    for buffer in (torch.zeros(SHAPE), torch.zeros(64 * 96, dtype=torch.uint8), torch.zeros(96, 64, dtype=torch.uint8).t()):
        with pytest.raises(QuantizedTensorError, match=r"replace_raw_data: wants \(64, 96\) torch.uint8"):
            opfuse.tensors.replace_raw_data(weight, buffer)
    with pytest.raises(OpfuseError, match="rowwise data"):
        opfuse.tensors.replace_raw_data(Float8CurrentScalingQuantizer(E4M3, rowwise=False)(values(SHAPE)), torch.zeros(1))
