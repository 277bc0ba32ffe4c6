"""The head and its loss on a GPU: gradients of chunks that cuBLAS adds to fp32, interpreted and repeated, without a wait."""

from __future__ import annotations

import pytest
import torch

from opfuse import ops
from tests.ops.test_cross_entropy import OPTIONS, exact, made


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_are_those_of_fp64(dtype, options, reduction, device):
    op, x, targets = made(19, dtype=dtype, reduction=reduction, **options)
    op, x, targets = op.to(device), x.detach().to(device).requires_grad_(), targets.to(device)
    for _ in range(4):  # interpreted, recorded and repeated
        op.zero_grad()
        x.grad = None
        loss = op(x, targets)
        loss.backward(torch.full_like(loss, 3.0))
        wanted, bounds = exact(op, x, targets, 3.0)
        for got, want, most in zip((loss.detach(), x.grad, *(p.grad for p in op.parameters())), wanted, bounds, strict=True):
            assert ((got.double() - want).abs() <= most.clamp(min=1e-30)).all()


def test_a_head_of_a_model_takes_no_logits_of_all_rows_and_waits_for_nothing(device):
    rows, features, words = 2048, 512, 32000
    op = ops.LinearCrossEntropy(features, words, chunk=256, dtype=torch.bfloat16, device=device)
    x = torch.randn(rows, features, device=device, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(words, (rows,), device=device)
    for _ in range(3):
        torch.autograd.grad(op(x, targets), (x, op.weight))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = op(x, targets)
        grads = torch.autograd.grad(loss, (x, op.weight))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    taken = torch.cuda.max_memory_allocated() - before
    # dW in fp32 and rounded, a chunk of logits, their shares and the gradients of both.
    assert taken < words * features * 6 + 256 * words * 12 + 2**24
    wanted = torch.nn.functional.cross_entropy((x.double() @ op.weight.double().T), targets)
    assert abs(loss.item() - wanted.item()) < 1e-3 * wanted.item()
    exactly = torch.autograd.grad(wanted, (x, op.weight))
    for got, want in zip(grads, exactly, strict=True):
        assert (got.double() - want).norm() < 1e-2 * want.norm()
