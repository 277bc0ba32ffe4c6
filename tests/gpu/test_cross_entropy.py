"""The head and its loss on a GPU: gradients of chunks that cuBLAS adds to fp32, interpreted and repeated, without a wait.

tests/gpu/test_kernels.py compares the kernel of the loss with its definition on the CPU.
"""

from __future__ import annotations

import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.kernels.cross_entropy import row_losses
from opfuse.kernels.engine.registry import definitions_alone
from opfuse.numerics.cross_entropy import CrossEntropy, room_in
from opfuse.tensors.gemm import gemm
from tests.ops.test_cross_entropy import CAST, OPTIONS, OVERRIDDEN, by_definition, exact, made, quantized


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
    op = ops.LinearCrossEntropy(features, words, chunk=512, dtype=torch.bfloat16, device=device)
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
    # dW in fp32 and rounded, and a chunk of logits, in whose memory their gradients lie; a copy of these would have 32 MB.
    assert taken < words * features * 6 + 512 * words * 4 + 2**24
    wanted = torch.nn.functional.cross_entropy((x.double() @ op.weight.double().T), targets)
    assert abs(loss.item() - wanted.item()) < 1e-3 * wanted.item()
    exactly = torch.autograd.grad(wanted, (x, op.weight))
    for got, want in zip(grads, exactly, strict=True):
        assert (got.double() - want).norm() < 1e-2 * want.norm()


ALL = CrossEntropy(label_smoothing=0.1, z_loss=1e-3, softcap=30.0)


@pytest.mark.row("R05")
@torch.no_grad()
@pytest.mark.parametrize("kind", [*CAST, *OVERRIDDEN])
def test_quantized_products_are_those_of_the_casts(kind, device):
    """Interpreted, recorded and repeated to the same bits, without a wait for the device."""
    recipe = {**CAST, **OVERRIDDEN}[kind]
    op, x, targets = quantized(640, bias=True, reduction="sum", dtype=torch.bfloat16)
    op, x, targets = op.to(device), x.detach().to(device).requires_grad_(), targets.to(device)
    wanted, found = by_definition(op, x, targets, recipe), []
    for call in range(4):
        torch.cuda.set_sync_debug_mode("error" if call == 3 else "default")
        try:
            with opfuse.autocast(recipe=recipe), torch.enable_grad():
                loss = op(x, targets)
            found.append((loss, *torch.autograd.grad(loss, (x, op.weight, op.bias))))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for one, other in zip(found[0], wanted, strict=True):
        assert (one - other).norm() <= 2**-8 * other.norm()
    assert all(torch.equal(one, two) for each in found[1:] for one, two in zip(each, found[0], strict=True))


def drawn(device, rows, words, seed=0):
    random = torch.Generator(device).manual_seed(seed)
    logits = 3 * torch.randn(rows, words, device=device, generator=random)
    return logits, torch.randint(words, (rows,), device=device, generator=random)


@pytest.mark.parametrize("how", [CrossEntropy(), ALL], ids=str)
@pytest.mark.parametrize("gradient", [torch.bfloat16, torch.float16, torch.float32, None], ids=str)
@pytest.mark.parametrize("words", [1000, 32768, 50257, 128256, 151936])
def test_the_kernel_has_the_bits_of_its_definition_on_the_same_gpu(words, gradient, how, device):
    """More rows than a GPU has blocks at a time; what a block overwrites, no other one reads."""
    logits, targets = drawn(device, 600, words)
    other = logits.clone()
    found = row_losses(logits, targets, how, gradient=gradient)
    with definitions_alone():
        wanted = row_losses(other, targets, how, gradient=gradient)
    assert torch.equal(found.losses, wanted.losses)
    assert torch.equal(logits.view(torch.int32), other.view(torch.int32))
    if gradient is not None:
        assert torch.equal(found.gradient, wanted.gradient)
        assert found.gradient.data_ptr() == logits.data_ptr() + (4 - gradient.itemsize) * words


def test_r11_the_kernel_gives_the_same_bits_each_time(device):
    logits, targets = drawn(device, 1000, 40000)
    first = None
    for _ in range(20):
        again = logits.clone()
        found = row_losses(again, targets, CrossEntropy(), gradient=torch.bfloat16)
        first = first or (found.losses, again)
        assert torch.equal(found.losses, first[0])
        assert torch.equal(again.view(torch.int32), first[1].view(torch.int32))


@pytest.mark.parametrize("how", [CrossEntropy(), ALL], ids=str)
def test_r12_the_kernel_is_captured_and_waits_for_nothing(how, device):
    logits, targets = drawn(device, 300, 33000)
    room = logits.clone()
    row_losses(room, targets, how, gradient=torch.bfloat16)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = row_losses(room, targets, how, gradient=torch.bfloat16)
    for seed in range(5):
        values, aims = drawn(device, 300, 33000, seed)
        room.copy_(values)
        targets.copy_(aims)
        graph.replay()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = row_losses(values, aims, how, gradient=torch.bfloat16)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(captured.losses, found.losses)
        assert torch.equal(captured.gradient, found.gradient)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "words", "columns"), [(1, 53, 24), (37, 53, 24), (128, 1001, 64), (1000, 1002, 72), (512, 4096, 256)]
)
def test_products_read_nothing_between_the_rows_of_a_gradient(rows, words, columns, dtype, device):
    """Where parts of logits lie, with any bits: those of NaN here."""
    dy = room_in(torch.full((rows, words), torch.nan, device=device), dtype).normal_()
    x, weight = (torch.randn(n, columns, device=device).to(dtype) for n in (rows, words))
    dx = gemm("dgrad", dy, weight, dtype=dtype)
    torch.testing.assert_close(dx.double(), dy.double() @ weight.double(), rtol=2e-2, atol=2e-2 * words**0.5)
    dw = torch.ones(words, columns, device=device)
    torch.addmm(dw, dy.t(), x, out_dtype=torch.float32, out=dw)
    torch.testing.assert_close(dw.double(), 1 + dy.t().double() @ x.double(), rtol=1e-3, atol=1e-3 * rows**0.5)


@pytest.mark.slow
def test_r10_indices_past_2_31(device):
    rows, words = 17000, 128256
    random = torch.Generator(device).manual_seed(0)
    logits = torch.empty(rows, words, device=device).normal_(0, 3, generator=random)
    targets = torch.randint(words, (rows,), device=device, generator=random)
    some = torch.tensor([0, 8371, 8372, 16744, 16745, rows - 1], device=device)
    kept = logits[some]
    found = row_losses(logits, targets, CrossEntropy(), gradient=torch.bfloat16)
    wanted = row_losses(kept, targets[some], CrossEntropy(), gradient=torch.bfloat16)
    assert torch.equal(found.losses[some], wanted.losses)
    assert torch.equal(found.gradient[some], wanted.gradient)
