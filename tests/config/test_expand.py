"""What a file says once and means several times is what it would mean written out, and findings stay where it is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import opfuse
from opfuse.cli.app import main
from opfuse.config import loads
from opfuse.config.load import checked
from opfuse.errors import ConfigError

HEAD = "version: 1\nrecipe: {kind: mxfp8}\n"
SHORT = (
    HEAD
    + """parameters: {hidden: 64, times: 2}
fragments:
  mlp:
    - residual:
        - {op: rms_norm, size: "${hidden}"}
        - {op: linear, in_features: "${hidden}", out_features: "${inner}"}
        - {op: gelu}
        - {op: linear, in_features: "${inner}", out_features: "${hidden}"}
pipeline:
  dtype: bfloat16
  ops:
    - repeat: ${times}
      ops:
        - {op: make_extra_output, extra_output: skip}
        - {use: mlp, with: {inner: 128}}
        - {op: add_extra_input, extra_input: skip}
    - {op: linear, in_features: "${hidden}", out_features: 32}
"""
)


def block(number: int) -> str:
    return f"""    - {{op: make_extra_output, extra_output: a{number}}}
    - {{op: make_extra_output, extra_output: b{number}}}
    - {{op: rms_norm, size: 64}}
    - {{op: linear, in_features: 64, out_features: 128}}
    - {{op: gelu}}
    - {{op: linear, in_features: 128, out_features: 64}}
    - {{op: add_extra_input, extra_input: b{number}}}
    - {{op: add_extra_input, extra_input: a{number}}}
"""


LONG = (
    HEAD + f"pipeline:\n  dtype: bfloat16\n  ops:\n{block(1)}{block(2)}    - {{op: linear, in_features: 64, out_features: 32}}\n"
)


def test_it_is_what_it_would_be_written_out() -> None:
    short, long = loads(SHORT), loads(LONG)
    assert [(entry.op, entry.arguments) for entry in short.pipeline] == [(entry.op, entry.arguments) for entry in long.pipeline]
    values = []
    for config in (short, long):
        torch.manual_seed(0)
        model = config.build()
        with opfuse.autocast(recipe=config.recipe):
            values.append(model(torch.ones(32, 64, dtype=torch.bfloat16)))
    assert torch.equal(*values)


def test_sources_are_lines_that_were_written() -> None:
    config = loads(SHORT, "mine.yaml")
    lines = [int(entry.source.split(":")[1]) for entry in config.pipeline]
    assert lines == [16, 6, 7, 8, 9, 10, 6, 18] * 2 + [19]


def test_findings_stand_where_it_is_written_once() -> None:
    text = SHORT.replace("{op: gelu}", "{op: gellu}")
    with pytest.raises(ConfigError) as caught:
        loads(text, "mine.yaml")
    assert [str(each).splitlines()[0] for each in caught.value.findings] == [
        "mine.yaml:9:16: error[unknown-op]: there is no op 'gellu'"
    ]


BAD = {
    "unknown-parameter": ('size: "${hidden}"}', 'size: "${hiden}"}', "did you mean 'hidden'?"),
    "unused-parameter": ("times: 2", "times: 2, idle: 3", "take it out"),
    "unused-fragment": ("fragments:\n", "fragments:\n  idle: [{op: gelu}]\n", "take it out"),
    "unknown-fragment": ("{use: mlp,", "{use: mpl,", "did you mean 'mlp'?"),
    "unknown-key": ("{use: mlp, with:", "{use: mlp, wiht:", "did you mean 'with'?"),
    "bad-value": ("times: 2", "times: none", ""),
    "missing-key": ("- repeat: ${times}\n      ops:", "- repeat: ${times}\n    - repeat: 1\n      ops:", "add `ops: [...]`"),
}


@pytest.mark.parametrize("code", BAD)
def test_what_is_wrong_is_found(code: str) -> None:
    old, new, help = BAD[code]
    assert old in SHORT
    with pytest.raises(ConfigError) as caught:
        loads(SHORT.replace(old, new), "mine.yaml")
    (found,) = [each for each in caught.value.findings if each.code == code]
    assert help in found.help
    assert found.span.line > 2
    assert [each.code for each in caught.value.findings if "unused" in each.code] == [code] * ("unused" in code)


ASTRAY = """version: 1
recipe: {kind: mxfp9}
parameters: {hidden: 64, other: 1}
pipeline:
  dtype: bfloat16
  ops:
    - {use: mlpp}
    - {op: linear, in_features: "${hiden}", out_features: 64, bias: maybe}
    - {op: lineaar}
    - {op: add_extra_input, extra_input: skip}
fusions: {level: O7}
"""


def test_what_can_be_known_beside_a_block_that_is_not_is_told_at_once() -> None:
    """Not what follows from the block alone, such as an input whose maker may be in it, and nothing of one place twice."""
    with pytest.raises(ConfigError) as raised:
        loads(ASTRAY)
    told = [(finding.span.line, finding.code) for finding in raised.value.findings]
    lines = {"mxfp9": 2, "mlpp": 7, "hiden": 8, "maybe": 8, "lineaar": 9, "O7": 11}
    codes = ["unknown-recipe", "unknown-fragment", "unknown-parameter", "bad-value", "unknown-op", "bad-value"]
    assert sorted(told) == sorted(zip(lines.values(), codes))


def test_what_nothing_uses_hides_nothing() -> None:
    with pytest.raises(ConfigError) as raised:
        loads(SHORT.replace("times: 2", "times: 2, other: 1").replace("out_features: 32", "out_features: 32, bias: maybe"))
    assert {finding.code for finding in raised.value.findings} == {"unused-parameter", "bad-value"}


def test_repetitions_count_among_the_ops_of_a_file() -> None:
    with pytest.raises(ConfigError, match="at most 256 ops, with all that it repeats"):
        loads(SHORT.replace("times: 2", "times: 100000"))


@pytest.mark.parametrize(
    "text",
    [
        "fragments: {a: [{use: a}]}\npipeline: {ops: [{use: a}]}\n",
        "fragments: {a: [{use: b}, {use: b}], b: [{use: a}]}\npipeline: {ops: [{use: a}]}\n",
        "parameters: 3\npipeline: {ops: []}\n",
        "fragments: {a: 3}\npipeline: {ops: [{use: a}]}\n",
        "pipeline: {ops: [{repeat: 3, ops: 4}]}\n",
        "pipeline: {ops: [{repeat: 200, ops: [{repeat: 200, ops: [{repeat: 200, ops: [{op: gelu}]}]}]}]}\n",
        "pipeline: {ops: [{residual: {op: gelu}}]}\n",
        "pipeline: {ops: [{use: [1]}]}\n",
        "pipeline: {ops: ${ops}}\n",
        "pipeline: {ops: [{op: '${op}'}]}\n",
    ],
)
def test_hostile_blocks_are_findings(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loads(HEAD + text)
    assert caught.value.findings


def test_the_starter_is_right_and_loads_for_a_loop_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    assert checked((tmp_path / "opfuse.yaml").read_bytes()) == ()
    config = opfuse.load("opfuse.yaml")
    with opfuse.autocast(recipe=config.recipe):
        assert config.build()(torch.ones(32, 256, dtype=torch.bfloat16)).shape == (32, 256)
    assert main(["init"]) == 1
    assert main(["init", "--force"]) == 0
