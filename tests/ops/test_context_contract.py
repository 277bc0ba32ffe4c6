"""The contract of a context: a backward pass asks for nothing beside what the op declares in ``saves``, whoever saved it."""

from __future__ import annotations

import pytest
import torch

import opfuse
from opfuse import ops, recipes
from opfuse.core.context import Context
from opfuse.errors import FusionError
from opfuse.tensors.quantizers import IdentityQuantizer, MXFP8Quantizer
from tests.ops.op_cases import ALL, make, tuple_of
from tests.plans import plans_used

BASIC = [(name, case) for name, case in ALL if not name.startswith("linear-")]


class Bare(ops.FusedOperation):
    """Its op's forward pass in a context of its own, of which it keeps the declared names alone."""

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, basic_op_kwargs, **unused):
        (ctx,), (op,) = basic_op_ctxs, self.basic_ops
        own = Context(op, ctx.env, ctx.needs)
        own.casts, own.operands, own.extras = ctx.casts, ctx.operands, ctx.extras
        output, extras = op.fuser_forward(
            [own],
            input_,
            basic_op_extra_inputs=basic_op_extra_inputs,
            prev_op_grad_output_quantizer=None,
            next_op_input_quantizer=None,
            basic_op_kwargs=basic_op_kwargs,
        )
        if own.saved_state():
            ctx.save(**own.saved_state())
        return output, extras


def bare(run, *, recipe):
    return [Bare([op]) for op in run]


def trained(op, x, extras, low):
    torch.manual_seed(5)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=low):
        outputs = tuple_of(op(x, *extras))
    outputs = [y for y in outputs if y.requires_grad]
    leaves = [x, *extras, *op.parameters()]
    grads = torch.autograd.grad(outputs, leaves, [torch.cos(y.detach()) for y in outputs], allow_unused=True)
    return [*(y.detach() for y in outputs), *grads]


def same(a, b):
    return a is b if a is None or b is None else a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.few
@pytest.mark.parametrize("low", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize(("name", "case"), BASIC, ids=[name for name, _ in BASIC])
def test_a_fused_forward_that_saves_the_declared_names_alone_trains(name, case, low):
    op, x, extras = make(case, torch.float32)
    wanted = trained(op, x, extras, low)
    with ops.register_forward_fusion(bare):
        found = trained(op, x, extras, low)
    assert all(map(same, found, wanted))


RECIPE = recipes.MXFP8BlockScaling()


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
def test_it_trains_in_groups_whose_gradients_are_cast(scaled):
    """The cast of the gradient reads the sizes of groups, too; so do scales of biases."""
    op, splits = ops.GroupedLinear(2, 32, 32, scale_bias=scaled), torch.tensor([64, 32])
    x, scales = (torch.randn(shape, requires_grad=True) for shape in ((96, 32), (96,)))
    extras = (scales,) if scaled else ()
    results = []
    for fuse in (lambda run, *, recipe: run, bare):
        with ops.register_forward_fusion(fuse), opfuse.autocast(recipe=RECIPE):
            y = op(x, splits, *extras)
        results.append([y.detach(), *torch.autograd.grad(y, [x, *extras, *op.parameters()], torch.cos(y.detach()))])
    assert all(map(same, *results))


def test_splits_that_were_saved_are_read_where_no_sizes_are():
    class Forward(ops.FusedOperation):
        """Saves ``splits``, which a host may not know yet."""

        def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
            (ctx,), ((splits,),), (op,) = basic_op_ctxs, basic_op_extra_inputs, self.basic_ops
            ctx.sizes = None
            ctx.save(x=input_, weight0=op.weight0, weight1=op.weight1, splits=splits, scales=None)
            pieces = zip(input_.split(splits.tolist()), (op.weight0, op.weight1))
            return torch.cat([piece @ weight.t() for piece, weight in pieces]), [()]

    only_gradients = recipes.CustomRecipe(
        qfactory=lambda role: MXFP8Quantizer() if role.tensor_type == "grad_output" else IdentityQuantizer()
    )
    op, splits, x = ops.GroupedLinear(2, 32, 32, bias=False), torch.tensor([64, 32]), torch.randn(96, 32, requires_grad=True)
    results = []
    for model in (op, Forward((op,))):
        with opfuse.autocast(recipe=only_gradients):
            y = model(x, splits)
        results.append(torch.autograd.grad(y, [x, *op.parameters()], torch.cos(torch.arange(96 * 32.0)).view(96, 32)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_a_rule_that_saves_the_declared_names_alone_trains():
    def forward(x, *, linear, act):
        weight = linear.op.parameter("weight")
        h = x @ weight.t()
        linear.save(x=x, w=weight)
        act.save(x=h)
        return torch.nn.functional.gelu(h, approximate="tanh")

    rule = opfuse.fusion("mine", "linear=basic_linear act=gelu", forward=forward)
    model, x = ops.Sequential(ops.Linear(8, 8, bias=False), ops.GELU()), torch.randn(4, 8, requires_grad=True)
    mine = ops.Sequential(*model, rules=opfuse.RuleSet((rule,)))
    found, wanted = (torch.autograd.grad(each(x).square().sum(), [x, *each.parameters()]) for each in (mine, model))
    with plans_used() as plans:
        mine(x)
    assert plans[0].fusions == ("mine",)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_a_rule_that_saves_nothing_is_told_on_which_of_its_arguments_to_save():
    def forward(x, *, linear, acts):
        linear.save(x=x, w=linear.op.weight)
        return x

    rule = opfuse.fusion("mine", "linear=basic_linear acts=elementwise+", forward=forward)
    model = ops.Sequential(ops.Linear(8, 8, bias=False), ops.GELU(), ops.SiLU(), rules=opfuse.RuleSet((rule,)))
    with pytest.raises(FusionError, match=r"saved state of GELU\(\): .*Cure: call each of acts\.save\(x=\.\.\.\)"):
        model(torch.randn(4, 8, requires_grad=True))


NONE = {
    "linear": (lambda: ops.BasicLinear(8, 8), "x"),
    "norm": (lambda: ops.RMSNorm(8), "rstd"),
    "activation": (ops.GELU, "x"),
}


@pytest.mark.parametrize("kind", NONE)
def test_none_for_what_a_gradient_reads_is_told_in_the_forward_pass(kind):
    make, missing = NONE[kind]

    class Forgetful(ops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            (ctx,), (op,) = basic_op_ctxs, self.basic_ops
            ctx.save(**{**dict.fromkeys(op.saves, input_), missing: None})
            return input_.clone(), [()]

    with pytest.raises(FusionError, match=rf"Forgetful: saved state of .* got \(.*'{missing}=None'"):
        Forgetful((make(),))(torch.randn(2, 8, requires_grad=True))


class Sum(ops.BasicOperation):
    """x + 2 y + 3 z, whose gradients are named one by one when they are asked for."""

    num_extra_inputs = 2

    def op_forward(self, ctx, x, **_):
        y, z = ctx.extras
        return x + 2 * y + 3 * z

    def op_backward(self, ctx, dy):
        return dy, (), (factor * dy for factor in (2, 3))


def test_gradients_may_come_from_a_generator():
    given = [torch.randn(4, 4, requires_grad=True) for _ in range(3)]
    Sum()(*given).sum().backward()
    assert [float(x.grad.mean()) for x in given] == [1, 2, 3]
