"""A step that is logged waits for nothing: its loss stays on the GPU until casts are looked at again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import opfuse
from opfuse import ops, recipes
from opfuse.inspect.trace import read


def test_a_loss_is_read_at_the_next_step_that_is_looked_at(tmp_path: Path, device: torch.device) -> None:
    model = ops.Sequential(ops.Linear(256, 512), ops.GELU(), ops.Linear(512, 256)).to(device, torch.bfloat16)
    x = torch.randn(256, 256, device=device, dtype=torch.bfloat16)
    losses = []
    with opfuse.watch(model, every=6, to=tmp_path, alarms={}) as watch:
        for step in range(1, 8):
            torch.cuda.set_sync_debug_mode("error" if step in (4, 5, 6) else "default")
            try:
                with opfuse.autocast(recipe=recipes.Float8CurrentScaling()):
                    loss = model(x).square().mean()
                loss.backward()
                watch.log(loss=loss)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            losses.append(loss.detach())
            (trace,) = read(tmp_path)
            assert len(trace.steps) == (6 if step == 7 else 0)
    (trace,) = read(tmp_path)
    assert [line.figures["loss"] for line in trace.steps] == pytest.approx([loss.item() for loss in losses])
    assert all(0 < line.memory <= line.peak <= torch.cuda.max_memory_allocated(device) for line in trace.steps)
