"""Weights for a rollout engine: the bytes that training multiplies, packed, named, and only what changed if that is asked for."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import opfuse
from opfuse.errors import ConversionError
from opfuse.interchange.updates import WeightBucket
from opfuse.recipes import DelayedScaling, Float8BlockScaling, MXFP8BlockScaling
from opfuse.tensors.tensor import QuantizedTensor
from tests.processes import FORKSERVER

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

BF16 = torch.bfloat16
RECIPE = Float8BlockScaling(scale_rule="deepgemm", use_f32_scales=True)
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
WORDS = torch.arange(32).reshape(2, 16)


def dense() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).to(BF16)


def mixture() -> nn.Module:
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 64}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts)).to(BF16)


def stored() -> nn.Module:
    model = dense()
    model.load_state_dict(opfuse.import_weights(opfuse.export_weights(model, "deepseek").tensors), assign=True)
    opfuse.fuse_(model, RECIPE)
    return model


def received(buckets: list[WeightBucket]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for bucket in buckets:
        assert not found.keys() & bucket.tensors().keys()
        found |= bucket.tensors()
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    pairs = [(one[name], other[name]) for name in one]
    return all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))
        for a, b in pairs
    )


def step(model: nn.Module, parameters: list[nn.Parameter]) -> None:
    optimizer = opfuse.with_masters(torch.optim.SGD(parameters, lr=0.5))
    model(input_ids=WORDS, labels=WORDS).loss.backward()
    optimizer.step()
    model.zero_grad()


@pytest.mark.few
@pytest.mark.parametrize("layout", ["deepseek", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("make", [dense, mixture])
@pytest.mark.parametrize("bucket_bytes", [1, 100_000, 1 << 28])
def test_buckets_hold_what_export_writes(make, layout, bucket_bytes):
    model = make()
    buckets = [*opfuse.weight_updates(model, layout, bucket_bytes=bucket_bytes)]
    assert same(received(buckets), opfuse.export_weights(model, layout).tensors)
    assert all(bucket.data.nbytes <= bucket_bytes or len(bucket.entries) == 1 for bucket in buckets)
    assert all(start % 256 == 0 for bucket in buckets for *_, start in bucket.entries)
    if bucket_bytes == 1 << 28:
        assert len(buckets) == 1


def test_stored_weights_are_sent_byte_for_byte_after_each_step():
    model = stored()
    for _ in range(2):
        found = received([*opfuse.weight_updates(model, "deepseek")])
        weight = model.model.layers[1].mlp.up_proj.weight
        assert isinstance(weight, QuantizedTensor)
        assert torch.equal(found["model.layers.1.mlp.up_proj.weight"].view(torch.uint8), weight.plane("rowwise").data)
        step(model, [*model.parameters()])


def test_plain_weights_are_cast_as_the_recipe_casts_them():
    """A layer with the bytes that were sent computes what the trained one computes; the layout's own rule gives others."""
    torch.manual_seed(0)
    layer, x = nn.Linear(128, 256, bias=False), torch.randn(32, 128, dtype=BF16)
    for recipe, layout in ((Float8BlockScaling(), "deepseek"), (MXFP8BlockScaling(), "mxfp8")):
        model = nn.Sequential(layer)
        opfuse.fuse_(model, recipe)
        with torch.autocast("cpu", BF16):
            wanted = model(x)
        (bucket,) = opfuse.weight_updates(model, layout, recipe=recipe, dtype=BF16)
        rollout = nn.Sequential(nn.Linear(128, 256, bias=False, dtype=BF16))
        rollout.load_state_dict(opfuse.import_weights(bucket.tensors()), assign=True)
        opfuse.fuse_(rollout, recipe)
        assert torch.equal(rollout(x), wanted)
        (other,) = opfuse.weight_updates(model, layout)
        assert not same(other.tensors(), bucket.tensors())
        opfuse.unfuse_(model)


def test_only_what_was_written_since_is_sent():
    model, sent = stored(), {}
    everything = received([*opfuse.weight_updates(model, "deepseek", sent=sent)])
    assert [*opfuse.weight_updates(model, "deepseek", sent=sent)] == []
    step(model, [*model.model.layers[1].mlp.parameters()])
    found = received([*opfuse.weight_updates(model, "deepseek", sent=sent)])
    assert found.keys() == {name for name in everything if name.startswith("model.layers.1.mlp.")}
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    first = next(opfuse.weight_updates(model, "deepseek", sent=sent, bucket_bytes=1))
    assert len(first.entries) == 1  # a pass that is not finished notes nothing
    found = received([*opfuse.weight_updates(model, "deepseek", sent=sent)])
    assert found.keys() == {"model.norm.weight", "lm_head.weight"}
    assert [*opfuse.weight_updates(model, "deepseek", sent=sent)] == []


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.register_buffer("kept", torch.tensor(3))
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_parameter("none", None)


def test_buffers_of_any_shape_are_sent_and_those_that_do_not_persist_are_not():
    model = Buffered()
    found = received([*opfuse.weight_updates(model, "mxfp8")])
    assert same(found, opfuse.export_weights(model, "mxfp8").tensors)
    assert found["kept"].item() == 3
    assert found["empty"].shape == (0, 4)
    assert "passing" not in found


def _child(queue, back) -> None:
    tensors = queue.get().tensors()
    back.put({name: float(tensor.float().abs().sum()) for name, tensor in tensors.items() if tensor.dtype == BF16})


def test_a_bucket_passes_to_another_process():
    """By torch's queue: shared memory on a CPU, CUDA IPC for a GPU."""
    queue, back = FORKSERVER.Queue(), FORKSERVER.Queue()
    process = FORKSERVER.Process(target=_child, args=(queue, back))
    process.start()
    (bucket,) = opfuse.weight_updates(dense(), "deepseek")
    queue.put(bucket)
    got = back.get()
    process.join()
    assert got == {name: float(each.float().abs().sum()) for name, each in bucket.tensors().items() if each.dtype == BF16}


def test_wrong_arguments_are_refused_before_the_first_bucket():
    with pytest.raises(ConversionError, match="bucket_bytes: wants 1 or more, got 0"):
        opfuse.weight_updates(dense(), "deepseek", bucket_bytes=0)
    with pytest.raises(ConversionError, match="wants a layout, got 'deepsek'; did you mean 'deepseek'"):
        opfuse.weight_updates(dense(), "deepsek")
    with pytest.raises(ConversionError, match=r"recipe=MXFP8BlockScaling.*use the layout mxfp8"):
        opfuse.weight_updates(dense(), "deepseek", recipe=MXFP8BlockScaling())
    with pytest.raises(ConversionError, match="leave recipe out"):
        opfuse.export_weights(dense(), "deepseek", recipe=DelayedScaling())
