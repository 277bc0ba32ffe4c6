"""Quantized parameters as FSDP2 shards: the gather protocol, with pieces side by side; tests/distributed has processes."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import Backend, BackendConfig

from opfuse.errors import QuantizedTensorError, ShapeError
from opfuse.tensors import QuantizedTensor
from opfuse.tensors.planes import mirrored
from opfuse.tensors.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8RowQuantizer,
    GroupedQuantizer,
    HybridQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from opfuse.tensors.quantizers.ranks import collective_device
from tests.tensors.quantized_samples import QUANTIZERS, make, planes, same_bytes, values

every_kind = pytest.mark.parametrize("kind", list(QUANTIZERS))
SHAPE = (256, 96)
REDUCING = {
    "current": Float8CurrentScalingQuantizer(torch.float8_e4m3fn, with_amax_reduction=True),
    "nvfp4": NVFP4Quantizer(with_amax_reduction=True),
}
SHARED_SCALE = ("current", "delayed", "row", "nvfp4", "nvfp4_rotated", "nvfp4_rows")
POLICY = SimpleNamespace(param_dtype=None)


def shard(tensor, rank, ranks=2):
    """A rank's shard, made by the operations that FSDP2 makes it with."""
    piece = tensor.detach().chunk(ranks)[rank]
    padded = piece.new_zeros(tensor.chunk(ranks)[0].shape)
    padded.narrow(0, 0, piece.shape[0]).copy_(piece)
    assert padded.view(-1).shape == (padded.numel(),)
    return padded.narrow(0, 0, piece.shape[0])


def gather(shards, shape, out=None, outputs=None):
    """What FSDP2 does with the protocol; ``outputs`` are buffers to fill again."""
    mesh = SimpleNamespace(size=lambda: len(shards))
    stride = torch.empty(shape, device="meta").stride()
    inputs, metadata = zip(*(s.fsdp_pre_all_gather(mesh, torch.Size(shape), stride, None, POLICY) for s in shards))
    joined = [torch.cat([part.view(-1) for part in parts]).view(-1, *parts[0].shape[1:]) for parts in zip(*inputs)]
    if outputs is not None:
        for buffer, new in zip(outputs, joined):
            buffer.data.copy_(new)
        joined = outputs
    return joined, shards[0].fsdp_post_all_gather(joined, metadata[0], shards[0].dtype, out=out)


@pytest.mark.row("H20")
@every_kind
def test_h20_gathered_shards_decode_to_the_shards(kind):
    t = make(kind, shape=SHAPE)
    shards = [shard(t, rank) for rank in range(2)]
    assert all(isinstance(s, QuantizedTensor) for s in shards)
    with torch.no_grad():
        shards[0].add_(1.0)  # as an optimizer would: now a scale that all rows share is no longer the same on both
    _, (whole, _) = gather(shards, SHAPE)
    assert torch.equal(whole + 0, torch.cat([s.dequantize() for s in shards]))
    assert isinstance(whole, QuantizedTensor) == (kind not in SHARED_SCALE)


@pytest.mark.row("H20", "H22")
@pytest.mark.parametrize("kind", [*REDUCING, *sorted(set(QUANTIZERS) - set(SHARED_SCALE))])
@pytest.mark.parametrize("ranks", [1, 2])
def test_h20_gathered_shards_are_the_whole_bit_for_bit(kind, ranks):
    t = make(kind, shape=SHAPE)
    t = QuantizedTensor(t.record, quantizer=REDUCING.get(kind, t.quantizer))
    shards = [shard(t, rank, ranks) for rank in range(ranks)]
    _, (whole, owned) = gather(shards, SHAPE)
    assert isinstance(whole, QuantizedTensor)
    assert whole.signature == t.signature
    assert same_bytes(planes(whole), planes(t))
    shard_memory = {tensor.data_ptr() for tensor in shards[0].record.tensors()}
    assert not shard_memory & {tensor.data_ptr() for tensor in owned}


AGREEING = {
    "current": REDUCING["current"],
    "block": Float8BlockQuantizer(torch.float8_e4m3fn),
    "mxfp8": MXFP8Quantizer(with_2d_quantization=True),
    "mxfp8_swizzled": MXFP8Quantizer(with_2d_quantization=True, optimize_for_gemm=True),
    "nvfp4": NVFP4Quantizer(with_amax_reduction=True, with_2d_quantization=True),
    "nvfp4_to_4_or_6": NVFP4Quantizer(with_amax_reduction=True, with_2d_quantization=True, nvfp4_use_4over6=True),
}


@pytest.mark.row("H22")
@pytest.mark.parametrize("kind", AGREEING)
@pytest.mark.parametrize("shape", [(256, 96), (160, 416), (32, 32)])
def test_h22_of_planes_that_agree_one_travels(kind, shape):
    t = AGREEING[kind](values(shape))
    assert t.quantizer.planes_agree
    assert same_bytes(mirrored(t.rowwise).tensors(), t.columnwise.tensors())
    outputs, (whole, _) = gather([t], shape)
    assert same_bytes(planes(whole), planes(t))
    assert sum(part.nbytes for part in outputs) < 0.55 * 2 * t.numel() or shape != SHAPE


@pytest.mark.parametrize("kind", [kind for kind in QUANTIZERS if kind not in ("current", "delayed", "block2d")])
def test_planes_that_are_cast_apart_do_not_say_that_they_agree(kind):
    assert not QUANTIZERS[kind]().planes_agree


@every_kind
def test_a_later_gather_refills_the_parameter_without_a_new_version(kind):
    t = make(kind, shape=SHAPE)
    shards = [shard(t, rank) for rank in range(2)]
    outputs, (whole, owned) = gather(shards, SHAPE)
    parameter = nn.Parameter(whole.as_strided(SHAPE, (96, 1), 0))
    with torch.no_grad():
        for s in shards:
            s.mul_(-2)
    for memory in (*owned, *outputs):
        size = memory.untyped_storage().size()
        memory.untyped_storage().resize_(0)
        memory.untyped_storage().resize_(size)
    version = parameter._version
    _, returned = gather(shards, SHAPE, out=parameter, outputs=outputs)
    assert returned is None
    assert torch.equal(parameter.detach() + 0, torch.cat([s.dequantize() for s in shards]))
    assert parameter._version == version


STATELESS = [kind for kind in QUANTIZERS if not QUANTIZERS[kind]().state]


@pytest.mark.few
@pytest.mark.row("H20")
@pytest.mark.parametrize("kind", STATELESS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_h20_a_stack_of_matrices_that_were_cast_apart_is_sharded_between_them(kind, ranks):
    """As those of experts. Shards have the bytes, can be written, and gather to the whole."""
    shape = (4, 64, 96)
    stack = GroupedQuantizer(tuple([QUANTIZERS[kind]()] * 4))(values((4 * 64, 96)).view(shape))
    shards = [shard(stack, rank, ranks) for rank in range(ranks)]
    assert all(isinstance(s, QuantizedTensor) for s in shards)
    assert torch.equal(torch.cat([s.dequantize() for s in shards]), stack.dequantize())
    _, (whole, _) = gather(shards, shape)
    assert isinstance(whole, QuantizedTensor)
    for other in (whole, torch.cat(shards)):
        assert same_bytes([each.flatten() for each in planes(other)], [each.flatten() for each in planes(stack)])
    assert torch.equal(whole[3] + 0, stack[3] + 0)
    with torch.no_grad():
        shards[-1].mul_(-2)
    _, (whole, _) = gather(shards, shape)
    assert torch.equal(whole + 0, torch.cat([s.dequantize() for s in shards]))
    assert not torch.equal(whole + 0, stack + 0)


def test_a_stack_with_scales_of_steps_before_is_sharded_as_values():
    """A quantizer of a matrix keeps its scales, and a shard is not told which matrices it gets."""
    stack = GroupedQuantizer(tuple([QUANTIZERS["delayed"]() for _ in range(4)]))(values((4, 64, 96)))
    assert type(shard(stack, 0)) is torch.Tensor
    assert torch.equal(shard(stack, 1), stack.dequantize()[2:])


def test_a_stack_over_ranks_that_do_not_divide_it_is_refused():
    stack = GroupedQuantizer(tuple([QUANTIZERS["mxfp8"]()] * 3))(values((3, 64, 96)))
    with pytest.raises(
        ShapeError, match=r"wants 2 equal shards, got 3 matrices\. Cure: shard over a number of ranks that divides"
    ):
        gather([shard(stack, rank) for rank in range(2)], (3, 64, 96))


@pytest.mark.row("H21")
def test_h21_shards_that_do_not_fill_a_scale_tile():
    t = MXFP8Quantizer(columnwise=False)(values((96, 96)))
    shards = [shard(t, rank) for rank in range(2)]
    assert [s.shape[0] for s in shards] == [48, 48]
    assert shards[0].rowwise.scale.shape == (128, 4)
    _, (whole, _) = gather(shards, (96, 96))
    assert same_bytes(planes(whole), planes(t))


OWN_ROWS = {
    "nvfp4": NVFP4Quantizer(columnwise=False, row_scaled_nvfp4=True),
    "fp8": Float8RowQuantizer(torch.float8_e4m3fn, columnwise=False),
}


@pytest.mark.parametrize("kind", OWN_ROWS)
def test_rows_with_a_scale_of_their_own_are_gathered_quantized(kind):
    t = OWN_ROWS[kind](values((96, 96)))
    shards = [shard(t, rank) for rank in range(2)]
    with torch.no_grad():
        shards[1].mul_(3)
    _, (whole, _) = gather(shards, (96, 96))
    assert isinstance(whole, QuantizedTensor)
    assert torch.equal(whole + 0, torch.cat([s.dequantize() for s in shards]))


@pytest.mark.row("H23")
def test_h23_shards_that_cut_a_block_hold_plain_values_and_uneven_ones_are_refused():
    t = make("block2d", shape=(192, 96))
    piece = shard(t, 1)
    assert type(piece) is torch.Tensor
    assert torch.equal(piece, t.dequantize()[96:])
    with pytest.raises(ShapeError, match="2 equal shards of a multiple of 128 rows"):
        gather([make("block2d", shape=(256, 96)), make("block2d", shape=(128, 96))], (384, 96))


@pytest.fixture
def group():
    store = dist.HashStore()
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.cpu
def test_a_quantizer_with_a_process_group_is_copied_but_not_saved(group, tmp_path):
    current = Float8CurrentScalingQuantizer(torch.float8_e4m3fn, with_amax_reduction=True, amax_reduction_group=group)
    hybrid = HybridQuantizer(current, current.copy())
    for quantizer in (current, hybrid):
        t = quantizer(values(SHAPE))
        assert copy.deepcopy(t).quantizer == quantizer
        assert copy.deepcopy(t).quantizer is not t.quantizer
        torch.save(t, tmp_path / "t.pt")
        loaded = torch.load(tmp_path / "t.pt", weights_only=True)
        assert same_bytes(planes(loaded), planes(t))
        with pytest.raises(QuantizedTensorError, match="wants a quantizer"):
            loaded.zero_()
        t.zero_()
        t.copy_(loaded)
        assert same_bytes(planes(loaded), planes(t))


ROTATED = NVFP4Quantizer(with_amax_reduction=True, with_rht=True, with_post_rht_amax=True)


@pytest.mark.cpu
@pytest.mark.usefixtures("group")
@pytest.mark.row("H22", "H23")
def test_shards_that_are_written_together_find_their_amaxes_in_one_collective(monkeypatch):
    reduced = []
    reduce = dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda word, **options: (reduced.append(len(word)), reduce(word, **options)))
    kinds = [REDUCING["current"], MXFP8Quantizer(), REDUCING["nvfp4"], REDUCING["current"], AGREEING["nvfp4_to_4_or_6"], ROTATED]
    sources = [values((64 + 32 * i, 96), seed=i) * (i + 1) for i in range(len(kinds))]
    single, together = ([kind(torch.zeros_like(x)) for kind, x in zip(kinds, sources)] for _ in range(2))
    for target, source in zip(single, sources):
        target.copy_(source)
    plain, sources[-1] = torch.zeros(3), sources[-1].float().bfloat16()
    reduced.clear()
    versions = [target._version for target in together]
    torch._foreach_copy_([*together, plain], [*sources, torch.ones(3)])
    assert reduced == [4, 1, 1]  # rotated data has an amax of its own, in each direction
    assert all(same_bytes(planes(a), planes(b)) for a, b in zip(together, single, strict=True))
    assert all(target._version > version for target, version in zip(together, versions))
    assert plain.tolist() == [1, 1, 1]


@pytest.mark.cpu
@pytest.mark.parametrize(("backends", "place"), [("cpu:gloo,cuda:nccl", "cpu"), ("gloo", "cpu"), ("cuda:nccl", "cuda")])
def test_amaxes_of_shards_on_the_cpu_meet_where_the_group_can(monkeypatch, backends, place):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: str(BackendConfig(Backend(backends))))
    assert collective_device(None, torch.device("cpu")).type == place
