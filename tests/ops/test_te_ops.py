"""Ops written for te.ops run unchanged: its tutorial's fused op, what fused ops save, and the methods that a pipeline calls."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import opfuse
from opfuse import ops, recipes
from opfuse.errors import FusionError, SavedTensorError
from opfuse.tensors.quantizers import MXFP8Quantizer
from tests.compiler.harness import generator_of
from tests.ops.test_op_errors import raised

BF16 = torch.bfloat16
UNFUSED = opfuse.RuleSet((), level=0)


# -- fused ops with a forward pass alone ---------------------------------------------------------------------------------------


class ForwardAxpy(ops.FusedOperation):
    """a x + y; its basic ops run the backward pass, and nothing is saved, since they read nothing."""

    def __init__(self, scale, add):
        super().__init__((scale, add))

    def fuser_forward(self, basic_op_ctxs, input_, basic_op_extra_inputs, **unused):
        scale_op, _ = self.basic_ops
        return scale_op.scale * input_ + basic_op_extra_inputs[1][0], [(), ()]


class Saving(ops.FusedOperation):
    """Linear, bias, GELU in plain torch. ``how``: the way in which it saves what their backward passes read."""

    def __init__(self, how):
        self.__dict__["how"] = how
        super().__init__((ops.BasicLinear(8, 8), ops.Bias(8), ops.GELU()))

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        linear, bias, act = basic_op_ctxs
        weight, b = self.basic_ops[0].weight, self.basic_ops[1].bias
        h = input_ @ weight.t() + b
        self.how(linear, bias, act, x=input_, weight=weight, h=h)
        return ops.GELU().math.value(h), [(), (), ()]


def by_name(linear, bias, act, *, x, weight, h):
    linear.save(x=x, w=weight)
    bias.save(x=None, bias=None)
    act.save(x=h)


def in_order(linear, bias, act, *, x, weight, h):
    linear.dtype, linear.with_quantized_compute = x.dtype, False  # attributes that ops of te.ops leave
    linear.save_for_backward(x, weight)
    act.save_for_backward(h)


def gradients(model, *inputs):
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    y = model(*inputs)
    return [y.detach(), *torch.autograd.grad(y, (*inputs, *model.parameters()), torch.cos(y.detach()))]


def same(found, wanted):
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("rules", [None, UNFUSED], ids=["fused", "unfused"])
@pytest.mark.parametrize("around", [(), (ops.Identity,), (ops.GELU,)], ids=["alone", "identity", "gelu"])
def test_the_fused_op_of_the_tutorial(around, rules):
    parts = ops.ConstantScale(2.0), ops.AddExtraInput()
    before, after = ([cls() for cls in around] for _ in range(2))
    fused = ops.Sequential(*before, ForwardAxpy(*parts), *after, rules=rules)
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    same(gradients(fused, x, y), gradients(ops.Sequential(*before, *parts, *after, rules=rules), x, y))


def test_it_can_be_registered():
    def fuse(run, *, recipe):
        pair = [type(op) for op in run] == [ops.ConstantScale, ops.AddExtraInput]
        return [ForwardAxpy(*run)] if pair else run

    model = ops.Sequential(ops.ConstantScale(0.5), ops.AddExtraInput())
    x, y = torch.randn(3, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    wanted = gradients(model, x, y)
    with ops.register_forward_fusion(fuse):
        same(gradients(model, x, y), wanted)
        assert torch.autograd.gradcheck(model, (x.requires_grad_(), y.requires_grad_()))


@pytest.mark.parametrize("how", [by_name, in_order], ids=lambda how: how.__name__)
def test_what_a_fused_op_saves_is_what_its_ops_read(how):
    """Their backward passes ask for no attribute that only their own forward passes leave."""
    fused = ops.Sequential(Saving(how))
    plain = ops.Sequential(*fused[0].basic_ops, rules=UNFUSED)
    found, wanted = (gradients(model, torch.randn(4, 8, generator=generator_of(1))) for model in (fused, plain))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_have_the_dtypes_of_the_inputs_under_torch_autocast():
    class Forward(ops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            linear, scale = basic_op_ctxs
            x, weight = input_.to(BF16), self.basic_ops[0].weight
            linear.save(x=x, w=weight)
            assert (linear.input_dtype, linear.dtype, scale.input_dtype, scale.dtype) == (torch.float32, BF16, BF16, BF16)
            return 2 * (x @ weight.to(BF16).t()), [(), ()]

    parts, x = (ops.BasicLinear(8, 8), ops.ConstantScale(2.0)), torch.randn(4, 8)
    with torch.autocast(torch.get_default_device().type, BF16):
        same(gradients(ops.Sequential(Forward(parts)), x), gradients(ops.Sequential(*parts, rules=UNFUSED), x))


def test_a_norm_saves_its_statistics_alone():
    """As in te.ops: the weight is the op's own, and need not be saved."""

    class Forward(ops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            rstd = torch.rsqrt(input_.square().mean(-1) + 1e-5)
            basic_op_ctxs[0].save_for_backward(input_, rstd)
            return input_ * rstd[:, None] * self.basic_ops[0].weight, [()]

    parts, x = (ops.RMSNorm(8),), torch.randn(4, 8)
    found, wanted = gradients(ops.Sequential(Forward(parts)), x), gradients(ops.Sequential(*parts), x)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("saved", [{}, {"x": None}, {"x": None, "other": None}], ids=str)
def test_what_is_read_must_be_saved(saved):
    class Forgetful(ops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            basic_op_ctxs[0]._store(saved)
            return input_ @ self.basic_ops[0].weight.t(), [()]

    with raised(FusionError, RuntimeError, r"Forgetful: saved state of BasicLinear\(", r"exactly \('x', 'w'\)"):
        ops.Sequential(Forgetful((ops.BasicLinear(8, 8),)))(torch.randn(2, 8, requires_grad=True))


def test_a_shape_that_only_the_fused_op_knows_is_asked_of_it():
    class Flat(ops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            return input_.flatten() * 2, [(), ()]

    y = ops.Sequential(Flat((ops.ConstantScale(2.0), ops.Reshape((-1,)))))(torch.randn(2, 8, requires_grad=True))
    with pytest.raises(SavedTensorError, match=r"Reshape.* input_shape: .* Cure: set ctx\.input_shape in the fuser_forward"):
        y.sum().backward()


# -- the protocol --------------------------------------------------------------------------------------------------------------


class Listener(ops.BasicOperation):
    """y = w x; its weight is made when a pipeline takes it in. Writes down what it is told."""

    def __init__(self):
        super().__init__()
        self.heard = []
        self.weight = nn.Parameter(torch.empty((), device="meta"))

    def pre_first_fuser_forward(self):
        self.heard.append("first")
        self.weight = nn.Parameter(torch.ones(()))

    def pre_fuser_forward(self, *, requires_grad):
        self.heard.append(requires_grad)

    def reset_recipe_state(self, *, recipe):
        super().reset_recipe_state(recipe=recipe)
        self.heard.append(recipe)

    def op_forward(self, ctx, input_, **unused):
        ctx.dtype = input_.dtype
        ctx.save_for_backward(input_, self.weight)
        return input_ * self.weight

    def op_backward(self, ctx, grad_output):
        x, weight = ctx.saved_tensors
        return (grad_output * weight).to(ctx.dtype), [(grad_output * x).sum()]


def test_what_a_pipeline_tells_its_ops():
    op, recipe = Listener(), recipes.MXFP8BlockScaling()
    model, x = ops.Sequential(ops.GELU(), op), torch.randn(32, 32)
    model(x).sum().backward()
    assert op.heard == ["first", None, True]
    assert op.weight.grad is not None
    with torch.no_grad():
        model(x)
    for _ in range(2):
        with opfuse.autocast(recipe=recipe):
            model(x)
    op.requires_grad_(False)
    model(x)
    model(x.requires_grad_())
    assert op.heard[3:] == [False, recipe, True, True, None, False, True]


# -- attributes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["tensor", "storage"])
def test_a_plane_that_was_not_made_is_no_attribute(of):
    made = MXFP8Quantizer(columnwise=False)(torch.randn(32, 32))
    value = made if of == "tensor" else made.storage
    for name in ("_columnwise_data", "_columnwise_scale_inv", "_no_such_name"):
        assert not hasattr(value, name)
        assert getattr(value, name, None) is None
