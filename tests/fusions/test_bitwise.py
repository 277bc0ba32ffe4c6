"""R4: under ``rounding="per_op"`` a fused pipeline equals its ops run one by one, bit for bit.

Compared are outputs, the gradients of inputs, extra inputs and parameters, what every op saved for its backward pass, and the
state of delayed scaling. Every case also says where its rule must have fired, or which guard must have kept it from firing.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from opfuse import fusions, ops
from opfuse.compiler.cover import Outcome
from opfuse.compiler.registry import RuleSet
from opfuse.compiler.rules import Fusion
from opfuse.fusions import RULES
from opfuse.recipes import RECIPES, Recipe
from tests.compiler.harness import CASES, UNFUSED, Step, differences, randn, recipe_for, run, to
from tests.turns import in_turn

ROWS, WIDTH = 64, 64
DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Place:
    """A pipeline in which one rule fires. kinds: the nodes it takes with a recipe and without one. extras: how many."""

    model: Callable[[], ops.Sequential]
    kinds: tuple[str, ...]
    kinds_without_recipe: tuple[str, ...]
    extras: int = 0


def experts() -> ops.Sequential:
    """Rows that are cast in groups, and back to where they were."""
    gate, layer, combine = (
        ops.TokenDispatch(4, WIDTH, top_k=2),
        ops.GroupedLinear(4, WIDTH, WIDTH, bias=False, pad_splits=True),
        ops.TokenCombine(),
    )
    gate.set_extra_output_channel(0, "splits")
    gate.set_extra_output_channel(2, "places")
    layer.set_extra_input_channel(0, "splits")
    combine.set_extra_input_channel(0, "places")
    return ops.Sequential(gate, layer, combine)


def experts_over_ranks(experts: int = 4) -> ops.Sequential:
    """Rows that go to experts on other ranks, of which there are none here, and come back."""
    gate, layer, combine = (
        ops.TokenDispatch(experts, WIDTH, top_k=2),
        ops.GroupedLinear(experts, WIDTH, WIDTH, bias=False, pad_splits=True),
        ops.TokenCombine(),
    )
    there, back = ops.AllToAllDispatch(experts), ops.AllToAllReturn(experts)
    gate.set_extra_output_channel(0, "splits")
    gate.set_extra_output_channel(2, "places")
    for number, name in enumerate(("own", "counts", "order")):
        there.set_extra_output_channel(number, name, output_to_caller=False)
        back.set_extra_input_channel(1 + number, name)
    for op, name in ((there, "splits"), (back, "splits"), (layer, "own"), (combine, "places")):
        op.set_extra_input_channel(0, name)
    return ops.Sequential(gate, there, layer, back, combine)


def gated_experts() -> ops.Sequential:
    """An activation between experts, whose result is cast in groups."""
    layers = [ops.GroupedLinear(4, WIDTH, width, bias=False, pad_splits=True) for width in (2 * WIDTH, WIDTH)]
    gate, act, combine = ops.TokenDispatch(4, WIDTH, top_k=2), ops.ScaledSwiGLU(), ops.TokenCombine()
    for i, name in enumerate(("splits", "probabilities", "places")):
        gate.set_extra_output_channel(i, name)
    for op, name in ((layers[0], "splits"), (act, "probabilities"), (layers[1], "splits"), (combine, "places")):
        op.set_extra_input_channel(0, name)
    return ops.Sequential(gate, layers[0], act, layers[1], combine)


PLACES = {
    "linear_scale_add": Place(
        lambda: ops.Sequential(ops.Linear(WIDTH, WIDTH, bias=False), ops.ConstantScale(0.3), ops.AddExtraInput(in_place=True)),
        ("basic_linear", "constant_scale", "add_extra_input"),
        ("basic_linear", "constant_scale", "add_extra_input"),
        extras=1,
    ),
    "linear_add": Place(
        lambda: ops.Sequential(ops.Linear(WIDTH, WIDTH), ops.AddExtraInput(in_place=True)),
        ("basic_linear", "bias", "add_extra_input"),
        ("basic_linear", "bias", "add_extra_input"),
        extras=1,
    ),
    "epilogue": Place(
        lambda: ops.Sequential(
            ops.Linear(WIDTH, 2 * WIDTH), ops.SwiGLU(), ops.Dropout(0.3), ops.AddExtraInput(), ops.Linear(WIDTH, WIDTH)
        ),
        ("basic_linear", "bias", "swiglu", "dropout", "add_extra_input", "quantize"),
        ("basic_linear", "bias", "swiglu", "dropout", "add_extra_input"),
        extras=1,
    ),
    "epilogue_groups": Place(gated_experts, ("grouped_linear", "scaled_swiglu", "quantize_groups"), ()),
    "elementwise": Place(
        lambda: ops.Sequential(ops.AddExtraInput(), ops.SwiGLU(), ops.Linear(WIDTH // 2, WIDTH)),
        ("add_extra_input", "swiglu", "quantize"),
        ("add_extra_input", "swiglu"),
        extras=1,
    ),
    "dispatch_cast": Place(experts, ("token_dispatch", "quantize_groups"), ()),
    "dispatch_exchange": Place(
        experts_over_ranks, ("token_dispatch", "all_to_all_dispatch"), ("token_dispatch", "all_to_all_dispatch")
    ),
    "backward_linear_add": Place(
        lambda: ops.Sequential(ops.RMSNorm(WIDTH), ops.MakeExtraOutput(in_place=True), ops.Linear(WIDTH, WIDTH)),
        ("make_extra_output", "basic_linear"),
        ("make_extra_output", "basic_linear"),
    ),
    "backward_linear_scale": Place(
        lambda: ops.Sequential(ops.Linear(WIDTH, WIDTH, bias=False), ops.ConstantScale(0.3)),
        ("basic_linear", "quantize", "constant_scale"),
        ("basic_linear", "constant_scale"),
    ),
    "backward_add_rms_norm": Place(
        lambda: ops.Sequential(ops.MakeExtraOutput(), ops.RMSNorm(WIDTH), ops.Linear(WIDTH, WIDTH)),
        ("make_extra_output", "rms_norm"),
        ("make_extra_output", "rms_norm"),
    ),
    "backward_groups": Place(gated_experts, ("quantize_groups", "scaled_swiglu"), ()),
    "backward_combine": Place(gated_experts, ("quantize_groups", "token_combine"), ()),
    "backward_activation_bias": Place(
        lambda: ops.Sequential(ops.Linear(WIDTH, 2 * WIDTH), ops.ConstantScale(1.5), ops.GEGLU(), ops.Linear(WIDTH, WIDTH)),
        ("quantize", "bias", "constant_scale", "geglu"),
        ("bias", "constant_scale", "geglu"),
    ),
    "backward_elementwise": Place(
        lambda: ops.Sequential(ops.Linear(WIDTH, 2 * WIDTH), ops.ConstantScale(1.5), ops.GEGLU(), ops.Linear(WIDTH, WIDTH)),
        ("bias", "constant_scale", "geglu"),
        ("bias", "constant_scale", "geglu"),
    ),
}


def _no_quantized_gradient(recipe: Recipe | None) -> tuple[str, ...]:
    if recipe is None:
        return "env.recipe", "a recipe", "None"
    override = recipe.backward_override
    return ("env.recipe.backward_override", "None", repr(override)) if override else ()


def _no_cast_in_groups(recipe: Recipe | None, of: str = "inputs") -> tuple[str, ...]:
    known = ("fp8_block", "fp8_current", "delayed", "custom")
    return (
        ()
        if recipe is None or recipe.kind in known
        else (f"quantize.ragged.{of}.family", "one of ('block', 'row', 'tensor')", _FAMILIES.get(recipe.kind, "nothing"))
    )


_FAMILIES = {"fp8_current": "'tensor'", "delayed": "'tensor'", "custom": "'row'", "mxfp8": "'mx'"}


def _no_blocks_in_groups(recipe: Recipe | None, of: str = "inputs") -> tuple[str, ...]:
    if recipe is None or recipe.kind == "fp8_block":
        return ()
    return f"quantize.ragged.{of}.family", "one of ('block',)", _FAMILIES.get(recipe.kind, "nothing")


def _no_gradient_in_groups(recipe: Recipe | None) -> tuple[str, ...]:
    """Under an override gradients are not cast."""
    return () if recipe is None or recipe.backward_override else _no_blocks_in_groups(recipe, "gradients")


def _no_sum_in_groups(recipe: Recipe | None) -> tuple[str, ...]:
    return () if recipe is None or recipe.backward_override else _no_cast_in_groups(recipe, "gradients")


REFUSED = {
    "backward_activation_bias": _no_quantized_gradient,
    "dispatch_cast": _no_cast_in_groups,
    "epilogue_groups": _no_blocks_in_groups,
    "backward_groups": _no_gradient_in_groups,
    "backward_combine": _no_sum_in_groups,
}
"""The guard that keeps a rule from firing under a recipe, what it wants and what it gets; nothing where the rule fires."""


@pytest.mark.row("B21")
def test_r4_every_rule_has_a_place():
    names = {rule.name for rule in RULES.rules}
    assert names - set(PLACES) == set(), "give these a pipeline where they fire, in PLACES of this file"
    assert set(PLACES) - names == set(), "add these to RULES of opfuse/fusions/__init__.py"


def test_every_rule_that_is_written_is_built_in():
    modules = [importlib.import_module(f"{fusions.__name__}.{each.name}") for each in pkgutil.iter_modules(fusions.__path__)]
    written = {name: each for module in modules for name, each in vars(module).items() if isinstance(each, Fusion)}
    assert {name for name, rule in written.items() if rule not in RULES.rules} == set(), (
        "add these to RULES of opfuse/fusions/__init__.py"
    )
    assert {*written} - {*fusions.__all__} == set(), "add these to __all__ of opfuse/fusions/__init__.py"


def test_every_kind_of_recipe_is_tried():
    tried = {recipe.kind for name, override in CASES if (recipe := recipe_for(name, override)) is not None}
    assert {*RECIPES} - tried == set(), "add these to RECIPES, and to HAS_OVERRIDE, of tests/compiler/harness.py"


def test_every_rule_fires_among_the_others():
    never = set()
    for rule in RULES.rules:
        place, dtype = PLACES[rule.name], torch.bfloat16
        x, extras = randn(ROWS, WIDTH, dtype=dtype), [randn(ROWS, WIDTH, seed=1 + i, dtype=dtype) for i in range(place.extras)]
        recipes = (None, recipe_for("fp8_current", dtype=dtype), recipe_for("fp8_block", dtype=dtype))
        found = (run(to(place.model(), dtype), x, *extras, step=Step(recipe, RULES)).outcomes(rule.name) for recipe in recipes)
        if not any(outcome.status == "fused" for outcomes in found for outcome in outcomes):
            never.add(rule.name)
    assert never == set(), "others take all their ops in RULES: put these further up, before what is more general"


@pytest.mark.few(2, apart=True)
@pytest.mark.row("B21")
@pytest.mark.parametrize(("rule", "name", "override", "dtype"), in_turn(RULES.rules, CASES, DTYPES, of=2 * len(DTYPES)))
def test_r4_fused_equals_unfused(rule, name, override, dtype):
    place = PLACES[rule.name]
    model = to(place.model(), dtype)
    recipe = recipe_for(name, override, dtype=dtype)
    x, extras = randn(ROWS, WIDTH, dtype=dtype), [randn(ROWS, WIDTH, seed=1 + i, dtype=dtype) for i in range(place.extras)]
    steps = 2 if name == "delayed" else 1
    fused, unfused = (run(model, x, *extras, step=Step(recipe, rules, steps=steps)) for rules in (RuleSet((rule,)), UNFUSED))
    assert differences(fused.tensors, unfused.tensors) == []
    assert not any(plan.fusions for plan in unfused.plans)
    outcomes = fused.outcomes(rule.name)
    kinds = place.kinds if recipe is not None and not (override and rule.direction == "backward") else place.kinds_without_recipe
    if reason := REFUSED.get(rule.name, lambda _: ())(recipe):
        assert {(o.status, o.guard, o.wanted, o.got) for o in outcomes} == {("missed", *reason)}, "mend its line of REFUSED"
    elif not kinds:
        assert [outcome.status for outcome in outcomes] == ["absent"]
    else:
        missed = {(o.guard, o.wanted, o.got) for o in outcomes if o.status == "missed"}
        cure = f"say in REFUSED which guard keeps it from firing, of {missed}" if missed else "mend its line of PLACES"
        assert kinds in [_kinds(outcome) for outcome in outcomes if outcome.status == "fused"], cure


def _kinds(outcome: Outcome) -> tuple[str, ...]:
    return tuple(op.split(":")[1].partition("[")[0] for op in outcome.ops)
