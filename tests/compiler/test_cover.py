"""Covering: what matches, who claims, and the outcome of every rule at every place it nearly matched."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, Signature
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

import opfuse
from opfuse import ops
from opfuse.compiler import cover
from opfuse.compiler.cover import Outcome
from opfuse.compiler.graph import Graph, Node
from opfuse.compiler.plan import Plan
from opfuse.compiler.registry import FusionFunction, RuleSet, default_rules
from opfuse.compiler.rules import (
    Fusion,
    Guard,
    Term,
    above,
    at_least,
    at_most,
    below,
    fusion,
    is_,
    is_not,
    maybe,
    multiple_of,
    one,
    one_of,
    terms_of,
)
from opfuse.compiler.rules import run as run_of
from opfuse.core.context import Context
from opfuse.core.signature import Env
from opfuse.errors import FusionError, KeyValueError, closest
from opfuse.fusions import RULES
from opfuse.ops.pointwise import run_chain, run_chain_backward
from opfuse.recipes import DelayedScaling, MXFP8BlockScaling, Recipe
from opfuse.runtime.fuser import OperationFuser
from opfuse.tensors.storage import QuantizedStorage
from tests.compiler.harness import OVERRIDES, UNFUSED, Result, Step, differences, randn, recipe_for, run, same, to
from tests.compiler.pipelines import Pipeline, pipeline
from tests.plans import plans_used

BF16 = torch.bfloat16


@dataclass(frozen=True)
class SpecialSpec:
    shift: float = 0.0


class Scaled(ops.BasicOperation):
    """y = a x, and b dy for its gradient."""

    def __init__(self, forward, backward):
        super().__init__()
        self.scales = forward, backward

    def op_forward(self, ctx, input_, **_):
        return input_ * self.scales[0]

    def op_backward(self, ctx, grad_output):
        return grad_output * self.scales[1], ()


def rule(name: str, pattern: dict[str, Any], **fields: Any) -> Fusion:
    """A forward rule whose implementation is never run."""

    def forward(x: torch.Tensor, **_: Any) -> torch.Tensor:
        return x

    places = [Parameter(place, Parameter.KEYWORD_ONLY) for place in pattern]
    forward.__signature__ = Signature([Parameter("x", Parameter.POSITIONAL_ONLY), *places])
    return fusion(name, pattern, forward=forward, **fields)


def planned(*modules: torch.nn.Module, rules: RuleSet, recipe: Recipe | None = None) -> Plan:
    fuser = OperationFuser(tuple(to(torch.nn.ModuleList(modules), BF16)), rules=rules)
    extras = [randn(32, 64) for _ in fuser.extra_inputs]
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        return fuser.plan(randn(32, 64).requires_grad_(), *extras)


def outcomes(plan: Plan, name: str) -> list[Outcome]:
    return [outcome for outcome in plan.outcomes if outcome.rule == name]


def only(plan: Plan, name: str) -> Outcome:
    (outcome,) = outcomes(plan, name)
    return outcome


@pytest.mark.row("X02")
def test_x02_every_rule_has_an_outcome():
    for made in (pipeline(["gelu"]), pipeline(["rms norm", "linear", "gelu", "linear", "add in place"])):
        plan = planned(*made.ops, rules=RULES, recipe=MXFP8BlockScaling())
        assert {outcome.rule for outcome in plan.outcomes} == set(RULES.names)
        assert {outcome.status for outcome in plan.outcomes} <= {"fused", "shadowed", "missed", "absent"}


@pytest.mark.row("X02")
def test_x02_outcomes_of_a_pipeline():
    modules = (ops.RMSNorm(64), ops.Linear(64, 64), ops.AddExtraInput(in_place=True), ops.GELU(), ops.Linear(64, 64))
    plan = planned(*modules, rules=RULES, recipe=MXFP8BlockScaling(backward_override="dequantized"))
    assert only(plan, "linear_add").ops == ("3:basic_linear", "4:bias", "5:add_extra_input")
    first, second, third = outcomes(plan, "epilogue")
    assert (first.status, first.ops) == ("fused", ("0:rms_norm", "1:quantize[input]"))
    assert (second.status, second.by, second.ops) == ("shadowed", "linear_add", ("3:basic_linear", "4:bias"))
    assert (third.status, third.ops) == ("fused", ("9:basic_linear", "10:bias"))
    scale = only(plan, "linear_scale_add")
    assert (scale.status, scale.guard, scale.wanted, scale.got) == ("absent", "pattern.scale", "constant_scale", "bias")


@pytest.mark.row("B17", "X02")
@pytest.mark.parametrize("override", OVERRIDES[1:])
def test_b17_x02_the_override_is_the_reason(override):
    plan = planned(ops.Linear(64, 64), ops.GELU(), rules=RULES, recipe=recipe_for("mxfp8", override))
    outcome = only(plan, "backward_activation_bias")
    assert outcome.status == "missed"
    assert "backward_activation_bias" not in plan.fusions
    assert f"env.recipe.backward_override: wants None, got {override!r}" in str(outcome)


@pytest.mark.row("B17", "X02")
@pytest.mark.parametrize("override", OVERRIDES[1:])
def test_b17_x02_the_override_is_the_reason_where_it_leaves_out_the_cast_of_a_pattern(override):
    """Without the cast one op is left, which is no chain; behind no product there is no cast without the override either."""
    for modules, told in (
        ((ops.Linear(64, 128, bias=False), ops.SwiGLU(), ops.Linear(64, 64, bias=False)), ("3:swiglu",)),
        ((ops.SwiGLU(), ops.Linear(64, 64, bias=False)), None),
    ):
        recipe = recipe_for("mxfp8", override)
        outcome = only(planned(*modules, rules=RULES, recipe=recipe), "backward_activation_bias")
        fires = (
            "backward_activation_bias" in planned(*modules, rules=RULES, recipe=recipe.replace(backward_override=None)).fusions
        )
        assert fires == (told is not None)
        if told is None:
            assert outcome.status == "absent"
        else:
            assert (outcome.status, outcome.ops) == ("missed", told)
            assert f"env.recipe.backward_override: wants None, got {override!r}" in str(outcome)


@pytest.mark.row("X02")
def test_x02_a_place_missed_for_its_environment_is_told_once():
    """Also in linear time: not once for every suffix of a run."""
    modules = [ops.ConstantScale(1.5) for _ in range(20)]
    plan = planned(*modules, rules=RULES, recipe=MXFP8BlockScaling(backward_override="dequantized"))
    assert len(only(plan, "backward_activation_bias").ops) == 20


def test_an_absent_rule_tells_how_far_it_got():
    plan = planned(ops.GELU(), rules=RULES)
    assert only(plan, "linear_add") == Outcome("linear_add", "forward", "absent")
    plan = planned(ops.Linear(64, 64), rules=RULES)
    near = only(plan, "linear_add")
    assert (near.status, near.ops, near.guard, near.got) == (
        "absent",
        ("0:basic_linear", "1:bias"),
        "pattern.add",
        "the end of the run",
    )


# -- guards ------------------------------------------------------------------------------------------------------------------

PAIR = {"linear": "basic_linear", "act": "gelu"}
GUARDS = [
    # guard, whether it passes, what it wants in words, what it got
    (is_("linear.in_features", 64), True, "64", "64"),
    (is_("linear.in_features", 64.0), False, "64.0", "64"),
    (is_("linear.in_features", 32), False, "32", "64"),
    (is_not("linear.in_features", 32), True, "not 32", "64"),
    (is_not("linear.in_features", 64), False, "not 64", "64"),
    (one_of("linear.out_features", 32, 64), True, "one of (32, 64)", "64"),
    (one_of("linear.out_features", 32), False, "one of (32,)", "64"),
    (at_least("linear.in_features", 64), True, ">= 64", "64"),
    (at_least("linear.in_features", 65), False, ">= 65", "64"),
    (at_least("env.arch", (9, 0)), False, ">= (9, 0)", "(0, 0)"),
    (at_most("linear.in_features", 64), True, "<= 64", "64"),
    (at_most("linear.in_features", 63), False, "<= 63", "64"),
    (at_most("env.device", 2), False, "<= 2", "'cpu'"),
    (above("linear.in_features", 63), True, "> 63", "64"),
    (above("linear.in_features", 64), False, "> 64", "64"),
    (below("linear.in_features", 65), True, "< 65", "64"),
    (below("linear.in_features", 64), False, "< 64", "64"),
    (below("env.device", 2), False, "< 2", "'cpu'"),
    (multiple_of("linear.in_features", 32), True, "multiple of 32", "64"),
    (multiple_of("linear.in_features", 48), False, "multiple of 48", "64"),
    (multiple_of("env.rows_class", 32), True, "multiple of 32", "32"),
    (is_("linear.weight.dtype", BF16), True, "torch.bfloat16", "torch.bfloat16"),
    (is_("linear.weight.requires_grad", False), False, "False", "True"),
    (is_("linear.weight.quantized", None), True, "None", "None"),
    (is_("env.recipe.kind", "mxfp8"), True, "'mxfp8'", "'mxfp8'"),
    (is_("env.recipe.rounding", "single"), False, "'single'", "'per_op'"),
    (is_("env.device", "cpu"), True, "'cpu'", "'cpu'"),
    (is_("env.autocast", None), True, "None", "None"),
    (is_("env.grad", True), True, "True", "True"),
    (is_("linear.kind", "basic_linear"), True, "'basic_linear'", "'basic_linear'"),
    # what is absent is a miss under every word, never an error
    (is_("linear.bias", None), False, "None", "nothing"),
    (is_not("linear.bias", 1), False, "not 1", "nothing"),
    (one_of("env.recipe.margin", None), False, "one of (None,)", "nothing"),
    (at_least("linear.bias.dtype", 1), False, ">= 1", "nothing"),
    (multiple_of("env.recipe.margin.more", 2), False, "multiple of 2", "nothing"),
    (at_least("env.autocast", 1), False, ">= 1", "None"),
    (multiple_of("env.device", 2), False, "multiple of 2", "'cpu'"),
    # so is what has another type, or no order
    (at_least("env.device", 1), False, ">= 1", "'cpu'"),
    (at_least("env.arch", 9), False, ">= 9", "(0, 0)"),
    (one_of("env.grad", 1), False, "one of (1,)", "True"),
    (one_of("env.grad", 1, True), True, "one of (1, True)", "True"),
    (is_not("env.grad", 1), True, "not 1", "True"),
    (is_("env.arch", (0, False)), False, "(0, False)", "(0, 0)"),
    (is_("linear.weight.shape", (64, 64)), True, "(64, 64)", "torch.Size([64, 64])"),
    (is_not("linear.weight.shape", (64, 64)), False, "not (64, 64)", "torch.Size([64, 64])"),
    (multiple_of("env.grad", 1), False, "multiple of 1", "True"),
    (is_not("env.recipe.rounding.upper", None), False, "a value", "nothing"),
]


@pytest.mark.cpu
@pytest.mark.row("X02")
@pytest.mark.parametrize(("guard", "passes", "wants", "got"), GUARDS, ids=lambda value: str(getattr(value, "reads", value)))
def test_x02_guards(guard, passes, wants, got):
    guarded = rule("pair", PAIR, when=(guard,))
    plan = planned(ops.Linear(64, 64, bias=False), ops.GELU(), rules=RuleSet((guarded,)), recipe=MXFP8BlockScaling())
    outcome = only(plan, "pair")
    assert guard.wanted_text == wants
    if passes:
        assert outcome.status == "fused"
    else:
        assert (outcome.status, outcome.guard, outcome.wanted, outcome.got) == ("missed", guard.reads, wants, got)


@pytest.mark.parametrize("path", ["role", "quantizer.fp8_dtype"])
def test_b2_a_guard_reads_the_cast(path):
    guarded = rule("cast", {"norm": "rms_norm", "quantize": "quantize"}, when=(is_not(f"quantize.{path}", None),))
    outcome = only(planned(ops.RMSNorm(64), ops.Linear(64, 64), rules=RuleSet((guarded,)), recipe=DelayedScaling()), "cast")
    assert outcome.status == "fused"


UNREADABLE = {
    # mistyped
    "env.arhc": "arch",
    "env.recipe.margn": "margin",
    "linear.in_feature": "in_features",
    "linear.weight.dtyp": "dtype",
    "act.cache_quantised_input": "cache_quantized_input",
    "quantize.rol": "role",
    "lineare.in_features": "linear",
    # not in the key, so that a plan would outlive the answer
    "env.recipe.sources": None,
    "env.recipe.digest": None,
    "env.count": None,
    "env.arch.major": None,
    "linear.name": None,
    "linear.training": None,
    "linear.weight.dtype.itemsize": None,
    "quantize.state": None,
    "quantize.state.scale": None,
}


@pytest.mark.row("X02")
@pytest.mark.parametrize("path", UNREADABLE)
def test_a_guard_on_what_cannot_be_read_dies_when_the_rule_enters_a_set(path):
    nearest = f"did you mean {UNREADABLE[path]!r}" if UNREADABLE[path] else "Cure: read "
    with pytest.raises(FusionError, match=rf"fusion 'r' guard '{path}': wants .*{nearest}"):
        RuleSet((rule("r", {**PAIR, "quantize": maybe("quantize")}, when=(is_not(path, None),)),))


def test_what_a_users_classes_declare_can_be_read():
    class ShiftedSpecial(ops.BasicOperation):
        spec: SpecialSpec
        gain: torch.nn.Parameter
        traits = frozenset(("especially_elementwise",))

    class UndeclaredSpecial(ops.BasicOperation):
        pass

    def made(word, path):
        return RuleSet((rule("r", {"a": word, "act": "gelu"}, when=(is_not(f"a.{path}", None),)),))

    for word in ("shifted_special", "especially_elementwise"):
        for path in ("shift", "gain", "gain.dtype", "weight.shape", "needs"):
            assert made(word, path)
        with pytest.raises(FusionError, match="did you mean 'shift'"):
            made(word, "shft")
    assert made("undeclared_special", "anything"), "it may be a parameter of any name"
    with pytest.raises(FusionError, match=r"'itemsize'.* Cure: read one of device, dtype"):
        made("undeclared_special", "anything.itemsize")
    assert ShiftedSpecial
    assert UndeclaredSpecial


def test_without_a_recipe_its_fields_are_absent():
    guarded = rule("pair", PAIR, when=(is_("env.recipe.backward_override", None),))
    outcome = only(planned(ops.Linear(64, 64, bias=False), ops.GELU(), rules=RuleSet((guarded,))), "pair")
    assert (outcome.status, outcome.got) == ("missed", "nothing")
    builtin = only(planned(ops.GELU(), ops.GELU(), rules=RULES), "backward_activation_bias")
    assert str(builtin).endswith("env.recipe: wants a recipe, got None")


def test_a_guard_reads_every_node_of_a_run_and_none_of_an_absent_place():
    pattern = {"linear": "basic_linear", "bias": maybe("bias"), "chain": run_of("constant_scale", low=1)}
    guarded = rule("chain", pattern, when=(one_of("chain.scale", 2.0, 3.0), is_("bias.size", 64)))

    def status(*scales: float) -> Outcome:
        modules = (ops.Linear(64, 64, bias=False), *(ops.ConstantScale(scale) for scale in scales))
        return only(planned(*modules, rules=RuleSet((guarded,))), "chain")

    assert status(2.0, 3.0).status == "fused"
    assert (status(2.0, 4.0).status, status(2.0, 4.0).got) == ("missed", "4.0")


def test_a_narrowed_rule_keeps_its_guards():
    first = rule("pair", PAIR, when=(is_("linear.in_features", 64),))
    narrowed = first.narrowed(at_least("linear.out_features", 128))
    assert narrowed.when[:1] == first.when
    plan = planned(ops.Linear(64, 64, bias=False), ops.GELU(), rules=RuleSet((narrowed,)))
    assert (only(plan, "pair").status, only(plan, "pair").guard) == ("missed", "linear.out_features")


# -- who claims --------------------------------------------------------------------------------------------------------------


def test_earlier_rules_claim_first_and_priority_overrules_order():
    wide, narrow = rule("wide", {"linear": "basic_linear", "rest": run_of("elementwise", low=1)}), rule("narrow", PAIR)
    modules = (ops.Linear(64, 64, bias=False), ops.GELU(), ops.ConstantScale(2.0))

    def fusions(*rules: Fusion) -> tuple[str, ...]:
        return planned(*modules, rules=RuleSet(rules)).fusions

    assert fusions(wide, narrow) == ("wide",)
    assert fusions(narrow, wide) == ("narrow",)
    assert fusions(wide, replace(narrow, priority=1)) == ("narrow",)
    assert fusions(replace(wide, priority=2), replace(narrow, priority=1)) == ("wide",)
    shadowed = only(planned(*modules, rules=RuleSet((wide, narrow))), "narrow")
    assert (shadowed.status, shadowed.by, shadowed.ops) == ("shadowed", "wide", ("0:basic_linear", "1:gelu"))


def test_a_run_stops_at_a_claimed_node():
    pair = rule("pair", {"act": "gelu", "scale": "constant_scale"})
    chain = rule("chain", {"chain": run_of("elementwise", low=1)})
    modules = (ops.ReLU(), ops.ReLU(), ops.GELU(), ops.ConstantScale(2.0), ops.ReLU(), ops.ReLU())
    plan = planned(*modules, rules=RuleSet((pair, chain)))
    assert [(o.status, o.ops) for o in outcomes(plan, "chain")] == [
        ("fused", ("0:relu", "1:relu")),
        ("shadowed", ("2:gelu", "3:constant_scale", "4:relu", "5:relu")),
        ("fused", ("4:relu", "5:relu")),
    ]


ENV = Env(recipe=None, amax_group=None, grad=True, autocast=None, device="cpu", arch=(0, 0), rows_class=32, aligned=True, level=2)
WORDS = ("relu", "gelu", "silu", "elementwise")
PLACES = st.one_of(st.sampled_from(WORDS).map(make) for make in (one, maybe, run_of))
PATTERNS = st.lists(PLACES, min_size=1, max_size=3).filter(lambda places: any(place.low for place in places))


@pytest.mark.parametrize(
    "pattern",
    ["elementwise* quantize", "gelu? elementwise+ relu* elementwise* quantize", "relu{1,3} elementwise+ silu"],
)
def test_a_pattern_that_fits_nowhere_asks_of_each_node_a_few_times(pattern, monkeypatch):
    """However many places could take it, and wherever a match could begin."""
    names = ", ".join(term.name for term in terms_of(pattern))
    rule = fusion("rule", pattern, forward=eval(f"lambda x, *, {names}: x"))
    asked, accepts = [], Term.accepts
    monkeypatch.setattr(Term, "accepts", lambda term, node: asked.append(1) or accepts(term, node))
    counts = []
    for length in (50, 200):
        asked.clear()
        planned(*(op() for _ in range(length) for op in (ops.ReLU, ops.GELU)), rules=RuleSet((rule,)))
        counts.append(len(asked))
    assert counts[1] <= 4 * counts[0]


@settings(max_examples=100)
@hypothesis.given(
    st.lists(st.sampled_from(("relu", "gelu", "silu")), min_size=1, max_size=9), st.sets(st.integers(1, 8), max_size=3), PATTERNS
)
@hypothesis.example(["gelu", "relu", "relu"], {1}, [maybe("gelu"), one("relu"), one("relu")])
def test_places_take_what_those_of_a_regular_expression_take_up_to_a_break(kinds, broken, places):
    """From left to right as many nodes as they can, up to where a value leaves the chain; two at least, or the only one."""
    made = rule("rule", dict(zip("abc", places)))
    # A break: the node reads another value than the one before it made.
    ends = [i for i in range(1, len(kinds) + 1) if i in broken or i == len(kinds)]
    nodes = [
        Node(i, kind, i, None, frozenset({"elementwise"}), inputs=(100 + i if i in broken else i,), outputs=(i + 1,))
        for i, kind in enumerate(kinds)
    ]
    groups, _ = cover.cover(Graph.of(nodes, (), (len(nodes),), ()), ENV, (made,), "forward", {})
    signs = {"relu": "r", "gelu": "g", "silu": "s", "elementwise": "[rgs]"}
    counted = [(*(signs[word] for word in place.words), place.low, place.high or "") for place in made.pattern]
    expression = re.compile("".join(f"({sign}{{{low},{high}}})" for sign, low, high in counted))
    text, wanted, start = "".join(signs[kind] for kind in kinds), [], 0
    while start < len(nodes):
        found = expression.match(text, start, next(end for end in ends if end > start))
        if found is not None and found.end() - start >= (1 if made.single else 2):
            wanted.append(tuple(tuple(range(*found.span(i + 1))) for i in range(len(places))))
            start = found.end()
        else:
            start += 1
    assert [group.binding for group in groups] == wanted


def test_a_rule_fires_at_every_place():
    modules = [op for _ in range(3) for op in (ops.Linear(64, 64, bias=False), ops.GELU())]
    plan = planned(*modules, rules=RuleSet((rule("pair", PAIR),)))
    assert [outcome.ops for outcome in outcomes(plan, "pair")] == [(f"{i}:basic_linear", f"{i + 1}:gelu") for i in (0, 2, 4)]


def test_a_single_node_is_no_fusion():
    plan = planned(
        ops.GELU(), ops.Linear(64, 64, bias=False), rules=RuleSet((rule("chain", {"chain": run_of("elementwise", low=1)}),))
    )
    assert only(plan, "chain").status == "absent"


@pytest.mark.parametrize(
    ("level", "rounding", "status"),
    [(0, "per_op", "missed"), (1, "per_op", "fused"), (1, "single", "missed"), (2, "single", "fused")],
)
def test_levels(level, rounding, status):
    rules, recipe = RuleSet(RULES.rules, level=level), MXFP8BlockScaling(rounding=rounding)
    plan = planned(ops.Linear(64, 64), ops.GELU(), rules=rules, recipe=recipe)
    found = [outcome.status for outcome in outcomes(plan, "epilogue")]
    assert found == [status]
    if status == "missed":
        reason = (only(plan, "epilogue").guard, only(plan, "epilogue").wanted)
        assert reason == (("env.level", ">= 1") if level == 0 else ("env.rounding", "'per_op'"))
    assert {outcome.rule for outcome in plan.outcomes} == set(RULES.names)
    assert level > 0 or not plan.fusions


def test_a_value_with_another_reader_is_not_hidden():
    """Forward and joint rules keep values that leave the pipeline or go through a channel."""
    pattern = {"linear": "basic_linear", "tap": "make_extra_output", "act": "gelu"}
    implementations = {"forward": lambda x, *, linear, tap, act: x, "backward": lambda dy, *, linear, tap, act: dy}

    def modules() -> tuple[torch.nn.Module, ...]:
        return ops.Linear(64, 64, bias=False), ops.MakeExtraOutput(), ops.GELU()

    ends = fusion("ends", {"act": "gelu", "tap": "make_extra_output"}, forward=lambda x, *, act, tap: x)
    assert only(planned(ops.GELU(), ops.MakeExtraOutput(), rules=RuleSet((ends,))), "ends").status == "absent"
    for given in (("forward",), ("forward", "backward")):
        made = fusion("hides", pattern, **{name: implementations[name] for name in given})
        assert only(planned(*modules(), rules=RuleSet((made,))), "hides").status == "absent"
    backward = fusion("sums", pattern, backward=implementations["backward"])
    assert only(planned(*modules(), rules=RuleSet((backward,))), "sums").status == "fused"


def test_fusion_functions_make_a_plan_opaque():
    class Pair(ops.FusedOperation):
        pass

    def fuse(listed, *, recipe):
        return [Pair(listed[:2]), *listed[2:]]

    rules = RULES.with_function(FusionFunction("fuse", "forward", fuse))
    plan = planned(ops.Linear(64, 64, bias=False), ops.GELU(), ops.ReLU(), rules=rules)
    assert plan.opaque
    assert (only(plan, "fuse").status, only(plan, "fuse").ops) == ("fused", ("0:basic_linear", "1:gelu"))
    assert (outcomes(plan, "epilogue")[0].status, outcomes(plan, "epilogue")[0].by) == ("shadowed", "Pair")
    assert not planned(ops.Linear(64, 64, bias=False), ops.GELU(), rules=RULES).opaque


# -- definitions -------------------------------------------------------------------------------------------------------------

BAD = {
    "parameters": lambda: fusion("bad", PAIR, forward=lambda x, *, linear, activation: x),
    "no implementation": lambda: fusion("bad", PAIR),
    "unknown root": lambda: rule("bad", PAIR, when=(is_("conv.kernel", 1),)),
    "one guard": lambda: rule("bad", PAIR, when=is_("linear.in_features", 1)),
    "a text as guards": lambda: rule("bad", PAIR, when="env.arch"),
    "nothing": lambda: rule("bad", {}),
    "nothing that must be there": lambda: rule("bad", {"act": maybe("gelu"), "chain": run_of("relu")}),
    "no pattern": lambda: fusion("bad", 5, forward=lambda x, *, linear: x),
    "a place called env": lambda: rule("bad", {"env": "linear", "act": "gelu"}),
    "two places of one name": lambda: Fusion("bad", (Term("a", ("gelu",)), Term("a", ("relu",))), forward=lambda x, *, a: x),
    "no terms": lambda: Fusion("bad", ("gelu",), forward=lambda x, *, gelu: x),
    "no function": lambda: fusion("bad", PAIR, forward="forward"),
    "a priority that is no integer": lambda: rule("bad", PAIR, priority=1.5),
    "an unknown field": lambda: fusion("bad", PAIR, forwrad=lambda x, *, linear, act: x),
    "an implementation without identity": lambda: fusion("bad", PAIR, forward=Unnamed()),
    "backward parameters": lambda: fusion("bad", PAIR, forward=lambda x, *, linear, act: x, backward=lambda dy, *, act: dy),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rules_die_at_construction(name):
    with pytest.raises((FusionError, KeyValueError), match=r"'bad'.*Cure: "):
        BAD[name]()


BAD_TERMS = {
    "no word": one,
    "an empty word": lambda: one(""),
    "a number": lambda: maybe(5),
    "a class": lambda: one(ops.GELU),
    "below none": lambda: run_of("gelu", low=-1),
    "a half": lambda: run_of("gelu", low=0.5),
    "none": lambda: Term("a", ("gelu",), low=0, high=0),
    "upside down": lambda: Term("a", ("gelu",), low=3, high=2),
    "a text for words": lambda: Term("a", "gelu"),
    "in a pattern": lambda: fusion("r", {"a": None}, forward=lambda x, *, a: x),
}


@pytest.mark.parametrize("name", BAD_TERMS)
def test_bad_places_die_at_construction(name):
    with pytest.raises(FusionError, match=r"pattern place .*wants at least one word, and a number of nodes.*Cure: write 'gelu'"):
        BAD_TERMS[name]()


def test_a_word_means_the_one_that_it_is_a_part_of():
    assert closest("Linear", ("listener", "basic_linear", "bias")) == "basic_linear"
    assert closest("listner", ("listener", "basic_linear")) == "listener"


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("geluu", "gelu"),
        ("elementwse", "elementwise"),
        ("quantise", "quantize"),
        ("LINEAR", "basic_linear"),
        ("linear", "basic_linear"),
    ],
)
def test_an_unknown_word_dies_when_the_rule_enters_a_set(word, nearest):
    unknown = rule("r", {"linear": "basic_linear", "act": maybe("relu", word)})
    for enter in (lambda: RuleSet((unknown,)), lambda: RULES.with_rule(unknown), lambda: opfuse.register_fusion(unknown)):
        with pytest.raises(FusionError, match=f"fusion 'r' place 'act': .*got {word!r}; did you mean {nearest!r}"):
            enter()
    assert "r" not in default_rules().names


def test_a_kind_is_known_once_its_class_exists():
    early = rule("early", {"linear": "basic_linear", "act": "made_after_its_rule"})
    with pytest.raises(FusionError, match=r"define \(import\) the class of your op before its rule is registered"):
        opfuse.register_fusion(early)

    class MadeAfterItsRule(ops.Activation):
        math = ops.GELU.math

    with opfuse.register_fusion(early):
        plan = planned(ops.Linear(64, 64, bias=False), MadeAfterItsRule(), rules=default_rules().without("epilogue"))
        assert only(plan, "early").status == "fused"


@pytest.mark.parametrize(
    "make",
    [
        lambda: RuleSet([rule("r", PAIR)]),
        lambda: RuleSet((print,)),
        lambda: RuleSet(functions=(print,)),
        lambda: RuleSet(level=3),
        lambda: RuleSet(level=True),
        lambda: RULES.with_rule(print),
        lambda: RULES.with_function(rule("r", PAIR)),
        lambda: RULES.replaced(print),
        lambda: opfuse.register_fusion(lambda ops, *, recipe: ops),
        lambda: FusionFunction("f", "forwards", lambda ops, *, recipe: ops),
        lambda: FusionFunction("f", "forward", lambda ops: ops),
        lambda: FusionFunction("f", "forward", lambda: ()),
        lambda: opfuse.ops.register_forward_fusion(lambda ops, recipes: ops),
        lambda: ops.Sequential(rules=(rule("r", PAIR),)),
        lambda: opfuse.use_rules(None).__enter__(),
    ],
)
def test_what_is_no_rule_or_rule_set(make):
    with pytest.raises(FusionError, match=r"wants .*, got .*Cure: "):
        make()


# -- one op ------------------------------------------------------------------------------------------------------------------


def doubled_gelu(x, *, act):
    return 2 * run_chain(x, [act], dtype=x.dtype)


def halved_gradient(dy, *, act):
    return run_chain_backward(dy, [act]) / 2


FACTORS = {("forward",): (2.0, 1.0), ("backward",): (1.0, 0.5), ("forward", "backward"): (2.0, 0.5)}


@pytest.mark.parametrize("recipe", [None, MXFP8BlockScaling()], ids=["none", "mxfp8"])
@pytest.mark.parametrize("sides", FACTORS, ids="+".join)
def test_a_pattern_of_one_op_gives_it_another_implementation(sides, recipe):
    """At the front, in the middle and at the end, beside the built-in rules, in each direction, bit for bit."""
    implementations = {"forward": doubled_gelu, "backward": halved_gradient}
    alone = fusion("alone", {"act": "gelu"}, **{side: implementations[side] for side in sides})

    def gelus(beside):
        for op in (ops.GELU, partial(ops.Linear, 64, 64), ops.GELU, partial(ops.Linear, 64, 64), ops.GELU):
            yield op()
            yield from (Scaled(*FACTORS[sides]) for _ in range(beside and op is ops.GELU))

    def results(rules, *, beside):
        torch.manual_seed(1)
        model = to(ops.Sequential(*gelus(beside), rules=rules), BF16)
        x = randn(32, 64, seed=3).requires_grad_()
        with opfuse.autocast(enabled=recipe is not None, recipe=recipe), plans_used() as plans:
            y = model(x)
        y.backward(randn(32, 64, seed=4))
        return [y, x.grad, *(p.grad for p in model.parameters())], [name for plan in plans for name in plan.fusions]

    found, fusions = results(RULES.with_rule(alone, first=True), beside=False)
    assert fusions.count("alone") == 3
    wanted, _ = results(RuleSet(), beside=True)
    assert all(same(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_pattern_of_one_op_is_told_as_fused():
    model = ops.Sequential(ops.ReLU(), ops.GELU(), rules=RuleSet((fusion("alone", {"act": "gelu"}, forward=doubled_gelu),)))
    text = str(opfuse.explain(model, torch.randn(4, 4)))
    assert "alone                        fused     1:gelu" in text


def test_a_producer_alone_is_no_chain():
    """Patterns that may match more take two nodes at least, as the built-in ones rely on."""
    chain = rule("chain", {"linear": "basic_linear", "chain": run_of("elementwise")})
    plan = planned(ops.Linear(64, 64, bias=False), ops.Reshape((32, 64)), rules=RuleSet((chain,)))
    assert only(plan, "chain").status == "absent"


BAD_GUARDS = {
    "unknown test": lambda: Guard("linear.in_features", "at_last", 1),
    "multiple of nothing": lambda: multiple_of("linear.in_features", 0),
    "multiple of a number": lambda: multiple_of("linear.in_features", 2.0),
    "multiple of True": lambda: multiple_of("linear.in_features", True),
    "a tensor": lambda: is_("linear.in_features", torch.zeros(1)),
    "a set": lambda: is_not("linear.in_features", {1}),
    "one of a text": lambda: Guard("linear.in_features", "one_of", "text"),
    "one of lists": lambda: one_of("linear.in_features", [1]),
}


@pytest.mark.parametrize("name", BAD_GUARDS)
def test_bad_guards_die_at_construction(name):
    with pytest.raises(FusionError, match=r"guard .*'linear.in_features'.*: wants .*, got .*Cure: "):
        BAD_GUARDS[name]()


def test_a_list_wanted_is_a_tuple():
    assert Guard("linear.in_features", "one_of", [32, 64]) == one_of("linear.in_features", 32, 64)
    assert is_("env.arch", [9, 0]).want == (9, 0)


@dataclass
class Unnamed:
    """A callable that no key can hold."""

    def __call__(self, x, *, linear=None, act=None, recipe=None):
        return x


class Fuser:
    """Fusion functions of every form; counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def method(self, listed, *, recipe):
        self.asked += 1
        return listed

    __call__ = method


@pytest.mark.parametrize("form", ["object", "bound method", "partial", "partial of a bound method"])
def test_s5_any_callable_is_a_fusion_function_by_identity(form):
    fuser = Fuser()

    def made() -> Any:
        new = {"object": fuser, "bound method": fuser.method, "partial": partial(Fuser.method, fuser)}
        return new[form] if form in new else partial(fuser.method)

    model, x = ops.Sequential(ops.GELU()), torch.randn(3)
    with opfuse.ops.register_forward_fusion(first := made(), name="counted"):
        model(x), model(x)
    assert fuser.asked == 1
    with opfuse.ops.register_forward_fusion(first, name="counted"):
        model(x)
    assert fuser.asked == 1, "the same function finds its plan"
    with opfuse.ops.register_forward_fusion(made(), name="counted"):
        model(x)
    assert fuser.asked == (2 if "partial" in form else 1)


@pytest.mark.parametrize(("func", "error"), [(Unnamed(), KeyValueError), ("text", FusionError), (None, FusionError)])
def test_s5_what_cannot_be_a_fusion_function_is_refused_at_registration(func, error):
    before = default_rules()
    with pytest.raises(error, match=r"fusion function 'wrong'.*: wants .*, got .*Cure: "):
        opfuse.ops.register_forward_fusion(func, name="wrong")
    assert default_rules() is before


def test_direction_follows_from_the_implementations():
    forward, backward = (lambda x, *, linear, act: x), (lambda dy, *, linear, act: dy)
    assert fusion("f", PAIR, forward=forward).direction == "forward"
    assert fusion("b", PAIR, backward=backward).direction == "backward"
    assert fusion("j", PAIR, forward=forward, backward=backward).direction == "joint"


def test_patterns_print_as_patterns():
    made = rule("r", {"a": one("x", "y"), "b": maybe("z"), "c": run_of("e"), "d": run_of("f", low=1), "g": ("p", "q")})
    assert [str(term) for term in made.pattern] == ["x|y", "z?", "e*", "f+", "p|q"]
    assert [term.name for term in made.pattern] == ["a", "b", "c", "d", "g"]


# -- running what was claimed ---------------------------------------------------------------------------------------------


def compared(made: Pipeline, rules: RuleSet, recipe: Recipe | None, **step: Any) -> Result:
    """A run under ``rules`` that equals the unfused one."""
    torch.manual_seed(0)
    model, tensors = made.model(), made.tensors()
    fused = run(model, *tensors, step=Step(recipe, rules, **step))
    unfused = run(model, *tensors, step=Step(recipe, UNFUSED, **step))
    names = [name for name in fused.tensors if not name.startswith("saved")]
    assert [name for name in differences(fused.tensors, unfused.tensors) if name in names] == []
    return fused


def test_a_group_reads_weights_that_are_cast_aside():
    """The product stands second in its group: its weight is cast before the group runs."""
    seen: list[Any] = []

    def forward(x: torch.Tensor, *, norm: Context, quantize: Context | None, linear: Context) -> torch.Tensor:
        y = norm.op.produce(norm, x)
        seen.append(linear.operands["weight"])
        return linear.op.produce(linear, y if quantize is None else quantize.op(y))

    made = fusion("norm_linear", {"norm": "norm", "quantize": maybe("quantize"), "linear": "basic_linear"}, forward=forward)
    fused = compared(pipeline(["rms norm", "linear"]), RuleSet((made,)), MXFP8BlockScaling())
    assert [outcome.status for outcome in fused.outcomes("norm_linear")] == ["fused"]
    assert all(isinstance(weight, QuantizedStorage) for weight in seen)


def test_a_joint_rule_sees_ops_that_want_no_gradient():
    """A frozen product at its start, and no gradient at all."""

    def forward(x: torch.Tensor, *, linear: Context, quantize: Context | None, bias: Context) -> torch.Tensor:
        y = run_chain(linear.op.produce(linear, x), [bias], dtype=x.dtype)
        assert quantize is None
        return y

    def backward(dy: torch.Tensor, *, linear: Context, quantize: Context | None, bias: Context) -> None:
        assert (linear.requires_grad, bias.requires_grad, quantize) == (False, True, None)
        run_chain_backward(dy, [bias])

    pattern = {"linear": "basic_linear", "quantize": maybe("quantize"), "bias": "bias"}
    rules = RuleSet((fusion("joint", pattern, forward=forward, backward=backward),))
    model = to(ops.Sequential(ops.Linear(64, 64)), BF16)
    model[0].weight.requires_grad_(False)
    for input_grad, grad in ((False, True), (False, False)):
        with torch.set_grad_enabled(grad):
            results = [run(model, randn(32, 64), step=Step(None, r, input_grad=input_grad)) for r in (rules, UNFUSED)]
        assert results[0].plans[0].fusions == ("joint",)
        assert differences(results[0].tensors, results[1].tensors) == []


def test_a_backward_rule_runs_only_where_its_last_output_got_a_gradient():
    """Here the extra output alone did, so that the ops run one by one."""

    def backward(dy: torch.Tensor, *, act: Context, copy: Context) -> torch.Tensor:
        raise AssertionError

    made = fusion("act_copy", {"act": "gelu", "copy": "make_extra_output"}, backward=backward)
    model, x = OperationFuser((ops.GELU(), ops.MakeExtraOutput()), rules=RuleSet((made,))), randn(4, 8).requires_grad_()
    _, extra = model(x)
    extra.sum().backward()
    again = x.detach().requires_grad_()
    ops.GELU()(again).sum().backward()
    assert torch.equal(x.grad, again.grad)


@pytest.mark.parametrize(("between", "status"), [({"cast": "quantize"}, "fused"), ({}, "absent")])
def test_a_joint_rule_names_the_cast_of_the_gradient_between_its_ops(between, status):
    pattern = {"linear": "basic_linear", **between, "bias": "bias"}
    either = rule("either", pattern).forward
    made = fusion("joint", pattern, forward=either, backward=either)
    plan = planned(ops.Linear(64, 64), rules=RuleSet((made,)), recipe=MXFP8BlockScaling())
    assert {outcome.status for outcome in outcomes(plan, "joint")} == {status}


def test_a_joint_rule_keeps_its_own_state():
    def forward(x: torch.Tensor, *, act: Context, scale: Context) -> torch.Tensor:
        y = run_chain(x, [act, scale], dtype=x.dtype)
        act.save_for_backward(x)
        scale.save_for_backward()
        return y

    def backward(dy: torch.Tensor, *, act: Context, scale: Context) -> torch.Tensor:
        (x,) = act.saved_tensors
        act.save(x=x)
        scale.save(x=None)
        return run_chain_backward(dy, [act, scale])

    made = fusion("act_scale", {"act": "gelu", "scale": "constant_scale"}, forward=forward, backward=backward)
    fused = compared(pipeline(["linear", "gelu", "scale", "linear"]), RuleSet((made,)), MXFP8BlockScaling())
    assert [(o.status, o.direction) for o in fused.outcomes("act_scale")] == [("fused", "joint")]
    assert "saved 2:gelu.0" in fused.tensors


@pytest.mark.parametrize(
    ("rule_name", "blocks"),
    [("backward_linear_add", ["tap in place", "linear without bias"]), ("backward_add_rms_norm", ["tap", "rms norm"])],
)
def test_a_gradient_that_arrives_at_an_extra_output_only_is_not_lost(rule_name, blocks):
    """The main output gets none: the group's end has nothing to do, the op in its midst has."""
    fused = compared(pipeline(blocks), RULES, MXFP8BlockScaling(), silent=frozenset((0,)))
    assert rule_name in [name for plan in fused.plans for name in plan.fusions]
    assert same(fused.tensors["grad of input"], randn(32, 64, seed=101))


def test_rule_sets_are_changed_by_name():
    a, b, c, z = (rule(name, PAIR) for name in "abcz")
    rules = RuleSet((a,)).with_rule(b).with_rule(c, first=True)
    assert rules.names == ("c", "a", "b")
    assert rules.without("a").names == ("c", "b")
    assert rules.replaced(a.narrowed(is_("linear.in_features", 1))).rules[1].when
    for change in (lambda: rules.with_rule(a), lambda: rules.without("z"), lambda: rules.replaced(z)):
        with pytest.raises(FusionError):
            change()
