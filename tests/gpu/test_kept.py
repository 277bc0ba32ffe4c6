"""Kept casts of weights go into every product of the package's own: bit for bit what a run without them makes."""

import contextlib
import copy

import pytest
import torch

import opfuse
from opfuse import ops, recipes
from opfuse.kernels.products.chained import product_chain
from opfuse.recipes import availability
from opfuse.tensors import gemm

pytestmark = pytest.mark.skipif(availability.device_arch() != (9, 0), reason="products of compute capability 9.0")

BF16, ROWS, WIDTH = torch.bfloat16, 4096, 1024
RECIPES = {
    "per tensor": recipes.Float8CurrentScaling(),
    "delayed": recipes.DelayedScaling(),
    "rows": recipes.CustomRecipe(qfactory="fp8_row_scaled"),
    "blocks": recipes.Float8BlockScaling(),
}
CHAINED = ("per tensor", "delayed", "blocks")


def linears() -> tuple[torch.nn.Module, tuple]:
    return ops.Sequential(ops.Linear(WIDTH, 4 * WIDTH), ops.GELU(), ops.Linear(4 * WIDTH, WIDTH)), ()


def experts() -> tuple[torch.nn.Module, tuple]:
    return ops.GroupedLinear(3, WIDTH, 4 * WIDTH, bias=False), ([512, 1280, 2304],)


@pytest.mark.parametrize("layers", [linears, experts])
@pytest.mark.parametrize("kind", RECIPES)
def test_kept_weights_change_no_bit_of_any_product(kind, layers, device, monkeypatch):
    """Interpreted, recorded and repeated, before and after a write to the weights."""
    torch.manual_seed(0)
    made, extras = layers()
    made, ways, together = made.to(device, BF16), [], []
    monkeypatch.setattr(gemm, "product_chain", lambda *a, **k: together.append(a) or product_chain(*a, **k))
    for scope in (contextlib.nullcontext, opfuse.kept_weights):
        model, found = copy.deepcopy(made), []
        with scope(*([model] if scope is opfuse.kept_weights else [])) as kept, opfuse.autocast(recipe=RECIPES[kind]):
            for seed in range(6):
                torch.manual_seed(seed)
                x = torch.randn(ROWS, WIDTH, device=device).to(BF16).requires_grad_()
                y = model(x, *extras)
                found += [y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, *model.parameters()])]
                if seed == 3:
                    with torch.no_grad():
                        for weight in model.parameters():
                            weight.mul_(1.5)
            assert kept is None or kept.nbytes > 0
        ways.append(found)
    assert all(map(torch.equal, *ways))
    assert bool(together) == (layers is linears and kind in CHAINED)
