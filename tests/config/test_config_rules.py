"""The fusions section: narrowed, disabled and declared rules; a file can only add guards."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import opfuse
from opfuse import ops, recipes
from opfuse.compiler import rules as words
from opfuse.compiler.registry import RuleSet, default_rules
from opfuse.compiler.rules import (
    TESTS,
    Fusion,
    Guard,
    above,
    at_least,
    at_most,
    below,
    contradiction,
    fusion,
    is_,
    printed,
    terms_of,
)
from opfuse.config import loads
from opfuse.config.guards import WORDS as GUARD_WORDS
from opfuse.config.load import checked
from opfuse.errors import ConfigError, FusionError
from opfuse.fusions import RULES
from opfuse.fusions.declared import KINDS, WORDS, declared, extended, misfit
from tests.plans import plans_used

TOP = """version: 1
recipe: {kind: mxfp8}
pipeline:
  dtype: bfloat16
  ops:
    - {op: linear, in_features: 64, out_features: 64}
    - {op: gelu}
    - {op: linear, in_features: 64, out_features: 64}
fusions:
"""


def config(*rules, level="O2"):
    return loads(
        f"{TOP}  level: {level}\n  rules:\n" + "".join(f"    - {rule}\n" for rule in rules)
        if rules
        else f"{TOP}  level: {level}\n",
        "f.yaml",
    )


def finding(*rules):
    with pytest.raises(ConfigError) as raised:
        config(*rules)
    (found,) = raised.value.findings
    start = found.span.column - 1
    return found.code, found.source[start : start + found.span.width]


def outcomes(found, recipe=None):
    model = found.build()
    x = torch.randn(32, 64, dtype=found.dtype, requires_grad=True)
    with opfuse.autocast(recipe=recipe or found.recipe), plans_used() as plans:
        model(x).float().sum().backward()
    return {(outcome.rule, outcome.status) for outcome in plans[0].outcomes}, plans[0]


# -- guards ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "guard"),
    [
        ("env.arch: '>= 9.0'", Guard("env.arch", "at_least", (9, 0))),
        ("env.arch: 8.9", Guard("env.arch", "is", (8, 9))),
        ("env.arch: [8.9, '9.0', 10]", Guard("env.arch", "one_of", ((8, 9), (9, 0), (10, 0)))),
        ("env.rows_class: multiple of 32", Guard("env.rows_class", "multiple_of", 32)),
        ("producer.in_features: <= 128", Guard("producer.in_features", "at_most", 128)),
        ("producer.in_features: < 128", Guard("producer.in_features", "below", 128)),
        ("env.arch: '> 8.9'", Guard("env.arch", "above", (8, 9))),
        ("env.grad: true", Guard("env.grad", "is", True)),
        ("env.device: not cpu", Guard("env.device", "is_not", "cpu")),
        ("env.autocast: null", Guard("env.autocast", "is", None)),
        ("recipe.kind: mxfp8", Guard("env.recipe.kind", "is", "mxfp8")),
        ("recipe.backward_override: [null, dequantized]", Guard("env.recipe.backward_override", "one_of", (None, "dequantized"))),
        ("env.recipe.fp8_format: HYBRID", Guard("env.recipe.fp8_format", "is", opfuse.recipes.Format.HYBRID)),
        ("env.rounding: single", Guard("env.rounding", "is", "single")),
        ("producer.in_features: '>= 128'", Guard("producer.in_features", "at_least", 128)),
        ("producer.weight.dtype: bfloat16", Guard("producer.weight.dtype", "is", torch.bfloat16)),
        ("chain.p: 0", Guard("chain.p", "is", 0.0)),
        ("quantize.role: input", Guard("quantize.role", "is", "input")),
    ],
)
def test_guards_as_written(written, guard):
    (rule,) = (rule for rule in config(f"{{use: epilogue, when: {{{written}}}}}").rules.rules if rule.name == "epilogue")
    assert rule.when[-1] == guard
    assert type(rule.when[-1].want) is type(guard.want)


@pytest.mark.parametrize(
    ("written", "code", "under"),
    [
        ("env.arc: 9.0", "unknown-path", "env.arc"),
        ("arch: 9.0", "unknown-path", "arch"),
        ("env.recipe: mxfp8", "unknown-path", "env.recipe"),
        ("env.arch.major: 9", "unknown-path", "env.arch.major"),
        ("recipe.marginal: 1", "unknown-path", "recipe.marginal"),
        ("basic_linear.in_features: 1", "unknown-path", "basic_linear.in_features"),
        ("producer.colour: 1", "unknown-path", "producer.colour"),
        ("recipe.kind: mxfp", "bad-value", "mxfp"),
        ("recipe.kind: []", "bad-value", "[]"),
        ("recipe.kind: '>= mxfp8'", "bad-value", "'>= mxfp8'"),
        ("env.arch: new", "bad-value", "new"),
        ("recipe.kind: <= mxfp8", "bad-value", "<= mxfp8"),
        ("env.device: < cuda", "bad-value", "< cuda"),
        ("env.device: '> cuda'", "bad-value", "'> cuda'"),
        ("env.grad: 1", "bad-value", "1"),
        ("env.rows_class: multiple of 0", "bad-value", "multiple of 0"),
        ("env.arch: multiple of 2", "bad-value", "multiple of 2"),
        ("env.autocast: _inductor", "bad-value", "_inductor"),
        ("producer.normalized_shape: [[x]]", "bad-value", "[[x]]"),
        ("producer.in_features: 0", "bad-value", "0"),
    ],
)
def test_guards_that_cannot_be(written, code, under):
    assert finding(f"{{use: epilogue, when: {{{written}}}}}") == (code, under)


def test_every_word_has_a_function_and_a_place_on_the_page():
    without = {test for test in TESTS if not (hasattr(words, test) or hasattr(words, f"{test}_"))}
    assert without == set(), "write a function of that name beside is_not in opfuse/compiler/rules.py"
    page = (Path(words.__file__).parents[2] / "docs" / "fusions.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `\w+\(.*\)` \| `[\w.]+: \"?([^0-9`]+) .*` \|", page, re.MULTILINE)
    assert set(GUARD_WORDS) - set(told) == set(), "give these a row of docs/fusions.md, in the table of guards"


@pytest.mark.parametrize("word", [test for test, word in TESTS.items() if word.integers])
def test_a_word_about_integers_is_asked_of_integers_alone(word):
    written = TESTS[word].text.format(2)
    assert finding(f"{{use: epilogue, when: {{env.arch: {written}}}}}") == ("bad-value", written)


@pytest.mark.parametrize("word", [test for test, word in TESTS.items() if word.end])
def test_a_word_that_bounds_a_range_is_asked_of_values_in_order_alone(word):
    """Whatever words there are: the table says which need an order."""
    written = TESTS[word].text.format("cuda").replace("'", "")
    assert finding(f"{{use: epilogue, when: {{env.device: '{written}'}}}}") == ("bad-value", f"'{written}'")


@pytest.mark.parametrize(
    ("guards", "excludes"),
    [
        ((at_least("env.rows_class", 32), at_most("env.rows_class", 31)), True),
        ((at_least("env.rows_class", 32), at_most("env.rows_class", 32)), False),
        ((above("env.rows_class", 32), at_most("env.rows_class", 32)), True),
        ((at_least("env.rows_class", 32), below("env.rows_class", 32)), True),
        ((above("env.arch", (8, 9)), below("env.arch", (9, 0))), False),
        ((at_most("env.arch", (8, 9)), at_least("env.arch", (9, 0)), at_least("env.arch", (8, 0))), True),
        ((at_least("env.arch", (9, 0)), at_most("env.rows_class", 32)), False),
        ((is_("env.rows_class", 32), above("env.rows_class", 32)), True),
    ],
)
def test_guards_that_bound_a_range_from_both_ends_may_exclude_each_other(guards, excludes):
    for order in (guards, guards[::-1]):
        assert contradiction(order) == (guards[0].reads if excludes else None)


def test_rank11_a_narrowed_rule_keeps_its_own_guards():
    rules = config("{use: linear_add, when: {env.arch: '>= 9.0'}}").rules
    before = next(rule for rule in default_rules().rules if rule.name == "linear_add")
    after = next(rule for rule in rules.rules if rule.name == "linear_add")
    assert after.when == (*before.when, Guard("env.arch", "at_least", (9, 0)))
    assert after.forward is before.forward
    assert rules.names == default_rules().names


def test_rank11_narrowing_is_seen_in_the_outcomes():
    assert ("epilogue", "fused") in outcomes(config())[0]
    seen, _ = outcomes(config("{use: epilogue, when: {env.arch: '>= 9.0'}}"))
    assert ("epilogue", "missed") in seen
    assert ("epilogue", "fused") not in seen


def test_rank11_a_disabled_rule_is_gone():
    assert "epilogue" not in config("{disable: epilogue}").rules.names


@pytest.mark.parametrize(("level", "number"), [("O0", 0), ("O1", 1), ("O2", 2)])
def test_levels(level, number):
    assert config(level=level).rules.level == number
    assert (outcomes(config(level=level))[1].fusions == ()) == (number == 0)


def test_a_rule_with_priority_claims_first():
    assert next(rule for rule in config("{use: epilogue, priority: 5}").rules.rules if rule.name == "epilogue").priority == 5


# -- declared rules ----------------------------------------------------------------------------------------------------


def test_rank11_a_declared_rule_fuses_and_changes_no_bit():
    declared_rule = config("{name: mine, pattern: [basic_linear, bias, gelu, quantize], when: {recipe.kind: mxfp8}}")
    unfused = config(level="O0")
    seen, plan = outcomes(declared_rule)
    assert ("mine", "fused") in seen
    assert plan.fusions.index("mine") == 0, "declared rules come before the built-in ones"

    model, plain = declared_rule.build(), unfused.build()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    results = []
    for each in (model, plain):
        leaf = x.clone().requires_grad_()
        with opfuse.autocast(recipe=declared_rule.recipe):
            y = each(leaf)
        y.float().square().sum().backward()
        results.append((y, leaf.grad, *(p.grad for p in each.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_a_declared_rule_misses_by_its_guard():
    seen, _ = outcomes(
        config("{name: mine, pattern: [basic_linear, bias, gelu, quantize], when: {basic_linear.in_features: multiple of 128}}")
    )
    assert ("mine", "missed") in seen
    assert ("epilogue", "fused") in seen


def test_two_loads_of_one_file_make_one_rule_set():
    text = "{name: mine, pattern: [basic_linear, bias, gelu], when: {env.grad: true}}"
    assert config(text).rules.digest == config(text).rules.digest


def test_places_of_one_kind_are_numbered():
    assert [term.name for term in terms_of(("basic_linear", "bias", "gelu", "bias"))] == [
        "basic_linear",
        "bias",
        "gelu",
        "bias_2",
    ]
    rules = config("{name: mine, pattern: [basic_linear, bias, gelu, bias], when: {bias_2.size: 64}}").rules
    assert rules.rules[0].when == (Guard("bias_2.size", "is", 64),)


def test_an_addition_in_place_is_not_taken_for_an_elementwise_one():
    rule = declared("mine", ("basic_linear", "add_extra_input"))
    assert Guard("add_extra_input.in_place", "is", False) in rule.when


@pytest.mark.parametrize("pattern", [("basic_linear", "relu6"), (), ("basic_linear", "basic_linear"), ("gelu", "quantize")])
def test_declared_refuses_in_python_too(pattern):
    with pytest.raises(FusionError, match="mine"):
        declared("mine", pattern)
    with pytest.raises(FusionError, match="mine"):
        declared("mine", ("basic_linear", "gelu"), emit="magic")


@pytest.mark.parametrize(
    ("pattern", "under"),
    [
        ("[basic_linear, quantize, quantize]", "quantize"),
        ("[quantize, basic_linear]", "quantize"),
        ("[gelu, quantize]", "gelu"),
        ("[basic_linear]", "basic_linear"),
        ("[basic_linear, rms_norm]", "rms_norm"),
        ("[basic_linear, reshape, gelu]", "reshape"),
        ("[elementwise, gelu]", "elementwise"),
    ],
)
def test_rank11_patterns_that_can_never_match(pattern, under):
    assert finding(f"{{name: mine, pattern: {pattern}}}") == ("never-matches", under)


def test_every_pattern_that_is_accepted_can_match():
    for first in sorted(WORDS):
        for second in sorted(WORDS):
            if misfit("epilogue", terms_of((first, second)), "forward") is None:
                members = [kinds for kinds in KINDS.values() if first in kinds]
                assert all("producer" in kinds for kinds in members)
                assert declared("mine", (first, second)).direction == "forward"


@pytest.mark.parametrize(
    "pattern",
    [
        "basic_linear bias? gelu|silu elementwise* quantize?",
        "[basic_linear, bias?, gelu|silu, elementwise*, quantize?]",
        "[basic_linear, bias?, {gelu_or_silu: gelu|silu}, elementwise*, quantize?]",
        "{basic_linear: basic_linear, bias: bias?, gelu_or_silu: gelu|silu, elementwise: elementwise*, quantize: quantize?}",
    ],
)
def test_a_pattern_is_written_as_it_is_printed(pattern):
    rules = config(f"{{name: mine, pattern: {pattern}, when: {{basic_linear.in_features: 64}}}}")
    assert printed(rules.rules.rules[0].pattern) == "basic_linear bias? gelu|silu elementwise* quantize?"
    seen, plan = outcomes(rules)
    assert ("mine", "fused") in seen
    assert plan.outcomes[0].ops == ("2:basic_linear", "4:bias", "5:gelu", "6:quantize[input]")


@pytest.mark.parametrize(
    ("pattern", "code", "under"),
    [
        ("[basic_linear, gellu|silu]", "unknown-op", "gellu|silu"),
        ("[basic_linear, silu|gellu?]", "unknown-op", "silu|gellu?"),
        ("basic_linear gellu", "unknown-op", "basic_linear gellu"),
        ("{basic_linear: basic_linear, act: gellu}", "unknown-op", "gellu"),
        ("[basic_linear, {act: gellu}]", "unknown-op", "{act: gellu}"),
        ("[basic_linear, act=gelu=x]", "bad-value", "act=gelu=x"),
        ("[basic_linear, 5]", "bad-value", "5"),
        ("[basic_linear, null]", "bad-value", "null"),
        ("[basic_linear, 'gelu{9999}']", "bad-value", "'gelu{9999}'"),
        ("[basic_linear, [gelu]]", "bad-value", "[gelu]"),
        ("[basic_linear, {a: gelu, b: gelu}]", "bad-value", "{a: gelu, b: gelu}"),
        ("[basic_linear, class=gelu]", "bad-value", "class=gelu"),
        ("[basic_linear, recipe=gelu]", "bad-value", "recipe=gelu"),
        ("{basic_linear: basic_linear, env: gelu}", "bad-value", "env"),
        ("[a=basic_linear, a=gelu]", "bad-value", "a=gelu"),
        ("''", "bad-value", "''"),
        ("5", "bad-value", "5"),
        ("[]", "bad-value", "[]"),
        (f"[basic_linear{', gelu' * 40}]", "bad-value", f"[basic_linear{', gelu' * 40}]"[:30]),
        ("[basic_linear?, gelu]", "never-matches", "basic_linear?"),
        ("[basic_linear, quantize+]", "never-matches", "quantize+"),
        ("[basic_linear, gelu|quantize]", "never-matches", "gelu|quantize"),
        ("[basic_linear, gelu|add_extra_input]", "never-matches", "gelu|add_extra_input"),
    ],
)
def test_a_pattern_that_is_none_says_where(pattern, code, under):
    found = finding(f"{{name: mine, pattern: {pattern}}}")
    assert (found[0], found[1][: len(under)]) == (code, under)


def test_what_pipelines_have_as_one_op_and_patterns_as_several_is_told_how_to_write():
    with pytest.raises(ConfigError, match=r"help: write 'basic_linear bias\?': what pipelines call linear is several ops"):
        config("{name: mine, pattern: linear gelu}")
    rule = replace(declared("mine", ("basic_linear", "gelu")), pattern=terms_of("basic_linear=linear gelu"))
    with pytest.raises(FusionError, match=r"Cure: write 'basic_linear bias\?': it is several ops"):
        default_rules().with_rule(rule)


def test_an_input_called_x_is_a_place_as_well():
    seen, _ = outcomes(config("{name: mine, pattern: [basic_linear, bias, x=gelu]}"))
    assert ("mine", "fused") in seen


@pytest.mark.parametrize(
    ("rules", "code", "under"),
    [
        (("{use: epilog}",), "unknown-rule", "epilog"),
        (("{disable: epilog}",), "unknown-rule", "epilog"),
        (("{enable: epilogue}",), "missing-key", "{enable: epilogue}"),
        (("{use: epilogue, wen: {}}",), "unknown-key", "wen"),
        (("{name: mine, pattern: [basic_linear, gelu], emit: magic}",), "bad-value", "magic"),
        (("{name: 'not a name', pattern: [basic_linear, gelu]}",), "bad-value", "'not a name'"),
        (("{name: epilogue, pattern: [basic_linear, gelu]}",), "duplicate-rule", "epilogue"),
        (("{disable: epilogue}", "{use: epilogue}"), "duplicate-rule", "{use: epilogue}"),
        (("{use: backward_activation_bias, when: {recipe.backward_override: dequantized}}",), "never-matches", None),
        (("{name: a, pattern: [basic_linear, gelu]}", "{name: b, pattern: [basic_linear, gelu]}"), "shadowed-rule", "b"),
        (("{name: a, pattern: [basic_linear, bias]}", "{name: b, pattern: [basic_linear, bias, gelu]}"), "shadowed-rule", "b"),
        (
            ("{name: a, pattern: [gemm, activation]}", "{name: b, pattern: [basic_linear, gelu], when: {env.grad: true}}"),
            "shadowed-rule",
            "b",
        ),
        (
            (
                "{name: a, pattern: [basic_linear, gelu], when: {env.grad: true}}",
                "{name: b, pattern: [basic_linear, gelu], when: {env.grad: true}}",
            ),
            "shadowed-rule",
            "b",
        ),
        (
            ("{name: a, pattern: [basic_linear, gelu]}", "{name: b, pattern: [basic_linear, gelu], priority: -1}"),
            "shadowed-rule",
            "b",
        ),
        (
            ("{name: a, pattern: [basic_linear, elementwise*]}", "{name: b, pattern: [basic_linear, bias?, gelu]}"),
            "shadowed-rule",
            "b",
        ),
        (
            (
                "{name: a, pattern: [basic_linear, act=elementwise+], when: {basic_linear.in_features: 64}}",
                "{name: b, pattern: [first=basic_linear, bias?, gelu], when: {first.in_features: 64}}",
            ),
            "shadowed-rule",
            "b",
        ),
    ],
)
def test_rank11_rules_that_cannot_be(rules, code, under):
    found = finding(*rules)
    assert found[0] == code
    assert under is None or found[1] == under


@pytest.mark.parametrize(
    "rules",
    [
        ("{name: a, pattern: [basic_linear, gelu], when: {env.grad: true}}", "{name: b, pattern: [basic_linear, gelu]}"),
        (
            "{name: a, pattern: [basic_linear, gelu]}",
            "{name: b, pattern: [basic_linear, gelu], priority: 1, when: {env.grad: true}}",
        ),
        ("{name: a, pattern: [basic_linear, gelu]}", "{name: b, pattern: [basic_linear, activation]}"),
        ("{name: a, pattern: [basic_linear, bias, gelu]}", "{name: b, pattern: [basic_linear, bias]}"),
        ("{name: a, pattern: [basic_linear, bias, gelu|silu]}", "{name: b, pattern: [basic_linear, bias, gelu|relu]}"),
        ("{name: a, pattern: [basic_linear, bias, elementwise+]}", "{name: b, pattern: [basic_linear, bias, gelu?]}"),
        ("{name: a, pattern: [basic_linear, dropout+], when: {dropout.p: 0}}", "{name: b, pattern: [basic_linear, dropout]}"),
    ],
)
def test_rules_that_leave_something_to_each_other(rules):
    assert config(*rules).rules.names[:2] == ("a", "b")


def test_a_rule_registered_in_python_has_a_name_in_files_too():
    with opfuse.register_fusion(declared("of_python", ("basic_linear", "gelu"))):
        rules = config("{use: of_python, when: {env.grad: true}}").rules
        assert "of_python" in rules.names
    assert finding("{use: of_python}") == ("unknown-rule", "of_python")


def test_a_registered_function_can_be_disabled_but_not_narrowed():
    def function(ops, *, recipe):
        return ops

    with opfuse.ops.register_forward_fusion(function, name="by_function"):
        assert finding("{use: by_function, when: {env.grad: true}}") == ("bad-value", "by_function")
        assert "by_function" not in config("{disable: by_function}").rules.names


# -- order and expectations ----------------------------------------------------------------------------------------------


def names(*rules, direction="forward"):
    return [rule.name for rule in config(*rules).rules.of(direction)]


def test_a_rule_claims_before_or_after_another():
    built_in = [rule.name for rule in RULES.rules if rule.direction == "forward"]

    def put(name, *, before, among=built_in):
        rest = [each for each in among if each != name]
        return [*rest[: rest.index(before)], name, *rest[rest.index(before) :]]

    assert names("{use: elementwise, before: epilogue}") == put("elementwise", before="epilogue")
    assert names("{use: linear_scale_add, after: linear_add}")[:2] == ["linear_add", "linear_scale_add"]
    mine, behind = "name: mine, pattern: [grouped_linear, gelu]", built_in[built_in.index("linear_add") + 1]
    assert names(f"{{{mine}, after: linear_add}}") == put("mine", before=behind)
    first = names(f"{{{mine}, after: linear_add}}", "{use: linear_add, priority: 2}")[:3]
    assert first == ["linear_add", "mine", "linear_scale_add"]
    later = "{name: later, pattern: [grouped_linear, silu], before: linear_add}"
    assert names(f"{{{mine}, before: later}}", later)[1:4] == ["mine", "later", "linear_add"]
    assert names(later, f"{{{mine}, before: later}}")[1:4] == ["mine", "later", "linear_add"]


@pytest.mark.parametrize(
    ("rules", "code", "under"),
    [
        (("{use: epilogue, before: linear_ad}",), "unknown-rule", "linear_ad"),
        (("{use: epilogue, before: epilogue}",), "unknown-rule", "epilogue"),
        (("{use: epilogue, before: backward_elementwise}",), "bad-value", "backward_elementwise"),
        (("{use: epilogue, before: linear_add, priority: 1}",), "bad-value", "linear_add"),
        (("{use: epilogue, before: linear_add, after: elementwise}",), "bad-value", "elementwise"),
        (("{disable: linear_add}", "{use: epilogue, before: linear_add}"), "unknown-rule", "linear_add"),
        (("{use: epilogue, before: linear_add}", "{use: linear_add, before: epilogue}"), "bad-value", "linear_add"),
        (("{name: mine, pattern: [basic_linear, bias?, gelu], after: epilogue}",), "shadowed-rule", "mine"),
        (("{name: mine, pattern: [basic_linear, bias?, gelu], priority: -1}",), "shadowed-rule", "mine"),
        (("{use: epilogue, expect: {}}",), "bad-value", "{}"),
        (("{use: epilogue, expect: {fused: -1}}",), "bad-value", "-1"),
        (("{use: epilogue, expect: {fuse: 1}}",), "unknown-key", "fuse"),
    ],
)
def test_an_order_that_cannot_be(rules, code, under):
    assert finding(*rules) == (code, under)


def expected(*rules, top=TOP):
    return checked(f"{top}  rules:\n" + "".join(f"    - {rule}\n" for rule in rules), "f.yaml")


def test_what_rules_expect_is_counted():
    assert expected("{use: epilogue, expect: {fused: 2}}", "{use: linear_add, expect: {absent: 1, fused: 0}}") == ()
    assert expected("{use: epilogue, when: {env.arch: '>= 9.0'}, expect: {missed: 2, fused: 0}}") == ()
    assert (
        expected("{name: mine, pattern: [basic_linear, bias, gelu], expect: {fused: 1}}", "{use: epilogue, expect: {fused: 1}}")
        == ()
    )
    (found,) = expected("{use: epilogue, expect: {fused: 3}}")
    assert (found.code, found.span.line, found.span.column) == ("not-as-expected", 11, 39)
    assert found.message == "rule 'epilogue' is fused 2 times, not 3: 2 fused"
    assert found.help == "`opfuse explain --why-not epilogue` says why, place by place"
    (found,) = expected("{name: mine, pattern: [basic_linear, bias, gelu], when: {recipe.kind: nvfp4}, expect: {fused: 1}}")
    assert found.message == "rule 'mine' is fused 0 times, not 1: 1 missed"
    assert re.fullmatch(
        r"\d+:basic_linear .*: env\.recipe\.kind: wants 'nvfp4', got '\w+'; `opfuse explain --why-not mine` .*", found.help
    )


@pytest.mark.filterwarnings("error")
def test_expectations_are_counted_on_no_data():
    huge = TOP.replace("64", "131072")
    assert expected("{use: epilogue, expect: {fused: 2}}", top=huge) == ()


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ("{op: gelu}", "nothing tells the columns of the input"),
        ("{op: linear, in_features: 64, out_features: 64}\n    - {op: add_extra_input}", "wants no extra inputs, got 1"),
    ],
)
def test_what_cannot_be_counted_is_told(ops, message):
    top = f"version: 1\nrecipe: {{kind: none}}\npipeline:\n  ops:\n    - {ops}\nfusions:\n"
    (found,) = expected("{use: epilogue, expect: {fused: 1}}", top=top)
    assert found.code == "not-countable"
    assert message in found.message


def test_what_is_counted_is_what_a_call_does():
    seen, _ = outcomes(config())
    rules = [f"{{use: {rule}, expect: {{{status}: 1}}}}" for rule, status in seen if status == "absent"]
    assert expected(*rules) == ()


# -- directions ------------------------------------------------------------------------------------------------------------

CHAINS = (
    ("forward", "[bias, gelu, dropout, quantize]"),
    ("forward", "[elementwise{2,4}]"),
    ("forward", "[gelu?, dropout?, quantize]"),
    ("backward", "[quantize, bias, gelu]"),
    ("backward", "[quantize?, elementwise+]"),
    ("joint", "[bias, gelu]"),
    ("joint", "[elementwise+]"),
)


@pytest.mark.few
@pytest.mark.parametrize("recipe", ["{kind: none}", "{kind: mxfp8}", "{kind: mxfp8, backward_override: dequantized}"])
@pytest.mark.parametrize(("direction", "pattern"), CHAINS)
@pytest.mark.parametrize("cast", [False, True], ids=["", "autocast"])
def test_chains_of_files_change_no_bit_in_either_pass(recipe, direction, pattern, cast):
    rule = f"    - {{name: mine, pattern: '{pattern}', direction: {direction}, emit: chain}}\n"
    top = TOP.replace("{kind: mxfp8}", recipe).replace("{op: gelu}", "{op: gelu}\n    - {op: dropout, p: 0.5}")
    if cast:
        top = top.replace("dtype: bfloat16", "dtype: float32")
    fused, plain = loads(f"{top}  rules:\n{rule}"), loads(f"{top}  level: O0\n")
    model, other = fused.build(), plain.build()
    other.load_state_dict(model.state_dict())
    x = torch.randn(32, 64, dtype=fused.dtype)
    results = []
    for each in (model, other):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(0)
        context = opfuse.autocast(enabled=fused.recipe is not None, recipe=fused.recipe)
        with context, plans_used() as plans, torch.autocast("cpu", torch.bfloat16, enabled=cast):
            y = each(leaf)
        y.float().square().sum().backward()
        results.append((y, leaf.grad, *(p.grad for p in each.parameters())))
        seen = {(outcome.rule, outcome.status) for outcome in plans[0].outcomes}
        needs_cast = "quantize" in pattern and "?" not in pattern.replace("gelu?", "").replace("dropout?", "")
        has_cast = "none" not in recipe and not (direction == "backward" and "dequantized" in recipe)
        assert (("mine", "fused") in seen) == (each is model and (has_cast or not needs_cast))
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize(
    ("direction", "pattern", "under"),
    [
        ("backward", "[gelu, quantize]", "quantize"),
        ("joint", "[bias, gelu, quantize?]", "quantize?"),
        ("forward", "[quantize, gelu]", "quantize"),
        ("backward", "[basic_linear, gelu]", "basic_linear"),
        ("backward", "[gelu]", "gelu"),
        ("forward", "[quantize?]", "quantize?"),
        ("joint", "[bias, gelu|add_extra_input]", "gelu|add_extra_input"),
    ],
)
def test_chains_that_can_never_match(direction, pattern, under):
    rule = f"{{name: mine, pattern: {pattern}, direction: {direction}, emit: chain}}"
    assert finding(rule) == ("never-matches", under)


def test_an_epilogue_runs_forward_and_says_what_runs_backward():
    with pytest.raises(ConfigError, match=r"epilogue has no backward implementation, chain has one[\s\S]*write `emit: chain`"):
        config("{name: mine, pattern: [bias, gelu], direction: joint, emit: epilogue}")
    with pytest.raises(ConfigError, match="write `emit: chain`"):
        config("{name: mine, pattern: [bias, gelu]}")


def test_a_hundred_rules_are_no_trouble():
    def rule(i):
        guard = f"when: {{basic_linear.in_features: {i + 1}}}"
        return f"{{name: r{i}, pattern: 'basic_linear bias? gelu|silu|relu quantize?', {guard}, before: {after[i]}}}"

    after = [*(f"r{i}" for i in range(1, 100)), "epilogue"]
    last = ["epilogue", "elementwise", "dispatch_cast", "dispatch_exchange"]
    assert names(*map(rule, range(100)))[-104:] == [f"r{i}" for i in range(100)] + last


# -- rules that extend others ----------------------------------------------------------------------------------------------


def built_in(name: str) -> Fusion:
    return next(rule for rule in default_rules().rules if rule.name == name)


def test_a_rule_extends_one_that_is_there() -> None:
    """Under its implementation, its guards and more, and with the bits of the ops."""
    mine = (
        "{name: mine, extends: epilogue, pattern: [producer=basic_linear, chain=elementwise*], when: {producer.in_features: 64}}"
    )
    found = config(
        mine,
        "{name: mine_too, extends: backward_activation_bias, before: mine_back}",
        "{name: mine_back, extends: backward_elementwise}",
    )
    (first, second, third) = found.rules.rules[:3]
    assert (first.name, printed(first.pattern)) == ("mine", "producer=basic_linear chain=elementwise*")
    assert (second.name, second.pattern, second.direction) == (
        "mine_too",
        built_in("backward_activation_bias").pattern,
        "backward",
    )
    assert third.name == "mine_back"
    seen, _ = outcomes(found, recipes.MXFP8BlockScaling())
    assert {("mine", "fused"), ("epilogue", "shadowed"), ("mine_too", "fused")} <= seen
    torch.manual_seed(0)
    fused = found.build()
    plain = ops.Sequential(*fused, rules=replace(found.rules, level=0))
    x = torch.randn(32, 64, dtype=found.dtype)
    with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()):
        assert torch.equal(fused(x), plain(x))


@pytest.mark.parametrize(
    ("base", "pattern"),
    [
        ("epilogue", "producer=basic_linear chain=gelu"),
        ("epilogue", "producer=basic_linear chain=silu? quantize?"),
        ("backward_activation_bias", "quantize chain=gelu"),
    ],
)
def test_an_extension_may_have_one_node_where_its_rule_takes_several(base: str, pattern: str) -> None:
    rule, x, made = extended(built_in(base), "mine", terms_of(pattern)), torch.randn(32, 32), []
    between = [] if "silu" in pattern else [ops.GELU()]
    model = ops.Sequential(ops.Linear(32, 32, bias=False), *between, ops.Linear(32, 32, bias=False))
    for rules in (default_rules().with_rule(rule, first=True), default_rules().unfused):
        fused = ops.Sequential(*model, rules=rules)
        with plans_used() as plans, opfuse.autocast(recipe=recipes.MXFP8BlockScaling()):
            y = fused(x)
        made.append([y.detach(), *torch.autograd.grad(y.square().sum(), [*model.parameters()])])
        assert ("mine" in {o.rule for o in plans[0].outcomes if o.status == "fused"}) == (len(made) == 1)
    assert all(map(torch.equal, *made))


def test_an_extension_that_can_never_fire_is_refused_at_its_registration() -> None:
    """Behind the rule that it extends, however often, and under no more guards; or under guards that exclude each other."""
    part = extended(built_in("epilogue"), "part", terms_of("producer=basic_linear chain=gelu+"))
    smaller = extended(part, "smaller", terms_of("producer=basic_linear chain=gelu"))
    groups = extended(built_in("epilogue_groups"), "groups", built_in("epilogue_groups").pattern)
    for rule in (part, smaller, groups):
        with pytest.raises(FusionError, match=r"wants a rule that can fire, got one that claims after 'epilogue.*prepend=True"):
            opfuse.register_fusion(rule)
        for fires in (rule, replace(rule, priority=1)):
            with opfuse.register_fusion(fires, prepend=fires is rule):
                assert rule.name in default_rules().names
    with opfuse.register_fusion(part, prepend=True), pytest.raises(FusionError, match="after 'part'"):
        opfuse.register_fusion(smaller)
    contrary = extended(
        base := built_in("backward_activation_bias"),
        "contrary",
        base.pattern,
        when=(is_("env.recipe.backward_override", "dequantized"),),
    )
    with pytest.raises(FusionError, match=r"got guards on env.recipe.backward_override that exclude each other"):
        opfuse.register_fusion(contrary, prepend=True)


def test_a_guard_on_a_place_that_an_extension_leaves_out_keeps_its_rule_from_nothing() -> None:
    base = fusion(
        "base",
        "basic_linear gelu bias?",
        when=(is_("bias.bias.requires_grad", True),),
        forward=lambda x, *, basic_linear, gelu, bias: x,
    )
    rule = extended(base, "mine", terms_of("basic_linear gelu"))
    assert rule.when == ()
    with pytest.raises(FusionError, match="claims after 'base'"):
        RuleSet((base,)).with_rule(rule)


def test_a_guarded_rule_that_is_extended_keeps_its_guards() -> None:
    (added,) = config("{name: mine, extends: linear_add, pattern: [basic_linear, add=add_extra_input]}").rules.rules[:1]
    assert added.when == built_in("linear_add").when
    assert [term.name for term in added.pattern] == ["basic_linear", "add"]


@pytest.mark.parametrize(
    ("written", "code", "at"),
    [
        ("extends: epilog", "unknown-rule", "epilog"),
        ("extends: epilogue, pattern: [basic_linear, chain=gelu]", "never-matches", "basic_linear"),
        ("extends: epilogue, pattern: [producer=basic_linear, chain=reshape]", "never-matches", "chain=reshape"),
        ("extends: epilogue, pattern: [producer=basic_linear, 'quantize{2}']", "never-matches", "'quantize{2}'"),
        ("extends: epilogue, pattern: [chain=gelu, producer=basic_linear]", "never-matches", "chain=gelu"),
        ("extends: epilogue, pattern: [chain=gelu+]", "never-matches", "chain=gelu+"),
        ("extends: epilogue, pattern: [producer=basic_linear]", "never-matches", "producer=basic_linear"),
        (
            "extends: linear_scale_add, pattern: [basic_linear, scale=constant_scale?, add=add_extra_input]",
            "never-matches",
            "scale=constant_scale?",
        ),
        ("extends: epilogue, emit: chain", "unknown-key", "emit"),
        ("extends: epilogue, when: {linear.in_features: 64}", "unknown-path", "linear.in_features"),
        ("extends: epilogue, pattern: [producer, 'chain=gelu|silu|relu{1,}'], after: epilogue", "shadowed-rule", "mine"),
        ("extends: epilogue, pattern: [producer, 'chain=elementwise{40,}'], priority: -1", "shadowed-rule", "mine"),
        ("extends: backward_elementwise, when: {env.grad: false}", "never-matches", "{env.grad: false}"),
    ],
)
def test_an_extension_beyond_its_rule_is_a_finding(written: str, code: str, at: str) -> None:
    assert finding(f"{{name: mine, {written}}}") == (code, at)
