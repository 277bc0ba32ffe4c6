"""The parts of examples/vllm_plugin that need no vLLM; with vLLM, also that it knows the quantization."""

import importlib
import importlib.util
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

import opfuse

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "vllm_plugin"


@pytest.fixture
def plugin(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return lambda name: importlib.import_module(f"opfuse_vllm.{name}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_stored_matrix_multiplies_with_the_bits_of_training(plugin, dtype):
    """Also the parts of one that vLLM has joined, and few rows of many."""
    product = plugin("product")
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(256, 128, bias=False, dtype=dtype) for name in ("q_proj", "k_proj", "v_proj")})
    tensors = opfuse.export_weights(model, "deepseek").tensors
    joined = [torch.cat([tensors[f"{name}.{part}"] for name in model]) for part in ("weight", "weight_scale_inv")]
    served = product.product_of(*joined, dtype)
    opfuse.fuse_(model, product.RECIPE)
    x = torch.randn(70, 256, dtype=dtype)
    trained = torch.cat([each(x) for each in model.values()], 1)
    with torch.no_grad():
        assert torch.equal(served(x), trained)
        assert torch.equal(served(x[:1]), trained[:1])
    assert served.weight.dequantize().dtype == dtype


def test_which_layers_a_checkpoint_holds_plain(plugin):
    is_plain, packed = plugin("product").is_plain, {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    assert is_plain("lm_head", ["lm_head"], packed)
    assert not is_plain("model.layers.1.self_attn.qkv_proj", ["model.layers.0"], packed)
    assert is_plain("model.layers.0.self_attn.qkv_proj", ["model.layers.0"], packed)
    with pytest.raises(ValueError, match="all quantized or all plain"):
        is_plain("a.qkv_proj", ["a.q_proj"], packed)


def test_the_entry_point_is_there(plugin):
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text(encoding="utf-8"))
    module, name = project["project"]["entry-points"]["vllm.general_plugins"]["opfuse"].split(":")
    register = getattr(importlib.import_module(module), name)
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(ModuleNotFoundError, match="vllm"):
            register()
        return
    register()
    found = importlib.import_module("vllm.model_executor.layers.quantization").get_quantization_config("opfuse")
    assert found.from_config({"weight_block_size": [128, 128]}).get_name() == "opfuse"
