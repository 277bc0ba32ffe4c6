"""Advice follows from what was measured, and is a policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import opfuse
from opfuse import ops
from opfuse.cli.app import main
from opfuse.errors import ConversionError
from opfuse.inspect.advise import BANDWIDTH
from opfuse.recipes.availability import BF16, RATES, RECORD

ROOT = Path(__file__).resolve().parents[2]
NAMES = {"bf16": "bf16", "fp8_current": "fp8 per tensor", "fp8_block": "fp8 blocks", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}


def test_rates_are_those_of_the_record() -> None:
    """Within 5 %: they are rounded, and a new record moves them a little."""
    rows = [
        row for row in json.loads((ROOT / RECORD).read_text())["results"] if row["script"] == "gemm" and row["unit"] == "TFLOP/s"
    ]
    for kind, name in NAMES.items():
        values = [row["value"] * 1e12 for row in rows if row["name"].rpartition(" ")[0].rpartition(" ")[0] == name]
        assert len(values) == 6
        assert (BF16 if kind == "bf16" else RATES[kind]) == pytest.approx(sum(values) / 6, rel=0.05)
    assert 3e12 < BANDWIDTH < 5e12


def model() -> nn.ModuleDict:
    with torch.device("meta"):
        return nn.ModuleDict(
            {
                "large": nn.Linear(4096, 14336),
                "small": nn.Linear(64, 64),
                "odd": nn.Linear(4096, 1001),
                "gate": nn.Linear(4096, 8192),
                "mlp": ops.Sequential(ops.Linear(4096, 4096), ops.GELU()),
                "lm_head": nn.Linear(4096, 32000),
            }
        )


def test_large_layers_gain_small_ones_do_not_heads_and_routers_stay() -> None:
    found = opfuse.advise(model())
    told = {layer.path: layer for layer in found.layers}
    assert list(told) == ["large", "small", "odd", "gate", "mlp.0", "lm_head"]
    assert {path for path, layer in told.items() if layer.advice == "fp8_current"} == {"large", "mlp.0"}
    assert told["large"].gain is not None
    assert 1.4 < told["large"].gain < RATES["fp8_current"] / BF16
    for path, why in {"small": "too small", "odd": "multiples of 16", "gate": "routing", "lm_head": "the loss"}.items():
        assert why in told[path].why
    assert set(found.policy) == {"small", "odd", "gate", "lm_head"}
    assert 1 < found.gain < told["large"].gain
    assert "x 1." in str(found)
    assert all(layer.advice == "bf16" for layer in opfuse.advise(model(), kind="nvfp4").layers)
    with pytest.raises(ConversionError, match="did you mean 'mxfp8'"):
        opfuse.advise(model(), kind="mxfp")


def test_heads_are_known_by_the_models_word_and_bad_input_is_refused() -> None:
    found = opfuse.advise(model(), heads=["large"])
    assert "the output head" in {layer.path: layer.why for layer in found.layers}["large"]
    tied = nn.Sequential(nn.Embedding(1024, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 1024, bias=False))
    tied[2].weight = tied[0].weight
    assert [layer.advice for layer in opfuse.advise(tied).layers] == ["fp8_current", "bf16"]
    for bad in (3, nn.ReLU()):
        with pytest.raises(ConversionError, match="a module with linear layers, got"):
            opfuse.advise(bad)  # type: ignore[arg-type]
    for rows in (0, "x"):
        with pytest.raises(ConversionError, match=r"advise\(rows=\): wants a positive integer"):
            opfuse.advise(model(), rows=rows)  # type: ignore[arg-type]


class Experts(nn.Module):
    """Two matrices of each expert, in one parameter each; and vectors, which are none."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(8, 2048, 1024, device="meta"))
        self.down_proj = nn.Parameter(torch.empty(8, 1024, 1024, device="meta"))
        self.bias = nn.Parameter(torch.empty(8, 1024, device="meta"))


def test_experts_have_a_line_without_an_estimate() -> None:
    """And what is expected of the others stays: nobody knows how many tokens an expert gets."""
    alone, beside = opfuse.advise(nn.Sequential(nn.Linear(4096, 4096))), nn.Sequential(nn.Linear(4096, 4096), Experts())
    linear, experts = (found := opfuse.advise(beside)).layers
    assert (experts.path, experts.sizes, experts.advice, experts.gain) == ("1", (2048, 1024), "fp8_current", None)
    assert "docs/performance.md" in str(found)
    assert "expected of products with an estimate" in str(found)
    assert "expected of these products" in str(alone)
    assert linear.gain == pytest.approx(found.gain) == pytest.approx(alone.gain)
    assert found.policy == {}
    emulated = opfuse.advise(beside, kind="nvfp4")
    assert {layer.advice for layer in emulated.layers} == {"bf16"}


def test_the_command_reads_configurations_and_models_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "quickstart", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["layers"]
    assert {layer["advice"] for layer in told} == {"bf16"}
    assert [layer["path"] for layer in told] == [f"quickstart.yaml:{line} linear" for line in (7, 11, 13, 16)]
    assert [layer["why"].partition(":")[0] for layer in told][2:] == [told[0]["why"].partition(":")[0], "the output head"]
    pytest.importorskip("transformers")
    config = {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 1,
        "num_attention_heads": 16,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["advise", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "model.layers.0.mlp.gate_proj" in text
    assert "lm_head" in text


@pytest.mark.parametrize(
    ("text", "wanted"), [(None, "a file or a folder"), ("{", "transformers can make"), ("{}", "transformers can make")]
)
def test_what_no_model_is_made_of_says_so(text, wanted, tmp_path, capsys):
    """And nothing asks a hub for a name that was typed wrong."""
    pytest.importorskip("transformers", reason="of the extra `test`")
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    assert main(["advise", str(file)]) == 1
    told = capsys.readouterr().err
    assert f"{file}: wants " in told
    assert wanted in told
    assert "Traceback" not in told


def test_sizes_rows_and_reasons_that_decide() -> None:
    uneven = nn.Sequential(nn.Linear(4096, 4096), Experts())
    uneven[1].down_proj = nn.Parameter(torch.empty(5, 1024, 1024, device="meta"))
    assert len(opfuse.advise(uneven).layers) == 1, "other numbers of matrices are no experts"
    (layer,) = opfuse.advise(nn.Linear(4096, 4096), rows=8191).layers
    assert (layer.advice, layer.why) == ("bf16", "sizes and rows must be multiples of 16 for native products")
    assert "emulated" in opfuse.advise(nn.Linear(4096, 4096), kind="nvfp4").layers[0].why
