"""The path of CONTRIBUTING.md for an activation: the class that it shows and one place in a table are all that one takes."""

import math
import re
import types
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import opfuse
from opfuse import ops, recipes
from opfuse.config.operations import _model
from opfuse.errors import SpecError
from opfuse.formats import E4M3, USAGES, mxfp8
from opfuse.kernels.casts.encoding import Microscaled
from opfuse.kernels.chains.cast import backward_chain_cast
from opfuse.kernels.chains.chain import forward_chain
from opfuse.kernels.engine import compiling
from opfuse.numerics.chain import Stage
from opfuse.numerics.formula import FUNCTIONS, formula
from opfuse.numerics.layouts import Layout
from tests.plans import plans_used

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.fixture(scope="module")
def mish():
    """The class of the page, in a module that ends as opfuse/ops/activation.py would."""
    (text,) = re.findall(r"```python\n(class .*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    module = types.ModuleType("opfuse.ops.activation_of_the_page")
    exec(f"from opfuse.numerics.formula import formula\nfrom opfuse.ops.activation import Activation\n{text}", vars(module))
    return module.Mish


def test_it_computes_alone_and_its_derivative_is_autograds(mish):
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    wanted = torch.nn.functional.mish(x)
    torch.testing.assert_close(mish()(x), wanted, rtol=1e-14, atol=1e-15)
    (got,), (slope,) = (torch.autograd.grad(y.sum(), x) for y in (mish()(x), wanted))
    torch.testing.assert_close(got, slope, rtol=1e-13, atol=1e-14)
    assert mish.kind == "mish"
    assert _model("mish", mish)(op="mish").op == "mish"  # what OPS makes of it for YAML


@pytest.mark.parametrize("recipe", [None, recipes.MXFP8BlockScaling()], ids=str)
def test_it_fuses_in_both_directions_and_no_bit_changes(mish, recipe):
    def train(rules):
        torch.manual_seed(0)
        model = ops.Sequential(ops.Linear(32, 64), mish(), ops.Linear(64, 32), rules=rules)
        x = torch.randn(32, 32, requires_grad=True)
        with plans_used() as plans, opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x)
        y.backward(torch.randn(32, 32))
        return plans[0], [y.detach(), x.grad, *(p.grad for p in model.parameters())]

    (plan, fused), (_, unfused) = train(None), train(opfuse.RuleSet(()))
    assert all(torch.equal(a, b) for a, b in zip(fused, unfused, strict=True))
    fired = {o.rule for o in plan.outcomes if o.status == "fused" and any("mish" in name for name in o.ops)}
    assert "epilogue" in fired
    assert recipe is None or "backward_activation_bias" in fired


def test_its_kernels_compile_without_spills(mish):
    x, stages = torch.zeros(64, 64, dtype=torch.bfloat16), [Stage(mish.math)]
    encode = Microscaled([Layout(mxfp8(E4M3), usage, (64, 64)) for usage in USAGES])
    for kernel, *args in ((forward_chain, x, stages), (backward_chain_cast, x, stages, {0: x}, encode)):
        launch = Mock()
        kernel.run(launch, *args)
        for (variant, entry, *_), _ in launch.call_args_list:
            assert compiling.compile_text(compiling.assemble(variant), "sm_90a").entries[entry].spills == 0


def test_the_page_names_every_function_of_formulas():
    page = (PAGE.parent / "docs/ops.md").read_text(encoding="utf-8")
    (told,) = re.findall(r"Formulas may use (.*?), as methods", page, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", told)) == {*FUNCTIONS}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_function_of_formulas_is_derived(name):
    p = formula("case", lambda x, k: (getattr(x * k, name)() - 2) ** 3 / (k + x) + -x, operands={"k": "full"})
    x, k = (torch.rand(50, dtype=torch.float64).add(0.5).requires_grad_() for _ in "xk")
    wanted = torch.autograd.grad(p.value(x, k=k).sum(), (x, k))
    dy = torch.ones_like(x)
    got = (*p.grad(dy, x, k=k), p.operand_grad(dy, x, k=k)["k"])
    for derived, exact in zip(got, wanted):
        torch.testing.assert_close(derived, exact, rtol=1e-11, atol=1e-12)


def test_a_derivative_holds_no_operation_without_effect():
    assert formula("line", lambda x, w, c: (x + 0) * w - c / 1, operands={"w": "row"}, constants=("c",)).backward == ("dy * w",)
    assert torch.equal(formula("sign", lambda x: x.sign()).grad(torch.ones(2), torch.ones(2))[0], torch.zeros(2))
    p = formula("gated", lambda a, b: a.tanh() * b)
    assert (p.inputs, p.backward[1]) == (("a", "b"), "dy * tanhf(a)")
    assert formula("scaled", lambda x, c: x * c.exp(), constants=("c",)).value(torch.ones(2), c=0.0).dtype == torch.float32


@pytest.mark.parametrize(
    ("of", "got"),
    [
        (lambda x: x.than(), "'than'; did you mean 'tanh'"),
        (lambda x: x if x else -x, "a comparison"),
        (lambda x: 0 if x > 0 else x, "a comparison"),
        (lambda x: max(x, 0), "a comparison"),
        (lambda x: x * torch.tanh(x), r"torch's tanh\. Cure: write the method, x\.tanh\(\)"),
        (lambda x: x * torch.nn.functional.softplus(x), r"Cure: write the method, x\.softplus\(\)"),
        (lambda x: x * torch.sin(x), "torch's sin.*Pointwise"),
        (lambda x: x * math.tanh(x), "Cure: write methods of x"),
        (lambda x: 1.0 if x == 0 else x.tanh() / x, "a comparison"),
        (lambda x: 0 * x + 1, "reads nothing of x"),
        (lambda x: x**0.5, "a power of 0.5"),
        (lambda x: x + "1", "str"),
        (lambda x, limit: x, "wants .* got .*limit"),
    ],
)
def test_what_no_formula_can_say_is_an_error(of, got):
    with pytest.raises(SpecError, match=got):
        formula("wrong", of)


def test_math_that_is_a_function_of_torch_is_an_error():
    with pytest.raises(SpecError, match=r"class Wrong math: .* got .*tanh.*Cure: write math = ops\.formula"):
        type("Wrong", (ops.Activation,), {"math": torch.tanh})
