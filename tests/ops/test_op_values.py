"""Every op against its formula in fp64: gradients by gradcheck, values and gradients in every dtype; and as a program."""

import logging
from functools import partial

import pytest
import torch

from opfuse import ops
from opfuse.ops import activation
from tests.ops.op_cases import ALL, CASES, make, reference, tuple_of

EPS = 2.0**-24
every_case = pytest.mark.parametrize("case", [case for _, case in ALL], ids=[name for name, _ in ALL])


def test_r6_every_op_has_a_case():
    assert set(ops.OPS) - set(CASES) == set(), "give these a case in tests/ops/op_cases.py"
    assert set(CASES) - set(ops.OPS) == set(), "these have a case, but are not in OPS of opfuse/ops/__init__.py"


def test_every_activation_is_in_the_table():
    classes = {cls for cls in vars(activation).values() if isinstance(cls, type) and issubclass(cls, ops.Activation)}
    left_out = {cls.__name__ for cls in classes - {ops.Activation, ops.GatedActivation} - {*ops.OPS.values()}}
    assert left_out == set(), "add these to OPS in opfuse/ops/__init__.py"


def call(op, x, extras):
    torch.manual_seed(5)
    return op(x, *extras)


gradcheck = partial(torch.autograd.gradcheck, atol=1e-7, rtol=1e-5, fast_mode=True)
"""Along random directions: the next test compares every element with autograd's."""


@every_case
def test_r6_gradcheck(case):
    op, x, extras = make(case, torch.float64)
    assert gradcheck(lambda x, *rest: call(op, x, rest[: len(extras)]), (x, *extras, *op.parameters()))


LEADING = [(), (4,), (1, 1), (2, 1, 2, 2)]


@pytest.mark.few
@pytest.mark.parametrize("leading", LEADING, ids=str)
@every_case
def test_r6_leading_dimensions(case, leading):
    op, x, extras = make(case, torch.float64, leading)
    outputs = tuple_of(call(op, x, extras))
    dy = [torch.randn_like(y) for y in outputs]
    wanted, wanted_grads = reference(case, op, x, extras, dy)
    grads = torch.autograd.grad(outputs, (x, *extras, *op.parameters()), dy)
    for got, want in zip((*outputs, *grads), (*wanted, *wanted_grads), strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def bound(want, dtype):
    """Half a unit in the last place of ``dtype`` for the one rounding, and what fp32 arithmetic before it may lose."""
    info = torch.finfo(dtype)
    exponent = torch.floor(torch.log2(want.abs().clamp(min=info.tiny)))
    half_ulp = torch.exp2(exponent) * info.eps / 2
    return half_ulp + 64 * EPS * want.abs().amax().clamp(min=1e-6)


@pytest.mark.few
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [case for _, case in ALL if case.roundings == 1], ids=[n for n, c in ALL if c.roundings == 1])
def test_values_and_gradients_are_rounded_once(case, dtype):
    op, x, extras = make(case, dtype)
    outputs = tuple_of(call(op, x, extras))
    dy = [torch.randn_like(y) for y in outputs]
    wanted, wanted_grads = reference(case, op, x, extras, dy)
    grads = torch.autograd.grad(outputs, (x, *extras, *op.parameters()), dy)
    for got, want in zip((*outputs, *grads), (*wanted, *wanted_grads), strict=True):
        assert got.dtype == dtype
        worst = ((got.double() - want).abs() / bound(want, dtype)).max().item()
        assert worst <= 1, f"{worst:.3g} of the bound"


@every_case
def test_r10_no_rows(case):
    op, x, extras = make(case, torch.float32, (0,))
    outputs = tuple_of(call(op, x, extras))
    torch.autograd.backward(outputs, [torch.randn_like(y) for y in outputs])
    assert x.grad.shape == x.shape
    for parameter in op.parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))
    for extra in extras:
        assert extra.grad.shape == extra.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_linear_is_its_product_and_its_bias_each_rounded(dtype):
    linear, x = ops.Linear(8, 5, dtype=dtype), torch.randn(2, 3, 8, dtype=dtype)
    product = (x.double() @ linear.weight.double().T).to(dtype)
    assert torch.equal(linear(x), (product.double() + linear.bias.double()).to(dtype))


ACTIVATIONS = {name: cls for name, cls in ops.OPS.items() if issubclass(cls, ops.Activation)}
PLAIN = {name: cls for name, cls in ACTIVATIONS.items() if len(cls.math.inputs) == 1 and not cls.math.operands}


@pytest.mark.parametrize("name", PLAIN)
def test_values_and_gradients_hold_at_every_bf16_input(name):
    """Up to 300 in size, where exp overflows in fp32; against autograd in fp64, where that is finite."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.abs() <= 300].float()
    wide, math = x.double().requires_grad_(), PLAIN[name].math
    wanted = math.value(wide)
    (slope,) = torch.autograd.grad(wanted.sum(), wide)
    fits = slope.isfinite()
    lost = f"the formula of {name} loses digits: write value and derivative by hand, as CONTRIBUTING.md says of activations"
    told = lost if math.derived else f"value or derivative of {name}, in opfuse/numerics/activations.py, is wrong"
    for result, exact in ((math.value(x), wanted), (math.grad(torch.ones_like(x), x)[0], slope)):
        got, true = result[fits].double(), exact[fits].detach()
        torch.testing.assert_close(got, true, rtol=4e-6, atol=2e-6, msg=lambda why: f"{told}\n{why}")


CACHING = {name: cls for name, cls in ops.OPS.items() if issubclass(cls, ops.Activation) and not cls.num_extra_inputs}


@pytest.mark.parametrize("name", list(CACHING))
def test_a_quantized_input_cache_gives_the_gradient_of_what_it_holds(name):
    op, plain = CACHING[name](cache_quantized_input=True), CACHING[name]()
    x = torch.randn(4, 32, requires_grad=True)
    y = op(x)
    assert torch.equal(y, plain(x))
    dy = torch.randn_like(y)
    y.backward(dy)
    scale = x.detach().abs().max() / 448
    cached = ((x.detach() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).requires_grad_()
    plain(cached).backward(dy)
    torch.testing.assert_close(x.grad, cached.grad, rtol=1e-5, atol=1e-5)
    exact = torch.equal(x.grad, torch.autograd.grad(plain(x), x, dy)[0])
    assert exact == (name == "relu")  # which reads signs only


def test_r6_a_wrong_derivative_fails():
    class Half(ops.Activation):
        math = ops.Pointwise(
            "half", forward="0.5f * x", backward=("dy * 0.4f",), value=lambda x: 0.5 * x, grad=lambda dy, x: (0.4 * dy,)
        )

    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        gradcheck(Half(), (torch.randn(3, dtype=torch.float64, requires_grad=True),))


@every_case
def test_every_op_is_repeated_with_the_bits_of_its_first_call(case, caplog):
    """If one is interpreted at every call, so are all that share its segment, as the layers of experts with their gate."""
    op, x, extras = make(case, torch.float32)
    leaves, found = (x, *extras, *op.parameters()), []
    with caplog.at_level(logging.INFO, logger="opfuse.programs"):
        for _ in range(4):
            outputs = tuple_of(call(op, x, extras))
            wanted = [y for y in outputs if y.requires_grad]
            grads = torch.autograd.grad(wanted, leaves, [torch.ones_like(y) for y in wanted], allow_unused=True)
            found.append([*outputs, *[grad for grad in grads if grad is not None]])
    on_host = torch.get_default_device().type == "cpu"  # elsewhere the host reads how many rows groups have
    assert [each for each in caplog.messages if on_host or "the host reads" not in each] == []
    for again in found[1:]:
        assert all(map(torch.equal, found[0], again))
