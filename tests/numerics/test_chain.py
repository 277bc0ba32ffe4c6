"""Chains: fused equals unfused bit for bit, one rounding against fp64, gradients, layouts, shapes and errors."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opfuse.errors import PipelineError, RecipeError, SavedTensorError, ShapeError, SpecError
from opfuse.numerics.activations import ACTIVATIONS, ARITHMETIC, GATED, POINTWISE, SCALED, sigmoid
from opfuse.numerics.chain import Stage, backward_chain, forward_chain
from opfuse.numerics.pointwise import Pointwise
from tests.numerics.constants import CONSTANTS

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def make_stage(name: str, shape: tuple[int, ...], dtype: torch.dtype, interleave: int | None = None) -> Stage:
    """A stage of the op whose result has ``shape``, with random operands of ``dtype`` (a dropout mask is uint8)."""
    p = POINTWISE[name]
    shapes = {"row": shape[-1:], "column": shape[:-1], "full": shape}
    operands = {n: torch.randn(shapes[kind], dtype=FP64).to(dtype) for n, kind in p.operands.items()}
    if "mask" in operands:
        operands["mask"] = torch.randint(0, 2, shape, dtype=torch.uint8)
    return Stage(p, operands, {n: CONSTANTS[n] for n in p.constants}, interleave)


def make_chain(names: list[str], shape: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[int, ...], list[Stage]]:
    """The stages, and the shape of the chain's input, for a result of ``shape``."""
    stages = []
    for name in reversed(names):
        stages.insert(0, make_stage(name, shape, dtype))
        if POINTWISE[name].is_gated:
            shape = (*shape[:-1], 2 * shape[-1])
    return shape, stages


def bits(x: torch.Tensor) -> torch.Tensor:
    """Integers that are equal exactly if the values are, NaN taken as one value."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return torch.where(x.isnan(), torch.full_like(x, math.nan), x).view(integer)


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype
    assert torch.equal(bits(a), bits(b))


def readers(stages: list[Stage]) -> list[int]:
    return [i for i, stage in enumerate(stages) if stage.math.needs_input]


# -- fused equals unfused --------------------------------------------------------------------------------------------------

# At most two ops that halve the columns, so that inputs stay small.
plain_names = st.lists(st.sampled_from([n for n, p in POINTWISE.items() if not p.is_gated]), max_size=3)
gated_names = st.lists(st.sampled_from([n for n, p in POINTWISE.items() if p.is_gated]), max_size=1)
chains = st.tuples(plain_names, gated_names, plain_names, gated_names).map(lambda parts: [*chain.from_iterable(parts)])
shapes = st.sampled_from([(6,), (5, 4), (2, 3, 7), (1, 1), (0, 4), (3, 0), (2, 0, 3)])
dtypes = st.sampled_from([BF16, FP16, FP32, FP64])


@settings(max_examples=400)
@given(chains, shapes, dtypes, st.booleans(), st.integers(0, 2**31))
def test_r4_fused_chain_equals_its_ops_one_by_one(names, shape, dtype, from_accumulator, seed):
    torch.manual_seed(seed)
    shape_in, stages = make_chain(names, shape, dtype)
    x = torch.randn(shape_in, dtype=FP64).to(FP32 if from_accumulator and dtype != FP64 else dtype)
    dy = torch.randn(shape, dtype=FP64).to(dtype)

    y, kept = forward_chain(x, stages, dtype=dtype, keep=range(len(stages)))
    grad_x, operand_grads = backward_chain(dy, stages, {i: kept[i] for i in readers(stages)})

    value, inputs = x.to(dtype), []
    for stage in stages:
        inputs.append(value)
        value, _ = forward_chain(value, [stage])
    assert_same(y, value)
    for i, wanted in enumerate(inputs):
        assert_same(kept[i], wanted)

    grad = dy
    for i, stage in reversed(list(enumerate(stages))):
        grad, (unfused,) = backward_chain(grad, [stage], {0: inputs[i]})
        assert operand_grads[i].keys() == unfused.keys() == stage.math.operand_backward.keys()
        for name in unfused:
            assert_same(operand_grads[i][name], unfused[name])
            assert unfused[name].shape == stage.operands[name].shape
    assert_same(grad_x, grad)
    assert y.shape == shape
    assert grad_x.shape == shape_in


@pytest.mark.parametrize(("skip", "at_least"), [(["bias"], 0.2), (["bias", "gelu"], 0.3), (["constant_scale"], 0.2)])
def test_skipping_the_boundary_after_a_product_changes_the_result(skip, at_least):
    """Why rounding is part of the recipe: the share of bf16 elements that a fused single rounding changes."""
    shape_in, stages = make_chain(skip, (512, 64), BF16)
    accumulator = torch.randn(shape_in)
    per_op, _ = forward_chain(accumulator, stages, dtype=BF16)
    single, _ = forward_chain(accumulator, stages, dtype=BF16, rounding="single")
    assert (per_op != single).float().mean() > at_least


def test_single_and_per_op_agree_where_nothing_is_rounded():
    shape_in, stages = make_chain(["bias", "gelu", "add"], (9, 6), FP32)
    x, dy = torch.randn(shape_in), torch.randn(9, 6)
    results = [forward_chain(x, stages, rounding=rounding, keep=(1,)) for rounding in ("per_op", "single")]
    assert_same(results[0][0], results[1][0])
    grads = [backward_chain(dy, stages, results[0][1], rounding=rounding)[0] for rounding in ("per_op", "single")]
    assert_same(*grads)


# -- against fp64 ----------------------------------------------------------------------------------------------------------

STEEPEST = {"gelu": 1.13, "silu": 1.1, "qgelu": 1.1, "relu": 1.0, "bias": 1.0, "add": 1.0, "constant_scale": 1.1, "dropout": 1.1}
"""Upper bounds of |df/dx| over all x."""


def unit(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance of neighbouring ``dtype`` values at |x|, fp64."""
    _, exponent = torch.frexp(x)
    info = torch.finfo(dtype)
    return torch.maximum(torch.ldexp(torch.ones_like(x), exponent - 1), torch.tensor(info.tiny, dtype=FP64)) * info.eps


def fp64_boundaries(x: torch.Tensor, stages: list[Stage]) -> list[torch.Tensor]:
    """The exact input and every stage's exact result."""

    def step(values, stage):
        wide = replace(stage, operands={n: t.double() for n, t in stage.operands.items()})
        return [*values, forward_chain(values[-1], [wide], dtype=FP64)[0]]

    return reduce(step, stages, [x.double()])


@settings(max_examples=300)
@given(st.lists(st.sampled_from(sorted(STEEPEST)), min_size=1, max_size=6), st.sampled_from([BF16, FP16]), st.integers(0, 2**31))
def test_single_rounds_once_and_per_op_stays_within_its_bound(names, dtype, seed):
    torch.manual_seed(seed)
    shape_in, stages = make_chain(names, (16, 12), dtype)
    x = torch.randn(shape_in)
    exact = fp64_boundaries(x, stages)
    largest = torch.stack([v.abs() for v in exact]).amax(0)

    single = forward_chain(x, stages, rounding="single", dtype=dtype)[0].double()
    # Half a unit for the rounding. fp32 arithmetic errs by a few 2^-24 of the largest value on the way, which shows where
    # terms cancel.
    once = (single - exact[-1]).abs() <= 0.51 * unit(exact[-1], dtype) + 2.0**-20 * largest
    assert once.all()
    strictly = (single - exact[-1].to(FP32).to(dtype).double()).abs() <= unit(exact[-1], dtype) + 2.0**-20 * largest
    assert strictly.all()

    bound = unit(exact[0], dtype) / 2
    for stage, value in zip(stages, exact[1:]):
        bound = STEEPEST[stage.math.name] * bound
        bound = bound + unit(value.abs() + bound, dtype) / 2
    per_op = forward_chain(x, stages, dtype=dtype)[0].double()
    assert ((per_op - exact[-1]).abs() <= bound + 2.0**-20 * largest).all()


def test_single_backward_rounds_once():
    shape_in, stages = make_chain(["bias", "gelu", "constant_scale", "dropout", "silu"], (256, 64), BF16)
    dy = torch.randn(256, 64).to(BF16)
    _, kept = forward_chain(torch.randn(shape_in), stages, dtype=BF16, keep=readers(stages))
    exact, exact_grads = backward_chain(dy.double(), stages, {i: x.double() for i, x in kept.items()})
    single, grads = backward_chain(dy, stages, kept, rounding="single")
    per_op, _ = backward_chain(dy, stages, kept)
    assert (single != exact.to(FP32).to(BF16)).float().mean() < 1e-3
    assert (per_op != single).float().mean() > 0.1  # half of the elements are dropped
    assert (grads[0]["bias"] != exact_grads[0]["bias"]).sum() <= 1


def test_single_is_the_fp64_value_rounded_once_in_nearly_all_elements():
    shape_in, stages = make_chain(["bias", "gelu", "constant_scale", "add"], (256, 64), BF16)
    x = torch.randn(shape_in)
    single, _ = forward_chain(x, stages, rounding="single", dtype=BF16)
    exact = fp64_boundaries(x, stages)[-1].to(FP32).to(BF16)
    assert (single != exact).float().mean() < 1e-3


# -- gradients -------------------------------------------------------------------------------------------------------------


class _Chain(torch.autograd.Function):
    """The chain with its own backward, for gradcheck; operands of the stages follow x in order."""

    @staticmethod
    def forward(ctx, x, stages, *operands):
        ctx.stages = stages
        y, kept = forward_chain(x, stages, keep=readers(stages))
        ctx.kept = kept
        return y

    @staticmethod
    def backward(ctx, dy):
        dx, grads = backward_chain(dy, ctx.stages, ctx.kept)
        flat = [grads[i].get(name) for i, stage in enumerate(ctx.stages) for name in stage.math.operands]
        return dx, None, *flat


def gradcheck(names: list[str], shape: tuple[int, ...], **changes) -> bool:
    shape_in, stages = make_chain(names, shape, FP64)
    stages = [replace(stage, **changes) for stage in stages]
    x = (0.2 + torch.rand(shape_in, dtype=FP64)) * torch.where(torch.rand(shape_in) < 0.5, -1, 1)  # away from the kinks at 0
    tensors = [t.requires_grad_(n in s.math.operand_backward) for s in stages for n, t in s.operands.items()]
    return torch.autograd.gradcheck(lambda x, *operands: _Chain.apply(x, stages, *operands), (x.requires_grad_(), *tensors))


@pytest.mark.parametrize("name", POINTWISE)
def test_r6_gradcheck_of_every_op(name):
    assert gradcheck([name], (2, 3))


@pytest.mark.parametrize("name", [n for n, p in POINTWISE.items() if p.is_gated])
def test_r6_gradcheck_of_every_interleaved_op(name):
    assert gradcheck([name], (2, 4), interleave=2)


@pytest.mark.parametrize(
    "names", [["bias", "gelu", "dropout", "add"], ["bias", "scaled_swiglu", "constant_scale"], ["swiglu", "scaled_srelu"]]
)
def test_r6_gradcheck_of_chains(names):
    assert gradcheck(names, (2, 2, 3))


def test_gradients_equal_torch_autograd_of_the_values_in_fp64():
    """The declared derivative is that of the declared value, on the whole line and not only near 0."""
    for name, p in {**ACTIVATIONS, **GATED}.items():
        stage = make_stage(name, (1, 2000), FP64)
        x = (torch.linspace(-12, 12, 4000 if p.is_gated else 2000, dtype=FP64) + 1e-3)[None].requires_grad_()
        y, kept = forward_chain(x, [stage], keep=(0,))
        dy = torch.randn_like(y)
        dx, _ = backward_chain(dy, [stage], {0: kept[0].detach()})
        torch.testing.assert_close(dx, torch.autograd.grad(y, x, dy)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.row("B22")
@pytest.mark.parametrize("shape", [(640, 24), (16, 40, 24), (24,), (0, 24)])
def test_b22_bias_gradient_is_the_fp32_sum_cast_once(shape):
    dy = torch.randn(shape).to(BF16)
    for dtype in (BF16, FP32):
        stage = Stage(ARITHMETIC["bias"], {"bias": torch.zeros(24, dtype=dtype)})
        dx, (grads,) = backward_chain(dy, [stage], {})
        assert_same(grads["bias"], dy.float().reshape(math.prod(shape[:-1]), 24).sum(0).to(dtype))
        assert_same(dx, dy)


def test_scale_gradient_is_the_fp32_sum_over_columns():
    stage = make_stage("scaled_srelu", (3, 5, 8), BF16)
    x, dy = torch.randn(3, 5, 8).to(BF16), torch.randn(3, 5, 8).to(BF16)
    _, (grads,) = backward_chain(dy, [stage], {0: x})
    assert_same(grads["scale"], (dy.float() * torch.relu(x.float()) ** 2).sum(-1).to(BF16))


def test_operands_that_no_gradient_reads_may_be_absent_in_backward():
    dy = torch.randn(4, 6).to(BF16)
    dx, grads = backward_chain(dy, [Stage(ARITHMETIC["bias"]), Stage(ARITHMETIC["add"])], {})
    assert_same(dx, dy)
    assert_same(grads[0]["bias"], dy.float().sum(0).to(BF16))
    assert_same(grads[1]["residual"], dy)


# -- values, layouts, shapes -----------------------------------------------------------------------------------------------


def test_chain_equals_the_formula_written_out():
    """bias, SwiGLU, residual: three roundings to bf16, each after fp32 arithmetic."""
    x, bias, residual = torch.randn(5, 16).to(BF16), torch.randn(16), torch.randn(5, 8).to(BF16)
    stages = [Stage(ARITHMETIC["bias"], {"bias": bias}), Stage(GATED["swiglu"]), Stage(ARITHMETIC["add"], {"residual": residual})]
    h = (x.float() + bias).to(BF16).float()
    a, b = h[:, :8], h[:, 8:]
    glu = (a * sigmoid(a) * b).to(BF16)
    y, kept = forward_chain(x, stages, keep=(1,))
    assert_same(y, (glu.float() + residual.float()).to(BF16))
    assert list(kept) == [1]
    assert_same(kept[1], h.to(BF16))


@pytest.mark.row("B10")
@pytest.mark.parametrize("rounding", ["per_op", "single"])
def test_b10_kept_input_is_the_callers_tensor(rounding):
    x = torch.randn(3, 4).to(BF16)
    _, kept = forward_chain(x, [Stage(ACTIVATIONS["gelu"])], rounding=rounding, keep=(0,))
    assert kept[0] is x


def test_single_keeps_inputs_in_the_io_dtype():
    shape_in, stages = make_chain(["bias", "gelu"], (3, 4), BF16)
    x = torch.randn(shape_in)
    _, kept = forward_chain(x, stages, rounding="single", dtype=BF16, keep=(0, 1))
    assert_same(kept[0], x.to(BF16))
    assert_same(kept[1], (x + stages[0].operands["bias"].float()).to(BF16))


@pytest.mark.parametrize("group", [1, 2, 4, 32])
@pytest.mark.parametrize("name", ["swiglu", "clamped_swiglu", "scaled_situglu"])
def test_interleaved_columns_are_the_same_op(name, group):
    """(..., n / 2g, 2, g) with its middle axes swapped is the usual layout, forward and backward."""
    shape = (3, 64)
    halves, dy = torch.randn(3, 128).to(BF16), torch.randn(shape).to(BF16)
    mixed = halves.view(3, 2, 64 // group, group).transpose(1, 2).reshape(3, 128)
    usual = make_stage(name, shape, BF16)
    interleaved = replace(usual, interleave=group)
    assert_same(forward_chain(mixed, [interleaved])[0], forward_chain(halves, [usual])[0])
    dx, (grads,) = backward_chain(dy, [usual], {0: halves})
    dx_mixed, (grads_mixed,) = backward_chain(dy, [interleaved], {0: mixed})
    assert_same(dx_mixed, dx.view(3, 2, 64 // group, group).transpose(1, 2).reshape(3, 128))
    for operand in grads:
        assert_same(grads_mixed[operand], grads[operand])


@pytest.mark.parametrize("name", POINTWISE)
@pytest.mark.parametrize("dtype", [BF16, FP32, FP64])
def test_r10_strided_inputs_equal_contiguous_ones(name, dtype):
    stage = make_stage(name, (6, 10), dtype)
    columns = 20 if stage.math.is_gated else 10
    views = {
        "transposed": torch.randn(columns, 6, dtype=FP64).to(dtype).t(),
        "every second": torch.randn(6, 2 * columns, dtype=FP64).to(dtype)[:, ::2],
        "offset": torch.randn(7, columns + 1, dtype=FP64).to(dtype)[1:, 1:],
        "expanded": torch.randn(1, columns, dtype=FP64).to(dtype).expand(6, columns),
    }
    dy = torch.randn(10, 6, dtype=FP64).to(dtype).t()
    for x in views.values():
        assert_same(forward_chain(x, [stage])[0], forward_chain(x.contiguous(), [stage])[0])
        dx, _ = backward_chain(dy, [stage], {0: x})
        assert_same(dx, backward_chain(dy.contiguous(), [stage], {0: x.contiguous()})[0])


def test_r10_rows_do_not_depend_on_their_neighbours():
    """A slice of the rows gives the slice of the result: what sharding along rows relies on."""
    shape_in, stages = make_chain(["bias", "swiglu", "gelu"], (37, 11), FP32)
    x = torch.randn(shape_in)
    whole, _ = forward_chain(x, stages)
    parts = [forward_chain(part, stages)[0] for part in x.split([1, 5, 31])]
    assert_same(torch.cat(parts), whole)


def test_empty_chain_is_a_cast():
    x = torch.randn(3, 4)
    assert_same(forward_chain(x, [], dtype=BF16)[0], x.to(BF16))
    assert_same(backward_chain(x, [], {}, dtype=BF16)[0], x.to(BF16))


def test_unary_ops_take_scalars():
    x = torch.tensor(0.5, dtype=BF16)
    y, _ = forward_chain(x, [Stage(ACTIVATIONS["relu"])])
    assert y.shape == ()
    assert y == 0.5


def test_user_activation_runs_in_a_chain():
    """Five declared lines are a whole op: fused, gated or alone."""
    square = Pointwise(
        "square", forward="x * x", backward=("dy * (2.0f * x)",), value=lambda x: x * x, grad=lambda dy, x: (dy * (2 * x),)
    )
    x = torch.randn(4, 6).to(BF16)
    y, kept = forward_chain(x, [Stage(square), Stage(ACTIVATIONS["relu"])], keep=(0, 1))
    assert_same(y, (x.float() * x.float()).to(BF16))
    dx, _ = backward_chain(torch.ones_like(y), [Stage(square), Stage(ACTIVATIONS["relu"])], kept)
    assert_same(dx, (2 * x.float()).to(BF16))


# -- errors ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: Stage(GATED["situglu"], constants={"beta1": 4.0}), SpecError, "beta2"),
        (lambda: Stage(ACTIVATIONS["gelu"], {"bias": torch.zeros(4)}), SpecError, "declared operands"),
        (lambda: Stage(ACTIVATIONS["gelu"], interleave=32), SpecError, "no interleave"),
        (lambda: Stage(GATED["swiglu"], interleave=0), SpecError, "interleave > 0"),
        (lambda: forward_chain(torch.zeros(3, 5), [Stage(GATED["glu"])]), ShapeError, "even number"),
        (lambda: forward_chain(torch.tensor(1.0), [Stage(GATED["glu"])]), ShapeError, "even number"),
        (lambda: forward_chain(torch.zeros(3, 12), [Stage(GATED["glu"], interleave=4)]), ShapeError, "multiple of 8"),
        (lambda: forward_chain(torch.zeros(3, 4), [Stage(ARITHMETIC["bias"], {"bias": torch.zeros(5)})]), ShapeError, "(4,)"),
        (lambda: forward_chain(torch.zeros(3, 4), [Stage(ARITHMETIC["bias"], {"bias": torch.zeros(1)})]), ShapeError, "(4,)"),
        (
            lambda: forward_chain(torch.zeros(3, 4), [Stage(SCALED["scaled_srelu"], {"scale": torch.zeros(4)})]),
            ShapeError,
            "(3,)",
        ),
        (lambda: forward_chain(torch.zeros(3, 4), [Stage(ARITHMETIC["add"])]), PipelineError, "residual"),
        (lambda: forward_chain(torch.zeros(3, 4), [], rounding="never"), RecipeError, "'single'"),
        (lambda: backward_chain(torch.zeros(3, 4), [Stage(ACTIVATIONS["gelu"])], {}), SavedTensorError, "saved input"),
    ],
)
def test_errors_are_typed_and_name_the_cure(call, error, says):
    with pytest.raises(error) as caught:
        call()
    assert says in str(caught.value)
    assert "Cure" in str(caught.value)
