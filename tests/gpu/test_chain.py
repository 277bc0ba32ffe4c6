"""Generated chains on a device: random ones against the definition and against their ops one by one; sums; what compiles."""

import random

import pytest
import torch

from opfuse.formats import E5M2, USAGES, fp8_tensor
from opfuse.kernels.casts.encoding import RecordingScale
from opfuse.kernels.casts.tensor import tensor_amax
from opfuse.kernels.chains.cast import backward_chain_cast, forward_chain_cast
from opfuse.kernels.chains.chain import backward_chain, backward_chain_amax, forward_chain, forward_chain_amax
from opfuse.kernels.engine import launch
from opfuse.kernels.engine.registry import BITWISE
from opfuse.numerics.activations import ACTIVATIONS
from opfuse.numerics.chain import Stage
from opfuse.numerics.formula import FUNCTIONS, formula
from opfuse.numerics.layouts import Layout
from opfuse.numerics.pointwise import Pointwise
from tests.kernels.cases.chains import EXACT, OPS, ChainCase
from tests.kernels.catalogue import CASES

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RELATIVE = {BF16: 2**-7, FP16: 2**-10, FP32: 2**-14}
"""One unit in the last place of 16-bit results; in fp32, sigmoid's (|x| + 5) 2^-23 and what 1 - sigmoid(x) cancels, |x| < 5."""


may_spill = pytest.mark.filterwarnings("ignore:The chain .* wants registers for all of it:opfuse.errors.OpfuseWarning")
"""A chain of three gated units, as chance makes them, has more values than a thread has registers, and says so."""


def random_chain(seed, ops=tuple(OPS)):
    pick = random.Random(seed)
    gated = [name for name in ops if OPS[name].is_gated]
    plain = [name for name in ops if not OPS[name].is_gated]
    names = [*pick.choices(plain, k=pick.randint(0, 3)), *pick.choices(gated, k=pick.randint(0, 1))]
    names += pick.choices(plain, k=pick.randint(0, 2)) + pick.choices(gated, k=pick.random() < 0.2)
    names = tuple(names) or ("bias",)
    columns = pick.choice((1, 6, 8, 40, 72, 264, 1032))
    return ChainCase(
        names,
        pick.choice(((), (1,), (37,), (3, 50), (2, 0))) + (columns,),
        io=pick.choice((BF16, FP16, FP32)),
        source=pick.choice((None, FP32)),
        rounding=pick.choice(("per_op", "per_op", "single")),
        interleave=pick.choice((None, None, 1, 2, 8)) if columns % 8 == 0 else None,
        misaligned=pick.random() < 0.2,
    )


def assert_close(got, wanted, dtype, factor=1):
    torch.testing.assert_close(got.cpu(), wanted.cpu(), rtol=factor * RELATIVE[dtype], atol=factor * 1e-6, equal_nan=True)


def assert_same(got, wanted):
    assert BITWISE.mismatch(got, wanted) is None, BITWISE.mismatch(got, wanted)


@may_spill
@pytest.mark.parametrize("seed", range(40))
def test_r1_r4_random_chain_equals_definition_from_boundary_to_boundary(seed, device):
    """Each op's result from the input that it had, so that errors of one op do not hide those of the next."""
    chain = random_chain(seed)
    args, kwargs = chain.forward(device)
    x, stages = args
    y, kept = forward_chain(x, stages, **kwargs)
    if chain.rounding == "single":
        wanted, _ = forward_chain.reference(x.cpu(), chain.forward(torch.device("cpu")).args[1], **kwargs)
        assert_close(y, wanted, chain.io, 8)
        return
    results = [*(kept[i] for i in range(1, len(stages))), y]
    here = chain.forward(torch.device("cpu")).args[1]
    for stage, given, got in zip(here, [kept[0], *results], results):
        wanted, _ = forward_chain.reference(given.cpu(), [stage])
        if stage.math.name in EXACT:
            assert_same(got, wanted)
        else:
            assert_close(got, wanted, chain.io)


@may_spill
@pytest.mark.parametrize("seed", range(40, 80))
def test_r4_fused_chain_equals_its_ops_one_by_one_on_the_device(seed, device):
    chain = random_chain(seed)
    args, kwargs = chain.forward(device)
    x, stages = args
    y, kept = forward_chain(x, stages, **{**kwargs, "rounding": "per_op"})
    value = x.to(chain.io)
    for i, stage in enumerate(stages):
        assert_same(kept[i], value)
        value, _ = forward_chain(value, [stage])
    assert_same(y, value)
    dy = torch.randn(y.shape, device=device).to(chain.io)
    dx, grads = backward_chain(dy, stages, kept)
    for i in reversed(range(len(stages))):
        dy, (alone,) = backward_chain(dy, [stages[i]], {0: kept[i]})
        for name, grad in alone.items():
            if stages[i].math.operands[name] == "column" and any(stage.math.is_gated for stage in stages[i + 1 :]):
                # Halves of a later unit are added up pair by pair in the chain, one after the other alone.
                scale = float(grad.abs().max()) if grad.numel() else 0.0
                torch.testing.assert_close(grads[i][name], grad, rtol=RELATIVE[chain.io], atol=2**-9 * scale)
            else:
                assert_same(grads[i][name], grad)
    assert_same(dx, dy)


@may_spill
@pytest.mark.parametrize("seed", range(80, 120))
def test_r1_r4_random_gradients_of_exact_ops_equal_the_definition(seed, device):
    chain = random_chain(seed, EXACT)
    args, kwargs = chain.backward(device)
    here, _ = chain.backward(torch.device("cpu"))
    dx, grads = backward_chain(*args, **kwargs)
    wanted, wanted_grads = backward_chain.reference(*here, **kwargs)
    assert_same(dx, wanted)
    for stage, got, definition in zip(args[1], grads, wanted_grads, strict=True):
        assert got.keys() == definition.keys()
        for name in got:
            if stage.math.operands[name] == "full":
                assert_same(got[name], definition[name])
            else:
                scale = float(definition[name].abs().max()) if got[name].numel() else 0.0
                torch.testing.assert_close(got[name].cpu(), definition[name], rtol=RELATIVE[chain.io], atol=2**-9 * scale)


def test_r11_sums_have_one_order_and_are_those_of_fp64(device):
    chain = ChainCase(("bias", "scaled_swiglu", "bias"), (4099, 264), FP32)
    args, kwargs = chain.backward(device)
    first = backward_chain(*args, **kwargs)[1]
    for _ in range(20):
        for got, wanted in zip(backward_chain(*args, **kwargs)[1], first):
            assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    wide = [Stage(s.math, {n: t.double() for n, t in s.operands.items()}, s.constants) for s in args[1]]
    _, exact = backward_chain.reference(args[0].double(), wide, {i: t.double() for i, t in args[2].items()}, dtype=torch.float64)
    for got, wanted in zip(first, exact):
        for name in wanted:
            error = (got[name].double() - wanted[name]).abs().max() / wanted[name].abs().max()
            assert error < 2e-6, (name, float(error))


@pytest.mark.parametrize("name", sorted(CASES[forward_chain_cast]))
def test_r4_fused_cast_equals_chain_then_cast_on_the_device(name, device):
    equal_to_two_kernels(forward_chain_cast, name, device)


@pytest.mark.parametrize("name", sorted(CASES[backward_chain_cast]))
def test_r4_fused_backward_cast_equals_chain_then_cast_on_the_device(name, device):
    equal_to_two_kernels(backward_chain_cast, name, device)


def equal_to_two_kernels(kernel, name, device):
    """Codes, scale, recorded amax, stored tensors and sums, bit for bit."""
    args, kwargs = CASES[kernel][name](device)
    again, _ = CASES[kernel][name](device)
    encoded, result, others = kernel(*args, **kwargs)
    wanted, wanted_result, wanted_others = kernel.reference(*again, **kwargs)
    if isinstance(args[-1], RecordingScale):
        assert_same(args[-1].amax, again[-1].amax)
    for got, definition in zip(sum(encoded, ()), sum(wanted, ()), strict=True):
        assert_same(got, definition)
    assert (result is None) == (wanted_result is None)
    if result is not None:
        assert_same(result, wanted_result)
    pairs = [(others, wanted_others)] if isinstance(others, dict) else zip(others, wanted_others, strict=True)
    for got, definition in pairs:  # inputs that are kept, by stage; or gradients of each stage's operands, by name
        assert got.keys() == definition.keys()
        for key, tensor in definition.items():
            assert_same(got[key], tensor)


@pytest.mark.parametrize("name", sorted(CASES[forward_chain_amax]))
def test_r4_amax_is_that_of_the_stored_result(name, device):
    args, kwargs = CASES[forward_chain_amax][name](device)
    y, kept, amax = forward_chain_amax(*args, **kwargs)
    stores = kwargs.pop("stores", True)
    wanted, wanted_kept = forward_chain(*args, **kwargs)
    assert (y is not None) == stores
    if y is not None:
        assert_same(y, wanted)
    assert_same(amax, tensor_amax(wanted))
    assert kept.keys() == wanted_kept.keys()
    for i, tensor in wanted_kept.items():
        assert_same(kept[i], tensor)


@pytest.mark.parametrize("name", sorted(CASES[backward_chain_amax]))
def test_r4_amax_is_that_of_the_stored_gradient(name, device):
    args, kwargs = CASES[backward_chain_amax][name](device)
    dx, grads, amax = backward_chain_amax(*args, **kwargs)
    wanted, wanted_grads = backward_chain(*args, **kwargs)
    assert_same(dx, wanted)
    assert_same(amax, tensor_amax(dx))
    for got, definition in zip(grads, wanted_grads, strict=True):
        for operand, grad in definition.items():
            assert_same(got[operand], grad)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_r1_every_finite_bf16_input_of_an_activation_against_fp64(name, device):
    """Within a unit in the last place of bf16, and 0 where a sigmoid is below 2^-126."""
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16)
    x = codes[codes.isfinite()]
    stage = Stage(OPS[name])
    y, _ = forward_chain(x.to(device), [stage])
    wanted = stage.math.value(x.double())
    fits = wanted.abs() < torch.finfo(BF16).max
    error = (y.cpu().double() - wanted).abs()
    assert bool((error <= (wanted.abs() * 2.0**-7).maximum(x.double().abs() * 2.0**-126).clamp(min=2.0**-133))[fits].all())
    dx, _ = backward_chain(torch.ones_like(x).to(device), [stage], {0: x.to(device)})
    (slope,) = stage.math.grad(torch.ones_like(x).double(), x.double())
    torch.testing.assert_close(dx.cpu().double()[fits], slope[fits], rtol=2**-7, atol=1e-6)


def test_r18_a_non_finite_result_shows_in_its_code(device):
    args, kwargs = ChainCase(("bias", "relu"), (144, 64)).forward(device)
    args[0][5, 7], args[0][130, 63] = torch.nan, torch.inf
    layouts = [Layout(fp8_tensor(E5M2), usage, (144, 64)) for usage in USAGES]
    encode = RecordingScale(torch.ones(1, device=device), torch.zeros(1, device=device), layouts)
    ((row, _), (column, _)), _, _ = forward_chain_cast(*args, encode, **kwargs)
    assert row[5, 7] == column[7, 5] == 0x7F
    assert row[130, 63] == column[63, 130] == 0x7C
    assert encode.amax.isnan()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_formulas_is_its_definition(name, device):
    """In fp32, of positive and of negative values where it has both; the definition runs on the CPU."""
    stage = Stage(formula("case", lambda x: x * getattr(x, name)()))
    x = torch.linspace(-4 if name not in ("log", "log1p", "sqrt") else 0.01, 4, 4096)
    y, _ = forward_chain(x.to(device), [stage])
    torch.testing.assert_close(y.cpu(), stage.math.value(x), rtol=1e-5, atol=1e-6)
    dx, _ = backward_chain(torch.ones_like(x).to(device), [stage], {0: x.to(device)})
    torch.testing.assert_close(dx.cpu(), stage.math.grad(torch.ones_like(x), x)[0], rtol=1e-5, atol=1e-5)


def shifted(threshold):
    """An activation that only this test knows."""
    return Pointwise(
        "shifted_cube",
        forward="x > threshold ? x * x * x : fmaxf(x, -threshold) * 0.5f",
        backward=("x > threshold ? dy * (3.0f * (x * x)) : x > -threshold ? dy * 0.5f : 0.0f",),
        value=lambda x, threshold: torch.where(x > threshold, x * x * x, x.clamp_min(-threshold) * 0.5),
        grad=lambda dy, x, threshold: (
            torch.where(x > threshold, dy * (3 * (x * x)), torch.where(x > -threshold, dy * 0.5, 0.0)),
        ),
        constants=("threshold",),
    )


def test_an_activation_of_the_users_own_fuses_and_constants_and_rows_compile_nothing(device):
    op, bias = shifted(0.5), torch.randn(264, device=device, dtype=BF16)
    count = None
    for rows, threshold in ((300, 0.5), (7, 0.5), (4099, 1.25), (1, 0.0)):
        stages = [Stage(OPS["bias"], {"bias": bias}), Stage(op, constants={"threshold": threshold})]
        here = [Stage(s.math, {n: t.cpu() for n, t in s.operands.items()}, s.constants) for s in stages]
        x, dy = (torch.randn(rows, 264, device=device).to(BF16) for _ in range(2))
        y, kept = forward_chain(x, stages, keep=(1,))
        assert_same(y, forward_chain.reference(x.cpu(), here)[0])
        dx, _ = backward_chain(dy, stages, kept)
        assert_same(dx, backward_chain.reference(dy.cpu(), here, {1: kept[1].cpu()})[0])
        count = count or len(launch._loaded)
        assert len(launch._loaded) == count


def test_r10_what_kernels_cannot_take_is_the_definition(device):
    """fp64, and errors of the definition."""
    x = torch.randn(4, 6, device=device, dtype=torch.float64)
    stages = [Stage(OPS["bias"], {"bias": torch.ones(6, device=device, dtype=torch.float64)})]
    assert torch.equal(forward_chain(x, stages)[0], x + 1)
    with pytest.raises(ValueError, match="bias"):
        forward_chain(x.float(), [Stage(OPS["bias"], {"bias": torch.ones(5, device=device)})])
    with pytest.raises(ValueError, match="even number of columns"):
        forward_chain(torch.ones(2, 3, device=device), [Stage(OPS["reglu"])])
