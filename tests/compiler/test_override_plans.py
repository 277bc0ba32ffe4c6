"""The backward override beyond a single linear: layouts, bytes, user rules, the environment, a block by its formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import opfuse
from benchmarks.memory import plane_bytes
from opfuse import ops
from opfuse.compiler.graph import QUANTIZE
from opfuse.compiler.registry import RuleSet
from opfuse.compiler.rules import JOINT, PASSES, Fusion, above, at_least, at_most, fusion, is_, is_not, maybe, multiple_of, one_of
from opfuse.fusions.declared import declared, extended
from opfuse.ops.pointwise import run_chain, run_chain_backward
from opfuse.recipes import CustomRecipe, MXFP8BlockScaling, QuantizerRole, Recipe
from opfuse.recipes.recipe import TENSOR_TYPES
from opfuse.tensors.quantizers import MXFP8Quantizer, NVFP4Quantizer, Quantizer
from opfuse.tensors.storage import QuantizedStorage
from tests.compiler.harness import (
    HAS_OVERRIDE,
    OVERRIDES,
    Result,
    Step,
    differences,
    plain,
    randn,
    recipe_for,
    run,
    same,
    saved_values,
    to,
)
from tests.turns import in_turn

BF16 = torch.bfloat16
ACTIVE = OVERRIDES[1:]


# -- the layout of scales -------------------------------------------------------------------------------------------------

TILED: dict[str, Callable[..., Quantizer]] = {"mxfp8": MXFP8Quantizer, "nvfp4": NVFP4Quantizer}


def custom(name: str, override: str | None, *, tiled: bool) -> Recipe:
    """One quantizer for all roles, with or without tiled scales."""
    quantizer = TILED[name](optimize_for_gemm=tiled)
    return CustomRecipe(qfactory=lambda role: quantizer, backward_override=override, keep="all")


@pytest.mark.row("B14", "B34", "D08")
@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("name", TILED)
def test_b14_b34_d08_an_override_keeps_tiled_scales_and_tiles_change_no_bit(name, override):
    model, x = to(ops.Sequential(ops.Linear(64, 96), ops.GELU(), ops.Linear(96, 64)), BF16), randn(64, 64)
    tiled, compact = (run(model, x, step=Step(custom(name, override, tiled=tiled))) for tiled in (True, False))
    got, want = ({key: value for key, value in r.tensors.items() if "saved" not in key} for r in (tiled, compact))
    assert differences(got, want) == []
    (plan,) = tiled.plans
    casts = [plan.casts[node.index] for node in plan.graph.nodes if node.kind == QUANTIZE]
    made = [(cast.role, cast.quantizer.quantize(randn(64, 96))) for cast in casts]
    planes = [storage.plane(usage) for _, storage in made for usage in storage.usages]
    assert {role for role, _ in made} == ({"input", "weight"} if override else set(TENSOR_TYPES))
    assert all(plane.swizzled or plane.format.scale == "none" for plane in planes)
    assert all(storage.plane("rowwise").swizzled for _, storage in made)


@pytest.mark.row("B14", "D08")
@pytest.mark.parametrize("name", TILED)
def test_b14_d08_dequantized_saves_tiled_planes(name):
    model = to(ops.Sequential(ops.Linear(64, 96, bias=False)), BF16)
    with opfuse.autocast(recipe=custom(name, "dequantized", tiled=True)), saved_values() as saved:
        model(randn(64, 64).requires_grad_())
    assert [saved[key].rowwise.swizzled for key in ("0.x", "0.w")] == [True, True]


# -- bytes ----------------------------------------------------------------------------------------------------------------


@contextmanager
def saved_storages() -> Iterator[dict[int, int]]:
    """Bytes of each storage that autograd saves inside the block, by address."""
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


@pytest.mark.row("B13")
@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("name", HAS_OVERRIDE)
@pytest.mark.parametrize("norm", [ops.LayerNorm, ops.RMSNorm], ids=lambda norm: norm.__name__)
def test_b13_a_norm_before_a_product_is_held_once(norm, name, override):
    rows, k, n = 256, 192, 320
    model, x = to(ops.Sequential(norm(k), ops.Linear(k, n)), BF16), randn(rows, k).requires_grad_()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with opfuse.autocast(recipe=recipe_for(name, override, keep="all")), saved_storages() as saved:
        model(x)
    found = sum(size for address, size in saved.items() if address not in parameters)
    statistics = rows * 4 * (2 if norm is ops.LayerNorm else 1)
    operands = rows * k * 2
    if override != "high_precision":
        rowwise = override == "dequantized"
        operands = plane_bytes(name, rows, k, rowwise=rowwise, weight=False) + plane_bytes(
            name, n, k, rowwise=rowwise, weight=True
        )
    assert found == rows * k * 2 + statistics + operands


# -- rules of a user's own ------------------------------------------------------------------------------------------------


def overlapped_forward(x, *, linear, quantize, bias):
    """What stands here for a product that overlaps communication."""
    return run_chain(linear.op.produce(linear, x), [bias], dtype=linear.dtype_of(x))


def overlapped_backward(dy, *, linear, quantize, bias):
    dy = run_chain_backward(dy, [bias])
    dy = dy if quantize is None else quantize.op(dy)
    linear.set_grads(params=(linear.op.weight_gradient(linear, dy),))
    return linear.op.input_gradient(linear, dy)


PATTERN = {"linear": "basic_linear", "quantize": maybe("quantize"), "bias": "bias"}
NO_OVERRIDE = is_("env.recipe.backward_override", None)
FORWARD_RULE = fusion("overlapped", PATTERN, when=(NO_OVERRIDE,), forward=overlapped_forward)
BOTH_RULE = fusion("overlapped", PATTERN, when=(NO_OVERRIDE,), forward=overlapped_forward, backward=overlapped_backward)


@pytest.mark.row("B18", "B19")
@pytest.mark.parametrize("rule", [FORWARD_RULE, BOTH_RULE], ids=["forward", "both"])
@pytest.mark.parametrize("override", OVERRIDES)
def test_b18_b19_one_guard_keeps_both_passes_of_a_rule_from_overrides(override, rule):
    model, x = to(ops.Sequential(ops.Linear(64, 64)), BF16), randn(32, 64)
    recipe = MXFP8BlockScaling(backward_override=override, keep="all")  # as a rule saves that runs code of its own
    result = run(model, x, step=Step(recipe, RuleSet((rule,))))
    (outcome,) = result.outcomes("overlapped")
    took = [
        side
        for side in ("forward", "backward")
        if any(group.rule is rule for plan in result.plans for segment in plan.segments for group in getattr(segment, side))
    ]
    if override is None:
        assert outcome.status == "fused"
        assert took == (["forward"] if rule is FORWARD_RULE else ["forward", "backward"])
    else:
        assert (outcome.status, outcome.guard, outcome.got) == ("missed", "env.recipe.backward_override", repr(override))
        assert took == []
    assert differences(result.tensors, run(model, x, step=Step(recipe, RuleSet(()))).tensors) == []


GUARDS = {
    "nothing": (),
    "the override": (NO_OVERRIDE,),
    "the recipe": (is_("env.recipe.kind", "mxfp8"),),
    "several": (NO_OVERRIDE, at_least("linear.out_features", 64), one_of("env.device", "cpu", "cuda")),
    "an op": (multiple_of("linear.out_features", 48),),
    "a parameter": (is_("bias.bias.requires_grad", True),),
    "the environment": (is_not("env.autocast", torch.float16), at_most("env.rows_class", 32)),
    "a cast that may be absent": (is_("quantize.role", "grad_output"),),
    "the level": (above("env.level", 2),),
}


def passes_of(rule: Fusion, result: Result) -> set[str]:
    """The passes in which a rule runs anything."""
    segments = [segment for plan in result.plans for segment in plan.segments]
    return {side for side in PASSES[JOINT] for segment in segments for group in getattr(segment, side) if group.rule is rule}


@pytest.mark.few(apart=True)
@pytest.mark.row("B19")
@pytest.mark.parametrize(("guards", "override", "frozen"), in_turn(GUARDS, OVERRIDES, [False, True], of=2))
def test_b19_a_rule_of_both_passes_runs_in_both_or_in_none(guards, override, frozen):
    """Whatever its guards read: of functions, of chains that files declare, and of their extensions."""
    model = to(ops.Sequential(ops.Linear(64, 64), ops.GELU(), ops.Linear(64, 96), ops.GELU()), BF16)
    model[0].bias.requires_grad_(not frozen)
    when = GUARDS[guards]
    own = fusion("own", PATTERN, when=when, forward=overlapped_forward, backward=overlapped_backward)
    chain = declared(
        "chain",
        "bias act=gelu",
        when=tuple(guard for guard in when if guard.reads.startswith(("env", "bias"))),
        emit="chain",
        direction=JOINT,
    )
    part = extended(chain, "part", chain.pattern, when=(is_("env.grad", True),))
    recipe = MXFP8BlockScaling(backward_override=override, keep="all")  # as a rule saves that runs code of its own
    for rule in (own, chain, part):
        result = run(model, randn(32, 64), step=Step(recipe, RuleSet((rule,))))
        took, statuses = passes_of(rule, result), {outcome.status for outcome in result.outcomes(rule.name)}
        assert took == (set(PASSES[JOINT]) if "fused" in statuses else set())
        assert differences(result.tensors, run(model, randn(32, 64), step=Step(recipe, RuleSet(()))).tensors) == []


@pytest.mark.row("B19")
def test_b19_each_guard_of_the_table_fires_somewhere_and_nowhere():
    """So that the test above sees both."""
    seen = {name: set() for name in GUARDS}
    for name, when in GUARDS.items():
        own = fusion("own", PATTERN, when=when, forward=overlapped_forward, backward=overlapped_backward)
        for override in OVERRIDES:
            model = to(ops.Sequential(ops.Linear(64, 64), ops.GELU(), ops.Linear(64, 96), ops.GELU()), BF16)
            result = run(model, randn(32, 64), step=Step(MXFP8BlockScaling(backward_override=override), RuleSet((own,))))
            seen[name] |= {outcome.status for outcome in result.outcomes("own")}
    assert {"fused", "missed"} <= set().union(*seen.values())
    assert seen["the override"] == {"fused", "missed"}
    assert seen["an op"] == {"fused", "missed"}
    assert seen["the level"] == {"missed"}


# -- the environment ------------------------------------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.row("B32")
@pytest.mark.parametrize("value", [None, "", *ACTIVE])
@pytest.mark.parametrize("variable", ["OPFUSE_BACKWARD_OVERRIDE", "NVTE_BACKWARD_OVERRIDE"])
@pytest.mark.parametrize("name", HAS_OVERRIDE)
def test_b32_the_environment_does_what_the_argument_does(name, variable, value, monkeypatch):
    model, x = to(ops.Sequential(ops.RMSNorm(64), ops.Linear(64, 64), ops.GELU(), ops.Linear(64, 64)), BF16), randn(32, 64)
    explicit = recipe_for(name).replace(backward_override=value or None)
    want = run(model, x, step=Step(explicit)).tensors
    if value is not None:
        monkeypatch.setenv(variable, value)
    built = recipe_for(name)
    assert built.sources["backward_override"] == (f"environment {variable}" if value else "default")
    assert differences(run(model, x, step=Step(built)).tensors, want) == []


# -- a block by its formula -----------------------------------------------------------------------------------------------


def rowwise(recipe: Recipe, tensor_type: str, tensor: torch.Tensor) -> torch.Tensor:
    quantizer = recipe.quantizer(QuantizerRole(tensor_type=tensor_type)).wanting(rowwise=True, columnwise=False)
    storage = quantizer.quantize(tensor.detach())
    assert isinstance(storage, QuantizedStorage)
    return storage.dequantize(tensor.dtype)


@pytest.mark.row("B23", "B30")
@pytest.mark.parametrize("override", ACTIVE)
@pytest.mark.parametrize("name", HAS_OVERRIDE)
def test_b23_b30_a_block_equals_its_formula(name, override):
    """Norm, linear, bias, GELU, linear: every gradient by the chain rule, each op rounded once, from the values it saved."""
    model, x = to(ops.Sequential(ops.RMSNorm(64), ops.Linear(64, 96), ops.GELU(), ops.Linear(96, 64)), BF16), randn(32, 64)
    norm, first, act, second = model
    recipe = recipe_for(name, override)
    with opfuse.autocast(recipe=recipe), saved_values() as saved:
        y = model(x)
    dy = randn(*y.shape, seed=100)
    got = torch.autograd.grad(y, [first.weight, first.bias, second.weight, second.bias, norm.weight], dy)

    normal, z = norm(x).detach(), saved["3.x"]
    activated, leaf = act(z).detach(), z.detach().requires_grad_()
    original = override == "high_precision"
    x1, x2 = (t if original else rowwise(recipe, "input", t) for t in (normal, activated))
    w1, w2 = (w.detach() if original else rowwise(recipe, "weight", w) for w in (first.weight, second.weight))
    (dz,) = torch.autograd.grad(act(leaf), leaf, dy @ w2)
    gain = norm.weight.detach().requires_grad_()
    unit = ops.RMSNorm(64).to(BF16)
    unit.weight = torch.nn.Parameter(gain)
    (dgain,) = torch.autograd.grad(unit(x), unit.weight, dz @ w1)
    want = [dz.t() @ x1, dz.float().sum(0).to(BF16), dy.t() @ x2, dy.float().sum(0).to(BF16), dgain]
    assert [same(a, b) for a, b in zip(got, want)] == [True] * 5

    exact = rowwise(recipe, "input", normal).double() @ rowwise(recipe, "weight", first.weight).double().t() + first.bias.double()
    assert (plain(z).double() - exact).abs().max() <= 2.0**-7 * exact.abs().max()
