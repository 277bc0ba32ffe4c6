"""A pass that is all the library's is a program, whatever runs in the other one or before it: bits, and what it depends on."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import nullcontext
from functools import partial

import pytest
import torch

import opfuse
from opfuse import ops, recipes
from opfuse.compiler.graph import BACKWARD, FORWARD
from opfuse.compiler.rules import fusion
from opfuse.core.context import Context
from opfuse.runtime.replay.dispatch import interpreted
from opfuse.tensors.quantizers import Float8CurrentScalingQuantizer
from tests.compiler.harness import CASES, differences, gradient, randn, recipe_for
from tests.programs import backwards, plans_of, under
from tests.runtime.test_stepped import SIZE, compared, model_of, python_calls, step
from tests.turns import in_turn

RULE, PAIR = "linear=basic_linear bias=bias gelu=gelu", "bias=bias gelu=gelu"
GROUP = ["BasicLinear", "Bias", "GELU"]


class Whole(ops.FusedOperation):
    """A fused op that runs its ops forward, and leaves the backward pass to them."""

    def fuser_forward(self, basic_op_ctxs, input_, **given):
        return super().fuser_forward(basic_op_ctxs, input_, **given)


def by_function(made, *, recipe):
    """``Whole`` in place of a product with its bias and its activation."""
    made, found = list(made), []
    while made:
        taken = made[:3] if [type(op).__name__ for op in made[:3]] == GROUP else made[:1]
        found += [Whole(taken)] if len(taken) > 1 else taken
        del made[: len(taken)]
    return found


def forward(x, *, linear, bias, gelu):
    """The ops, one by one."""
    return pair_forward(linear.op.op_forward(linear, x), bias=bias, gelu=gelu)


def pair_forward(x, *, bias, gelu):
    return gelu.op.op_forward(gelu, bias.op.op_forward(bias, x))


def pair_backward(dy, *, bias, gelu):
    dy, _ = gelu.op.op_backward(gelu, dy)
    dy, grads, *_ = bias.op.op_backward(bias, dy)
    bias.set_grads(params=grads)
    return dy


class Twice(Float8CurrentScalingQuantizer):
    """Casts twice the values."""

    def quantize(self, x):
        return super().quantize(2 * x)


def own_recipe(role, kind=Twice):
    """Current scaling, but that code of the user's own casts a role."""
    base, made = recipe_for("fp8_current"), {}

    def quantizer(asked):
        if asked not in made:
            ours = base.quantizer(asked)
            made[asked] = kind(ours.fp8_dtype) if asked.tensor_type == role else ours
        return made[asked]

    return recipes.CustomRecipe(qfactory=quantizer)


def rule(pattern, **sides):
    return partial(opfuse.register_fusion, fusion("own_rule", pattern, **sides), prepend=True)


SCOPES = {
    "rule forward": rule(RULE, forward=forward),
    "rule backward": rule(PAIR, backward=pair_backward),
    "rule": rule(PAIR, forward=pair_forward, backward=pair_backward),
    "fused op": partial(opfuse.ops.register_forward_fusion, by_function),
}
ROLES = ("weight", "input", "grad_output")
REPEATED = {
    "rule forward": {BACKWARD}, "rule": set(), "fused op": {BACKWARD},
    "rule backward": {FORWARD}, "weight": {FORWARD, BACKWARD}, "input": {FORWARD, BACKWARD}, "grad_output": {FORWARD},
}  # fmt: skip
"""Code of the user's own, and the passes that are programs beside it."""


def first_half():
    """All that is in a segment with that code, under rules."""
    return model_of(ops.Linear(SIZE, SIZE), ops.GELU())


def recipe_of(kind, name="fp8_current", override=None):
    return own_recipe(kind) if kind in ROLES else recipe_for(name, override)


def repeated(model):
    """The passes of which there is a program, of segments with code of the user's own."""
    found = set()
    for plan in plans_of(model):
        for segment in (segment for segment in plan.segments if segment.user_code.why):
            start = segment.nodes.start
            whole = under(plan, start)
            uncut = len(segment.user_code.backward) == 1
            back = [*backwards(*whole), *(under(plan, (start, BACKWARD, 0)) if uncut else ())]
            found |= {FORWARD for _ in whole} | {BACKWARD for _ in back}
    return found


@pytest.mark.few(apart=True)
@pytest.mark.parametrize(("kind", "name", "override"), [*in_turn(SCOPES, CASES, of=5), *((role, "", None) for role in ROLES)])
def test_the_other_pass_is_a_program_with_the_bits_of_the_interpreter(kind, name, override):
    model = first_half()
    with SCOPES.get(kind, nullcontext)():
        compared(model, recipe_of(kind, name, override), calls=5)
    assert repeated(model) == REPEATED[kind]


def test_forward_passes_before_gradients_that_are_added_to_the_callers_tensors():
    wanted = None
    for repeats in (False, True):
        torch.manual_seed(0)
        model = model_of(ops.Linear(SIZE, SIZE, bias=False, accumulate_into_main_grad=True), ops.GELU())
        weight = model[0].weight
        weight.main_grad = torch.zeros(SIZE, SIZE)
        found = []
        for call in range(5):
            with nullcontext() if repeats else interpreted():
                found += [step(model, call, recipe_for("fp8_current"))["y"], weight.main_grad.clone()]
        assert repeated(model) == ({FORWARD} if repeats else set())
        assert wanted is None or all(map(torch.equal, found, wanted))
        wanted = found


# -- what a backward pass depends on -------------------------------------------------------------------------------------------


def odd(leave):
    """A rule that leaves something else in every second call of a pipeline."""
    calls = Counter()

    def odd_forward(x, *, linear, bias, gelu):
        y = forward(x, linear=linear, bias=bias, gelu=gelu)
        calls[id(linear.op)] += 1
        leave(linear, bias, gelu, calls[id(linear.op)] % 2)
        return y

    return rule(RULE, forward=odd_forward)()


def test_a_backward_pass_follows_what_the_rule_has_left_in_this_call():
    def leave(linear, bias, gelu, turn):
        bias.io_dtype = torch.float16 if turn else torch.bfloat16  # in which the chain is derived and rounded

    model = first_half()
    with odd(leave):
        compared(model, recipe_for("none"), calls=8)
        assert repeated(model) == {BACKWARD}
        assert differences(*(step(model, 1, None) for _ in range(2)))


def test_a_backward_pass_is_interpreted_where_the_rule_leaves_more_than_plain_values():
    def leave(linear, bias, gelu, turn):
        gelu.mine = {"turn": turn}

    model = first_half()
    with odd(leave):
        compared(model, recipe_for("fp8_current"), calls=6)
    assert repeated(model) == set()


@pytest.mark.parametrize("other", [1, True, "1", 1.0, None, (1,), [1], torch.int8])
def test_values_that_compare_equal_and_differ_are_told_apart(other):
    told = []
    for value in (1, other, other):
        context = Context(ops.GELU(), None, frozenset())
        context.mine = value
        told.append(context.fingerprint())
    assert told[1] == told[2]
    assert (told[0] == told[1]) == (type(other) is int)


def test_writes_between_the_passes_are_noticed_and_a_graph_runs_twice():
    model, recipe = first_half(), recipe_for("fp8_current")
    with SCOPES["rule forward"](), opfuse.autocast(recipe=recipe):
        for call in range(4):
            step(model, call, recipe)
        x = randn(32, SIZE).requires_grad_()
        y = model(x)
        first, second = (torch.autograd.grad(y, x, gradient(y, 0), retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, second)
        with torch.no_grad():
            model[0].weight.add_(1)
        y.backward(gradient(y, 0))  # the weight was saved as a cast
        y = model(x * 2)
        with torch.no_grad():
            y.grad_fn.saved_tensors[0].zero_()
        with pytest.raises(opfuse.errors.SavedTensorError):
            y.backward(gradient(y, 0))


# -- casts before a segment ----------------------------------------------------------------------------------------------------


class Odd(Float8CurrentScalingQuantizer):
    """A quantizer that does as it pleases, by the number of the call."""

    def quantize(self, x):
        return self.made(x, torch.initial_seed())


class Draws(Odd):
    def made(self, x, call):
        return super(Odd, self).quantize(x + torch.rand_like(x))


class LeavesPlanesOut(Odd):
    """A product then derives the columnwise one."""

    def made(self, x, call):
        made = super(Odd, self).quantize(x)
        return made if call % 2 else made.only("rowwise", why="it is an odd one")


class Reuses(Odd):
    """Casts into the same memory at each call."""

    buffers = {}

    def made(self, x, call):
        made = super(Odd, self).quantize(x)
        kept = self.buffers.setdefault((id(self), made.usages), made)
        for one, other in zip(kept.tensors(), made.tensors()):
            one.copy_(other)
        return kept


class RaisesAtTimes(Odd):
    def made(self, x, call):
        if call == 4:
            raise RuntimeError("not this time")
        return super(Odd, self).quantize(x)


@pytest.mark.few
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(("odd", "role"), in_turn([Draws, LeavesPlanesOut, Reuses, RaisesAtTimes], ["weight", "input"], of=2))
def test_a_quantizer_that_does_as_it_pleases(odd, role, train):
    model = model_of(ops.Linear(SIZE, SIZE), ops.Dropout(0.25), ops.GELU(), ops.Linear(SIZE, SIZE))
    compared(model, own_recipe(role, odd), calls=7, train=train)
    assert FORWARD in repeated(model)


class Same(Float8CurrentScalingQuantizer):
    """The library's cast, by code that it does not know."""

    def quantize(self, x):
        return super().quantize(x)


@pytest.mark.few
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("first", [lambda: ops.RMSNorm(SIZE), lambda: ops.Linear(SIZE, SIZE), ops.SReLU])
def test_a_cast_by_a_users_quantizer_begins_a_segment(first, train):
    """Whatever makes the tensor: built-in rules leave such a cast alone, and have the bits that they have with their own."""
    model = model_of(first(), ops.GELU(), ops.Linear(SIZE, SIZE))
    other, recipe = copy.deepcopy(model), own_recipe("input", Same)
    for call in range(6):
        wanted = step(other, call, recipe_for("fp8_current"), train=train)
        assert differences(step(model, call, recipe, train=train), wanted) == []
    assert repeated(model) == ({FORWARD, BACKWARD} if train else {FORWARD})
    assert set(casting_groups(model)) == {1}
    assert max(casting_groups(other)) > 1


def casting_groups(model):
    """How many nodes run with each cast of an input."""
    plans = [plan for run in model.runs() for _, plan in run.cache.items()]
    groups = [(plan.graph.nodes, group.nodes) for plan in plans for segment in plan.segments for group in segment.forward]
    return [len(taken) for nodes, taken in groups if any(nodes[i].is_cast and not nodes[i].side for i in taken)]


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("kind", "most"), [("rule forward", 0.4), ("fused op", 0.45), ("weight", 0.2), ("input", 0.2), ("grad_output", 0.3)]
)
def test_python_calls_of_a_step(kind, most):
    """Of two products with an activation between them, by what the interpreter takes."""
    model, recipe = model_of(ops.Linear(SIZE, SIZE), ops.GELU(), ops.Linear(SIZE, SIZE)), recipe_of(kind)
    with SCOPES.get(kind, nullcontext)():
        for call in range(4):
            step(model, call, recipe)
        calls = python_calls(model, recipe)
        with interpreted():
            assert calls < most * python_calls(model, recipe)


def test_the_explanation_says_in_which_pass():
    with SCOPES["rule forward"]():
        told = opfuse.explain(first_half(), randn(32, SIZE))
    assert "runs at every call\n    forward: the rule own_rule is the user's own" in str(told)
