"""The host's work in a training step that repeats: how many functions of the library Python calls."""

from __future__ import annotations

import copy
import cProfile
import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import opfuse
from opfuse import ops
from opfuse.recipes import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, pending
from opfuse.recipes.recipe import Recipe
from opfuse.runtime.interpret.interpreter import Interpreter
from opfuse.runtime.replay.dispatch import interpreted
from opfuse.tensors.ragged import RaggedProducts
from tests.compiler.harness import gradient, randn, to
from tests.program.fake import fake_device, launches_seen
from tests.runtime.test_passes import Same, own_recipe
from tests.runtime.test_stepped import SIZE, model_of, python_calls

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def _updates_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device an update is one launch; torch's definition calls functions for each state."""
    monkeypatch.setattr(pending, "prepared", lambda *_: lambda: None)


def calls_of(layers: int, recipe: Recipe) -> int:
    """In a step of as many linear layers and the activations between them, which are one segment."""
    model = model_of(*[op for _ in range(layers) for op in (ops.Linear(SIZE, SIZE), ops.GELU())][:-1])
    python_calls(model, recipe)  # looks are recorded, and what is saved is packed
    return python_calls(model, recipe)


@pytest.mark.parametrize(("recipe", "most"), [(Float8CurrentScaling(), 92), (Float8BlockScaling(), 92), (DelayedScaling(), 114)])
def test_functions_of_the_library_in_a_step(recipe: Recipe, most: int) -> None:
    assert calls_of(2, recipe) <= most


@pytest.mark.parametrize(("recipe", "most"), [(Float8CurrentScaling(), 61), (Float8BlockScaling(), 61), (DelayedScaling(), 63)])
def test_functions_of_the_library_in_inference(recipe: Recipe, most: int) -> None:
    model = model_of(ops.Linear(SIZE, SIZE), ops.GELU(), ops.Linear(SIZE, SIZE))
    assert python_calls(model, recipe, train=False) <= most


@pytest.mark.parametrize(("role", "most"), [("input", 400), ("weight", 345), ("grad_output", 530)])
def test_functions_of_the_library_beside_a_users_quantizer(role: str, most: int) -> None:
    """Two casts by code that the library does not know, which calls the library's own cast; all else is repeated."""
    model = model_of(ops.Linear(SIZE, SIZE), ops.GELU(), ops.Linear(SIZE, SIZE))
    assert python_calls(model, own_recipe(role, Same)) <= most


def test_delayed_scaling_calls_nothing_for_a_state() -> None:
    """One cast of a pass or many, a state is counted and updated without a function of its own."""
    extra = [calls_of(layers, DelayedScaling()) - calls_of(layers, Float8CurrentScaling()) for layers in (1, 2, 4)]
    assert extra[0] == extra[1] == extra[2]


def test_an_update_is_bound_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And again where other states are updated together, or a state has other tensors."""
    bound: list[int] = []

    def prepared(_: object, histories: list[object], *__: object) -> object:
        bound.append(len(histories))
        return lambda: None

    monkeypatch.setattr(pending, "prepared", prepared)
    model, recipe = model_of(ops.Linear(SIZE, SIZE), ops.GELU(), ops.Linear(SIZE, SIZE)), DelayedScaling()

    def step() -> list[int]:
        bound.clear()
        with opfuse.autocast(recipe=recipe):
            y = model(randn(32, SIZE))
        y.backward(gradient(y, 0))
        return bound

    assert step() == [4, 2]
    assert step() == [4, 2]  # under a rule that the states did not know
    assert step() == []
    model[0].quantizer_states.load_dict(model[0].quantizer_states.to_dict())
    assert step() == [4, 2]


def calls_of_experts(experts: int, monkeypatch: pytest.MonkeyPatch, *, keeps: bool = True, single: bool = True) -> int:
    """All calls of a step, those of torch included, of experts whose weights may be kept, on a device that does nothing.

    But for what depends on addresses, which the allocator chooses: calls that move an argument, each with a look into a
    dictionary, and graphs of launches.
    """
    model = to(ops.GroupedLinear(experts, SIZE, SIZE, bias=False, single_grouped_weight=single), torch.bfloat16)
    splits, x = torch.full((experts,), 256 // experts), randn(256, SIZE).to(torch.bfloat16).requires_grad_()

    def step() -> None:
        with opfuse.autocast(recipe=Float8BlockScaling()):
            y = model(x, splits)
        torch.autograd.grad(y, [x, *model.parameters()], torch.ones_like(y))

    with monkeypatch.context() as patch, torch.autograd.set_multithreading_enabled(False):
        patch.setenv("OPFUSE_LAUNCH_GRAPHS", "0")
        patch.setattr(RaggedProducts, "supported_on", lambda *_: True)
        with fake_device(patch), launches_seen(patch), opfuse.kept_weights(model) if keeps else nullcontext():
            patch.setattr("opfuse.runtime.replay.codegen.driver", lambda: SimpleNamespace(launchKernel=lambda *_: None))
            for _ in range(6):
                step()
            gc.collect()
            gc.disable()  # its callbacks are calls, too
            try:
                with cProfile.Profile() as profile:
                    step()
            finally:
                gc.enable()
    found = profile.getstats()
    moved = sum(entry.callcount for entry in found if getattr(entry.code, "co_name", "") == "move")
    return sum(entry.callcount for entry in found) - 2 * moved


@pytest.mark.unrun
def test_calls_of_a_step_do_not_grow_with_the_experts_whose_weights_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their planes lie in one block for each direction: one to look at, to compare the address of, and to save.

    One call an expert would be 112 more.
    """
    few, many = (calls_of_experts(experts, monkeypatch) for experts in (16, 128))
    assert abs(many - few) < (128 - 16) / 2
    assert many <= 780


@pytest.mark.few
@pytest.mark.parametrize("recipe", [DelayedScaling(), Float8CurrentScaling()], ids=lambda recipe: recipe.kind)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_repeat_both_runs(recipe: Recipe, reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run, the recomputation and the backward pass are programs, whose bits are those of the interpreter."""
    model = model_of(ops.Linear(SIZE, SIZE), ops.GELU(), ops.Linear(SIZE, SIZE))
    other = copy.deepcopy(model)

    def step(of: ops.Sequential, number: int) -> list[torch.Tensor]:
        x = randn(32, SIZE, seed=number).requires_grad_()
        with opfuse.autocast(recipe=recipe):
            y = checkpoint(of, x, use_reentrant=reentrant)
        of.zero_grad()
        y.backward(gradient(y, number))
        return [y.detach(), *(t.grad for t in (x, *of.parameters()) if t.grad is not None)]

    for number in range(6):
        with interpreted():
            wanted = step(other, number)
        with monkeypatch.context() as patch:
            if number == 5:  # by when looks were seen and recorded in both passes
                patch.setattr(Interpreter, "forward", None)
                patch.setattr(Interpreter, "backward", None)
            found = step(model, number)
        assert all(map(torch.equal, found, wanted)), number


@pytest.mark.unrun
def test_a_kept_weight_takes_no_more_calls_than_one_that_is_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of experts with a weight each: what is kept of all is compared at once."""
    kept, cast = ([calls_of_experts(n, monkeypatch, keeps=keeps, single=False) for n in (4, 16)] for keeps in (True, False))
    assert kept[1] - kept[0] <= cast[1] - cast[0]
    assert kept[0] <= cast[0] + 24
