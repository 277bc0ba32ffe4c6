"""Batch invariance on the device: products of the package's own, and those of the library in tiles."""

import pytest
import torch

from opfuse.recipes import CustomRecipe
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
