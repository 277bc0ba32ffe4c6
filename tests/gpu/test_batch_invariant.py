"""Batch invariance on the device: products of the package's own, and those of the library in tiles."""

import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.kernels.products.chained import product_chain
from opfuse.recipes import CustomRecipe
from opfuse.tensors import gemm
from opfuse.tensors.quantizers import IdentityQuantizer
from tests.invariance import RECIPES, bits_of_rows, model_of, pieces

LISTED = {
    **RECIPES,
    "block, rounded once": RECIPES["block"].replace(rounding="single"),  # of sums in fp32, which the library makes
    "high precision": CustomRecipe(qfactory=lambda role: IdentityQuantizer(), batch_invariant=True),
}
MOST, WIDTH = 8192, 2048


@pytest.mark.row("X07")
@pytest.mark.parametrize("kind", LISTED)
def test_a_row_has_the_bits_that_it_has_in_any_batch_of_up_to_8192(kind, device):
    model = model_of(torch.bfloat16, WIDTH, device)
    x = torch.randn(MOST, WIDTH, device=device, dtype=torch.bfloat16)
    whole = bits_of_rows(model, x, LISTED[kind])
    for rows in (1, 2, 3, 5, 16, 65, 128, 255, 640, 1024, 1025, 4096):
        for part in pieces(MOST, rows):
            assert torch.equal(bits_of_rows(model, x[part], LISTED[kind]), whole[part])
    training = bits_of_rows(model, x[128:256], LISTED[kind], training=True)
    if kind != "delayed":  # a row that no gradient wants is the same row
        assert torch.equal(training, whole[128:256])


@pytest.mark.row("X07")
@pytest.mark.parametrize("kind", ["delayed", "block", "row"])
def test_a_row_has_its_bits_whether_its_chain_is_made_with_the_product_or_apart(kind, device, monkeypatch):
    """Few rows are multiplied apart from their chain, many with it, which is the same."""
    torch.manual_seed(0)
    layers = ops.Linear(1024, 4096), ops.GELU(), ops.Linear(4096, 1024)
    model = ops.Sequential(*layers).to(device, torch.bfloat16)
    x = torch.randn(2048, 1024, device=device, dtype=torch.bfloat16)
    together = []
    monkeypatch.setattr(gemm, "product_chain", lambda *a, **k: together.append(k["invariant"]) or product_chain(*a, **k))
    whole = bits_of_rows(model, x, LISTED[kind])
    assert (together == []) == (kind == "row")
    assert all(together)
    for rows in (1, 5, 65, 256, 1025):
        for part in pieces(2048, rows):
            assert torch.equal(bits_of_rows(model, x[part], LISTED[kind]), whole[part])
    monkeypatch.setattr(gemm, "why_apart", lambda *_, **__: "asked to")
    assert torch.equal(bits_of_rows(model, x, LISTED[kind]), whole)


@pytest.mark.row("X07")
@pytest.mark.parametrize("kind", ["block", "mxfp8"])
def test_a_row_of_an_expert_has_the_bits_that_it_has_in_any_group(kind, device):
    torch.manual_seed(0)
    model = ops.GroupedLinear(2, 512, 1024, bias=False).to(device, torch.bfloat16)
    x = torch.randn(1024, 512, device=device, dtype=torch.bfloat16)

    def made(rows, first):
        with torch.no_grad(), opfuse.autocast(recipe=LISTED[kind]):
            return model(rows, [first, len(rows) - first])

    whole = made(x, 512)
    for rows in (32, 64, 160, 416):
        assert torch.equal(made(x[512 - rows : 512 + rows], rows), whole[512 - rows : 512 + rows])
