"""Which modules are converted, by pattern and by file; and what that is expected to gain."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import opfuse
from opfuse.cli import main
from opfuse.config.load import check
from opfuse.config.policies import loads_policy
from opfuse.errors import ConfigError, ConversionError
from opfuse.recipes import RECIPES, Float8CurrentScaling, MXFP8BlockScaling
from tests.convert.blocks import Model

ROOT = Path(__file__).resolve().parents[2]
FP8 = Float8CurrentScaling()


def kept(report):
    """Paths of products that a policy keeps, without their last names."""
    return {entry.path.rpartition(".")[0] for entry in report.of("kept") if entry.got.startswith("your policy")}


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [("layers.0", {0}), ("layers.-1", {1}), ("*ayers.-2", {0}), ("layers.-1.mlp", {1}), ("-2.-1", {1}), ("layers.*.mlp", {0, 1})],
)
def test_layers_are_counted_from_both_ends(pattern, layers):
    report = opfuse.fuse_(Model(), FP8, policy={pattern: None})
    assert {int(re.search(r"layers\.(\d+)", path)[1]) for path in kept(report)} == layers


@pytest.mark.parametrize("pattern", ["layers.-3", "layers.-0", "layer.-1"])
def test_a_layer_that_there_is_not_is_an_error(pattern):
    with pytest.raises(
        ConversionError, match=r"patterns that match a module with weights, got .* as '[a-z.0-9]+', or a pattern"
    ) as raised:
        opfuse.fuse_(Model(), FP8, policy={pattern: None})
    (path,) = re.findall(r" as '(.*?)'", str(raised.value))
    assert opfuse.fuse_(Model(), FP8, policy={path: None})[path].got == f"your policy leaves it alone ({path!r}: None)"


ANY = {"*": "default"}


@pytest.mark.parametrize(
    ("policy", "order", "without"),
    [
        ({**ANY, "0": None}, ["0", "*"], []),
        ({**ANY, "-1": None}, ["-1", "*"], []),
        ({**ANY, "-1": FP8, "0": None}, ["-1", "0"], ["*"]),
        ({"0": MXFP8BlockScaling(), "2": "default", **ANY}, ["0", "2"], ["*"]),
        ({"0": None, "[0]": FP8, **ANY}, ["0", "*"], ["[0]"]),
    ],
)
def test_the_cure_of_an_order_that_decides_of_nothing_works(policy, order, without):
    def model():
        return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))

    with pytest.raises(ConversionError, match="listed before it, already covers") as raised:
        opfuse.fuse_(model(), FP8, policy=policy)
    cure = str(raised.value).partition("Cure: write the patterns in the order ")[2].partition("; ")[0]
    kept, _, left = cure.partition(", without ")
    typed, untyped = (list(ast.literal_eval(f"[{each}]")) for each in (kept, left))
    assert (typed, untyped) == (order, without)
    report = opfuse.fuse_(model(), FP8, policy={each: policy[each] for each in typed})
    said = {entry.got for entry in report.of("kept")}
    assert said == {f"your policy leaves it alone ({each!r}: None)" for each in typed if policy[each] is None}


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ({3: None}, r"wants patterns of paths, which are texts, got 3\. Cure: write policy="),
        (
            {"*": FP8, "layers.0": None},
            r"got 'layers\.0', which matches only modules that '\*', listed before it, already covers\. ",
        ),
        (
            {"*.act_fn": None},
            r"got '\*\.act_fn', which matches 'layers\.0\.mlp\.act_fn' and no module with weights\. Cure: write the path",
        ),
        ({"*": FP8, "layers.1": None, "layers.0": None}, r"got 'layers\.1', which matches only modules that '\*'"),
        ({"layers.-2": FP8, "layers.0.mlp": None}, r"Cure: write the patterns in the order 'layers\.0\.mlp', 'layers\.-2'; "),
    ],
)
def test_a_pattern_that_can_decide_of_nothing_is_told_why(policy, told):
    with pytest.raises(ConversionError, match=told) as raised:
        opfuse.fuse_(Model(), FP8, policy=policy)
    assert "did you mean" not in str(raised.value)


FILE = """\
version: 1
recipe: {kind: fp8_current}
policy:
  layers.-1.mlp: {kind: mxfp8, backward_override: dequantized}
  layers.-1: {kind: none}
  lm_head: {kind: default}
"""


def test_a_policy_in_a_file(tmp_path):
    path = tmp_path / "fp8.yaml"
    path.write_text(FILE)
    assert check(path) == ()
    choices = opfuse.load_policy(path)
    mlp = choices["policy"]["layers.-1.mlp"]
    assert choices["recipe"] == FP8
    assert mlp == MXFP8BlockScaling(backward_override="dequantized")
    assert mlp.sources["backward_override"].endswith("fp8.yaml:4:51")
    assert [*choices["policy"].values()] == [mlp, None, "default"]
    report = opfuse.fuse_(Model(), **choices)
    assert report["layers.1.mlp"].recipe == "MXFP8BlockScaling"
    assert report["lm_head"].recipe == "Float8CurrentScaling"
    assert report["layers.0.mlp"].recipe == "Float8CurrentScaling"


@pytest.mark.parametrize(
    ("line", "finding"),
    [
        ("  a: {kind: mxfp9}", "<text>:4:13: error[unknown-recipe]: there is no recipe 'mxfp9'"),
        ("  a: {kind: mxfp8, foo: 3}", "<text>:4:20: error[unknown-key]: unknown key 'foo'"),
        ("  a: none", "<text>:4:6: error[bad-value]: a wants a mapping"),
        ("  a: {kind: delayed, amax_history_len: 0}", "<text>:4:40: error[bad-value]: amax_history_len wants"),
    ],
)
def test_findings_have_places(line, finding):
    with pytest.raises(ConfigError, match=re.escape(finding)):
        loads_policy(f"version: 1\nrecipe: {{kind: none}}\npolicy:\n{line}\n")


@pytest.mark.parametrize("section", ["pipeline", "fusions", "data", "train"])
def test_a_section_of_another_kind_of_file_is_told_where_it_belongs(section):
    with pytest.raises(
        ConfigError, match=f"unknown key '{section}'\n(.*\n)*.*help: a file with a pipeline has no policy: opfuse.load"
    ):
        loads_policy(f"version: 1\nrecipe: {{kind: none}}\n{section}: {{}}\n")


def test_editors_have_a_schema_of_such_files(capsys):
    assert main(["schema", "--policy"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert (schema["required"], schema["additionalProperties"]) == (["version", "recipe"], False)
    said = schema["properties"]["policy"]["additionalProperties"]["discriminator"]["mapping"]
    assert said.keys() == {*RECIPES, "none", "default"}
    block = schema["$defs"]["Float8BlockScaling"]
    assert block["additionalProperties"] is False
    assert block["properties"]["backward_override"]["enum"] == [None, "high_precision", "dequantized"]


def test_the_file_of_the_page_is_read():
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "fuse.md").read_text(), re.DOTALL)
    assert len(loads_policy(text)["policy"]) == 4


# -- what is known of a model ----------------------------------------------------------------------------------------------------


class Deep(nn.Module):
    """Five layers, of which each has a large and a small matrix, and a head."""

    def __init__(self, layers=5):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"large": nn.Linear(4096, 4096), "small": nn.Linear(4096, 24)}) for _ in range(layers)
        )
        self.lm_head = nn.Linear(4096, 64)


def test_auto_leaves_what_is_known_in_high_precision_and_says_why():
    with torch.device("meta"):
        report = opfuse.fuse_(Deep(), FP8, policy="auto")
    for layer, place in ((0, "first"), (4, "last")):
        assert report[f"layers.{layer}.large"].got.startswith(f"policy='auto' leaves it in high precision: the {place} layer")
    assert {entry.path for entry in report.of("fused")} == {f"layers.{layer}.large" for layer in (1, 2, 3)}
    assert "sizes and rows must be multiples of 16" in report["layers.2.small"].got
    assert "the output head" in report["lm_head"].got
    with torch.device("meta"):
        few = opfuse.fuse_(Deep(3), FP8, policy="auto")
        emulated = opfuse.fuse_(Deep(), MXFP8BlockScaling(), policy="auto")
    assert "layers.0.large" in few.fused
    assert "layers.2.large" in emulated.fused


@pytest.mark.parametrize(("layers", "kept"), [(5, {0, 4}), (2, set())])
def test_auto_takes_no_experts_for_layers(layers, kept):
    """Of which each layer has more than there are layers."""
    with torch.device("meta"):
        model = nn.Module()
        model.layers = nn.ModuleList(
            nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(4096, 4096) for _ in range(8))}) for _ in range(layers)
        )
        report = opfuse.fuse_(model, FP8, policy="auto")
    plain = {entry.path for entry in report.of("kept")}
    assert plain == {f"layers.{layer}.experts.{expert}" for layer in kept for expert in range(8)}


def test_what_auto_leaves_is_converted_by_the_policy_that_its_cure_names():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    with pytest.raises(ConversionError) as refused:
        opfuse.fuse_(model, FP8, policy="auto")
    policy = re.search(r"pass policy=({.*}) in the place of 'auto'", str(refused.value))[1]
    assert opfuse.fuse_(model, FP8, policy=ast.literal_eval(policy)).fused


def test_auto_holds_for_a_model_that_is_one_layer():
    with pytest.raises(ConversionError, match="policy='auto' leaves it in high precision: casts take what products gain"):
        opfuse.fuse_(nn.Linear(64, 64), FP8, policy="auto")


def test_a_file_that_is_missing_is_told_without_names_of_configurations(tmp_path):
    with pytest.raises(ConfigError, match=r"error\[no-file\].*\n.*help: write the path of a file$"):
        opfuse.load_policy(tmp_path / "mxfp8.yaml")
    with pytest.raises(ConfigError, match="no-file"):
        opfuse.load_policy("quickstart")


def test_another_word_is_no_policy():
    with pytest.raises(ConversionError, match="wants 'auto', a mapping, or a function of module and path, got"):
        opfuse.fuse_(Model(), FP8, policy="automatic")
    with pytest.raises(ConversionError, match=r"Cure: write opfuse\.fuse_\(model, \*\*opfuse\.load_policy\('fp8\.yaml'\)\)\."):
        opfuse.fuse_(Model(), FP8, policy="fp8.yaml")
