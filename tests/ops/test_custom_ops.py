"""Ops and fusions of a user's own, written as for te.ops: the literal signatures, contexts, registration."""

import pytest
import torch
from torch import nn

import opfuse
from opfuse import ops, recipes
from opfuse.core.context import Context
from opfuse.errors import FusionError, PipelineError, SavedTensorError, SpecError
from opfuse.tensors.storage import QuantizedStorage
from tests.plans import plans_used

# -- basic ops ---------------------------------------------------------------------------------------------------------------


class Affine(ops.BasicOperation):
    """y = x * weight + bias, as a te.ops user writes it."""

    def __init__(self, size, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        if bias:
            self.bias = nn.Parameter(torch.randn(size))
        else:
            self.register_parameter("bias", None)
        self.shift = nn.Parameter(torch.zeros(size))
        self.seen = []

    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer, **kwargs):
        self.seen.append((prev_op_grad_output_quantizer, next_op_input_quantizer, kwargs, ctx.requires_grad))
        output = input_ * self.weight + self.shift
        if self.bias is not None:
            output = output + self.bias
        if ctx.requires_grad:
            ctx.save_for_backward(input_, self.weight)
            ctx.has_bias = self.bias is not None
        return output

    def op_backward(self, ctx, grad_output):
        input_, weight = ctx.saved_tensors
        summed = grad_output.flatten(0, -2).sum(0)
        params = [(grad_output * input_).flatten(0, -2).sum(0)]
        if ctx.has_bias:
            params.append(summed)
        return grad_output * weight, [*params, summed]


@pytest.mark.parametrize("bias", [True, False])
def test_a_basic_op_with_parameters_gradchecks(bias):
    op, x = Affine(4, bias).double(), torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    model = ops.Sequential(ops.Linear(4, 4), op, ops.GELU()).double()
    assert torch.autograd.gradcheck(lambda x, *_: model(x), (x, *model.parameters()), atol=1e-7, rtol=1e-5)


def test_what_a_basic_op_is_given():
    op, x = Affine(4), torch.randn(2, 4)
    op(x, anything=3)
    with torch.no_grad():
        op(x)
    op.requires_grad_(False)
    op(x)
    ops.Sequential(ops.Linear(4, 4), op, ops.Linear(4, 4))(x)
    assert op.seen == [
        (None, None, {"anything": 3}, True),
        (None, None, {}, False),
        (None, None, {}, False),
        (None, None, {}, True),
    ]


def test_a_basic_op_between_products_under_a_recipe_gets_plain_tensors():
    op = Affine(32)
    model = ops.Sequential(ops.Linear(32, 32), ops.Quantize(), op, ops.Linear(32, 32))
    with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()):
        model(torch.randn(32, 32, requires_grad=True)).sum().backward()
    assert op.seen == [(None, None, {}, True)]
    assert all(p.grad is not None for p in model.parameters())


class Mix(ops.BasicOperation):
    """(x + s y, x - y) for an extra input y and a parameter s; the difference is an extra output."""

    num_extra_inputs = 1
    num_extra_outputs = 1

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.5))

    def op_forward(self, *args, **kwargs):
        raise RuntimeError("an op with extra tensors runs through fuser_forward")

    def op_backward(self, *args, **kwargs):
        raise RuntimeError("an op with extra tensors runs through fuser_backward")

    def fuser_forward(
        self,
        basic_op_ctxs,
        input_,
        *,
        basic_op_extra_inputs,
        prev_op_grad_output_quantizer,
        next_op_input_quantizer,
        basic_op_kwargs,
    ):
        ((extra,),) = basic_op_extra_inputs
        basic_op_ctxs[0].save_for_backward(extra, self.factor)
        return input_ + self.factor * extra, [(input_ - extra,)]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        extra, factor = basic_op_ctxs[0].saved_tensors
        ((d_difference,),) = basic_op_grad_extra_outputs
        grad_output = torch.zeros_like(extra) if grad_output is None else grad_output
        d_difference = torch.zeros_like(extra) if d_difference is None else d_difference
        d_factor = (grad_output * extra).sum()
        return grad_output + d_difference, [(d_factor,)], [(factor * grad_output - d_difference,)]


class Mixed(ops.BasicOperation):
    """The same by two methods and the context."""

    num_extra_inputs = 1
    num_extra_outputs = 1

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.5))

    def op_forward(self, ctx, x):
        ctx.save_for_backward(*ctx.extras, self.factor)
        return x + self.factor * ctx.extras[0], x - ctx.extras[0]

    def op_backward(self, ctx, dy):
        extra, factor = ctx.saved_tensors
        dy, d_difference = (torch.zeros_like(extra) if d is None else d for d in (dy, *ctx.grad_extras))
        return dy + d_difference, ((dy * extra).sum(),), (factor * dy - d_difference,)


@pytest.mark.parametrize("read", [(0,), (1,), (0, 1)], ids=["main", "extra", "both"])
@pytest.mark.parametrize("mix", [Mix, Mixed])
def test_a_basic_op_with_extra_tensors_gradchecks(mix, read):
    model = ops.Sequential(ops.GELU(), mix(), ops.ConstantScale(2.0)).double()
    x, y = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def outputs(x, y, factor):
        result = model(x, y)
        return tuple(result[i] for i in read)

    assert torch.autograd.gradcheck(outputs, (x, y, model[1].factor), atol=1e-7, rtol=1e-5)


class Wrong(ops.BasicOperation):
    """Returns what its class attributes say."""

    num_extra_outputs = 1
    outputs, params, inputs = 1, 0, 0

    def fuser_forward(self, basic_op_ctxs, input_, **_):
        return input_ * 1, [(input_,) * self.outputs]

    def fuser_backward(self, basic_op_ctxs, grad_output, **_):
        return grad_output, [(grad_output,) * self.params], [(grad_output,) * self.inputs]


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("outputs", "outputs: wants 2, got 3"),
        ("params", "parameters: wants 0, got 2"),
        ("inputs", "extra inputs: wants 0, got 2"),
    ],
)
def test_wrong_counts_are_named(attribute, message):
    op = type("Wrong", (Wrong,), {attribute: 2})()
    with pytest.raises(PipelineError, match=message):
        op(torch.randn(3, requires_grad=True))[0].sum().backward()


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ((3,), r"gradient of weight: wants shape \(8,\), got \(3,\)"),
        ((), r"wants shape \(8,\), got \(\)"),
        ((4, 8), ""),
        ((8,), ""),
    ],
    ids=str,
)
@pytest.mark.cpu
def test_a_gradient_that_does_not_belong_to_its_parameter_is_named(shape, told):
    class Gain(ops.BasicOperation):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def op_forward(self, ctx, x):
            return x * self.weight

        def op_backward(self, ctx, dy):
            return dy, (torch.ones(shape),)

    model, x = ops.Sequential(Gain()), torch.randn(4, 8)
    if told:
        with pytest.raises(PipelineError, match=told):
            model(x).sum().backward()
    else:  # autograd sums over what was broadcast
        model(x).sum().backward()
        assert torch.equal(model[0].weight.grad, torch.full((8,), 4.0 if len(shape) > 1 else 1.0))


def test_a_backward_pass_that_reads_what_nobody_saved_is_named():
    class Forward(ops.GELU):
        def op_forward(self, ctx, x):
            return 2 * x

    with pytest.raises(SavedTensorError, match=r"Forward\(\) backward: wants a saved 'x', got nothing\. Cure: .*ctx\.save\(x="):
        Forward()(torch.randn(3, 8, requires_grad=True)).sum().backward()


def test_an_op_without_methods_says_so():
    class Empty(ops.BasicOperation):
        pass

    with pytest.raises(PipelineError, match="wants op_forward or fuser_forward"):
        Empty()(torch.randn(3))


class Named(ops.BasicOperation):
    """Saves by name, under the names it declares."""

    saves = ("x",)

    def op_forward(self, ctx, input_, **_):
        ctx.save(x=input_ if "input" in ctx.needs else None)
        return input_.square()

    def op_backward(self, ctx, grad_output):
        return 2 * grad_output * ctx.saved.x, ()


def test_named_saved_state():
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(Named(), (x,))


@pytest.mark.parametrize("saves", [True, False])
def test_a_fused_forward_saves_what_the_backward_of_its_op_reads(saves):
    class Forward(ops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **_):
            basic_op_ctxs[0].save_for_backward(*[input_] * saves)
            return input_.square(), [()]

    model, x = ops.Sequential(Forward([Named()])), torch.randn(3, requires_grad=True)
    if saves:
        model(x).sum().backward()
        assert torch.equal(x.grad, 2 * x)
    else:
        cure = r"call basic_op_ctxs\[0\]\.save\(x=\.\.\.\)"
        with pytest.raises(FusionError, match=rf"Forward: saved state of Named\(\): wants exactly \('x',\).*{cure}"):
            model(x)


# -- an activation in five lines ---------------------------------------------------------------------------------------------


class Softsign(ops.Activation):
    math = ops.Pointwise(
        "softsign",
        forward="x / (1.0f + fabsf(x))",
        backward=("dy / ((1.0f + fabsf(x)) * (1.0f + fabsf(x)))",),
        value=lambda x: x / (1 + x.abs()),
        grad=lambda dy, x: (dy / (1 + x.abs()).square(),),
    )


def test_a_users_activation_computes():
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.equal(Softsign()(x), torch.nn.functional.softsign(x))
    assert torch.autograd.gradcheck(Softsign(), (x,))


@pytest.mark.parametrize("recipe", [None, recipes.MXFP8BlockScaling(), recipes.Float8CurrentScaling()], ids=str)
def test_a_users_activation_fuses_in_both_directions(recipe):
    def train(rules):
        torch.manual_seed(0)
        model = ops.Sequential(ops.Linear(32, 64), Softsign(), ops.Linear(64, 32), rules=rules)
        x = torch.randn(32, 32, requires_grad=True)
        with plans_used() as plans, opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x)
        y.backward(torch.randn(32, 32))
        return plans[0], [y.detach(), x.grad, *(p.grad for p in model.parameters())]

    plan, fused = train(None)
    _, unfused = train(opfuse.RuleSet(()))
    assert all(torch.equal(a, b) for a, b in zip(fused, unfused, strict=True))
    epilogue = next(o for o in plan.outcomes if o.rule == "epilogue" and o.status == "fused")
    assert any("softsign" in name for name in epilogue.ops)
    if recipe is not None:
        backward = next(o for o in plan.outcomes if o.rule == "backward_activation_bias" and o.status == "fused")
        assert any("softsign" in name for name in backward.ops)


# -- fused ops ---------------------------------------------------------------------------------------------------------------


class ForwardOnly(ops.FusedOperation):
    """Linear and bias by hand: leaves in the contexts what the basic ops would leave."""

    calls = 0

    def fuser_forward(
        self,
        basic_op_ctxs,
        input_,
        *,
        basic_op_extra_inputs,
        prev_op_grad_output_quantizer,
        next_op_input_quantizer,
        basic_op_kwargs,
    ):
        type(self).calls += 1
        linear, bias = self.basic_ops
        y = linear.op_forward(
            basic_op_ctxs[0], input_, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None, **basic_op_kwargs[0]
        )
        y, _ = bias.fuser_forward([basic_op_ctxs[1]], y)
        return y, [(), ()]


class BackwardOnly(ops.FusedOperation):
    """The mirror: reads the contexts of the basic ops, whoever filled them."""

    calls = 0

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        type(self).calls += 1
        linear, bias = self.basic_ops
        dy, (d_bias,), _ = bias.fuser_backward([basic_op_ctxs[1]], grad_output)
        dx, d_weight = linear.op_backward(basic_op_ctxs[0], dy)
        return dx, [d_weight, d_bias], [(), ()]


class Both(ops.FusedOperation):
    """The pair is free: its own product, its own saved state."""

    calls = 0

    def fuser_forward(self, basic_op_ctxs, input_, **_):
        type(self).calls += 1
        linear, bias = self.basic_ops
        basic_op_ctxs[0].save_for_backward(input_, linear.parameter("weight"))
        return torch.addmm(bias.parameter("bias"), input_, linear.parameter("weight").t()), [(), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **_):
        type(self).calls += 1
        x, weight = basic_op_ctxs[0].saved_tensors
        return grad_output @ weight, [(grad_output.t() @ x,), (grad_output.sum(0),)], [(), ()]


def fuse_linear(cls):
    """A fusion function that puts ``cls`` for every BasicLinear followed by a Bias."""

    def fuse(ops_, *, recipe):
        out, i = [], 0
        while i < len(ops_):
            pair = isinstance(ops_[i], ops.BasicLinear) and i + 1 < len(ops_) and isinstance(ops_[i + 1], ops.Bias)
            out.append(cls(ops_[i : i + 2]) if pair else ops_[i])
            i += 2 if pair else 1
        return out

    return fuse


REGISTER = {
    ForwardOnly: ops.register_forward_fusion,
    BackwardOnly: ops.register_backward_fusion,
    Both: ops.register_forward_backward_fusion,
}
CALLS = {ForwardOnly: 2, BackwardOnly: 2, Both: 4}


def step(model, x, recipe=None):
    model.zero_grad()
    leaf = x.detach().clone().requires_grad_(x.requires_grad)
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(leaf)
    y.backward(torch.ones_like(y))
    return [y.detach(), leaf.grad, *(p.grad for p in model.parameters())]


def close(a, b, **tolerance):
    for left, right in zip(a, b, strict=True):
        torch.testing.assert_close(left, right, **tolerance)


@pytest.mark.parametrize("input_grad", [True, False])
@pytest.mark.parametrize("cls", list(REGISTER), ids=lambda cls: cls.__name__)
def test_registered_fused_ops_run_and_train(cls, input_grad):
    model = ops.Sequential(ops.Linear(8, 8), ops.GELU(), ops.Linear(8, 4))
    x = torch.randn(5, 8, requires_grad=input_grad)
    wanted = step(model, x)
    cls.calls = 0
    with REGISTER[cls](fuse_linear(cls)) as registration, plans_used() as plans:
        assert registration.name in opfuse.active_rules().names
        close(step(model, x), wanted)
        assert cls.calls == CALLS[cls]
    assert plans[0].opaque
    assert plans[0].fusions.count(registration.name) == 2
    assert registration.name not in opfuse.active_rules().names
    close(step(model, x), wanted, rtol=0, atol=0)
    assert cls.calls == CALLS[cls]


@pytest.mark.parametrize("override", [None, "dequantized", "high_precision"])
@pytest.mark.parametrize("cls", [ForwardOnly, BackwardOnly], ids=lambda cls: cls.__name__)
def test_a_fused_op_takes_over_the_casts_of_its_ops(cls, override):
    recipe = recipes.MXFP8BlockScaling(backward_override=override)
    model, x = ops.Sequential(ops.Linear(32, 64), ops.GELU(), ops.Linear(64, 32)), torch.randn(32, 32, requires_grad=True)
    wanted = step(model, x, recipe)
    cls.calls = 0
    with REGISTER[cls](fuse_linear(cls)):
        close(step(model, x, recipe), wanted, rtol=0, atol=0)
    assert cls.calls == 2


def test_a_fused_op_casts_in_the_compute_dtype_of_torch_autocast():
    model, x = ops.Sequential(ops.Linear(32, 32)), torch.randn(32, 32)
    results = []
    for registration in (None, fuse_linear(ForwardOnly)):
        scope = ops.register_forward_fusion(registration) if registration else torch.no_grad()
        low = torch.autocast(torch.get_default_device().type, torch.bfloat16)
        with scope, torch.no_grad(), low, opfuse.autocast(recipe=recipes.MXFP8BlockScaling()):
            results.append(model(x))
    assert results[0].dtype == torch.bfloat16
    assert torch.equal(*results)


class Spy(ops.FusedOperation):
    """Records what it is given, and what ``ctx.cast`` makes of it."""

    seen = None

    def fuser_forward(self, basic_op_ctxs, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer, **rest):
        x = basic_op_ctxs[0].cast("input", input_)
        weight = basic_op_ctxs[0].cast("weight", self.basic_ops[0].parameter("weight"))
        type(self).seen = (type(input_), type(x), type(weight), prev_op_grad_output_quantizer, next_op_input_quantizer)
        return super().fuser_forward(
            basic_op_ctxs, input_, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None, **rest
        )


def test_neighbour_quantizers_are_none_and_contexts_cast():
    model, x = ops.Sequential(ops.Linear(32, 32), ops.Linear(32, 32)), torch.randn(32, 32)
    with ops.register_forward_fusion(fuse_linear(Spy)):
        with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()):
            model(x)
        assert Spy.seen == (torch.Tensor, QuantizedStorage, QuantizedStorage, None, None)
        model(x)
        assert Spy.seen == (torch.Tensor, torch.Tensor, nn.Parameter, None, None)


class Whole(ops.FusedOperation):
    """Overrides both methods with the default of both: every op must get a context, and its own share of gradients."""

    contexts = ()

    def fuser_forward(self, basic_op_ctxs, input_, **rest):
        return super().fuser_forward(basic_op_ctxs, input_, **rest)

    def fuser_backward(self, basic_op_ctxs, grad_output, **rest):
        type(self).contexts = basic_op_ctxs
        return super().fuser_backward(basic_op_ctxs, grad_output, **rest)


@pytest.mark.parametrize("recipe", [None, recipes.MXFP8BlockScaling()], ids=str)
def test_a_fused_op_over_ops_that_need_no_gradient_and_casts(recipe):
    parts = [ops.ConstantScale(2.0), ops.Quantize(), ops.BasicLinear(32, 32), ops.Bias(32), ops.Quantize(False, True)]
    fused, plain, x = ops.Sequential(Whole(parts)), ops.Sequential(*parts), torch.randn(32, 32)
    close(step(fused, x, recipe), step(plain, x, recipe), rtol=0, atol=0)
    assert len(Whole.contexts) == 5
    assert all(isinstance(context, Context) for context in Whole.contexts)
    assert [context.requires_grad for context in Whole.contexts[:4]] == [False, False, True, True]


def test_a_fused_op_whose_last_op_gets_no_gradient():
    parts, x = [ops.MakeExtraOutput(), ops.BasicLinear(8, 8)], torch.randn(3, 8, requires_grad=True)
    _, extra = ops.Sequential(Whole(parts))(x)
    extra.sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 8))
    assert parts[1].weight.grad is None


def test_a_fused_op_with_extra_tensors_inside():
    parts = [ops.MakeExtraOutput(), ops.BasicLinear(8, 8), ops.AddExtraInput()]
    x, e = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    results = []
    for model in (ops.Sequential(Whole(parts)), ops.Sequential(*parts), Whole(parts)):
        x.grad = e.grad = None
        parts[1].zero_grad()
        y, extra = model(x, e)
        (y.sum() + 2 * extra.sum()).backward()
        results.append([y, extra, x.grad, e.grad, parts[1].weight.grad])
    close(results[0], results[1])
    close(results[2], results[1])


def test_an_extra_output_inside_a_fused_op_gets_the_only_gradient():
    model, x = ops.Sequential(Whole([ops.MakeExtraOutput(), ops.GELU()])), torch.randn(3, requires_grad=True)

    class Tap(Whole):
        def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
            assert grad_output is None
            return basic_op_grad_extra_outputs[0][0], [(), ()], [(), ()]

    model[0] = Tap(model[0].basic_ops)
    model(x)[1].sum().backward()
    assert torch.equal(x.grad, torch.ones(3))


def test_a_fused_op_in_a_sequential():
    linear, bias = ops.BasicLinear(8, 4), ops.Bias(4)
    model, plain, x = (
        ops.Sequential(Both((linear, bias)), ops.ReLU()),
        ops.Sequential(linear, bias, ops.ReLU()),
        torch.randn(5, 8),
    )
    Both.calls = 0
    close(step(model, x), step(plain, x))
    assert Both.calls == 2
    assert [name for name, _ in model.named_parameters()] == ["0.basic_ops.0.weight", "0.basic_ops.1.bias"]
    other = ops.Sequential(ops.Linear(8, 4), ops.ReLU())
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(x), model(x))
    assert list(model.state_dict()) == ["0.basic_ops.0.weight", "0.basic_ops.1.bias"]


def test_a_fused_op_alone():
    fused, x = ForwardOnly((ops.BasicLinear(8, 4), ops.Bias(4))), torch.randn(5, 8)
    ForwardOnly.calls = 0
    torch.testing.assert_close(fused(x), torch.nn.functional.linear(x, fused.basic_ops[0].weight, fused.basic_ops[1].bias))
    assert ForwardOnly.calls == 1


@pytest.mark.parametrize("parts", [(), (nn.Linear(2, 2),), (ops.GELU(), ops.Linear(2, 2))], ids=["none", "torch", "composite"])
def test_a_fused_op_stands_for_basic_ops(parts):
    with pytest.raises(PipelineError, match="at least one BasicOperation"):
        Both(parts)


# -- registration ------------------------------------------------------------------------------------------------------------


def nothing(ops_, *, recipe):
    return ops_


def test_names_prepend_and_scopes():
    names = opfuse.active_rules().names
    with ops.register_forward_fusion(nothing) as first, ops.register_forward_fusion(nothing, prepend=True) as second:
        functions = [f.name for f in opfuse.active_rules().functions]
        assert functions == ["nothing_2", "nothing"]
        assert (first.name, second.name) == ("nothing", "nothing_2")
    third = ops.register_backward_fusion(nothing, name="mine")
    assert "mine" in opfuse.active_rules().names
    third.unregister()
    third.unregister()
    assert opfuse.active_rules().names == names


def test_the_first_registered_function_claims():
    class Other(Both):
        pass

    model, x = ops.Sequential(ops.Linear(8, 4)), torch.randn(3, 8)
    with ops.register_forward_backward_fusion(fuse_linear(Both), name="a"):
        for prepend, winner in ((False, "a"), (True, "b")):
            with ops.register_forward_backward_fusion(fuse_linear(Other), prepend, name="b"), plans_used() as plans:
                model(x)
            loser = next(o for o in plans[0].outcomes if o.rule in "ab" and o.status == "shadowed")
            assert winner in plans[0].fusions
            assert loser.rule == {"a": "b", "b": "a"}[winner]


def test_functions_see_the_recipe_and_the_basic_ops():
    seen = []

    def look(ops_, *, recipe):
        seen.append((recipe, [type(op).__name__ for op in ops_]))
        return ops_

    model, recipe = ops.Sequential(ops.Linear(32, 32), ops.GELU()), recipes.Float8CurrentScaling()
    with ops.register_forward_fusion(look):
        model(torch.randn(32, 32))
        with opfuse.autocast(recipe=recipe):
            model(torch.randn(32, 32))
    assert seen == [(None, ["BasicLinear", "Bias", "GELU"]), (recipe, ["BasicLinear", "Bias", "GELU"])]


def test_functions_are_not_asked_at_level_zero():
    def fail(ops_, *, recipe):
        raise AssertionError("asked")

    rules = opfuse.RuleSet((), level=0)
    with ops.register_forward_fusion(fail):
        ops.Sequential(ops.GELU(), rules=rules)(torch.randn(3))


@pytest.mark.parametrize(
    "result",
    [
        lambda o: None,
        lambda o: 3,
        lambda o: [3],
        lambda o: o[:-1],
        lambda o: o[::-1],
        lambda o: [*o, o[-1]],
        lambda o: [Both([o[1], o[0]]), *o[2:]],
        lambda o: [ops.GELU() for _ in o],
    ],
    ids=["nothing", "a number", "numbers", "one short", "reversed", "one twice", "a fused op out of order", "others"],
)
def test_a_function_with_a_wrong_result(result):
    model = ops.Sequential(ops.Linear(8, 8), ops.GELU())
    with (
        ops.register_forward_fusion(lambda ops_, recipe: result(ops_), name="broken"),
        pytest.raises(FusionError, match=r"'broken': wants a list of ops that stand for the same basic ops"),
    ):
        model(torch.randn(3, 8))


# -- channels inside a fused op ----------------------------------------------------------------------------------------------


def residual_parts(**options):
    tap, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    tap.set_extra_output_channel(0, "h", **options)
    add.set_extra_input_channel(0, "h")
    return [tap, ops.BasicLinear(8, 8), add]


@pytest.mark.parametrize("to_caller", [False, True])
def test_both_ends_of_a_channel_in_one_fused_op(to_caller):
    parts, x = residual_parts(output_to_caller=to_caller), torch.randn(3, 8, requires_grad=True)
    results = []
    for model in (ops.Sequential(Whole(parts)), ops.Sequential(*parts)):
        x.grad = None
        parts[1].zero_grad()
        outputs = model(x)
        outputs = outputs if to_caller else (outputs,)
        sum((i + 1) * y.sum() for i, y in enumerate(outputs)).backward()
        results.append([*outputs, x.grad, parts[1].weight.grad])
    close(*results)


class Hidden(Whole):
    """x + W x in one product; never makes the extra output."""

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **rest):
        assert basic_op_extra_inputs == [(), (), (None,)]
        weight = self.basic_ops[1].parameter("weight")
        basic_op_ctxs[1].save_for_backward(input_, weight)
        return input_ @ (weight.t() + torch.eye(8, device=weight.device)), [(None,), (), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **rest):
        x, weight = basic_op_ctxs[1].saved_tensors
        eye = torch.eye(8, device=weight.device)  # torch's default device is that of a thread
        return grad_output @ (weight + eye), [(), (grad_output.t() @ x,), ()], [(), (), (None,)]


def test_a_fused_op_may_leave_out_an_extra_output_of_its_own():
    parts, x = residual_parts(output_to_caller=False), torch.randn(3, 8, requires_grad=True)
    close(step(ops.Sequential(Hidden(parts)), x), step(ops.Sequential(*parts), x))


@pytest.mark.parametrize("outside", [True, False])
def test_an_extra_output_that_someone_else_reads_must_be_made(outside):
    parts = residual_parts(output_to_caller=not outside)
    reader = ops.AddExtraInput()
    reader.set_extra_input_channel(0, "h")
    model = ops.Sequential(Hidden(parts), *([reader] if outside else []))
    with pytest.raises(FusionError, match="a tensor for every extra output that leaves it") as error:
        model(torch.randn(3, 8))
    assert isinstance(error.value, RuntimeError)


# -- what is written wrongly is told by its method -----------------------------------------------------------------------------


def test_a_method_that_cannot_be_called_is_refused_with_its_class():
    with pytest.raises(PipelineError, match=r"Plain.op_forward: wants .* Cure: write it as op_forward\(self, ctx, x\)"):

        class Plain(ops.BasicOperation):
            def op_forward(self, x):
                return x

    with pytest.raises(PipelineError, match=r"Some.fuser_forward: wants .*next_op_input_quantizer=.* Cure: add [*][*]kwargs"):

        class Some(ops.BasicOperation):
            def fuser_forward(self, basic_op_ctxs, x):
                return x, [()]

    with pytest.raises(
        PipelineError, match=r"Back.op_backward: wants .* Cure: write it as op_backward\(self, ctx, grad_output\)"
    ):

        class Back(ops.BasicOperation):
            def op_backward(self, grad_output):
                return grad_output, ()

    class Own(ops.BasicOperation):  # calls its own methods as it likes
        def op_forward(self, x):
            return x

        def fuser_forward(self, basic_op_ctxs, x, **kwargs):
            return self.op_forward(x), [()]

    x = torch.randn(2, 8)
    assert ops.Sequential(Own())(x).equal(x)


@pytest.mark.parametrize(
    ("forward", "backward", "told"),
    [
        (lambda x: None, lambda dy: (dy, ()), "op_forward: wants a tensor, got None"),
        (lambda x: (x, x), lambda dy: (dy, ()), "op_forward: wants a tensor, got a tuple of Tensor, Tensor"),
        (lambda x: x * 2, lambda dy: dy, "op_backward: wants .*, got a Tensor"),
        (lambda x: x * 2, lambda dy: (dy,), "op_backward: wants .*, got a tuple of Tensor[.]"),
        (lambda x: x * 2, lambda dy: (dy, (), ()), "op_backward: wants .*, got a tuple of Tensor, tuple, tuple"),
        (lambda x: x * 2, lambda dy: (dy, None), "gradients of parameters: wants a tuple of tensors, got None"),
        (lambda x: x * 2, lambda dy: (dy, dy), "gradients of parameters: wants a tuple of tensors, got a Tensor"),
        (lambda x: x * 2, lambda dy: (dy, (1.0,)), "gradients of parameters: wants tensors, or None, got a float"),
        (lambda x: x * 2, lambda dy: (1.0, ()), "gradient of the input: wants a tensor, got a float"),
        (lambda x: x * 2, lambda dy: ((dy,), ()), "gradient of the input: wants a tensor, got a tuple of Tensor"),
    ],
)
def test_a_result_of_another_form_is_refused(forward, backward, told):
    class Wrong(ops.BasicOperation):
        def op_forward(self, ctx, x, **kwargs):
            return forward(x)

        def op_backward(self, ctx, dy):
            return backward(dy)

    with pytest.raises(PipelineError, match=f"{told}.* Cure: return"):
        ops.Sequential(Wrong())(torch.randn(2, 8, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("forward", "backward", "told"),
    [
        (lambda x, n: x, lambda dy, n: dy, "fuser_forward: wants .* a list of extra outputs, .* got a Tensor"),
        (lambda x, n: (x, [None] * n), lambda dy, n: dy, "extra outputs: wants a tuple of tensors, got None"),
        (lambda x, n: (x, [()] * 3), lambda dy, n: dy, "fuser_forward: wants .* an entry for each of .* ops?, "),
        (lambda x, n: (None, [()] * n), lambda dy, n: dy, "fuser_forward: wants a tensor, got None"),
        (lambda x, n: (x, [()] * n), lambda dy, n: dy, "fuser_backward: wants .* gradients of extra inputs, .* got a Tensor"),
        (lambda x, n: (x, [()] * n), lambda dy, n: (dy, [()] * n), "fuser_backward: .* got a tuple of Tensor, list"),
        (lambda x, n: (x, [()] * n), lambda dy, n: (dy, [None] * n, []), "gradients of parameters: .* got None"),
        (lambda x, n: (x, [()] * n), lambda dy, n: (1.0, [], []), "wants a tensor, got .*float"),
    ],
)
def test_a_result_of_another_form_is_refused_of_te_ops_methods(forward, backward, told, fused):
    ops_of = 2 if fused else 1

    class Wrong(ops.FusedOperation if fused else ops.BasicOperation):
        def fuser_forward(self, basic_op_ctxs, x, **kwargs):
            return forward(x, ops_of)

        def fuser_backward(self, basic_op_ctxs, dy, **kwargs):
            return backward(dy, ops_of)

    op = Wrong([ops.GELU(), ops.GELU()]) if fused else Wrong()
    with pytest.raises((PipelineError, FusionError), match=f"Wrong.*{told}.* Cure: return"):
        ops.Sequential(op)(torch.randn(2, 8, requires_grad=True)).sum().backward()


def test_an_elementwise_op_takes_the_extra_inputs_that_its_operands_come_from():
    class Between(ops.PointwiseOperation):
        math = ops.Pointwise(
            "between",
            forward="x + (low - high)",
            backward=("dy",),
            value=lambda x, low, high: x + (low - high),
            grad=lambda dy, x, low, high: (dy,),
            operands={"low": "full", "high": "full"},
        )
        sources = {"low": "extra0", "high": "extra1"}

    class Same(Between):
        sources = {"low": "extra0", "high": "extra0"}

    x, low, high = torch.randn(3, 2, 8)
    assert torch.equal(ops.Sequential(Between(), ops.GELU())(x, low, high), ops.GELU()(x + (low - high)))
    assert (Same.num_extra_inputs, ops.ScaledSwiGLU.num_extra_inputs, ops.Bias.num_extra_inputs) == (1, 1, 0)


def test_an_activation_without_math_is_named():
    class Empty(ops.Activation):
        pass

    with pytest.raises(SpecError, match=r"class Empty: wants its math, got none[.] Cure: write math = ops.formula"):
        Empty()


def test_a_constructor_that_forgot_its_base_is_named():
    class Forgot(ops.BasicOperation):
        def __init__(self):
            self.__dict__["size"] = 8

    with pytest.raises(PipelineError, match=r"class Forgot: .* Cure: call super\(\).__init__\(\) first"):
        ops.Sequential(ops.Linear(8, 8), Forgot())(torch.randn(2, 8))


def test_an_op_with_extra_tensors_returns_all_of_them():
    class Silent(Mixed):
        def op_backward(self, ctx, dy):
            return super().op_backward(ctx, dy)[:2]

    class Single(Mixed):
        def op_forward(self, ctx, x):
            return super().op_forward(ctx, x)[0]

    x = torch.randn(2, 8, requires_grad=True)
    with pytest.raises(PipelineError, match=r"wants .* of the extra inputs, got a tuple of .*[.] Cure: return dx, .*d_extra"):
        ops.Sequential(Silent())(x, x.detach().requires_grad_())[0].sum().backward()
    with pytest.raises(PipelineError, match=r"Single.*outputs: wants 2, got 1"):
        ops.Sequential(Single())(x, x)


def test_te_ops_methods_of_a_builtin_op_do_what_its_own_do():
    """As an op written for te.ops calls its base, or a fused op its parts."""

    class Twice(ops.AddExtraInput):
        def fuser_forward(self, basic_op_ctxs, input_, **given):
            y, extras = super().fuser_forward(basic_op_ctxs, input_, **given)
            return 2 * y, extras

        def fuser_backward(self, basic_op_ctxs, grad_output, **given):
            return super().fuser_backward(basic_op_ctxs, 2 * grad_output, **given)

    x, extra = (torch.randn(2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    model = ops.Sequential(Twice())
    assert torch.equal(model(x, extra), 2 * (x + extra))
    assert torch.autograd.gradcheck(model, (x, extra))


def test_an_op_that_says_it_remakes_its_result_but_does_not_is_named():
    class Promising(ops.BasicOperation):
        kind = "promising"

        def remakes(self, ctx):
            return "saved"

    with pytest.raises(PipelineError, match=r"Promising\(\): wants a method remake, got remakes\(\) says that there is one"):
        Promising().remake([], None)
