"""Weights that others wrote are read, those that are written others read: bytes and values, by their own readers."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import opfuse
from opfuse import ops
from opfuse.errors import ConversionError
from opfuse.interchange.layouts import LAYOUTS, OF_LINEAR_LAYERS, READ
from opfuse.interchange.parity import compare
from opfuse.recipes import CustomRecipe, Float8BlockScaling
from opfuse.tensors.tensor import QuantizedTensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, preset_name_to_scheme
    from transformers import LlamaConfig, LlamaForCausalLM

from tests.convert.blocks import Holder
from tests.oracles import libraries

BF16 = torch.bfloat16
PRESETS = {"fp8_block": "FP8_BLOCK", "fp8_dynamic": "FP8_DYNAMIC", "mxfp8": "MXFP8", "nvfp4": "NVFP4A16", "mxfp4": "MXFP4A16"}
each_layout = pytest.mark.parametrize("layout", OF_LINEAR_LAYERS)


class Model(nn.Module):
    """Names as a mixture has them; a weight whose blocks are partial."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.gate = nn.Linear(192, 320, dtype=BF16), nn.Linear(192, 4, bias=False, dtype=BF16)
        self.norm, self.lm_head = nn.LayerNorm(320, dtype=BF16), nn.Linear(320, 16, bias=False, dtype=BF16)


def library_values(layout: str, arrays: dict[str, torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
    """What the library itself makes of a weight's arrays, in fp32 or bf16."""
    if layout == "deepseek":
        codes, scales = arrays["weight"].float(), arrays["weight_scale_inv"]
        blocks = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return codes * blocks[: codes.shape[0], : codes.shape[1]]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    return BaseCompressor.get_value_from_registry(scheme.format).decompress(dict(arrays), scheme)["weight"]


def arrays_of(tensors: dict[str, torch.Tensor], path: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(path + "."): t for name, t in tensors.items() if name.startswith(path + ".weight")}


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (left.dtype, left.shape) == (right.dtype, right.shape) and torch.equal(
        left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
    )


@each_layout
def test_a_library_s_own_reader_reads_the_values_that_were_written(layout):
    model = Model()
    tensors, config = opfuse.export_weights(model, layout)
    read = library_values(layout, arrays_of(tensors, "up"), config)
    weight = opfuse.import_weights(tensors)["up.weight"]
    assert isinstance(weight, QuantizedTensor)
    if layout == "nvfp4":  # its reader rounds to bf16
        assert torch.allclose(weight.dequantize(torch.float32), read.float(), rtol=2**-7)
        plain = opfuse.import_weights(tensors, dequantize=True, dtype=torch.float32)["up.weight"]
        assert torch.allclose(plain, weight.dequantize(torch.float32), rtol=2**-22)
    else:
        assert torch.equal(weight.dequantize(torch.float32), read.float())
    assert (weight.dequantize() - model.up.weight).norm() < 0.2 * model.up.weight.norm()
    assert all(same(tensors[f"{name}.weight"], model.get_parameter(f"{name}.weight")) for name in ("gate", "lm_head", "norm"))


@pytest.mark.parametrize("layout", PRESETS)
def test_compressed_tensors_reads_the_config_as_its_preset(layout):
    _, config = opfuse.export_weights(Model(), layout)
    read = QuantizationConfig.model_validate(config)
    group, preset = read.config_groups["group_0"], preset_name_to_scheme(PRESETS[layout], ["Linear"])
    assert isinstance(group, QuantizationScheme)
    for args in ("weights", "input_activations"):
        left, right = getattr(group, args), getattr(preset, args)
        assert (left is None) == (right is None)
        fields = ("num_bits", "type", "strategy", "group_size", "block_structure", "dynamic", "scale_dtype", "symmetric")
        assert left is None or [getattr(left, name) for name in fields] == [getattr(right, name) for name in fields]
    assert read.ignore == ["gate", "lm_head"]
    assert BaseCompressor.get_value_from_registry(group.format).can_compress(nn.Linear, group)


@each_layout
def test_a_round_trip_changes_no_bit(layout):
    foreign = LAYOUTS[layout]
    model = Model()
    tensors, config = opfuse.export_weights(model, layout)

    def stored(role):
        return foreign.quantizer.copy()

    with opfuse.quantized_model_init(recipe=CustomRecipe(qfactory=stored)):
        other = nn.ModuleDict({"up": ops.Linear(192, 320, dtype=BF16)})
    for name in ("gate", "norm", "lm_head"):
        other[name] = getattr(model, name)
    other.load_state_dict(opfuse.import_weights(tensors))
    again, same_config = opfuse.export_weights(other, layout)
    assert again.keys() == tensors.keys()
    assert [name for name in tensors if not same(again[name], tensors[name])] == []
    assert same_config == config
    state = opfuse.from_planes(opfuse.to_planes(other.state_dict()))  # and by way of our own files
    assert same(
        opfuse.export_weights(Holder(state["up.weight"]), layout).tensors[f"up.{foreign.parts[0].suffix}"].cpu(),
        again[f"up.{foreign.parts[0].suffix}"],
    )


@pytest.mark.parametrize("layout", PRESETS)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_what_the_library_wrote_is_read_and_written_again(layout, dtype):
    """Narrower scales come back as fp32, of the same values."""
    x = Model().up.weight.detach().to(dtype)
    scheme = preset_name_to_scheme(PRESETS[layout], ["Linear"])
    if layout == "mxfp4":
        codes, scales = libraries.compressed_tensors_mxfp4(x)
        arrays = {"up.weight_packed": codes, "up.weight_scale": scales}
    elif layout == "nvfp4":
        codes, scales, overall = libraries.compressed_tensors_nvfp4(x)
        arrays = {
            "up.weight_packed": codes,
            "up.weight_scale": scales.view(torch.float8_e4m3fn),
            "up.weight_global_scale": overall,
        }
    else:
        codes, scales = libraries.compressed_tensors(x, PRESETS[layout])
        kept = scales if layout == "mxfp8" else scales.to(dtype)
        arrays = {"up.weight": codes.view(torch.float8_e4m3fn), "up.weight_scale": kept}
    weight = opfuse.import_weights(arrays)["up.weight"]
    again = opfuse.export_weights(Holder(weight), layout).tensors
    assert again.keys() == arrays.keys()
    for name, array in arrays.items():
        assert same(again[name], array.float() if array.dtype == BF16 else array)
    assert scheme.weights is not None


def modelopt(arrays: dict[str, torch.Tensor], amax: torch.Tensor) -> dict[str, torch.Tensor]:
    """Arrays of compressed-tensors' NVFP4 as ModelOpt names them: a scale of the whole weight that decodes, amax / (6 * 448)."""
    weight, scale = arrays["weight_packed"], arrays["weight_scale"]
    return {"weight": weight, "weight_scale": scale, "weight_scale_2": (amax / torch.tensor(6.0 * 448.0)).reshape(())}


def named(arrays: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"up.{suffix}": array for suffix, array in arrays.items()}


def test_a_weight_of_modelopt_is_read_bit_for_bit():
    """Its codes and block scales are those of compressed-tensors; static scales of activations are left out."""
    model = Model()
    arrays = arrays_of(opfuse.export_weights(model, "nvfp4").tensors, "up")
    found = named(modelopt(arrays, model.up.weight.abs().max().float())) | {"up.input_scale": torch.ones(())}
    state = opfuse.import_weights(found)
    assert [*state] == ["up.weight"]
    again = opfuse.export_weights(Holder(state["up.weight"]), "nvfp4").tensors
    assert [suffix for suffix, array in arrays.items() if not same(again[f"up.{suffix}"], array)] == []
    values = opfuse.import_weights(found, dequantize=True, dtype=torch.float32)["up.weight"]
    assert torch.allclose(values, state["up.weight"].dequantize(torch.float32), rtol=2**-22)
    assert {each.name: each.status for each in compare(found, again)} == {"up.weight": "equal", "up.input_scale": "only in MODEL"}
    with pytest.raises(
        ConversionError, match=r"got 'modelopt'. Cure: write nvfp4, whose readers need no calibration; use one of"
    ):
        opfuse.export_weights(model, "modelopt")


@pytest.mark.parametrize(("suffix", "first"), [("weight_global_scale", 0x3FA00000), ("weight_scale_2", 0x3FE00000)])
def test_a_global_scale_that_no_amax_has_is_told_and_read_as_values_or_as_the_next(suffix, first):
    tensors = opfuse.export_weights(Model(), "nvfp4").tensors
    written = arrays_of(tensors, "up")
    kept = written if suffix in written else modelopt(written, torch.ones(()))
    refused = []
    for bits in range(first, first + 16):  # from 1.25 on, and from 1.75
        overall = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
        found = named(kept | {suffix: overall})
        try:
            weight = opfuse.import_weights(found)["up.weight"]
        except ConversionError as error:
            refused.append((str(error), found))
        else:
            assert same(weight.record.rowwise.data, written["weight_packed"])
            if suffix in written:
                assert opfuse.export_weights(Holder(weight), "nvfp4").tensors[f"up.{suffix}"] == overall
    assert 0 < len(refused) < 16
    assert all("pass dequantize=True" in text and "nearest_scale=True" in text for text, _ in refused)
    _, found = refused[0]
    near = opfuse.import_weights(found, nearest_scale=True)["up.weight"]
    arrays = opfuse.export_weights(Holder(near), "nvfp4").tensors
    assert all(same(arrays[f"up.{name}"], written[name]) for name in ("weight_packed", "weight_scale"))
    values = opfuse.import_weights(found, dequantize=True, dtype=torch.float32)["up.weight"]
    assert torch.allclose(near.dequantize(torch.float32), values, rtol=2**-21)
    assert (near.dequantize(torch.float32) != values).any()
    for bad in (0.0, -1.0, torch.inf, torch.nan, 1e-38 if suffix in written else 1e36):
        with pytest.raises(ConversionError, match=f"up.{suffix}: wants the scale of some fp32 amax"):
            opfuse.import_weights(named(kept | {suffix: torch.tensor([bad])}), nearest_scale=True)


def test_the_page_is_true():
    page = (Path(opfuse.__file__).parents[1] / "docs" / "weights.md").read_text(encoding="utf-8")
    space: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "weights.md", "exec"), space)
    assert space["config"]["modules_to_not_convert"] == ["2"]
    assert isinstance(space["quantized"].weight, QuantizedTensor)
    assert torch.equal(space["model"][0].weight, space["quantized"].weight.dequantize())
    assert all(f"| `{name}` |" in page for name in READ)
    assert isinstance(space["gpt_oss"].model.layers[0].mlp.experts.down_proj, QuantizedTensor)
    tokens = torch.randint(0, 128, (2, 16))
    space["gpt_oss"](input_ids=tokens, labels=tokens).loss.backward()
    space["optimizer"].step()


def test_a_deepseek_checkpoint_is_trained_from():
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(128, 256, bias=False), nn.GELU(approximate="tanh"), nn.Linear(256, 128, bias=False)).to(
        BF16
    )
    tensors, config = opfuse.export_weights(teacher, "deepseek")
    assert config["weight_block_size"] == [128, 128]
    recipe = Float8BlockScaling(scale_rule="deepgemm", use_f32_scales=True)
    with opfuse.quantized_model_init(recipe=recipe):
        model = ops.Sequential(
            ops.Linear(128, 256, bias=False, dtype=BF16), ops.GELU(), ops.Linear(256, 128, bias=False, dtype=BF16)
        )
    model.load_state_dict(opfuse.import_weights(tensors))
    assert same(opfuse.export_weights(model, "deepseek").tensors["0.weight"], tensors["0.weight"])
    optimizer = opfuse.with_masters(torch.optim.Adam(model.parameters(), lr=1e-3))
    x, target, losses = torch.randn(128, 128, dtype=BF16), torch.randn(128, 128, dtype=BF16), []
    for _ in range(8):
        optimizer.zero_grad()
        with opfuse.autocast(recipe=recipe):
            loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    trained = opfuse.export_weights(model, "deepseek").tensors
    assert not same(trained["0.weight"], tensors["0.weight"])
    teacher.load_state_dict(opfuse.import_weights(trained))  # a plain model takes the values
    assert torch.equal(teacher[0].weight, model[0].weight.dequantize())


@pytest.mark.parametrize("layout", ["deepseek", "fp8_dynamic", "nvfp4"])
def test_stock_transformers_reads_what_save_pretrained_wrote(layout, tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).to(BF16)
    tensors, config = opfuse.export_weights(model, layout)
    model.config.quantization_config = config
    model.save_pretrained(tmp_path, state_dict=dict(tensors))
    read = LlamaForCausalLM.from_pretrained(tmp_path, dtype=BF16)
    read(torch.arange(4)[None])  # which decompresses
    state = read.state_dict()
    wanted = opfuse.import_weights(tensors, dequantize=True)
    assert [name for name in wanted if not torch.allclose(state[name].float(), wanted[name].float(), rtol=2**-7)] == []
    assert torch.equal(state["lm_head.weight"], model.lm_head.weight)


def test_what_cannot_be_written_or_read_is_named():
    model = Model()
    with pytest.raises(ConversionError, match=r"wants a layout, got 'deepsek'.*deepseek"):
        opfuse.export_weights(model, "deepsek")
    with pytest.raises(ConversionError, match=r"ignore: wants names of linear layers, got 'lm_haed'; did you mean 'lm_head'\?"):
        opfuse.export_weights(model, "deepseek", ignore=["lm_haed"])
    stored = LAYOUTS["mxfp8"].quantizer(model.up.weight.detach())
    with pytest.raises(
        ConversionError, match=r"up.weight: wants a weight in fp8_block_2d_e4m3, got mxfp8_e4m3. Cure: write it as mxfp8"
    ):
        opfuse.export_weights(Holder(stored), "deepseek")
    odd = nn.ModuleDict({"up": nn.Linear(20, 20)})
    with pytest.raises(ConversionError, match=r"up.weight.*got torch.float32 \(20, 20\). Cure: leave it plain: ignore=\['up'"):
        opfuse.export_weights(odd, "mxfp8")
    assert opfuse.export_weights(odd, "mxfp8", ignore=["up"]).quantization_config["ignore"] == ["up"]
    tensors = opfuse.export_weights(model, "deepseek").tensors
    tensors["up.weight_scale_inv"] = tensors["up.weight_scale_inv"][:1]
    with pytest.raises(ConversionError, match=r"up: wants a weight in one of deepseek.*weight_scale_inv torch.float32 \(1, 2\)"):
        opfuse.import_weights(tensors)
    del tensors["up.weight"]
    with pytest.raises(ConversionError, match="got weight_scale_inv"):
        opfuse.import_weights(tensors, layout="deepseek")
