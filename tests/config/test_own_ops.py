"""Files name ops of other packages by the entry points of an installed distribution, and by nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from opfuse.config import loads
from opfuse.errors import ConfigError

MODULE = """
import torch
from opfuse import ops
from opfuse.core.spec import Size, hyper_parameters

class Mish(ops.Activation):
    math = ops.formula("mish", lambda x: x * x.softplus().tanh())

class Gain(ops.BasicOperation):
    @hyper_parameters
    def __init__(self, size: Size, *, first: float = 1.0, device=None, dtype=None):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.full((size,), first, device=device, dtype=dtype))

    def op_forward(self, ctx, x):
        ctx.save_for_backward(x, self.gain)
        return x * self.gain

    def op_backward(self, ctx, dy):
        x, gain = ctx.saved_tensors
        return dy * gain, ((dy * x).flatten(0, -2).sum(0),)
"""
POINTS = """[opfuse.ops]
mish = mine:Mish
gain = mine:Gain
other = mine:Gain
gelu = mine:Mish
lost = nowhere:Op
torch = torch:nn
"""
CONFIG = """version: 1
recipe: {kind: mxfp8}
pipeline:
  dtype: bfloat16
  ops:
    - {op: gain, size: 64, first: 2.0}
    - {op: linear, in_features: 64, out_features: 64}
    - {op: mish}
    - {op: linear, in_features: 64, out_features: 256}
fusions:
  rules: [{name: mine, pattern: [basic_linear, bias, mish], expect: {fused: 1}}]
data: {kind: pydoc_topics, context: 4, embedding: 16}
train: {batch_size: 32, steps: 1}
"""
PROGRAM = """
import json, sys, warnings
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    import opfuse
    from opfuse.cli.app import main
    from opfuse.errors import ConfigError
    config = opfuse.load("mine.yaml")
found = {"warnings": [str(each.message) for each in told if "entry point" in str(each.message)]}
model = config.build()
found["ops"] = [repr(op) for op in model]
found["check"] = main(["check", "mine.yaml"])
try:
    opfuse.load("wrong.yaml")
except ConfigError as error:
    found["finding"] = str(error)
print(json.dumps(found))
"""


def test_own_ops_come_from_entry_points(tmp_path: Path) -> None:
    """Fields, defaults and patterns as of built-in ops; entry points that are none of an op are told, each with a cure."""
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "mine-1.0.dist-info").mkdir()
    (tmp_path / "mine-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (tmp_path / "mine-1.0.dist-info" / "entry_points.txt").write_text(POINTS)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    (tmp_path / "wrong.yaml").write_text(CONFIG.replace("size: 64, first: 2.0", "size: 64, frist: 2.0"))
    path = os.pathsep.join((str(tmp_path), *filter(None, (os.environ.get("PYTHONPATH"), os.getcwd()))))
    asked = [sys.executable, "-c", PROGRAM]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(asked, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ops"][0] == "Gain(size=64, first=2.0)"
    assert found["ops"][2] == "Mish()"
    assert found["check"] == 0
    assert "wrong.yaml:6:28: error[unknown-key]" in found["finding"]
    assert "did you mean 'first'?" in found["finding"]
    told = "\n".join(found["warnings"])
    for point, why in {
        "gelu = mine:Mish of mine": "wants a name that no op of opfuse has, got 'gelu'",
        "lost = nowhere:Op of mine": "wants one that can be imported, got ModuleNotFoundError",
        "other = mine:Gain of mine": "wants the kind of its op, which patterns say, got 'other'. Cure: name the entry point gain",
        "torch = torch:nn of mine": "wants a class of opfuse.ops, got <module",
    }.items():
        assert f"entry point {point}: {why}" in told


def test_a_file_imports_nothing() -> None:
    """A name with a module is no op, whatever can be imported under it."""
    for name in ("torch.nn:Linear", "opfuse.ops.GELU", "mish"):
        with pytest.raises(ConfigError, match="unknown-op"):
            loads(CONFIG.replace("op: mish", f"op: '{name}'"), "f.yaml")
