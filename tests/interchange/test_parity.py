"""Two checkpoints side by side: every difference has a name."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import opfuse
from opfuse.cli import main
from opfuse.errors import ConversionError
from opfuse.interchange.layouts import OF_LINEAR_LAYERS
from opfuse.interchange.parity import CAST, EQUAL, compare, load
from opfuse.tensors.quantizers import Float8BlockQuantizer, MXFP8Quantizer
from tests.convert.blocks import Holder

BF16 = torch.bfloat16


class Mixture(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(128, 256), "gate": nn.Linear(128, 128)}) for _ in range(layers)
        )
        self.norm, self.lm_head = nn.LayerNorm(128), nn.Linear(128, 32, bias=False)
        self.to(BF16)


def by_name(verdicts):
    return {verdict.name: verdict for verdict in verdicts}


@pytest.fixture
def model():
    return Mixture()


@pytest.fixture
def planted(model):
    """A router that the checkpoint quantizes and training does not."""
    tensors = opfuse.export_weights(model, "deepseek").tensors
    other = opfuse.export_weights(model, "deepseek", ignore=["lm_head"]).tensors
    return tensors | {name: other[name] for name in other if name.startswith("layers.1.gate.weight")}


def test_a_router_that_one_side_quantizes_is_found_by_name(model, planted, tmp_path, capsys):
    plain = opfuse.export_weights(model, "deepseek").tensors
    for left in (plain, model.state_dict()):
        verdicts = by_name(compare(left, planted, cast=True))
        different = [name for name, verdict in verdicts.items() if not verdict.is_equal]
        assert different == ["layers.1.gate.weight"]
        verdict = verdicts["layers.1.gate.weight"]
        assert verdict.status == "quantized only in CHECKPOINT"
        assert (verdict.left, verdict.right, verdict.why) == ("bfloat16", "fp8_block_2d_e4m3", "rule deepgemm, from bfloat16")
    for name, tensors in (("left", model.state_dict()), ("right", planted)):
        (tmp_path / name).mkdir()
        half = len(tensors) // 2
        for i, part in enumerate(([*tensors.items()][:half], [*tensors.items()][half:])):
            save_file(dict(part), tmp_path / name / f"model-{i}.safetensors")
    assert main(["parity", str(tmp_path / "left"), str(tmp_path / "right"), "--cast"]) == 1
    out = capsys.readouterr().out
    assert "3 equal after the cast: bfloat16 beside fp8_block_2d_e4m3, rule deepgemm, from bfloat16" in out
    assert "quantized only in CHECKPOINT: bfloat16 beside fp8_block_2d_e4m3\n  layers.1.gate.weight: rule deepgemm" in out
    assert main(["parity", str(tmp_path / "left"), str(tmp_path / "left"), "--json"]) == 0
    assert {verdict["status"] for verdict in json.loads(capsys.readouterr().out)} == {EQUAL}


def test_without_a_cast_what_is_quantized_on_one_side_is_a_difference(model):
    verdicts = by_name(compare(model.state_dict(), opfuse.export_weights(model, "mxfp8").tensors))
    assert verdicts["layers.0.up.weight"].status == "quantized only in CHECKPOINT"
    assert "compressed_tensors" in verdicts["layers.0.up.weight"].why
    assert verdicts["layers.0.up.bias"].status == EQUAL
    kept = by_name(compare(model.state_dict(), opfuse.export_weights(model, "mxfp8").tensors, cast=True, plain=["up"]))
    assert [name for name, verdict in kept.items() if not verdict.is_equal] == [f"layers.{i}.up.weight" for i in range(3)]


@pytest.mark.parametrize("layout", OF_LINEAR_LAYERS)
def test_the_rule_and_the_dtype_of_every_layout_are_found(layout):
    """A trainer casts its fp32 masters, whoever serves casts them rounded to bf16."""
    model = Mixture(1).float()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(p * 2**-9 * torch.rand_like(p))
    source = {name: value.clone() for name, value in model.state_dict().items()}
    sharp = opfuse.export_weights(model, layout).tensors
    rounded = opfuse.export_weights(model.to(BF16), layout).tensors
    verdict = by_name(compare(sharp, rounded, source=source))["layers.0.up.weight"]
    rule = {"deepseek": "deepgemm", "nvfp4": "te"}.get(layout, "compressed_tensors")
    assert verdict.status == "bytes differ"
    assert re.fullmatch(rf"MODEL: rule .*\b{rule}\b.*, from float32; CHECKPOINT: rule .*\b{rule}\b.*, from bfloat16", verdict.why)
    assert by_name(compare(sharp, sharp))["layers.0.up.weight"].status == EQUAL
    assert by_name(compare(source, rounded, cast=True))["layers.0.up.weight"].status == CAST


def test_rules_that_differ_are_named_with_a_source_and_told_apart_without(model):
    weight = model.layers[0]["up"].weight.detach() * torch.linspace(1, 8, 128, dtype=BF16)
    name = "up.weight"

    def stored(quantizer):
        return opfuse.to_planes({name: quantizer(weight)})

    te, deep = stored(Float8BlockQuantizer(torch.float8_e4m3fn)), opfuse.export_weights(Holder(weight), "deepseek").tensors
    verdict = by_name(compare(te, deep, source={name: weight}))[name]
    model_rule, checkpoint_rule = verdict.why.split("; ")
    assert model_rule.startswith("MODEL: rule te (powers of two)")
    assert re.fullmatch(r"CHECKPOINT: rule .*\bdeepgemm, from bfloat16", checkpoint_rule)
    told = by_name(compare(te, deep))[name].why
    assert told.startswith("scales are powers of two beside any fp32; 2 of 2 scales differ, first at [0, 0]; ")
    ceil, floor = stored(MXFP8Quantizer()), stored(MXFP8Quantizer(scale_rule="ocp_floor", with_2d_quantization=True))
    why = by_name(compare(ceil, floor, source={name: weight}))[name].why
    assert re.fullmatch(r"MODEL: rule te or rceil.*; CHECKPOINT: rule ocp_floor \(32x32 tiles\), from bfloat16", why)
    assert by_name(compare(te, ceil))[name].status == "formats differ"


def test_plain_tensors_and_names(model):
    state = model.state_dict()
    other = {name: value.float() if name == "norm.weight" else value.clone() for name, value in state.items()}
    other["norm.bias"] = other["norm.bias"].clone()
    other["norm.bias"][3] = 1
    other["extra"] = other.pop("lm_head.weight")
    different = {v.name: (v.status, v.why) for v in compare(other, state) if not v.is_equal}
    assert different == {
        "norm.weight": ("values differ", "CHECKPOINT has the values rounded to torch.bfloat16"),
        "norm.bias": ("values differ", "1 of 128 values differs, first at [3]"),
        "extra": ("only in MODEL", ""),
        "lm_head.weight": ("only in CHECKPOINT", ""),
    }
    shapes = by_name(compare({"x": torch.ones(2, 3)}, {"x": torch.ones(3, 2)}))["x"]
    assert (shapes.status, shapes.why) == ("shapes differ", "(2, 3) beside (3, 2)")


def test_what_is_no_checkpoint_is_told(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.safetensors").write_bytes(b"\0\1")
    (tmp_path / "broken.pt").write_bytes(b"no pickle")
    torch.save({"x": torch.ones(2)}, tmp_path / "x.pt")
    assert load(tmp_path / "x.pt")["x"].tolist() == [1, 1]
    for name in ("empty", "none.pt", "broken.safetensors", "broken.pt"):
        with pytest.raises(ConversionError, match=r"wants .*Cure"):
            load(tmp_path / name)
    assert main(["parity", str(tmp_path / "none"), str(tmp_path / "x.pt")]) == 1
    assert "wants a file of .safetensors, .pt, .pth, .bin" in capsys.readouterr().err
