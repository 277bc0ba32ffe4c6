"""Rows of zeros behind what a converted module is given: as many as a recipe wants, behind every argument."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import pad

import opfuse
from opfuse.convert.converted import converted
from opfuse.errors import ConversionError, OpfuseError, ShapeError
from opfuse.recipes import CustomRecipe, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
from opfuse.tensors.quantizers import MXFP8Quantizer
from tests.convert.blocks import Residual

MX = MXFP8BlockScaling()


class By128(MXFP8Quantizer):
    """One of the user's own, for whole tiles alone."""

    def check(self, shape, *args, **kwargs):
        if shape[0] % 128:
            raise ShapeError("whole tiles")


RECIPES = {
    "mxfp8": MX,
    "mxfp8, as it came": MXFP8BlockScaling(backward_override="high_precision"),
    "nvfp4": NVFP4BlockScaling(),
    "blocks": Float8BlockScaling(),
    "tiles": CustomRecipe(qfactory=lambda role: By128(torch.float8_e4m3fn)),
}

SPARE = {
    ("mxfp8", True): {(1,): 31, (34,): 30, (2, 20): 24, (3, 24): 24, (100,): 28, (32,): 0, (128,): 0, (2, 64): 0, (0,): 0},
    ("mxfp8", False): {(1,): 0, (34,): 0},
    ("mxfp8, as it came", True): {(1,): 0, (34,): 0},
    ("nvfp4", True): {(1,): 15, (40,): 8, (72,): 8, (100,): 12, (32,): 0, (0,): 0},
    ("nvfp4", False): {(1,): 0},
    ("blocks", True): {(1,): 0, (40,): 0},
    ("tiles", True): {(1,): 127, (40,): 88, (72,): 56, (4, 50): 56, (32,): 96, (256,): 0},
    ("tiles", False): {(40,): 88},
}


@pytest.fixture(scope="module")
def run():
    model = nn.Linear(32, 64)
    opfuse.fuse_(model)
    pipeline = converted(model).run
    return pipeline


@pytest.mark.parametrize(("name", "trains"), SPARE)
def test_as_many_rows_as_a_recipe_wants_where_gradients_are(run, name, trains):
    """Asked twice, since what was found is kept."""
    for _ in range(2):
        with torch.set_grad_enabled(trains), opfuse.autocast(recipe=RECIPES[name]):
            found = {shape: run.spare_of(torch.empty(*shape, 32), torch.is_grad_enabled()) for shape in SPARE[name, trains]}
        assert found == SPARE[name, trains]


def test_a_matrix_that_a_quantizer_of_the_users_own_refuses_stays_as_it_is_for_the_reason_that_this_gives():
    wanted = "got a Linear without any; it wants operands that its quantizers take, got whole tiles. Cure: "
    with pytest.raises(ConversionError, match=wanted):
        opfuse.fuse_(nn.Linear(32, 40), RECIPES["tiles"])


def test_every_argument_gets_them():
    model = Residual()
    opfuse.fuse_(model, MX)
    both = [torch.randn(2, 5, 32, requires_grad=True) for _ in range(2)]
    by_hand = [pad(x.detach().view(10, 32), (0, 0, 0, 22)).requires_grad_() for x in both]
    got, wanted = model(*both), model(*by_hand)
    dy = torch.randn(2, 5, 32)
    found = torch.autograd.grad(got, [*both, *model.parameters()], dy)
    other = torch.autograd.grad(wanted, [*by_hand, *model.parameters()], pad(dy.view(10, 32), (0, 0, 0, 22)))
    assert torch.equal(got.view(10, 32), wanted[:10])
    for i, (one, another) in enumerate(zip(found, other, strict=True)):
        assert torch.equal(one, another[:10].view(2, 5, 32) if i < 2 else another)


def test_a_vector_is_a_row():
    model, x = nn.Linear(32, 64), torch.randn(32)
    opfuse.fuse_(model, MX)
    assert torch.equal(model(x), model(x[None])[0])


@pytest.mark.parametrize("shape", [(), (3, 0), (0, 0)])
def test_what_has_no_rows_or_no_columns_is_refused_by_the_product(shape):
    model = nn.Linear(32, 64)
    opfuse.fuse_(model, MX)
    with pytest.raises(OpfuseError, match="wants"):
        model(torch.zeros(shape))
