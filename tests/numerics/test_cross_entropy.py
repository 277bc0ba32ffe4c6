"""The losses of rows: the order of their sums, gradients in the memory of logits, and values against fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from opfuse.numerics.cross_entropy import CrossEntropy, row_losses
from opfuse.numerics.exponential import exponential, hyperbolic_tangent
from tests.turns import in_turn

ALL = CrossEntropy(ignore_index=5, label_smoothing=0.1, z_loss=1e-3, softcap=3.0)
HOWS = (CrossEntropy(), CrossEntropy(label_smoothing=0.2), CrossEntropy(z_loss=1e-2), CrossEntropy(softcap=20.0), ALL)
TILE, STRIDE = 8192, 4096


def drawn(words: int, rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(words)
    targets = torch.randint(words, (rows,), generator=random)
    targets[0] = 5
    return 3 * torch.randn(rows, words, generator=random), targets


# -- by hand -----------------------------------------------------------------------------------------------------------------


def halves(values: np.ndarray) -> np.float32:
    """The second half of the numbers is added to the first until one is left."""
    values = np.asarray(values, np.float32)
    while len(values) > 1:
        first, second = np.split(values, 2)
        values = first + second
    return values[0]


def exp(x: np.float32) -> np.float32:
    return exps([x])[0]


def exps(values: list[np.float32]) -> np.ndarray:
    return exponential(torch.tensor(np.array(values, np.float32))).numpy()


def by_hand(logits: np.ndarray, target: int, how: CrossEntropy) -> tuple[np.float32, np.ndarray]:
    """Loss and gradient of one row, number by number, in fp32."""
    one, tangent = np.float32(1), np.zeros_like(logits)
    if how.softcap is not None:
        tangent = hyperbolic_tangent(torch.from_numpy(logits * np.float32(1 / how.softcap))).numpy()
        logits = tangent * np.float32(how.softcap)
    tops, sums, totals = [], [], []
    for thread in range(512):
        top, total, all_ = np.float32(-np.inf), np.float32(0), np.float32(0)
        for tile in range(0, len(logits), TILE):
            at = [tile + half * STRIDE + 8 * thread + i for half in range(2) for i in range(8)]
            mine = [logits[i] for i in at if i < len(logits)]
            if not mine:
                continue
            higher = max(top, *mine)
            part = halves(np.append(exps(mine - higher), [0] * (len(at) - len(mine))))  # those that are there come first
            total = total * exp(top - higher) + part
            all_ = all_ + halves(np.array([logits[i] if i < len(logits) else 0 for i in at]))
            top = higher
        tops, sums, totals = [*tops, top], [*sums, total], [*totals, all_]
    most = max(tops)
    scaled = np.array([s * exp(top - most) for s, top in zip(sums, tops)], np.float32)

    def over(threads: np.ndarray) -> np.float32:
        return halves(np.array([halves(threads[lane::32]) for lane in range(32)]))

    log_sum, mean = np.float32(np.log(np.float64(over(scaled)))), over(np.array(totals)) * np.float32(1 / len(logits))
    kept, spread, whole = np.float32(1 - how.label_smoothing), np.float32(how.label_smoothing), most + log_sum
    loss = log_sum - (logits[target] - most)
    if how.label_smoothing:
        loss = loss * kept + (log_sum - (mean - most)) * spread
    if how.z_loss:
        loss = loss + whole * whole * np.float32(how.z_loss)
    shares = exponential(torch.from_numpy((logits - most) - log_sum)).numpy()
    if how.z_loss:
        shares = shares * (whole * np.float32(2 * how.z_loss) + one)
    if how.label_smoothing:
        shares = shares - np.float32(how.label_smoothing / len(logits))
    shares[target] -= kept
    return loss, shares * (one - tangent * tangent) if how.softcap is not None else shares


@pytest.mark.few(apart=True)
@pytest.mark.parametrize(("words", "how"), in_turn([1, 13, 4099, TILE + STRIDE + 21], zip(HOWS), of=2))
def test_every_operation_and_its_order_are_those_of_the_definition(words, how):
    logits, targets = drawn(words, rows=2)
    targets[:] = words // 2
    wanted = [by_hand(logits[i].numpy().copy(), words // 2, how._replace(ignore_index=-1)) for i in range(2)]
    found = row_losses(logits, targets, how._replace(ignore_index=-1), gradient=torch.float32)
    for i, (loss, gradient) in enumerate(wanted):
        assert found.losses[i].item() == loss
        assert torch.equal(found.gradient[i], torch.from_numpy(gradient))


# -- rows and memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.row("X07")
@pytest.mark.parametrize("how", [CrossEntropy(), ALL], ids=str)
@pytest.mark.parametrize("words", [77, 1000, TILE + 40])
def test_x07_a_row_has_its_bits_whatever_rows_are_beside_it(words, how):
    logits, targets = drawn(words, rows=7)
    together = row_losses(logits.clone(), targets, how, gradient=torch.float32)
    for i in range(7):
        memory = torch.zeros(words + 3)
        alone = memory[i % 4 :][:words].copy_(logits[i])[None]  # on other bytes
        found = row_losses(alone, targets[i : i + 1], how, gradient=torch.float32)
        assert torch.equal(found.losses, together.losses[i : i + 1])
        assert torch.equal(found.gradient[0], together.gradient[i])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("words", [1, 7, 1000, TILE, 2 * TILE + 9])
def test_a_gradient_lies_at_the_end_of_the_logits_of_its_row(words, dtype):
    logits, targets = drawn(words)
    before = logits.clone()
    wide = row_losses(logits.clone(), targets, ALL, gradient=torch.float32)
    found = row_losses(logits, targets, ALL, gradient=dtype)
    assert torch.equal(found.gradient, wide.gradient.to(dtype))
    assert found.gradient.stride() == (2 * words, 1)
    assert found.gradient.data_ptr() == logits.data_ptr() + 2 * words
    assert found.gradient.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()
    assert torch.equal(logits.view(torch.int16)[:, :words], before.view(torch.int16)[:, :words])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gradient_as_wide_as_the_logits_takes_their_place(dtype):
    logits, targets = drawn(1000)
    logits = logits.to(dtype)
    found = row_losses(logits, targets, ALL, gradient=dtype)
    assert (found.gradient.data_ptr(), found.gradient.stride()) == (logits.data_ptr(), logits.stride())


@pytest.mark.parametrize("words", [1, 40, TILE + 8])
def test_no_rows_have_no_losses(words):
    found = row_losses(torch.empty(0, words), torch.empty(0, dtype=torch.int64), ALL, gradient=torch.bfloat16)
    assert found.losses.shape == (0,)
    assert (found.gradient.shape, found.gradient.dtype) == ((0, words), torch.bfloat16)


def test_losses_alone_leave_the_logits():
    logits, targets = drawn(1000)
    before = logits.clone()
    found = row_losses(logits, targets, ALL)
    assert found.gradient is None
    assert torch.equal(logits, before)
    assert torch.equal(found.losses, row_losses(logits, targets, ALL, gradient=torch.bfloat16).losses)


# -- values ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize(("words", "offset"), [(50, 0.0), (20000, 0.0), (20000, 1000.0), (20000, -1000.0)])
def test_losses_and_gradients_are_those_of_fp64(words, offset, how):
    """What the fp32 sum of logits may lose, and their own size, in units of 2^-24; torch's own loss is the reference."""
    logits, targets = drawn(words)
    logits = logits + offset
    raw = logits.double().requires_grad_()
    capped = raw if how.softcap is None else how.softcap * torch.tanh(raw / how.softcap)
    kept = targets != how.ignore_index
    options = {"ignore_index": how.ignore_index, "label_smoothing": how.label_smoothing, "reduction": "none"}
    whole = capped.logsumexp(-1)
    losses = F.cross_entropy(capped, targets, **options) + how.z_loss * whole.square() * kept
    scales = torch.linspace(-2, 2, len(targets))
    (gradient,) = torch.autograd.grad(losses, raw, scales.double())
    found = row_losses(logits, targets, how, gradient=torch.float32, scales=scales)
    size = (capped.abs().amax(-1) + whole.abs()).detach()
    off = 2.0**-24 * (16 + 8 * size + (how.label_smoothing > 0) * np.log2(words) * 4 * size)
    off_loss = off * (1 + 2 * how.z_loss * size)
    assert ((found.losses.double() - losses).abs() <= off_loss).all()
    shares = capped.detach().softmax(-1) * (1 + 2 * how.z_loss * size)[:, None] + how.label_smoothing / words
    worst = (
        2 * off[:, None] * shares + 2.0**-22 * gradient.abs() + 2.0**-23 * (capped.detach() == capped.gather(1, targets[:, None]))
    )
    if how.softcap is not None:  # the slope 1 - t^2 is off by some units of 1
        worst = worst + 2.0**-20 * (shares + (torch.arange(words) == targets[:, None]))
    assert ((found.gradient.double() - gradient).abs() <= worst).all()


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_losses_of_fp64_are_those_of_torch(default):
    logits, targets = drawn(300)
    raw, how = logits.double().requires_grad_(), CrossEntropy(label_smoothing=0.1, z_loss=1e-2, softcap=3.0)
    capped = 3.0 * torch.tanh(raw / 3.0)
    wanted = F.cross_entropy(capped, targets, label_smoothing=0.1, reduction="none") + 1e-2 * capped.logsumexp(-1).square()
    (gradient,) = torch.autograd.grad(wanted.sum(), raw)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = row_losses(raw.detach().clone(), targets, how, gradient=torch.float64)
    finally:
        torch.set_default_dtype(before)
    torch.testing.assert_close(found.losses, wanted.detach(), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(found.gradient, gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.row("R18")
def test_r18_rows_of_nothing_but_minus_infinity_are_nan_and_a_masked_part_is_not():
    logits, targets = drawn(TILE + 100)
    logits[1] = -torch.inf
    logits[2, :TILE] = -torch.inf  # a tile
    logits[3, TILE:] = -torch.inf
    targets[2:4] = torch.tensor([TILE + 7, 7])
    found = row_losses(logits.clone(), targets, CrossEntropy(), gradient=torch.float32)
    wanted = F.cross_entropy(logits.double(), targets, reduction="none")
    assert found.losses.isnan().nonzero().flatten().tolist() == [1]
    rows = torch.tensor([0, 2, 3, 4, 5])
    torch.testing.assert_close(found.losses[rows], wanted[rows].float(), rtol=1e-6, atol=1e-5)
    assert found.gradient[1].isnan().all()
    assert not found.gradient[2, :TILE].any()
    assert not found.gradient[rows].isnan().any()
