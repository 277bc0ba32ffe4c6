"""Models that compressed-tensors has compressed are trained from their bytes, and write them; transformers reads them again."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import opfuse
from opfuse.errors import ConversionError, OpfuseWarning
from opfuse.interchange import stored_modules
from opfuse.recipes import CustomRecipe, Float8BlockScaling, MXFP8BlockScaling
from opfuse.tensors.quantizers import NVFP4Quantizer
from opfuse.tensors.tensor import QuantizedTensor
from tests.interchange.training import trained_on
from tests.turns import in_turn

pytest.importorskip("compressed_tensors")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig, LlamaForCausalLM

BF16 = torch.bfloat16
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 128,
}
WORDS = torch.arange(64).reshape(2, 32) % 128
UP = "model.layers.0.mlp.up_proj"
RECIPES = {
    "fp8_block": Float8BlockScaling(scale_rule="compressed_tensors", use_f32_scales=True),
    "fp8_dynamic": CustomRecipe(qfactory="fp8_row_scaled"),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": CustomRecipe(qfactory=lambda role: NVFP4Quantizer()),
    "mxfp4": MXFP8BlockScaling(on_recipe_change="dequantize"),
}
each_layout = pytest.mark.parametrize("layout", RECIPES)


def bits(state: Any) -> dict[str, tuple[torch.dtype, Any]]:
    return {name: (value.dtype, value.contiguous().view(torch.uint8).tolist()) for name, value in state.items()}


def checkpoint(layout: str, folder: Path) -> Path:
    """A compressed checkpoint with scales in bf16, in which llm-compressor writes those of a model in bf16."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(BF16)
    tensors, config = opfuse.export_weights(model, layout)
    narrow = {name: value.to(BF16) if layout.startswith("fp8") and "scale" in name else value for name, value in tensors.items()}
    model.config.quantization_config = config
    model.save_pretrained(folder, state_dict=narrow)
    return folder


def loaded(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=BF16, **options)


def linear(layout: str, folder: Path) -> Any:
    """One layer of a compressed model; the model, which would decompress it, is gone."""
    return loaded(checkpoint(layout, folder)).get_submodule(UP)


@each_layout
def test_what_nothing_has_changed_is_written_as_it_was_read(layout, tmp_path):
    before = checkpoint(layout, tmp_path / "given")
    model = loaded(before)
    state = bits(model.state_dict())
    report = opfuse.fuse_(model, RECIPES[layout])
    assert isinstance(model.get_parameter(f"{UP}.weight"), QuantizedTensor)
    assert {entry.status for entry in report if entry.kind == "Linear" and entry.path != "lm_head"} <= {"fused", "joined"}
    model(input_ids=WORDS)  # at which a compressed model is decompressed
    assert bits(model.state_dict()) == state
    model.save_pretrained(tmp_path / "saved")
    assert bits(load_file(tmp_path / "saved/model.safetensors")) == bits(load_file(before / "model.safetensors"))
    assert bits(opfuse.export_weights(model, layout).tensors).keys() == bits(load_file(before / "model.safetensors")).keys()
    configs = [json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "saved", before)]
    for key in ("quant_method", "quantization_status", "format"):
        assert configs[0]["quantization_config"][key] == configs[1]["quantization_config"][key], key


@each_layout
def test_it_multiplies_the_values_of_the_checkpoint(layout, tmp_path):
    model, values = (loaded(checkpoint(layout, tmp_path), **options) for options in ({}, dequantized()))
    opfuse.fuse_(model, RECIPES[layout])
    for name, value in values.state_dict().items():
        held = model.get_parameter(name)
        assert torch.equal(held.dequantize() if isinstance(held, QuantizedTensor) else held, value), name
    losses = [float(each(input_ids=WORDS, labels=WORDS).loss.detach()) for each in (model, values)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


def dequantized() -> dict[str, Any]:
    return {"quantization_config": CompressedTensorsConfig(dequantize=True)}


@pytest.mark.parametrize("layout", in_turn(RECIPES, of=2))
def test_a_checkpoint_is_trained_in_full_and_read_by_transformers(layout, tmp_path):
    model = loaded(checkpoint(layout, tmp_path / "given"))
    opfuse.fuse_(model, RECIPES[layout])
    before = bits(model.state_dict())
    optimizer = opfuse.with_masters(torch.optim.AdamW(model.parameters(), lr=5e-3))
    losses = trained_on(WORDS, model, optimizer, 5)
    assert losses[-1] < 0.9 * losses[0]
    assert all(codes != before[name] for name, codes in bits(model.state_dict()).items() if "mlp" in name and "scale" not in name)
    model.save_pretrained(tmp_path / "trained")
    values = loaded(tmp_path / "trained", **dequantized())
    held = model.get_parameter(f"{UP}.weight").dequantize()
    assert torch.equal(held, values.get_parameter(f"{UP}.weight"))


@each_layout
def test_unfuse_gives_the_compressed_model_back(layout, tmp_path):
    model, untouched = (loaded(checkpoint(layout, tmp_path)) for _ in range(2))
    opfuse.fuse_(model, RECIPES[layout])
    opfuse.unfuse_(model)
    assert bits(model.state_dict()) == bits(untouched.state_dict())
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [
        name for name, p in untouched.named_parameters() if p.requires_grad
    ]
    assert torch.equal(*(each(input_ids=WORDS).logits for each in (model, untouched)))


def test_modules_that_are_not_converted_are_decompressed_at_the_first_call(tmp_path):
    model, values = (loaded(checkpoint("fp8_block", tmp_path), **options) for options in ({}, dequantized()))
    report = opfuse.fuse_(model, RECIPES["fp8_block"], filter_fn=lambda module, path: not path.endswith("down_proj"))
    down, path = model.model.layers[0].mlp.down_proj, "model.layers.0.mlp.down_proj"
    assert report[path].status == "kept"
    assert bits(opfuse.export_weights(model, "fp8_block").tensors)[f"{path}.weight"][0] == torch.float8_e4m3fn
    with pytest.raises(ConversionError, match="write it as 'fp8_block', or convert the model first"):
        opfuse.export_weights(model, "deepseek")
    with pytest.warns(OpfuseWarning, match=f"first call decompresses {path}, which save_pretrained then writes plain"):
        model(input_ids=WORDS)
    assert torch.equal(down.weight, values.get_parameter(f"{path}.weight"))
    assert isinstance(model.get_parameter(f"{UP}.weight"), QuantizedTensor)


def whole(model: nn.Module, recipe: Any) -> None:
    opfuse.fuse_(model, recipe)
    opfuse.unfuse_(model)


def failed(model: nn.Module, recipe: Any) -> None:
    with pytest.raises(ConversionError):
        opfuse.fuse_(model, recipe, policy={"no such layer": None})


def broken(model: nn.Module, recipe: Any) -> None:
    """The memory ends in the middle."""
    own, made = stored_modules._stored, []

    def stored(*args: Any) -> Any:
        made.append(args)
        if len(made) == 4:
            raise torch.OutOfMemoryError
        return own(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_modules, "_stored", stored)
        with pytest.raises(torch.OutOfMemoryError):
            opfuse.fuse_(model, recipe)


@pytest.mark.parametrize("change", [whole, failed, broken])
def test_what_was_undone_is_as_the_library_made_it(change, tmp_path):
    """It is decompressed by the library at its first call, and what it writes then is what it says."""
    model, untouched = (loaded(checkpoint("fp8_block", tmp_path / "given")) for _ in range(2))
    change(model, RECIPES["fp8_block"])
    logits = []
    for number, each in enumerate((model, untouched)):
        logits.append(each(input_ids=WORDS).logits)
        each.save_pretrained(tmp_path / str(number))
    assert torch.equal(*logits)
    files = [load_file(tmp_path / str(number) / "model.safetensors") for number in range(2)]
    configs = [json.loads((tmp_path / str(number) / "config.json").read_text()) for number in range(2)]
    assert bits(files[0]) == bits(files[1])
    assert configs[0] == configs[1]


@pytest.mark.parametrize("change", [whole, failed, broken])
def test_layers_that_share_a_matrix_share_it_once_it_was_undone(change, tmp_path):
    model = loaded(checkpoint("fp8_block", tmp_path))
    layer = model.model.layers[0].mlp
    layer.gate_proj.weight, layer.gate_proj.weight_scale = layer.up_proj.weight, layer.up_proj.weight_scale
    change(model, RECIPES["fp8_block"])
    assert layer.gate_proj.weight is layer.up_proj.weight
    assert layer.gate_proj.weight_scale is layer.up_proj.weight_scale


def test_a_part_of_a_compressed_model_is_refused(tmp_path):
    """The first call of the whole would put other forwards in the place of those of the part."""
    model = loaded(checkpoint("fp8_block", tmp_path))
    with pytest.raises(ConversionError, match=r"wants the whole model that was compressed.* Cure: fuse_ the whole model"):
        opfuse.fuse_(model.model, RECIPES["fp8_block"])
    assert model(input_ids=WORDS).logits.isfinite().all()


def test_layers_with_the_same_codes_and_other_scales_stay_apart(tmp_path):
    model = loaded(checkpoint("fp8_block", tmp_path))
    layer = model.model.layers[0].mlp
    layer.gate_proj.weight = layer.up_proj.weight
    layer.gate_proj.weight_scale = nn.Parameter(2 * layer.up_proj.weight_scale.detach())
    opfuse.fuse_(model, RECIPES["fp8_block"])
    assert torch.equal(layer.gate_proj.weight.dequantize(), 2 * layer.up_proj.weight.dequantize())


def test_copies_and_pickles_keep_their_bytes(tmp_path):
    model = loaded(checkpoint("fp8_block", tmp_path))
    opfuse.fuse_(model, RECIPES["fp8_block"])
    logits = model(input_ids=WORDS).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(input_ids=WORDS).logits, logits)
        assert bits(other.state_dict()) == bits(model.state_dict())
        opfuse.unfuse_(other)
        assert other.get_submodule(UP).weight.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("layout", ["fp8_block", "mxfp4"])
def test_adapters_train_on_a_compressed_base(layout, tmp_path):
    peft = pytest.importorskip("peft")
    model = loaded(checkpoint(layout, tmp_path))
    state = bits(model.state_dict())
    if layout == "mxfp4":
        model.requires_grad_(False)
    opfuse.fuse_(model, RECIPES[layout])
    assert any(p.requires_grad for p in model.parameters()) == (layout != "mxfp4")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "up_proj", "down_proj"]))
    opfuse.fuse_(adapted, RECIPES[layout])
    losses = trained_on(WORDS, adapted, torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2), 6)
    assert losses[-1] < 0.95 * losses[0]
    base = {name.replace(".base_layer", ""): value for name, value in model.state_dict().items() if "lora" not in name}
    assert bits(base) == state


def test_what_opfuse_cannot_hold_is_refused_with_a_reason(tmp_path):
    def refused(change: Any, layout: str = "fp8_block") -> str:
        model = nn.Sequential(nn.LayerNorm(128, dtype=BF16), linear(layout, tmp_path / layout), nn.Linear(256, 128, dtype=BF16))
        model.ct_decompress_hook = model.register_forward_pre_hook(print)  # of the library, on the whole model
        change(model[1])
        report = opfuse.fuse_(model, RECIPES[layout])
        entry = report["1"]
        assert entry.status == "refused"
        assert "CompressedTensorsConfig(dequantize=True)" in entry.cure
        return entry.got

    def static(module: nn.Module) -> None:
        module.register_parameter("input_scale", nn.Parameter(torch.ones(1)))

    def one_scale(module: nn.Module) -> None:
        module.weight_scale = nn.Parameter(torch.ones(1, dtype=BF16))

    def cast_result(module: Any) -> None:
        module.quantization_scheme.output_activations = module.quantization_scheme.input_activations

    def no_amax(module: Any) -> None:
        module.weight_global_scale.data.fill_(-1.0)

    assert "input_scale beside weight and weight_scale" in refused(static)
    assert "weight_scale torch.bfloat16 (1,)" in refused(one_scale)
    assert "a cast of what the layer returns" in refused(cast_result)
    assert "a global scale that follows from no fp32 amax" in refused(no_amax, "nvfp4")


def test_codes_without_their_scales_and_arrays_of_other_sizes_are_refused(tmp_path):
    model = loaded(checkpoint("fp8_block", tmp_path))
    opfuse.fuse_(model, RECIPES["fp8_block"])
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"Missing key.*up_proj\.weight_scale"):
        model.load_state_dict({name: value for name, value in state.items() if name != f"{UP}.weight_scale"})
    with pytest.raises(RuntimeError, match=r"up_proj\.weight: wants arrays of fp8_block for \(256, 128\)"):
        model.load_state_dict({**state, f"{UP}.weight_scale": torch.ones(1, 1)})
    model.load_state_dict(state)
    assert bits(model.state_dict()) == bits(state)
