"""``rounding="single"``: every built-in rule against its chain in fp64 over the same sums, rounded once at the end.

The bound is half a unit in the last place plus what the fp32 arithmetic of a chain may err by. The same pipelines under
``"per_op"`` break it, so the test can fail. A chain begins with the unrounded sums of a product, as the device makes them; they
have a bound of their own, against fp64 products of the same operands, which sums that were rounded to bf16 break.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.compiler.registry import RuleSet
from opfuse.fusions import RULES
from opfuse.recipes import CustomRecipe, QuantizerRole, Recipe
from opfuse.recipes.recipe import SPLIT
from opfuse.tensors.gemm import GEMMS, gemm
from opfuse.tensors.quantizers import IdentityQuantizer
from tests.compiler.harness import UNFUSED, Result, Step, generator_of, randn, recipe_for, run, to

ROWS, WIDTH = 64, 64
BF16 = torch.bfloat16
ON_HOPPER = torch.get_default_device().type == "cuda" and torch.cuda.get_device_capability() == (9, 0)
FP32 = 2.0**-18
"""What fp32 arithmetic may err by, sums of some hundred products included, relative to the largest result."""

SUMS = {False: 2.0**-18, True: 2.0**-11.5}
"""What a product may err by in the norm, emulated and native: FP8 units of compute capability 9.0 sum with 13 fraction bits."""


def high_precision(_: QuantizerRole) -> IdentityQuantizer:
    return IdentityQuantizer()


RECIPES: dict[str, Callable[[str], Recipe]] = {
    "identity": lambda rounding: CustomRecipe(qfactory=high_precision, rounding=rounding),
    "fp8_current": lambda rounding: recipe_for("fp8_current", rounding=rounding),
    "mxfp8": lambda rounding: recipe_for("mxfp8", rounding=rounding),
}


@dataclass(frozen=True)
class Operands:
    """What the three products of a linear layer multiply under a recipe."""

    recipe: Recipe

    def product(self, name: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """The fp32 sums that the device gives, as fp64, which err as sums do that nothing rounded."""
        what, roles = GEMMS[name], (GEMMS[name].left, GEMMS[name].right)
        quantizers = [self.recipe.quantizer(QuantizerRole(tensor_type=role)) for role in roles]
        both = [quantizer.quantize(tensor.detach()) for quantizer, tensor in zip(quantizers, (left, right))]
        fast = name not in SPLIT[self.recipe.split_accumulator]
        sums = gemm(name, *both, dtype=BF16, out_dtype=torch.float32, fast=fast)
        planes = zip(both, (what.left_plane, what.right_plane), what.summed)
        a, b = (each.dequantize(torch.float32, usage).double().movedim(dim, -1) for each, usage, dim in planes)
        bound = SUMS[both[0].format.family == "tensor" and ON_HOPPER]
        assert error(sums, a @ b.t()) < bound < error(sums.to(BF16), a @ b.t())
        return sums.double()

    def fprop(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return self.product("fprop", x, w)

    def dgrad(self, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return self.product("dgrad", dy, w)

    def wgrad(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.product("wgrad", dy, x)


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """In the norm."""
    return float((got.double() - exact).norm() / exact.norm())


def gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(2 * 0.7978845608028654 * (x + 0.044715 * x**3))


def linear_scale_add(o: Operands, model: ops.Sequential, x: torch.Tensor, extra: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"output 0": 0.3 * o.fprop(x, model[0].weight) + extra.double()}


def linear_add(o: Operands, model: ops.Sequential, x: torch.Tensor, extra: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"output 0": o.fprop(x, model[0].weight) + model[0].bias.double() + extra.double()}


def epilogue(o: Operands, model: ops.Sequential, x: torch.Tensor) -> dict[str, torch.Tensor]:
    a, b = (o.fprop(x, model[0].weight) + model[0].bias.double()).chunk(2, dim=-1)
    return {"output 0": 0.3 * (gelu(a) * b)}


def norm_epilogue(o: Operands, model: ops.Sequential, x: torch.Tensor) -> dict[str, torch.Tensor]:
    wide = x.double()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + model[0].eps) * model[0].weight.double()
    return {"output 0": 0.3 * gelu(y)}


def backward_linear_add(o: Operands, model: ops.Sequential, x: torch.Tensor) -> dict[str, torch.Tensor]:
    dy, d_extra = gradients(ROWS, WIDTH), gradients(ROWS, WIDTH, output=1)
    return {"grad of input": o.dgrad(dy, model[1].weight) + d_extra.double(), "grad of 1.weight": o.wgrad(dy, x)}


def backward_linear_scale(o: Operands, model: ops.Sequential, x: torch.Tensor) -> dict[str, torch.Tensor]:
    dy = gradients(ROWS, WIDTH)
    return {"grad of input": 0.3 * o.dgrad(dy, model[0].weight), "grad of 0.weight": 0.3 * o.wgrad(dy, x)}


def backward_add_rms_norm(o: Operands, model: ops.Sequential, x: torch.Tensor) -> dict[str, torch.Tensor]:
    norm, leaf = model[1], x.double().requires_grad_()
    y = leaf * torch.rsqrt(leaf.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.detach().double()
    torch.autograd.backward([y, leaf * 1], [gradients(ROWS, WIDTH).double(), gradients(ROWS, WIDTH, output=1).double()])
    return {"grad of input": leaf.grad}


def backward_activation_bias(o: Operands, model: ops.Sequential, x: torch.Tensor) -> dict[str, torch.Tensor]:
    saved = (x + model[0].bias).detach().double().requires_grad_()  # what the forward left: rounded, as any saved state
    gelu(saved).mul(0.3).backward(gradients(ROWS, WIDTH).double())
    return {"grad of input": saved.grad, "grad of 0.bias": saved.grad.sum(0)}


def gradients(*shape: int, output: int = 0) -> torch.Tensor:
    """The output gradients that the harness uses."""
    return randn(*shape, seed=100 + output)


@dataclass(frozen=True)
class Case:
    """rule: what must fire. model: its pipeline. reference: fp64 values by the names of the harness. extras: how many."""

    rule: str
    model: Callable[[], ops.Sequential]
    reference: Callable[..., dict[str, torch.Tensor]]
    extras: int = 0


def _linear(width: int = WIDTH, *, bias: bool = True) -> ops.Linear:
    return ops.Linear(WIDTH, width, bias=bias)


CASES = {
    case.reference.__name__: case
    for case in (
        Case(
            "linear_scale_add",
            lambda: ops.Sequential(_linear(bias=False), ops.ConstantScale(0.3), ops.AddExtraInput(in_place=True)),
            linear_scale_add,
            extras=1,
        ),
        Case("linear_add", lambda: ops.Sequential(_linear(), ops.AddExtraInput(in_place=True)), linear_add, extras=1),
        Case("epilogue", lambda: ops.Sequential(_linear(2 * WIDTH), ops.GEGLU(), ops.ConstantScale(0.3)), epilogue),
        Case("epilogue", lambda: ops.Sequential(ops.RMSNorm(WIDTH), ops.GELU(), ops.ConstantScale(0.3)), norm_epilogue),
        Case(
            "backward_linear_add",
            lambda: ops.Sequential(ops.MakeExtraOutput(in_place=True), _linear(bias=False)),
            backward_linear_add,
        ),
        Case(
            "backward_linear_scale",
            lambda: ops.Sequential(_linear(bias=False), ops.ConstantScale(0.3)),
            backward_linear_scale,
        ),
        Case("backward_add_rms_norm", lambda: ops.Sequential(ops.MakeExtraOutput(), ops.RMSNorm(WIDTH)), backward_add_rms_norm),
        Case(
            "backward_activation_bias",
            lambda: ops.Sequential(ops.Bias(WIDTH), ops.GELU(), ops.ConstantScale(0.3)),
            backward_activation_bias,
        ),
    )
}


def excess(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Error of the worst element over what one rounding may err by: half a unit in the last place of bf16, and of fp32."""
    got, exact = got.detach(), exact.detach()
    unit = torch.exp2(torch.floor(torch.log2(exact.abs().clamp_min(2.0**-126))) - 7)
    allowed = unit / 2 + FP32 * exact.abs().max()
    return float(((got.double() - exact).abs() / allowed).max())


def result(case: Case, recipe: Recipe, rules: RuleSet = RULES) -> tuple[Result, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = to(case.model(), BF16)
    x, extras = randn(ROWS, WIDTH), [randn(ROWS, WIDTH, seed=1 + i) for i in range(case.extras)]
    return run(model, x, *extras, step=Step(recipe, rules)), case.reference(Operands(recipe), model, x, *extras)


@pytest.mark.few
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", CASES)
def test_r4_single_rounds_once(name, recipe):
    case = CASES[name]
    single, exact = result(case, RECIPES[recipe]("single"))
    per_op, _ = result(case, RECIPES[recipe]("per_op"))
    assert case.rule in {rule for plan in single.plans for rule in plan.fusions}
    assert max(excess(single.tensors[key], value) for key, value in exact.items()) <= 1
    main = next(iter(exact))
    assert excess(per_op.tensors[main], exact[main]) > 1.2
    assert (per_op.tensors[main] != single.tensors[main]).float().mean() > 0.02


@pytest.mark.parametrize("name", CASES)
def test_r4_single_needs_a_rule(name):
    """Unfused, every op rounds, whatever the recipe says; and level 1 admits rules that equal the ops bit for bit only."""
    case = CASES[name]
    unfused, _ = result(case, RECIPES["fp8_current"]("single"), UNFUSED)
    per_op, _ = result(case, RECIPES["fp8_current"]("per_op"))
    level1, _ = result(case, RECIPES["fp8_current"]("single"), RuleSet(RULES.rules, level=1))
    main = next(iter(result(case, RECIPES["fp8_current"]("single"))[1]))
    assert torch.equal(unfused.tensors[main], per_op.tensors[main])
    assert torch.equal(level1.tensors[main], per_op.tensors[main])
    assert {(o.status, o.guard, o.got) for o in level1.outcomes(case.rule)} == {("missed", "env.rounding", "'single'")}


def test_a_chain_whose_cast_is_made_apart_rounds_once_as_well():
    """Backward, above experts: where the host knows the sizes, a cast of groups is no part of the chain's kernel."""
    found = []
    for grouped in (False, True):
        options = {"bias": False, "dtype": torch.bfloat16}
        layers = [
            ops.GroupedLinear(1, *sizes, **options) if grouped else ops.Linear(*sizes, **options)
            for sizes in ((128, 256), (256, 128))
        ]
        draw = generator_of(0)
        with torch.no_grad():
            for parameter in [each for layer in layers for each in layer.parameters()]:
                parameter.copy_(torch.randn(parameter.numel(), generator=draw).mul_(0.2).view_as(parameter))
        model = ops.Sequential(layers[0], ops.GELU(), ops.ConstantScale(0.7), layers[1])
        x, dy = (torch.randn(128, 128, generator=draw).bfloat16() for _ in range(2))
        x.requires_grad_()
        with opfuse.autocast(recipe=recipe_for("fp8_block", rounding="single")):
            y = model(x, *[torch.tensor([128])] * (2 * grouped))
        found.append(torch.autograd.grad(y, [x, *model.parameters()], dy))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
