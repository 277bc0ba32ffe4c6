"""R9, X01: what is in a plan key, that every field of it counts, and what a miss says."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import pytest
import torch
from torch.distributed import ProcessGroup

import opfuse
from opfuse import ops, recipes
from opfuse.compiler.plan import PlanKey
from opfuse.compiler.registry import RuleSet, active_rules, use_rules
from opfuse.core.signature import Env, TensorSig
from opfuse.errors import PlanMissError, RecipeError, SpecError
from opfuse.fusions import RULES
from opfuse.keys import diff, digest
from opfuse.recipes import RECIPES, CustomRecipe, Recipe
from opfuse.recipes.settings import settings_of
from opfuse.runtime import fuser as fuser_module
from opfuse.runtime.fuser import OperationFuser
from opfuse.runtime.plans.cache_info import CacheInfo
from opfuse.runtime.plans.misses import on_miss
from opfuse.tensors.quantizers import IdentityQuantizer, MXFP8Quantizer
from tests.compiler.fields import VALUES, mixed, names_of
from tests.compiler.harness import Step, mlp, randn, recipe_for, run, same, to, train
from tests.turns import in_turn

BF16 = torch.bfloat16
MX = recipes.MXFP8BlockScaling

THRASHES = pytest.mark.filterwarnings("ignore:plans of .*keys that come back:opfuse.errors.OpfuseWarning")
"""A test that has more keys in turn than its pipeline keeps plans, of which a user is warned."""


def base(cls: type[Recipe], **given: object) -> Recipe:
    return cls(**({"qfactory": mixed} if cls is CustomRecipe else {}) | given)


def flips(cls: type[Recipe], name: str) -> list[Recipe]:
    """Recipes that differ from each other in one field; other fields are as the class wants them for it."""
    rule = settings_of(cls)[name][1]
    values = [value for value in VALUES[name] if rule is None or value in rule.domain]
    overridden = {"disable_rht": True, "backward_override": "dequantized", "row_scaled_activation": True}
    settings = [{}, {"use_power_2_scales": True}, {"disable_rht": True}, {"w_block_scaling_dim": 1}, overridden]
    for setting in settings:
        given = {key: value for key, value in setting.items() if key in names_of(cls) and key != name}
        try:
            return [base(cls, **{**given, name: value}) for value in values]
        except RecipeError:
            continue
    raise AssertionError((cls, name))


NO_CHOICE = {(recipes.Float8CurrentScaling, "batch_invariant")}
"""Fields that a recipe has with one value only."""

RECIPE_FIELDS = [(cls, name) for cls in RECIPES.values() for name in names_of(cls) if (cls, name) not in NO_CHOICE]


def test_r9_every_recipe_field_has_values_to_flip():
    assert {field.name for cls in RECIPES.values() for field in fields(cls)} == set(VALUES)
    assert all(len(values) > 1 for values in VALUES.values())


def pipeline() -> OperationFuser:
    return OperationFuser(tuple(to(mlp(), BF16)))


def key_of(fuser: OperationFuser, x: torch.Tensor | None = None, rules: RuleSet | None = None) -> PlanKey:
    x = randn(32, 64) if x is None else x
    return fuser.named(fuser.key(x, (), rules or active_rules()))


@pytest.mark.row("B20")
@pytest.mark.parametrize(("cls", "name"), RECIPE_FIELDS, ids=lambda value: getattr(value, "__name__", value))
def test_r9_every_recipe_field_changes_the_key(cls, name):
    fuser = pipeline()
    keys = []
    for recipe in flips(cls, name):
        with opfuse.autocast(recipe=recipe):
            keys.append(key_of(fuser))
    assert len({digest(key) for key in keys}) == len(keys) == len(set(keys))
    differing = [d.path for d in diff(keys[0], keys[1])]
    assert f"env.recipe.{name}" in differing


def test_r9_every_recipe_type_changes_the_key():
    fuser, keys = pipeline(), []
    for cls in RECIPES.values():
        with opfuse.autocast(recipe=base(cls)):
            keys.append(key_of(fuser))
    assert len(set(keys)) == len(RECIPES)


GROUP = ProcessGroup(0, 1)
SITUATIONS = {
    "recipe": lambda call: _under(opfuse.autocast(recipe=MX()), call),
    "amax_group": lambda call: _under(opfuse.autocast(enabled=False, amax_reduction_group=GROUP), call),
    "grad": lambda call: _under(torch.no_grad(), call),
    "autocast": lambda call: _under(torch.autocast(torch.get_default_device().type, BF16), call),
    "rows_class": lambda call: call(randn(33, 64)),
    "aligned": lambda call: call(randn(32 * 64 + 1)[1:].view(32, 64)),
    "level": lambda call: _under(use_rules(RuleSet(RULES.rules, level=1)), call),
    "input_saved": lambda call: call(randn(32, 64).requires_grad_().sigmoid()),
}
ONLY_ON_A_GPU = {"device", "arch"}


def _under(context, call):
    with context:
        return call()


def test_r9_every_field_of_the_environment_has_a_situation():
    assert set(SITUATIONS) | ONLY_ON_A_GPU == set(Env._fields)


@pytest.mark.parametrize("name", SITUATIONS)
def test_r9_every_situation_changes_its_field(name):
    fuser = pipeline()
    plain = key_of(fuser)
    other = SITUATIONS[name](lambda x=None: key_of(fuser, x))
    assert plain != other
    changed = [field for field in Env._fields if getattr(plain.env, field) != getattr(other.env, field)]
    assert changed == [name]


def test_r9_the_default_group_is_in_the_key_from_when_it_is_made(monkeypatch):
    """A plan that was made before it knows one rank: its rows would not travel, and its amaxes be those of one."""
    fuser = pipeline()
    plain = key_of(fuser)
    monkeypatch.setattr(fuser_module, "amax_group_here", lambda: GROUP)
    assert plain.env.amax_group is None
    assert key_of(fuser).env.amax_group is not None


@pytest.mark.cpu
def test_r9_device_and_arch_are_in_the_key(monkeypatch):
    fuser = pipeline()
    plain = key_of(fuser)
    monkeypatch.setattr(fuser_module, "_device", lambda device: ("cuda", (9, 0), True))
    other = key_of(fuser)
    assert (plain.env.device, plain.env.arch) == ("cpu", (0, 0))
    assert (other.env.device, other.env.arch) == ("cuda", (9, 0))


PARAMETER_CHANGES = {
    "dtype": lambda p: torch.nn.Parameter(p.detach().float()),
    "shape": lambda p: torch.nn.Parameter(p.detach()[:64]),
    "requires_grad": lambda p: p.requires_grad_(False),
    "device": lambda p: torch.nn.Parameter(p.detach().to("meta")),
    "quantized": lambda p: torch.nn.Parameter(recipes.Float8CurrentScaling().quantizer(recipes.QuantizerRole())(p.detach())),
}


def test_r9_every_field_of_a_signature_has_a_change():
    assert set(PARAMETER_CHANGES) == set(TensorSig._fields)


@pytest.mark.parametrize("name", PARAMETER_CHANGES)
def test_r9_every_field_of_a_parameter_changes_the_key(name):
    model = to(mlp(), BF16)
    fuser = OperationFuser(tuple(model))
    plain = key_of(fuser)
    model[1].weight = PARAMETER_CHANGES[name](model[1].weight)
    other = key_of(fuser)
    (path,) = {d.path for d in diff(plain, other)}
    assert path == f"inputs.params.1.weight.{name}"


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda model, x: (model, x.float()), "inputs.x.dtype"),
        (lambda model, x: (model, x.requires_grad_()), "inputs.x.requires_grad"),
        (lambda model, x: (model, recipes.Float8CurrentScaling().quantizer(recipes.QuantizerRole())(x)), "inputs.x.quantized"),
        (lambda model, x: (model[4].eval() and model, x), "inputs.training.4"),
    ],
)
def test_r9_inputs_and_modes_change_the_key(change, path):
    model = to(mlp(), BF16).append(ops.Dropout(0.1))
    fuser, x = OperationFuser(tuple(model)), randn(32, 64)
    plain = key_of(fuser, x)
    _, x = change(model, x)
    assert path in [d.path for d in diff(plain, key_of(fuser, x))]


def test_r9_specs_and_channels_are_in_the_key():
    def structure(*made: torch.nn.Module) -> str:
        return OperationFuser(made).structure

    tap = ops.MakeExtraOutput()
    tap.set_extra_output_channel(0, "a")
    variants = [
        structure(ops.ConstantScale(1.0)),
        structure(ops.ConstantScale(2.0)),
        structure(ops.Dropout(0.5)),
        structure(ops.GELU()),
        structure(ops.GELU(cache_quantized_input=True)),
        structure(ops.MakeExtraOutput()),
        structure(ops.MakeExtraOutput(in_place=True)),
        structure(tap),
        structure(ops.GELU(), ops.GELU()),
        structure(ops.Linear(64, 64)),
        structure(ops.Linear(64, 64, bias=False)),
        structure(ops.Linear(64, 32)),
    ]
    assert len(set(variants)) == len(variants)
    assert structure(ops.ConstantScale(1.0)) == structure(ops.ConstantScale(1))


def test_r9_rules_are_in_the_key():
    fuser = pipeline()
    narrowed = RULES.replaced(replace(RULES.rules[0], priority=1))
    sets = [RULES, RULES.without("epilogue"), RuleSet(RULES.rules[::-1]), RuleSet(RULES.rules, level=1), narrowed, RuleSet(())]
    assert len({key_of(fuser, rules=rules) for rules in sets}) == len(sets)


def test_r9_the_name_of_an_op_is_fixed_once_a_pipeline_has_it():
    seen = []

    def qfactory(role):
        seen.append(role.name)
        return IdentityQuantizer()

    model = to(ops.Sequential(ops.Linear(64, 64)), BF16)
    model[0].name = "fc1"
    assert model[0].name == model[0].basic_ops[0].name == "fc1"
    with opfuse.autocast(recipe=CustomRecipe(qfactory=qfactory)):
        model(randn(32, 64))
    assert set(seen) == {"", "fc1"}, "nameless roles are asked for when the recipe is made"
    with pytest.raises(SpecError, match="before the first call"):
        model[0].name = "fc2"


def test_r9_an_impure_factory_under_one_identity_makes_no_stale_plan():
    low = [True]

    def qfactory(role):
        return MXFP8Quantizer() if low[0] else IdentityQuantizer()

    model, x = to(ops.Sequential(ops.Linear(64, 64)), BF16), randn(32, 64)
    seen = []
    for low[0] in (True, False, True):
        with opfuse.autocast(recipe=CustomRecipe(qfactory=qfactory)):
            seen.append(model(x))
            assert torch.equal(seen[-1], copy.deepcopy(model)(x))
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])
    assert model.cache_info()[:3] == (2, 1, 2)
    assert "input_quantizer" in model.cache_info().last_miss


@pytest.mark.parametrize("period", [1, 2, 3, 4, 5])
@pytest.mark.cpu
def test_r9_a_factory_that_never_answers_twice_alike_is_asked_once_for_each_region(period):
    calls = itertools.count()

    def qfactory(role):
        number = next(calls)
        if number > 1000:
            pytest.fail("asked without end")
        return MXFP8Quantizer() if number // period % 2 else IdentityQuantizer()

    model, x, recipe = to(ops.Sequential(ops.Linear(64, 64)), BF16), randn(32, 64), CustomRecipe(qfactory=qfactory)
    for _ in range(6):
        with opfuse.autocast(recipe=recipe):
            assert torch.equal(model(x), copy.deepcopy(model)(x))


def test_plain_keys_equal_named_keys():
    fuser, x = pipeline(), randn(32, 64)
    with opfuse.autocast(recipe=MX()):
        plain = fuser.key(x, (), RULES)
        named = fuser.named(plain)
        assert (plain, hash(plain)) == (named, hash(named))
        assert digest(plain) != digest(named)
        fuser(x)
        assert fuser.cache.get(plain) is fuser.cache.get(named)


def test_equal_recipes_share_a_plan():
    model, x = to(mlp(), BF16), randn(32, 64)
    for recipe in (MX(), MX(), MX(backward_override=None), copy.deepcopy(MX()), pickle.loads(pickle.dumps(MX()))):
        train(model, x, step=Step(recipe))
    assert model.cache_info()[:3] == (1, 4, 1)


# -- what a cache of many plans is for ------------------------------------------------------------------------------------


@pytest.mark.row("X01")
@pytest.mark.parametrize("name", ["none", "delayed", "mxfp8"])
def test_x01_training_and_validation_alternate_without_planning(name):
    model, x = to(mlp(), BF16), randn(32, 64)
    recipe = recipe_for(name)
    for _ in range(4):
        train(model.train(), x, step=Step(recipe))
        with torch.no_grad():
            train(model.eval(), x, step=Step(recipe, input_grad=False))
    assert model.cache_info()[:3] == (2, 6, 2)


@THRASHES
def test_a_pipeline_keeps_its_last_64_plans():
    model, x = ops.Sequential(ops.GELU()), torch.randn(2, 8)
    for margin in range(65):
        with opfuse.autocast(recipe=recipes.DelayedScaling(margin=margin)):
            model(x)
    assert model.cache_info()[:3] == (64, 0, 65)


@pytest.mark.row("X01")
def test_x01_many_plans_live_at_once_and_the_last_used_stay(monkeypatch):
    monkeypatch.setattr(fuser_module, "PLANS", 3)
    model, x = to(mlp(), BF16), randn(32, 64)
    steps = [Step(recipe_for(name)) for name in ("none", "fp8_current", "mxfp8", "nvfp4")]
    for step in steps:
        train(model, x, step=step)
    assert model.cache_info()[:3] == (3, 0, 4)
    for step in steps[1:]:
        train(model, x, step=step)
    assert model.cache_info()[:3] == (3, 3, 4)
    train(model, x, step=steps[0])
    assert model.cache_info()[:3] == (3, 3, 5)


@pytest.mark.row("X01")
def test_x01_different_shapes_of_one_class_share_a_plan():
    model = to(mlp(), BF16)
    for rows in (128, 256, 1024):
        train(model, randn(rows, 64), step=Step(MX()))
    train(model, randn(2, 64, 64), step=Step(MX()))
    assert model.cache_info()[:3] == (1, 3, 1)
    train(model, randn(96, 64), step=Step(MX()))
    assert model.cache_info().last_miss == "env.rows_class: 128 -> 32 (was: 128 rows, now: 96 rows)"


MISSES = {
    "env.recipe.backward_override: None -> 'dequantized'": (Step(MX()), Step(MX(backward_override="dequantized"))),
    "env.recipe.scale_rule: 'te' -> 'ocp_floor'": (Step(MX()), Step(MX(scale_rule="ocp_floor"))),
    "inputs.x.requires_grad: True -> False": (Step(MX()), Step(MX(), input_grad=False)),
    "env.recipe: None -> MXFP8BlockScaling": (Step(), Step(MX())),
}


@pytest.mark.row("X01")
@pytest.mark.parametrize("text", MISSES)
def test_x01_the_last_miss_names_field_and_both_values(text):
    model, x = to(mlp(), BF16), randn(32, 64)
    for i, step in enumerate(MISSES[text]):
        train(model, x, step=step)
        assert (model.cache_info().last_miss == "first plan: the cache was empty") is (i == 0)
    assert text in model.cache_info().last_miss
    assert ";" not in model.cache_info().last_miss


@pytest.mark.row("X01")
def test_x01_the_miss_is_told_from_the_nearest_plan():
    model, x = to(mlp(), BF16), randn(32, 64)
    for step in (Step(MX()), Step(recipe_for("nvfp4"), input_grad=False), Step(MX(backward_override="dequantized"))):
        train(model, x, step=step)
    assert model.cache_info().last_miss.startswith("env.recipe.backward_override: None -> 'dequantized'")


@pytest.mark.row("X01")
def test_x01_sources_are_told():
    model, x = to(mlp(), BF16), randn(32, 64)
    train(model, x, step=Step(MX()))
    train(model, x, step=Step(MX(backward_override="dequantized").with_sources({"backward_override": "fp8.yaml:7:12"})))
    assert "(was: default, now: fp8.yaml:7:12)" in model.cache_info().last_miss


@pytest.mark.row("X01")
def test_x01_on_miss_error():
    model, x = to(mlp(), BF16), randn(32, 64)
    with opfuse.autocast(recipe=MX()):
        model(x)
        with on_miss("error"):
            model(x)
            with pytest.raises(PlanMissError) as caught, torch.no_grad():
                model(x)
            with pytest.raises(PlanMissError, match="rows_class"):
                model(x[:16])
        with torch.no_grad():
            model(x)
    for text in ("plan of ops 0..3", "env.grad: True -> False", "run the call once"):
        assert text in str(caught.value)
    assert model.cache_info()[:3] == (2, 1, 2)
    with pytest.raises(PlanMissError, match="'plan' or 'error'"), on_miss("raise"):
        pass


@pytest.mark.row("X01")
def test_x01_a_failed_plan_is_not_kept():
    model, x = to(mlp(), BF16), randn(32, 64)
    refused = recipe_for("nvfp4", row_scaled_activation=True, disable_rht=True)
    for _ in range(2):
        with opfuse.autocast(recipe=refused), pytest.raises(RecipeError):
            model(x)
    assert model.cache_info() == CacheInfo(0, 0, 0, None)


def test_copies_make_their_own_plans():
    model, x = to(mlp(), BF16), randn(32, 64)
    train(model, x, step=Step(MX()))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.cache_info() == CacheInfo(0, 0, 0, None)
        assert same(run(other, x, step=Step(MX())).tensors["output 0"], run(model, x, step=Step(MX())).tensors["output 0"])


def test_plans_do_not_keep_a_model_alive():
    model, x = to(mlp(), BF16), randn(32, 64)
    train(model, x, step=Step(MX()))
    gone = weakref.ref(model[1])
    del model
    gc.collect()
    assert gone() is None


@THRASHES
@pytest.mark.row("R13")
@pytest.mark.parametrize("rounds", in_turn([4, 8], of=2))
@pytest.mark.cpu
def test_r13_threads_train_on_one_model(rounds, monkeypatch):
    """Eight threads run forward and backward at once while plans are made and dropped; each gets the bits of a thread alone."""
    monkeypatch.setattr(fuser_module, "PLANS", 2)
    model, inputs = to(mlp(), BF16), [randn(32, 64, seed=seed) for seed in range(3)]
    names = ("none", "fp8_current", "fp8_block", "mxfp8")
    work = [(name, i) for name in names for i in range(len(inputs))] * rounds

    def step(each: tuple[str, int]) -> tuple[torch.Tensor, ...]:
        name, i = each
        recipe, x = recipe_for(name), inputs[i].clone().requires_grad_()
        with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x)
        return y, *torch.autograd.grad(y, (x, *model.parameters()), randn(*y.shape, seed=i))

    want = {each: step(each) for each in dict.fromkeys(work)}
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(step, work))
    assert [each for each, tensors in zip(work, got) if not all(map(same, tensors, want[each]))] == []
    assert len({float(y.detach().double().sum()) for y, *_ in want.values()}) > 6  # inputs and recipes differ


@THRASHES
@pytest.mark.parametrize("calls", in_turn([100, 200], of=2))
def test_r13_threads_share_a_model(calls, monkeypatch):
    """Plans are made, found and dropped by several threads at once; every output is the one that a thread alone gets."""
    monkeypatch.setattr(fuser_module, "PLANS", 2)
    model, x = to(mlp(), BF16), randn(32, 64)
    names = ("none", "fp8_current", "fp8_block", "mxfp8")

    def output(name: str) -> torch.Tensor:
        recipe = recipe_for(name)
        with torch.no_grad(), opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            return model(x)

    want = {name: output(name) for name in names}
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda i: (names[i % 4], output(names[i % 4])), range(calls)))
    assert [name for name, y in got if not same(y, want[name])] == []
    info = model.cache_info()
    assert info.plans <= 2
