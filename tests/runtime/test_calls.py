"""The host's work in a training step that repeats: how many functions of the library Python calls."""

from __future__ import annotations

import pytest

import opfuse
from opfuse import ops
from opfuse.recipes import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, pending
from opfuse.recipes.recipe import Recipe
from tests.compiler.harness import gradient, randn
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
