"""A backward pass around casts by the user's own code: these run once a call, in their place; all between is programs."""

from __future__ import annotations

import copy
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

import opfuse
from opfuse import ops, recipes
from opfuse.recipes.custom import DelayedScalingRequest
from opfuse.runtime.replay import replayable
from opfuse.runtime.replay.dispatch import interpreted
from opfuse.tensors.quantizers import Float8CurrentScalingQuantizer
from tests.compiler.harness import CASES, differences, gradient, outcome, randn, recipe_for
from tests.programs import plans_of, stretches
from tests.runtime.test_passes import Draws, LeavesPlanesOut, Odd, RaisesAtTimes, Reuses, Twice, own_recipe
from tests.runtime.test_stepped import SIZE, OwnStep, Product, compared, model_of, step
from tests.turns import in_turn

PIPELINES = {
    "two": lambda: [ops.Linear(SIZE, SIZE), ops.GELU(), ops.Linear(SIZE, SIZE)],
    "gated": lambda: [ops.RMSNorm(SIZE), ops.Linear(SIZE, 2 * SIZE), ops.SwiGLU(), ops.Dropout(0.25), ops.Linear(SIZE, SIZE)],
    "skip": lambda: [ops.MakeExtraOutput(), ops.Linear(SIZE, SIZE), ops.GELU(), ops.AddExtraInput(), ops.Linear(SIZE, SIZE)],
    "ops": lambda: [Product(SIZE, SIZE), OwnStep(), ops.GELU(), ops.Linear(SIZE, SIZE)],
}


def made(name):
    model = model_of(*PIPELINES[name]())
    if name == "skip":
        model[0].set_extra_output_channel(0, "skip", output_to_caller=False)
        model[3].set_extra_input_channel(0, "skip")
    return model


def stretches_of(model):
    """The programs between casts by the user's own code."""
    return stretches(plans_of(model))


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_all_but_the_cast_is_repeated(pipeline):
    model = made(pipeline)
    compared(model, own_recipe("grad_output", Twice))
    assert stretches_of(model)


def by_own_code(quantizer):
    """The same cast, by code that the library does not know."""

    class Own(type(quantizer)):
        def quantize(self, x, **options):
            return super().quantize(x, **options)

    found = copy.copy(quantizer)
    object.__setattr__(found, "__class__", Own)
    return found


@pytest.mark.few(apart=True)
@pytest.mark.parametrize(("pipeline", "name", "override"), in_turn(PIPELINES, CASES[2:], of=6))
def test_beside_every_recipe(pipeline, name, override):
    model, base, known = made(pipeline), recipe_for(name, override), {}

    def quantizer(role):
        if role not in known:
            known[role] = by_own_code(base.quantizer(role)) if role.is_gradient else base.quantizer(role)
        return known[role]

    compared(model, recipes.CustomRecipe(qfactory=quantizer, backward_override=override))
    assert override or stretches_of(model)


def test_beside_gradients_that_are_added_to_the_callers_tensors():
    found = []
    for repeats in (True, False):
        torch.manual_seed(0)
        model, sums = model_of(ops.Linear(SIZE, SIZE, accumulate_into_main_grad=True), ops.GELU(), ops.Linear(SIZE, SIZE)), []
        model[0].weight.main_grad, recipe = torch.zeros(SIZE, SIZE), own_recipe("grad_output", Twice)
        for call in range(6):
            with nullcontext() if repeats else interpreted():
                got = step(model, call, recipe)
            sums.append(got | {"main_grad": model[0].weight.main_grad.clone()})
        found.append(sums)
        assert bool(stretches_of(model)) == repeats
    for one, other in zip(*found, strict=True):
        assert differences(one, other) == []


def test_beside_delayed_scales():
    """Of operands, whose histories the forward pass counts, and of other gradients."""
    known = {}

    def quantizer(role):
        own = role.is_gradient and role.name == "own"
        return known.setdefault(role, Twice(torch.float8_e4m3fn) if own else DelayedScalingRequest(amax_history_len=3))

    model = model_of(ops.Linear(SIZE, SIZE), ops.GELU(), ops.Linear(SIZE, SIZE), ops.Linear(SIZE, SIZE))
    model[2].name = "own"
    compared(model, recipes.CustomRecipe(qfactory=quantizer), calls=7)
    assert stretches_of(model)


# -- casts that do as they please ----------------------------------------------------------------------------------------------


class Keeps(Odd):
    """Keeps what it is given and what it makes, as they are then and later."""

    def made(self, x, call):
        made = super(Odd, self).quantize(x)
        KEPT.append((x, x.clone(), made))
        return made


class WritesInPlace(Odd):
    """What was given is read elsewhere, as for the gradient of a bias."""

    def made(self, x, call):
        return super(Odd, self).quantize(x.mul_(2))


class OtherFormat(Odd):
    def made(self, x, call):
        return Float8CurrentScalingQuantizer(torch.float8_e4m3fn if call % 3 else torch.float8_e5m2).quantize(x)


class OtherLayout(Odd):
    def made(self, x, call):
        made = super(Odd, self).quantize(x)
        return made.with_tensors([each.t().contiguous().t() if each.dim() == 2 else each for each in made.tensors()])


class OtherShape(Odd):
    def made(self, x, call):
        return super(Odd, self).quantize(x if call % 3 else x[:16])


class OtherType(Odd):
    def made(self, x, call):
        return (super(Odd, self).quantize(x), x, None, "x")[max(call - 2, 0) % 4]


class Steps(Odd):
    """Has a state, and tells the order of its calls."""

    def made(self, x, call):
        CALLS.append((call, tuple(x.shape)))
        return super(Odd, self).quantize(x * len(CALLS))


class Differentiates(Odd):
    def made(self, x, call):
        with torch.enable_grad():
            scale = torch.ones((), requires_grad=True)
            (grad,) = torch.autograd.grad((x.float() * scale).square().sum(), scale)
        return super(Odd, self).quantize(x * grad.to(x.dtype).clamp(0.5, 2))


class UsesModes(Odd):
    def made(self, x, call):
        with FlopCounterMode(display=False):
            return super(Odd, self).quantize(x)


class ChangesWeights(Odd):
    """That of a product behind it is saved as it was cast, and its gradient sees another number of writes."""

    def made(self, x, call):
        if WEIGHTS:
            WEIGHTS[0].data.mul_(1.5)
        return super(Odd, self).quantize(x)


KEPT, CALLS, WEIGHTS = [], [], []
ODD = [
    Draws, LeavesPlanesOut, Reuses, RaisesAtTimes, Keeps, WritesInPlace, OtherFormat, OtherLayout, OtherShape, OtherType, Steps,
    Differentiates, UsesModes, ChangesWeights,
]  # fmt: skip


@pytest.mark.parametrize(("odd", "pipeline"), in_turn(ODD, ["two", "gated"], of=2))
def test_a_cast_that_does_as_it_pleases(odd, pipeline):
    models, recipe = [made(pipeline)], own_recipe("grad_output", odd)
    models.append(copy.deepcopy(models[0]))
    seen = []
    for model in models:
        CALLS.clear()
        KEPT.clear()
        Reuses.buffers.clear()
        WEIGHTS[:] = [model[-1].weight]
        with nullcontext() if model is models[0] else interpreted():
            found = [outcome(partial(step, model, call, recipe)) for call in range(7)]
        assert all(torch.equal(given, then) for given, then, _ in KEPT)
        told = [{"given": x, **dict(enumerate(made.tensors()))} for x, _, made in KEPT]
        seen.append((found, [*CALLS], told))
    (found, calls, kept), (wanted, wanted_calls, wanted_kept) = seen
    for got, each in zip([*found, *kept], [*wanted, *wanted_kept], strict=True):
        assert got == each if isinstance(each, str) else differences(got, each) == []
    assert calls == wanted_calls
    assert len(calls) == (14 if odd is Steps else 0)
    assert stretches_of(models[0])


# -- what is around a call -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant):
    model, recipe = made("gated"), own_recipe("grad_output", Twice)
    other = copy.deepcopy(model)
    for call in range(5):
        found = []
        for each in (model, other):
            torch.manual_seed(call)
            x = randn(32, SIZE, seed=call).requires_grad_()
            with interpreted() if each is other else nullcontext(), opfuse.autocast(recipe=recipe):
                y = opfuse.checkpoint(each, x, use_reentrant=reentrant)
            each.zero_grad()
            y.backward(gradient(y, 0))
            found.append({"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in each.named_parameters()})
        assert differences(*found) == []
    assert reentrant or stretches_of(model)  # a call in a reentrant one is interpreted


def test_writes_between_the_passes_are_noticed_and_a_graph_runs_twice():
    model, recipe = made("two"), own_recipe("grad_output", Twice)
    for call in range(5):
        step(model, call, recipe)
    assert stretches_of(model)
    x = randn(32, SIZE).requires_grad_()
    with opfuse.autocast(recipe=recipe):
        y = model(x)
    first, second = (torch.autograd.grad(y, x, gradient(y, 0), retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    with torch.no_grad():
        y.grad_fn.saved_tensors[0].zero_()
    with pytest.raises(opfuse.errors.SavedTensorError):
        y.backward(gradient(y, 0))


def test_saved_tensors_are_let_go_as_they_are_read():
    """As the interpreter does: what a stretch has read is gone when the cast behind it runs."""
    alive, refs = [], []

    class Looks(Float8CurrentScalingQuantizer):
        def quantize(self, x):
            alive.append(sum(ref() is not None for ref in refs))
            return super().quantize(x)

    def noted(x):
        refs.append(weakref.ref(x))
        return x

    def unpacked(x):
        return x

    model, recipe, seen = made("two"), own_recipe("grad_output", Looks), []
    for call in range(5):
        with interpreted() if call == 0 else nullcontext(), saved_tensors_hooks(noted, unpacked):
            alive.clear()
            refs.clear()
            step(model, call, recipe)
            seen.append([*alive])
    assert stretches_of(model)
    assert seen[0][0] > seen[0][1]
    assert seen[-1] == seen[0]


def test_beside_kept_casts_of_weights():
    """Which lie in blocks, of which no program of a stretch knows."""
    model, recipe = made("two"), own_recipe("grad_output", Twice)
    other = copy.deepcopy(model)
    with opfuse.kept_weights(model):
        for call in range(6):
            got = step(model, call, recipe)
            with interpreted():
                assert differences(got, step(other, call, recipe)) == []


def test_a_capture_records_nothing(monkeypatch):
    model, recipe = made("two"), own_recipe("grad_output", Twice)
    with monkeypatch.context() as capturing:
        capturing.setattr(replayable, "is_capturing", lambda: True)
        for call in range(4):
            step(model, call, recipe)
        assert not stretches_of(model)
    compared(model, recipe)
    assert stretches_of(model)
    monkeypatch.setattr(replayable, "is_capturing", lambda: True)
    compared(model, recipe)
