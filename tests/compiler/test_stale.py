"""R9: what changes behind a pipeline's back is noticed at the next call, and a miss says in words what has changed."""

from __future__ import annotations

import copy
import logging
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn

import opfuse
from opfuse import ops, recipes
from opfuse.core.watched import WatchedClass, rewritten
from opfuse.errors import SpecError
from opfuse.recipes import CustomRecipe
from opfuse.tensors.quantizers import IdentityQuantizer, MXFP8Quantizer
from tests.compiler.harness import mlp, randn, to

BF16 = torch.bfloat16


def fresh(model, *tensors):
    """What a copy without plans computes."""
    return copy.deepcopy(model)(*tensors)


class Perceptron(ops.BasicOperation):
    """An op around modules of torch, which it differentiates by autograd."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8))

    def op_forward(self, ctx, input_, **_):
        ctx.save_for_backward(input_, *self.parameters())
        return self.inner(input_)

    def op_backward(self, ctx, grad_output):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = self.inner(x)
        dx, *grads = torch.autograd.grad(y, [x, *self.parameters()], grad_output)
        return dx, grads


SWAPS = {
    "the module": lambda op: setattr(op, "inner", nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 8))),
    "one inside": lambda op: op.inner.__setitem__(0, nn.Linear(8, 4)),
    "one inside, by the dictionary": lambda op: op.inner._modules.update({"1": nn.Linear(4, 8)}),
    "one of other names": lambda op: op.inner.append(nn.Linear(8, 8, bias=False)),
    "a parameter added": lambda op: op.inner[1].register_parameter("bias", nn.Parameter(torch.ones(8))),
    "deleted": lambda op: op.inner.__delitem__(1) or op.inner.append(nn.Linear(4, 8)),
}


@pytest.mark.parametrize("swap", SWAPS)
def test_r9_a_replaced_submodule_of_a_users_op_gets_its_gradient(swap):
    op, x = Perceptron(4), torch.randn(3, 8, requires_grad=True)
    model = ops.Sequential(ops.Linear(8, 8), op, ops.GELU())
    model(x).sum().backward()
    SWAPS[swap](op)
    model.zero_grad()
    y = model(x)
    assert torch.equal(y, fresh(model, x))
    y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    misses = model.cache_info().misses
    model(x)
    assert model.cache_info().misses == misses


def test_r9_a_parameter_that_an_op_gets_later_trains():
    class Scaled(ops.BasicOperation):
        def op_forward(self, ctx, input_, **_):
            ctx.save_for_backward(input_)
            return input_ * self.factor if hasattr(self, "factor") else input_ * 1

        def op_backward(self, ctx, grad_output):
            (x,) = ctx.saved_tensors
            has = hasattr(self, "factor")
            return grad_output * (self.factor if has else 1), ((grad_output * x).sum(),) if has else ()

    model, x = ops.Sequential(Scaled()), torch.randn(3, requires_grad=True)
    model(x).sum().backward()
    model[0].factor = nn.Parameter(torch.tensor(2.0))
    model(x).sum().backward()
    assert torch.equal(model[0].factor.grad, x.detach().sum())


REPLACEMENTS = {
    "the dictionary": lambda model, op: model._modules.update({"1": op}),
    "an index": lambda model, op: model.__setitem__(1, op),
    "setattr": lambda model, op: setattr(model, "1", op),
}


@pytest.mark.parametrize("how", REPLACEMENTS)
def test_r9_an_op_replaced_runs_and_is_no_first_plan(how):
    model, x = ops.Sequential(ops.Linear(8, 8), ops.GELU(), ops.Linear(8, 8)), torch.randn(3, 8)
    model(x)
    REPLACEMENTS[how](model, ops.ReLU())
    assert torch.equal(model(x), fresh(model, x))
    assert model.cache_info().last_miss.startswith("ops.1.op: 'GELU()' -> 'ReLU()'")


def test_r9_a_basic_op_of_a_fused_op_replaced_runs():
    class Pair(ops.FusedOperation):
        def fuser_forward(self, *args, **kwargs):
            return super().fuser_forward(*args, **kwargs)

    model, x = ops.Sequential(Pair([ops.BasicLinear(8, 8), ops.Bias(8)])), torch.randn(3, 8)
    model(x)
    model[0]._modules["basic_ops"][0] = ops.BasicLinear(8, 8)
    assert torch.equal(model(x), model[0].basic_ops[0](x))


SQUARE = ops.Pointwise(
    "squared", forward="x * x", backward=("2.0f * dy * x",), value=lambda x: x * x, grad=lambda dy, x: (2 * dy * x,)
)
TWICE = ops.Pointwise("twice", forward="2.0f * x", backward=("2.0f * dy",), value=lambda x: 2 * x, grad=lambda dy, x: (2 * dy,))
SCALED = ops.Pointwise(
    "by",
    forward="x * by",
    backward=("dy * by",),
    value=lambda x, by: x * by,
    grad=lambda dy, x, by: (dy * by,),
    operands={"by": "row"},
    operand_backward={"by": "dy * x"},
    operand_grad=lambda dy, x, by: {"by": dy * x},
)


def test_r9_math_of_a_class_replaced_after_programs_were_recorded(monkeypatch):
    """Objects that are alive and classes below follow; what the class saves follows, too, and all of it comes back."""

    class Mine(ops.Activation):
        math = TWICE

    class Below(Mine):
        pass

    class Own(Mine):
        math = SQUARE

    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    models = [ops.Sequential(made(), ops.Reshape((5,))) for made in (Mine, Below, Own)]
    own = models[0][0]

    def values():
        return [[model(x).detach() for _ in range(4)][-1] for model in models]

    doubled, squared = 2 * x.detach(), x.detach().square()
    assert all(torch.equal(a, b) for a, b in zip(values(), (doubled, doubled, squared)))
    with monkeypatch.context() as patch:
        patch.setattr(Mine, "math", SQUARE)
        assert all(torch.equal(a, squared) for a in values())
        assert all(torch.autograd.gradcheck(model, (x,)) for model in models)
        assert torch.autograd.gradcheck(Below(), (x,))
        own.math = TWICE
        assert torch.equal(own(x), doubled)
        del own.math
    assert all(torch.equal(a, b) for a, b in zip(values(), (doubled, doubled, squared)))
    assert all(torch.autograd.gradcheck(model, (x,)) for model in models)
    Mine.math = SCALED
    assert (Mine.saves, Below.saves, Own.saves) == (("x", "by"), ("x", "by"), ("x",))
    del Own.math
    assert Own.saves == ("x", "by")
    with pytest.raises(SpecError, match=r"class Mine math: wants an ops\.Pointwise, got"):
        Mine.math = torch.relu
    assert Mine.math is SCALED


def doubled_forward(self, ctx, input_, **_):
    ctx.x = input_
    return 2 * input_


def doubled_backward(self, ctx, grad_output):
    return 2 * grad_output, ()


def is_fused(model, x):
    """Whether a rule takes the activation behind a linear layer."""
    return any(" 2:" in str(found) and found.status == "fused" for found in opfuse.explain(model, x).outcomes("forward"))


@pytest.mark.parametrize("before", [False, True], ids=["called after", "called before"])
def test_r9_methods_written_into_a_class_run_in_place_of_its_fusions(before, monkeypatch):
    """In plans and programs that there are as in new ones, and below the class; what is put back fuses again."""

    class Below(ops.GELU):
        pass

    models = [ops.Sequential(ops.Linear(8, 8), act(), ops.Linear(8, 8)) for act in (ops.GELU, Below)]
    x = torch.randn(4, 8)

    def run():
        ys = [[model(x) for _ in range(4)][-1] for model in models]
        for model, y in zip(models, ys):
            model.zero_grad()
            y.sum().backward()
        return [y.detach() for y in ys], [model[0].bias.grad for model in models]

    def fused():
        return [is_fused(model, x) for model in models]

    first = run() if before else None
    with monkeypatch.context() as patch:
        patch.setattr(ops.GELU, "op_forward", doubled_forward)
        patch.setattr(ops.GELU, "op_backward", doubled_backward)
        ys, grads = run()
        for model, y, grad in zip(models, ys, grads):
            assert torch.allclose(y, model[2](2 * model[0](x)), atol=1e-6)
            assert torch.allclose(grad, 2 * 4 * model[2].weight.sum(0), atol=1e-5)
        assert fused() == [False, False]
        assert not before or "revision: 0 -> 2" in models[0].cache_info().last_miss
    assert fused() == [True, True]
    after = run()
    assert first is None or all(torch.equal(a, b) for were, are in zip(first, after) for a, b in zip(were, are))


def test_r9_a_class_that_is_put_together_in_another_process_is_as_it_was():
    """Picklers of classes, as cloudpickle, make an empty class and write all of it into that."""

    class Mine(ops.GELU):
        traits = ops.GELU.traits

        def op_forward(self, ctx, input_, **_):
            return super().op_forward(ctx, input_)

    twin = type(Mine)("Mine", Mine.__bases__, {})
    for name, value in vars(Mine).items():
        setattr(twin, name, value)
    assert rewritten(twin) == rewritten(Mine)
    assert twin().known._replace(word="") == Mine().known._replace(word="")
    twin.op_forward = doubled_forward
    assert rewritten(twin) - rewritten(Mine) == {"op_forward"}
    assert twin().known.traits == frozenset()


def test_r9_words_written_into_a_class_are_heard(monkeypatch):
    """Traits decide what fuses, ``forward`` whether a pipeline takes the op; an attribute of the user's own changes no plan."""
    model, x = ops.Sequential(ops.Linear(8, 8), ops.GELU()), torch.randn(4, 8)
    model(x)
    with monkeypatch.context() as patch:
        patch.setattr(ops.GELU, "traits", frozenset())
        model(x)
        assert model.cache_info().last_miss.startswith("ops.1")
        assert not is_fused(model, x)
    misses = model.cache_info().misses
    monkeypatch.setattr(ops.GELU, "mine", 3, raising=False)
    assert is_fused(model, x)
    assert model.cache_info().misses == misses
    monkeypatch.setattr(ops.GELU, "forward", lambda self, x: x)
    assert torch.equal(model(x), model[0](x))


def test_r9_math_of_one_object():
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)

    class Mine(ops.Activation):
        math = TWICE

    op = Mine()
    assert torch.autograd.gradcheck(op, (x,))
    op.math = SQUARE
    assert torch.equal(op(x), x * x)
    assert torch.autograd.gradcheck(op, (x,))
    assert torch.autograd.gradcheck(ops.Sequential(op, Mine()), (x,))
    assert torch.equal(Mine()(x), 2 * x)
    del op.math
    assert torch.equal(op(x), 2 * x)
    assert torch.autograd.gradcheck(op, (x,))


def test_r9_a_factory_is_asked_again_when_a_region_begins():
    """Of a role with a name, which the key does not show by itself; back in an old state, the old plan is found."""
    low = [True]

    def qfactory(role):
        return MXFP8Quantizer() if low[0] or role.name != "fc" else IdentityQuantizer()

    model, x = to(ops.Sequential(ops.Linear(64, 64)), BF16), randn(32, 64)
    model[0].name = "fc"
    recipe, seen = CustomRecipe(qfactory=qfactory), []
    for low[0] in (True, False, True, False):
        with opfuse.autocast(recipe=recipe):
            seen.append(model(x))
    assert torch.equal(seen[0], seen[2])
    assert torch.equal(seen[1], seen[3])
    assert not torch.equal(seen[0], seen[1])
    assert model.cache_info()[:3] == (2, 2, 2)
    assert model.cache_info().last_miss.startswith("env.recipe.answers: 0 -> 1")


# -- what a miss says --------------------------------------------------------------------------------------------------------


@pytest.mark.row("X01")
def test_x01_a_registered_fusion_is_named():
    def fuse(ops_, *, recipe):
        return ops_

    model, x = to(mlp(), BF16), randn(32, 64)
    model(x)
    with ops.register_forward_fusion(fuse):
        model(x)
    assert "rules.fuse: nothing -> registered" in model.cache_info().last_miss
    with opfuse.use_rules(opfuse.active_rules().without("epilogue")):
        model(x)
    assert model.cache_info().last_miss.startswith("rules.epilogue: registered -> nothing")


@pytest.mark.row("X01")
def test_x01_parameters_are_named_as_in_the_state_dict():
    inner = ops.Sequential({"up": ops.Linear(8, 8), "act": ops.GELU(), "fused": ops.FusedOperation([ops.BasicLinear(8, 8)])})
    x = torch.randn(4, 8)
    inner(x)
    inner.up.bias.requires_grad_(False)
    inner.fused.basic_ops[0].weight.requires_grad_(False)
    inner(x)
    told = [difference.split(":")[0] for difference in inner.cache_info().last_miss.split("; ")]
    assert told == ["inputs.params.up.bias.requires_grad", "inputs.params.fused.basic_ops.0.weight.requires_grad"]
    assert {name.removeprefix("inputs.params.").removesuffix(".requires_grad") for name in told} <= set(inner.state_dict())


@pytest.mark.row("X01")
def test_x01_the_log_names_the_module_once_its_path_is_known(caplog):
    model, x = nn.ModuleDict({"block": nn.ModuleList([ops.Sequential(ops.Linear(8, 8), ops.GELU())])}), torch.randn(4, 8)
    with caplog.at_level(logging.INFO, "opfuse.misses"):
        model["block"][0](x)
        assert "plan miss in ops 0..1 " in caplog.messages[-1]
        list(model.parameters())
        model["block"][0](x[:3])
        assert "plan miss in block.0 ops 0..1 " in caplog.messages[-1]
    assert "env.rows_class: 4 -> 1 (was: 4 rows, now: 3 rows)" in caplog.messages[-1]


@pytest.mark.row("X01")
def test_x01_eval_plans_again_only_what_may_read_it():
    class Own(ops.BasicOperation):
        def op_forward(self, ctx, input_, **_):
            return input_ * (2 if self.training else 3)

    x = torch.randn(4, 8)
    for model, plans in ((mlp(8), 1), (mlp(8).append(ops.Dropout(0.5)), 2), (mlp(8).append(Own()), 2)):
        for _ in range(2):
            model.train()(x)
            model.eval()(x)
        assert model.cache_info().misses == plans
    assert not ops.GELU.reads_training
    assert Own.reads_training
    assert not type("Mine", (ops.Activation,), {"math": ops.GELU.math}).reads_training
    assert type("Mixed", (type("Mixin", (), {"operands": lambda self: {}}), ops.GELU), {}).reads_training


@pytest.mark.row("X01")
def test_x01_functions_may_read_the_mode_of_any_op():
    seen = []

    def look(ops_, *, recipe):
        seen.append(ops_[0].training)
        return ops_

    model, x = ops.Sequential(ops.GELU()), torch.randn(4)
    with ops.register_forward_fusion(look):
        model(x)
        model.eval()(x)
    assert seen == [True, False]
    assert model.cache_info().last_miss.startswith("inputs.training.0: True -> False")


def test_one_op_three_times_is_one_object_with_three_places():
    op, x = ops.Linear(8, 8).double(), torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    model = ops.Sequential(op, op, ops.GELU(), op)
    assert torch.autograd.gradcheck(lambda x, *_: model(x), (x, *model.parameters()), atol=1e-6)
    assert recipes.current_recipe() is None


@pytest.mark.parametrize("recipe", [None, recipes.MXFP8BlockScaling()], ids=["none", "mxfp8"])
def test_helpers_that_fusions_pass_over_run_where_one_object_has_its_own(recipe):
    model = ops.Sequential(ops.RMSNorm(32), ops.Linear(32, 32), ops.ConstantScale(0.5)).bfloat16()
    norm, scale, x = model[0], model[2], randn(32, 32)

    def called() -> torch.Tensor:
        with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            return model(x)

    before = called()
    scale.compute_dtype = lambda env, x: torch.float32
    assert called().dtype == torch.float32
    norm.produce = lambda ctx, x, *, out_dtype=None: type(norm).produce(norm, ctx, x, out_dtype=out_dtype) * 0
    assert torch.equal(called(), model[1].bias.float().expand(32, 32) * 0.5)
    del scale.compute_dtype, norm.produce
    assert torch.equal(called(), before)


def test_what_a_thread_finds_while_a_class_is_written_to_is_soon_forgotten(monkeypatch):
    """It found the class as it was before, and keeps that after the write."""

    class Slow(WeakKeyDictionary):
        def __setitem__(self, kind, found):
            monkeypatch.setattr(ops.GELU, "op_forward", lambda self, ctx, x: x * 0)
            super().__setitem__(kind, found)

    monkeypatch.setattr(WatchedClass, "rewritten", Slow())
    assert "op_forward" not in rewritten(ops.GELU)
    assert "op_forward" in rewritten(ops.GELU)


def test_an_op_of_another_class_is_that_one():
    model, other = (
        to(ops.Sequential(ops.Linear(64, 64), act(), ops.Linear(64, 64)), torch.float32) for act in (ops.GELU, ops.ReLU)
    )
    other.load_state_dict(model.state_dict())
    with opfuse.autocast(recipe=recipes.Float8CurrentScaling()):
        for _ in range(3):
            model(x := torch.ones(32, 64))
        model[1].__class__ = ops.ReLU
        assert torch.equal(model(x), other(x))
