"""R4 on a device: pipelines whose chains end in a cast, with all rules and with none, bit for bit."""

import pytest
import torch

from opfuse import ops
from opfuse.fusions import RULES
from tests.compiler.harness import CASES, UNFUSED, Step, differences, recipe_for, run, to

BF16 = torch.bfloat16
PIPELINES = {
    "gelu": lambda: ops.Sequential(ops.Linear(256, 512), ops.GELU(), ops.Linear(512, 256)),
    "swiglu": lambda: ops.Sequential(ops.Linear(256, 1024), ops.SwiGLU(), ops.Linear(512, 256)),
    "interleaved": lambda: ops.Sequential(
        ops.Linear(256, 512), ops.SwiGLU(glu_interleave_size=32), ops.Dropout(0.25), ops.Linear(256, 256)
    ),
    "scaled": lambda: ops.Sequential(ops.Linear(256, 512), ops.ConstantScale(0.3), ops.GEGLU(), ops.Linear(256, 256)),
}


@pytest.mark.parametrize("rows", [192, 416])
@pytest.mark.parametrize(("name", "override"), CASES)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_r4_fused_equals_unfused_on_the_device(pipeline, name, override, rows, device):
    """Outputs, all gradients (sums included), saved state, scales and amax histories."""
    model = to(PIPELINES[pipeline](), BF16).to(device)
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows)).to(BF16).to(device)
    recipe = recipe_for(name, override)
    fused, unfused = (run(model, x, step=Step(recipe, rules, steps=2)) for rules in (RULES, UNFUSED))
    assert "fused" in {outcome.status for outcome in fused.outcomes("epilogue")}
    assert differences(fused.tensors, unfused.tensors) == []
