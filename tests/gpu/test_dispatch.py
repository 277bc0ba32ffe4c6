"""Rows that are cast as they are read: a dispatch and the cast of its rows in one kernel, and the same numbers apart."""

from __future__ import annotations

import pytest
import torch

import opfuse
from benchmarks.grouped import READ, Mixture, mixture
from opfuse import ops
from opfuse.fusions import RULES
from opfuse.recipes import availability
from opfuse.runtime.replay.dispatch import interpreted
from opfuse.tensors.ragged import cast_in_groups
from tests.compiler.harness import UNFUSED, Step, differences, randn, run

native_groups = pytest.mark.skipif(not (9, 0) <= availability.device_arch() < (10, 0), reason="no kernel multiplies here")
every_recipe = pytest.mark.parametrize("name", READ)
SIZES = ((300, 256, 8, 2, 128), (1, 128, 128, 8, 128), (1024, 144, 4, 4, 272), (777, 640, 64, 1, 384))
PROBLEMS = [Mixture(*sizes) for sizes in SIZES]


def drawn(problem: Mixture, device: torch.device) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(5)
    return mixture(problem, str(device)), randn(problem.tokens, problem.features).to(device)


@pytest.mark.row("X12")
@native_groups
@every_recipe
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_r4_a_dispatch_and_its_cast_are_what_they_are_apart(name, problem, x_dtype, device):
    """The second step has scales of the first, under delayed scaling."""
    model, x = drawn(problem, device)
    runs = [run(model, x.to(x_dtype), step=Step(READ[name].recipe, rules, steps=2)) for rules in (RULES, UNFUSED)]
    assert differences(*(each.tensors for each in runs)) == []
    assert runs[0].outcomes("dispatch_cast")[0].status == "fused"


@pytest.mark.row("X12")
@native_groups
@every_recipe
def test_a_program_repeats_it_for_tokens_that_go_elsewhere_and_nothing_waits(name, device):
    (model, x), (other, _) = (drawn(PROBLEMS[0], device) for _ in range(2))

    def step(model: torch.nn.Module, call: int) -> list[torch.Tensor]:
        given = x.roll(call, 1).requires_grad_()
        with opfuse.autocast(recipe=READ[name].recipe):
            y = model(given)
        return [y.detach(), *torch.autograd.grad(y, (given, *model.parameters()), x)]

    for call in range(6):
        torch.cuda.set_sync_debug_mode("error" if call > 1 else "default")
        try:
            found = step(model, call)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        with interpreted():
            assert all(map(torch.equal, found, step(other, call)))


@every_recipe
def test_rows_past_2_31_elements_are_read(name, device):
    """Of the last tokens and the first, beside the same cast of their copies; a group without rows is between them."""
    x = torch.randn(2**20, device=device).to(torch.bfloat16).repeat(2**11 + 1).view(-1, 1024)
    x[-1, -1] = 5.0
    index = torch.arange(129, device=device).flip(0) - 120
    index += len(x) * (index < 0)
    each, splits = [READ[name].quantizer(str(device)) for _ in range(3)], torch.tensor((100, 0, 29), device=device)
    found = cast_in_groups(each[0], x, splits, index, each=each).tensors()
    wanted = cast_in_groups(each[0], x.index_select(0, index), splits, each=each).tensors()
    assert all(map(torch.equal, found, wanted))


@native_groups
@every_recipe
def test_rows_of_experts_are_nowhere_in_high_precision(name, device):
    """What the first layer takes at its peak is less by all of them."""
    problem = Mixture(8192, 2048, 8, 8, 8)
    model, x = drawn(problem, device)
    gate, up = list(model)[:2]
    layer, peaks = ops.Sequential(gate, up), []
    for rules in (RULES, RULES.without("dispatch_cast")):
        with torch.no_grad(), Step(READ[name].recipe, rules).scope(), interpreted():
            layer(x)
            torch.cuda.reset_peak_memory_stats()
            layer(x)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] - peaks[0] >= problem.tokens * problem.top_k * problem.features * 2 * 0.9
