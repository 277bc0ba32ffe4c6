"""FP8 models of transformers are trained from their bytes, and write them: FP8Linear, FP8Experts, checkpoints, adapters."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import opfuse
from opfuse import ops
from opfuse.errors import ConversionError, OpfuseWarning, OptimizerError, RecipeError, SavedTensorError
from opfuse.interchange.layouts import LAYOUTS, OF_LINEAR_LAYERS
from opfuse.recipes import CustomRecipe, DelayedScaling, Float8BlockScaling, MXFP8BlockScaling
from opfuse.tensors.quantizers import Float8BlockQuantizer, NVFP4Quantizer
from opfuse.tensors.tensor import QuantizedTensor
from tests.interchange.training import trained_on
from tests.turns import in_turn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import (
        AutoModelForCausalLM,
        FineGrainedFP8Config,
        GptOssConfig,
        GptOssForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )
    from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

BF16 = torch.bfloat16
RECIPE = Float8BlockScaling(scale_rule="deepgemm", use_f32_scales=True)
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_local_experts": 4, "num_key_value_heads": 2, "head_dim": 64}
WORDS = torch.arange(64).reshape(2, 32) % 128
MODELS = {
    "dense": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mixture": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, moe_intermediate_size=128, num_experts=4)),
    "Mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, **EXPERTS)),
}
each_model = pytest.mark.parametrize("kind", MODELS)


def plain(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind]().to(BF16).eval()


@pytest.fixture
def without_gpu(monkeypatch):
    """transformers loads FP8 modules here as it does beside a GPU, and calls none of their kernels."""
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)


@pytest.mark.parametrize("kind", in_turn(["mixture", "Mixtral"], of=2))
def test_a_model_that_is_saved_runs_on_as_it_did(kind, tmp_path):
    """A Trainer saves as it trains: transformers writes the config's dtype and architectures then."""
    model = plain(kind)
    opfuse.fuse_(model, RECIPE)
    before = model(input_ids=WORDS).logits
    for place in ("first", "second"):
        model.save_pretrained(tmp_path / place)
        assert torch.equal(model(input_ids=WORDS).logits, before)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / place, dtype=BF16).eval()
        opfuse.fuse_(again, RECIPE)
        read = again(input_ids=WORDS).logits
        again.save_pretrained(tmp_path / "again")
        assert torch.equal(again(input_ids=WORDS).logits, read)
    _, model.config.quantization_config = opfuse.export_weights(model, "deepseek")
    assert torch.equal(model(input_ids=WORDS).logits, before)


@pytest.mark.parametrize("layout", ["deepseek", "fp8_block", "fp8_dynamic", "mxfp8", "nvfp4", "mxfp4"])
def test_experts_of_every_layout_can_be_saved(layout, tmp_path):
    """Gate and up are one matrix here, with one second scale, and two in files, whose tensors share no memory."""
    tensors, _ = opfuse.export_weights(plain("mixture"), layout)
    assert any("experts.0.up_proj" in name for name in tensors)
    save_file(dict(tensors), tmp_path / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors").keys() == tensors.keys()


def test_an_optimizer_from_before_the_conversion_is_told(tmp_path, without_gpu):
    """It holds codes, in whose place the model has stored parameters: it would train nothing."""
    checkpoint("dense", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    opfuse.fuse_(model, RECIPE)
    model(input_ids=WORDS, labels=WORDS).loss.backward()
    with pytest.raises(
        OptimizerError, match=r"AdamW.step: wants parameters of the model.*q_proj.weight.*Cure: make the optimizer"
    ):
        optimizer.step()
    later = opfuse.with_masters(torch.optim.AdamW(model.parameters(), lr=1e-2))
    later.step()
    opfuse.unfuse_(model)
    with pytest.raises(OptimizerError, match="as it was before fuse_ or unfuse_"):
        later.step()


def test_an_optimizer_from_before_the_conversion_steps_beside_frozen_codes(tmp_path, without_gpu):
    """Adapters and norms are trained by optimizers of all parameters: a frozen one that the model has no more loses nothing."""
    checkpoint("dense", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    norm = model.model.norm.weight
    for change in (lambda: opfuse.fuse_(model, RECIPE), lambda: opfuse.unfuse_(model), lambda: opfuse.fuse_(model, RECIPE)):
        change()
        norm.grad, before = torch.ones_like(norm), norm.detach().clone()
        optimizer.step()
        assert torch.equal(norm, before - 1)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_()
    with pytest.raises(OptimizerError, match=r"up_proj\.weight as it was before"):
        optimizer.step()


def checkpoint(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    """An FP8 checkpoint as DeepSeek's, written by transformers; its tensors."""
    model = plain(kind)
    tensors, config = opfuse.export_weights(model, "deepseek")
    model.config.quantization_config = config
    model.save_pretrained(folder, state_dict=dict(tensors))
    return load_file(folder / "model.safetensors")


def loaded(kind: str, folder: Path) -> nn.Module:
    checkpoint(kind, folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=BF16)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    def bits(x: torch.Tensor) -> torch.Tensor:
        return x.contiguous().view(torch.uint8)

    return one.keys() == other.keys() and all(
        (one[name].dtype, one[name].shape) == (other[name].dtype, other[name].shape)
        and torch.equal(bits(one[name]), bits(other[name]))
        for name in one
    )


def fp8_linear(into: int = 256, out: int = 256, *, scale_dtype: torch.dtype = torch.float32, **options: Any) -> FP8Linear:
    torch.manual_seed(0)
    module = FP8Linear(into, out, block_size=(128, 128), **options)
    rule = "deepgemm" if scale_dtype == torch.float32 else "te"
    quantizer = Float8BlockQuantizer(torch.float8_e4m3fn, scale_rule=rule, force_pow_2_scales=rule == "te")
    arrays = LAYOUTS["deepseek"].written("x", quantizer.quantize(torch.randn(out, into) / 16))
    module.weight = nn.Parameter(arrays["x.weight"])
    module.weight_scale_inv = nn.Parameter(
        arrays["x.weight_scale_inv"].to(scale_dtype), requires_grad=scale_dtype.is_floating_point
    )
    return module


class Body(nn.Module):
    """A linear layer with a norm, which tells the dtype."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(256, dtype=BF16), linear

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(self.norm(x))


def trained(model: nn.Module, optimizer: Any, steps: int = 5) -> list[float]:
    return trained_on(WORDS, model, optimizer, steps)


# -- numbers -----------------------------------------------------------------------------------------------------------------


def test_products_read_the_stored_bytes_in_both_passes():
    """The result and both gradients are those of an op whose weight was loaded with the same bytes."""
    linear = fp8_linear()
    arrays = {f"op.{name}": value.clone() for name, value in linear.state_dict().items()}
    model = Body(linear)
    opfuse.fuse_(model, RECIPE)
    with opfuse.quantized_model_init(recipe=RECIPE):
        op = ops.Linear(256, 256, bias=False, dtype=BF16)
    op.load_state_dict({"weight": opfuse.import_weights(arrays)["op.weight"]})
    x = torch.randn(64, 256, dtype=BF16)
    found = []
    for run, weight in ((model.linear, linear.weight), (op, op.weight)):
        given = x.clone().requires_grad_()
        with opfuse.autocast(recipe=RECIPE):
            y = run(given)
        y.square().sum().backward()
        found.append((y, given.grad, weight.grad))
    assert isinstance(linear.weight, QuantizedTensor)
    assert linear.weight.grad.dtype == BF16
    assert all(map(torch.equal, *found))
    assert "quantize[weight]" not in str(opfuse.explain(model, x))


@each_model
def test_a_converted_model_multiplies_what_was_loaded(kind, tmp_path, without_gpu):
    """It has the loss of the plain model whose weights are those of the checkpoint, and no cast of a weight."""
    model = loaded(kind, tmp_path)
    report = opfuse.fuse_(model, RECIPE)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=BF16, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    for name, value in reference.state_dict().items():
        held = model.get_parameter(name)
        assert torch.equal(held.dequantize() if isinstance(held, QuantizedTensor) else held, value), name
    losses = [float(each(input_ids=WORDS, labels=WORDS).loss.detach()) for each in (model, reference)]
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)
    assert "quantize[weight" not in str(opfuse.explain(model, input_ids=WORDS))
    assert not [entry for entry in report if entry.status == "refused"]
    assert report["model.layers.0.self_attn.q_proj"].became == "Linear×3"


def test_projections_with_a_common_product_have_the_results_that_they_have_apart(tmp_path, without_gpu):
    """Bytes of joined weights lie one below the other; nothing is cast again."""
    model = loaded("dense", tmp_path)
    x = torch.randn(32, 256, dtype=BF16)
    apart = {name: Body(copy.deepcopy(getattr(model.model.layers[0].self_attn, name))) for name in ("q_proj", "k_proj", "v_proj")}
    opfuse.fuse_(model, RECIPE)
    got: dict[str, torch.Tensor] = {}
    for name in apart:
        part = getattr(model.model.layers[0].self_attn, name)
        part.register_forward_hook(lambda module, args, y, name=name: got.update({name: (args[0], y)}))
    model(input_ids=WORDS)
    for name, body in apart.items():
        opfuse.fuse_(body, RECIPE)
        assert torch.equal(body.linear(got[name][0]), got[name][1])
    assert opfuse.report(model)["model.layers.0.self_attn.k_proj"].status == "joined"
    assert x.dtype == BF16


# -- checkpoints -------------------------------------------------------------------------------------------------------------


@each_model
def test_what_nothing_has_changed_is_written_as_it_was_read(kind, tmp_path, without_gpu):
    before = checkpoint(kind, tmp_path / "given")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "given", dtype=BF16)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    opfuse.fuse_(model, RECIPE)
    assert equal(dict(model.state_dict()), state)
    model.save_pretrained(tmp_path / "saved")
    assert equal(load_file(tmp_path / "saved" / "model.safetensors"), before)
    opfuse.unfuse_(model)
    assert equal(dict(model.state_dict()), state)
    assert any(isinstance(module, (FP8Linear, FP8Experts)) for module in model.modules())


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind == "Mixtral")) for kind in MODELS])
def test_a_checkpoint_is_trained_in_full_and_read_by_transformers(kind, tmp_path, without_gpu):
    model = loaded(kind, tmp_path / "given")
    opfuse.fuse_(model, RECIPE)
    optimizer = opfuse.with_masters(torch.optim.AdamW(model.parameters(), lr=2e-3))
    losses = trained(model, optimizer)
    assert losses[-1] < 0.8 * losses[0]
    logits = model(input_ids=WORDS).logits
    model.save_pretrained(tmp_path / "trained")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=BF16)
    opfuse.fuse_(again, RECIPE)
    assert torch.equal(again(input_ids=WORDS).logits, logits)
    values = AutoModelForCausalLM.from_pretrained(
        tmp_path / "trained", dtype=BF16, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    for name, value in values.state_dict().items():
        held = model.get_parameter(name)
        assert torch.equal(held.dequantize() if isinstance(held, QuantizedTensor) else held, value), name


def test_a_state_dict_of_arrays_or_of_values_is_loaded(tmp_path, without_gpu):
    model, other = loaded("dense", tmp_path), plain("dense")
    opfuse.fuse_(model, RECIPE)
    name = "model.layers.0.mlp.up_proj.weight"
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        model.get_parameter(name).zero_()
    assert not model.get_parameter(name).dequantize().any()
    model.load_state_dict(state)
    assert equal(dict(model.state_dict()), state)
    model.load_state_dict(other.state_dict())  # plain values are cast
    wanted = LAYOUTS["deepseek"].quantizer.quantize(other.get_parameter(name).detach()).dequantize(BF16)
    assert torch.equal(model.get_parameter(name).dequantize(), wanted)


def test_copies_and_pickles_keep_their_bytes(tmp_path, without_gpu):
    model = loaded("dense", tmp_path)
    opfuse.fuse_(model, RECIPE)
    logits = model(input_ids=WORDS).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(input_ids=WORDS).logits, logits)
        assert equal(dict(other.state_dict()), dict(model.state_dict()))
        with torch.no_grad():
            other.get_parameter("model.layers.0.mlp.up_proj.weight").zero_()
    assert torch.equal(model(input_ids=WORDS).logits, logits)


def test_scales_that_are_powers_of_two_stay_in_their_dtype():
    linear = fp8_linear(scale_dtype=torch.float8_e8m0fnu)
    before = {name: value.clone() for name, value in linear.state_dict().items()}
    model = Body(linear)
    opfuse.fuse_(model, Float8BlockScaling())
    assert equal(dict(linear.state_dict()), before)
    with torch.no_grad():
        linear.weight.mul_(0.7)  # cast by the rule that has such scales
    assert linear.state_dict()["weight_scale_inv"].dtype == torch.float8_e8m0fnu
    with torch.no_grad():
        linear.weight.copy_(fp8_linear_values())
    assert linear.state_dict()["weight"].dtype == torch.float8_e4m3fn


def fp8_linear_values() -> torch.Tensor:
    return torch.randn(256, 256, dtype=BF16)


READ_FROM_FILES = {
    "deepseek": RECIPE,
    "fp8_block": Float8BlockScaling(scale_rule="compressed_tensors", use_f32_scales=True),
    "fp8_dynamic": CustomRecipe(qfactory="fp8_row_scaled"),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": CustomRecipe(qfactory=lambda role: NVFP4Quantizer()),
}


@pytest.mark.parametrize("layout", in_turn(READ_FROM_FILES, of=3))
def test_a_plain_model_takes_the_bytes_of_any_layout(layout, tmp_path):
    """By ``load_state_dict(import_weights(...), assign=True)``; it trains from them, and is exported with them."""
    tensors, _ = opfuse.export_weights(plain("dense"), layout)
    model = plain("dense")
    model.load_state_dict(opfuse.import_weights(tensors, nearest_scale=True), assign=True)
    assert equal(opfuse.export_weights(model, layout).tensors, tensors)
    report = opfuse.fuse_(model, READ_FROM_FILES[layout])
    assert {entry.status for entry in report if entry.kind == "Linear" and entry.path != "lm_head"} <= {"fused", "joined"}
    assert "quantize[weight" not in str(opfuse.explain(model, input_ids=WORDS))
    optimizer = opfuse.with_masters(torch.optim.AdamW(model.parameters(), lr=2e-3))
    losses = trained(model, optimizer, 4)
    assert losses[-1] < 0.9 * losses[0]
    read = opfuse.import_weights(opfuse.export_weights(model, layout).tensors, nearest_scale=True)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(model.get_parameter(name).dequantize(torch.float32), read[name].dequantize(torch.float32))


# -- what stays as it is -----------------------------------------------------------------------------------------------------


def test_modules_that_are_not_converted_stay_what_they_were():
    model = nn.Sequential(Body(fp8_linear()), Body(fp8_linear()), Body(fp8_linear()))
    first = model[0].linear.weight
    report = opfuse.fuse_(model, RECIPE, policy={"0": None})
    assert model[0].linear.weight is first
    assert type(model[0].linear) is FP8Linear
    assert report["0.linear"].status == "kept"
    assert type(model[1].linear) is nn.Linear
    opfuse.fuse_(model, RECIPE, policy={"1": None})
    assert [type(each.linear) for each in model] == [nn.Linear, FP8Linear, nn.Linear]
    with pytest.raises(ConversionError, match="match a module with weights"):
        opfuse.fuse_(model, RECIPE, policy={"nothing": None})
    assert [type(each.linear) for each in model] == [nn.Linear, FP8Linear, nn.Linear]
    opfuse.unfuse_(model)
    assert [type(each.linear) for each in model] == [FP8Linear] * 3


def test_without_a_recipe_quantized_modules_compute_what_they_did():
    model = nn.Sequential(Body(fp8_linear()), nn.Linear(256, 256, dtype=BF16))
    report = opfuse.fuse_(model)
    assert type(model[0].linear) is FP8Linear
    assert "pass a recipe" in report["0.linear"].why


def test_another_recipe_is_refused_at_the_call():
    model = Body(fp8_linear())
    opfuse.fuse_(model, MXFP8BlockScaling())
    with pytest.raises(RecipeError, match="stored as fp8_block_2d_e4m3"):
        model(torch.randn(32, 256, dtype=BF16))


def refused(module: nn.Module) -> str:
    model = nn.Sequential(Body(module), nn.Linear(256, 256, dtype=BF16))
    report = opfuse.fuse_(model, RECIPE)
    assert report["0.linear"].status == "refused"
    return report["0.linear"].why


def test_what_opfuse_cannot_hold_is_refused_with_a_reason():
    assert "static scales of activations" in refused(fp8_linear(activation_scheme="static"))
    assert "weight_scale_inv torch.float32 ()" in refused(FP8Linear(256, 256))
    odd = fp8_linear()
    odd.weight_scale_inv = nn.Parameter(torch.ones(4, 4))
    assert "weight_scale_inv torch.float32 (4, 4)" in refused(odd)


def test_experts_with_a_clamp_are_refused(tmp_path, without_gpu):
    model = loaded("mixture", tmp_path)
    model.model.layers[0].mlp.experts.swiglu_limit = 7.0
    report = opfuse.fuse_(model, RECIPE)
    assert "a gated unit with swiglu_limit" in report["model.layers.0.mlp.experts"].why
    assert report["model.layers.1.mlp.experts"].status == "fused"


# -- adapters ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adapters_first", "dora"), [pytest.param(False, False, marks=pytest.mark.slow), (False, True), (True, False)]
)
def test_adapters_train_on_a_stored_base(adapters_first, dora, tmp_path, without_gpu):
    """Gradients pass the stored plane; the base keeps its bytes; joined projections stay joined.

    PEFT itself cannot make DoRA, which multiplies with the weight, over a module that holds FP8 codes.
    """
    peft = pytest.importorskip("peft")
    model = loaded("dense", tmp_path)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    names = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
    if not adapters_first:
        opfuse.fuse_(model, RECIPE)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, use_dora=dora, target_modules=names))
    report = opfuse.fuse_(adapted, RECIPE)
    assert report["base_model.model.model.layers.0.self_attn.q_proj.base_layer"].became == "Linear×3"
    adapters = [p for p in adapted.parameters() if p.requires_grad]
    assert {p.dtype for p in adapters} == {torch.float32}
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    losses = trained(adapted, optimizer, 6)
    assert losses[-1] < 0.9 * losses[0]
    base = {name.replace(".base_layer", ""): value for name, value in model.state_dict().items() if "lora" not in name}
    assert equal(base, state)
    logits = adapted(input_ids=WORDS).logits
    merged = adapted.merge_and_unload()
    off = (merged(input_ids=WORDS).logits - logits).float().norm() / logits.float().norm()
    assert off < 0.06  # the sum is cast to FP8
    assert type(merged.model.layers[0].mlp.up_proj) is nn.Linear


def test_adapters_train_beside_stored_experts(tmp_path, without_gpu):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(loaded("mixture", tmp_path), peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    report = opfuse.fuse_(adapted, RECIPE)
    assert report["base_model.model.model.layers.0.mlp.experts"].status == "fused"
    losses = trained(adapted, torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2), 6)
    assert losses[-1] < 0.95 * losses[0]


def test_adapters_train_on_weights_of_a_file():
    peft = pytest.importorskip("peft")
    model = plain("dense")
    model.load_state_dict(opfuse.import_weights(opfuse.export_weights(model, "mxfp8").tensors), assign=True)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, use_dora=True, target_modules="all-linear"))
    opfuse.fuse_(adapted, MXFP8BlockScaling())
    losses = trained(adapted, torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2), 6)
    assert losses[-1] < 0.9 * losses[0]


# -- writing the experts of a plain model ------------------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.parametrize("layout", OF_LINEAR_LAYERS)
@pytest.mark.parametrize("kind", ["mixture", "Mixtral"])
def test_experts_are_written_one_by_one_with_the_bytes_that_training_multiplies(kind, layout):
    model = plain(kind)
    tensors, config = opfuse.export_weights(model, layout)
    experts = model.model.layers[0].mlp.experts
    names = {
        "mixture": ("model.layers.0.mlp.experts.{}.", "gate_proj", "up_proj", "down_proj"),
        "Mixtral": ("model.layers.0.block_sparse_moe.experts.{}.", "w1", "w3", "w2"),
    }[kind]
    foreign = LAYOUTS[layout]
    for i, (both, down) in enumerate(zip(experts.gate_up_proj.detach(), experts.down_proj.detach())):
        for matrix, parts in ((both, names[1:3]), (down, names[3:])):
            for key, array in foreign.written("", foreign.quantizer.quantize(matrix)).items():
                found = [tensors[f"{names[0].format(i)}{part}{key}"] for part in parts]
                assert torch.equal(torch.cat(found) if array.dim() > 1 else found[0], array)
                assert array.dim() > 1 or all(map(torch.equal, found, found[::-1]))
    plain_matrices = {name for name, value in tensors.items() if value.dim() == 2 and value.dtype == BF16}
    assert not [name for name in plain_matrices if "expert" in name]
    said = config.get("modules_to_not_convert") or config.get("ignore")
    assert "lm_head" in said


def test_the_config_names_what_the_files_do_not_hold():
    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig(**SIZES, **EXPERTS)).to(BF16)
    tensors, config = opfuse.export_weights(model, "deepseek")
    assert tensors["model.layers.0.mlp.experts.gate_up_proj"].dtype == BF16  # transformers writes the stack itself
    assert "model.layers.0.mlp.experts" in config["modules_to_not_convert"]
    assert "lm_head" in config["modules_to_not_convert"]


def test_a_tied_head_stays_plain():
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).to(BF16)
    tensors, config = opfuse.export_weights(model, "deepseek")
    assert "lm_head.weight_scale_inv" not in tensors
    assert "lm_head" in config["modules_to_not_convert"]
    with pytest.raises(ConversionError, match=r"lm_head.*a weight of its own, got that of model.embed_tokens"):
        opfuse.export_weights(model, "deepseek", ignore=[])


def test_gate_and_up_that_share_a_block_are_refused():
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, moe_intermediate_size=96, num_experts=4)).to(BF16)
    with pytest.raises(ConversionError, match="wants matrices of multiples of 128 rows, got 2 of 96 rows"):
        opfuse.export_weights(model, "deepseek")
    tensors, config = opfuse.export_weights(model, "deepseek", ignore=["lm_head", "experts"])
    assert tensors["model.layers.0.mlp.experts.gate_up_proj"].dtype == BF16
    assert "model.layers.0.mlp.experts" in config["modules_to_not_convert"]


def test_a_converted_fp8_model_is_exported_with_its_bytes(tmp_path, without_gpu):
    """Also to a file that the test writes: nothing in it is a tensor of opfuse."""
    model = loaded("mixture", tmp_path)
    before = load_file(tmp_path / "model.safetensors")
    opfuse.fuse_(model, RECIPE)
    tensors, _ = opfuse.export_weights(model, "deepseek")
    save_file({name: value.contiguous() for name, value in tensors.items()}, tmp_path / "exported.safetensors")
    assert equal(load_file(tmp_path / "exported.safetensors"), before)
    names = {name: name.replace("weight_scale", "weight_scale_inv") for name in opfuse.export_weights(model, "fp8_block").tensors}
    assert equal({names[name]: value for name, value in opfuse.export_weights(model, "fp8_block").tensors.items()}, tensors)


def test_an_fp8_model_that_is_not_converted_is_exported_as_it_is(tmp_path, without_gpu):
    model = loaded("dense", tmp_path)
    tensors, config = opfuse.export_weights(model, "deepseek")
    assert equal(tensors, dict(model.state_dict()))
    assert config["modules_to_not_convert"] == ["lm_head"]
    with pytest.raises(ConversionError, match="write it as 'deepseek', or convert the model first"):
        opfuse.export_weights(model, "fp8_block")


def test_joined_weights_keep_one_plane_for_the_backward_pass():
    """As the cast of a plain weight does: they are made for one call, and the backward product reads their bytes, transposed."""
    found = []
    for model in (plain("dense"), plain("dense")):
        if found:
            model.load_state_dict(opfuse.import_weights(opfuse.export_weights(model, "deepseek").tensors), assign=True)
        opfuse.fuse_(model, RECIPE.replace(keep="all"))
        saved = opfuse.explain(model.model.layers[0].mlp, torch.randn(64, 256, dtype=BF16, requires_grad=True)).saved
        found.append([(value.name, value.bytes // 1024) for value in saved if value.memory == "own"])
    (cast_last,) = (value for value in found[0] if value not in found[1])
    assert cast_last[0] == "w"  # that of the lone projection, which is a parameter where it is stored
    assert [value for value in found[0] if value != cast_last] == found[1]


@pytest.mark.parametrize("trains", [False, True])
def test_packed_weights_lie_in_one_memory_and_keep_their_bytes(trains, tmp_path, without_gpu):
    """A call copies their scales alone, and the backward pass reads the same codes; results and gradients stay."""
    found = []
    for pack in (False, True):
        model = loaded("dense", tmp_path)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.requires_grad_(trains)
        opfuse.fuse_(model, RECIPE, pack=pack)
        mlp = model.model.layers[0].mlp
        x = torch.randn(64, 256, dtype=BF16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        saved = opfuse.explain(mlp, x).saved
        own = sum(value.bytes for value in saved if value.memory == "own")
        y = mlp(x)
        y.square().sum().backward()
        gate, up = (part.weight.held.plane("rowwise").data for part in (mlp.gate_proj, mlp.up_proj))
        assert gate.data_ptr() + gate.nbytes == up.data_ptr() or not pack  # as they may in what a file was read into
        assert equal(dict(model.state_dict()), state)
        found.append((own, y, x.grad, *[p.grad for p in mlp.parameters() if trains]))
    assert all(map(torch.equal, found[0][1:], found[1][1:]))
    assert found[0][0] - found[1][0] >= gate.nbytes + up.nbytes


@pytest.mark.parametrize("trains", [False, True])
def test_a_write_to_a_packed_weight_before_the_backward_pass_is_refused(trains, tmp_path, without_gpu):
    model = loaded("dense", tmp_path)
    model.requires_grad_(trains)
    opfuse.fuse_(model, RECIPE, pack=True)
    mlp, x = model.model.layers[0].mlp, torch.randn(64, 256, dtype=BF16, requires_grad=True)
    for _ in range(3):
        mlp(x).sum().backward()
    y = mlp(x)
    with torch.no_grad():
        mlp.up_proj.weight.mul_(2)
    with pytest.raises((SavedTensorError, RuntimeError), match=r"as the forward pass left|modified by an inplace"):
        y.sum().backward()


def test_a_model_may_be_moved_after_its_state_dict_was_taken(tmp_path, without_gpu):
    """torch swaps parameters of a class of its own, and refuses to where something refers to one weakly."""
    model = loaded("dense", tmp_path)
    opfuse.fuse_(model, RECIPE, pack=True)
    x = torch.randn(64, 256, dtype=BF16)
    mlp = model.model.layers[0].mlp
    wanted = mlp(x)
    wanted.sum().backward()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    model.to("cpu", BF16)
    assert torch.equal(mlp(x), wanted)


def moved(weight: Any) -> None:
    """Its codes lie elsewhere from now on, in the same array of the same record."""
    array = weight.held.plane("rowwise").data
    array.data = array.clone()


CHANGES: dict[str, Any] = {
    "written": lambda mlp: mlp.gate_proj.weight.mul_(2),
    "the second written": lambda mlp: mlp.up_proj.weight.mul_(2),
    "another record": lambda mlp: setattr(mlp.gate_proj.weight, "data", mlp.gate_proj.weight.clone().mul_(2)),
    "another second": lambda mlp: setattr(mlp.up_proj.weight, "data", mlp.up_proj.weight.clone().mul_(2)),
    "codes elsewhere": lambda mlp: (moved(mlp.gate_proj.weight), mlp.gate_proj.weight.neg_()),
    "codes of the second elsewhere": lambda mlp: (moved(mlp.up_proj.weight), mlp.up_proj.weight.neg_()),
}


@pytest.mark.parametrize("change", in_turn(CHANGES, of=2))
def test_compiled_code_reads_packed_weights_where_they_lie_now(change, tmp_path, without_gpu):
    """Their whole is made once, and again after a change of its parts."""
    model = loaded("dense", tmp_path)
    model.requires_grad_(False)
    opfuse.fuse_(model, RECIPE, pack=True)
    mlp = model.model.layers[0].mlp
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    x = torch.randn(64, 256, dtype=BF16)

    def step(call: Any) -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        y.square().sum().backward()
        return [y.detach(), leaf.grad]

    before = [step(compiled) for _ in range(4)][-1]
    with torch.no_grad():
        CHANGES[change](mlp)
    for _ in range(4):
        found = step(compiled)
        assert all(map(torch.equal, found, step(mlp)))
        assert not torch.equal(found[0], before[0])


def test_compiled_code_holds_no_packed_weights_that_were_replaced(tmp_path, without_gpu):
    model = loaded("dense", tmp_path)
    model.requires_grad_(False)
    opfuse.fuse_(model, RECIPE, pack=True)
    mlp = model.model.layers[0].mlp
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    for _ in range(4):
        compiled(torch.randn(64, 256, dtype=BF16, requires_grad=True)).sum().backward()
    parts = mlp.gate_proj.weight, mlp.up_proj.weight
    old = [weakref.ref(array) for part in parts for array in part.held.tensors()]
    for part in parts:
        part.data = part.clone()
    gc.collect()
    assert [array() for array in old] == [None] * len(old)


# -- state that is damaged, shared or incomplete -----------------------------------------------------------------------------


def converted_body(**options: Any) -> tuple[Body, dict[str, torch.Tensor]]:
    model = Body(fp8_linear(**options))
    opfuse.fuse_(model, RECIPE)
    return model, {name: value.clone() for name, value in model.state_dict().items()}


def test_codes_without_their_scales_are_missing():
    model, state = converted_body()
    del state["linear.weight_scale_inv"]
    with pytest.raises(RuntimeError, match=r"Missing key.*linear.weight_scale_inv"):
        model.load_state_dict(state)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert "linear.weight_scale_inv" in model.load_state_dict(state, strict=False).missing_keys
    assert equal(dict(model.state_dict()), before)


@pytest.mark.parametrize("layout", ["deepseek", "fp8_block", "fp8_dynamic", "mxfp8"])
def test_import_refuses_codes_without_their_scales(layout):
    tensors, _ = opfuse.export_weights(nn.Sequential(nn.Linear(256, 256, bias=False)), layout)
    alone = {name: value for name, value in tensors.items() if name == "0.weight"}
    with pytest.raises(ConversionError, match="0: wants a weight in one of"):
        opfuse.import_weights(alone)


@pytest.mark.parametrize("scales", [(1, 1), (2, 1), (2, 3)])
def test_arrays_of_other_sizes_or_dtypes_are_refused(scales):
    model, state = converted_body()
    with pytest.raises(RuntimeError, match="wants arrays of deepseek"):
        model.load_state_dict(state | {"linear.weight_scale_inv": torch.ones(scales)})
    for dtype in (torch.float8_e5m2, torch.int8):
        with pytest.raises(RuntimeError, match="wants arrays of deepseek"):
            model.load_state_dict(state | {"linear.weight": state["linear.weight"].view(torch.uint8).view(dtype)})
    assert equal(dict(model.state_dict()), state)


def test_writes_to_what_was_loaded_or_saved_do_not_reach_a_part_of_a_weight():
    """Arrays of a state dict that were the memory of the codes would not be that of the scales, which may be padded."""
    model, state = converted_body()
    other = Body(fp8_linear())
    opfuse.fuse_(other, RECIPE)
    other.load_state_dict(model.state_dict(), assign=True)
    held = model.state_dict()
    with torch.no_grad():
        model.linear.weight.copy_(5 * torch.randn(256, 256))
    assert equal(dict(other.state_dict()), state)
    assert equal(dict(held), state)
    assert not torch.equal(model.linear.weight.dequantize(), other.linear.weight.dequantize())


def test_modules_with_one_matrix_share_it_after_the_conversion():
    one, other = fp8_linear(), fp8_linear()
    other.weight, other.weight_scale_inv = one.weight, one.weight_scale_inv
    model = nn.Sequential(Body(one), Body(other))
    opfuse.fuse_(model, RECIPE)
    assert one.weight is other.weight
    assert len({id(p) for p in model.parameters()}) == 5


def test_a_weight_takes_no_more_memory_than_its_arrays():
    """The plane that the gradient of the input reads is made in the backward pass, bit for bit that of a cast."""
    linear = fp8_linear(384, 256)
    before = linear.weight.nbytes
    model = nn.Sequential(nn.Linear(4, 384), linear)
    opfuse.fuse_(model, RECIPE)
    held = linear.weight.held
    assert held.usages == ("rowwise",)
    assert before <= held.nbytes <= before + 4 * 128
    quantizer = Float8BlockQuantizer(torch.float8_e4m3fn, scale_rule="deepgemm", force_pow_2_scales=False)
    whole = quantizer.quantize(linear.weight.dequantize(torch.float32))
    made = held.derived("columnwise")
    assert all(map(torch.equal, made.tensors(), whole.plane("columnwise").tensors()))


def test_a_step_that_changes_nothing_keeps_the_bytes():
    """Masters start from the values themselves, which bf16 does not have."""
    model, state = converted_body()
    optimizer = opfuse.with_masters(torch.optim.SGD(model.linear.parameters(), lr=0.0))
    for _ in range(2):
        model(torch.randn(64, 256, dtype=BF16)).float().square().mean().backward()
        optimizer.step()
        assert equal(dict(model.state_dict()), state)
        model.load_state_dict(state)  # after which masters start anew


class Projections(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.q, self.k, self.v = parts

    def forward(self, hidden):
        q = self.q(hidden)
        k = self.k(hidden)
        v = self.v(hidden)
        return torch.cat([q, k, v], dim=-1)


@pytest.mark.parametrize("rows", [(320, 128, 128), (128, 320, 128), (128, 128, 320)], ids=str)
def test_weights_with_a_common_block_are_not_joined(rows):
    """A block of rows of two weights would have one scale: the smaller one would be lost."""
    parts = [fp8_linear(256, count) for count in rows]
    with torch.no_grad():
        parts[1].weight_scale_inv.mul_(1e-6)
    values = [
        part.weight.float() * part.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)[: part.weight.shape[0]]
        for part in parts
    ]
    model = Projections(*parts)
    norm = nn.LayerNorm(256, dtype=BF16)
    whole = nn.Sequential(norm, model)
    opfuse.fuse_(whole, RECIPE)
    x = torch.randn(64, 256, dtype=BF16)
    for got, value in zip(whole(x).split(rows, -1), values):
        wanted = norm(x).float() @ value.t()
        assert (got.float() - wanted).norm() < 0.04 * wanted.norm()
    assert "quantize[weight" not in str(opfuse.explain(whole, x))


def test_experts_whose_scales_do_not_part_gate_from_up_are_refused(tmp_path, without_gpu, monkeypatch):
    monkeypatch.setitem(
        MODELS,
        "mixture",
        lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, moe_intermediate_size=96, num_experts=4)),
    )
    model = plain("mixture")
    tensors, config = opfuse.export_weights(model, "deepseek", ignore=["lm_head", "experts"])
    for name in [name for name in tensors if "experts" in name]:
        stack = tensors.pop(name)
        for i, matrix in enumerate(stack):
            parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2))) if "gate_up" in name else {"down_proj": matrix}
            for part, value in parts.items():
                path = f"{name.rpartition('.')[0]}.{i}.{part}"
                tensors |= LAYOUTS["deepseek"].written(path, LAYOUTS["deepseek"].quantizer.quantize(value.contiguous()))
    model.config.quantization_config = config | {"modules_to_not_convert": ["lm_head"]}
    model.save_pretrained(tmp_path, state_dict=dict(tensors))
    loaded_model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16)
    report = opfuse.fuse_(loaded_model, RECIPE)
    assert "gate and up of 96 rows" in report["model.layers.0.mlp.experts"].why


def test_scales_that_are_not_numbers_stay_so():
    linear = fp8_linear(scale_dtype=torch.float8_e8m0fnu)
    linear.weight_scale_inv.data.view(torch.uint8)[0, 1] = 255
    model = Body(linear)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    opfuse.fuse_(model, Float8BlockScaling())
    assert equal(dict(model.state_dict()), state)


def test_scales_that_a_dtype_does_not_have_are_refused_or_kept_in_fp32():
    fp32 = fp8_linear().state_dict()
    model = Body(fp8_linear(scale_dtype=torch.float8_e8m0fnu))
    opfuse.fuse_(model, Float8BlockScaling())
    model.linear.load_state_dict(fp32, assign=True)
    with pytest.raises(ConversionError, match="weight_scale_inv: wants scales that are powers of two"):
        model.state_dict()
    model = Body(fp8_linear(scale_dtype=BF16))
    opfuse.fuse_(model, RECIPE)
    assert model.linear.state_dict()["weight_scale_inv"].dtype == BF16
    model.linear.load_state_dict(fp32)
    assert equal(dict(model.linear.state_dict()), dict(fp32))


def test_loaded_weights_that_are_stored_otherwise_run_apart_and_say_so():
    model = nn.Sequential(nn.LayerNorm(256, dtype=BF16), Projections(*(nn.Linear(256, 256, dtype=BF16) for _ in range(3))))
    assert opfuse.fuse_(model, RECIPE)["1.q"].became == "Linear×3"
    tensors = opfuse.export_weights(model, "deepseek", ignore=["k", "v"]).tensors
    model.load_state_dict(opfuse.import_weights(tensors), assign=True)
    x = torch.randn(32, 256, dtype=BF16)
    with pytest.warns(OpfuseWarning, match="the loaded weights are not stored alike"):
        model(x)


def test_a_stored_parameter_that_no_file_has_is_refused():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(QuantizedTensor(LAYOUTS["deepseek"].quantizer.quantize(torch.randn(128, 128))))

    with pytest.raises(ConversionError, match="table: wants a weight of a linear layer"):
        opfuse.export_weights(nn.Sequential(Own(), nn.Linear(128, 128)), "deepseek")


def test_unfuse_keeps_values_and_flags_that_were_given_since():
    model, state = converted_body()
    model.linear.weight.requires_grad_(False)
    opfuse.unfuse_(model)
    assert not model.linear.weight.requires_grad
    assert equal(dict(model.state_dict()), state)
    opfuse.fuse_(model, RECIPE)
    model.load_state_dict({"linear.weight": torch.ones(256, 256, dtype=BF16)}, strict=False, assign=True)
    opfuse.unfuse_(model)
    assert type(model.linear) is FP8Linear
    assert model.linear.weight.dtype == BF16
    assert torch.equal(model(torch.ones(1, 256, dtype=BF16)), model.linear(model.norm(torch.ones(1, 256, dtype=BF16))))


def test_the_dtype_of_a_model_is_not_that_of_its_adapters(tmp_path, without_gpu):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(loaded("dense", tmp_path), peft.LoraConfig(r=64, target_modules="all-linear"))
    opfuse.fuse_(adapted, RECIPE)
    weight = adapted.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight
    assert (type(weight.data), weight.dtype) == (QuantizedTensor, BF16)
    adapted(input_ids=WORDS, labels=WORDS).loss.backward()


# -- what the config says ----------------------------------------------------------------------------------------------------


def test_a_stored_weight_is_not_named_among_the_plain_ones(tmp_path, without_gpu):
    model = loaded("dense", tmp_path)
    for each in (model, opfuse.fuse_(model, RECIPE) and model):
        tensors, config = opfuse.export_weights(each, "deepseek", ignore=["q_proj", "lm_head"])
        assert tensors["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
        assert config["modules_to_not_convert"] == ["lm_head"]


def test_a_module_of_two_names_is_written_alike_under_both():
    layer = nn.Linear(256, 256, dtype=BF16)
    tensors, config = opfuse.export_weights(nn.ModuleDict({"a": layer, "b": layer}), "deepseek")
    assert equal(
        {name: value for name, value in tensors.items() if name[0] == "a"},
        {name.replace("b", "a", 1): value for name, value in tensors.items() if name[0] == "b"},
    )
    assert "modules_to_not_convert" not in config


def test_a_mixture_that_was_dequantized_when_it_was_loaded_is_exported(tmp_path):
    before = checkpoint("mixture", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16, quantization_config=FineGrainedFP8Config(dequantize=True))
    tensors, _ = opfuse.export_weights(model, "deepseek")
    assert tensors.keys() == before.keys()


def test_scales_of_delayed_scaling_are_not_exported():
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    opfuse.fuse_(model, DelayedScaling())
    opfuse.prepare_delayed(model, DelayedScaling())
    assert "delayed" in str(model.state_dict().keys())
    assert "delayed" not in str(opfuse.export_weights(model, "deepseek").tensors.keys())
