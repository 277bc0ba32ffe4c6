"""What a pipeline saves may leave for a file and come back in other memory: gradients have the same bits."""

from __future__ import annotations

import io

import pytest
import torch

import opfuse
from opfuse import ops
from tests.compiler.harness import CASES, Step, differences, mlp, randn, recipe_for, run, to

CODES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.row("H25")
@pytest.mark.parametrize(("name", "override"), CASES)
def test_h25_saved_planes_leave_and_come_back_with_the_same_bits(name, override):
    """Every saved tensor becomes bytes, and is made anew from them when the backward pass asks for it."""
    model, x, step = to(mlp(), torch.bfloat16), randn(32, 64), Step(recipe_for(name, override), steps=2)
    left: list[torch.dtype] = []
    memory: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> bytes:
        left.append(tensor.dtype)
        memory.append(tensor)  # alive, so that nothing else can stand at its address
        torch.save(tensor.detach().clone(), file := io.BytesIO())
        return file.getvalue()

    def unpack(data: bytes) -> torch.Tensor:
        back = torch.load(io.BytesIO(data), weights_only=True)
        assert back.untyped_storage().data_ptr() not in {tensor.untyped_storage().data_ptr() for tensor in memory}
        return back

    want = run(model, x, step=step)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        got = run(model, x, step=step)
    assert differences(got.tensors, want.tensors) == []
    quantized = name != "none" and override != "high_precision"
    assert any(dtype in CODES for dtype in left) == quantized


@pytest.mark.row("H25")
@pytest.mark.parametrize("name", ["none", "fp8_current", "mxfp8"])
def test_h25_a_plane_that_comes_back_with_other_bits_is_read(name):
    """The test above would notice: what is read in the backward pass is what came back, not what was saved."""
    model, x = to(ops.Sequential(ops.Linear(64, 64)), torch.bfloat16), randn(32, 64)
    recipe = recipe_for(name)

    def gradient(unpack) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), unpack),
            opfuse.autocast(enabled=recipe is not None, recipe=recipe),
        ):
            y = model(leaf)
        return torch.autograd.grad(y, model[0].weight, torch.ones_like(y))[0]

    assert gradient(lambda tensor: tensor).any()
    assert not gradient(torch.zeros_like).any()
