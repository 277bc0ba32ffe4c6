"""MXFP4: the experts of GPT-OSS and linear layers of compressed-tensors, by transformers' decoder and two casts of others."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import opfuse
from opfuse import ops
from opfuse.convert.weights import _as_read
from opfuse.errors import ConversionError, MissingPlaneError, RecipeError
from opfuse.formats import COLUMNWISE, ROWWISE
from opfuse.interchange.layouts import LAYOUTS
from opfuse.interchange.parity import compare
from opfuse.recipes import CustomRecipe, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling
from opfuse.tensors.quantizers import MXFP4Quantizer, MXFP8Quantizer
from opfuse.tensors.tensor import QuantizedTensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM, Mxfp4Config
    from transformers.integrations.mxfp4 import Mxfp4GptOssExperts, convert_moe_packed_tensors
    from transformers.quantizers.quantizers_utils import should_convert_module

from tests.convert.blocks import Holder
from tests.interchange.training import trained_on
from tests.oracles import casts, libraries
from tests.processes import run_ranks

BF16 = torch.bfloat16
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 128}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_local_experts": 4, "num_key_value_heads": 2, "head_dim": 16}
WORDS = torch.arange(64).reshape(2, 32) % 128
FIRST = "model.layers.0.mlp.experts"


def gpt_oss(layers: int = 1) -> GptOssForCausalLM:
    torch.manual_seed(0)
    return GptOssForCausalLM(GptOssConfig(**SIZES, **EXPERTS, num_hidden_layers=layers)).to(BF16).eval()


def random_file(like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Arrays like those of a file, with any codes, and scales about 1."""
    torch.manual_seed(1)
    bounds = {"blocks": (0, 256), "scales": (118, 124)}
    return {
        name: torch.randint(*bounds[name.rpartition("_")[2]], t.shape, dtype=torch.uint8) if t.dtype == torch.uint8 else t.clone()
        for name, t in like.items()
    }


def checkpoint() -> dict[str, torch.Tensor]:
    return random_file(opfuse.export_weights(gpt_oss(), "gpt_oss").tensors)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    def bits(x: torch.Tensor) -> torch.Tensor:
        return x.detach().contiguous().view(torch.uint8)

    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(bits(left[name]), bits(right[name])) for name in left
    )


def trained(model: nn.Module, steps: int = 4, optimizer: torch.optim.Optimizer | None = None) -> list[float]:
    optimizer = optimizer or opfuse.with_masters(torch.optim.AdamW(model.parameters(), lr=1e-2))
    return trained_on(WORDS, model, optimizer, steps)


# -- values ------------------------------------------------------------------------------------------------------------------


def test_a_stack_is_decoded_in_the_order_of_its_bytes():
    """The file has the experts' matrices transposed: what products read is a plain tensor, and no copy turns it."""
    model = gpt_oss()
    model.load_state_dict(opfuse.import_weights(checkpoint(), layout="gpt_oss"), assign=True)
    weight = model.model.layers[0].mlp.experts.gate_up_proj
    values = weight.dequantize()
    assert values.mT.is_contiguous()
    assert torch.equal(values, torch.stack([matrix.dequantize() for matrix in weight]))
    for dims in ((1, 2), (0, 1), (0, 2)):
        assert torch.equal(weight.transpose(*dims).clone(), values.transpose(*dims))
    turned = values.mT * 1
    turned.sum().backward()
    assert weight.grad.eq(1).all()
    rowwise = MXFP4Quantizer(columnwise=False)(torch.randn(2, 4, 64))
    assert rowwise.dequantize().is_contiguous()
    for read, wanted in ((True, values.mT), (False, values)):  # as a module that multiplies by x @ w has them read
        found = _as_read(weight, transposed=read)
        assert type(found) is (torch.Tensor if read else QuantizedTensor)
        assert torch.equal(found + 0, wanted)


@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float16])
def test_every_byte_under_every_scale_is_what_transformers_reads(dtype):
    """Zeros of both signs, subnormals and overflow with it; but under the scale 0xFF, NaN in OCP's specification, of which
    transformers makes zeros and infinities.
    """
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).repeat(2, 256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8)[None, :, None].repeat(2, 1, 16)
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    weight = opfuse.import_weights({"e.down_proj_blocks": blocks, "e.down_proj_scales": scales}, dtype=dtype)["e.down_proj"]
    assert isinstance(weight, QuantizedTensor)
    assert weight.shape == wanted.shape == (2, 512, 256)
    values = weight.dequantize()
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(values[:, :, :255].contiguous().view(integer), wanted[:, :, :255].contiguous().view(integer))
    assert values[:, :, 255].isnan().all()
    assert not wanted[:, :, 255].isnan().any()


def hard_rows() -> torch.Tensor:
    """fp32 rows of two blocks: zeros, subnormals, amaxes around where the scale changes and where values saturate, NaN, inf."""
    torch.manual_seed(2)
    rows = [torch.zeros(64), -torch.zeros(64), torch.randn(64) * 2.0**-140, torch.full((64,), 2.0**-149)]
    for exponent in (-127, -126, -125, -124, 0, 1, 127):
        for mantissa in (1.0, 1.25, 1.5, 1.75, 2 - 2.0**-23):
            row = (2 * torch.rand(64) - 1) * (mantissa * 2.0**exponent)
            row[0] = row[32] = mantissa * 2.0**exponent
            rows.append(row)
    grid = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7])  # all ties
    rows.append(torch.cat([grid, -grid, grid * 2.0**-3, -grid * 2.0**-3]))
    for odd in (torch.nan, -torch.inf):
        rows.append(torch.randn(64).index_fill_(0, torch.tensor(3), odd))
    return torch.stack([*rows, *torch.randn(64, 64) * torch.logspace(-6, 6, 64)[:, None]])


@pytest.mark.parametrize(("rule", "rounding"), [("ocp_floor", "floor"), ("te", "ceil")])
def test_the_cast_is_that_of_the_specification_written_out_in_numpy(rule, rounding):
    x, quantizer = hard_rows(), MXFP4Quantizer(scale_rule=rule)
    codes, scales = casts.mx(x.numpy(), "e2m1", rounding=rounding)
    rowwise = quantizer.wanting(columnwise=False).quantize(x).plane(ROWWISE)
    columnwise = quantizer.wanting(rowwise=False).quantize(x.t()).plane(COLUMNWISE)
    bad = ~x.unflatten(1, (2, 32)).isfinite().all(-1).repeat_interleave(32, 1)
    assert bad.any()
    for plane, values in ((rowwise, rowwise.dequantize(torch.float32)), (columnwise, columnwise.dequantize(torch.float32).t())):
        assert np.array_equal(plane.data.numpy(), codes[:, ::2] | codes[:, 1::2] << 4)
        assert np.array_equal(plane.scale[: len(x), :2].numpy(), scales)
        assert torch.equal(values.isnan(), bad)


def test_ordinary_values_are_cast_as_torchao_casts_them():
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(3)) * torch.logspace(-9, 9, 64)[:, None]
    codes, scales = libraries.torchao_mx(x, "FLOOR", torch.float4_e2m1fn_x2)
    plane = MXFP4Quantizer().quantize(x).plane(ROWWISE)
    assert torch.equal(plane.data, codes)
    assert torch.equal(plane.scale[:64, :3], scales)


def test_mxfp8_holds_the_values_of_mxfp4():
    """So a product under MXFP8 multiplies the values of the file: their cast, for each call, loses nothing."""
    weight = opfuse.import_weights(checkpoint())[f"{FIRST}.gate_up_proj"].dequantize()
    matrices = weight.mT.reshape(-1, weight.shape[1])
    for rule in ("te", "ocp_floor"):
        assert torch.equal(MXFP8Quantizer(scale_rule=rule).quantize(matrices).plane(ROWWISE).dequantize(BF16), matrices)


# -- files -------------------------------------------------------------------------------------------------------------------


def test_a_file_is_read_into_parameters_and_written_with_its_bytes():
    tensors = checkpoint()
    tensors[f"{FIRST}.gate_up_proj_scales"][0, :3, 0] = torch.tensor([0, 254, 255], dtype=torch.uint8)
    kept = {name: t.clone() for name, t in tensors.items()}
    model = gpt_oss()
    model.load_state_dict(opfuse.import_weights(tensors), assign=True)
    assert isinstance(model.get_parameter(f"{FIRST}.down_proj"), QuantizedTensor)
    again, config = opfuse.export_weights(model, "gpt_oss")
    assert same(again, kept)
    assert FIRST not in config["modules_to_not_convert"]
    state = opfuse.from_planes(opfuse.to_planes(model.state_dict()))  # by way of our own files
    other = gpt_oss()
    other.load_state_dict(state, assign=True)
    assert same(opfuse.export_weights(other, "gpt_oss").tensors, kept)
    sent = {
        name: t for bucket in opfuse.weight_updates(model, "gpt_oss", bucket_bytes=4096) for name, t in bucket.tensors().items()
    }
    assert same(dict(sorted(sent.items())), dict(sorted(kept.items())))
    assert {each.status for each in compare(again, kept)} == {"equal"}


def test_the_values_that_were_read_are_multiplied():
    tensors, stored, plain = checkpoint(), gpt_oss(), gpt_oss()
    stored.load_state_dict(opfuse.import_weights(tensors), assign=True)
    plain.load_state_dict(opfuse.import_weights(tensors, dequantize=True))
    name = f"{FIRST}.gate_up_proj"
    wanted = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
    assert torch.equal(plain.get_parameter(name), wanted)
    assert torch.equal(stored(WORDS).logits, plain(WORDS).logits)


def test_stock_transformers_reads_what_save_pretrained_wrote(tmp_path):
    model = gpt_oss(2)
    tensors, config = opfuse.export_weights(model, "gpt_oss")
    read = Mxfp4Config.from_dict(config)
    assert read.to_dict() == config
    assert should_convert_module(FIRST, read.modules_to_not_convert)
    assert not should_convert_module("lm_head", read.modules_to_not_convert)
    model.config.quantization_config = config
    model.save_pretrained(tmp_path, state_dict=dict(tensors))
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"] == config
    stock = GptOssForCausalLM.from_pretrained(tmp_path, dtype=BF16, quantization_config=Mxfp4Config(dequantize=True))
    assert same(dict(stock.state_dict()), dict(sorted_like(opfuse.import_weights(tensors, dequantize=True), stock)))


def sorted_like(state: dict[str, torch.Tensor], model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, state[name]) for name in model.state_dict()]


def test_a_safetensors_file_is_read_and_written(tmp_path):
    tensors = checkpoint()
    save_file(tensors, tmp_path / "model.safetensors")
    model = gpt_oss()
    model.load_state_dict(opfuse.import_weights(load_file(tmp_path / "model.safetensors"), layout="gpt_oss"), assign=True)
    save_file(opfuse.export_weights(model, "gpt_oss").tensors, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


def test_plain_experts_are_cast_in_columns_by_the_rule_of_the_specification():
    model = gpt_oss()
    tensors, _ = opfuse.export_weights(model, "gpt_oss")
    matrix = model.get_parameter(f"{FIRST}.down_proj")[3].detach().t().float().numpy()
    codes, scales = casts.mx(matrix, "e2m1", rounding="floor")
    assert np.array_equal(tensors[f"{FIRST}.down_proj_blocks"][3].flatten(1).numpy(), codes[:, ::2] | codes[:, 1::2] << 4)
    assert np.array_equal(tensors[f"{FIRST}.down_proj_scales"][3].numpy(), scales)


def test_the_config_names_what_stays_plain():
    tensors, config = opfuse.export_weights(gpt_oss(2), "gpt_oss", ignore=[FIRST])
    assert tensors[f"{FIRST}.gate_up_proj"].dtype == BF16
    assert f"{FIRST}.gate_up_proj_blocks" not in tensors
    assert "model.layers.1.mlp.experts.gate_up_proj_blocks" in tensors
    assert FIRST in config["modules_to_not_convert"]
    assert "model.layers.1.mlp.experts" not in config["modules_to_not_convert"]
    assert "model.layers.1.self_attn.q_proj" in config["modules_to_not_convert"]
    tensors, config = opfuse.export_weights(gpt_oss(), "mxfp4")  # linear layers; stacks that transformers writes stay plain
    assert "model.layers.0.self_attn.q_proj.weight_packed" in tensors
    assert tensors[f"{FIRST}.gate_up_proj"].dtype == BF16
    assert FIRST in config["ignore"]


def test_checkpoints_are_compared_in_files_planes_and_plain_values():
    model = gpt_oss()
    tensors, _ = opfuse.export_weights(model, "gpt_oss")
    verdicts = {each.name: each for each in compare(model.state_dict(), tensors)}
    found = verdicts[f"{FIRST}.down_proj"]
    assert (found.status, found.right) == ("quantized only in CHECKPOINT", "mxfp4")
    assert found.why == "rule ocp_floor, from bfloat16"
    stored = gpt_oss()
    stored.load_state_dict(opfuse.import_weights(tensors), assign=True)
    planes = opfuse.to_planes(stored.state_dict())
    assert {each.status for each in compare(planes, tensors)} == {"equal"}
    damaged = tensors | {f"{FIRST}.down_proj_scales": tensors[f"{FIRST}.down_proj_scales"] + 1}
    different = [each for each in compare(planes, damaged) if not each.is_equal]
    assert [each.name for each in different] == [f"{FIRST}.down_proj"]
    assert different[0].why == "768 of 768 scales differ, first at [0, 0]"


def test_stored_experts_say_themselves_how_they_lie():
    """A module of one's own need not say that it multiplies from the right."""
    tensors = {name.removeprefix(f"{FIRST}."): t for name, t in checkpoint().items() if name.startswith(FIRST)}
    module = nn.Module()
    for name, value in opfuse.import_weights(tensors).items():
        module.register_parameter(name, nn.Parameter(value))
    model = nn.ModuleDict({"experts": module})
    written, config = opfuse.export_weights(model, "gpt_oss")
    assert same(written, {f"experts.{name}": tensors[name] for name in [each.removeprefix("experts.") for each in written]})
    assert config["modules_to_not_convert"] == []


def test_a_head_that_is_the_embedding_stays_plain():
    model = GptOssForCausalLM(GptOssConfig(**SIZES, **EXPERTS, num_hidden_layers=1, tie_word_embeddings=True)).to(BF16)
    tensors, config = opfuse.export_weights(model, "gpt_oss", ignore=[])
    assert tensors["lm_head.weight"].dtype == BF16
    assert "lm_head" in config["modules_to_not_convert"]


# -- training ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [pytest.param(None, marks=pytest.mark.slow), Float8CurrentScaling(), MXFP8BlockScaling()])
def test_experts_are_trained_from_their_bytes(recipe):
    """A step is that of the values, which each call casts as the recipe casts weights; then they are four bits again."""
    tensors, models = checkpoint(), (gpt_oss(), gpt_oss())
    models[0].load_state_dict(opfuse.import_weights({name: t.clone() for name, t in tensors.items()}), assign=True)
    models[1].load_state_dict(opfuse.import_weights(tensors))
    for model in models:
        report = opfuse.fuse_(model, recipe)
        assert "GroupedLinear" in str(report)
        model(input_ids=WORDS, labels=WORDS).loss.backward()
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters()):
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or torch.equal(one.grad, other.grad), name
        one.grad = other.grad = None
    losses = trained(models[0], 3)
    assert losses[-1] < losses[0]
    assert isinstance(models[0].get_parameter(f"{FIRST}.gate_up_proj"), QuantizedTensor)
    written = opfuse.export_weights(models[0], "gpt_oss").tensors
    changed = [name for name in tensors if name.endswith("_blocks") and not torch.equal(written[name], tensors[name])]
    assert len(changed) == 2
    values = opfuse.import_weights(written, dequantize=True)
    assert torch.equal(values[f"{FIRST}.down_proj"], models[0].get_parameter(f"{FIRST}.down_proj").dequantize())


def test_adapters_are_trained_over_frozen_experts_whose_bytes_stay():
    peft = pytest.importorskip("peft")
    tensors, model = checkpoint(), gpt_oss()
    kept = {name: t.clone() for name, t in tensors.items()}
    model.load_state_dict(opfuse.import_weights(tensors), assign=True)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    opfuse.fuse_(adapted, Float8CurrentScaling())
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = trained(adapted, 6, optimizer)
    assert losses[-1] < losses[0]
    left = opfuse.export_weights(opfuse.unfuse_(adapted).unload(), "gpt_oss").tensors
    assert same(left, kept)


def sharded_rank(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    model = gpt_oss()
    model.load_state_dict(opfuse.import_weights(checkpoint()), assign=True)
    opfuse.fuse_(model, Float8BlockScaling())
    for each in (*model.model.layers, model):
        fully_shard(each, mesh=init_device_mesh("cpu", (2,)))
    shard = model.get_parameter(f"{FIRST}.down_proj").to_local()
    whole = model.get_parameter(f"{FIRST}.down_proj")
    model.model.layers[0].unshard()
    gathered = model.get_parameter(f"{FIRST}.down_proj")
    before = isinstance(gathered, QuantizedTensor), torch.stack([plane.data.clone() for plane in gathered.columnwise.members])
    model.model.layers[0].reshard()
    codes = shard.columnwise.members[0].data.clone()
    optimizer = opfuse.with_masters(torch.optim.SGD(model.parameters(), lr=0.5))
    losses = trained(model, 2, optimizer)
    changed = not torch.equal(shard.columnwise.members[0].data, codes)
    found = losses, type(shard) is QuantizedTensor, shard.shape, before, changed, whole.full_tensor()
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_fsdp2_shards_the_bytes(tmp_path):
    """Each rank has some of the matrices, as they were cast, and steps write them. They train as on one rank."""
    run_ranks(sharded_rank, tmp_path)
    model = gpt_oss()
    tensors = checkpoint()
    model.load_state_dict(opfuse.import_weights(tensors), assign=True)
    opfuse.fuse_(model, Float8BlockScaling())
    weight = model.get_parameter(f"{FIRST}.down_proj")
    codes = torch.stack([plane.data.clone() for plane in weight.columnwise.members])
    optimizer = opfuse.with_masters(torch.optim.SGD(model.parameters(), lr=0.5))
    losses = trained(model, 2, optimizer)
    for rank in range(2):
        found, stored, shape, (travelled, gathered), changed, after = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert stored
        assert changed
        assert shape == torch.Size([2, 96, 64])
        assert travelled
        assert torch.equal(gathered, codes)
        assert found == pytest.approx(losses, rel=1e-3)
        assert found[0] == losses[0]
        torch.testing.assert_close(after, weight.dequantize())


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=1)).to(BF16)


@pytest.mark.parametrize(
    "recipe",
    [
        None,
        Float8CurrentScaling(on_recipe_change="dequantize"),
        MXFP8BlockScaling(on_recipe_change="dequantize"),
        MXFP8BlockScaling(on_recipe_change="keep", backward_override="dequantized"),
    ],
    ids=["bf16", "fp8", "mxfp8", "mxfp8 times mxfp4"],
)
def test_linear_layers_are_trained_from_their_bytes(recipe):
    tensors, _ = opfuse.export_weights(llama(), "mxfp4")
    model, plain = llama(), llama()
    model.load_state_dict(opfuse.import_weights({name: t.clone() for name, t in tensors.items()}), assign=True)
    plain.load_state_dict(opfuse.import_weights(tensors))
    opfuse.fuse_(model, recipe)
    opfuse.fuse_(plain, recipe)
    with torch.no_grad():
        assert torch.equal(model(WORDS).logits, plain(WORDS).logits)
    losses = trained(model)
    assert losses[-1] < losses[0]
    name = "model.layers.0.mlp.up_proj.weight_packed"
    assert not torch.equal(opfuse.export_weights(model, "mxfp4").tensors[name], tensors[name])


def test_a_recipe_of_another_format_is_told_what_to_do():
    model, x = ops.Linear(64, 32, bias=False, dtype=BF16), torch.randn(32, 64, dtype=BF16, requires_grad=True)
    tensors = opfuse.export_weights(nn.ModuleDict({"up": model}), "mxfp4").tensors
    model.load_state_dict({"weight": opfuse.import_weights(tensors)["up.weight"]}, assign=True)
    with opfuse.autocast(recipe=Float8CurrentScaling()), pytest.raises(RecipeError, match=r"stored as mxfp4.*on_recipe_change"):
        model(x)
    keep = MXFP8BlockScaling(on_recipe_change="keep")
    with opfuse.autocast(recipe=keep), pytest.raises(MissingPlaneError, match=r"cast from four bits.*backward_override"):
        model(x)


def test_parameters_made_by_a_recipe_take_the_bytes_whatever_rule_made_them():
    recipe = CustomRecipe(qfactory=lambda role: LAYOUTS["mxfp4"].quantizer.copy())
    with opfuse.quantized_model_init(recipe=recipe):
        model = nn.ModuleDict({"up": ops.Linear(64, 32, bias=False, dtype=BF16)})
    torch.manual_seed(4)
    arrays = {"packed": (32, 32), "scale": (32, 2)}
    tensors = {f"up.weight_{name}": torch.randint(100, 140, shape, dtype=torch.uint8) for name, shape in arrays.items()}
    read = opfuse.import_weights(tensors)
    model.load_state_dict(read, assign=True)
    assert model["up"].weight.signature == ("rowwise=mxfp4",)
    assert same(opfuse.export_weights(model, "mxfp4").tensors, tensors)
    with opfuse.quantized_model_init(recipe=recipe):
        other = nn.ModuleDict({"up": ops.Linear(64, 32, bias=False, dtype=BF16)})
    other.load_state_dict(read)
    assert other["up"].weight.usages == (ROWWISE,)
    assert same(opfuse.export_weights(other, "mxfp4").tensors, tensors)


# -- refusals ----------------------------------------------------------------------------------------------------------------


def test_what_the_layout_does_not_have_is_refused_by_name():
    with pytest.raises(ConversionError, match=r"'gpt_oss': wants experts as GPT-OSS has them.*got a LlamaForCausalLM.*mxfp4"):
        opfuse.export_weights(llama(), "gpt_oss")
    model = gpt_oss()
    model.load_state_dict(opfuse.import_weights(checkpoint()), assign=True)
    for layout in ("mxfp4", "deepseek"):
        with pytest.raises(ConversionError, match=rf"{FIRST}.gate_up_proj: wants .*Cure: write it as gpt_oss"):
            opfuse.export_weights(model, layout)
    linear = opfuse.import_weights(opfuse.export_weights(llama(), "mxfp4").tensors)["model.layers.0.mlp.up_proj.weight"]
    mixed = gpt_oss()
    mixed.model.layers[0].self_attn.q_proj = Holder(linear).up
    with pytest.raises(ConversionError, match=r"q_proj.weight: wants .*Cure: write it as mxfp4"):
        opfuse.export_weights(mixed, "gpt_oss")
    with pytest.raises(ConversionError, match=r"wants a weight in fp8_block_2d_e4m3, got mxfp4. Cure: write it as mxfp4"):
        opfuse.export_weights(Holder(linear), "deepseek")
    narrow = GptOssForCausalLM(GptOssConfig(**{**SIZES, "intermediate_size": 48}, **EXPERTS, num_hidden_layers=1)).to(BF16)
    with pytest.raises(ConversionError, match=rf"{FIRST}.down_proj\[0\].*for mxfp4, got torch.bfloat16 \(48, 64\)"):
        opfuse.export_weights(narrow, "gpt_oss")


def test_experts_in_the_order_of_a_kernel_are_refused():
    """transformers keeps them outside of the state dict: a file would lack them."""
    model = gpt_oss()
    model.model.layers[0].mlp.experts = Mxfp4GptOssExperts(model.config)
    with pytest.raises(ConversionError, match=rf"{FIRST}, whose bytes.*Mxfp4Config\(dequantize=True\)"):
        opfuse.export_weights(model, "gpt_oss")


@pytest.mark.parametrize("damage", ["no scales", "no blocks", "fewer scales", "blocks of eight", "wide codes"])
def test_arrays_that_do_not_fit_are_refused_by_name(damage):
    name = f"{FIRST}.gate_up_proj"
    tensors = checkpoint()
    blocks, scales = f"{name}_blocks", f"{name}_scales"
    changes = {
        "no scales": {scales: None},
        "no blocks": {blocks: None},
        "fewer scales": {scales: tensors[scales][:, 1:]},
        "blocks of eight": {blocks: tensors[blocks][..., :8].contiguous()},
        "wide codes": {blocks: tensors[blocks].int()},
    }[damage]
    damaged = {key: value for key, value in (tensors | changes).items() if value is not None}
    with pytest.raises(ConversionError, match=rf"{name}: wants a weight in one of .*gpt_oss"):
        opfuse.import_weights(damaged)


def test_names_of_others_are_left_alone():
    others = {"tree.num_blocks": torch.tensor(3), "attn.k_scales": torch.ones(4), "grid_scales": torch.ones(2, 2)}
    assert opfuse.import_weights(others) == others
