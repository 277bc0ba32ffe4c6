"""Segments with code of the user's own: that code runs at every call, the casts around it are programs, the bits are the same."""

from __future__ import annotations

import copy
import cProfile
import logging
import os
from functools import partial

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import opfuse
from opfuse import ops, recipes
from opfuse.compiler.rules import fusion
from opfuse.runtime.replay.dispatch import interpreted
from opfuse.runtime.replay.replayable import LOOKS, Recorded
from opfuse.tensors.storage import QuantizedStorage
from tests.compiler.harness import CASES, delayed_state, differences, gradient, outcome, randn, recipe_for, to
from tests.programs import casts, plans_of, stretches
from tests.turns import in_turn

pytestmark = pytest.mark.filterwarnings("ignore:autocast region of:opfuse.errors.OpfuseWarning")
BF16, SIZE = torch.bfloat16, 64


class OwnStep(ops.BasicOperation):
    """Twice its input."""

    def op_forward(self, ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    def op_backward(self, ctx, dy):
        return dy * 2, ()


class Product(ops.BasicLinear):
    """A product whose methods are the user's and whose operands are cast around them."""

    roles = ("input", "weight", "grad_output")

    def op_forward(self, ctx, x, **kwargs):
        return super().op_forward(ctx, x, **kwargs)

    def op_backward(self, ctx, dy):
        return super().op_backward(ctx, dy)


class Inherited(ops.BasicLinear):
    """A product whose base casts, inside of the user's method."""

    def op_forward(self, ctx, x, **_):
        return super().op_forward(ctx, x) + 1

    def op_backward(self, ctx, dy):
        return super().op_backward(ctx, dy)


class Numbered(ops.BasicOperation):
    """As te.ops has it."""

    def fuser_forward(self, basic_op_ctxs, input_, **_):
        basic_op_ctxs[0].save_for_backward(input_)
        return input_.square(), [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **_):
        (x,) = basic_op_ctxs[0].saved_tensors
        return 2 * x * grad_output, [()], [()]


class Both(ops.FusedOperation):
    """A fused op that leaves its ops to themselves."""

    def fuser_forward(self, basic_op_ctxs, input_, **given):
        return super().fuser_forward(basic_op_ctxs, input_, **given)


PIPELINES = {
    "own": lambda: [ops.Linear(SIZE, SIZE), OwnStep(), ops.Linear(SIZE, SIZE)],
    "casts": lambda: [ops.RMSNorm(SIZE), Product(SIZE, SIZE), OwnStep(), Product(SIZE, SIZE)],
    "inherited": lambda: [Inherited(SIZE, SIZE), ops.GELU(), Inherited(SIZE, SIZE)],
    "numbered": lambda: [ops.Linear(SIZE, SIZE), Numbered(), ops.Dropout(0.25), Product(SIZE, SIZE)],
    "fused": lambda: [Both([ops.BasicLinear(SIZE, SIZE), OwnStep()]), Product(SIZE, SIZE)],
}


def model_of(*made: torch.nn.Module, dtype: torch.dtype = BF16) -> ops.Sequential:
    return to(ops.Sequential(*made), dtype)


def step(model, call, recipe, *, rows=32, train=True) -> dict[str, torch.Tensor | None]:
    torch.manual_seed(call)
    x = (randn(rows, SIZE, seed=call) * (call + 1)).requires_grad_(train)
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(train), opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x)
    if train:
        y.backward(gradient(y, call))
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return {"y": y.detach().clone(), "x": x.grad, **grads, **delayed_state(model)}


def programs_of(model) -> list[Recorded]:
    """Of casts, and of backward passes."""
    return [*casts(plans_of(model)), *stretches(plans_of(model))]


def compared(model, recipe, *, calls=5, **options) -> None:
    """As interpreted, call by call: bits, or the same error."""
    other = copy.deepcopy(model)
    for call in range(calls):
        got = outcome(partial(step, model, call, recipe, **options))
        with interpreted():
            wanted = outcome(partial(step, other, call, recipe, **options))
        if isinstance(wanted, str):
            assert got == wanted
        else:
            assert differences(got, wanted) == [], call
    assert programs_of(other) == []


@pytest.mark.few(apart=True)
@pytest.mark.parametrize(("pipeline", "name", "override", "train"), in_turn(PIPELINES, CASES, (True, False), of=len(PIPELINES)))
def test_steps_equal_the_interpreter(pipeline, name, override, train):
    model = model_of(*PIPELINES[pipeline]())
    compared(model, recipe_for(name, override), train=train)
    if name != "none":  # else nothing is cast
        assert bool(programs_of(model)) == (pipeline != "own")


# -- ops that do as they please ------------------------------------------------------------------------------------------------


class Plain(ops.BasicOperation):
    """Hands gradients on; ``calls`` counts forward passes."""

    def __init__(self):
        super().__init__()
        self.__dict__["calls"] = 0

    def op_forward(self, ctx, x):
        self.__dict__["calls"] += 1
        return self.made(ctx, x, self.calls)

    def op_backward(self, ctx, dy):
        return dy.reshape(ctx.input_shape).to(ctx.input_dtype), ()


class Same(Plain):
    def made(self, ctx, x, calls):
        return x


class Transposed(Plain):
    """A view, for which a cast finds other strides than the first time."""

    def made(self, ctx, x, calls):
        return x.t().t() if calls % 2 else x.t().contiguous().t()


class WritesInPlace(Plain):
    def made(self, ctx, x, calls):
        return x.mul_(2)


class WritesCopies(Plain):
    """Hands out one buffer, which it writes at each call."""

    buffer = None

    def made(self, ctx, x, calls):
        if self.buffer is None:
            self.__dict__["buffer"] = torch.empty_like(x)
        return self.buffer.copy_(x * calls)


class SavesEverything(Plain):
    def made(self, ctx, x, calls):
        ctx.told, y = f"call {calls}", x + calls
        ctx.save_for_backward(x, None, y, torch.arange(calls), y.t())
        return y

    def op_backward(self, ctx, dy):
        x, nothing, y, numbers, turned = ctx.saved_tensors
        assert nothing is None
        assert ctx.told == f"call {len(numbers)}"
        return dy * (x + y + turned.t()).sign() * len(numbers), ()


class Raises(Plain):
    def made(self, ctx, x, calls):
        if calls == 4:
            raise RuntimeError("not this time")
        return x + 1


class RaisesLater(Plain):
    def made(self, ctx, x, calls):
        ctx.broken = calls == 4
        return x + 1

    def op_backward(self, ctx, dy):
        if ctx.broken:
            raise RuntimeError("not this gradient")
        return dy, ()


GLOBAL = {"scale": 1.0}


class ReadsGlobals(Plain):
    def made(self, ctx, x, calls):
        GLOBAL["scale"] = 1.0 / calls
        return x * GLOBAL["scale"]


class Differentiates(Plain):
    """Autograd inside, whose graph its result carries."""

    def made(self, ctx, x, calls):
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = leaf.square()
            (twice,) = torch.autograd.grad(y.sum(), leaf, retain_graph=True)
        return y + twice


class SelectsRows(Plain):
    """As many rows as its values say, so that the looks behind it never end."""

    def made(self, ctx, x, calls):
        return torch.nn.functional.pad(x, (0, 0, 0, 16 * (int(x.float().abs().sum()) % 3)))

    def op_backward(self, ctx, dy):
        return dy[: ctx.input_shape[0]].contiguous(), ()


class ChangesDtype(Plain):
    def made(self, ctx, x, calls):
        return x.float() if calls % 3 else x


class Strided(Plain):
    def made(self, ctx, x, calls):
        return torch.cat([x, x], 1)[:, :SIZE] if calls % 2 else x + 0


class UsesModes(Plain):
    def made(self, ctx, x, calls):
        with FlopCounterMode(display=False), torch.autocast(x.device.type, dtype=BF16):
            return torch.vmap(torch.sin)(x)


class Draws(Plain):
    def made(self, ctx, x, calls):
        return x * torch.rand_like(x)


class CallsAPipeline(Plain):
    inner = None

    def made(self, ctx, x, calls):
        if self.inner is None:
            self.__dict__["inner"] = model_of(Product(SIZE, SIZE))
        with torch.no_grad():
            return self.inner(x)


class ChangesTheWeight(Plain):
    """Writes the weight of the op behind it, which is cast when its turn comes."""

    neighbour = None

    def made(self, ctx, x, calls):
        if self.neighbour is not None:
            self.neighbour.weight.data.mul_(1.5)
        return x + 1


ODD = [
    Same, Transposed, WritesInPlace, WritesCopies, SavesEverything, Raises, RaisesLater, ReadsGlobals, Differentiates,
    SelectsRows, ChangesDtype, Strided, UsesModes, Draws, CallsAPipeline, ChangesTheWeight,
]  # fmt: skip


@pytest.mark.few(apart=True)
@pytest.mark.parametrize(("odd", "recipe", "alone"), in_turn(ODD, ("none", "delayed", "fp8_current"), (True, False), of=4))
def test_an_op_that_does_as_it_pleases(odd, recipe, alone):
    """Behind a program, and before a cast of the library, which must see what the op made in this call."""
    op, behind = odd(), Product(SIZE, SIZE)
    model = model_of(op, behind) if alone else model_of(ops.Linear(SIZE, SIZE), op, behind, ops.Linear(SIZE, SIZE))
    if odd is ChangesTheWeight:
        op.__dict__["neighbour"] = behind
    compared(model, recipe_for(recipe), calls=7)
    assert op.calls == 7


class Counting(TorchDispatchMode):
    ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops += 1
        return func(*args, **(kwargs or {}))


class Within(Inherited):
    """Has casts made by the way: where a mode of its own looks on, and where autograd follows."""

    def op_forward(self, ctx, x, **kwargs):
        with Counting() as counted:  # which sees every op, those that a program leaves out among them
            ctx.cast("input", randn(SIZE, SIZE).t()[:32])
        with torch.enable_grad():
            followed = ctx.cast("input", self.weight)
        parts = followed.tensors() if isinstance(followed, QuantizedStorage) else (followed,)
        factor = counted.ops + sum(part.requires_grad for part in parts)
        y = super().op_forward(ctx, x, **kwargs).mul_(factor)
        return y.view(-1, 2, SIZE // 2).transpose(0, 1).contiguous().view(y.shape)


@pytest.mark.few(apart=True)
@pytest.mark.parametrize(("name", "override"), [CASES[0], *in_turn(CASES[1:], of=2)])
def test_methods_between_casts_of_their_own_segment(name, override):
    compared(model_of(ops.Linear(SIZE, SIZE), Within(SIZE, SIZE), OwnStep()), recipe_for(name, override))


class Dtyped(Product):
    """What its casts ask of it is the user's code as well, and follows a switch."""

    dtype = BF16

    def compute_dtype(self, env, x):
        return Dtyped.dtype


def test_casts_that_ask_code_of_the_users_own_are_interpreted():
    model, recipe = model_of(Dtyped(SIZE, SIZE), dtype=torch.float32), recipe_for("fp8_current")
    for call, dtype in enumerate((BF16, BF16, BF16, torch.float32, torch.float32)):
        Dtyped.dtype = dtype
        x = randn(32, SIZE, seed=call, dtype=torch.float32)
        with torch.no_grad(), opfuse.autocast(recipe=recipe):
            got = model(x)
            with interpreted():
                assert torch.equal(got, model(x))
        assert got.dtype == dtype
    assert programs_of(model) == []


def test_a_rule_of_the_users_own_runs_at_every_call():
    calls = []

    def doubled(x, *, linear, own):
        calls.append(1)
        return own.op.op_forward(own, linear.op.op_forward(linear, x))

    rule = fusion("own_rule", "linear=basic_linear own=own_step", forward=doubled)
    model = model_of(ops.Linear(SIZE, SIZE, bias=False), OwnStep())
    with opfuse.register_fusion(rule, prepend=True):
        compared(model, recipe_for("fp8_current"))
    assert len(calls) == 10
    assert programs_of(model)


@pytest.mark.parametrize("name", ["delayed", "mxfp8"])
def test_casts_see_what_the_interpreter_shows_checkpoints_and_hooks(name):
    model, recipe = model_of(*PIPELINES["casts"]()), recipe_for(name)
    other = copy.deepcopy(model)
    for call in range(5):
        found = []
        for each in (model, other):
            x = randn(32, SIZE, seed=call).requires_grad_()
            with (
                interpreted() if each is other else saved_tensors_hooks(torch.clone, torch.clone),
                opfuse.autocast(recipe=recipe),
            ):
                y = opfuse.checkpoint(each, x) if call % 2 else each(x)
            y.backward(gradient(y, 0))
            found.append({"y": y.detach(), "x": x.grad, **delayed_state(each)})
        assert differences(*found) == []


def test_writes_between_the_passes_are_noticed_and_a_graph_runs_twice():
    model, recipe = model_of(*PIPELINES["casts"]()), recipe_for("fp8_current")
    for call in range(4):
        step(model, call, recipe)
    x = randn(32, SIZE).requires_grad_()
    with opfuse.autocast(recipe=recipe):
        y = model(x)
    first, second = (torch.autograd.grad(y, x, gradient(y, 0), retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    with pytest.raises(opfuse.errors.UnsupportedError, match="double backward"):
        torch.autograd.grad(y, x, gradient(y, 0), create_graph=True)
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(opfuse.errors.SavedTensorError):
        y.backward(gradient(y, 0))


def test_looks_that_never_end_keep_few_programs():
    model = model_of(Product(SIZE, SIZE))
    for rows in range(1, 2 * LOOKS):
        for _ in range(2):
            with torch.no_grad(), opfuse.autocast(recipe=recipes.Float8CurrentScaling()):
                model(randn(rows, SIZE))
    plans = [plan for run in model.runs() for _, plan in run.cache.items()]
    assert all(len(looks) <= LOOKS for plan in plans for looks in plan.programs.values())


# -- what it costs, and what is told -----------------------------------------------------------------------------------------


def python_calls(model, recipe, *, train=True) -> int:
    """Functions of the library that Python calls in a step, of training with the backward pass on this thread."""
    with torch.autograd.set_multithreading_enabled(False), torch.set_grad_enabled(train):
        for call in range(5):  # from the fifth on nothing is recorded, and what is saved has its places
            step(model, call, recipe, train=train)
        x = randn(32, SIZE).requires_grad_(train)
        with cProfile.Profile() as profile, opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x)
            if train:
                y.backward(y.detach())
    code = (entry for entry in profile.getstats() if not isinstance(entry.code, str))
    return sum(entry.callcount for entry in code if entry.code.co_filename.startswith(os.path.dirname(opfuse.__file__)))


@pytest.mark.cpu
@pytest.mark.parametrize(("pipeline", "name"), [("own", "none"), ("casts", "fp8_current"), ("inherited", "fp8_current")])
def test_python_calls_of_a_step(pipeline, name):
    model, recipe = model_of(*PIPELINES[pipeline]()), recipe_for(name)
    calls = python_calls(model, recipe)
    with interpreted():
        assert calls < 0.85 * python_calls(model, recipe)


@pytest.mark.cpu
def test_python_calls_of_an_op_of_ones_own():
    """Beside its own, those of an autograd node."""
    assert python_calls(model_of(OwnStep()), None) < 250


def test_the_log_and_the_explanation_say_what_runs_at_every_call_and_why(caplog):
    caplog.set_level(logging.INFO, logger="opfuse.programs")
    model = model_of(ops.Linear(SIZE, SIZE), OwnStep(), ops.Linear(SIZE, SIZE))
    told = opfuse.explain(model, randn(32, SIZE))
    assert "runs at every call\n    OwnStep() has code of the user's own" in str(told)
    assert "OwnStep() has code of the user's own" in told.details()
    assert told.to_dict()["pipelines"][0]["runs_at_every_call"] == {"2:own_step": "OwnStep() has code of the user's own"}
    assert "runs at every call, since OwnStep() has code of the user's own" in caplog.text
    assert "runs at every call" not in str(opfuse.explain(model_of(ops.Linear(SIZE, SIZE)), randn(32, SIZE)))


# -- methods that are written later --------------------------------------------------------------------------------------------


def late(self, ctx, x):
    return x * 3


def test_a_method_that_is_written_later_is_called_as_it_can_be(monkeypatch):
    """Into the class, one of its bases, a mixin that no metaclass sees, or the object, with other keywords than the first had."""

    class Mixin:
        def op_forward(self, ctx, x, **_):
            return x * 2

        def op_backward(self, ctx, dy):
            return dy, ()

    class Mixed(Mixin, ops.BasicOperation):
        pass

    class Derived(Mixed):
        pass

    x = randn(2, 4)
    for place in (Mixin, Mixed, Derived):
        op = Derived()
        assert torch.equal(op(x), x * 2)
        with monkeypatch.context() as patch:
            patch.setattr(place, "op_forward", late, raising=False)
            assert torch.equal(op(x), x * 3)
        assert torch.equal(op(x), x * 2)
    op = Derived()
    op.op_forward = lambda ctx, x: x * 4
    assert torch.equal(op(x), x * 4)
