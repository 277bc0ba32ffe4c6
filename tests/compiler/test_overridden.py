"""What a user overrides runs: methods of subclasses, mixins and single objects, whatever the rules would put in their place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import opfuse
from opfuse import ops, recipes
from opfuse.errors import OpfuseWarning, PipelineError
from tests.compiler.harness import randn
from tests.plans import plans_used

F64 = torch.float64
RECIPES = [None, recipes.MXFP8BlockScaling(), recipes.DelayedScaling(), recipes.NVFP4BlockScaling(disable_rht=True)]


class Doubled:
    """A mixin: the output of the op below it, twice, and its gradient."""

    ran: list[str] = []

    def op_forward(self, ctx, input_, **kwargs):
        self.ran.append("forward")
        return 2 * super().op_forward(ctx, input_, **kwargs)

    def op_backward(self, ctx, grad_output):
        self.ran.append("backward")
        return super().op_backward(ctx, 2 * grad_output)


def doubled(cls):
    """A subclass of ``cls`` that overrides both methods itself."""

    def op_forward(self, ctx, input_, **kwargs):
        Doubled.ran.append("forward")
        return 2 * cls.op_forward(self, ctx, input_, **kwargs)

    def op_backward(self, ctx, grad_output):
        Doubled.ran.append("backward")
        return cls.op_backward(self, ctx, 2 * grad_output)

    return type(cls.__name__, (cls,), {"op_forward": op_forward, "op_backward": op_backward})


def patched(cls):
    """Makes objects of ``cls`` with methods of their own."""

    def make(*args):
        op = cls(*args)

        def op_forward(ctx, input_, **kwargs):
            Doubled.ran.append("forward")
            return 2 * cls.op_forward(op, ctx, input_, **kwargs)

        def op_backward(ctx, grad_output):
            Doubled.ran.append("backward")
            return cls.op_backward(op, ctx, 2 * grad_output)

        op.op_forward, op.op_backward = op_forward, op_backward
        return op

    return make


ROUTES = {
    "subclass": doubled,
    "one level deeper": lambda cls: type("Deeper", (doubled(cls),), {}),
    "mixin": lambda cls: type("Mixed", (Doubled, cls), {}),
    "object": patched,
}
OPS = {
    "basic linear": (ops.BasicLinear, (32, 32)),
    "bias": (ops.Bias, (32,)),
    "gelu": (ops.GELU, ()),
    "relu": (ops.ReLU, ()),
    "constant scale": (ops.ConstantScale, (0.5,)),
    "rms norm": (ops.RMSNorm, (32,)),
    "layer norm": (ops.LayerNorm, (32,)),
    "identity": (ops.Identity, ()),
    "reshape": (ops.Reshape, ((-1, 32),)),
    "quantize": (ops.Quantize, ()),
}


def pair(make, args, dtype, rules=None):
    """A pipeline with an op in its midst, and one with the same parameters where a scale of 2 stands behind the plain op."""
    cls = make[1]
    torch.manual_seed(0)
    around = [ops.Linear(32, 32), ops.RMSNorm(32), ops.Linear(32, 32), ops.GELU()]
    mine = ops.Sequential(*around[:2], make[0](*args), *around[2:], rules=rules).to(dtype)
    torch.manual_seed(0)
    others = [ops.Linear(32, 32), ops.RMSNorm(32), ops.Linear(32, 32), ops.GELU()]
    plain = ops.Sequential(*others[:2], cls(*args), ops.ConstantScale(2.0), *others[2:], rules=opfuse.RuleSet(())).to(dtype)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in mine.parameters():
            p.copy_(torch.randn_like(p))
    torch.manual_seed(1)
    with torch.no_grad():
        for p in plain.parameters():
            p.copy_(torch.randn_like(p))
    return mine, plain


def step(model, x, recipe=None):
    x = x.detach().clone().requires_grad_()
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x)
    y.backward(torch.ones_like(y))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.few
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("route", ROUTES)
def test_overridden_methods_run_and_compute(route, op):
    cls, args = OPS[op]
    mine, plain = pair((ROUTES[route](cls), cls), args, F64)
    Doubled.ran.clear()
    got, want = (step(model, randn(8, 32, dtype=F64)) for model in (mine, plain))
    assert Doubled.ran == ["forward", "backward"]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.few
@pytest.mark.parametrize("recipe", RECIPES[1:], ids=lambda r: r.kind)
@pytest.mark.parametrize("route", ROUTES)
def test_an_overridden_product_is_quantized_as_its_base(route, recipe):
    """Factors of two move no rounding, so bits are those of the plain product and a scale, op by op."""
    mine, plain = pair((ROUTES[route](ops.BasicLinear), ops.BasicLinear), (32, 32), torch.bfloat16)
    Doubled.ran.clear()
    torch.manual_seed(2)
    got = step(mine, randn(32, 32), recipe)
    torch.manual_seed(2)
    want = step(plain, randn(32, 32), recipe)
    assert Doubled.ran == ["forward", "backward"]
    if not isinstance(recipe, recipes.NVFP4BlockScaling):  # stochastic rounding draws in another order
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    high = step(pair((ops.BasicLinear, ops.BasicLinear), (32, 32), torch.bfloat16)[1], randn(32, 32))
    assert not torch.equal(got[0], high[0])


class Lora(ops.BasicLinear):
    """W x + B A x, as a te.ops user writes it: the base computes its part, and more tensors are saved beside its own."""

    def __init__(self, features, rank):
        super().__init__(features, features)
        self.down, self.up = nn.Parameter(torch.randn(rank, features)), nn.Parameter(torch.randn(features, rank))

    def op_forward(self, ctx, input_, **kwargs):
        y = super().op_forward(ctx, input_, **kwargs)
        ctx.save_for_backward(input_, self.down, self.up)
        return y + input_ @ self.down.t() @ self.up.t()

    def op_backward(self, ctx, grad_output):
        dx, (dw,) = super().op_backward(ctx, grad_output)
        x, down, up = ctx.saved_tensors
        hidden = grad_output @ up
        return dx + hidden @ down, (dw, hidden.t() @ x, grad_output.t() @ (x @ down.t()))


@pytest.mark.parametrize("frozen", [False, True])
def test_lora_trains_between_fused_ops(frozen):
    model = ops.Sequential(ops.RMSNorm(8), Lora(8, 2), ops.Bias(8), ops.GELU(), ops.Linear(8, 4)).double()
    model[1].weight.requires_grad_(not frozen)
    x = torch.randn(3, 8, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: model(x), (x, *(p for p in model.parameters() if p.requires_grad)))


def test_lora_under_a_recipe_quantizes_the_base_alone():
    torch.manual_seed(0)
    model, recipe = ops.Sequential(Lora(32, 4), ops.GELU()).bfloat16(), recipes.MXFP8BlockScaling()
    base = ops.BasicLinear(32, 32).bfloat16()
    base.weight = model[0].weight
    x = randn(32, 32)
    with opfuse.autocast(recipe=recipe):
        want = torch.nn.functional.gelu((base(x) + x @ model[0].down.t() @ model[0].up.t()).float(), approximate="tanh")
        y = model(x.clone().requires_grad_())
    torch.testing.assert_close(y.float(), want, rtol=2e-2, atol=2e-2)
    y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


class Reversed(ops.Identity):
    """Gradient reversal."""

    def op_backward(self, ctx, grad_output):
        return -grad_output, ()


class ReversedReshape(ops.Reshape):
    def op_backward(self, ctx, grad_output):
        dx, params = super().op_backward(ctx, grad_output)
        return -dx, params


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("make", [Reversed, lambda: ReversedReshape((-1, 32))], ids=["identity", "reshape"])
@pytest.mark.parametrize("around", [False, True])
def test_gradient_reversal(make, around, recipe):
    def model(op):
        torch.manual_seed(0)
        return ops.Sequential(*([ops.Linear(32, 32), op, ops.Linear(32, 32)] if around else [op])).bfloat16()

    results = []
    for op in (make(), ops.Identity()):
        torch.manual_seed(1)
        results.append(step(model(op), randn(32, 32), recipe))
    (y, dx, *_), (want, other, *_) = results
    assert torch.equal(y, want)
    if not isinstance(recipe, recipes.NVFP4BlockScaling):
        assert torch.equal(dx, -other)
    assert not torch.equal(dx, other)


@pytest.mark.parametrize("cls", [ops.Linear, ops.GELU], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("route", ["class", "object"])
def test_an_overridden_forward_is_called_as_a_module(cls, route):
    args = (8, 8) if cls is ops.Linear else ()
    if route == "class":
        op = type("Mine", (cls,), {"forward": lambda self, x: 3 * cls.forward(self, x)})(*args)
    else:
        op = cls(*args)
        op.forward = lambda x: 3 * cls.forward(op, x)
    before, after, x = ops.Linear(8, 8), ops.ReLU(), torch.randn(4, 8, requires_grad=True)
    model = ops.Sequential(before, op, after)
    y = model(x)
    assert torch.equal(y, after(3 * cls.forward(op, before(x))))
    y.sum().backward()
    assert x.grad is not None
    assert len(model.runs()) == 3


def test_a_forward_replaced_between_calls_is_called():
    model, x = ops.Sequential(ops.Linear(8, 8), ops.GELU()), torch.randn(4, 8)
    before = model(x)
    inner = model[1].forward
    model[1].forward = lambda x: 2 * inner(x)
    assert torch.equal(model(x), 2 * before)
    del model[1].forward
    assert torch.equal(model(x), before)


def test_methods_replaced_between_calls_run():
    model, x = ops.Sequential(ops.Linear(8, 8), ops.GELU()), torch.randn(4, 8)
    before = model(x)
    model[1].op_forward = lambda ctx, input_, **_: input_ * 0
    assert torch.equal(model(x), torch.zeros(4, 8))
    del model[1].op_forward
    assert torch.equal(model(x), before)
    fused = ops.Sequential(Both((ops.BasicLinear(8, 8), ops.Bias(8))))
    fused(x)
    fused[0].fuser_forward = lambda ctxs, input_, **_: (input_ + 1, [(), ()])
    with torch.no_grad():
        assert torch.equal(fused(x), x + 1)


class Both(ops.FusedOperation):
    pass


def test_a_class_of_the_same_name_is_no_word_of_built_in_rules():
    class ConstantScale(ops.BasicOperation):
        def op_forward(self, ctx, input_, **_):
            return input_ * 5

        def op_backward(self, ctx, grad_output):
            return grad_output * 5, ()

    model = ops.Sequential(ops.BasicLinear(8, 8), ConstantScale(), ops.AddExtraInput(in_place=True))
    x, extra = torch.randn(4, 8, requires_grad=True), torch.zeros(4, 8)
    with plans_used() as plans:
        y = model(x, extra)
    torch.testing.assert_close(y, 5 * model[0](x))
    assert any(node.kind == f"{__name__}.constant_scale" for node in plans[0].graph.nodes)
    y.sum().backward()


def test_declared_traits_are_a_promise_and_rules_take_them():
    class Same(ops.GELU):
        traits = ops.GELU.traits

        def op_forward(self, ctx, input_, **_):
            raise AssertionError("fused instead")

    with plans_used() as plans, torch.no_grad():
        ops.Sequential(ops.Linear(8, 8), Same())(torch.randn(4, 8))
    assert "epilogue" in plans[0].fusions


def test_helpers_that_fused_implementations_call_are_overridden_too():
    class Wide(ops.GELU):
        """Computes in fp32, whatever comes; a chain would not."""

        def compute_dtype(self, env, x):
            return torch.float32

    class Offset(ops.RMSNorm):
        def produce(self, ctx, x, *, out_dtype=None):
            return super().produce(ctx, x, out_dtype=out_dtype) + 1

    x, recipe = randn(32, 32), recipes.MXFP8BlockScaling()
    for model in (ops.Sequential(ops.Linear(32, 32), Wide()), ops.Sequential(Offset(32), ops.Linear(32, 32))):
        model.bfloat16()
        unfused = ops.Sequential(*model, rules=opfuse.RuleSet(()))
        for scope in (None, recipe):
            with opfuse.autocast(enabled=scope is not None, recipe=scope):
                y, want = model(x), unfused(x)
            assert (y.dtype, torch.equal(y, want)) == (want.dtype, True)
    assert ops.Sequential(ops.Linear(32, 32), Wide()).bfloat16()(x).dtype == torch.float32


class Numbered(ops.BasicOperation):
    def fuser_forward(self, basic_op_ctxs, input_, **_):
        return input_, [()]


def test_what_nobody_calls_is_told():
    with pytest.raises(PipelineError, match="op_forward, which nobody calls"):
        type("Mine", (ops.Linear,), {"op_forward": lambda self, ctx, x: x})
    with pytest.raises(PipelineError, match="fuser_forward, fuser_backward"):
        type("Mine", (ops.FusedOperation,), {"op_backward": lambda self, ctx, x: x})
    with pytest.warns(OpfuseWarning, match=r"Mine\.op_forward: wants a fuser_forward that runs it"):
        type("Mine", (Numbered,), {"op_forward": lambda self, ctx, x: x})

    class Template(ops.BasicOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **_):
            return self.op_forward(basic_op_ctxs[0], input_), [()]

    class Filled(Template):
        def op_forward(self, ctx, input_, **_):
            return input_ + 1

    assert torch.equal(Filled()(torch.zeros(2)), torch.ones(2))


def test_keyword_arguments_of_an_overridden_forward():
    class Times(ops.GELU):
        def op_forward(self, ctx, input_, *, factor=1, **kwargs):
            return factor * super().op_forward(ctx, input_, **kwargs)

    x = torch.randn(4)
    assert torch.equal(Times()(x, factor=2), 2 * ops.GELU()(x))


# -- fused ops that share basic ops ------------------------------------------------------------------------------------------


def counted(factor):
    class Counted(ops.FusedOperation):
        """The default of both methods; the output is multiplied."""

        def fuser_forward(self, basic_op_ctxs, input_, **rest):
            y, extras = super().fuser_forward(basic_op_ctxs, input_, **rest)
            return factor * y, extras

        def fuser_backward(self, basic_op_ctxs, grad_output, **rest):
            return super().fuser_backward(basic_op_ctxs, factor * grad_output, **rest)

    return Counted


def test_two_fused_ops_may_share_a_basic_op_and_one_may_stand_twice():
    shared, own = ops.BasicLinear(8, 8).double(), ops.BasicLinear(8, 8).double()
    first, second = counted(2)([shared, own]), counted(5)([own, shared])
    x = torch.randn(3, 8, dtype=F64, requires_grad=True)
    a, b = shared.weight.t(), own.weight.t()
    cases = {
        "share": ([first, second], lambda x: 10 * x @ a @ b @ b @ a),
        "one twice": ([first, ops.GELU(), first], lambda x: 2 * nn.functional.gelu(2 * x @ a @ b, approximate="tanh") @ a @ b),
        "alone and fused": ([shared, first, shared], lambda x: 2 * x @ a @ a @ b @ a),
    }
    for name, (modules, want) in cases.items():
        for leaf in (x, shared.weight, own.weight):
            leaf.grad = None
        y, wanted = ops.Sequential(*modules)(x), want(x)
        torch.testing.assert_close(y, wanted, rtol=1e-9, atol=1e-9, msg=name)
        leaves = [x, shared.weight, own.weight]
        grads = (torch.autograd.grad(out.square().sum(), leaves, retain_graph=True) for out in (y, wanted))
        for got, expected in zip(*grads):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_keyword_arguments_by_index_reach_that_place_alone():
    class Plus(ops.BasicOperation):
        def op_forward(self, ctx, input_, *, by=0, **_):
            return 2 * input_ + by

        def op_backward(self, ctx, grad_output):
            return 2 * grad_output, ()

    op, x = Plus(), torch.zeros(2)
    model = ops.Sequential(op, op)
    assert torch.equal(model(x, op_kwargs={0: {"by": 1}}), torch.full((2,), 2.0))
    assert torch.equal(model(x, op_kwargs={1: {"by": 1}}), torch.full((2,), 1.0))
    assert torch.equal(model(x, op_kwargs={op: {"by": 1}}), torch.full((2,), 3.0))
