"""The normalisations: against fp64, their gradients, saved statistics, several trailing dimensions, errors."""

from __future__ import annotations

import math

import pytest
import torch

from opfuse.errors import RecipeError, ShapeError
from opfuse.kernels.norms import cast as norm_cast
from opfuse.numerics import chain as definition
from opfuse.numerics import norm
from opfuse.numerics.norm import Norm, Statistics, norm_backward, norm_forward
from tests.kernels.cases import norms

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CPU = torch.device("cpu")
SHAPES = [((5, 16), (16,)), ((2, 3, 4, 6), (4, 6)), ((1, 7), (7,)), ((9,), (9,)), ((0, 8), (8,)), ((3, 2, 5), (3, 2, 5))]


def draw(*shape: int, dtype: torch.dtype = FP64) -> torch.Tensor:
    return torch.randn(shape, dtype=FP64).to(dtype)


def rms_norm(x, weight, *, dtype=None, **options):
    y, statistics = norm_forward(x, Norm("rms_norm", weight, **options), dtype=dtype)
    return y, statistics.rstd


def rms_norm_backward(dy, x, weight, rstd, *, dtype=None, **options):
    gradients = norm_backward(dy, x, Norm("rms_norm", weight, **options), Statistics(rstd), dtype=dtype)
    return gradients.x, gradients.weight


def rms_norm_backward_add(dy, d_extra, x, weight, rstd, *, rounding="per_op"):
    gradients = norm_backward(dy, x, Norm("rms_norm", weight), Statistics(rstd), extra=d_extra, rounding=rounding)
    return gradients.x, gradients.weight


def layer_norm(x, weight, bias, **options):
    y, statistics = norm_forward(x, Norm("layer_norm", weight, bias, **options))
    return y, statistics.mean, statistics.rstd


def layer_norm_backward(dy, x, weight, mean, rstd, **options):
    return norm_backward(dy, x, Norm("layer_norm", weight, torch.zeros_like(weight), **options), Statistics(rstd, mean))


def l2_normalization(x, eps=1e-6):
    y, statistics = norm_forward(x, Norm("l2_normalization", eps=eps))
    return y, statistics.rstd


def l2_normalization_backward(dy, x, rstd):
    return norm_backward(dy, x, Norm("l2_normalization"), Statistics(rstd)).x


# -- fp64 definitions, written so that torch.autograd differentiates them ---------------------------------------------------


def rms_norm64(x, weight, eps, zero_centered_gamma):
    dims = tuple(range(-weight.dim(), 0))
    gamma = 1 + weight if zero_centered_gamma else weight
    return x / (x.pow(2).mean(dims, keepdim=True) + eps).sqrt() * gamma


def layer_norm64(x, weight, bias, eps, zero_centered_gamma):
    gamma = 1 + weight if zero_centered_gamma else weight
    return torch.nn.functional.layer_norm(x, weight.shape, gamma, bias, eps)


def l2_normalization64(x, eps):
    return x / (x.pow(2).sum(-1, keepdim=True) + eps).sqrt()


def check(got: torch.Tensor, wanted: torch.Tensor, factor: float = 1.0) -> None:
    """Within one rounding of ``got``'s dtype, plus fp32 arithmetic of terms up to ``factor`` times the result's largest."""
    eps = torch.finfo(got.dtype).eps
    atol = (
        factor
        * 8
        * torch.finfo(FP64 if got.dtype == FP64 else FP32).eps
        * max(1.0, wanted.abs().max().item() if wanted.numel() else 0.0)
    )
    torch.testing.assert_close(got.double(), wanted, rtol=0.51 * eps + 1e-15, atol=atol)


@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64])
@pytest.mark.parametrize(("shape", "trailing"), SHAPES)
def test_rms_norm_against_fp64(shape, trailing, dtype, zero_centered_gamma):
    x, dy, weight = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype), draw(*trailing, dtype=dtype)
    options = {"zero_centered_gamma": zero_centered_gamma}
    y, rstd = rms_norm(x, weight, eps=1e-3, **options)
    x64, w64 = x.double().requires_grad_(), weight.double().requires_grad_()
    y64 = rms_norm64(x64, w64, 1e-3, zero_centered_gamma)
    check(y, y64.detach())
    dx, dweight = rms_norm_backward(dy, x, weight, rstd, **options)
    for got, wanted in zip((dx, dweight), torch.autograd.grad(y64, (x64, w64), dy.double())):
        check(got, wanted, factor=8)
        assert got.dtype == dtype
    assert rstd.shape == shape[: len(shape) - len(trailing)]
    assert rstd.dtype == (FP64 if dtype == FP64 else FP32)


@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64])
@pytest.mark.parametrize(("shape", "trailing"), SHAPES)
def test_layer_norm_against_fp64(shape, trailing, dtype, zero_centered_gamma):
    x, dy = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype)
    weight, bias = draw(*trailing, dtype=dtype), draw(*trailing, dtype=dtype)
    options = {"zero_centered_gamma": zero_centered_gamma}
    y, mean, rstd = layer_norm(x, weight, bias, eps=1e-3, **options)
    wide = [t.double().requires_grad_() for t in (x, weight, bias)]
    y64 = layer_norm64(*wide, 1e-3, zero_centered_gamma)
    check(y, y64.detach(), factor=4)
    gradients = layer_norm_backward(dy, x, weight, mean, rstd, **options)
    for got, wanted in zip(gradients, torch.autograd.grad(y64, wide, dy.double())):
        check(got, wanted, factor=16)
        assert got.dtype == dtype
    assert mean.shape == rstd.shape == shape[: len(shape) - len(trailing)]
    assert mean.dtype == rstd.dtype == (FP64 if dtype == FP64 else FP32)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64])
@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 6), (9,), (0, 8)])
def test_l2_normalization_against_fp64(shape, dtype):
    x, dy = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype)
    y, rstd = l2_normalization(x, eps=1e-3)
    x64 = x.double().requires_grad_()
    y64 = l2_normalization64(x64, 1e-3)
    check(y, y64.detach())
    (wanted,) = torch.autograd.grad(y64, x64, dy.double())
    check(l2_normalization_backward(dy, x, rstd), wanted, factor=8)
    assert rstd.shape == shape[:-1]


# -- gradcheck -------------------------------------------------------------------------------------------------------------


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, zero_centered_gamma):
        y, rstd = rms_norm(x, weight, zero_centered_gamma=zero_centered_gamma)
        ctx.save_for_backward(x, weight, rstd)
        ctx.zero_centered_gamma = zero_centered_gamma
        return y

    @staticmethod
    def backward(ctx, dy):
        return *rms_norm_backward(dy, *ctx.saved_tensors, zero_centered_gamma=ctx.zero_centered_gamma), None


class _RMSNormAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        y, rstd = rms_norm(x, weight)
        ctx.save_for_backward(x, weight, rstd)
        return y, x.clone()

    @staticmethod
    def backward(ctx, dy, d_extra):
        return rms_norm_backward_add(dy, d_extra, *ctx.saved_tensors)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, zero_centered_gamma):
        y, mean, rstd = layer_norm(x, weight, bias, zero_centered_gamma=zero_centered_gamma)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.zero_centered_gamma = zero_centered_gamma
        return y

    @staticmethod
    def backward(ctx, dy):
        return *layer_norm_backward(dy, *ctx.saved_tensors, zero_centered_gamma=ctx.zero_centered_gamma), None


class _L2(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y, rstd = l2_normalization(x)
        ctx.save_for_backward(x, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        return l2_normalization_backward(dy, *ctx.saved_tensors)


@pytest.mark.few
@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("trailing", [(6,), (3, 6)])
def test_r6_gradcheck_of_every_norm(trailing, zero_centered_gamma):
    x = draw(2, 3, 6).requires_grad_()
    weight, bias = draw(*trailing).requires_grad_(), draw(*trailing).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: _RMSNorm.apply(x, w, zero_centered_gamma), (x, weight))
    assert torch.autograd.gradcheck(lambda x, w, b: _LayerNorm.apply(x, w, b, zero_centered_gamma), (x, weight, bias))
    assert torch.autograd.gradcheck(_RMSNormAdd.apply, (x, weight))
    assert torch.autograd.gradcheck(_L2.apply, (x,))


# -- rules -----------------------------------------------------------------------------------------------------------------


def test_r4_backward_add_is_backward_then_add():
    """per_op: two roundings, as the ops one by one; single: one, which is closer to fp64 in most elements that differ."""
    x, dy, d_extra = (draw(64, 48, dtype=BF16) for _ in range(3))
    weight = draw(48, dtype=BF16)
    _, rstd = rms_norm(x, weight)
    dx, dweight = rms_norm_backward(dy, x, weight, rstd)
    per_op, dweight_add = rms_norm_backward_add(dy, d_extra, x, weight, rstd)
    assert torch.equal(per_op, dx + d_extra)
    assert torch.equal(dweight_add, dweight)
    single, _ = rms_norm_backward_add(dy, d_extra, x, weight, rstd, rounding="single")
    wide, _ = rms_norm_backward(dy, x, weight, rstd, dtype=FP32)
    assert torch.equal(single, (wide + d_extra.float()).to(BF16))
    assert 0.05 < (single != per_op).float().mean() < 0.5


def test_parameter_gradients_are_summed_in_fp32():
    """4096 rows of ones: a bf16 accumulator stops at 256."""
    rows = torch.ones(4096, 8).to(BF16) * torch.tensor([1, -1] * 4)
    weight, bias = torch.ones(8, dtype=BF16), torch.zeros(8, dtype=BF16)
    _, mean, rstd = layer_norm(rows, weight, bias, eps=0.0)
    _, dweight, dbias = layer_norm_backward(torch.ones_like(rows), rows, weight, mean, rstd)
    assert dbias.tolist() == [4096.0] * 8
    assert dweight.tolist() == [4096.0, -4096.0] * 4
    _, rstd = rms_norm(rows, weight, eps=0.0)
    _, dweight = rms_norm_backward(torch.ones_like(rows), rows, weight, rstd)
    assert dweight.tolist() == [4096.0, -4096.0] * 4


def test_mixed_dtypes_round_once_to_the_asked_dtype():
    """bf16 activations with an fp32 weight: results in the activation's dtype, gradients of the weight in the weight's."""
    x, dy, weight = draw(4, 8, dtype=BF16), draw(4, 8, dtype=BF16), draw(8, dtype=FP32)
    y, rstd = rms_norm(x, weight)
    wide, _ = rms_norm(x, weight, dtype=FP32)
    assert wide.dtype == FP32
    assert torch.equal(y, wide.to(BF16))
    dx, dweight = rms_norm_backward(dy, x, weight, rstd)
    assert (dx.dtype, dweight.dtype) == (BF16, FP32)


def test_zero_centered_gamma_of_zero_is_plain_normalisation():
    x = draw(4, 8, dtype=BF16)
    ones, zeros = torch.ones(8), torch.zeros(8)
    assert torch.equal(rms_norm(x, zeros, zero_centered_gamma=True)[0], rms_norm(x, ones)[0])
    assert torch.equal(layer_norm(x, zeros, zeros, zero_centered_gamma=True)[0], layer_norm(x, ones, zeros)[0])


def test_layer_norm_statistics_do_not_cancel():
    """A large common offset: the variance is that of the centred values, not a difference of two large sums."""
    x = draw(3, 64, dtype=FP32) + 4096.0
    _, mean, rstd = layer_norm(x, torch.ones(64), torch.zeros(64), eps=0.0)
    torch.testing.assert_close(mean.double(), x.double().mean(-1), rtol=1e-7, atol=0)
    torch.testing.assert_close(rstd.double(), 1 / x.double().std(-1, correction=0), rtol=1e-5, atol=0)


def test_zero_rows_stay_finite():
    x = torch.zeros(2, 4, dtype=BF16)
    weight = torch.ones(4, dtype=BF16)
    assert torch.equal(rms_norm(x, weight)[0], x)
    assert torch.equal(l2_normalization(x)[0], x)
    y, rstd = l2_normalization(x, eps=1e-6)
    assert l2_normalization_backward(torch.ones_like(y), x, rstd).float().allclose(torch.tensor(1e3), rtol=1e-2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_r18_non_finite_input_shows_in_its_row_only(bad):
    x = draw(3, 8, dtype=BF16)
    x[1, 2] = bad
    weight, bias = torch.ones(8), torch.zeros(8)
    for y in (rms_norm(x, weight)[0], layer_norm(x, weight, bias)[0], l2_normalization(x)[0]):
        assert y[1, 2].isnan()
        assert y[[0, 2]].isfinite().all()


def test_r10_strided_inputs_equal_contiguous_ones():
    x, dy = draw(2, 3, 4, 6, dtype=BF16).permute(1, 0, 3, 2), draw(2, 3, 4, 6, dtype=BF16).permute(1, 0, 3, 2)
    weight = draw(4, 6).t().to(BF16)
    y, rstd = rms_norm(x, weight)
    again, _ = rms_norm(x.contiguous(), weight.contiguous())
    assert torch.equal(y, again)
    gradients = rms_norm_backward(dy, x, weight, rstd)
    wanted = rms_norm_backward(dy.contiguous(), x.contiguous(), weight.contiguous(), rstd)
    assert all(torch.equal(got, want) for got, want in zip(gradients, wanted))


X, W = torch.zeros(3, 4), torch.zeros(4)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: rms_norm(X, torch.zeros(3)), ShapeError, "rms_norm x"),
        (lambda: rms_norm(W, torch.zeros(2, 4)), ShapeError, "(..., 2, 4)"),
        (lambda: rms_norm(X, torch.tensor(1.0)), ShapeError, "at least one"),
        (lambda: layer_norm(X, W, torch.zeros(3)), ShapeError, "layer_norm bias"),
        (lambda: rms_norm_backward(torch.zeros(3, 5), X, W, torch.ones(3)), ShapeError, "rms_norm dy"),
        (lambda: rms_norm_backward_add(X, torch.zeros(2, 4), X, W, torch.ones(3)), ShapeError, "extra gradient"),
        (lambda: rms_norm_backward_add(X, X, X, W, torch.ones(3), rounding="twice"), RecipeError, "'per_op'"),
        (lambda: l2_normalization(torch.tensor(1.0)), ShapeError, "l2_normalization x"),
    ],
)
def test_errors_are_typed(call, error, says):
    with pytest.raises(error) as caught:
        call()
    assert says in str(caught.value)
    assert "Cure" in str(caught.value)


# -- sums ------------------------------------------------------------------------------------------------------------------


def tree(values):
    """PlaneRecords added until one is left, with Python's own loop; the shorter list is filled with zeros."""
    size = 1 << max(len(values) - 1, 0).bit_length()
    values = list(values) + [0.0] * (size - len(values))
    while len(values) > 1:
        half = len(values) // 2
        values = [fp32(a + b) for a, b in zip(values[:half], values[half:])]
    return values[0]


def in_turn(values):
    total = 0.0
    for value in values:
        total = fp32(total + value)
    return total


def fp32(value):
    """One rounding: sums of two fp32 numbers are exact in fp64, or rounded far below fp32's last place."""
    return torch.tensor(value, dtype=FP64).float().item()


@pytest.mark.parametrize("columns", [1, 8, 67, 256, 300, 2048, 5000])
def test_row_sums_have_the_documented_order(columns):
    (row,) = values = draw(1, columns, dtype=FP32)
    chunks = [in_turn(row[c].item() for c in range(place, columns, norm.CHUNK)) for place in range(min(columns, norm.CHUNK))]
    chunks += [0.0] * (norm.CHUNK - len(chunks))
    eights = [tree(chunks[i : i + 8]) for i in range(0, norm.CHUNK, 8)]
    assert norm.row_sums(values).item() == tree([tree(eights[lane::32]) for lane in range(32)])


@pytest.mark.parametrize(("rows", "columns"), [(1, 3), (9, 3), (4100, 2), (3, 1032), (600, 1032)])
def test_column_sums_have_the_documented_order(rows, columns):
    values = draw(rows, columns, dtype=FP32)
    teams = norm.THREADS // norm.team(columns)
    first = values[:, 0].tolist()
    own = [in_turn(first[place :: norm.BLOCKS * teams]) for place in range(norm.BLOCKS * teams)]
    assert norm.column_sums(values)[0].item() == tree([tree(own[b * teams : (b + 1) * teams]) for b in range(norm.BLOCKS)])


def test_sums_of_negative_zeros_are_positive():
    values = torch.full((4, 24), -0.0)
    for sums in (norm.row_sums(values), norm.column_sums(values)):
        assert not sums.signbit().any()


@pytest.mark.parametrize("columns", [40, 1000, 5000])
@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm", "l2_normalization"])
def test_a_row_is_the_same_in_any_batch(kind, columns):
    """y, statistics and dx of a row depend on the row alone."""
    case = norms.Rows(kind, (23, columns))
    (dy, x, value, statistics), _ = case.backward(None, CPU)
    y, _ = norm_forward(x, value)
    dx = norm_backward(dy, x, value, statistics).x
    for rows in (slice(0, 1), slice(3, 10)):
        part, of_part = norm_forward(x[rows], value)
        assert torch.equal(part, y[rows])
        assert torch.equal(of_part.rstd, statistics.rstd[rows])
        assert torch.equal(norm_backward(dy[rows], x[rows], value, of_part).x, dx[rows])


# -- as an elementwise op ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm", "l2_normalization"])
def test_r4_what_statistics_leave_is_an_elementwise_op(kind, zero_centered):
    """By tiles, a normalisation is a stage of a chain: the same bits, and the gradient with constant statistics."""
    case = norms.Rows(kind, (9, 200), zero_centered=zero_centered)
    (x, value), _ = case.forward(CPU)
    y, statistics = norm_forward(x, value)
    stage = norm_cast.stage_of(value, statistics)
    assert torch.equal(definition.forward_chain(x, [stage])[0], y)
    wide, operands = x.double().requires_grad_(), {name: t.double() for name, t in stage.operands.items()}
    columns = {name: t.unsqueeze(-1) if stage.math.operands[name] == "column" else t for name, t in operands.items()}
    result = stage.math.value(wide, **columns)
    dy = draw(9, 200)
    (wanted,) = torch.autograd.grad(result, wide, dy)
    torch.testing.assert_close(stage.math.grad(dy, wide, **columns)[0], wanted)
