"""``opfuse run`` on a device, by its command line: products run in its own FP8 units, and the loss follows high precision."""

import json
from pathlib import Path

import pytest
import torch

from opfuse.cli import main

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


NAMES = ["fp8_current", "fp8_row_scaled", "fp8_block", "fp8_current_dequantized", "fp8_block_high_precision", "delayed"]


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_trains_with_native_products(name, device, tmp_path, capsys):
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("block-scaled FP8 products are native on Hopper alone")
    arguments = ["--device", "cuda", "--steps", "60", "--json", "--out", str(tmp_path)]
    assert main(["run", str(CONFIGS / f"{name}.yaml"), *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"].startswith("cuda")
    assert found["backend"] == "native", found["backend_reason"]
    assert found["loss_last"] < found["loss_first"] - 1.5
    assert abs(found["loss_difference"]) < 0.03
    assert "epilogue" in found["fusions"]
