"""Scales of an engine's cache of keys and values: no weight, and yet they are neither lost nor changed between two files."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import opfuse
from opfuse.errors import ConversionError
from opfuse.interchange.layouts import is_of_cache

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from transformers import LlamaConfig, LlamaForCausalLM

BF16 = torch.bfloat16
SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
NAMES = {
    "compressed-tensors": ("self_attn.k_scale", "self_attn.v_scale"),
    "ModelOpt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "vLLM": ("self_attn.attn.k_scale", "self_attn.attn.v_scale", "self_attn.attn.q_scale", "self_attn.attn.prob_scale"),
    "one for both": ("self_attn.kv_scale",),
    "projections": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    "integers": ("self_attn.k_scale", "self_attn.k_zero_point", "self_attn.v_scale", "self_attn.v_zero_point"),
}


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).to(BF16)


def scales_of(kind: str) -> dict[str, torch.Tensor]:
    """Of both layers, in the dtypes and shapes that there are: scalars, one element, one for each head."""
    torch.manual_seed(1)
    made = (torch.rand(()), torch.rand(1).to(BF16), torch.rand(2, 1, 1), torch.randint(-8, 8, (1,), dtype=torch.int8))
    return {f"model.layers.{i}.{name}": made[(i + n) % 4] for i in range(2) for n, name in enumerate(NAMES[kind])}


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (left.dtype, left.shape) == (right.dtype, right.shape) and torch.equal(left, right)


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("layout", ["deepseek", "fp8_dynamic"])
def test_they_travel_from_file_to_file(kind, layout):
    model, file = llama(), scales_of(kind)
    tensors = opfuse.export_weights(model, layout).tensors | file
    found: dict[str, torch.Tensor] = {}
    model.load_state_dict(opfuse.import_weights(tensors, cache_scales=found), assign=True)  # strictly: none is left in it
    again = opfuse.export_weights(model, layout, cache_scales=found).tensors
    assert found.keys() == file.keys()
    assert again.keys() == tensors.keys()
    assert all(same(again[name], value) for name, value in file.items())
    sent = {
        name: t
        for bucket in opfuse.weight_updates(model, layout, cache_scales=found, bucket_bytes=1 << 14)
        for name, t in bucket.tensors().items()
    }
    assert sent.keys() == tensors.keys()
    assert all(same(sent[name], value) for name, value in file.items())
    assert not [name for name in opfuse.export_weights(model, layout).tensors if is_of_cache(name)]


def test_those_that_nobody_takes_are_named_when_the_state_dict_is_loaded():
    model, file = llama(), scales_of("compressed-tensors")
    state = opfuse.import_weights(opfuse.export_weights(model, "deepseek").tensors | file)
    assert all(state[name] is value for name, value in file.items())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*model.layers.0.self_attn.k_scale"):
        model.load_state_dict(state)


def test_updates_send_them_once():
    model, found, sent = llama(), scales_of("projections"), {}
    names = [
        {name for bucket in opfuse.weight_updates(model, "deepseek", cache_scales=found, sent=sent) for name in bucket.tensors()}
        for _ in range(2)
    ]
    assert found.keys() < names[0]
    assert names[1] == set()


def test_a_model_of_compressed_tensors_has_them_and_reads_them(tmp_path):
    """The config says of the cache what the file's own config said, since the scales do not say it."""
    other = llama()
    apply_quantization_config(other, QuantizationConfig(config_groups={}, kv_cache_scheme=SCHEME))
    names = other.state_dict().keys() - llama().state_dict().keys()
    if not names:  # as 0.20.0 with transformers 5.24
        pytest.skip("this compressed-tensors finds no caches in models of this transformers")
    assert all(map(is_of_cache, names))
    model, scales = llama(), {name: torch.rand(1).to(BF16) for name in sorted(names)}
    tensors, config = opfuse.export_weights(model, "fp8_dynamic", cache_scales=scales)
    assert "kv_cache_scheme" not in config
    model.config.quantization_config = config | {"kv_cache_scheme": SCHEME}
    model.save_pretrained(tmp_path, state_dict=dict(tensors))
    read = LlamaForCausalLM.from_pretrained(tmp_path, dtype=BF16).state_dict()
    assert all(same(read[name], value) for name, value in scales.items())


def test_other_tensors_are_no_scales_of_a_cache():
    model = llama()
    for name in ("model.layers.0.self_attn.k_proj.input_scale", "lm_head.weight"):
        wanted = rf"cache_scales: wants names that end in one of k_scale, .*got '{name}'. Cure: pass the dict"
        with pytest.raises(ConversionError, match=wanted):
            opfuse.export_weights(model, "deepseek", cache_scales={name: torch.ones(1)})
        with pytest.raises(ConversionError, match=wanted):
            opfuse.weight_updates(model, "deepseek", cache_scales={name: torch.ones(1)})
    model.model.layers[0].self_attn.register_buffer("k_scale", torch.ones(1))
    with pytest.raises(ConversionError, match="that the model does not have"):
        opfuse.export_weights(model, "deepseek", cache_scales={"model.layers.0.self_attn.k_scale": torch.ones(1)})
