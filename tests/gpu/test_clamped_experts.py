"""Experts as GPT-OSS has them: matrices multiplied from the right, biases, a clamped unit whose halves take turns."""

from __future__ import annotations

import copy

import pytest
import torch

import opfuse
from opfuse import recipes
from opfuse.runtime.replay.dispatch import interpreted
from tests.compiler.harness import randn
from tests.convert.test_experts import EXPERTS, Clamped, InHalves
from tests.plans import plans_used

RECIPES = (recipes.Float8CurrentScaling(), recipes.Float8BlockScaling(), recipes.MXFP8BlockScaling())
TOKENS, WIDTH, INNER = 300, 256, 384


@pytest.mark.row("X12")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
@pytest.mark.parametrize("make", [Clamped, InHalves])
def test_clamped_experts_train_as_plain_ones_do(make, recipe, device):
    """Calls that are repeated have the bits of interpreted ones; both are as far from plain bf16 as the format is coarse."""
    torch.manual_seed(1)
    model = make(WIDTH, INNER, limit=7.0).to(device, torch.bfloat16)
    draw = torch.Generator(device).manual_seed(2)
    chosen = torch.rand(TOKENS, EXPERTS, generator=draw, device=device).topk(2).indices
    weights = torch.rand(TOKENS, 2, generator=draw, device=device).bfloat16()
    x = randn(TOKENS, WIDTH, seed=3).to(device)

    def step(model: torch.nn.Module) -> list[torch.Tensor]:
        given = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        y = model(given[0], chosen, given[1])
        return [y.detach(), *torch.autograd.grad(y, (*given, *model.parameters()), y.detach())]

    wanted = step(model)
    opfuse.fuse_(model, recipe)
    other = copy.deepcopy(model)
    for _ in range(4):
        with plans_used() as plans:
            found = step(model)
        assert plans[0].key.env.recipe == recipe
        with interpreted():
            assert all(map(torch.equal, found, step(other)))
    for one, plain in zip(found, wanted, strict=True):
        assert (one - plain).norm() <= 0.15 * plain.norm()
