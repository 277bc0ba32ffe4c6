"""Dropout at the edge: a draw of exactly p is kept, so that p = 0 drops nothing and every p drops a fraction of p."""

import pytest
import torch

from opfuse import ops


@pytest.mark.parametrize("p", [0.0, 0.25, 0.5])
@pytest.mark.parametrize("fused", [False, True])
def test_a_draw_of_exactly_p_is_kept(p, fused, monkeypatch):
    below, above = torch.nextafter(torch.tensor(p), torch.tensor(-1.0)), torch.nextafter(torch.tensor(p), torch.tensor(1.0))
    drawn = torch.stack([torch.tensor(p), above, *([below] if p else [])]).repeat(4, 1)
    monkeypatch.setattr(torch, "rand", lambda shape, **options: drawn.expand(shape).clone())
    model = ops.Sequential(ops.Dropout(p), *([ops.GELU()] if fused else []))
    x = torch.ones_like(drawn).requires_grad_()
    y = model(x)
    kept = torch.tensor([True, True, False])[: drawn.shape[1]].expand_as(y)
    assert torch.equal(y != 0, kept)
    y.sum().backward()
    assert torch.equal(x.grad != 0, kept)
