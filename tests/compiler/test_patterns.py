"""The language of patterns: what is printed can be written, and every place takes what leaves enough for the next."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import opfuse
from opfuse import ops
from opfuse.compiler.cover import Fits
from opfuse.compiler.graph import Node
from opfuse.compiler.rules import Term, fusion, maybe, named, one, printed, run, terms_of
from opfuse.core.operation import BasicOperation
from opfuse.errors import FusionError
from opfuse.fusions import RULES
from opfuse.fusions.declared import KINDS

WORDS = st.sampled_from(("basic_linear", "bias", "gelu", "elementwise", "mine.gelu", "lambda", "env", "x-y"))
COUNTS = st.sampled_from(((1, 1), (0, 1), (0, None), (1, None), (2, 2), (2, None), (0, 3), (2, 5)))
PLACES = st.builds(
    lambda name, words, bounds: Term(name, tuple(words), *bounds),
    st.sampled_from(("", "", "act", "bias_2")),
    st.lists(WORDS, min_size=1, max_size=3),
    COUNTS,
)


@given(st.lists(PLACES, max_size=6))
@settings(max_examples=150)
def test_what_is_printed_can_be_written(places):
    pattern = named(places)
    text = printed(pattern)
    assert terms_of(text) == pattern
    assert terms_of(f"[{text.replace(' ', ', ')}]") == pattern
    assert terms_of(text.split()) == pattern
    assert printed(terms_of(text)) == text


@pytest.mark.parametrize("rule", RULES.rules, ids=lambda rule: rule.name)
def test_the_table_of_built_in_rules_can_be_written(rule):
    assert terms_of(printed(rule.pattern)) == rule.pattern


def test_every_spelling_is_one_pattern():
    wanted = (
        Term("linear", ("basic_linear",)),
        Term("bias", ("bias",), 0),
        Term("act", ("gelu", "silu")),
        Term("tail", ("relu",), 2, None),
    )
    spellings = (
        "linear=basic_linear bias? act=gelu|silu tail=relu{2,}",
        "[linear=basic_linear, bias?, act=gelu|silu, tail=relu{2,None}]",
        ["linear=basic_linear", "bias?", {"act": "gelu|silu"}, "tail=relu{2,}"],
        {"linear": "basic_linear", "bias": "bias?", "act": ("gelu", "silu"), "tail": "relu{2,}"},
        {"linear": one("basic_linear"), "bias": maybe("bias"), "act": "gelu|silu", "tail": run("relu", low=2)},
    )
    assert all(terms_of(spelling) == wanted for spelling in spellings)


def test_places_are_called_by_their_words():
    assert [term.name for term in terms_of("linear gelu|silu bias? my.op bias lambda")] == [
        *("linear", "gelu_or_silu", "bias", "my_op", "bias_2", "_lambda")
    ]


@pytest.mark.parametrize("text", ["gelu|", "|gelu", "gelu??", "a=b=c", "gelu{,2}", "gelu{x}", "=gelu", "a:gelu", "linear (bias)"])
def test_what_is_no_place_says_what_is(text):
    with pytest.raises(FusionError, match=r"wants a place such as act=gelu\|silu.*Cure: write 'basic_linear bias\?"):
        terms_of(text)


@pytest.mark.parametrize("pattern", [5, None, {1, 2}, [["gelu"]], [5], {"act": 5}, "gelu{3,2}", "gelu{0}", {"class": "gelu"}])
def test_what_is_no_pattern_is_refused(pattern):
    with pytest.raises(FusionError, match="Cure: "):
        fusion("bad", pattern, forward=lambda x, *, act: x)


def test_a_rule_is_written_as_it_is_printed():
    rule = fusion("mine", "linear=basic_linear bias? act=gelu|silu", forward=lambda x, *, linear, bias, act: x)
    assert rule == fusion(
        "mine", {"linear": "basic_linear", "bias": maybe("bias"), "act": ("gelu", "silu")}, forward=rule.forward
    )
    with pytest.raises(FusionError, match="got 'gellu'; did you mean 'gelu'"):
        opfuse.register_fusion(fusion("typo", "linear=basic_linear act=gellu", forward=lambda x, *, linear, act: x))


def nodes(*kinds):
    return [Node(i, kind, i, None, frozenset({"elementwise"} - {kind[:6]})) for i, kind in enumerate(kinds)]


@pytest.mark.parametrize(
    ("pattern", "kinds", "lengths"),
    [
        ("elementwise* gelu", "relu gelu gelu", [2, 1]),
        ("elementwise+ relu? gelu", "gelu relu gelu", [2, 0, 1]),
        ("relu? relu", "relu relu", [1, 1]),
        ("elementwise{1,2} relu{2}", "relu relu relu relu", [2, 2]),
        ("elementwise* gelu", "relu relu", None),
        ("relu? relu gelu", "relu gelu", [0, 1, 1]),
    ],
)
def test_a_place_leaves_enough_for_the_next(pattern, kinds, lengths):
    rule = fusion("r", pattern, forward=_implementation(pattern))
    found = Fits(rule, nodes(*kinds.split())).binding(0)
    assert (found and [len(place) for place in found]) == lengths


def _implementation(pattern):
    names = ", ".join(term.name for term in terms_of(pattern))
    return eval(f"lambda x, *, {names}: x")


def test_many_open_places_are_no_trouble():
    rule = fusion(
        "r", " ".join(["elementwise*"] * 30 + ["gelu"]), forward=_implementation(" ".join(["elementwise*"] * 30 + ["gelu"]))
    )
    assert Fits(rule, nodes(*["relu"] * 60)).binding(0) is None


def test_a_word_means_one_op_in_patterns_and_in_pipelines() -> None:
    """Every name of an op that is one node is a word of patterns, and that of several nodes is none."""
    for name, op in ops.OPS.items():
        assert op.kind == name
        assert (name in KINDS) == issubclass(op, BasicOperation)
