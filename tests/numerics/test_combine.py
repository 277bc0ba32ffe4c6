"""Rows put together behind experts: both passes against autograd in fp64."""

from __future__ import annotations

import pytest
import torch

from opfuse.numerics.combine import combine_rows, combine_rows_backward

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_both_passes_are_those_of_autograd(dtype, close, weighted, absent):
    """A row that adds nothing gets gradients of 0, and so does its weight."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(12, 72, generator=draw).to(dtype)
    places, dy = torch.randperm(12, generator=draw).view(4, 3), torch.randn(4, 72, generator=draw).to(dtype)
    weights = torch.rand(4, 3, generator=draw) if weighted else None
    counts = torch.ones(4, 3, dtype=torch.bool)
    counts[1, 2] = counts[3, 0] = not absent
    exact = rows.double().requires_grad_()
    shares = (torch.ones(4, 3) if weights is None else weights).double().requires_grad_()
    y = (exact[places] * (shares * counts).unsqueeze(-1)).sum(1)
    y.backward(dy.double())
    marked = places.where(counts, ~places)
    torch.testing.assert_close(combine_rows(rows, marked, weights).double(), y.detach(), rtol=close, atol=close)
    d_rows, d_weights = combine_rows_backward(dy, marked, weights, rows)
    torch.testing.assert_close(d_rows.double(), exact.grad, rtol=close, atol=close)
    if weights is None:
        assert d_weights is None
    else:
        torch.testing.assert_close(d_weights.double(), shares.grad, rtol=1e-5, atol=1e-5)


def test_a_result_of_another_dtype_is_rounded_once():
    rows, places = torch.tensor([[1.0], [2.0**-9], [2.0**-9]]).bfloat16(), torch.tensor([[0, 1, 2]])
    assert combine_rows(rows, places, dtype=torch.float32).item() == 1 + 2.0**-8
    assert combine_rows(rows, places).item() == 1.0  # half of a unit, to even
