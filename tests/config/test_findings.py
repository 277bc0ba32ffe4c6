"""Findings: their exact shape, their codes and their places, all at once."""

import json
import pickle

import pytest

from opfuse.config import Finding, Span, load, loads
from opfuse.config.findings import as_github, as_json
from opfuse.config.load import checked
from opfuse.errors import ConfigError, OpfuseError

TOP = "version: 1\nrecipe: {kind: none}\npipeline:\n  ops:\n"


def findings(text):
    with pytest.raises(ConfigError) as raised:
        loads(text, "f.yaml")
    return raised.value.findings


def only(text):
    (finding,) = findings(text)
    return finding


def op(text):
    """The finding of a pipeline of one op, and the text under its carets."""
    finding = only(f"{TOP}    - {text}\n")
    start = finding.span.column - 1
    return finding.code, finding.source[start : start + finding.span.width], finding.help


def test_the_shape_is_that_of_a_compiler(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text(
        "version: 1\nrecipe: {kind: none}\npipeline: {ops: [{op: gelu}]}\nfusions:\n  rules: [{name: x,\n"
        "    pattern: [basic_linear, gellu]}]\n"
    )
    with pytest.raises(ConfigError) as raised:
        load("bad.yaml")
    assert str(raised.value) == (
        "bad.yaml:6:29: error[unknown-op]: pattern has no operation 'gellu'\n"
        "    6 |     pattern: [basic_linear, gellu]}]\n"
        "      |                             ^^^^^\n"
        "      = help: did you mean 'gelu'?"
    )


NORM_KEYS = "its keys are op, size, eps, zero_centered_gamma"


@pytest.mark.parametrize(
    ("text", "code", "under", "help"),
    [
        ("{op: gellu}", "unknown-op", "gellu", "did you mean 'gelu'?"),
        (
            "{op: linear, in_features: 4, out_featurs: 4, out_features: 4}",
            "unknown-key",
            "out_featurs",
            "did you mean 'out_features'?",
        ),
        ("{op: linear, in_features: 4}", "missing-key", "{op: linear, in_features: 4}", "add `out_features: ...`"),
        ("{op: linear, in_features: '4', out_features: 4}", "bad-value", "'4'", ""),
        ("{op: linear, in_features: true, out_features: 4}", "bad-value", "true", ""),
        ("{op: linear, in_features: 4.0, out_features: 4}", "bad-value", "4.0", ""),
        ("{op: linear, in_features: 99999999999, out_features: 4}", "bad-value", "99999999999", ""),
        ("{op: linear, in_features: 0, out_features: 4}", "bad-value", "0", ""),
        ("{op: rms_norm, normalized_shape: 4, size: 4}", "unknown-key", "normalized_shape", NORM_KEYS),
        ("{op: rms_norm, size: x}", "bad-value", "x", ""),
        ("{op: dropout, p: 1.5}", "bad-value", "1.5", ""),
        ("{op: dropout, p: .nan}", "bad-value", ".nan", ""),
        ("{op: gelu, extra_input: x}", "unknown-key", "extra_input", "its keys are op, cache_quantized_input"),
        ("{size: 4}", "missing-key", "{size: 4}", "add `op: ...`"),
        ("gelu", "bad-value", "gelu", "write `{op: gelu}`"),
        ("{op: add_extra_input, extra_input: x}", "unknown-channel", "x", ""),
        ("{op: make_extra_output, extra_output: x}", "unused-channel", "x", "name it as the extra_input of a later op"),
        ("{op: add_extra_input, extra_input: [x, y]}", "bad-value", "[x, y]", ""),
    ],
)
def test_ops(text, code, under, help):
    assert op(text)[:2] == (code, under)
    assert help is None or op(text)[2] == help


@pytest.mark.parametrize(
    ("recipe", "code", "under", "help"),
    [
        ("{kind: mxfp}", "unknown-recipe", "mxfp", "did you mean 'mxfp8'?"),
        ("{kind: custom}", "missing-key", "recipe", "add `qfactory: ...`"),
        (
            "{kind: custom, qfactory: mxfp8_fwd_nvfp_bwd}",
            "bad-value",
            "mxfp8_fwd_nvfp_bwd",
            "did you mean 'mxfp8_fwd_nvfp4_bwd'?",
        ),
        ("{kind: custom, qfactory: null}", "bad-value", "null", ""),
        ("{kind: mxfp8, backward_overide: null}", "unknown-key", "backward_overide", "did you mean 'backward_override'?"),
        ("{kind: mxfp8, backward_override: dequant}", "bad-value", "dequant", "write 'dequantized', its present name"),
        ("{kind: fp8_current, use_power_2_scales: 1}", "bad-value", "1", ""),
        ("{kind: fp8_current, fp8_format: E5M2}", "bad-value", "E5M2", ""),
        ("{kind: delayed, amax_history_len: 0}", "bad-value", "0", ""),
        (
            "{kind: delayed, backward_override: dequantized}",
            "refused-recipe",
            "{kind: delayed, backward_override: dequantized}",
            None,
        ),
        ("{kind: fp8_block, x_block_scaling_dim: 2}", "refused-recipe", "{kind: fp8_block, x_block_scaling_dim: 2}", None),
        ("{kind: nvfp4, row_scaled_activation: true, disable_rht: true}", "refused-recipe", None, None),
        ("{}", "missing-key", "{}", "add `kind: ...`"),
    ],
)
def test_recipes(recipe, code, under, help):
    finding = only(f"version: 1\nrecipe: {recipe}\npipeline: {{ops: [{{op: linear, in_features: 128, out_features: 128}}]}}\n")
    start = finding.span.column - 1
    assert finding.code == code
    assert under is None or finding.source[start : start + finding.span.width] == under
    assert help is None or finding.help == help


@pytest.mark.parametrize(
    ("text", "code", "place"),
    [
        ("", "bad-value", (1, 1)),
        ("version: 2\nrecipe: {kind: none}\npipeline: {ops: [{op: gelu}]}\n", "bad-value", (1, 10)),
        ("version: true\nrecipe: {kind: none}\npipeline: {ops: [{op: gelu}]}\n", "bad-value", (1, 10)),
        ("version: 1\npipeline: {ops: [{op: gelu}]}\n", "missing-key", (1, 1)),
        ("version: 1\nrecipe: {kind: none}\npipeline: {ops: []}\n", "bad-value", (3, 17)),
        ("version: 1\nrecipe: {kind: none}\npipeline: {ops: [{op: gelu}], dtype: bf16}\n", "bad-value", (3, 38)),
        ("version: 1\nrecipe: {kind: none}\npipeline: {ops: [{op: gelu}]}\ntrain: {steps: 0}\n", "bad-value", (4, 16)),
        ("version: 1\nrecipe: {kind: none}\npipeline: {ops: [{op: gelu}]}\ndata: {kind: imagenet}\n", "unknown-text", (4, 14)),
    ],
)
def test_sections(text, code, place):
    finding = only(text)
    assert (finding.code, (finding.span.line, finding.span.column)) == (code, place)


def test_everything_wrong_is_said_at_once_in_the_order_of_the_file():
    text = """version: 1
recipe: {kind: mxfp8, roundin: single}
pipeline:
  dtype: bf16
  ops:
    - {op: lineer}
    - {op: linear, in_features: x, out_features: 5}
fusions:
  level: O3
  rules:
    - {use: epilog}
    - {name: r, pattern: [gellu]}
trains: 3
"""
    found = findings(text)
    assert [finding.code for finding in found] == [
        *("unknown-key", "bad-value", "unknown-op", "bad-value", "bad-value", "unknown-rule", "unknown-op", "unknown-key"),
    ]
    assert [finding.span.line for finding in found] == [2, 4, 6, 7, 9, 11, 12, 13]


@pytest.mark.parametrize(
    ("recipe", "places"),
    [
        ("{kind: mxfp, roundin: single}", [("unknown-recipe", 16), ("unknown-key", 22)]),
        ("{kind: mxfp, rounding: sngle, fp8_format: E5M3}", [("unknown-recipe", 16), ("bad-value", 32), ("bad-value", 51)]),
        ("{kind: mxfp, amax_history_len: 3}", [("unknown-recipe", 16)]),  # of another recipe, which may be meant
        ("{kind: zzzzzzzz, roundin: single}", [("unknown-recipe", 16)]),
    ],
)
def test_an_unknown_recipe_hides_nothing(recipe, places):
    found = findings(f"version: 1\nrecipe: {recipe}\npipeline: {{ops: [{{op: gelu}}]}}\n")
    assert [(finding.code, finding.span.column) for finding in found] == places


def test_an_unknown_op_hides_nothing():
    found = findings(f"{TOP}    - {{op: lineer, in_features: x, out_featres: 4}}\n")
    assert [finding.code for finding in found] == ["unknown-op", "bad-value", "unknown-key"]


def test_an_unknown_word_hides_no_key_that_is_of_no_model_and_the_guess_lends_none_of_its_own():
    """gellu is taken for gelu, whose keys are none of the file's business."""
    found = findings(f"{TOP}    - {{op: gellu, in_features: 3, foo: 1, out_featres: 4}}\n")
    assert [(finding.code, finding.span.column, finding.help) for finding in found] == [
        ("unknown-op", 12, "did you mean 'gelu'?"),
        ("unknown-key", 35, ""),
        ("unknown-key", 43, "did you mean 'out_features'?"),
    ]


WHOLE = """version: 1
parameters: {hidden: 64}
fragments: {mlp: [{op: rms_norm, size: "${columns}"}]}
recipe: {kind: none}
pipeline:
  ops:
    - {op: linear, in_features: 32, out_features: "${hidden}"}
    - {op: make_extra_output, extra_output: skip}
    - {repeat: 2, ops: [{use: mlp, with: {columns: 64}}]}
    - {op: add_extra_input, extra_input: skip}
    - {op: linear, in_features: 64, out_features: 256}
fusions: {rules: [{name: mine, pattern: [basic_linear, gelu]}]}
data: {kind: text, path: text.txt, context: 4, embedding: 8}
train: {steps: 3}
watch: {every: 2}
"""


@pytest.mark.parametrize(
    ("word", "slip"),
    [
        *(("version", "verson"), ("recipe", "recpe"), ("pipeline", "pipelin"), ("fusions", "fusion"), ("data", "dat")),
        *(("parameters", "parametrs"), ("fragments", "fragmnts"), ("  ops", "  op"), ("in_features", "in_featurs")),
        *((", ops: [", ", opps: ["), (", with", ", wth"), ("extra_output: skip", "extra_output: skp")),
        *(("extra_input: skip", "extra_input: skp"), ("pattern", "patern"), ("path", "pth"), ("every", "evry")),
    ],
)
def test_a_slip_of_the_pen_is_one_finding(word, slip, tmp_path):
    """Not also what is missing, unused or unknown if the slip is not taken for what was meant."""
    (tmp_path / "text.txt").write_text("a text " * 100)
    assert checked(WHOLE, str(tmp_path / "f.yaml")) == ()
    with pytest.raises(ConfigError) as raised:
        checked(WHOLE.replace(word, slip, 1), str(tmp_path / "f.yaml"))
    (finding,) = raised.value.findings
    assert finding.help.startswith("did you mean '")


# -- what fits together ------------------------------------------------------------------------------------------------


def rehearsed(ops, *, recipe="{kind: none}", rest="train: {batch_size: 128}"):
    lines = "".join(f"    - {op}\n" for op in ops)
    return only(f"version: 1\nrecipe: {recipe}\npipeline:\n  ops:\n{lines}{rest}\n")


def test_sizes_that_do_not_meet_are_found_at_the_later_op():
    ops = ("{op: linear, in_features: 64, out_features: 32}", "{op: gelu}", "{op: linear, in_features: 64, out_features: 32}")
    finding = rehearsed(ops)
    assert (finding.code, finding.span.line) == ("does-not-fit", 7)
    assert "(..., 64)" in finding.message
    assert "(128, 32)" in finding.message


def test_a_sum_of_two_widths_says_both_and_what_they_are_of():
    linear = "{op: linear, in_features: 64, out_features: 32}"
    finding = rehearsed((f"{{residual: [{linear}]}}",))
    assert finding.message == "what goes into the block has 64 columns, and what it is added to has 32"
    assert finding.help == "have the layers before the sum end with out_features: 64"
    ops = "{op: make_extra_output, extra_output: residual}", linear, "{op: add_extra_input, extra_input: residual}"
    assert rehearsed(ops).message == "'residual' has 64 columns, and what it is added to has 32"


def test_every_op_that_does_not_fit_is_told():
    """And the file that is not there; but no op that fits once another one is mended."""
    ops = ("linear, in_features: 64, out_features: 32", "rms_norm, size: 96", "linear, in_features: 32, out_features: 64")
    lines = "".join(f"    - {{op: {op}}}\n" for op in (*ops, "linear, in_features: 48, out_features: 64"))
    text = "version: 1\nrecipe: {kind: none}\npipeline:\n  ops:\n" + lines
    data = "data: {kind: text, path: nowhere.txt, context: 4, embedding: 8}\n"
    with pytest.raises(ConfigError) as raised:
        checked(text + data)
    found = [(finding.code, finding.span.line) for finding in raised.value.findings]
    assert found == [*(("does-not-fit", line) for line in (5, 6, 8, 8)), ("no-file", 9)]


def test_data_that_the_first_op_does_not_take_are_named_with_their_columns():
    finding = rehearsed(("{op: rms_norm, size: 96}",), rest="data: {kind: pydoc_topics, context: 8, embedding: 16}")
    assert (finding.code, finding.span.line) == ("does-not-fit", 5)
    assert finding.message.endswith("a sample of the data has 128 columns, context 8 x embedding 16")


def test_a_recipe_that_cannot_take_a_size_is_found_at_the_op():
    finding = rehearsed(("{op: gelu}", "{op: linear, in_features: 40, out_features: 64}"), recipe="{kind: mxfp8}")
    assert (finding.code, finding.span.line) == ("does-not-fit", 6)
    assert "32" in finding.message


def test_a_batch_that_the_backward_pass_cannot_take_is_found():
    finding = rehearsed(
        ("{op: linear, in_features: 64, out_features: 64}",), recipe="{kind: mxfp8}", rest="train: {batch_size: 40}"
    )
    assert (finding.code, finding.span.line) == ("does-not-fit", 5)


@pytest.mark.parametrize(("columns", "classes", "line"), [(64, 256, 5), (256, 128, 6)])
def test_data_and_pipeline_have_the_same_columns(columns, classes, line):
    ops = (
        f"{{op: linear, in_features: {columns}, out_features: 256}}",
        f"{{op: linear, in_features: 256, out_features: {classes}}}",
    )
    assert rehearsed(ops, rest="data: {kind: pydoc_topics}").span.line == line


# -- forms -------------------------------------------------------------------------------------------------------------


def test_a_long_line_is_shown_around_the_value():
    finding = Finding("f.yaml", Span(1, 5000, 3), "bad-value", "no", "", "x" * 4999 + "abc" + "y" * 9000)
    _, line, carets = str(finding).split("\n")
    assert len(line) < 200
    assert line[carets.index("^") : carets.index("^") + 3] == "abc"


def test_nothing_unprintable_reaches_a_terminal():
    text = str(only('version: 1\nrecipe: {kind: "\\x1b[31m\\uD800"}\npipeline: {ops: [{op: gelu}]}\n'))
    assert all(char.isprintable() or char == "\n" for char in text)
    text.encode()


def test_json_and_github_say_the_same():
    finding = Finding("a:b.yaml", Span(3, 7, 2), "bad-value", "50 % of\nit", "help", "line")
    assert json.loads(as_json([finding])) == [
        {
            "path": "a:b.yaml",
            "line": 3,
            "column": 7,
            "width": 2,
            "code": "bad-value",
            "message": "50 % of\nit",
            "help": "help",
            "source": "line",
        }
    ]
    assert as_github([finding]) == "::error file=a%3Ab.yaml,line=3,col=7,title=bad-value::50 %25 of%0Ait (help)"


def test_the_error_holds_its_findings_also_in_another_process():
    with pytest.raises(OpfuseError) as raised:
        loads("version: 1\n")
    copy = pickle.loads(pickle.dumps(raised.value))
    assert copy.findings == raised.value.findings
    assert str(copy) == str(raised.value)


def test_a_file_that_is_not_there_is_a_finding(tmp_path):
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match="no-file"):
            load(path)
